"""One worker of a run: its stage, its data, its channels, its loop.

    agree        rank 0's plan and seed are everybody's                        (rendezvous)
    share        rank 0's initial weights are everybody's                      (links/state_transfer.py)
    rehearse     each worker's stages, once: what crosses, and what it takes   (the same, and torch)
    open         pool sealed, channels open to neighbours, in line and tree    (core)
    train        next work item -> forward, backward or update -> completion   (core and torch)
    gather       final weights and results to rank 0, then a common farewell   (links/state_transfer.py)

Runs on the main thread of its process, which is the core's compute thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.budget.footprint import Footprint
from pipedream.budget.memory import (
    GRADIENTS,
    OFFLOADED_ACTIVATIONS,
    OFFLOADED_VERSIONS,
    OPTIMIZER_STATE,
    STASH,
    TIED_VERSIONS,
    TRANSIENT,
    WEIGHT_VERSIONS,
    MemoryPlan,
    choose_savings,
    model_bytes,
    native_step_bytes,
    num_activation_homes,
    predict_state_bytes,
    predict_step_bytes,
    slot_bytes,
)
from pipedream.budget.offload import (
    Offload,
    ResidentVersions,
    StageOffload,
    forced_offload,
    make_copy_streams,
    num_resident_versions,
)
from pipedream.budget.rehearsal import Handover, Rehearsal
from pipedream.budget.torch_pool import SEGMENT_SLACK_BYTES, TORCH_TENSORS, TorchPool, wants_torch_pool
from pipedream.checkpoint.state import receive_state, relay_state, send_state
from pipedream.common.agreement import difference, settings_of
from pipedream.common.errors import (
    PeerLost,
    afterwards,
    describe_error,
    failures_of_others,
    losses_kept,
    raise_failure,
)
from pipedream.data.stream import DataStream, ForwardedData, MinibatchStream, ReceivedStream
from pipedream.links.channels import (
    CALLER,
    INPUTS,
    TARGETS,
    RunChannel,
    TieSpec,
    channels_of_run,
    set_up_channels,
    tree_name,
)
from pipedream.links.descriptors import check_descriptors
from pipedream.links.device_memory import agree_on_device_memory, place_on_devices
from pipedream.links.liveness import sign_period_s
from pipedream.links.pulse import Pulse
from pipedream.links.rank_tree import children_of, parent_of, subtree_of
from pipedream.links.rendezvous import START_TIMEOUT_S
from pipedream.links.state_transfer import receive_document, relay_document, send_document
from pipedream.model.boundary import Boundary, TensorSpec, device_of
from pipedream.model.loss_placement import loss_on
from pipedream.model.microbatch import check_alike, chunk
from pipedream.model.references import gradients_noticed
from pipedream.model.seeding import base_seed, seed_data
from pipedream.model.splitter import Model, StageModule, Tie, find_ties, split
from pipedream.planning.plan import Plan
from pipedream.report.result import RunResult, combine_reports
from pipedream.stage.gradients import updated_parameters
from pipedream.stage.job import JobOptions, WorkerPlace
from pipedream.stage.stage_loop import PreparedStage, WorkerLoop
from pipedream.stage.tied import TiedParameters, TieLinks
from pipedream.stage.weights import StageOptimizer, StageWeights, split_tied, weight_layout

__all__ = ["choose_device_type", "run_worker"]

_OPEN_POLL_S = 0.5
_LOOK_PERIOD_S = 0.02
_LINGER_S = 10.0
_FAREWELL_S = 1.0  # how long a failed worker tries to tell the others why


def run_worker(
    place: WorkerPlace, options: JobOptions, model: Model, data: Iterable[Any] | ForwardedData
) -> RunResult:
    """This rank's part of the run; returns the whole run's result at every rank, what its trace shows at
    rank 0 only.

    Afterwards `model` holds the trained weights and buffers: of all stages at rank 0, and at the other
    ranks as options.gather says. Any failure is told to the other workers before it is raised here.
    """
    worker = _Worker(place, options, model)
    with afterwards(worker.close):
        try:
            with losses_kept(worker.losses):
                return worker.run(data)
        except BaseException as error:
            worker.say_why(describe_error(error))
            raise


class _Worker:
    def __init__(self, place: WorkerPlace, options: JobOptions, model: Model) -> None:
        self._place = place
        self._options = options
        self._model = model
        self._core: _core.Worker | None = None
        self._pulse: Pulse | None = None
        self._channels: list[RunChannel] = []
        self._stages: list[StageModule] = []
        self._ties: list[Tie] = []
        self._boundaries: dict[int, Boundary] = {}  # by the stage upstream, at this worker's stages
        self._footprints: dict[int, Footprint] = {}  # by stage, of this worker's
        self._input_boundary: Boundary | None = None  # None: nothing to check the inputs against
        self._optimizers: dict[int, StageOptimizer] = {}  # by stage, of this worker's
        self._torch_pool_bytes = 0
        self._offload: dict[int, Offload] = {}  # by stage, what is done
        self._predicted: dict[str, int] = {}
        self._loop: WorkerLoop | None = None

    # The run, in the order of the module's docstring.

    def run(self, data: Iterable[Any] | ForwardedData) -> RunResult:
        torch.set_num_threads(self._options.num_threads)
        _core.keep_freed_memory()
        rendezvous = self._place.rendezvous
        self._device = self._choose_device()  # before join(): it keeps the GIL, which signs of life need
        rendezvous.join(self._options.links.peer_timeout_s)
        rendezvous.enter("agreeing on the plan")
        stream = self._agree(data)
        own_device = device_of(self._own_stages())  # where the user has the model, and finds it again
        for stage in self._own_stages():
            stage.to(self._device)
        loss_placed = contextlib.ExitStack()
        if self._options.plan.num_stages - 1 in self._options.plan.stages_of(self._place.rank):
            loss_placed.enter_context(loss_on(self._options.loss_fn, self._device))
        with afterwards(functools.partial(self._give_back, own_device)), afterwards(loss_placed.close):
            try:
                return self._train(data, stream)
            except _core.RunFailure as failure:
                raise_failure(*failure.args)

    def _train(self, data: Iterable[Any] | ForwardedData, stream: MinibatchStream) -> RunResult:
        rendezvous = self._place.rendezvous
        rendezvous.enter("sharing the initial weights")
        links = self._open_set_up_links()
        with self._losses_explained():
            self._share_initial_weights(links)
            rendezvous.enter("rehearsing")
            self._rehearse(links, stream)
        self.close()
        rendezvous.enter("opening links")
        core = self._make_core()
        self._open(core, data)
        rendezvous.leave()
        if isinstance(data, ForwardedData):
            stream = self._received_stream(core, data)
        report: dict[str, Any] = {}  # a rank beyond the plan has nothing to report
        if self._own_stages():
            self._loop = self._make_loop(core, stream)
            with gradients_noticed(self._parameters()):
                report = self._loop.train()
            self._note_codecs(report)
        return self._gather(core, report)

    def _give_back(self, own_device: torch.device) -> None:
        if self._place.returns_model:
            for stage in self._own_stages():
                stage.to(own_device)

    def losses(self) -> list[float]:
        """Of the minibatches that are done, as far as this worker knows."""
        return [] if self._loop is None else self._loop.losses

    def say_why(self, text: str) -> None:
        """Best effort: the others may be gone too. By the links at first: the store may not answer for as
        long as the peer timeout, and meanwhile nobody beyond the lost one would know."""
        core = self._core
        if core is not None:
            with contextlib.suppress(Exception):
                core.abort(text)
        with contextlib.suppress(Exception):
            self._place.rendezvous.fail(text)
        if core is not None:
            with contextlib.suppress(Exception):
                core.close(_FAREWELL_S)

    def close(self) -> None:
        if self._core is not None:
            self._core.close(_LINGER_S)
            self._core = None
        if self._pulse is not None:
            self._pulse.stop()
            self._pulse = None

    # Agree.

    def _agree(self, data: Iterable[Any] | ForwardedData) -> MinibatchStream:
        """Rank 0's plan and seed become this worker's. The stream is of no use where the stage reads no
        data."""
        rendezvous = self._place.rendezvous
        if self._place.rank == 0:
            plan = self._options.plan
            self._check_world(plan)
            self._options.schedule_options()  # says what the schedule and the plan cannot do
            self._split(plan)
            base = base_seed(self._options.seed)
            seed_data(base, self._options.seed, plan.num_stages)
            agreed = {
                "plan": plan.to_dict(),
                "settings": settings_of(self._options),
                "base_seed": base,
                "run_id": self._place.run_id,
            }
            rendezvous.publish("agreed", agreed)
            self._base_seed = base
            return self._make_stream(data)
        (agreed,) = self._wait_for(["agreed"], lambda _: "rank 0 did not start")
        plan = Plan.from_dict(agreed["plan"], source="rank 0's plan")
        self._options = replace(self._options, plan=plan)
        self._check_settings(agreed["settings"])
        self._base_seed = int(agreed["base_seed"])
        self._place = replace(self._place, run_id=int(agreed["run_id"]))
        self._split(plan)
        seed_data(self._base_seed, self._options.seed, plan.num_stages)
        return self._make_stream(data)

    def _wait_for(self, keys: list[str], describe: Callable[[list[str]], str]) -> list[Any]:
        with failures_of_others():
            return self._place.rendezvous.wait_for(keys, START_TIMEOUT_S, describe)

    def _check_world(self, plan: Plan) -> None:
        if plan.workers_used > self._place.world_size:
            raise ValueError(
                f"the plan needs {plan.workers_used} workers, but only {self._place.world_size} ranks run:"
                f" start torchrun with --nproc-per-node {plan.workers_used}, or partition for"
                f" {self._place.world_size}"
            )

    def _check_settings(self, agreed: dict[str, Any]) -> None:
        differs = difference(settings_of(self._options), self._place.rank, agreed)
        if differs is not None:
            raise ValueError(differs)

    def _split(self, plan: Plan) -> None:
        self._stages = split(self._model, plan)
        self._ties = find_ties(self._stages)

    def _make_stream(self, data: Iterable[Any] | ForwardedData) -> MinibatchStream:
        if isinstance(data, ForwardedData):
            return ReceivedStream(data, None, None)  # for peek(); replaced when the channels are open
        return DataStream(data, epochs=self._options.epochs)

    # Share and rehearse.

    def _open_set_up_links(self) -> _core.Worker | None:
        """None where this worker has nobody to share with."""
        rank, num_workers = self._place.rank, self._options.plan.workers_used
        if num_workers == 1 or rank >= num_workers:
            return None
        core = self._make_core()
        channels = set_up_channels(self._options.plan)
        for channel in channels:
            channel.add_to(core, rank, self._options.plan)
        core.seal()
        self._connect(core, channels, "endpoints for the set-up")
        return core

    def _share_initial_weights(self, links: _core.Worker | None) -> None:
        """Rank 0's initial weights are used everywhere, from the construction of the optimizers on. So they
        come before the pool is planned."""
        if links is None:
            return
        rank, num_ranks = self._place.rank, self._options.plan.workers_used
        above = "" if rank == 0 else tree_name(parent_of(rank), rank)
        for stage in self._own_stages() if above else []:
            receive_state(links, above, stage)
        for child in children_of(rank, num_ranks):
            for other in subtree_of(child, num_ranks):
                for stage in self._stages_of(other):
                    if above:
                        relay_state(links, above, tree_name(rank, child))
                    else:
                        send_state(links, tree_name(rank, child), stage)

    def _rehearse(self, links: _core.Worker | None, stream: MinibatchStream) -> None:
        """Boundaries and footprints of this worker's stages, from the first microbatch."""
        options, stages = self._options, self._own_stages()
        m = options.microbatches
        inputs = targets = None
        if {0, options.plan.num_stages - 1} & {stage.stage_index for stage in stages}:
            inputs, targets = self._first_microbatch(stream)
        rehearsal = Rehearsal(
            Handover(links, options.plan.placement),
            self._device,
            rank=self._place.rank,
            loss_fn=options.loss_fn,
            autocast=options.autocast,
            repeats=m > 1,
            for_offload=options.memory_bytes is not None or forced_offload().activations,
        )
        rehearsal.run(stages, inputs, targets)
        self._boundaries, self._footprints = rehearsal.boundaries, rehearsal.footprints
        if links is not None:
            self._wait_until_sent(links)

    def _first_microbatch(self, stream: MinibatchStream) -> tuple[Any, Any]:
        """(inputs, targets), where they are read."""
        m = self._options.microbatches
        inputs, targets = stream.peek()
        with contextlib.suppress(ValueError):  # inputs that cannot cross need not: they are read here
            if len(self._stages) > 1:
                self._input_boundary = Boundary.of(inputs, name="the inputs")
        first_inputs = chunk(inputs, m, name="the inputs", minibatch=0)[0]
        first_targets = chunk(targets, m, name="the targets", minibatch=0)[0]
        check_alike(inputs, targets, m, minibatch=0)
        return first_inputs, first_targets

    def _wait_until_sent(self, links: _core.Worker) -> None:
        """A worker downstream may still be at the backward of another stage, for as long as that takes."""
        while not links.wait_for_transfers(_OPEN_POLL_S):
            self._raise_if_others_failed()
            time.sleep(_LOOK_PERIOD_S)  # after a failure there is no wait above

    @contextlib.contextmanager
    def _losses_explained(self) -> Iterator[None]:
        """Around waits on links: why one failed, where it knows only that its peer is silent or gone."""
        try:
            yield
        except _core.RunFailure as failure:
            if failure.args[0] != "Aborted":  # which says why itself: the store may not answer
                self._raise_if_others_failed()
            if failure.args[0] == "Timeout":
                self._look_for_the_lost()
            raise

    # Open.

    def _own_stages(self) -> list[StageModule]:
        # None at a rank beyond the plan.
        return [self._stages[stage] for stage in self._options.plan.stages_of(self._place.rank)]

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Of all stages: the model's own, which the weight versions stand in for."""
        return {name: p for stage in self._stages for name, p in stage.trainable_parameters()}

    def _choose_device(self) -> torch.device:
        if choose_device_type() == "cpu":
            return torch.device("cpu")
        device = torch.device("cuda", self._place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # makes the device's context, which may take seconds
        return device

    def _make_core(self) -> _core.Worker:
        """The core until close(), and its pulse."""
        on_cuda = self._device.type == "cuda"
        core = self._core = _core.Worker(
            device=f"cuda:{self._device.index}" if on_cuda else "host",
            **self._options.links.core_arguments(),
            run_id=self._place.run_id,
            incarnation=self._place.incarnation,
            plan_hash=self._options.plan.hash(),
            compute_stream=torch.cuda.current_stream().cuda_stream if on_cuda else 0,
        )
        self._pulse = Pulse(core, self._options.links.peer_timeout_s)
        return core

    def _open(self, core: _core.Worker, data: Iterable[Any] | ForwardedData) -> None:
        rank, plan = self._place.rank, self._options.plan
        schedule = self._options.schedule_options()
        measures = self._options.max_grad_norm is not None or self._options.autocast is torch.float16
        channels = channels_of_run(
            plan,
            schedule,
            self._place.world_size,
            self._boundaries,
            [TieSpec(tie.stages, _spec_of(tie.parameter)) for tie in self._ties],
            data if isinstance(data, ForwardedData) else None,
            exchanges_norms=measures and _core.drains_every_minibatch(schedule),
            codec=self._options.links.codec,
        )
        channels = self._channels = self._placed_on_devices(core, channels)
        for channel in channels:
            channel.add_to(core, rank, plan)
        self._plan_memory(core, schedule, channels)
        core.seal()
        self._connect(core, channels, "endpoints")

    def _placed_on_devices(self, core: _core.Worker, channels: list[RunChannel]) -> list[RunChannel]:
        """The channels, with those between devices of one host that need no staging."""
        rank, links = self._place.rank, self._options.links
        if not links.places_on_devices:
            return channels
        on_host = self._device.type != "cuda"
        reach = agree_on_device_memory(
            core,
            rank,
            channels,
            on_host=on_host,
            publish=self._place.rendezvous.publish,
            wait_for=lambda keys: self._wait_for(keys, _no_word) if keys else [],
        )
        between = [c for c in channels if c.stages is not None and rank in (c.sender, c.receiver)]
        for channel in between if links.transport == "ipc" or not on_host else []:
            why = reach[channel.sender, channel.receiver]
            if not why and channel.is_encoded:
                why = f"they travel encoded (codec {channel.codec})"
            links.check_reach(self._describe_ends(channel.sender, channel.receiver), why)
        return place_on_devices(channels, reach)

    def _plan_memory(
        self, core: _core.Worker, schedule: _core.ScheduleOptions, channels: Sequence[RunChannel]
    ) -> None:
        """Decides where to recompute and to offload, and adds the stages' terms to the pool."""
        own_bytes: dict[int, int] = {}
        tied_bytes: dict[int, int] = {}
        placed_bytes: dict[int, int] = {}
        torch_bytes: dict[int, int] = {}
        step_bytes: dict[int, int] = {}
        for stage in self._own_stages():
            index = stage.stage_index
            own, tied = split_tied(stage, self._tied_parameters_of(index))
            named = updated_parameters(stage, self._ties)
            optimizer = StageOptimizer(
                self._options.optimizer, named, self._options.lr_scheduler, f"stage {index}"
            )
            self._optimizers[index] = optimizer
            own_bytes[index] = slot_bytes(weight_layout(own)[0])
            tied_bytes[index] = slot_bytes(weight_layout(tied)[0])
            placed_bytes[index] = optimizer.num_placed_states * slot_bytes(weight_layout(named)[0])
            if optimizer.is_native:
                torch_bytes[index] = 0
                step_bytes[index] = native_step_bytes(stage, len(named))
            else:
                torch_bytes[index] = predict_state_bytes(optimizer.optimizer)
                step_bytes[index] = predict_step_bytes(optimizer.optimizer, self._device.type)
        if not self._own_stages():
            return
        memory = MemoryPlan(
            self._options.plan,
            self._place.rank,
            schedule,
            self._footprints,
            channels,
            own_bytes,
            tied_bytes,
            placed_bytes,
            torch_bytes,
            model_bytes(self._stages if self._device.type == "cpu" else self._own_stages()),
            self._device.type,
            dict.fromkeys(own_bytes, forced_offload()),
            step_bytes,
        )
        memory = choose_savings(memory, self._options.recompute, self._options.memory_bytes)
        self._options = replace(self._options, recompute=tuple(memory.schedule.recompute))
        self._predicted = memory.terms()
        self._add_terms(core, memory)
        if wants_torch_pool(self._device):
            self._pool_torch_terms(core)
            self._predicted[TRANSIENT] = max(step_bytes.values())  # updates are not in the pool
        if not all(self._footprints[stage.stage_index].is_measured for stage in self._own_stages()):
            for term in (STASH, TRANSIENT, GRADIENTS):
                self._predicted.pop(term, None)

    def _pool_torch_terms(self, core: _core.Worker) -> None:
        """What torch makes lies in one term of the pool instead of beside it."""
        parts = [self._predicted.pop(term, 0) for term in (STASH, TRANSIENT, GRADIENTS)]
        self._torch_pool_bytes = sum(parts) + SEGMENT_SLACK_BYTES
        core.add_term(TORCH_TENSORS, self._torch_pool_bytes, 1)

    def _add_terms(self, core: _core.Worker, memory: MemoryPlan) -> None:
        """The pool's terms of the stages, as they are planned."""
        for stage, own_bytes in memory.weight_bytes.items():
            offload = Offload(memory.offloads_versions(stage), memory.offloads_activations(stage))
            self._offload[stage] = offload
            num_versions = _core.num_versions_kept(memory.schedule, stage)
            if offload.versions:
                core.add_term(_term(OFFLOADED_VERSIONS, stage), own_bytes, num_versions, staging=True)
                num_versions = num_resident_versions(num_versions)
            core.add_term(_term(WEIGHT_VERSIONS, stage), own_bytes, num_versions)
            if offload.activations:
                core.add_term(
                    _term(OFFLOADED_ACTIVATIONS, stage),
                    memory.footprints[stage].offloadable_bytes,
                    num_activation_homes(memory.schedule, stage),
                    staging=True,
                )
            if self._ties_of(stage):
                num_tied_versions = _core.num_tied_versions_kept(memory.schedule)
                core.add_term(_term(TIED_VERSIONS, stage), memory.tied_bytes[stage], num_tied_versions)
            num_states = self._optimizers[stage].num_placed_states
            if num_states:
                slot_bytes = memory.placed_state_bytes[stage] // num_states
                core.add_term(_term(OPTIMIZER_STATE, stage), slot_bytes, num_states)

    def _ties_of(self, stage_index: int) -> list[Tie]:
        return [tie for tie in self._ties if stage_index in tie.stages]

    def _tied_parameters_of(self, stage_index: int) -> list[nn.Parameter]:
        return [tie.parameter for tie in self._ties_of(stage_index)]

    def _connect(self, core: _core.Worker, channels: Sequence[RunChannel], key: str) -> None:
        """key: where the ranks publish their endpoints."""
        rank, links = self._place.rank, self._options.links
        check_descriptors(rank, sum(rank in (c.sender, c.receiver) for c in channels))
        self._place.rendezvous.publish(f"{key}/{rank}", core.listen())
        self._check_peers(channels, key)
        receivers = sorted({c.receiver for c in channels if c.sender == rank})
        published = self._wait_for([f"{key}/{receiver}" for receiver in receivers], _no_word)
        core.connect({name: address for endpoints in published for name, address in endpoints.items()})
        between = [c for c in channels if c.stages is not None and c.sender == rank and c.may_be_placed]
        links.check_transports(
            {c.name: self._describe_ends(c.sender, c.receiver) for c in between}, core.channel_transports()
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with self._losses_explained():
            while not core.wait_open(_OPEN_POLL_S):
                self._raise_if_others_failed()
                if time.monotonic() > deadline_s:
                    missing = core.channels_not_open()
                    raise PeerLost(f"channels not open within {START_TIMEOUT_S:g} s: {missing}")

    def _look_for_the_lost(self) -> None:
        """A peer that is silent on its link gives no sign of life either, which is known a little later."""
        deadline_s = time.monotonic() + 3 * sign_period_s(self._options.links.peer_timeout_s)
        while time.monotonic() < deadline_s:
            self._raise_if_others_failed()
            time.sleep(_LOOK_PERIOD_S)

    def _raise_if_others_failed(self) -> None:
        with failures_of_others():
            self._place.rendezvous.raise_if_failed()

    def _check_peers(self, channels: Sequence[RunChannel], key: str) -> None:
        """That this worker's peers may talk to it, and share memory where they must, by what they publish.
        Returns when all of them have found so, too: a mistake is then said at once, and everywhere alike."""
        rank, links = self._place.rank, self._options.links
        if not links.checks_peers:
            return
        self._place.rendezvous.publish(f"{key}/peer/{rank}", links.introduction())
        ends = {end for c in channels if rank in (c.sender, c.receiver) for end in (c.sender, c.receiver)}
        peers = sorted(ends - {rank, CALLER})  # the caller has this worker's own keys, on its machine
        neighbours = {c.sender for c in channels if c.stages is not None and c.receiver == rank}
        introductions = self._wait_for([f"{key}/peer/{peer}" for peer in peers], _no_word)
        for peer, introduction in zip(peers, introductions, strict=True):
            ends_text = self._describe_ends(rank, peer)
            name = self._options.plan.describe_worker(peer)
            links.check_peer(name, introduction, shares_memory=peer in neighbours, ends=ends_text)
        self._place.rendezvous.publish(f"{key}/checked/{rank}", True)
        self._wait_for([f"{key}/checked/{peer}" for peer in peers], _no_word)

    def _describe_ends(self, *ranks: int) -> str:
        return " and ".join(map(self._options.plan.describe_worker, sorted(ranks)))

    def _received_stream(self, core: _core.Worker, data: ForwardedData) -> MinibatchStream:
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

        own = self._options.plan.stages_of(self._place.rank)
        is_first, is_last = 0 in own, self._options.plan.num_stages - 1 in own
        return ReceivedStream(
            data, receiver(INPUTS) if is_first else None, receiver(TARGETS) if is_last else None
        )

    def _make_loop(self, core: _core.Worker, stream: MinibatchStream) -> WorkerLoop:
        schedule = self._options.schedule_options()
        links = TieLinks(core, schedule)
        return WorkerLoop(
            core,
            self._options,
            self._place,
            schedule=schedule,
            prepared=[self._prepare(core, links, schedule, stage) for stage in self._own_stages()],
            stream=stream,
            device=self._device,
            base_seed=self._base_seed,
            input_boundary=self._input_boundary,
            boundaries=self._boundaries,
            predicted=self._predicted,
            torch_pool=self._make_torch_pool(core),
        )

    def _note_codecs(self, report: dict[str, Any]) -> None:
        """Beside the figures of its channels: by which codec tensors really travel."""
        for channel in self._channels:
            if channel.name in report["channels"]:
                report["channels"][channel.name]["codec"] = channel.codec_used

    def _make_torch_pool(self, core: _core.Worker) -> TorchPool | None:
        if self._torch_pool_bytes == 0:
            return None
        return TorchPool(from_dlpack(core.hold_slot(TORCH_TENSORS)))

    def _prepare(
        self, core: _core.Worker, links: TieLinks, schedule: _core.ScheduleOptions, stage: StageModule
    ) -> PreparedStage:
        """Puts the stage's weights and its optimizer's state into the pool."""
        index = stage.stage_index
        ties = self._ties_of(index)

        def slots(term: str, num_slots: int) -> list[Tensor]:
            # The pool hands slots out in any order; only that each is one version's matters.
            return [from_dlpack(core.hold_slot(_term(term, index))) for _ in range(num_slots)]

        num_versions = _core.num_versions_kept(schedule, index)
        offload = self._offload[index]
        copies = make_copy_streams(self._device)
        own_slots = slots(
            WEIGHT_VERSIONS, num_resident_versions(num_versions) if offload.versions else num_versions
        )
        resident: ResidentVersions | None = None
        if offload.versions:
            resident = ResidentVersions(own_slots, slots(OFFLOADED_VERSIONS, num_versions), copies)
        nothing = [torch.empty(0, dtype=torch.uint8, device=self._device)]
        tied_slots = slots(TIED_VERSIONS, _core.num_tied_versions_kept(schedule)) if ties else nothing
        weights = StageWeights(stage, own_slots, tied_slots, self._tied_parameters_of(index), resident)
        optimizer = self._optimizers[index]
        optimizer.place_state(slots(OPTIMIZER_STATE, optimizer.num_placed_states))
        tied = TiedParameters(links, schedule, index, ties, weights.tied)
        stage_offload: StageOffload | None = None
        if offload.names():
            frozen = [parameter for _, parameter in stage.frozen_parameters()]
            num_homes = num_activation_homes(schedule, index) if offload.activations else 0
            homes = slots(OFFLOADED_ACTIVATIONS, num_homes)
            stage_offload = StageOffload(
                self._device, copies, homes, resident, [*own_slots, *tied_slots, *frozen]
            )
        return PreparedStage(stage, weights, tied, optimizer, stage_offload)

    # Weights and results to rank 0, and from there.

    def _gather(self, core: _core.Worker, report: dict[str, Any]) -> RunResult:
        if self._place.rank != 0:
            self._hand_up(core, report)
            return self._hear_farewell(core)
        plan, num_ranks = self._options.plan, self._options.plan.workers_used
        reports = {0: report}
        for child in children_of(0, num_ranks):
            for other in subtree_of(child, num_ranks):
                for stage in self._gathered_stages_of(other):
                    receive_state(core, tree_name(child, 0), stage)
                reports[other] = receive_document(core, tree_name(child, 0))
        between = [channel for channel in self._channels if channel.stages is not None]
        in_order = [reports[rank] for rank in range(num_ranks)]
        result = combine_reports(plan, self._options.schedule_options(), between, in_order)
        # The farewell: nobody closes before everybody has all it needs.
        shared = result.to_dict() | {"spans": [], "transfers": []}  # the trace is rank 0's: it can be large
        self._hand_down(core, shared)
        return result

    def _hand_up(self, core: _core.Worker, report: dict[str, Any]) -> None:
        rank, num_ranks = self._place.rank, self._options.plan.workers_used
        if rank >= num_ranks:
            return
        above = tree_name(rank, parent_of(rank))
        for stage in self._gathered_stages_of(rank):
            send_state(core, above, stage)
        send_document(core, above, report)
        for child in children_of(rank, num_ranks):
            for other in subtree_of(child, num_ranks):
                for _ in self._gathered_stages_of(other):
                    relay_state(core, tree_name(child, rank), above)
                relay_document(core, tree_name(child, rank), above)

    def _hear_farewell(self, core: _core.Worker) -> RunResult:
        above = tree_name(parent_of(self._place.rank), self._place.rank)
        shared = receive_document(core, above)
        self._hand_down(core, shared, above)
        return RunResult.from_dict(shared)

    def _hand_down(self, core: _core.Worker, shared: dict[str, Any], above: str = "") -> None:
        """The result, and all weights where all ranks want them. above: whence they come, but at rank 0."""
        rank = self._place.rank
        below = [tree_name(rank, child) for child in children_of(rank, self._place.world_size)]
        for channel in below:
            send_document(core, channel, shared)
        for stage in self._stages if self._options.gather == "all" else []:
            if above:
                receive_state(core, above, stage)
            for channel in below:
                send_state(core, channel, stage)

    def _gathered_stages_of(self, rank: int) -> list[StageModule]:
        return [] if self._options.gather == "none" else self._stages_of(rank)

    def _stages_of(self, rank: int) -> list[StageModule]:
        return [self._stages[stage] for stage in self._options.plan.stages_of(rank)]


def choose_device_type() -> str:
    """Where the workers of this machine compute, as $PIPEDREAM_DEVICE says: "cpu" or "cuda"."""
    wanted = os.environ.get("PIPEDREAM_DEVICE", "auto")
    if wanted not in ("auto", "host", "cuda"):
        raise ValueError(f"PIPEDREAM_DEVICE is {wanted!r}: use auto, host or cuda")
    usable = torch.cuda.is_available() and _core.cuda_available()
    if wanted == "cuda" and not usable:
        raise ValueError("PIPEDREAM_DEVICE is 'cuda', but there is no usable CUDA device, or no CUDA build")
    return "cuda" if usable and wanted != "host" else "cpu"


def _no_word(keys: list[str]) -> str:
    return "no word from rank " + ", ".join(key.rpartition("/")[2] for key in keys)


def _term(name: str, stage_index: int) -> str:
    return f"{name} of stage {stage_index}"


def _spec_of(parameter: nn.Parameter) -> TensorSpec:
    return TensorSpec(parameter.dtype, tuple(parameter.shape), requires_grad=True)
