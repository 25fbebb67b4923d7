"""The fixtures that tests of running pipelines share."""

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

# A GPU that this build of the core cannot use, which run() would refuse.
if torch.cuda.is_available() and not _core.cuda_available():
    os.environ.setdefault("PIPEDREAM_DEVICE", "host")

# A slow or loaded machine is no failure.
settings.register_profile("pipedream", deadline=None)
settings.load_profile("pipedream")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "faults" in item.path.relative_to(Path(__file__).parent).parts:
            item.add_marker(pytest.mark.faults)
    # First what takes long by itself or waits for failures, so that it is not alone at the end. The first
    # worker of pytest-xdist has the first part, of which others take what it has not come to.
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("slow", "faults")))


@pytest.fixture(scope="session")
def farm() -> Iterator[Farm]:
    """Processes that stand in for the ranks of torchrun. They compute on one thread, and bits depend on that,
    so from its first use on this process does so too: it has the plain loop that they are compared with."""
    torch.set_num_threads(1)
    farm = Farm()
    yield farm
    farm.close()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[JobOptions]:
    """The options of each call of run(), which raises Launched instead of launching workers."""
    return note_launches(monkeypatch)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread in a test without ranks: bits depend on it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
