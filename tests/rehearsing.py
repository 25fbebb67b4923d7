"""Rehearses a whole model in this process, as if one worker had all its stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pipedream import _core
from pipedream.budget.footprint import Footprint
from pipedream.budget.rehearsal import Handover, Rehearsal
from pipedream.model.boundary import Boundary
from pipedream.model.stage_module import StageModule


def rehearse(
    stages: Sequence[StageModule],
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    **options: Any,
) -> tuple[list[Boundary], list[Footprint]]:
    """Returns the boundary after each stage but the last, and the footprint of each stage."""
    handover = Handover(None, _core.Placement.at_ranks([0] * len(stages)))
    rehearsal = Rehearsal(handover, torch.device("cpu"), loss_fn=loss_fn, **options)
    rehearsal.run(stages, inputs, targets)
    assert list(rehearsal.boundaries) == list(range(len(stages) - 1))
    assert list(rehearsal.footprints) == list(range(len(stages)))
    return list(rehearsal.boundaries.values()), list(rehearsal.footprints.values())


def boundaries_of(stages: Sequence[StageModule], inputs: Any) -> list[Boundary]:
    return rehearse(stages, inputs)[0]
