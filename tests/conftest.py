"""Defines the fixtures that several folders of tests share, and the order of the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from farm import Farm
from hypothesis import settings
from launches import note_launches
from pipedream import _core
from pipedream.stage.job import JobOptions

# run() refuses a GPU that torch finds but this build of the core cannot use.
if torch.cuda.is_available() and not _core.cuda_available():
    os.environ.setdefault("PIPEDREAM_DEVICE", "host")

# Hypothesis sets no deadline, because a slow or loaded machine is no failure.
settings.register_profile("pipedream", deadline=None)
settings.load_profile("pipedream")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "faults" in item.path.relative_to(Path(__file__).parent).parts:
            item.add_marker(pytest.mark.faults)
    # Tests that take long or wait for failures come first, so that none of them runs alone at the end.
    # pytest-xdist gives the first tests to its first worker, and idle workers take some of them.
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("slow", "faults")))


@pytest.fixture(scope="session")
def farm() -> Iterator[Farm]:
    """Yields processes that stand in for the ranks of torchrun. They compute on one thread. The bits of
    results depend on the number of threads. So this process, which runs plain loops for comparison, uses one
    thread too.
    """
    torch.set_num_threads(1)
    farm = Farm()
    yield farm
    farm.close()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[JobOptions]:
    """Lets run() raise Launched instead of launching workers. Returns a list, to which each call adds its
    options.
    """
    return note_launches(monkeypatch)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Lets torch compute on one thread, because the bits of results depend on the number of threads. For
    tests without ranks.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
