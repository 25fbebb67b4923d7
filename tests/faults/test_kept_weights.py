"""Tests local runs that end early. The caller's model then has the newest version of every stage that is
alive.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from models import Batch
from pipedream import PipelineError, WorkerLost
from pipedream.report.status import StatusBoard
from torch import Tensor, nn
from training import Training, train_by_reference

_TRAINING = Training("mlp", 3, num_minibatches=12, short_last=False)


class _FailsAt:
    """A loss that raises an error at its n-th call, or kills its worker."""

    def __init__(self, num_calls: int, *, kills: bool = False) -> None:
        self._num_left = num_calls
        self._kills = kills

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._num_left -= 1
        if self._num_left == 0:
            if self._kills and "RANK" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("no loss today")
        loss: Tensor = _TRAINING.case.loss_fn(outputs, targets)
        return loss


def _run(model: nn.Module, **options: Any) -> Any:
    how = {**_TRAINING.options(), "progress": False, **options}
    return pipedream.run(model, _TRAINING.plan, **how)


def _num_updates_of_stages(model: nn.Sequential) -> list[int | None]:
    """Returns the number of updates that each stage's weights have had, by comparison with the reference.

    None means that no number of updates gives these weights.
    """
    states = [_TRAINING.model().state_dict()]
    for count in range(1, _TRAINING.num_minibatches + 1):
        states.append(train_by_reference(replace(_TRAINING, num_minibatches=count))[1])
    found: list[int | None] = []
    own = model.state_dict()
    for stage in _TRAINING.plan.stages:
        layers = range(stage.first_layer, stage.last_layer + 1)
        names = [name for name in own if int(name.split(".")[0]) in layers]
        equal = [
            count
            for count, state in enumerate(states)
            if all(torch.allclose(own[name], state[name], rtol=1e-9, atol=1e-12) for name in names)
        ]
        found.append(equal[0] if equal else None)
    return found


def test_after_an_exception_the_model_has_every_stages_newest_version() -> None:
    model = _TRAINING.model()
    with pytest.raises(PipelineError, match="no loss today") as caught:
        _run(model, loss_fn=_FailsAt(8))
    first, second, last = _num_updates_of_stages(model)
    assert last == 7  # the eighth forward failed, after seven backwards of the last stage
    assert first is not None and second is not None and min(first, second) >= 4 and max(first, second) <= 7
    # A stage sends its gradient before its own update, so the failure may end it between the two.
    assert first <= second + 1
    assert caught.value.minibatch == 7 and len(caught.value.losses) == 7


def test_after_a_lost_worker_the_model_has_the_other_stages_and_the_error_names_that_one() -> None:
    model = _TRAINING.model()
    with pytest.raises(WorkerLost) as caught:
        _run(model, loss_fn=_FailsAt(8, kills=True))
    assert str(caught.value) == (
        "stage 2 (rank 2) was killed by SIGKILL at minibatch 7; the model has the newest weights of the other"
        " stages, and of stage 2 those from before the run"
    )
    first, second, last = _num_updates_of_stages(model)
    assert last == 0
    assert first is not None and second is not None and min(first, second) >= 4 and max(first, second) <= 7
    # A stage sends its gradient before its own update, so the failure may end it between the two.
    assert first <= second + 1
    assert caught.value.minibatch == 7 and len(caught.value.losses) == 7


def test_a_run_that_fails_before_its_first_update_leaves_the_model_as_it_was() -> None:
    model = _TRAINING.model()
    with pytest.raises(PipelineError, match="no loss today"):
        _run(model, loss_fn=_FailsAt(1))
    assert _num_updates_of_stages(model) == [0, 0, 0]


class _InterruptsCaller:
    """Minibatches. The caller gets Ctrl-C when the first stage's worker reads the given one."""

    def __init__(self, minibatch: int) -> None:
        self._batches = list(replace(_TRAINING, num_minibatches=40).data())
        self._minibatch = minibatch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for minibatch, batch in enumerate(self._batches):
            if minibatch == self._minibatch and os.environ.get("RANK") == "0":
                os.kill(int(os.environ["TEST_CALLER"]), signal.SIGINT)
            yield batch


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1)], ids=["straight", "2-1"])
def test_ctrl_c_in_the_caller_returns_what_a_shorter_run_gives(
    replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    training = replace(_TRAINING, num_stages=len(replicas), replicas=replicas)
    monkeypatch.setenv("TEST_CALLER", str(os.getpid()))
    model = training.model()
    how = {**training.options(), "progress": False, "data": _InterruptsCaller(6)}
    # A job in the background may ignore SIGINT, so the test sets a handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = pipedream.run(model, training.plan, **how)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.is_interrupted and result.stopped_at is not None and 6 <= result.stopped_at < 40
    assert "stopping when the minibatches in flight are done" in capfd.readouterr().err
    expected, state = train_by_reference(replace(training, num_minibatches=result.stopped_at))
    torch.testing.assert_close(result.losses, expected.losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=1e-9, atol=1e-12)


class _InterruptsTwice(_InterruptsCaller):
    """Sends Ctrl-C again when the caller has asked the workers to end. This worker then never ends."""

    def __iter__(self) -> Iterator[Batch]:
        for minibatch, batch in enumerate(super().__iter__()):
            if minibatch == self._minibatch and os.environ.get("RANK") == "0":
                while not Path(os.environ["TEST_ASKED"]).exists():
                    time.sleep(0.001)
                os.kill(int(os.environ["TEST_CALLER"]), signal.SIGINT)
                signal.pause()  # waits until the worker is killed
            yield batch


def _run_until_interrupted(training: Training, data: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            pipedream.run(
                training.model(), training.plan, **{**training.options(), "progress": False, "data": data}
            )
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_CALLER", str(os.getpid()))
    monkeypatch.setenv("TEST_ASKED", str(tmp_path / "asked"))
    ask = StatusBoard.ask_for_stop

    def ask_and_tell(board: StatusBoard) -> None:
        ask(board)
        (tmp_path / "asked").touch()

    monkeypatch.setattr(StatusBoard, "ask_for_stop", ask_and_tell)
    _run_until_interrupted(_TRAINING, _InterruptsTwice(6))


def test_ctrl_c_with_asynchronous_replicas_says_why_it_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    training = replace(_TRAINING, num_stages=2, replicas=(2, 1), sync="asp")
    monkeypatch.setenv("TEST_CALLER", str(os.getpid()))
    _run_until_interrupted(training, _InterruptsCaller(6))
    assert "ending at once: replicas of stage 0 with sync='asp'" in capfd.readouterr().err


def test_nothing_is_left_half_written(tmp_path: Path) -> None:
    model = _TRAINING.model()
    with pytest.raises(PipelineError):
        _run(model, loss_fn=_FailsAt(8), save=str(tmp_path / "saved"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
