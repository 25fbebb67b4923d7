"""One worker of a run: its stage, its data, its channels, its loop.

    agree        rank 0's plan, seed and boundaries are everybody's            (rendezvous)
    open         pool sealed, channels open to neighbours and to rank 0        (core)
    train        next work item -> forward, backward or update -> completion   (core and torch)
    gather       final weights and results to rank 0, then a common farewell   (bulk)

Runs on the main thread of its process, which is the core's compute thread.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import _core
from .boundary import (
    Boundary,
    TensorSpec,
    boundary_input,
    boundary_specs,
    check_loss,
    map_tensors,
    tensors_of,
    to_device,
)
from .bulk import PIECE_BYTES, receive_document, receive_tensors, send_document, send_tensors
from .data import DataStream, ForwardedData, MinibatchStream, ReceivedStream, num_samples
from .errors import DataMismatch, NonFiniteLoss, PeerLost, PipelineError
from .plan import Plan
from .progress import RunProgress
from .rendezvous import Rendezvous
from .result import RunResult
from .seeding import RngStream, base_seed, data_seed, seed_all, stage_seed
from .splitter import Model, StageModule, split
from .weights import StageOptimizer, StageWeights, weight_layout

__all__ = [
    "JobOptions",
    "StatusBoard",
    "WorkerPlace",
    "channels_of_run",
    "check_plan_is_built",
    "describe_error",
    "find_libzmq",
    "run_worker",
]

# Other ranks may still be profiling, or importing torch on a slow disk, while this one waits.
_START_TIMEOUT_S = 600.0
_LINGER_S = 10.0
_FAREWELL_S = 1.0  # how long a failed worker tries to tell the others why

# In place of the gradients of a boundary where no tensor needs one: the word that a backward is done.
_NO_GRADIENT = TensorSpec(torch.uint8, (1,), requires_grad=False)


@dataclass(frozen=True)
class JobOptions:
    """What to train and how: equal at all workers but for what rank 0 overrides (plan, base_seed)."""

    plan: Plan
    loss_fn: Callable[[Any, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    schedule: str
    epochs: int
    seed: int | None
    transport: str
    peer_timeout_s: float
    on_nonfinite: str
    gather: str
    progress: bool
    num_threads: int
    """Of torch, per worker."""


@dataclass(frozen=True)
class WorkerPlace:
    """Where this worker stands among the others."""

    rank: int
    world_size: int
    local_rank: int
    run_id: int
    """64 bits that no other run has."""
    incarnation: int
    """How often the run was restarted."""
    rendezvous: Rendezvous
    board: StatusBoard | None


class StatusBoard:
    """Which minibatch each local worker is at, in a file that survives the worker. 8 bytes per rank."""

    def __init__(self, path: Path, num_workers: int, *, create: bool) -> None:
        if create:
            path.write_bytes(b"\xff" * (8 * num_workers))  # -1: not at a minibatch yet
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * num_workers)
        self._minibatches = memoryview(self._map).cast("q")

    def write(self, rank: int, minibatch: int) -> None:
        self._minibatches[rank] = minibatch

    def read(self, rank: int) -> int:
        return int(self._minibatches[rank])


def run_worker(
    place: WorkerPlace, options: JobOptions, model: Model, data: Iterable[Any] | ForwardedData
) -> RunResult:
    """This rank's part of the run; returns the whole run's result at every rank.

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


def check_plan_is_built(plan: Plan) -> None:
    """Raises ValueError for a plan that needs what is not built yet."""
    for stage_index, stage in enumerate(plan.stages):
        if stage.num_replicas > 1:
            raise ValueError(
                f"stage {stage_index} has {stage.num_replicas} replicas: replicated stages are not built yet;"
                " use partition(..., straight=True)"
            )


def describe_error(error: BaseException) -> str:
    """ "TypeName: message", as it travels to the other workers."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"


# What one worker raises, the others raise too; anything else arrives as a PipelineError.
_TRAVELLING = {kind.__name__: kind for kind in (ValueError, TypeError, DataMismatch, NonFiniteLoss, PeerLost)}


def _arrived_error(text: str) -> Exception:
    name, separator, message = text.partition(": ")
    known = _TRAVELLING.get(name)
    if known is not None and separator:
        error: Exception = known(message)
    else:
        error = PipelineError(message if name == "PipelineError" and separator else text)
    error._pipedream_derived = True  # type: ignore[attr-defined]  # somebody else's mistake
    return error


def _raise_failure(failure: _core.RunFailure) -> None:
    kind, message = failure.args
    if kind == "Aborted":
        raise _arrived_error(message) from None
    if kind == "PeerLost":
        raise PeerLost(message) from None
    raise PipelineError(f"{kind}: {message}") from None


@contextlib.contextmanager
def _failures_of_others() -> Iterator[None]:
    """Around what raises PipelineError with the text that another worker left in the rendezvous."""
    try:
        yield
    except PeerLost:
        raise
    except PipelineError as failed:
        raise _arrived_error(str(failed)) from None


class _UserCode:
    """Errors of the user's own code, told with stage and minibatch. Times what it encloses."""

    def __init__(self, where: Callable[[str], str]) -> None:
        self._where = where
        self._what = ""
        self._began_ns = 0
        self.elapsed_ns = 0
        """Since it was last reset to 0."""

    def __call__(self, what: str) -> _UserCode:
        self._what = what
        return self

    def __enter__(self) -> None:
        self._began_ns = time.perf_counter_ns()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.elapsed_ns += time.perf_counter_ns() - self._began_ns
        if isinstance(error, Exception) and not isinstance(error, PipelineError):
            raise PipelineError(f"{self._where(self._what)}: {describe_error(error)}") from error


class _Worker:
    def __init__(self, place: WorkerPlace, options: JobOptions, model: Model) -> None:
        self._place = place
        self._options = options
        self._model = model
        self._core: _core.Worker | None = None
        self._stages: list[StageModule] = []
        self._boundaries: list[Boundary] = []
        self._minibatch = -1

    # The run, in the order of the module's docstring.

    def run(self, data: Iterable[Any] | ForwardedData) -> RunResult:
        torch.set_num_threads(self._options.num_threads)
        _core.keep_freed_memory()
        stream = self._agree(data)
        plan = self._options.plan
        self._device = self._choose_device()
        for stage in self._own_stages():
            stage.to(self._device)
        core = self._core = self._make_core()
        try:
            self._open(core, data)
            if isinstance(data, ForwardedData):
                stream = self._received_stream(core, data)
            self._share_initial_weights(core)
            report: dict[str, Any] = {"pid": os.getpid()}
            if self._place.rank < plan.workers_used:
                report |= _StageLoop(self, core, stream).train()
            return self._gather(core, report)
        except _core.RunFailure as failure:
            _raise_failure(failure)
            raise AssertionError from failure  # _raise_failure does not return

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
            self._seed(base, plan.num_stages)
            stream = self._make_stream(data, plan.num_stages)
            self._boundaries = self._dry_run(stream)
            agreed = {
                "plan": plan.to_dict(),
                "base_seed": base,
                "boundaries": [boundary.to_json() for boundary in self._boundaries],
            }
            rendezvous.publish("agreed", agreed)
            self._base_seed = base
            return stream
        (agreed,) = self._wait_for(["agreed"], lambda _: "rank 0 did not start")
        plan = Plan.from_dict(agreed["plan"], source="rank 0's plan")
        self._options = replace(self._options, plan=plan)
        self._base_seed = int(agreed["base_seed"])
        self._boundaries = [Boundary.from_json(text) for text in agreed["boundaries"]]
        self._stages = split(self._model, plan)
        self._seed(self._base_seed, plan.num_stages)
        return self._make_stream(data, plan.num_stages)

    def _wait_for(self, keys: list[str], describe: Callable[[list[str]], str]) -> list[Any]:
        with _failures_of_others():
            return self._place.rendezvous.wait_for(keys, _START_TIMEOUT_S, describe)

    def _check_world(self, plan: Plan) -> None:
        check_plan_is_built(plan)
        if plan.workers_used > self._place.world_size:
            raise ValueError(
                f"the plan needs {plan.workers_used} workers, but only {self._place.world_size} ranks run:"
                f" start torchrun with --nproc-per-node {plan.workers_used}, or partition for"
                f" {self._place.world_size}"
            )

    def _seed(self, base: int, num_stages: int) -> None:
        if num_stages > 1:
            seed_all(data_seed(base))
        elif self._options.seed is not None:
            seed_all(self._options.seed)

    def _make_stream(self, data: Iterable[Any] | ForwardedData, num_stages: int) -> MinibatchStream:
        if isinstance(data, ForwardedData):
            return ReceivedStream(data, None, None)  # for peek(); replaced when the channels are open
        return DataStream(data, epochs=self._options.epochs, with_fingerprint=num_stages > 1)

    def _dry_run(self, stream: MinibatchStream) -> list[Boundary]:
        inputs, _ = stream.peek()
        self._input_boundary: Boundary | None = None
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
            with _failures_of_others():
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

    # Weights and results between rank 0 and the others.

    def _share_initial_weights(self, core: _core.Worker) -> None:
        """Rank 0's initial weights are used everywhere."""
        others = range(1, self._options.plan.workers_used)
        if self._place.rank == 0:
            for rank in others:
                send_tensors(core, _from_rank_0(rank), _state_of(self._stages[rank]))
        elif self._place.rank in others:
            receive_tensors(core, _from_rank_0(self._place.rank), _state_of(self._stages[self._place.rank]))

    def _gather(self, core: _core.Worker, report: dict[str, Any]) -> RunResult:
        rank, plan, gather = self._place.rank, self._options.plan, self._options.gather
        if rank != 0:
            if rank < plan.workers_used:
                if gather != "none":
                    send_tensors(core, _to_rank_0(rank), _state_of(self._stages[rank]))
                send_document(core, _to_rank_0(rank), report)
            result = RunResult.from_dict(receive_document(core, _from_rank_0(rank)))
            if gather == "all":
                for stage in self._other_stages(rank):
                    receive_tensors(core, _from_rank_0(rank), _state_of(stage))
            return result
        reports = [report]
        for other in range(1, plan.workers_used):
            if gather != "none":
                receive_tensors(core, _to_rank_0(other), _state_of(self._stages[other]))
            reports.append(receive_document(core, _to_rank_0(other)))
        result = _combine(plan, core.transport_name, reports)
        # The farewell: nobody closes before everybody has all it needs.
        for other in range(1, self._place.world_size):
            send_document(core, _from_rank_0(other), result.to_dict())
            if gather == "all":
                for stage in self._other_stages(other):
                    send_tensors(core, _from_rank_0(other), _state_of(stage))
        return result

    def _other_stages(self, rank: int) -> list[StageModule]:
        return [stage for stage_index, stage in enumerate(self._stages) if stage_index != rank]


class _StageLoop:
    """The work items of one stage."""

    def __init__(self, worker: _Worker, core: _core.Worker, stream: MinibatchStream) -> None:
        options, plan = worker._options, worker._options.plan
        self._core = core
        self._options = options
        self._board = worker._place.board
        self._rank = worker._place.rank
        self._stage_index = worker._place.rank
        self._is_first = self._stage_index == 0
        self._is_last = self._stage_index == plan.num_stages - 1
        self._stage = worker._stages[self._stage_index]
        self._device = worker._device
        self._stream = stream
        boundaries = worker._boundaries
        self._boundary_in = None if self._is_first else boundaries[self._stage_index - 1]
        self._boundary_out = None if self._is_last else boundaries[self._stage_index]
        self._input_boundary = worker._input_boundary if self._is_first else None
        # A first layer that works in place would change the data of the next epoch, here and not at the last
        # stage. None: not known before the first forward.
        self._clone_inputs: bool | None = None if self._is_first and not self._is_last else False
        slots = [from_dlpack(core.hold_slot("weight versions")) for _ in range(worker._num_slots)]
        # The pool hands slots out in any order; only that each is one version's matters.
        self._weights = StageWeights(self._stage, slots, worker._offsets)
        self._optimizer = StageOptimizer(options.optimizer, self._weights)
        self._rng = self._own_stream(plan.num_stages, worker._base_seed)
        # Minibatch -> what its backward needs: received leaves, and the outputs or the loss.
        self._in_flight: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._gradient_slot = 0
        self._minibatch = -1
        self._user = _UserCode(self._where)
        self._losses: list[float] = []
        self._samples: list[int] = []
        self._epochs: list[int] = []

    def _own_stream(self, num_stages: int, base: int) -> contextlib.AbstractContextManager[Any]:
        """Around what draws random numbers for the model; seeding.py has the rule."""
        if num_stages == 1:
            return contextlib.nullcontext()
        seed = stage_seed(base, self._stage_index)
        if (self._is_first or self._is_last) and self._stream.draws:
            return RngStream(seed)
        torch.manual_seed(seed)  # nobody else draws here, so nothing needs swapping
        return contextlib.nullcontext()

    def train(self) -> dict[str, Any]:
        plan, core = self._options.plan, self._core
        core.start(
            schedule=self._options.schedule,
            stage=self._stage_index,
            num_stages=plan.num_stages,
            in_flight=plan.in_flight[self._stage_index],
            activations_in="" if self._is_first else activations_name(self._stage_index - 1),
            activations_out="" if self._is_last else activations_name(self._stage_index),
            gradients_in="" if self._is_last else gradients_name(self._stage_index),
            gradients_out="" if self._is_first else gradients_name(self._stage_index - 1),
        )
        do = {"FORWARD": self._forward, "BACKWARD": self._backward, "UPDATE": self._update}
        newest_slot = 0
        self._progress = RunProgress(
            enabled=self._options.progress and self._is_last,
            num_minibatches=self._stream.num_minibatches,
            in_flight=plan.in_flight,
        )
        with self._progress:
            while (work := core.next_work()).kind != "DONE":
                self._user.elapsed_ns = 0
                self._minibatch = work.minibatch
                if self._board is not None:
                    self._board.write(self._rank, work.minibatch)
                do[work.kind](work)
                if work.kind == "UPDATE":
                    newest_slot = work.write_slot
        if self._is_last and not self._is_first:
            self._check_end(work.num_minibatches)
        self._weights.restore(newest_slot)
        return self._report()

    def _forward(self, work: _core.WorkItem) -> None:
        minibatch = work.minibatch
        inputs: Any = None
        targets: Any = None
        leaves: list[Tensor] = []
        mark = work.tag
        if self._is_first or self._is_last:
            with self._user("reading data"):
                batch = self._stream.next()
            if batch is None and self._is_first:
                self._core.end_of_data()
                return
            if batch is None or (not self._is_first and batch.fingerprint != mark):
                raise self._data_mismatch(minibatch)
            inputs, targets, mark = batch.inputs, batch.targets, batch.fingerprint
            if self._is_last:
                self._samples.append(num_samples(targets))
                self._epochs.append(batch.epoch)
        if self._is_first:
            if self._input_boundary is not None:
                flat = self._input_boundary.flatten(inputs, stage=0, minibatch=minibatch)
                self._input_boundary.check(flat, stage=0, minibatch=minibatch)
            value = to_device(inputs, self._device)
            if self._clone_inputs is not False:
                value = map_tensors(torch.Tensor.clone, value)
        else:
            assert self._boundary_in is not None
            leaves = [from_dlpack(capsule) for capsule in work.take_tensors()]
            for leaf, spec in zip(leaves, self._boundary_in.tensors, strict=True):
                leaf.requires_grad_(spec.requires_grad)
            value = self._boundary_in.unflatten([boundary_input(leaf) for leaf in leaves])
        self._weights.bind(work.read_slot)
        with self._rng, self._user("forward"):
            output = self._stage(value)
        if self._clone_inputs is None:
            self._clone_inputs = any(tensor._version > 0 for tensor in tensors_of(value))
        if self._is_last:
            self._loss(minibatch, output, targets, leaves)
        else:
            self._send_activations(minibatch, output, leaves, mark)

    def _loss(self, minibatch: int, output: Any, targets: Any, leaves: list[Tensor]) -> None:
        with self._rng, self._user("loss_fn"):
            loss = self._options.loss_fn(output, to_device(targets, self._device))
            value = float(check_loss(loss, minibatch).detach())
        if not math.isfinite(value) and self._options.on_nonfinite == "stop":
            raise NonFiniteLoss(
                f"the loss of minibatch {minibatch} is {value}: lower the learning rate or check the data, or"
                ' go on with on_nonfinite="continue"'
            )
        self._losses.append(value)
        self._progress.advance(minibatch, value, self._samples[-1])
        self._in_flight[minibatch] = (leaves, [loss])
        self._core.complete_forward([], 0, self._user.elapsed_ns)

    def _send_activations(self, minibatch: int, output: Any, leaves: list[Tensor], mark: int) -> None:
        assert self._boundary_out is not None
        tensors = self._boundary_out.flatten(output, stage=self._stage_index, minibatch=minibatch)
        self._boundary_out.check(tensors, stage=self._stage_index, minibatch=minibatch)
        self._in_flight[minibatch] = (leaves, tensors)
        capsules = [to_dlpack(tensor.detach().contiguous()) for tensor in tensors]
        self._core.complete_forward(capsules, mark, self._user.elapsed_ns)

    def _backward(self, work: _core.WorkItem) -> None:
        leaves, outputs = self._in_flight.pop(work.minibatch)
        gradients: list[Tensor] = []
        if self._boundary_out is not None:
            received = [from_dlpack(capsule) for capsule in work.take_tensors()]
            specs = self._boundary_out.tensors
            outputs = [o for o, spec in zip(outputs, specs, strict=True) if spec.requires_grad]
            gradients = received if outputs else []
        with self._user("backward"):
            if self._is_last:
                if outputs[0].requires_grad:  # nothing to train: all parameters are frozen
                    outputs[0].backward()  # type: ignore[no-untyped-call]
            else:
                roots = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
                if roots:
                    torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
        self._gradient_slot = work.read_slot
        capsules = []
        if self._boundary_in is not None:
            sent = [_gradient_of(leaf) for leaf in leaves if leaf.requires_grad]
            capsules = [to_dlpack(gradient) for gradient in sent or [torch.zeros(1, dtype=torch.uint8)]]
        self._core.complete_backward(capsules, 0, self._user.elapsed_ns)

    def _update(self, work: _core.WorkItem) -> None:
        with self._user("optimizer"):
            self._optimizer.step(self._gradient_slot, work.read_slot, work.write_slot)
        self._core.complete_update(self._user.elapsed_ns)

    def _where(self, what: str) -> str:
        return (
            f"stage {self._stage_index} (rank {self._rank}) failed at minibatch {self._minibatch} in {what}"
        )

    def _data_mismatch(self, minibatch: int) -> DataMismatch:
        return DataMismatch(
            f"minibatch {minibatch} is not the same data at stage 0 (rank 0) and stage {self._stage_index}"
            f" (rank {self._rank}): every worker iterates `data` itself, so its order must follow from the"
            " seeded generators of torch, random and numpy, or be fixed"
        )

    def _check_end(self, num_minibatches: int) -> None:
        with self._user("reading data"):
            beyond = self._stream.next()
        if beyond is not None:
            raise self._data_mismatch(num_minibatches)

    def _report(self) -> dict[str, Any]:
        counters = self._core.counters()
        between_stages = (activations_name(self._stage_index), gradients_name(self._stage_index - 1))
        return {
            "pid": os.getpid(),
            "versions": self._core.versions(),
            "totals": self._core.totals(),
            "spans": self._core.spans(),
            "memory": {
                name: {"predicted": planned, "peak": peak} for name, planned, peak in self._core.memory()
            },
            "bytes_sent": sum(counters[name][0] for name in between_stages if name in counters),
            "losses": self._losses,
            "samples": self._samples,
            "epochs": self._epochs,
        }


def _gradient_of(leaf: Tensor) -> Tensor:
    # The loss may not depend on every tensor that could have had a gradient.
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()


def _state_of(stage: StageModule) -> list[Tensor]:
    """Parameters, frozen ones included, and buffers of a stage, in an order that all workers share."""
    named = [*stage.trainable_parameters(), *stage.frozen_parameters(), *stage.stage_buffers()]
    return [tensor for _, tensor in named]


# The channels of a run. Their names are unique in it, and the position in the list is the channel_id.

INPUTS = "inputs from the caller"
TARGETS = "targets from the caller"
CALLER = -1  # as a rank: the process that called run(), when it forwards data


def activations_name(stage_index: int) -> str:
    return f"activations of stage {stage_index} to stage {stage_index + 1}"


def gradients_name(stage_index: int) -> str:
    return f"gradients of stage {stage_index + 1} to stage {stage_index}"


def _from_rank_0(rank: int) -> str:
    return f"rank 0 to rank {rank}"


def _to_rank_0(rank: int) -> str:
    return f"rank {rank} to rank 0"


@dataclass(frozen=True)
class RunChannel:
    """A directed channel between two ranks. tensors: (dtype name, dimensions, bytes at most)."""

    name: str
    channel_id: int
    sender: int
    receiver: int
    tensors: list[tuple[str, int, int]]
    num_slots: int
    """At the receiver: items that may be received and not yet given back."""
    num_unsent_max: int
    """At the sender: items that may be waiting or on their way."""
    on_device: bool

    def add_to(self, core: _core.Worker, rank: int) -> None:
        """Adds this end of the channel to the worker; nothing when the rank has no end of it."""
        if rank not in (self.sender, self.receiver):
            return
        sends = rank == self.sender
        peer = self.receiver if sends else self.sender
        core.add_channel(
            name=self.name,
            sends=sends,
            peer="the caller" if peer == CALLER else f"stage {peer} (rank {peer})",
            channel_id=self.channel_id,
            tensors=self.tensors,
            num_items=self.num_unsent_max if sends else self.num_slots,
            on_device=self.on_device,
        )


def channels_of_run(
    plan: Plan, world_size: int, boundaries: list[Boundary], forwarded: ForwardedData | None
) -> list[RunChannel]:
    """All channels of a run, the same list at every worker."""
    channels: list[RunChannel] = []

    def add(name: str, sender: int, receiver: int, specs: Iterable[TensorSpec], slots: int, unsent: int,
            on_device: bool) -> None:  # fmt: skip
        tensors = [(str(s.dtype).removeprefix("torch."), len(s.shape), s.num_bytes) for s in specs]
        channels.append(RunChannel(name, len(channels), sender, receiver, tensors, slots, unsent, on_device))

    for stage, boundary in enumerate(boundaries):
        # Downstream keeps n_s activations until their backward, and one more may arrive meanwhile.
        in_flight, in_flight_downstream = plan.in_flight[stage], plan.in_flight[stage + 1]
        unsent = 2 * in_flight + 4  # never more than n_s are in flight; the rest: released a little late
        add(
            activations_name(stage),
            stage,
            stage + 1,
            boundary.tensors,
            in_flight_downstream + 1,
            unsent,
            True,
        )
        gradients = [spec for spec in boundary.tensors if spec.requires_grad] or [_NO_GRADIENT]
        add(gradients_name(stage), stage + 1, stage, gradients, 2, unsent, True)
    piece = [TensorSpec(torch.uint8, (PIECE_BYTES,), requires_grad=False)]
    for rank in range(1, world_size):
        add(_from_rank_0(rank), 0, rank, piece, 4, 4, False)
        add(_to_rank_0(rank), rank, 0, piece, 4, 4, False)
    if forwarded is not None:
        epoch = TensorSpec(torch.int64, (1,), requires_grad=False)
        last = plan.num_stages - 1
        inputs, targets = [*forwarded.inputs.tensors, epoch], [*forwarded.targets.tensors, epoch]
        add(INPUTS, CALLER, 0, inputs, plan.in_flight[0] + 1, 2, False)
        add(TARGETS, CALLER, last, targets, plan.in_flight[last] + 1, 2, False)
    return channels


def find_libzmq() -> str:
    """The libzmq inside the pyzmq wheel; empty leaves the search to the core."""
    import zmq

    bundled = Path(zmq.__file__).parent.parent / "pyzmq.libs"
    found = sorted(bundled.glob("libzmq*.so*")) if bundled.is_dir() else []
    return str(found[0]) if found else ""


def _combine(plan: Plan, transport: str, reports: list[dict[str, Any]]) -> RunResult:
    """The run's result from what the workers report, in the order of their ranks."""
    last = reports[-1]
    losses, samples, epochs = last["losses"], last["samples"], last["epochs"]
    totals = [report["totals"] for report in reports]
    elapsed_ns = max(entry["elapsed_ns"] for entry in totals)
    transports: dict[str, str] = {}
    for stage in range(plan.num_stages - 1):
        transports[f"{stage}->{stage + 1}"] = transport
        transports[f"{stage + 1}->{stage}"] = transport
    return RunResult(
        losses=losses,
        epoch_losses=_epoch_losses(losses, samples, epochs),
        versions=[[(forward, backward) for forward, backward in report["versions"]] for report in reports],
        samples_per_s=sum(samples) / max(elapsed_ns / 1e9, 1e-9),
        predicted_ms=plan.bottleneck_ms,
        measured_ms=_steady_ms(last["spans"], plan.in_flight[0]),
        bubble_share=1.0
        - sum(t["compute_ns"] for t in totals) / max(sum(t["elapsed_ns"] for t in totals), 1),
        bytes_sent=sum(report["bytes_sent"] for report in reports),
        transports=transports,
        worker_pids=[report["pid"] for report in reports],
        memory=[report["memory"] for report in reports],
        overhead_us=[
            (t["elapsed_ns"] - t["wait_ns"] - t["compute_ns"]) / 1e3 / max(t["num_work_items"], 1)
            for t in totals
        ],
        wait_share=[t["wait_ns"] / max(t["elapsed_ns"], 1) for t in totals],
        spans=[[tuple(span) for span in report["spans"]] for report in reports],
    )


def _epoch_losses(losses: list[float], samples: list[int], epochs: list[int]) -> list[float]:
    """Mean loss per sample of each epoch."""
    sums: dict[int, tuple[float, int]] = {}
    for loss, count, epoch in zip(losses, samples, epochs, strict=True):
        total, seen = sums.get(epoch, (0.0, 0))
        sums[epoch] = (total + loss * count, seen + count)
    return [total / max(seen, 1) for _, (total, seen) in sorted(sums.items())]


def _steady_ms(spans: list[tuple[Any, ...]], num_warm_up: int) -> float:
    """Milliseconds per minibatch between updates of the last stage, after as many minibatches as are in
    flight; over all of them when there are too few."""
    done_ns = [span[4] for span in spans if span[0] == "UPDATE"]
    if len(done_ns) < 2:
        return (spans[-1][4] - spans[0][2]) / 1e6 / max(len(done_ns), 1) if spans else 0.0
    steady = done_ns[num_warm_up:] if len(done_ns) > num_warm_up + 2 else done_ns
    return float(steady[-1] - steady[0]) / 1e6 / (len(steady) - 1)
