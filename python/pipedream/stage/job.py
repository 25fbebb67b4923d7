"""The options of a run, and the place of this process in it. Plain values; any thread."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from pipedream import _core
from pipedream.callbacks.steering import CallPoints
from pipedream.checkpoint.checkpoints import Checkpoints
from pipedream.checkpoint.run_state import RunState
from pipedream.common.agreement import OWN, compared, given, settings_of
from pipedream.links.options import LinkOptions
from pipedream.links.rendezvous import Rendezvous
from pipedream.model.initial_weights import WeightSource
from pipedream.model.seeding import seed_data
from pipedream.model.validation import Validation
from pipedream.planning.codec_choice import codec_between
from pipedream.planning.job import Job, Replication, ScheduleTraits, Traits, traits_where
from pipedream.planning.plan import Plan
from pipedream.planning.program import PROGRAM, Program
from pipedream.report.status import StatusBoard
from pipedream.splitting.evaluation_cut import EvaluationCut
from pipedream.stage.decisions import StopOrder

__all__ = [
    "CallerSettings",
    "Continued",
    "JobOptions",
    "LinkedRun",
    "MemoryOptions",
    "OutputOptions",
    "WorkerPlace",
    "matmul_precision",
]


def _said_of_schedule(schedule: str | Program) -> str:
    if not isinstance(schedule, Program):
        return schedule
    return f"a program with SHA-256 {hashlib.sha256(str(schedule).encode()).hexdigest()[:12]}..."


def _said_of_checkpoints(checkpoints: Checkpoints | None) -> str | None:
    return None if checkpoints is None else f"{checkpoints.folder} every {checkpoints.every}"


_SETTINGS_OF_STATE = ("schedule", "microbatches", "autocast", "codec", "sync", "staleness", "sync_every")


def _stages_of(plan: Plan) -> str:
    """Describes in one line the fields of a plan that decide which state each worker has."""
    stages = [
        f"layers {stage.first_layer} to {stage.last_layer}"
        + (f" x {stage.num_replicas}" if stage.num_replicas > 1 else "")
        + (f" and {stage.num_spare_shards} spares" if stage.num_spare_shards else "")
        for stage in plan.stages
    ]
    return f"{'; '.join(stages)} with in_flight {list(plan.in_flight)}"


def _spares_of(plan: Plan) -> str | None:
    """Names the first stage with spare shards; None if no stage has any."""
    with_spares = [index for index, stage in enumerate(plan.stages) if stage.num_spare_shards]
    return f"stage {with_spares[0]} has spare shards" if with_spares else None


@dataclass(frozen=True)
class Continued:
    """A checkpoint from which a run continues."""

    path: str
    minibatch: int
    epoch: int = 0
    """The epoch of the minibatch."""
    evaluates: bool = False
    """Whether the weights at this minibatch are still to be evaluated."""
    tells_later: bool = False
    """Whether a callback has asked for an evaluation at this minibatch. Callbacks are told of it one boundary
    later."""
    answers: Sequence[tuple[int, int, float]] = ()
    """(minibatch, events, rate factor) of the callbacks' decisions that take effect after the checkpoint, or
    that stop the run at it."""


@dataclass(frozen=True)
class MemoryOptions:
    """The memory that a worker may use, and the options that reduce its memory."""

    limit_bytes: int | None = field(metadata=compared("memory", given))
    """The most bytes that this worker may use."""
    recompute: tuple[bool, ...] | None
    """Whether each stage recomputes. None: each worker decides, so that it fits into limit_bytes."""


@dataclass(frozen=True)
class OutputOptions:
    """The destinations of a run's weights, and the display of its progress."""

    gather: str
    save: str | None
    """The folder for trained weights, absolute."""
    progress: bool = field(metadata=OWN)


@dataclass(frozen=True)
class JobOptions:
    """The options of a run. Workers compare them (common/agreement.py), except fields that are declared OWN.
    The plan is one of these, because all workers take rank 0's plan."""

    plan: Plan = field(metadata=OWN)
    loss_fn: Callable[[Any, Any], Tensor] = field(metadata=OWN)
    optimizer: Callable[..., torch.optim.Optimizer] = field(metadata=OWN)
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = field(metadata=compared(said=given))
    schedule: str | Program = field(metadata=compared(said=_said_of_schedule))
    """The schedule's name, or a program. A program also gives the microbatches, and its in_flight replaces
    the plan's."""
    microbatches: int
    weight_fn: Callable[[Any], Any] | None = field(metadata=compared(said=given))
    memory: MemoryOptions
    autocast: torch.dtype | None = field(metadata=compared(said=lambda dtype: dtype and str(dtype)))
    max_grad_norm: float | None
    replication: Replication
    epochs: int
    seed: int | None
    links: LinkOptions
    on_nonfinite: str
    output: OutputOptions
    weights: WeightSource = field(metadata=compared(said=given))
    """The source of the initial weights of a model on the meta device."""
    num_threads: int = field(metadata=OWN)
    """Torch's threads per worker."""
    call_points: CallPoints = field(default=CallPoints(), metadata=compared("callbacks", repr))
    """The places at which callbacks are called."""
    state: RunState | None = field(default=None, metadata=compared(said=lambda state: state and state.name))
    """The state of the run that this run continues."""
    validation: Validation | None = field(
        default=None, metadata=compared(said=lambda value: value and value.said())
    )
    evaluation_cut: EvaluationCut | None = field(default=None, metadata=OWN)
    """Cuts of the eval-mode forward. None if it is cut at the same places as the forward in training."""
    checkpoints: Checkpoints | None = field(default=None, metadata=compared(said=_said_of_checkpoints))
    continues: Continued | None = field(default=None, metadata=OWN)
    """The checkpoint from which the run continues. All workers use rank 0's value."""
    largest_in: dict[str, int] = field(default_factory=dict, metadata=OWN)
    """By entry of the data, the minibatch in which the entry is largest (planning.shapes.largest_in). Errors
    name it."""

    @property
    def schedule_name(self) -> str:
        return PROGRAM if isinstance(self.schedule, Program) else self.schedule

    @property
    def first_minibatch(self) -> int:
        """The first minibatch of this run; not 0 if this run continues another run."""
        if self.continues is not None:
            return self.continues.minibatch
        return 0 if self.state is None else self.state.minibatch

    @property
    def measures_gradients(self) -> bool:
        """Whether the gradients' norm is measured, because updates need it or callbacks ask for it. Some runs
        have no norm to give to callbacks."""
        if self.max_grad_norm is not None or self.autocast is torch.float16:
            return True
        has_none = self.is_asynchronous or self.reduces_together or self.plan.num_spares
        return self.call_points.gradient_norms and not has_none and not isinstance(self.schedule, Program)

    @property
    def has_replicas(self) -> bool:
        return any(stage.num_replicas > 1 for stage in self.plan.stages)

    @property
    def reduces_together(self) -> bool:
        """Whether the replicas of a stage update after an all-reduce, and not by shards."""
        is_asked_for = self.replication.sync == "allreduce" or self.replication.sync_every > 1
        return is_asked_for and self.has_replicas

    @property
    def is_asynchronous(self) -> bool:
        """Whether replicas update by asynchronous shards: the gradient that one replica pushes in a round
        makes an update of its own (update/asynchronous_server.py)."""
        return self.replication.sync == "asp" and self.has_replicas

    def has_shards_at(self, stage: int) -> bool:
        """Whether each replica of the stage updates a shard of its parameters."""
        return self.plan.stages[stage].num_replicas > 1 and not self.reduces_together

    def is_asynchronous_at(self, stage: int) -> bool:
        return self.is_asynchronous and self.plan.stages[stage].num_replicas > 1

    @property
    def may_choose_boundaries(self) -> bool:
        """Whether rank 0 can choose a point between two minibatches that the other replicas of stage 0 have
        not passed. It cannot if stage 0 has asynchronous shards, because then nothing bounds how far a
        replica may be ahead of rank 0."""
        return not self.is_asynchronous_at(0)

    @property
    def sums_shares(self) -> bool:
        """Whether each replica of a stage updates with the mean gradient over its own microbatches only."""
        return self.has_replicas and (self.replication.sync == "asp" or self.replication.sync_every > 1)

    def schedule_options(
        self,
        ties: Sequence[tuple[int, int]] = (),
        *,
        first_minibatch: int = 0,
        oldest_minibatch: int | None = None,
    ) -> _core.ScheduleOptions:
        """Returns the schedule in the core's form. Raises ValueError if plan and schedule exclude each other.

        ties: (owner, user) of parameters that stages share.
        first_minibatch: the minibatch with which the pipeline begins.
        oldest_minibatch: the minibatch with which an earlier run's pipeline began, if this run continues with
            that run's stored versions.
        """
        program = self.schedule if isinstance(self.schedule, Program) else None
        return _core.ScheduleOptions(
            schedule=self.schedule_name,
            program=program.listed if program else None,
            in_flight=program.in_flight if program else list(self.plan.in_flight),
            num_microbatches=self.microbatches,
            placement=self.plan.placement,
            recompute=list(self.memory.recompute or ()),
            ties=ties,
            # After an all-reduce each replica has the whole gradient, so it computes the norm alone.
            exchanges_norms=self.measures_gradients and not self.reduces_together,
            staleness=self.replication.staleness,
            uses_allreduce=self.reduces_together,
            asynchronous=self.is_asynchronous,
            first_minibatch=first_minibatch,
            oldest_minibatch=oldest_minibatch,
            evaluates=self.validation is not None,
        )

    def job(self, ties: Sequence[tuple[int, int]] = ()) -> Job:
        """Returns the facts about this run by which the core finds options that exclude each other. ties: as
        in schedule_options()."""
        replicas = [stage.num_replicas for stage in self.plan.stages]
        is_float16 = self.autocast is torch.float16
        exchanges = self.reduces_together and self.measures_gradients and len(replicas) > 1
        if exchanges and not is_float16:
            exchanges = _core.drains_every_minibatch(self.schedule_options())
        return Job(
            self.schedule_name,
            ScheduleTraits.of(self.schedule_name),
            self.replication,
            replicas,
            _spares_of(self.plan),
            self.links.codec,
            self.max_grad_norm,
            is_float16,
            exchanges,
            ties,
        )

    def traits(self) -> Traits:
        """Returns the traits of this run. A trait is a property that may exclude another
        (csrc/schedule/exclusions.cc). Traits of parameters that stages share are left out."""
        checkpoints, keys, ports = self.checkpoints, self.links.keys, self.links.ports
        is_timed = checkpoints is not None and checkpoints.seconds is not None and self.is_asynchronous
        every = "" if checkpoints is None else f"checkpoints: every is {checkpoints.every!r}"
        own: dict[str, tuple[bool, str | None]] = {
            "validation": (self.validation is not None, None),
            "averages": (self.call_points.ema_decay is not None, None),
            "no_averages": (self.call_points.ema_decay is None, None),
            "averaged_validation": (self.validation is not None and self.validation.ema, None),
            "checkpoints": (checkpoints is not None, None),
            "timed_checkpoints": (is_timed, every),
            "input_replicas": (self.plan.stages[0].num_replicas > 1, None),
            "state": (self.state is not None, None),
            "keys": (keys is not None, None),
            "ports": (ports is not None, None),
        }
        for stage in range(1, self.plan.num_stages):
            codec = codec_between(self.links.codec, stage, stage - 1)
            if codec.startswith("topk"):
                own["topk_gradients"] = (True, f"codec is {codec!r} for gradients")
        return self.job().traits() | traits_where(own)

    def seed_data(self, base: int) -> None:
        """Seeds the process's generators before it reads the run's data. base: the run's base_seed()."""
        if self.state is None:
            seed_data(base, self.seed, self.plan.workers_used)
        else:
            self.state.seed_data()

    def settings_of_state(self) -> dict[str, Any]:
        """Returns the settings that must be equal in a run and the run that it continues. The keys are the
        names of run()'s arguments."""
        settings = settings_of(self)
        return {"plan": _stages_of(self.plan)} | {name: settings[name] for name in _SETTINGS_OF_STATE}


@dataclass(frozen=True)
class WorkerPlace:
    """The identity of this worker, and its connection to the other workers and to its caller."""

    rank: int
    world_size: int
    local_rank: int
    run_id: int
    """64 random bits that identify the run. All workers use rank 0's bits."""
    incarnation: int
    """The number of times that the run was restarted."""
    rendezvous: Rendezvous
    board: StatusBoard | None
    stop_order: StopOrder | None = None
    """Carries a request to end the run early; None if nobody may end it."""
    folder: Path | None = None
    """The folder in which a local worker leaves files for its caller. None if the caller is this process.
    Then the model is put back on the device where it was."""

    @property
    def returns_model(self) -> bool:
        return self.folder is None

    @property
    def ranks_of_machine(self) -> range:
        """The ranks on this worker's machine. They are consecutive, because launchers number the workers of a
        machine in a row."""
        first = self.rank - self.local_rank
        return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))


@dataclass(frozen=True)
class LinkedRun:
    """The facts about a run that its links need."""

    place: WorkerPlace
    links: LinkOptions
    describe_worker: Callable[[int], str]
    plan_hash: int = 0
    """The hash of the plan. A channel opens only if it is equal at both ends."""

    def describe_ends(self, *ranks: int) -> str:
        return " and ".join(map(self.describe_worker, sorted(ranks)))


def _enable(module: Any) -> Callable[[bool], None]:
    return functools.partial(setattr, module, "enabled")


_SDP = torch.backends.cuda
# By name, switches of the whole process: (function that gets the switch, function that sets it).
_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], Any]]] = {
    "cudnn": (lambda: torch.backends.cudnn.enabled, _enable(torch.backends.cudnn)),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        functools.partial(setattr, torch.backends.cudnn, "benchmark"),
    ),
    "cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        functools.partial(setattr, torch.backends.cudnn, "deterministic"),
    ),
    "mkldnn": (lambda: bool(torch.backends.mkldnn.enabled), _enable(torch.backends.mkldnn)),
    "fast path of attention": (
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    "flash attention": (_SDP.flash_sdp_enabled, _SDP.enable_flash_sdp),
    "memory-efficient attention": (_SDP.mem_efficient_sdp_enabled, _SDP.enable_mem_efficient_sdp),
    "attention by cudnn": (_SDP.cudnn_sdp_enabled, _SDP.enable_cudnn_sdp),
    "attention by its formula": (_SDP.math_sdp_enabled, _SDP.enable_math_sdp),
}


_PRECISION_NAMES = (
    *("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn"),
    *("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
)
"""The parts of torch.backends that have an fp32_precision. A general part comes before its special parts,
because a special part without a value of its own has the general part's value."""


def _precision_holders() -> dict[str, Any]:
    found = {}
    for name in _PRECISION_NAMES:
        holder: Any = torch.backends
        for part in filter(None, name.split(".")):
            holder = getattr(holder, part, None)
        if hasattr(holder, "fp32_precision"):  # it exists from torch 2.9 on
            found[name] = holder
    return found


def matmul_precision() -> str | None:
    """Returns the precision set by set_float32_matmul_precision(). Returns None if the script has set
    fp32_precision instead."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises this after fp32_precision was set
        return None


@dataclass(frozen=True)
class CallerSettings:
    """Settings of the whole process that decide what a model computes or how its data are loaded. A local
    worker takes over the settings of its caller's process."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warn_only: bool
    matmul_precision: str | None
    fp32_precisions: dict[str, str]
    """The fp32_precision of each part of torch.backends, by its name in _PRECISION_NAMES."""
    switches: dict[str, bool]
    """Whether each switch of the process is on, by its key in _SWITCHES."""
    anomalies: tuple[bool, bool]
    """Whether autograd's anomaly detection is on, and whether it checks for NaN."""
    start_method: str
    """The method by which a DataLoader starts its processes. A local worker that was started by "spawn" would
    otherwise use "spawn" for them, too."""
    sharing_strategy: str
    """The method by which a DataLoader's processes hand over tensors (torch.multiprocessing)."""

    @classmethod
    def capture(cls) -> CallerSettings:
        # With allow_none=False the call would choose a start method if none is set, and the caller's process
        # would keep that method.
        start_method = multiprocessing.get_start_method(allow_none=True)
        return cls(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            matmul_precision=matmul_precision(),
            fp32_precisions={name: one.fp32_precision for name, one in _precision_holders().items()},
            switches={name: is_on() for name, (is_on, _) in _SWITCHES.items()},
            anomalies=(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            # get_all_start_methods() lists the default method first.
            start_method=start_method or multiprocessing.get_all_start_methods()[0],
            sharing_strategy=torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        )

    def apply(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        # The call imports torch's compilers, so it is left out if it would change nothing.
        if self.deterministic or torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warn_only)
        if self.matmul_precision is not None:
            torch.set_float32_matmul_precision(self.matmul_precision)
        for name, holder in _precision_holders().items():
            if holder.fp32_precision != self.fp32_precisions[name]:
                holder.fp32_precision = self.fp32_precisions[name]
        for name, (is_on, switch) in _SWITCHES.items():
            if is_on() != self.switches[name]:
                switch(self.switches[name])
        torch.autograd.set_detect_anomaly(*self.anomalies)
        multiprocessing.set_start_method(self.start_method, force=True)
        torch.multiprocessing.set_sharing_strategy(self.sharing_strategy)  # type: ignore[no-untyped-call]
