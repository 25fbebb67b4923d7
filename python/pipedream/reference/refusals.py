"""Refusals of what cannot be trained. Each raises ValueError."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pipedream.common.checks import check_choice, check_count
from pipedream.common.document import check_whole
from pipedream.model.precision import autocast_dtype
from pipedream.model.stage_module import Tie
from pipedream.planning.program import Program
from pipedream.reference.versions import SCHEDULES

__all__ = [
    "check_asynchronous",
    "check_drained_at",
    "check_max_grad_norm",
    "check_microbatches",
    "check_program",
    "check_replicas",
    "check_sync_every",
    "check_ties",
    "of_plan",
]


def of_plan(schedule: str | None, planned: int | None, microbatches: int) -> tuple[str, int]:
    """Schedule and microbatches of a plan, which are to be the run's."""
    if schedule is None or planned is None or microbatches not in (1, planned):
        raise ValueError(
            f"schedule is 'auto' with microbatches {microbatches}, and the plan has {schedule!r}, {planned}:"
            " use a plan with both, and leave microbatches out"
        )
    return schedule, planned


def check_microbatches(
    schedule: str, microbatches: int, in_flight: Sequence[int], num_replicas: Sequence[int]
) -> None:
    check_count("microbatches", microbatches)
    if schedule != "2bw":
        return
    for stage, (held, replicas) in enumerate(zip(in_flight, num_replicas, strict=True)):
        own_per_round = math.lcm(microbatches, replicas) // replicas
        if own_per_round < held - 1:
            raise ValueError(
                f"microbatches is {microbatches}, but schedule '2bw' has {held} of them in flight at stage"
                f" {stage}: use microbatches={(held - 1) * replicas} or more"
            )


def check_program(
    program: Program, num_replicas: Sequence[int], microbatches: int, sync: str, staleness: int
) -> None:
    if program.replicas != list(num_replicas):
        raise ValueError(
            f"schedule is a program of replicas {program.replicas}, and the plan has {list(num_replicas)}:"
            " use a plan of as many stages and replicas"
        )
    if microbatches not in (1, program.microbatches):
        raise ValueError(
            f"microbatches is {microbatches}, and the program has {program.microbatches}: leave it out"
        )
    if sync == "asp" or staleness:
        raise ValueError("schedule is a program, which takes neither sync='asp' nor a staleness")


def check_replicas(schedule: str, num_replicas: Sequence[int], sync: str, staleness: int) -> None:
    check_choice("schedule", schedule, SCHEDULES)
    check_choice("sync", sync, ("bsp", "ssp", "asp", "allreduce"))
    check_whole("staleness", staleness, at_least=0)
    if staleness and (sync != "ssp" or schedule != "pipedream"):
        raise ValueError(
            f"staleness is {staleness} with sync {sync!r} and schedule {schedule!r}: it goes with sync='ssp'"
            " and schedule='pipedream'"
        )
    if schedule == "data_parallel" and len(num_replicas) > 1:
        raise ValueError(f"schedule 'data_parallel' has one stage, and the plan has {len(num_replicas)}")
    if schedule == "interleaved" and max(num_replicas) > 1:
        raise ValueError(
            "schedule 'interleaved' runs one replica of each stage: use partition(..., straight=True)"
        )


def check_asynchronous(
    schedule: str,
    sync_every: int,
    max_grad_norm: float | None,
    autocast: Any,
    ties: Sequence[Tie],
    has_orders: bool,
) -> None:
    """has_orders: whether the order of updates is given."""
    if not has_orders:
        raise ValueError(
            "sync is 'asp': what it reads depends on who is faster; give update_orders, which RunResult has"
        )
    if (
        schedule not in ("pipedream", "data_parallel")
        or sync_every > 1
        or max_grad_norm is not None
        or autocast_dtype(autocast) == torch.float16
        or ties
    ):
        raise ValueError(
            "sync is 'asp': it goes with schedules 'pipedream' and 'data_parallel', without max_grad_norm,"
            " float16, sync_every and parameters that stages share"
        )


def check_sync_every(
    sync_every: int, num_replicas: Sequence[int], sync: str, max_grad_norm: float | None, autocast: Any
) -> None:
    check_count("sync_every", sync_every)
    if sync_every == 1 or max(num_replicas) == 1:
        return
    if sync == "ssp":
        raise ValueError(f"sync_every is {sync_every} with sync 'ssp': it goes with 'bsp' and 'allreduce'")
    if max_grad_norm is not None or autocast_dtype(autocast) == torch.float16:
        what = "max_grad_norm" if max_grad_norm is not None else "autocast 'float16'"
        raise ValueError(
            f"sync_every is {sync_every} with {what}, but replicas that update alone have no common gradient"
        )


def check_drained_at(drained_at: Sequence[int], num_replicas: Sequence[int], microbatches: int) -> None:
    """Raises ValueError for boundaries inside of a round, and for those that are not in order."""
    multiple = math.lcm(microbatches, *num_replicas) // microbatches
    for minibatch in drained_at:
        check_whole("drained_at", minibatch, at_least=0)
        if minibatch % multiple != 0:
            raise ValueError(
                f"drained_at names minibatch {minibatch}, inside of a round: give multiples of {multiple}"
            )
    if list(drained_at) != sorted(drained_at):
        raise ValueError(f"drained_at is {list(drained_at)}: give the minibatches in order")


def check_ties(ties: Sequence[Tie], num_replicas: Sequence[int]) -> None:
    """Raises ValueError for what replicas that update alone cannot train. A minibatch is at one replica of
    every stage: where the owner's have values of their own, the user's are as many, to have one each."""
    for tie in ties:
        owner, *users = (num_replicas[stage] for stage in tie.stages)
        if owner > 1 and any(user != owner for user in users):
            raise ValueError(
                f"stages {tie.stages} share a parameter, and replicas that update alone (sync_every above 1)"
                f" would each have another, with {[owner, *users]} replicas: leave sync_every out"
            )


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    """Raises ValueError for a norm to which no gradient can be clipped."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm!r}: give a number above 0, or None not to clip")
