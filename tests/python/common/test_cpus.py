"""Tests the CPUs that a run may use, and their division among the workers of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pipedream.common.cpus import own_cpus, share_of, usable_cpus


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the control group of a process that may run on 8 CPUs."""
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


def test_each_worker_has_an_equal_part_and_every_cpu_is_somebodys() -> None:
    cpus = [0, 4, 1, 5, 2, 6, 3, 7]
    assert [share_of(cpus, rank, 4) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [share_of(cpus, rank, 3) for rank in range(3)] == [[0, 4], [1, 5, 2], [6, 3, 7]]


def test_where_there_are_more_workers_than_cpus_nobody_has_any() -> None:
    assert [share_of([0, 1], rank, 3) for rank in range(3)] == [[], [], []]


def test_the_workers_of_a_machine_share_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {3: (1, 0), 5: (0, 1), 7: (0, 1)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(allowed))
    monkeypatch.setattr(
        "pipedream.common.cpus._topology",
        lambda cpu, name: allowed[cpu][name == "core_id"],
    )
    monkeypatch.delenv("PIPEDREAM_OWN_CPUS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [own_cpus(rank) for rank in range(2)] == [[5], [7, 3]]
    monkeypatch.setenv("PIPEDREAM_OWN_CPUS", "0")
    assert own_cpus(0) == []


def test_a_machine_with_one_worker_leaves_it_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert own_cpus(0) == []
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert own_cpus(0) == []
