"""One worker of a run: its stage, its data, its channels, its loop.

    agree        rank 0's plan, seed and boundaries are everybody's            (rendezvous)
    open         pool sealed, channels open to neighbours and to rank 0        (core)
    train        next work item -> forward, backward or update -> completion   (core and torch)
    gather       final weights and results to rank 0, then a common farewell   (bulk)

Runs on the main thread of its process, which is the core's compute thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from . import _core
from .boundary import Boundary, boundary_specs, device_of
from .bulk import receive_document, send_document
from .channels import INPUTS, TARGETS, channels_of_run, find_libzmq, from_rank_0, to_rank_0
from .data import DataStream, ForwardedData, MinibatchStream, ReceivedStream
from .errors import PeerLost, PipelineError, describe_error, failures_of_others, raise_failure
from .job import JobOptions, WorkerPlace, check_plan_is_built
from .plan import Plan
from .result import RunResult, combine_reports
from .seeding import base_seed, seed_data
from .splitter import Model, StageModule, split
from .stage_loop import StageLoop
from .state import receive_state, send_state
from .weights import StageWeights, weight_layout

__all__ = ["run_worker"]

# Other ranks may still be profiling, or importing torch on a slow disk, while this one waits.
_START_TIMEOUT_S = 600.0
_LINGER_S = 10.0
_FAREWELL_S = 1.0  # how long a failed worker tries to tell the others why


def run_worker(
    place: WorkerPlace, options: JobOptions, model: Model, data: Iterable[Any] | ForwardedData
) -> RunResult:
    """This rank's part of the run; returns the whole run's result at every rank, its spans at rank 0 only.

    Afterwards `model` holds the trained weights and buffers: of all stages at rank 0, and at the other
    ranks as options.gather says. Any failure is told to the other workers before it is raised here.
    """
    worker = _Worker(place, options, model)
    try:
        return worker.run(data)
    except BaseException as error:
        worker.say_why(describe_error(error))
        raise
    finally:
        worker.close()


class _Worker:
    def __init__(self, place: WorkerPlace, options: JobOptions, model: Model) -> None:
        self._place = place
        self._options = options
        self._model = model
        self._core: _core.Worker | None = None
        self._stages: list[StageModule] = []
        self._boundaries: list[Boundary] = []
        self._input_boundary: Boundary | None = None  # None: nothing to check the inputs against
        self._offsets: list[int] = []
        self._num_slots = 0

    # The run, in the order of the module's docstring.

    def run(self, data: Iterable[Any] | ForwardedData) -> RunResult:
        torch.set_num_threads(self._options.num_threads)
        _core.keep_freed_memory()
        stream = self._agree(data)
        plan = self._options.plan
        own_device = device_of(self._own_stages())  # where the user has the model, and finds it again
        self._device = self._choose_device()
        for stage in self._own_stages():
            stage.to(self._device)
        core = self._core = self._make_core()
        try:
            self._open(core, data)
            if isinstance(data, ForwardedData):
                stream = self._received_stream(core, data)
            self._share_initial_weights(core)
            report: dict[str, Any] = {}  # a rank beyond the plan has nothing to report
            if self._place.rank < plan.workers_used:
                report = self._make_loop(core, stream).train()
            return self._gather(core, report)
        except _core.RunFailure as failure:
            raise_failure(*failure.args)
        finally:
            for stage in self._own_stages():
                stage.to(own_device)

    def say_why(self, text: str) -> None:
        """Best effort: the others may be gone too."""
        with contextlib.suppress(Exception):
            self._place.rendezvous.fail(text)
        if self._core is not None:
            with contextlib.suppress(Exception):
                self._core.abort(text)
                self._core.close(_FAREWELL_S)

    def close(self) -> None:
        if self._core is not None:
            self._core.close(_LINGER_S)
            self._core = None

    # Agree.

    def _agree(self, data: Iterable[Any] | ForwardedData) -> MinibatchStream:
        """Rank 0's plan, seed and boundaries become this worker's. The stream is of no use where the
        stage reads no data."""
        rendezvous = self._place.rendezvous
        if self._place.rank == 0:
            plan = self._options.plan
            self._check_world(plan)
            self._stages = split(self._model, plan)
            base = base_seed(self._options.seed)
            seed_data(base, self._options.seed, plan.num_stages)
            stream = self._make_stream(data)
            self._boundaries = self._dry_run(stream)
            agreed = {
                "plan": plan.to_dict(),
                "base_seed": base,
                "run_id": self._place.run_id,
                "boundaries": [boundary.to_json() for boundary in self._boundaries],
            }
            rendezvous.publish("agreed", agreed)
            self._base_seed = base
            return stream
        (agreed,) = self._wait_for(["agreed"], lambda _: "rank 0 did not start")
        plan = Plan.from_dict(agreed["plan"], source="rank 0's plan")
        self._options = replace(self._options, plan=plan)
        self._base_seed = int(agreed["base_seed"])
        self._place = replace(self._place, run_id=int(agreed["run_id"]))
        self._boundaries = [Boundary.from_json(text) for text in agreed["boundaries"]]
        self._stages = split(self._model, plan)
        seed_data(self._base_seed, self._options.seed, plan.num_stages)
        return self._make_stream(data)

    def _wait_for(self, keys: list[str], describe: Callable[[list[str]], str]) -> list[Any]:
        with failures_of_others():
            return self._place.rendezvous.wait_for(keys, _START_TIMEOUT_S, describe)

    def _check_world(self, plan: Plan) -> None:
        check_plan_is_built(plan)
        if plan.workers_used > self._place.world_size:
            raise ValueError(
                f"the plan needs {plan.workers_used} workers, but only {self._place.world_size} ranks run:"
                f" start torchrun with --nproc-per-node {plan.workers_used}, or partition for"
                f" {self._place.world_size}"
            )

    def _make_stream(self, data: Iterable[Any] | ForwardedData) -> MinibatchStream:
        if isinstance(data, ForwardedData):
            return ReceivedStream(data, None, None)  # for peek(); replaced when the channels are open
        return DataStream(data, epochs=self._options.epochs)

    def _dry_run(self, stream: MinibatchStream) -> list[Boundary]:
        inputs, _ = stream.peek()
        if len(self._stages) == 1:
            return []
        with contextlib.suppress(ValueError):  # inputs that cannot cross need not: they are read here
            self._input_boundary = Boundary.of(inputs, name="the inputs")
        try:
            return boundary_specs(self._stages, inputs)
        except (ValueError, TypeError):
            raise
        except Exception as error:
            raise PipelineError(
                f"the first minibatch does not pass the model: {describe_error(error)}"
            ) from error

    # Open.

    def _own_stages(self) -> list[StageModule]:
        return self._stages[self._place.rank : self._place.rank + 1]  # none at a rank beyond the plan

    def _choose_device(self) -> torch.device:
        wanted = os.environ.get("PIPEDREAM_DEVICE", "auto")
        if wanted not in ("auto", "host", "cuda"):
            raise ValueError(f"PIPEDREAM_DEVICE is {wanted!r}: use auto, host or cuda")
        usable = torch.cuda.is_available() and _core.cuda_available()
        if wanted == "cuda" and not usable:
            raise ValueError(
                "PIPEDREAM_DEVICE is 'cuda', but there is no usable CUDA device, or no CUDA build"
            )
        if wanted == "host" or not usable:
            return torch.device("cpu")
        device = torch.device("cuda", self._place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def _make_core(self) -> _core.Worker:
        on_cuda = self._device.type == "cuda"
        return _core.Worker(
            device=f"cuda:{self._device.index}" if on_cuda else "host",
            transport="zmq",
            libzmq_path=find_libzmq(),
            peer_timeout_s=self._options.peer_timeout_s,
            run_id=self._place.run_id,
            incarnation=self._place.incarnation,
            plan_hash=self._options.plan.hash(),
            compute_stream=torch.cuda.current_stream().cuda_stream if on_cuda else 0,
        )

    def _open(self, core: _core.Worker, data: Iterable[Any] | ForwardedData) -> None:
        rank, plan = self._place.rank, self._options.plan
        channels = channels_of_run(
            plan, self._place.world_size, self._boundaries, data if isinstance(data, ForwardedData) else None
        )
        for channel in channels:
            channel.add_to(core, rank)
        for stage in self._own_stages():
            slot_bytes, self._offsets = weight_layout(stage)
            num_slots = _core.num_versions_kept(
                self._options.schedule, rank, plan.num_stages, plan.in_flight[rank]
            )
            core.add_term("weight versions", slot_bytes, num_slots)
            self._num_slots = num_slots
        core.seal()
        self._place.rendezvous.publish(f"endpoints/{rank}", core.listen())
        receivers = sorted({c.receiver for c in channels if c.sender == rank})
        published = self._wait_for(
            [f"endpoints/{receiver}" for receiver in receivers],
            lambda keys: "no word from rank " + ", ".join(key.rpartition("/")[2] for key in keys),
        )
        core.connect({name: address for endpoints in published for name, address in endpoints.items()})
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not core.wait_open(0.5):
            with failures_of_others():
                self._place.rendezvous.raise_if_failed()
            if time.monotonic() > deadline_s:
                raise PeerLost(f"channels not open within {_START_TIMEOUT_S:g} s: {core.channels_not_open()}")

    def _received_stream(self, core: _core.Worker, data: ForwardedData) -> MinibatchStream:
        def receiver(channel: str) -> Callable[[], tuple[list[Tensor], int] | None]:
            def receive() -> tuple[list[Tensor], int] | None:
                item = core.receive_item(channel)
                assert item is not None  # there is no time-out
                if item.kind == "DONE":
                    return None
                mark = item.tag
                return [from_dlpack(capsule) for capsule in item.take_tensors()], mark

            return receive

        is_first = self._place.rank == 0
        is_last = self._place.rank == self._options.plan.num_stages - 1
        return ReceivedStream(
            data, receiver(INPUTS) if is_first else None, receiver(TARGETS) if is_last else None
        )

    def _make_loop(self, core: _core.Worker, stream: MinibatchStream) -> StageLoop:
        stage_index = self._place.rank
        slots = [from_dlpack(core.hold_slot("weight versions")) for _ in range(self._num_slots)]
        # The pool hands slots out in any order; only that each is one version's matters.
        weights = StageWeights(self._stages[stage_index], slots, self._offsets)
        boundaries = dict(enumerate(self._boundaries))
        return StageLoop(
            core,
            self._options,
            self._place,
            stage=self._stages[stage_index],
            weights=weights,
            stream=stream,
            device=self._device,
            base_seed=self._base_seed,
            input_boundary=self._input_boundary,
            boundary_in=boundaries.get(stage_index - 1),
            boundary_out=boundaries.get(stage_index),
        )

    # Weights and results between rank 0 and the others.

    def _share_initial_weights(self, core: _core.Worker) -> None:
        """Rank 0's initial weights are used everywhere."""
        others = range(1, self._options.plan.workers_used)
        if self._place.rank == 0:
            for rank in others:
                send_state(core, from_rank_0(rank), self._stages[rank])
        elif self._place.rank in others:
            receive_state(core, from_rank_0(self._place.rank), self._stages[self._place.rank])

    def _gather(self, core: _core.Worker, report: dict[str, Any]) -> RunResult:
        rank, plan, gather = self._place.rank, self._options.plan, self._options.gather
        if rank != 0:
            if rank < plan.workers_used:
                if gather != "none":
                    send_state(core, to_rank_0(rank), self._stages[rank])
                send_document(core, to_rank_0(rank), report)
            result = RunResult.from_dict(receive_document(core, from_rank_0(rank)))
            if gather == "all":
                for stage in self._other_stages(rank):
                    receive_state(core, from_rank_0(rank), stage)
            return result
        reports = [report]
        for other in range(1, plan.workers_used):
            if gather != "none":
                receive_state(core, to_rank_0(other), self._stages[other])
            reports.append(receive_document(core, to_rank_0(other)))
        result = combine_reports(plan, core.transport_name, reports)
        # The farewell: nobody closes before everybody has all it needs.
        shared = result.to_dict() | {"spans": []}  # the trace is rank 0's: it can be large
        for other in range(1, self._place.world_size):
            send_document(core, from_rank_0(other), shared)
            if gather == "all":
                for stage in self._other_stages(other):
                    send_state(core, from_rank_0(other), stage)
        return result

    def _other_stages(self, rank: int) -> list[StageModule]:
        return [stage for stage_index, stage in enumerate(self._stages) if stage_index != rank]
