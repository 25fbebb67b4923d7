"""Tests resident_versions.py: weight versions that take turns on the device."""

from __future__ import annotations

import pytest
import torch
from pipedream.budget.copy_streams import make_copy_streams
from pipedream.budget.resident_versions import ResidentVersions, num_resident_versions
from resident import HOST, linear_versions, memory


class _Trace:
    """ResidentVersions with num_versions versions, each of which has one float."""

    def __init__(self, num_versions: int) -> None:
        self.slots = [memory(8) for _ in range(num_resident_versions(num_versions))]
        self.homes = [memory(8) for _ in range(num_versions)]
        self.versions = ResidentVersions(self.slots, self.homes, make_copy_streams(HOST))
        self.places: dict[int, int | None] = {}
        self.versions.on_move = self.places.__setitem__

    def write(self, version: int, content: float) -> None:
        self.versions.write(version)
        self.versions.device_slot(version).view(torch.float64).fill_(content)
        self.versions.written(version)

    def read(self, version: int) -> float:
        self.versions.read(version)
        return self.versions.device_slot(version).view(torch.float64).item()


def test_every_version_is_read_back_in_the_order_of_weight_stashing() -> None:
    num_versions = 6
    trace = _Trace(num_versions)
    trace.write(0, 0.0)
    for minibatch in range(20):  # version v lies in home v % num_versions
        newest, oldest = minibatch, max(0, minibatch - num_versions + 1)
        assert trace.read(newest % num_versions) == newest
        assert trace.read(oldest % num_versions) == oldest
        if oldest < newest:
            trace.versions.prefetch((oldest + 1) % num_versions)
            assert (oldest + 1) % num_versions in trace.places
        trace.versions.read(newest % num_versions)
        trace.write((newest + 1) % num_versions, newest + 1.0)


def test_a_version_that_was_prefetched_needs_no_copy_when_it_is_read() -> None:
    trace = _Trace(5)
    for version in range(5):
        trace.write(version, float(version))
        trace.versions.read(version)
    trace.versions.read(0)
    trace.versions.prefetch(1)
    moves = dict(trace.places)
    assert trace.read(4) == 4.0 and trace.read(1) == 1.0
    assert trace.places == moves
    assert trace.versions.position_of(0) is not None


def test_a_version_that_is_nowhere_is_not_read_by_mistake() -> None:
    trace = _Trace(4)
    for version in range(4):
        trace.write(version, float(version))
    away = next(version for version in range(4) if trace.versions.position_of(version) is None)
    with pytest.raises(AssertionError, match=f"version slot {away} is not in device memory"):
        trace.versions.device_slot(away)


def test_a_poisoned_version_is_nan_here_and_at_home() -> None:
    trace = _Trace(4)
    for version in range(4):
        trace.write(version, float(version))
    for version in range(4):
        trace.versions.poison(version)
        assert torch.isnan(trace.homes[version].view(torch.float64)).all()
        assert torch.tensor(trace.read(version)).isnan()


def test_a_leaf_whose_version_is_nowhere_reads_as_nan() -> None:
    _, weights, resident = linear_versions(5)
    for version in range(4):
        weights.begin_update(version, version + 1)
        weights.copy_version(version, version + 1)
        weights.end_update(version + 1)
    for version in range(5):
        is_here = resident.position_of(version) is not None
        assert weights.leaves(version)[0].isnan().any() != is_here
    assert sum(resident.position_of(version) is not None for version in range(5)) == 3


def test_restoring_brings_the_version_back_first() -> None:
    layer, weights, resident = linear_versions(5)
    before = layer.weight.detach().clone()
    for version in range(4):
        weights.begin_update(version, version + 1)
        with torch.no_grad():
            weights.leaves(version + 1)[0].copy_(weights.leaves(version)[0] + 1.0)
        weights.end_update(version + 1)
    assert resident.position_of(0) is None
    weights.restore(0)
    assert torch.equal(layer.weight, before)
    weights.restore(4)
    assert torch.equal(layer.weight, before + 1.0 + 1.0 + 1.0 + 1.0)


@pytest.mark.parametrize(("num_versions", "resident"), [(1, 1), (2, 2), (3, 3), (4, 3), (9, 3)])
def test_three_versions_at_most_stay(num_versions: int, resident: int) -> None:
    assert num_resident_versions(num_versions) == resident
