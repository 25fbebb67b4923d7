"""AskedPlan has the arguments of a front end that are about the plan. If the user gives no plan, it makes one
from a profile.

The process that called the front end uses it; under torchrun every rank does. Imports neither transformers
nor Lightning.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from pipedream.common.own_rank import under_torchrun
from pipedream.launch.torchrun import shared_by_rank_0
from pipedream.planning.layer_profile import Profile
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan, stage_counts

__all__ = ["AskedPlan"]


@dataclass(frozen=True)
class AskedPlan:
    """The arguments of a front end that say how a model is cut."""

    given: Plan | None
    """The user's plan; None if the plan must be made from a profile."""
    replicas: tuple[int, ...]
    """The number of replicas of each stage, if the plan must be made with these stages; otherwise empty."""
    num_workers: int | None
    bandwidth: str | float

    @classmethod
    def of(
        cls, plan: Plan | str | os.PathLike[str] | None, workers: int | None, bandwidth: str | float
    ) -> AskedPlan:
        """Makes an AskedPlan from a front end's arguments.

        plan: a Plan, the path of a plan's file, or the replicas of every stage, such as "1-1"; None lets the
        planner choose the stages. workers: the most workers that the planner may use. Under torchrun it is
        the number of ranks. Raises ValueError for replicas with spares and for a file that is no plan, and
        OSError for a file that cannot be read.
        """
        if under_torchrun():
            workers = int(os.environ["WORLD_SIZE"])
        if plan is None or isinstance(plan, Plan):
            return cls(plan, (), workers, bandwidth)
        counts = stage_counts(plan)
        if counts is None:
            return cls(Plan.load(plan), (), workers, bandwidth)
        if any(num_spares for _, num_spares in counts):
            raise ValueError(f"plan is {os.fspath(plan)!r}: give a pipedream.Plan, or leave out the spares")
        replicas = tuple(num_replicas for num_replicas, _ in counts)
        return cls(None, replicas, sum(replicas), bandwidth)

    @property
    def num_stages_max(self) -> int:
        """The number of stages. If the planner chooses it, this is the largest possible number."""
        if self.given is not None:
            return self.given.num_stages
        return len(self.replicas) or self.num_workers or 1

    @property
    def replicas_of_last_stage(self) -> int:
        if self.given is not None:
            return self.given.stages[-1].num_replicas
        return self.replicas[-1] if self.replicas else 1

    def agreed(self, make: Callable[[], Plan], key: str | None) -> Plan:
        """Returns the same plan at all ranks: the user's plan, or the plan that make() returns at rank 0.
        key: a key of torchrun's store; None without torchrun."""
        if self.given is not None:
            return self.given
        if key is None:
            return make()
        return Plan.from_dict(shared_by_rank_0(key, lambda: make().to_dict()))

    def make(self, profile: Profile, schedule: str, microbatches: int | str | None) -> Plan:
        assert self.num_workers is not None
        return partition(
            profile,
            self.num_workers,
            self.bandwidth,
            straight=not self.replicas,
            replicas=self.replicas or None,
            schedule=schedule,
            microbatches=microbatches,
        )

    def describe(self, plan: Plan) -> str:
        """Returns the plan as text. If the plan leaves workers unused that could have a stage each, the text
        says how to use them."""
        workers, used = self.num_workers or 0, plan.workers_used
        num_stages = min(workers, plan.num_layers)
        if self.replicas or used >= num_stages:
            return str(plan)
        more = "-".join("1" * num_stages)
        return (
            f"{plan}\n{used} of {workers} workers train, because more are not predicted to be faster:"
            f" plan={more!r} uses {num_stages}"
        )
