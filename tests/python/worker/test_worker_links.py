"""Tests that a worker that fails tells its links before it tells the store."""

from __future__ import annotations

from typing import Any

import pytest
from pipedream import PeerLost
from pipedream.worker.worker_links import WorkerLinks


class Noting:
    """Records its calls in the given list, which objects may share. The call with the name `fails` raises an
    error."""

    def __init__(self, calls: list[str], fails: str = "") -> None:
        self._calls = calls
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> None:
            self._calls.append(name)
            if name == self._fails:
                raise PeerLost("it is gone, too")

        return call


@pytest.mark.parametrize("fails", ["", "abort", "fail", "close"])
def test_the_links_are_told_before_a_store_that_may_not_answer(fails: str) -> None:
    # A worker waits for a lost store for as long as peer_timeout. Its neighbours must not wait with it.
    calls: list[str] = []
    rendezvous: Any = Noting(calls, fails)
    core: Any = Noting(calls, fails)
    failed = WorkerLinks(rendezvous)
    failed._core = core
    failed.say_why("the layer gave up")
    assert calls == ["abort", "fail", "close"]


def test_before_there_are_links_the_store_is_told() -> None:
    calls: list[str] = []
    rendezvous: Any = Noting(calls)
    WorkerLinks(rendezvous).say_why("the layer gave up")
    assert calls == ["fail"]
