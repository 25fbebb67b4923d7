"""Microbatches are what is in flight: with any number of them, on replicas or not, a run gives the oracle's
numbers."""

from __future__ import annotations

from typing import Any

from covering import parametrize_pairs
from farm import Farm
from oracle import assert_equals_reference
from training import Training

_STRAIGHT = ("pipedream", "unstashed", "vertical_sync")
_PLANS = {"2-1": (2, 1), "1-2": (1, 2), "3-1": (3, 1), "2-2": (2, 2), "2-3": (2, 3)}


@parametrize_pairs(
    schedule=_STRAIGHT,
    microbatches=(2, 3, 4, 6),
    case_name=("cnn", "tied_apart", "dropout"),
    how=({}, {"recompute": True}, {"max_grad_norm": 0.5}, {"autocast": "float16"}),
)
def test_a_straight_plan_gives_the_references_result(
    farm: Farm, schedule: str, microbatches: int, case_name: str, how: dict[str, Any]
) -> None:
    if "autocast" in how:
        how, case_name = how | {"relative": 1e-5}, "mlp"
    relative = how.pop("relative", None) if "relative" in how else None
    training = Training(case_name, 3, schedule=schedule, microbatches=microbatches, **how)
    assert_equals_reference(farm, training, relative=relative)


@parametrize_pairs(
    plan=tuple(_PLANS),
    schedule=("pipedream", "unstashed", "vertical_sync", "flush", "gpipe"),
    microbatches=(2, 3, 4, 6),
    case_name=("cnn", "dropout"),
    sync=("bsp", "allreduce", "ssp"),
)
def test_a_replicated_plan_gives_the_references_result(
    farm: Farm, plan: str, schedule: str, microbatches: int, case_name: str, sync: str
) -> None:
    how: dict[str, Any] = {"sync": sync}
    if sync == "ssp":
        schedule, how["staleness"] = "pipedream", 1
    replicas = _PLANS[plan]
    training = Training(
        case_name, len(replicas), replicas=replicas, schedule=schedule, microbatches=microbatches, **how
    )
    assert_equals_reference(farm, training)
