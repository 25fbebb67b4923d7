"""Stage holds consecutive layers of a plan with their replicas and spare shards. This module also reads a
stage from a file, and checks how many microbatches a plan keeps in flight.

A Stage never changes once built; any thread; needs no torch.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipedream.common.document import check_object, check_whole, require, set_field

if TYPE_CHECKING:
    from pipedream import _core

__all__ = [
    "STAGE_FIELDS",
    "WORKERS_MAX",
    "Stage",
    "check_in_flight",
    "check_stages",
    "check_workers",
    "derive_in_flight",
    "in_flight_in_phase",
    "placement_of",
    "ranks_of",
    "stage_counts",
    "stage_from_dict",
]

_NEEDED_FIELDS = ("first_layer", "last_layer", "num_replicas")
STAGE_FIELDS = (*_NEEDED_FIELDS, "worker", "num_spare_shards")
"""The names of a stage's fields in a file."""
WORKERS_MAX = 65_536
"""The most workers of a plan. The planner's time and memory grow with them."""
_COUNTS = re.compile(r"(\d+)(?:\+(\d+))?", re.ASCII)


@dataclass(frozen=True)
class Stage:
    """Consecutive layers that run together, from first_layer to last_layer inclusive. Raises ValueError
    naming the field.
    """

    first_layer: int
    last_layer: int
    num_replicas: int = 1
    worker: int | None = None
    """The worker that runs the stage, if workers run several stages (schedule "interleaved"). None: every
    replica of every stage has a worker of its own, in order.
    """
    num_spare_shards: int = 0
    """The number of additional workers that own shards of the stage's parameters and train no minibatches
    (docs/parameter-server.md). Their ranks come after the ranks of all stages' replicas.
    """
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the file that this version does not know. Saving writes them back unchanged."""

    def __post_init__(self) -> None:
        set_field(self, "first_layer", check_whole("first_layer", self.first_layer))
        set_field(self, "last_layer", check_whole("last_layer", self.last_layer))
        set_field(self, "num_replicas", check_whole("num_replicas", self.num_replicas, at_least=1))
        set_field(self, "num_spare_shards", check_whole("num_spare_shards", self.num_spare_shards))
        if self.num_spare_shards > num_spares_max(self.num_replicas):
            raise ValueError(
                f"num_spare_shards is {self.num_spare_shards}, but num_replicas is {self.num_replicas}:"
                " spares help 2 replicas or more, and more of them than replicas gain nothing"
            )
        if self.worker is not None:
            set_field(self, "worker", check_whole("worker", self.worker))
        if self.last_layer < self.first_layer:
            raise ValueError(
                f"last_layer is {self.last_layer}: it must not be below first_layer {self.first_layer}"
            )

    @property
    def num_layers(self) -> int:
        return self.last_layer - self.first_layer + 1

    def to_dict(self) -> dict[str, Any]:
        worker = {} if self.worker is None else {"worker": self.worker}
        spares = {"num_spare_shards": self.num_spare_shards} if self.num_spare_shards else {}
        return {name: getattr(self, name) for name in _NEEDED_FIELDS} | worker | spares | self.extra


def placement_of(stages: Sequence[Stage]) -> _core.Placement:
    """Returns the ranks of every stage's replicas and spares."""
    from pipedream import _core

    if stages[0].worker is not None:
        return _core.Placement.at_ranks([stage.worker or 0 for stage in stages])
    return _core.Placement.in_order(
        [stage.num_replicas for stage in stages], [stage.num_spare_shards for stage in stages]
    )


def ranks_of(placement: _core.Placement) -> list[list[int]]:
    """Returns the ranks of each stage's replicas."""
    return [placement.ranks_of(stage) for stage in range(placement.num_stages)]


def is_counts(text: str) -> bool:
    """Whether the text gives the replicas of stages, as "2-1", or replicas and spare shards, as "3+1-1"."""
    return all(_COUNTS.fullmatch(part) for part in text.split("-"))


def stage_counts(text: str | os.PathLike[str]) -> tuple[tuple[int, int], ...] | None:
    """Returns the replicas and spare shards of every stage: ((2, 0), (1, 0)) for "2-1", and ((3, 1), (1, 0))
    for "3+1-1". Returns None for the name of a file.

    Raises FileNotFoundError for other text. Raises ValueError for a stage without replicas or with more spare
    shards than help, and for more than WORKERS_MAX replicas.
    """
    if is_counts(os.fspath(text)):
        parts = [_COUNTS.fullmatch(part) for part in os.fspath(text).split("-")]
        counts = tuple((int(part[1]), int(part[2] or 0)) for part in parts if part is not None)
        replicas = [count for count, _ in counts]
        if 0 in replicas:
            raise ValueError(
                f"plan {os.fspath(text)} gives stage {replicas.index(0)} no replica:"
                " each stage has at least 1"
            )
        if sum(replicas) > WORKERS_MAX:
            raise ValueError(
                f"plan {os.fspath(text)} has {sum(replicas)} replicas: a plan has at most {WORKERS_MAX}"
            )
        for stage_index, (num_replicas, num_spares) in enumerate(counts):
            if num_spares > num_spares_max(num_replicas):
                raise ValueError(
                    f"plan {os.fspath(text)} gives stage {stage_index} more spare shards, {num_spares}, than"
                    f" {num_replicas} replicas can use: at most {num_spares_max(num_replicas)}"
                )
        return counts
    if not os.path.exists(text):
        neither = "neither a file nor the replicas of each stage, such as 2-1"
        raise FileNotFoundError(errno.ENOENT, neither, os.fspath(text))
    return None


def num_spares_max(num_replicas: int) -> int:
    """Returns the largest number of spare shards that help a stage with this many replicas."""
    return num_replicas if num_replicas > 1 else 0


def check_stages(stages: tuple[Stage, ...]) -> None:
    """Raises ValueError if there are no stages, or if they overlap, leave gaps or are out of order. Raises
    TypeError for an entry that is no Stage.
    """
    if not stages:
        raise ValueError("stages is empty: a plan has at least one stage")
    for stage_index, stage in enumerate(stages):
        if not isinstance(stage, Stage):
            raise TypeError(
                f"stages[{stage_index}] is a {type(stage).__name__}: give a Stage, for example Stage(0, 3)"
            )
    next_layer = 0
    for stage_index, stage in enumerate(stages):
        if stage.first_layer == next_layer:
            next_layer = stage.last_layer + 1
            continue
        where = f"stages[{stage_index}].first_layer is {stage.first_layer}, not {next_layer}"
        if stage.first_layer > next_layer:
            raise ValueError(
                f"{where}: no earlier stage has layer {next_layer} (a gap, or stages out of order)"
            )
        fault = "is out of order" if stage.last_layer < stages[stage_index - 1].first_layer else "overlaps"
        raise ValueError(f"{where}: it {fault} with stages[{stage_index - 1}]")


def check_workers(stages: tuple[Stage, ...]) -> None:
    """Raises ValueError for too many replicas, if only some stages name workers, if a stage that names its
    worker has replicas, or if worker numbers have gaps.
    """
    num_replicas = sum(stage.num_replicas for stage in stages)
    if num_replicas > WORKERS_MAX:
        raise ValueError(f"stages have {num_replicas} replicas: a plan has at most {WORKERS_MAX}")
    given = [stage.worker for stage in stages]
    if all(worker is None for worker in given):
        return
    for stage_index, stage in enumerate(stages):
        if stage.worker is None:
            raise ValueError(f"stages[{stage_index}].worker is missing: give it for all stages or for none")
        if stage.num_replicas > 1:
            raise ValueError(
                f"stages[{stage_index}].worker is {stage.worker}, but the stage has {stage.num_replicas}"
                " replicas: a plan names workers only where no stage is replicated"
            )
    used = {worker for worker in given if worker is not None}
    missing = next((worker for worker in range(max(used)) if worker not in used), None)
    if missing is not None:
        raise ValueError(
            f"no stage has worker {missing}, but stages[{given.index(max(used))}].worker is {max(used)}:"
            " number the workers 0, 1, 2, ..."
        )


def stage_from_dict(stage_index: int, value: object) -> Stage:
    """Makes a stage from its entry in a file. Raises ValueError naming the field."""
    where = f"stages[{stage_index}]"
    fields = check_object(where, value)
    require(fields, _NEEDED_FIELDS, where + ".")
    extra = {name: fields[name] for name in fields if name not in STAGE_FIELDS}
    spares = fields.get("num_spare_shards")
    try:
        known = {name: fields[name] for name in _NEEDED_FIELDS}
        return Stage(
            **known,
            worker=fields.get("worker"),
            num_spare_shards=0 if spares is None else spares,
            extra=extra,
        )
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def derive_in_flight(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Returns the default of Plan.in_flight: n_{S-1} = 1, n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s)."""
    from pipedream import _core

    return tuple(_core.derive_in_flight([stage.num_replicas for stage in stages]))


def check_in_flight(in_flight: Sequence[int], stages: Sequence[Stage]) -> None:
    """Raises ValueError naming the stage if these numbers do not fit the stages or would deadlock."""
    if len(in_flight) != len(stages):
        raise ValueError(
            f"in_flight has {len(in_flight)} numbers for {len(stages)} stages: it needs one per stage"
        )
    for stage_index, count in enumerate(in_flight):
        check_whole(f"in_flight[{stage_index}]", count, at_least=1)
    # After its first microbatch, each replica of stage s may start n_s - 1 more before the first one must
    # come back. That is (n_s - 1) r_s for all replicas. If a downstream stage waits for more than its
    # upstream stage admits, both wait forever.
    admitted = [(count - 1) * stage.num_replicas for count, stage in zip(in_flight, stages, strict=True)]
    for stage_index in range(1, len(stages)):
        if admitted[stage_index] > admitted[stage_index - 1]:
            raise ValueError(
                f"in_flight[{stage_index}] is {in_flight[stage_index]}: it deadlocks, as (in_flight - 1) * "
                f"num_replicas rises from {admitted[stage_index - 1]} to {admitted[stage_index]} downstream"
            )


def in_flight_in_phase(in_flight: Sequence[int], stages: Sequence[Stage]) -> tuple[int, ...]:
    """Returns the in_flight with which a balanced plan loses no time while replicas wait for each other's
    gradients. It follows from this formula, which was found by simulating all small plans:

    n_s = 1 + ceil((n_{s+1} r_{s+1} + r_s + r_{s+1} - 2 gcd(r_s, r_{s+1})) / r_s), and at least in_flight.
    """
    in_phase = [in_flight[-1]]
    for stage_index in range(len(stages) - 2, -1, -1):
        here, below = (stages[index].num_replicas for index in (stage_index, stage_index + 1))
        held = in_phase[0] * below + here + below - 2 * math.gcd(here, below)
        in_phase.insert(0, max(in_flight[stage_index], 1 - -held // here))
    return tuple(in_phase)
