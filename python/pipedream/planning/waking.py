"""By how much a work item is longer because its worker has waited. Values that never change once built; any
thread; needs no torch.

A core that has idled finds neither the code nor the data of what it goes on with in its caches, and may have
to become fast again. Each kind of item pays that at its first one after the wait, as each has code and data
of its own. Some of it is lost at once, and some over milliseconds: what a wait costs is a sum of what grows
with it up to a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipedream.common.document import check_list, check_number, check_object
from pipedream.planning.item_cost import WORK_KINDS

__all__ = ["StageWaking", "Waking", "waking_share", "wakings_from"]


@dataclass(frozen=True)
class Waking:
    """A cost of waiting that is lost at once or slowly: all of it if the worker has waited for after_ms since
    its last item of the kind, and a part as large after a shorter wait."""

    after_ms: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
    """By kind, of what the item of a whole minibatch takes; a microbatch's pays as much."""

    def part(self, waited_ms: float) -> float:
        """Returns the share of the cost that is to be paid, 0 to 1."""
        return min(1.0, waited_ms / self.after_ms) if self.after_ms > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"after_ms": self.after_ms, "shares": dict(self.shares)}

    @classmethod
    def from_dict(cls, where: str, value: object) -> Waking:
        """Raises ValueError naming the field."""
        given = check_object(where, value)
        shares = check_object(f"{where}.shares", given.get("shares", {}))
        for kind in shares:
            if kind not in WORK_KINDS:
                raise ValueError(f"{where}.shares has {kind!r}: known are {', '.join(WORK_KINDS)}")
        return cls(
            check_number(f"{where}.after_ms", given.get("after_ms", 0.0)),
            {kind: check_number(f"{where}.shares.{kind}", share) for kind, share in shares.items()},
        )


def waking_share(wakings: Iterable[Waking], kind: str, waited_ms: float) -> float:
    """Returns the cost of an item after such a wait, as a share of its time without."""
    return sum(waking.shares.get(kind, 0.0) * waking.part(waited_ms) for waking in wakings)


def wakings_from(where: str, value: object) -> tuple[Waking, ...]:
    """Those of a file. Raises ValueError naming the field."""
    rows = check_list(where, value)
    return tuple(Waking.from_dict(f"{where}[{index}]", row) for index, row in enumerate(rows))


@dataclass(frozen=True)
class StageWaking:
    """The same in the milliseconds of each stage's items."""

    wakings: Sequence[Waking] = ()
    by_stage_ms: Sequence[Sequence[Mapping[str, float]]] = ()
    """By stage, of each of these, by kind."""

    def __bool__(self) -> bool:
        return any(
            waking.after_ms > 0 and any(of_stage[index] for of_stage in self.by_stage_ms)
            for index, waking in enumerate(self.wakings)
        )
