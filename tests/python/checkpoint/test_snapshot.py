"""Tests snapshot.py: values that are no tensors go through JSON and come back unchanged."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from pipedream.checkpoint.snapshot import decode, encode
from torch import Tensor


def _through_json(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "weight", tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        {"betas": (0.9, 0.999), "lr": 0.1 + 0.2, "foreach": None, "fused": False, "name": "é"},
        {0: [1, (2.5, ("a", []))], None: {}, "float": 1, "tuple": [2]},
        [math.inf, -math.inf, 2**70, 1e-320, -0.0, 1 + 2j, torch.bfloat16],
    ],
)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = _through_json(value)
    assert back == value
    assert repr(back) == repr(value), "and of the same types"


def test_tensors_come_back_with_their_bits_and_in_memory_of_their_own() -> None:
    value = {"step": torch.tensor(3.0), "mean": torch.full((2, 3), math.nan).t(), "few": [torch.tensor(True)]}
    tensors: dict[str, Tensor] = {}
    document = encode(value, "0.weight", tensors)
    assert list(tensors) == ["0.weight / step", "0.weight / mean", "0.weight / few / 0"]
    value["step"] += 1
    back = decode(document, tensors)
    assert back["step"] == 3
    assert back["mean"].stride() == value["mean"].stride()
    assert torch.equal(back["mean"].isnan(), value["mean"].isnan())
    back["step"] += 5
    assert decode(document, tensors)["step"] == 3


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(ValueError, match=r"^0\.weight / hook is a function, which is neither a tensor nor"):
        encode({"hook": lambda: None}, "0.weight", {})
