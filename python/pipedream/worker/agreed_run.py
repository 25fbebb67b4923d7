"""The workers of a run agree before they start. All use rank 0's plan, seed and run id, and compare their
options with rank 0's options.

They exchange these values through the rendezvous, a store of keys and values that all ranks can reach. This
happens before any link is open. Runs on the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipedream import _core
from pipedream.checkpoint.checkpoint_folder import make_folder, mark_of
from pipedream.common.agreement import difference, settings_of
from pipedream.common.errors import failures_of_others
from pipedream.links.options import LinkOptions
from pipedream.links.rendezvous import START_TIMEOUT_S, Rendezvous
from pipedream.model.layers import Model
from pipedream.model.loss_state import check_loss_buffers
from pipedream.model.seeding import (
    RngStream,
    base_seed,
    data_seed,
    process_seed,
    seed_torch,
)
from pipedream.model.stage_module import StageModule, Tie, find_ties, tie_pairs
from pipedream.model.stand_ins import is_on_meta
from pipedream.planning.job import check_together
from pipedream.planning.plan import Plan
from pipedream.planning.plan_schedule import schedule_to_run
from pipedream.splitting.evaluation_cut import evaluation_stages
from pipedream.splitting.splitter import outline_of, split
from pipedream.stage.job import Continued, JobOptions, LinkedRun, WorkerPlace
from pipedream.worker.continuing import with_checkpoint

__all__ = ["AgreedRun", "agree", "segment_key", "wait_for", "wait_while_linked"]

_MARKED = "folder of the checkpoints"
"""Prefix of the keys by which ranks say that they have put a file, their mark, into the checkpoints' folder.
Rank 0 answers under the prefix alone."""
_SEES_FILES_S = 5.0
"""Seconds after which a network file system must show a file that another machine has made."""
_LOOK_S = 0.05


@dataclass(frozen=True)
class AgreedRun:
    """The run that all ranks have agreed on, and the place of this rank in it."""

    place: WorkerPlace
    options: JobOptions
    base_seed: int
    stages: list[StageModule]
    """All stages of the plan. Other ranks' stages have the weights of this process's model."""
    ties: list[Tie]
    evaluated: Sequence[StageModule] = ()
    """All stages of the eval-mode forward. Empty without validation."""
    is_made_by_stages: bool = False
    """Whether the caller's model is on the meta device. Each worker then makes the initial values of its own
    stages."""
    segment_index: int = 0
    first_minibatch: int = 0
    """The first minibatch of the segment (segment.py)."""
    oldest_minibatch: int | None = None
    """The minibatch with which the earlier pipeline began, if the segment continues with the weight versions
    of that pipeline; otherwise None."""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def plan(self) -> Plan:
        return self.options.plan

    def schedule(self) -> _core.ScheduleOptions:
        """Returns the schedule's options, including the parameters that stages share."""
        return self.options.schedule_options(
            tie_pairs(self.ties),
            first_minibatch=self.first_minibatch,
            oldest_minibatch=self.oldest_minibatch,
        )

    def key(self, name: str) -> str:
        """Returns the key under which this segment publishes `name` in the rendezvous."""
        return segment_key(name, self.segment_index)

    def own_stages(self) -> list[StageModule]:
        """Returns the stages that this rank trains. The list is empty at a spare, and at a rank that the plan
        does not use."""
        return self.stages_of(self.rank)

    @property
    def served_stage(self) -> StageModule | None:
        """The stage of which this rank owns a shard as a spare; None if the rank is not a spare."""
        stage = self.plan.spare_stage_of(self.rank)
        return None if stage is None else self.stages[stage]

    def held_stages_of(self, rank: int) -> list[StageModule]:
        """Returns the stages whose initial weights the rank needs."""
        served = self.plan.spare_stage_of(rank)
        return self.stages_of(rank) if served is None else [self.stages[served]]

    def stages_in_memory(self, device_type: str) -> list[StageModule]:
        """Returns the stages whose weights lie in the device's memory. On the host these may be all stages,
        because the user's modules of other stages are in memory, too."""
        is_whole = self.place.returns_model and not self.is_made_by_stages
        return self.stages if is_whole and device_type == "cpu" else self.held_stages_of(self.rank)

    def own_evaluated_stages(self) -> list[StageModule]:
        own = {stage.stage_index for stage in self.own_stages()}
        return [stage for stage in self.evaluated if stage.stage_index in own]

    def stages_of(self, rank: int) -> list[StageModule]:
        return [self.stages[stage] for stage in self.plan.stages_of(rank)]

    @property
    def reads_inputs(self) -> bool:
        return 0 in self.plan.stages_of(self.rank)

    @property
    def reads_targets(self) -> bool:
        return self.plan.num_stages - 1 in self.plan.stages_of(self.rank)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters of all stages, by name. They are those of the user's model. During the run
        the modules read weight versions in place of them."""
        return {name: p for stage in self.stages for name, p in stage.trainable_parameters()}

    def frozen_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for stage in self.stages for name, p in stage.frozen_parameters()}

    def tied_parameters_of(self, stage_index: int) -> list[nn.Parameter]:
        return [tie.parameter for tie in self.ties if stage_index in tie.stages]

    @property
    def links(self) -> LinkOptions:
        return self.options.links

    @property
    def linked(self) -> LinkedRun:
        return LinkedRun(self.place, self.links, self.plan.describe_worker, self.plan.hash())


def agree(place: WorkerPlace, options: JobOptions, model: Model) -> tuple[AgreedRun, RngStream | None]:
    """Returns (the agreed run, the random generators of its data). The generators are None if the run has one
    worker, because its data draw from the process's generators."""
    agreed: dict[str, Any] | None = None
    if place.rank == 0:
        _check_world(options.plan, place.world_size)
        options.schedule_options()  # this raises an error if plan and schedule exclude each other
    else:
        (agreed,) = wait_for(place.rendezvous, ["agreed"], lambda _: "rank 0 did not start")
        options = _with_plan(options, Plan.from_dict(agreed["plan"], source="rank 0's plan"))
        continues = agreed["continues"]
        options = replace(options, continues=None if continues is None else Continued(*continues))
        _check_settings(options, place.rank, agreed["settings"])
        _check_layers(outline_of(model), place.rank, agreed["layers"])
        place = replace(place, run_id=int(agreed["run_id"]))
        if place.returns_model:  # local workers have the folder of their caller, which has checked it
            _show_folder(place, options)
    stages = split(model, options.plan)
    if place.returns_model:  # the caller of local workers has already checked this
        check_loss_buffers(stages, options.loss_fn)
    settings = settings_of(options)  # with_checkpoint() changes the options below
    options, seed_before = with_checkpoint(options)
    state = options.state
    base = base_seed(options.seed) if state is None else state.base_seed
    if seed_before is not None:
        base = seed_before
    if agreed is not None:
        base = int(agreed["base_seed"])
    on_meta = is_on_meta(root for stage in stages for _, root in stage.roots())
    evaluated: Sequence[StageModule] = ()
    if options.validation is not None:
        evaluated = evaluation_stages(model, stages, options.evaluation_cut, options.validation.forward)
    run = AgreedRun(place, options, base, stages, find_ties(stages), evaluated, on_meta)
    if state is not None:
        # With asynchronous shards the run continues without older weight versions, because no replica knows
        # which gradients a version contains.
        oldest = None if options.is_asynchronous else state.begun_at
        run = replace(run, first_minibatch=state.minibatch, oldest_minibatch=oldest)
    elif options.continues is not None:
        run = replace(run, first_minibatch=options.first_minibatch)
    check_together(options.job(tie_pairs(run.ties)).traits())
    validation = options.validation
    if run.ties and options.autocast is torch.float16 and validation is not None and validation.ema:
        owner, user = tie_pairs(run.ties)[0]
        raise ValueError(
            "validation: ema is True, autocast is 'float16', and stages"
            f" {owner} and {user} share a parameter: stage {user} does not hear of updates that an overflow"
            " skips; use autocast='bfloat16', or leave ema out"
        )
    options.seed_data(base)
    if agreed is None:
        agreed = {
            "plan": options.plan.to_dict(),
            "settings": settings,
            "layers": outline_of(model),
            "base_seed": base,
            "continues": None if options.continues is None else list(vars(options.continues).values()),
            "run_id": place.run_id,
        }
        place.rendezvous.publish("agreed", agreed)
        if place.returns_model:
            _check_folders(place, options)
    generators: RngStream | None = None
    if options.plan.workers_used > 1:
        # All workers must read the same data. So the data get generators from which nothing else draws.
        generators = RngStream(data_seed(base))
        seed_torch(process_seed(base, _first_stage(options.plan, place.rank)))
    if state is not None:
        state.restore_generators(place.rank, generators)
    return run, generators


def segment_key(name: str, segment_index: int) -> str:
    return f"{name} of segment {segment_index}" if segment_index > 0 else name


def wait_for(
    rendezvous: Rendezvous,
    keys: list[str],
    describe: Callable[[list[str]], str],
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Returns the values of the keys, which other ranks publish.

    Raises another rank's failure as an error of the same kind. Raises errors of `meanwhile`, which is called
    during the wait. Raises PeerLost if a rank does not join within START_TIMEOUT_S, or is lost after it
    joined."""
    with failures_of_others():
        return rendezvous.wait_for(keys, START_TIMEOUT_S, describe, meanwhile=meanwhile)


def wait_while_linked(rendezvous: Rendezvous, keys: list[str], check_links: Callable[[], None]) -> list[Any]:
    """Returns the values of the keys, which other ranks publish while the links are open. Waits without a
    time limit. During the wait calls check_links(), which raises the failure of a link if there is one."""
    with failures_of_others():
        return rendezvous.wait_for(keys, math.inf, lambda missing: f"no {missing[0]}", meanwhile=check_links)


def _check_world(plan: Plan, world_size: int) -> None:
    if plan.workers_used > world_size:
        spares = f", {plan.num_spares} of them spare shards" if plan.num_spares else ""
        raise ValueError(
            f"the plan needs {plan.workers_used} workers{spares}, but only {world_size} ranks run:"
            f" start torchrun with --nproc-per-node {plan.workers_used}, or partition for {world_size}"
        )


def _with_plan(options: JobOptions, plan: Plan) -> JobOptions:
    """Returns the options with rank 0's plan. If the options leave the schedule to the plan, they get the
    plan's schedule."""
    schedule, microbatches = schedule_to_run(plan, options.schedule, options.microbatches)
    return replace(options, plan=plan, schedule=schedule, microbatches=microbatches)


def _check_settings(options: JobOptions, rank: int, of_rank_0: dict[str, Any]) -> None:
    differs = difference(settings_of(options), rank, of_rank_0)
    if differs is not None:
        raise ValueError(differs)


def _check_layers(mine: list[str], rank: int, of_rank_0: list[str]) -> None:
    for layer, (here, there) in enumerate(itertools.zip_longest(mine, of_rank_0)):
        if here != there:
            raise ValueError(
                f"layer {layer} of the model is {here} at rank {rank}, but {there} at rank 0: make the same"
                " model at all ranks, in the same mode (train or eval), with data of the same structure"
            )


def _show_folder(place: WorkerPlace, options: JobOptions) -> None:
    """Puts this rank's mark into the folder of the checkpoints, and waits until rank 0 has looked for all
    marks."""
    if options.checkpoints is None or place.rank >= options.plan.workers_used:
        return
    folder = options.checkpoints.folder
    mark = mark_of(folder, f"{place.run_id:016x}-{place.rank}")
    try:
        make_folder(folder, mark)
        place.rendezvous.publish(f"{_MARKED}/{place.rank}", True)
        wait_for(place.rendezvous, [_MARKED], lambda _: "rank 0 has not looked for the checkpoints' folder")
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


def _check_folders(place: WorkerPlace, options: JobOptions) -> None:
    """Raises ValueError if another rank's folder of checkpoints is not rank 0's folder. No checkpoint would
    ever be complete then. Rank 0 looks in its own folder for the marks of all ranks."""
    if options.checkpoints is None:
        return
    folder, others = options.checkpoints.folder, range(1, options.plan.workers_used)
    wait_for(place.rendezvous, [f"{_MARKED}/{rank}" for rank in others], lambda missing: f"no {missing[0]}")
    deadline_s = time.monotonic() + _SEES_FILES_S
    for rank in others:
        mark = mark_of(folder, f"{place.run_id:016x}-{rank}")
        while not mark.exists():
            if time.monotonic() > deadline_s:
                raise ValueError(
                    f"checkpoints: {folder} of {options.plan.describe_worker(rank)} is not the folder that"
                    " rank 0 has there: give one that all machines share"
                )
            time.sleep(_LOOK_S)
    place.rendezvous.publish(_MARKED, True)


def _first_stage(plan: Plan, rank: int) -> int:
    """Returns the rank's first stage. A rank without stages gets a number that no other rank has."""
    stages = plan.stages_of(rank) if rank < plan.workers_used else ()
    return stages[0] if stages else plan.num_stages + rank
