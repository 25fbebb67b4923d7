"""Makes a layer with some versions of its weight in device memory, for tests of ResidentVersions."""

from __future__ import annotations

import torch
from pipedream.budget.copy_streams import make_copy_streams
from pipedream.budget.resident_versions import ResidentVersions
from pipedream.update.weights import WeightVersions, weight_layout
from torch import Tensor, nn

HOST = torch.device("cpu")


def memory(num_bytes: int) -> Tensor:
    """Returns memory filled with bytes 0xFF, which floats read as NaN."""
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


def linear_versions(num_versions: int) -> tuple[nn.Linear, WeightVersions, ResidentVersions]:
    layer = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    named = list(layer.named_parameters())
    slot_bytes = weight_layout(named)[0]
    slots = [memory(slot_bytes) for _ in range(3)]
    homes = [memory(slot_bytes) for _ in range(num_versions)]
    resident = ResidentVersions(slots, homes, make_copy_streams(HOST))
    return layer, WeightVersions(layer, named, slots, resident), resident
