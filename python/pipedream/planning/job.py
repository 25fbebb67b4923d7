"""Job holds the options of a training that may exclude each other.

run(), reference.run() and partition() describe their arguments as a Job. They refuse two options if the table
in csrc/schedule/exclusions.cc has the pair. Pure; any thread; needs no torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipedream.planning.codec_choice import PUSHES, CodecChoice, pushes_factors

__all__ = [
    "Exclusion",
    "Job",
    "Replication",
    "ScheduleTraits",
    "Traits",
    "check_together",
    "describe_exclusions",
    "exclusions",
    "traits_where",
]

_WIDTH, _INDENT = 100, " " * 6  # layout of the printed table

Traits = dict[str, str | None]
"""The traits of a job, which are the options and properties that exclude others: name in exclusions.cc ->
text by which an error states the option, such as "staleness is 1". None: an error uses the text in
exclusions.cc.
"""


@dataclass(frozen=True)
class Replication:
    """How a stage's replicas synchronise. The fields are run()'s arguments of the same names."""

    sync: str = "bsp"
    staleness: int = 0
    sync_every: int = 1


class ScheduleTraits(NamedTuple):
    """The properties of a schedule that decide which options it excludes."""

    may_be_asynchronous: bool = False
    may_be_stale: bool = False
    has_one_stage: bool = False
    has_stage_per_worker: bool = True
    is_program: bool = False

    @classmethod
    def of(cls, schedule: str) -> ScheduleTraits:
        """Returns the traits of the schedule with this name. Raises ValueError if there is none."""
        from pipedream.planning.program import PROGRAM, rules_of

        if schedule == PROGRAM:
            return cls(is_program=True)
        rules = rules_of(schedule)
        return cls(
            rules.may_be_asynchronous, rules.may_be_stale, rules.has_one_stage, rules.has_stage_per_worker
        )


@dataclass(frozen=True)
class Job:
    """The options of one training. Some pairs of options exclude each other."""

    schedule: str
    """The schedule's name, or "auto"."""
    schedule_traits: ScheduleTraits
    replication: Replication
    num_replicas: Sequence[int] | None = None
    """Replicas of each stage. None: there is no plan yet, so stages may have replicas."""
    spares: str | None = None
    """The text by which an error states the spare shards: "spare_workers is 1". None: there are no spare
    shards.
    """
    codec: CodecChoice = field(default_factory=dict)
    max_grad_norm: float | None = None
    is_float16: bool = False
    exchanges_norms_of_stages: bool = False
    """Whether an update waits for the norms of other stages' gradients, for max_grad_norm or float16."""
    ties: Sequence[tuple[int, int]] = ()
    """Pairs of stages that share parameters: the stage that owns them, and a stage that also uses them."""
    float32_masters: str | None = None
    """The text by which an error states the float32 masters. None: no optimizer keeps masters of bfloat16
    parameters.
    """

    @property
    def has_replicas(self) -> bool:
        return self.num_replicas is None or max(self.num_replicas) > 1

    def traits(self) -> Traits:
        return dict([*self._traits_of_schedule(), *self._traits_of_replicas(), *self._traits_of_numbers()])

    def _traits_of_schedule(self) -> Iterator[tuple[str, str | None]]:
        has, named = self.schedule_traits, f"schedule is {self.schedule!r}"
        if has.is_program:
            named = "schedule is a program"
            yield "program", None
        if not has.may_be_asynchronous:
            yield "common_rounds", named
        if not has.may_be_stale:
            yield "newest_versions", named
        if has.has_one_stage:
            yield "one_stage", None
        if not has.has_stage_per_worker:
            yield "one_replica", None
        if self.num_replicas is None:
            return
        if len(self.num_replicas) > 1:
            yield "several_stages", f"the plan has {len(self.num_replicas)} stages"
        for stage, num_replicas in enumerate(self.num_replicas):
            if num_replicas > 1:
                yield "replicas", f"stage {stage} has {num_replicas} replicas"
                break

    def _traits_of_replicas(self) -> Iterator[tuple[str, str | None]]:
        sync, staleness, sync_every = (
            self.replication.sync,
            self.replication.staleness,
            self.replication.sync_every,
        )
        if staleness:
            yield "staleness", f"staleness is {staleness}"
        if sync != "ssp":
            yield "not_ssp", f"sync is {sync!r}"
        if not self.has_replicas:
            return
        if sync in ("asp", "ssp"):
            yield sync, None
        if sync == "allreduce":
            yield "reduced", "sync is 'allreduce'"
        if sync_every > 1:
            yield "reduced", f"sync_every is {sync_every}"
            yield "sync_every", f"sync_every is {sync_every}"
        if sync != "allreduce" and sync_every == 1 and self.num_replicas is not None:
            stage = next(index for index, number in enumerate(self.num_replicas) if number > 1)
            yield "shards", f"each of stage {stage}'s {self.num_replicas[stage]} replicas has a shard"
        if self.spares is not None:
            yield "spares", self.spares
        if self.float32_masters is not None:
            yield "float32_masters", self.float32_masters
        if PUSHES in self.codec:
            yield "push_codec", f"codec is {self.codec}"
        if pushes_factors(self.codec):
            yield "factors", f"codec is {self.codec}, which pushes factors"

    def _traits_of_numbers(self) -> Iterator[tuple[str, str | None]]:
        norms: str | None = None
        if self.is_float16:
            norms = "autocast is 'float16'"
            yield "float16", None
        if self.max_grad_norm is not None:
            norms = f"max_grad_norm is {self.max_grad_norm}"
        if norms is not None:
            yield "norms", norms
        if self.exchanges_norms_of_stages:
            yield "norms_of_stages", norms
        if self.ties:
            owner, user = self.ties[0]
            yield "ties", f"stages {owner} and {user} share a parameter"
        if self.num_replicas is None:
            return
        for owner, user in self.ties:
            of_owner, of_user = self.num_replicas[owner], self.num_replicas[user]
            if of_owner not in (1, of_user):
                yield (
                    "uneven_ties",
                    f"stages {owner} and {user}, of {of_owner} and {of_user} replicas, share a parameter",
                )
                return


class Exclusion(NamedTuple):
    """Two options that exclude each other. first and second are names of traits."""

    first: str
    second: str
    because: str
    remedy: str


def exclusions() -> list[Exclusion]:
    """Returns the whole table of csrc/schedule/exclusions.cc."""
    from pipedream import _core

    return [Exclusion(*row) for row in _core.exclusions()]


def describe_exclusions() -> tuple[str, dict[str, Any]]:
    """Returns the table as text and as a value for JSON. Both name the options as a user writes them."""
    from pipedream import _core

    names = _core.trait_names()
    rows = [row._replace(first=names[row.first], second=names[row.second]) for row in exclusions()]
    lines: list[str] = []
    for first in dict.fromkeys(row.first for row in rows):
        lines.append(f"{first}, not together with:")
        for row in rows:
            if row.first == first:
                lines.append(f"  {row.second}")
                why = f"{row.because}; {row.remedy}"
                lines += textwrap.wrap(why, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join(lines), {"exclusions": [row._asdict() for row in rows]}


def traits_where(candidates: Mapping[str, tuple[bool, str | None]]) -> Traits:
    """Returns the traits that are present. candidates: name of a trait -> (whether it is present, text by
    which an error states it).
    """
    return {name: said for name, (is_there, said) in candidates.items() if is_there}


def check_together(traits: Mapping[str, str | None]) -> None:
    """Raises ValueError if two of these traits exclude each other."""
    from pipedream import _core

    _core.check_exclusions(list(traits.items()))
