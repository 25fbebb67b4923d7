"""Makes a stage of layers and its weight versions, in memory that the test owns."""

from __future__ import annotations

from typing import Any

import torch
from pipedream import Plan
from pipedream.model.stage_module import StageModule
from pipedream.splitting.splitter import split
from pipedream.update.weights import WeightVersions, weight_layout
from torch import Tensor, nn


def stage_of(*layers: nn.Module) -> StageModule:
    return split(nn.Sequential(*layers), Plan.straight(len(layers), 1))[0]


def slots_for(named: Any, num_slots: int) -> list[Tensor]:
    return [torch.zeros(weight_layout(named)[0], dtype=torch.uint8) for _ in range(num_slots)]


def versions_of(stage: StageModule, num_slots: int) -> WeightVersions:
    named = stage.trainable_parameters()
    return WeightVersions(stage, named, slots_for(named, num_slots))
