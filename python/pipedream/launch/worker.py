"""One worker of a run: its stage, its data, its channels, its loop.

    agree      rank 0's plan and seed are everybody's                         agreed_run.py
    read       the first minibatch, where data are read                       set_up.py
    share      rank 0's initial weights are everybody's                       set_up.py
    rehearse   each worker's stages, once: what crosses, and what it takes    set_up.py
    open       pool sealed, channels open to neighbours, in line and tree     stage_pool.py, worker_links.py
    train      next work item -> forward, backward or update -> completion    stage/stage_loop.py
    gather     final weights and results to rank 0, then a common farewell    gathering.py

Runs on the main thread of its process, which is the core's compute thread.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.common.errors import afterwards, describe_error, losses_kept, raise_failure
from pipedream.data.stream import ForwardedData, MinibatchStream, ReceivedStream
from pipedream.launch.agreed_run import AgreedRun, agree, wait_for
from pipedream.launch.devices import choose_device
from pipedream.launch.factor_choice import FactorChoice
from pipedream.launch.gathering import gather
from pipedream.launch.own_part import OwnPart
from pipedream.launch.set_up import Rehearsed, set_up
from pipedream.launch.stage_pool import StagePool
from pipedream.launch.worker_links import WorkerLinks, no_word
from pipedream.launch.worker_optimizers import WorkerOptimizers
from pipedream.links.channels import (
    BETWEEN_REPLICAS,
    INPUTS,
    TARGETS,
    RunChannel,
    channels_of_run,
    forwarded_name,
    tree_name,
)
from pipedream.links.device_memory import agree_on_device_memory, place_on_devices
from pipedream.links.rank_tree import parent_of
from pipedream.links.rendezvous import Rendezvous
from pipedream.links.replica_group import ReplicaGroup
from pipedream.model.layers import Model
from pipedream.model.loss_placement import loss_on
from pipedream.model.references import gradients_noticed
from pipedream.report.result import RunResult
from pipedream.stage.job import JobOptions, WorkerPlace
from pipedream.stage.stage_loop import WorkerLoop

__all__ = ["run_worker"]


def run_worker(
    place: WorkerPlace, options: JobOptions, model: Model, data: Iterable[Any] | ForwardedData
) -> RunResult:
    """This rank's part of the run; returns the whole run's result at every rank, what its trace shows at
    rank 0 only.

    Afterwards `model` holds the trained weights and buffers: of all stages at rank 0, and at the other
    ranks as options.gather says. Any failure is told to the other workers before it is raised here.
    """
    worker = _Worker(place)
    with afterwards(worker.close):
        try:
            with losses_kept(worker.losses):
                return worker.run(options, model, data)
        except BaseException as error:
            worker.links.say_why(describe_error(error))
            raise


class _Worker:
    """The phases, in the order of the module's docstring."""

    def __init__(self, place: WorkerPlace) -> None:
        self.links = WorkerLinks(place.rendezvous)
        self._place = place
        self._loop: WorkerLoop | None = None
        self._group: ReplicaGroup | None = None

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self.links.close()

    def losses(self) -> list[float]:
        """Of the minibatches that are done, as far as this worker knows."""
        return [] if self._loop is None else self._loop.losses

    def run(self, options: JobOptions, model: Model, data: Iterable[Any] | ForwardedData) -> RunResult:
        torch.set_num_threads(options.num_threads)
        _core.keep_freed_memory()
        rendezvous = self._place.rendezvous
        # Before join(): it keeps the GIL, which signs of life need.
        device = choose_device(self._place.local_rank)
        rendezvous.join(options.links.peer_timeout_s)
        rendezvous.enter("agreeing on the plan")
        run, stream = agree(self._place, options, model, data)
        part = OwnPart(run, device)
        loss_placed = contextlib.ExitStack()
        if run.reads_targets:
            loss_placed.enter_context(loss_on(options.loss_fn, device))
        with afterwards(part.give_back), afterwards(loss_placed.close):
            try:
                part.place()
                rehearsed = set_up(run, self.links, device, stream, part)
                return self._train(run, device, rehearsed, data, stream, part)
            except _core.RunFailure as failure:
                raise_failure(*failure.args)

    def _train(
        self,
        run: AgreedRun,
        device: torch.device,
        rehearsed: Rehearsed,
        data: Iterable[Any] | ForwardedData,
        stream: MinibatchStream,
        part: OwnPart,
    ) -> RunResult:
        self._place.rendezvous.enter("opening links")
        core = self.links.make_core(run, device)
        optimizers = WorkerOptimizers(run, FactorChoice(run, device, rehearsed.footprints))
        channels = _channels_of(run, core, device, rehearsed, data, optimizers)
        for channel in channels:
            channel.add_to(core, run.rank, run.plan)
        pool = StagePool(run, core, device, rehearsed.footprints, channels, optimizers)
        core.seal()
        self.links.connect(run, channels, "endpoints")
        self._group = _replica_group(run, core, device, self._place.rendezvous)
        self._place.rendezvous.leave()
        if isinstance(data, ForwardedData):
            stream = _received_stream(run, core, data)
        report: dict[str, Any] = {}  # a rank beyond the plan has nothing to report
        if run.own_stages():
            self._loop = _make_loop(pool, core, device, rehearsed, channels, stream, self._group)
            with gradients_noticed(run.parameters()):
                report = self._loop.train()
            _note_codecs(report, channels)
        part.take_back_others()
        return gather(pool.run, core, channels, report)


def _channels_of(
    run: AgreedRun,
    core: _core.Worker,
    device: torch.device,
    rehearsed: Rehearsed,
    data: Iterable[Any] | ForwardedData,
    optimizers: WorkerOptimizers,
) -> list[RunChannel]:
    options = run.options
    channels = channels_of_run(
        run.plan,
        run.schedule(),
        run.place.world_size,
        rehearsed.boundaries,
        optimizers.tie_specs(),
        data if isinstance(data, ForwardedData) else None,
        codec=options.links.codec,
        shards=optimizers.shards(),
    )
    return _placed_on_devices(run, core, device, channels) if options.links.places_on_devices else channels


def _placed_on_devices(
    run: AgreedRun, core: _core.Worker, device: torch.device, channels: list[RunChannel]
) -> list[RunChannel]:
    """The channels, with those between devices of one host that need no staging."""
    rank, links, rendezvous = run.rank, run.options.links, run.place.rendezvous
    on_host = device.type != "cuda"
    reach = agree_on_device_memory(
        core,
        rank,
        channels,
        on_host=on_host,
        publish=rendezvous.publish,
        wait_for=lambda keys: wait_for(rendezvous, keys, no_word) if keys else [],
    )
    between = [c for c in channels if c.stages is not None and rank in (c.sender, c.receiver)]
    for channel in between if links.transport == "ipc" or not on_host else []:
        why = reach[channel.sender, channel.receiver]
        if not why and channel.is_encoded:
            why = f"they travel encoded (codec {channel.codec})"
        links.check_reach(run.describe_ends(channel.sender, channel.receiver), why)
    return place_on_devices(channels, reach)


def _replica_group(
    run: AgreedRun, core: _core.Worker, device: torch.device, rendezvous: Rendezvous
) -> ReplicaGroup | None:
    """Of this worker's stage, where its replicas reduce together."""
    stages = run.plan.stages_of(run.rank) if run.options.reduces_together else []
    num_replicas = run.plan.stages[stages[0]].num_replicas if stages else 1
    if num_replicas == 1:
        return None
    neighbour = parent_of(run.rank) if run.rank > 0 else 1  # rank 1 is below rank 0
    return ReplicaGroup(
        rendezvous.store_for(f"replicas of stage {stages[0]}"),
        run.plan.replica_of(run.rank),
        num_replicas,
        device,
        bind_host=run.options.links.bind_host,
        # Waits for nothing, and raises what the links know.
        check_links=functools.partial(core.wait_until_sent, tree_name(run.rank, neighbour), 1 << 20),
    )


def _received_stream(run: AgreedRun, core: _core.Worker, data: ForwardedData) -> MinibatchStream:
    def receiver(channel: str) -> Callable[[], tuple[list[Tensor], int] | None]:
        def receive() -> tuple[list[Tensor], int] | None:
            # Reading data is the user's time, wherever they come from.
            item = core.receive_item(channel, counts_as_wait=False)
            assert item is not None  # there is no time-out
            if item.is_end:
                return None
            tensors = [from_dlpack(capsule) for capsule in item.take_tensors()]
            return tensors, item.fields.data_fingerprint

        return receive

    replica = run.plan.replica_of(run.rank) if run.own_stages() else 0
    inputs, targets = (forwarded_name(channel, replica) for channel in (INPUTS, TARGETS))
    return ReceivedStream(
        data, receiver(inputs) if run.reads_inputs else None, receiver(targets) if run.reads_targets else None
    )


def _make_loop(
    pool: StagePool,
    core: _core.Worker,
    device: torch.device,
    rehearsed: Rehearsed,
    channels: Iterable[RunChannel],
    stream: MinibatchStream,
    group: ReplicaGroup | None,
) -> WorkerLoop:
    run = pool.run
    own = [channel for channel in channels if run.rank in (channel.sender, channel.receiver)]
    return WorkerLoop(
        core,
        run.options,
        run.place,
        schedule=run.schedule(),
        prepared=pool.prepare(group),
        stream=stream,
        device=device,
        base_seed=run.base_seed,
        input_boundary=rehearsed.input_boundary,
        boundaries=rehearsed.boundaries,
        edges=[
            (channel.edge, channel.name)
            for channel in own
            if channel.edge is not None and channel.edge.kind not in BETWEEN_REPLICAS
        ],
        predicted=pool.predicted,
        torch_pool=pool.make_torch_pool(),
    )


def _note_codecs(report: dict[str, Any], channels: Iterable[RunChannel]) -> None:
    """Beside the figures of its channels: by which codec tensors really travel."""
    for channel in channels:
        if channel.name in report["channels"]:
            report["channels"][channel.name]["codec"] = channel.codec_used
