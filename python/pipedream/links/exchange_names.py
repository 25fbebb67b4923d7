"""The names of the channels by which one owner of a stage's shards exchanges gradients and weight versions
with the other owners. Pure; any thread."""

from __future__ import annotations

from collections import defaultdict

from pipedream import _core
from pipedream.links.channels import BETWEEN_REPLICAS, edge_name, factors_name

__all__ = ["FACTORS", "ExchangeNames", "exchange_names"]

FACTORS = "factors"
"""The kind of the channels that carry factors beside a push."""
ExchangeNames = defaultdict[tuple[str, bool], dict[int, str]]
"""(kind, whether this owner sends) -> {replica index of the other end: name}."""


def exchange_names(schedule: _core.ScheduleOptions, stage: int, owner: int) -> ExchangeNames:
    """Returns the names for one owner. owner: the index of a replica or a spare in the stage. Spares have the
    indices after the replicas."""
    names: ExchangeNames = defaultdict(dict)
    for edge in _core.edges_of(schedule):
        if edge.kind not in BETWEEN_REPLICAS or edge.from_stage != stage:
            continue
        for sends, mine, other in (
            (True, edge.from_replica, edge.to_replica),
            (False, edge.to_replica, edge.from_replica),
        ):
            if mine == owner:
                names[edge.kind, sends][other] = edge_name(edge, schedule.placement)
                if edge.kind == "push":
                    names[FACTORS, sends][other] = factors_name(edge, schedule.placement)
    return names
