"""Tests ignored_labels.py: which minibatches it checks. tests/equivalence/test_runs_with_ignored_labels.py
tests everything else.
"""

from __future__ import annotations

import pytest
import torch
from pipedream.model import ignored_labels
from pipedream.model.ignored_labels import IGNORED, IgnoredLabels
from torch import Tensor


class _OnDevice(Tensor):
    """A tensor that seems to be on a GPU. It counts how often anyone waits for its values."""

    num_waits = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def min(self) -> Tensor:  # type: ignore[override]
        type(self).num_waits += 1
        return super().min()


def test_labels_on_a_device_are_waited_for_a_few_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first few minibatches may wait for the device."""
    monkeypatch.setattr(_OnDevice, "num_waits", 0)
    labels, looks = torch.arange(4).as_subclass(_OnDevice), IgnoredLabels()
    for _ in range(2 * ignored_labels._LOOKS_ON_DEVICE):
        assert looks.look(labels, labels.chunk(2), [2, 2]) == ()
    assert _OnDevice.num_waits == ignored_labels._LOOKS_ON_DEVICE


@pytest.mark.parametrize(
    ("labels", "is_uneven"),
    [
        ([[IGNORED, 1, 2], [IGNORED, 1, 2]], None),  # both samples have as many labels
        ([[IGNORED, 1, 2], [0, 1, 2]], (True, False)),
        ([[0, IGNORED, 2], [0, 1, 2]], (True, True)),
        ([[IGNORED, 1, 2], [0, IGNORED, 2]], (False, True)),
        ([[0, 1, 2], [0, 1, 2]], None),
        ([[IGNORED] * 3, [IGNORED] * 3], None),
    ],
    ids=str,
)
def test_labels_are_uneven_by_all_or_by_those_behind_the_first(
    labels: list[list[int]], is_uneven: tuple[bool, bool] | None
) -> None:
    tensor = torch.tensor(labels)
    found = IgnoredLabels().look(tensor, tensor.chunk(2), [1, 1])
    assert [uneven.is_uneven for uneven in found] == ([] if is_uneven is None else [is_uneven])
    assert all(uneven.valid != IGNORED for uneven in found)
