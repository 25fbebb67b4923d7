"""Checks the arguments of reference.run(). A check raises ValueError if the training cannot run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pipedream.common.checks import check_choice, check_count
from pipedream.common.document import check_whole
from pipedream.model.precision import autocast_dtype
from pipedream.planning.job import Job, Replication, ScheduleTraits
from pipedream.planning.program import Program
from pipedream.reference.versions import Versions, WrittenVersions

__all__ = [
    "check_drained_at",
    "check_has_orders",
    "check_max_grad_norm",
    "check_microbatches",
    "check_program",
    "check_replication",
    "job_of",
    "of_plan",
]


def of_plan(schedule: str | None, planned: int | None, microbatches: int) -> tuple[str, int]:
    """Returns the plan's schedule and microbatches for schedule="auto". Raises ValueError if the plan lacks
    one of them, or if the user's `microbatches` is another number."""
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


def check_program(program: Program, num_replicas: Sequence[int], microbatches: int) -> None:
    if program.replicas != list(num_replicas):
        raise ValueError(
            f"schedule is a program of replicas {program.replicas}, and the plan has {list(num_replicas)}:"
            " use a plan of as many stages and replicas"
        )
    if microbatches not in (1, program.microbatches):
        raise ValueError(
            f"microbatches is {microbatches}, and the program has {program.microbatches}: leave it out"
        )


def check_replication(replication: Replication) -> None:
    check_choice("sync", replication.sync, ("bsp", "ssp", "asp", "allreduce"))
    check_whole("staleness", replication.staleness, at_least=0)
    check_count("sync_every", replication.sync_every)


def check_has_orders(update_orders: Any) -> None:
    if update_orders is None:
        raise ValueError(
            "sync is 'asp': what it reads depends on who is faster; give update_orders, which RunResult has"
        )


def job_of(
    versions: Versions,
    num_replicas: Sequence[int],
    replication: Replication,
    max_grad_norm: float | None,
    autocast: Any,
) -> Job:
    """Describes the training as a Job, so that check_together() can find options that exclude each other. The
    schedule's traits come from the reference's own table below.
    """
    name, is_program = versions.schedule, isinstance(versions, WrittenVersions)
    is_float16 = autocast_dtype(autocast) == torch.float16
    m = versions.num_microbatches
    drains_every_minibatch = versions.drains and math.lcm(m, *num_replicas) == m
    has_norms_of_stages = is_float16 or (max_grad_norm is not None and drains_every_minibatch)
    reduces = max(num_replicas) > 1 and (replication.sync == "allreduce" or replication.sync_every > 1)
    return Job(
        name,
        ScheduleTraits(
            may_be_asynchronous=name in ("pipedream", "data_parallel"),
            may_be_stale=name == "pipedream",
            has_one_stage=name == "data_parallel",
            has_stage_per_worker=name != "interleaved",
            is_program=is_program,
        ),
        replication,
        num_replicas,
        max_grad_norm=max_grad_norm,
        is_float16=is_float16,
        exchanges_norms_of_stages=reduces and len(num_replicas) > 1 and has_norms_of_stages,
    )


def check_drained_at(drained_at: Sequence[int], num_replicas: Sequence[int], microbatches: int) -> None:
    """Raises ValueError if a minibatch of drained_at does not begin a round, or if drained_at is not
    sorted."""
    multiple = math.lcm(microbatches, *num_replicas) // microbatches
    for minibatch in drained_at:
        check_whole("drained_at", minibatch, at_least=0)
        if minibatch % multiple != 0:
            raise ValueError(
                f"drained_at names minibatch {minibatch}, inside of a round: give multiples of {multiple}"
            )
    if list(drained_at) != sorted(drained_at):
        raise ValueError(f"drained_at is {list(drained_at)}: give the minibatches in order")


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    """Raises ValueError unless max_grad_norm is a positive number or None."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm!r}: give a number above 0, or None not to clip")
