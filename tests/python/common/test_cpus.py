"""How many cores a run may use: the mask's, or the quota of a control group or of one around it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pipedream.common.cpus import usable_cpus


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a process that may run on 8 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    (tmp_path / "own").write_text("0::/outer/inner\n")
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    return folder


def _usable(group: Path) -> int:
    root = group.parents[1]
    return usable_cpus(root, root / "own")


def test_without_a_quota_it_is_the_mask(group: Path) -> None:
    assert _usable(group) == 8
    (group / "cpu.max").write_text("max 100000\n")
    assert _usable(group) == 8


@pytest.mark.parametrize(
    ("quota", "cores"), [("350000 100000", 3), ("20000 100000", 1), ("1600000 100000", 8), ("what", 8)]
)
def test_a_quota_below_the_mask_counts_in_whole_cores(group: Path, quota: str, cores: int) -> None:
    (group / "cpu.max").write_text(quota)
    assert _usable(group) == cores


def test_a_quota_of_a_group_around_it_counts(group: Path) -> None:
    (group / "cpu.max").write_text("600000 100000\n")
    (group.parent / "cpu.max").write_text("200000 100000\n")
    assert _usable(group) == 2


def test_a_system_without_control_groups_has_its_mask(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path, tmp_path / "missing") == len(os.sched_getaffinity(0))
