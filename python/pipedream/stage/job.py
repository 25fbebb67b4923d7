"""The job of a run, and the place of this process in it. Plain values; any thread."""

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
from pipedream.planning.codec_choice import PUSHES, pushes_factors
from pipedream.planning.plan import Plan
from pipedream.planning.program import PROGRAM, Program, rules_of
from pipedream.report.status import StatusBoard
from pipedream.splitting.evaluation_cut import EvaluationCut
from pipedream.stage.decisions import StopOrder

__all__ = ["CallerSettings", "Continued", "JobOptions", "WorkerPlace", "check_replicas", "check_ties"]


def _said_of_schedule(schedule: str | Program) -> str:
    if not isinstance(schedule, Program):
        return schedule
    return f"a program with SHA-256 {hashlib.sha256(str(schedule).encode()).hexdigest()[:12]}..."


def _said_of_checkpoints(checkpoints: Checkpoints | None) -> str | None:
    return None if checkpoints is None else f"{checkpoints.folder} every {checkpoints.every}"


_SETTINGS_OF_STATE = ("schedule", "microbatches", "autocast", "codec", "sync", "staleness", "sync_every")


def _stages_of(plan: Plan) -> str:
    """Says in a line what of a plan decides which state its workers have."""
    stages = [
        f"layers {stage.first_layer} to {stage.last_layer}"
        + (f" x {stage.num_replicas}" if stage.num_replicas > 1 else "")
        + (f" and {stage.num_spare_shards} spares" if stage.num_spare_shards else "")
        for stage in plan.stages
    ]
    return f"{'; '.join(stages)} with in_flight {list(plan.in_flight)}"


@dataclass(frozen=True)
class Continued:
    """A checkpoint from which a run continues."""

    path: str
    minibatch: int


@dataclass(frozen=True)
class JobOptions:
    """The options of a run. They are equal at all workers, which compare them (agreement.py), but for the
    plan, which rank 0 overrides, and for fields that are declared as each worker's own."""

    plan: Plan = field(metadata=OWN)
    loss_fn: Callable[[Any, Any], Tensor] = field(metadata=OWN)
    optimizer: Callable[..., torch.optim.Optimizer] = field(metadata=OWN)
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = field(metadata=compared(said=given))
    schedule: str | Program = field(metadata=compared(said=_said_of_schedule))
    """A program's microbatches are the run's, and its in_flight stands for the plan's."""
    microbatches: int
    weight_fn: Callable[[Any], Any] | None = field(metadata=compared(said=given))
    recompute: tuple[bool, ...] | None
    """Per stage; None: each worker decides, to fit into memory_bytes."""
    memory_bytes: int | None = field(metadata=compared("memory", given))
    """Bytes that this worker may use at most."""
    autocast: torch.dtype | None = field(metadata=compared(said=lambda dtype: dtype and str(dtype)))
    max_grad_norm: float | None
    sync: str
    staleness: int
    sync_every: int
    epochs: int
    seed: int | None
    links: LinkOptions
    on_nonfinite: str
    gather: str
    weights: WeightSource = field(metadata=compared(said=given))
    """The source of weights that are on the meta device."""
    save: str | None
    """The folder for trained weights, absolute."""
    progress: bool = field(metadata=OWN)
    num_threads: int = field(metadata=OWN)
    """Torch's threads per worker."""
    call_points: CallPoints = field(default=CallPoints(), metadata=compared("callbacks", repr))
    """The places at which callbacks are called."""
    state: RunState | None = field(default=None, metadata=compared(said=lambda state: state and state.name))
    """The state of the run that this one goes on from."""
    validation: Validation | None = field(
        default=None, metadata=compared(said=lambda value: value and value.said())
    )
    evaluation_cut: EvaluationCut | None = field(default=None, metadata=OWN)
    """Cuts of the eval-mode forward; None where it is cut as the layers of the training."""
    checkpoints: Checkpoints | None = field(default=None, metadata=compared(said=_said_of_checkpoints))
    continues: Continued | None = field(default=None, metadata=OWN)
    """The checkpoint from which the run continues; rank 0's is everybody's."""
    largest_in: dict[str, int] = field(default_factory=dict, metadata=OWN)
    """Minibatches with the largest entries of data in a list, for errors (planning.shapes.largest_in)."""

    @property
    def schedule_name(self) -> str:
        return PROGRAM if isinstance(self.schedule, Program) else self.schedule

    @property
    def first_minibatch(self) -> int:
        """Counted through all runs that go on one where another ended."""
        if self.continues is not None:
            return self.continues.minibatch
        return 0 if self.state is None else self.state.minibatch

    @property
    def measures_gradients(self) -> bool:
        """Whether updates need the gradients' norm, or callbacks want to know it."""
        if self.max_grad_norm is not None or self.autocast is torch.float16:
            return True
        has_none = self.is_asynchronous or self.reduces_together or self.plan.num_spares
        return self.call_points.gradient_norms and not has_none and not isinstance(self.schedule, Program)

    @property
    def reduces_together(self) -> bool:
        """Whether replicas of a stage update by a collective, not by shards."""
        is_asked_for = self.sync == "allreduce" or self.sync_every > 1
        return is_asked_for and any(stage.num_replicas > 1 for stage in self.plan.stages)

    @property
    def is_asynchronous(self) -> bool:
        """Whether every gradient of a replica is an update of its own."""
        return self.sync == "asp" and any(stage.num_replicas > 1 for stage in self.plan.stages)

    @property
    def sums_shares(self) -> bool:
        """Whether replicas of a stage update by the mean over their own microbatches alone."""
        has_replicas = any(stage.num_replicas > 1 for stage in self.plan.stages)
        return has_replicas and (self.sync == "asp" or self.sync_every > 1)

    def schedule_options(
        self,
        ties: Sequence[tuple[int, int]] = (),
        *,
        first_minibatch: int = 0,
        oldest_minibatch: int | None = None,
    ) -> _core.ScheduleOptions:
        """The schedule as the core takes it. ties: (owner, user) of parameters that stages share.
        first_minibatch: with which the pipeline begins. oldest_minibatch: with which it had begun, where it
        goes on with the versions kept since. Raises ValueError for what plan and schedule cannot do."""
        program = self.schedule if isinstance(self.schedule, Program) else None
        return _core.ScheduleOptions(
            schedule=self.schedule_name,
            program=program.listed if program else None,
            in_flight=program.in_flight if program else list(self.plan.in_flight),
            num_microbatches=self.microbatches,
            placement=self.plan.placement,
            recompute=list(self.recompute or ()),
            ties=ties,
            # Replicas that reduce together all have the whole gradient.
            exchanges_norms=self.measures_gradients and not self.reduces_together,
            staleness=self.staleness,
            uses_allreduce=self.reduces_together,
            asynchronous=self.is_asynchronous,
            first_minibatch=first_minibatch,
            oldest_minibatch=oldest_minibatch,
            evaluates=self.validation is not None,
        )

    def seed_data(self, base: int) -> None:
        """Makes the process's generators those of whoever reads the run's data. base: base_seed() of it."""
        if self.state is None:
            seed_data(base, self.seed, self.plan.workers_used)
        else:
            self.state.seed_data()

    def settings_of_state(self) -> dict[str, Any]:
        """By argument of run(): what a run must have as the one that it goes on from."""
        settings = settings_of(self)
        return {"plan": _stages_of(self.plan)} | {name: settings[name] for name in _SETTINGS_OF_STATE}


@dataclass(frozen=True)
class WorkerPlace:
    """The place of this worker among the others."""

    rank: int
    world_size: int
    local_rank: int
    run_id: int
    """64 random bits, so that no other run has them; rank 0's are everybody's."""
    incarnation: int
    """How often the run was restarted."""
    rendezvous: Rendezvous
    board: StatusBoard | None
    stop_order: StopOrder | None = None
    """None: nobody may end the run early."""
    folder: Path | None = None
    """The folder of a local worker, for its caller. None: the user has the model of this process, and finds
    it again on the device where it was."""

    @property
    def returns_model(self) -> bool:
        return self.folder is None

    @property
    def ranks_of_machine(self) -> range:
        """The ranks of this worker's machine, which a launcher counts one after the other."""
        first = self.rank - self.local_rank
        return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))


def _enable(module: Any) -> Callable[[bool], None]:
    return functools.partial(setattr, module, "enabled")


_SDP = torch.backends.cuda
# Switches of a whole process: (get, set).
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


@dataclass(frozen=True)
class CallerSettings:
    """Settings of a whole process that decide what a model computes or how its data are loaded. Local workers
    take the caller's."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warn_only: bool
    matmul_precision: str
    switches: dict[str, bool]
    """By the names of _SWITCHES."""
    anomalies: tuple[bool, bool]
    """Whether autograd looks for them, and whether NaN is one."""
    start_method: str
    """The way in which a DataLoader starts its processes. A spawned worker's own would be "spawn"."""
    sharing_strategy: str
    """The way in which a DataLoader's processes hand over tensors (torch.multiprocessing)."""

    @classmethod
    def capture(cls) -> CallerSettings:
        # Without asking for it where it is not set: that would set it, for the caller too.
        start_method = multiprocessing.get_start_method(allow_none=True)
        return cls(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
            switches={name: is_on() for name, (is_on, _) in _SWITCHES.items()},
            anomalies=(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            start_method=start_method or multiprocessing.get_all_start_methods()[0],  # which is the default
            sharing_strategy=torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        )

    def apply(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        if self.deterministic or torch.are_deterministic_algorithms_enabled():  # it imports torch's compilers
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warn_only)
        torch.set_float32_matmul_precision(self.matmul_precision)
        for name, (is_on, switch) in _SWITCHES.items():
            if is_on() != self.switches[name]:
                switch(self.switches[name])
        torch.autograd.set_detect_anomaly(*self.anomalies)
        multiprocessing.set_start_method(self.start_method, force=True)
        torch.multiprocessing.set_sharing_strategy(self.sharing_strategy)  # type: ignore[no-untyped-call]


def check_replicas(options: JobOptions) -> None:
    """Raises ValueError for what replicas of a stage cannot have, and for what only they have."""
    if options.is_asynchronous and pushes_factors(options.links.codec):
        raise ValueError(
            "codec pushes factors, of which replicas make equal versions round by round, and sync is 'asp',"
            " which has no common rounds: use sync='bsp', or leave 'factors' out"
        )
    if options.sync != "ssp" and options.staleness > 0:
        raise ValueError(
            f"staleness is {options.staleness}, but sync is {options.sync!r}, which has none: use sync='ssp'"
        )
    if options.validation is not None:
        _check_validation(options)
    if options.call_points.ema_decay is not None:
        _check_averages(options)
    if options.is_asynchronous:
        _check_asynchronous(options)
    if options.reduces_together:
        _check_reduced(options)
    if options.plan.num_spares:
        _check_spares(options)


def _check_validation(options: JobOptions) -> None:
    """Raises ValueError for what has no version in common at a minibatch."""
    what: str | None = None
    if isinstance(options.schedule, Program):
        what = "schedule is a program, which has no place for evaluations: use a schedule by its name"
    elif options.is_asynchronous or options.staleness > 0:
        what = f"sync is {options.sync!r}, whose replicas have no version in common: use sync='bsp'"
    elif options.sync_every > 1 and any(stage.num_replicas > 1 for stage in options.plan.stages):
        what = f"sync_every is {options.sync_every}, and replicas have weights of their own: leave it out"
    elif options.validation is not None and options.validation.ema:
        what = _why_no_averages(options)
    if what is not None:
        raise ValueError(f"validation is given, and {what}")


def _why_no_averages(options: JobOptions) -> str | None:
    """The reason why no replica has the averages of a whole stage."""
    if options.call_points.ema_decay is None:
        return "its ema is True, but no callback is an EMA: give callbacks=[pipedream.callbacks.EMA(0.999)]"
    for stage, planned in enumerate(options.plan.stages):
        if planned.num_replicas > 1 and not options.reduces_together:
            return (
                f"its ema is True, but each replica of stage {stage} averages its own part of the weights:"
                " use sync='allreduce', or a plan without replicas"
            )
    return None


def _check_averages(options: JobOptions) -> None:
    """Raises ValueError where updates are not those of the weights that all replicas have."""
    what: str | None = None
    if options.is_asynchronous:
        what = "sync is 'asp', whose replicas have no version in common: use sync='bsp'"
    elif options.sync_every > 1 and any(stage.num_replicas > 1 for stage in options.plan.stages):
        what = f"sync_every is {options.sync_every}, and replicas have weights of their own: leave it out"
    elif options.plan.num_spares:
        what = "the plan has spare shards, whose averages nobody collects: use one without num_spare_shards"
    if what is not None:
        raise ValueError(f"a callback is an EMA, and {what}")


def check_ties(options: JobOptions, ties: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError for what stages that share parameters cannot have. ties: (owner, user) of them."""
    if ties and options.plan.num_spares:
        raise ValueError(
            f"the plan has spare shards, and stages {ties[0][0]} and {ties[0][1]} share a parameter, which"
            " only replicas exchange: use a plan without num_spare_shards"
        )
    if ties and options.is_asynchronous:
        raise ValueError(
            f"sync is 'asp', and stages {ties[0][0]} and {ties[0][1]} share a parameter, of which they would"
            " have different versions: use sync='bsp'"
        )
    for owner, user in ties if options.sync_every > 1 else ():
        of_owner, of_user = (options.plan.stages[stage].num_replicas for stage in (owner, user))
        if of_owner not in (1, of_user):
            raise ValueError(
                f"sync_every is {options.sync_every}, and stages {owner} and {user} share a parameter, of"
                f" which each of stage {owner}'s {of_owner} replicas has another, while stage {user} has"
                f" {of_user}: use a plan in which the two have as many, or leave sync_every out"
            )


def _check_spares(options: JobOptions) -> None:
    """Raises ValueError for what spares have no part in: they know gradients and versions of their shard by
    rounds, and nothing else."""
    wanted: str | None = None
    if options.is_asynchronous:
        wanted = "sync is 'asp', whose shards have no rounds"
    elif options.sync_every > 1:
        wanted = f"sync_every is {options.sync_every}, with which replicas push nothing"
    elif options.reduces_together:
        wanted = f"sync is {options.sync!r}, with which nothing is pushed"
    elif pushes_factors(options.links.codec):
        wanted = "codec pushes factors, of which replicas make versions by themselves"
    elif options.max_grad_norm is not None:
        wanted = "max_grad_norm is given, of which only replicas tell each other"
    elif options.autocast is torch.float16:
        wanted = "autocast is 'float16', of whose overflows only replicas tell each other"
    if wanted is not None:
        stage = next(i for i, stage in enumerate(options.plan.stages) if stage.num_spare_shards)
        raise ValueError(
            f"stage {stage} has spare shards, and {wanted}: leave that out, or use a plan without"
            " num_spare_shards"
        )


def _check_asynchronous(options: JobOptions) -> None:
    """Raises ValueError for what needs rounds that replicas have in common."""
    wanted: str | None = None
    if isinstance(options.schedule, Program) or not rules_of(options.schedule).may_be_asynchronous:
        wanted = f"schedule is {options.schedule!r}, whose replicas update together"
    if options.max_grad_norm is not None:
        wanted = "max_grad_norm is given, which is of the mean of a round's gradients"
    if options.autocast is torch.float16:
        wanted = "autocast is 'float16', whose replicas skip a round together"
    if options.sync_every > 1:
        wanted = f"sync_every is {options.sync_every}, with which replicas send each other no gradients"
    if wanted is not None:
        raise ValueError(f"sync is 'asp', and {wanted}: use sync='bsp'")


def _check_reduced(options: JobOptions) -> None:
    """Raises ValueError for what replicas that reduce together cannot have."""
    is_local = options.sync_every > 1
    asked = f"sync_every is {options.sync_every}" if is_local else "sync is 'allreduce'"
    remedy = "leave sync_every out" if is_local else "use sync='bsp'"
    if is_local and options.sync == "ssp":
        raise ValueError(f"{asked}, but sync is 'ssp', which it has no use for: {remedy}")
    if options.links.keys is not None:
        raise ValueError(f"{asked}, and keys are given, but torch.distributed does not encrypt: {remedy}")
    if options.links.ports is not None:
        raise ValueError(
            f"{asked}, and ports are given, but torch.distributed listens where the system chooses: {remedy}"
        )
    if PUSHES in options.links.codec:
        raise ValueError(f"{asked}, and codec names pushes, but then nothing is pushed: {remedy}")
    if not options.measures_gradients:
        return
    what = "autocast is 'float16'" if options.max_grad_norm is None else "max_grad_norm is given"
    if is_local:
        raise ValueError(f"{asked}, and {what}, but replicas that update alone share no gradient: {remedy}")
    by_all_stages = options.autocast is torch.float16 or _core.drains_every_minibatch(
        options.schedule_options()
    )
    if by_all_stages and options.plan.num_stages > 1:
        raise ValueError(
            f"{asked}, and {what}, for which the stages must tell each other of their gradients: {remedy}"
        )
