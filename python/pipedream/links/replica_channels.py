"""The names of the channels on which one owner of a stage's shards exchanges gradients and weight versions
with the other owners. An owner is a replica or a spare of the stage. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipedream import _core
from pipedream.links.channels import BETWEEN_REPLICAS, edge_name, factors_name

__all__ = ["ReplicaChannels"]


@dataclass(frozen=True)
class ReplicaChannels:
    """The names of the channels between one owner and the other owners. Each mapping has a name by the other
    owner's index."""

    push_to: Mapping[int, str]
    push_from: Mapping[int, str]
    pull_to: Mapping[int, str]
    pull_from: Mapping[int, str]
    factors_to: Mapping[int, str] = field(default_factory=dict)
    """The channels that carry factors beside pushes. Empty if the stage pushes no factors."""
    factors_from: Mapping[int, str] = field(default_factory=dict)
    posted_from: frozenset[int] = frozenset()
    """The other owners whose versions are received directly into the slots of the weights."""

    @classmethod
    def of_owner(
        cls,
        schedule: _core.ScheduleOptions,
        stage: int,
        owner: int,
        *,
        has_factors: bool = False,
        posted_from: frozenset[int] = frozenset(),
    ) -> ReplicaChannels:
        """Returns the names for one owner. owner: its index in the stage; spares have the indices after the
        replicas."""
        names: dict[str, dict[int, str]] = {f"{kind}_{way}": {} for kind in _KINDS for way in ("to", "from")}
        for edge in _core.edges_of(schedule):
            if edge.kind not in BETWEEN_REPLICAS or edge.from_stage != stage:
                continue
            for way, mine, other in (
                ("to", edge.from_replica, edge.to_replica),
                ("from", edge.to_replica, edge.from_replica),
            ):
                if mine != owner:
                    continue
                names[f"{edge.kind}_{way}"][other] = edge_name(edge, schedule.placement)
                if edge.kind == "push" and has_factors:
                    names[f"factors_{way}"][other] = factors_name(edge, schedule.placement)
        return cls(**names, posted_from=posted_from)

    @property
    def others(self) -> set[int]:
        return {*self.push_to, *self.push_from, *self.pull_to, *self.pull_from}

    @property
    def received(self) -> list[str]:
        """The channels on which the owner receives."""
        return [*self.push_from.values(), *self.pull_from.values(), *self.factors_from.values()]

    def of(self, other: int) -> list[str]:
        """Returns the channels to and from another owner, in the order of the core's ExchangePeer; "" stands
        for a channel that does not exist."""
        pushes = (self.push_to, self.push_from, self.factors_to, self.factors_from)
        return [names.get(other, "") for names in (*pushes, self.pull_to, self.pull_from)]


_KINDS = (*BETWEEN_REPLICAS, "factors")
