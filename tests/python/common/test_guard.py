"""Tests that run() refuses at once to be called where a worker would call it again."""

from __future__ import annotations

import threading
from typing import Any

import pipedream
import pytest
import torch
from pipedream import Plan
from pipedream.common.guard import one_run_at_a_time
from pipedream.launch import runner
from torch import nn


def _run() -> None:
    pipedream.run(
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
        Plan.straight(2, 2),
        data=[(torch.ones(1, 1), torch.ones(1, 1))],
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        progress=False,
    )


@pytest.fixture
def no_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr(runner, "run_locally", start)


def _refusal() -> str:
    with pytest.raises(RuntimeError) as caught:
        _run()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_within_another_is_refused_and_the_other_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the error both threads would train for a while. One would then fail, because runs share
    # environment variables.
    begun, over = threading.Event(), threading.Event()

    def train(*_: object) -> Any:
        begun.set()
        over.wait()
        raise ArithmeticError("ended")

    monkeypatch.setattr(runner, "run_locally", train)
    ended: list[BaseException] = []

    def run() -> None:
        with pytest.raises(ArithmeticError) as caught:
            _run()
        ended.append(caught.value)

    first = threading.Thread(target=run)
    first.start()
    begun.wait()
    try:
        said = _refusal()
        assert not ended
    finally:
        over.set()
        first.join()
    assert said == (
        "run() was called while another run() of this process trains: call it when that one has returned,"
        " or in another process"
    )
    assert len(ended) == 1
    with pytest.raises(ArithmeticError):  # the next run may train
        _run()


@pytest.mark.usefixtures("no_worker_starts")
def test_a_run_in_a_worker_of_a_run_is_refused() -> None:
    with one_run_at_a_time():  # local_worker.py does this around a worker's part
        assert "another run() of this process" in _refusal()


class Training(torch.utils.data.Dataset[str]):
    """Whoever reads it trains."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> str:
        try:
            _run()
        except RuntimeError as error:
            return str(error)
        return "was not refused"


@pytest.mark.usefixtures("no_worker_starts")
def test_a_run_in_a_worker_of_a_data_loader_is_refused() -> None:
    # The loader's process is forked during a run. The error must still name the loader, not the run.
    with one_run_at_a_time():
        (said,) = torch.utils.data.DataLoader(Training(), num_workers=1, multiprocessing_context="fork")
    assert said == [
        "run() was called in a worker process of a DataLoader: call it in the process of the script, not in"
        " what reads the data"
    ]


@pytest.mark.usefixtures("no_worker_starts")
def test_a_run_in_a_daemonic_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runner.multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert _refusal() == (
        "run() was called in a daemonic process, which may start no workers: make that process with"
        " daemon=False"
    )
