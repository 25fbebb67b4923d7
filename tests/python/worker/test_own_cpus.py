"""own_cpus.py: the CPUs of a machine are divided among its workers."""

from __future__ import annotations

import os

import pytest
from pipedream.worker.own_cpus import own_cpus, share_of


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
        "pipedream.worker.own_cpus._topology",
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
