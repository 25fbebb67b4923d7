"""Tests tracebacks.py: a user sees the frames of the user's code, and only one frame of pipedream."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import pipedream
import pytest
import torch
from pipedream import PipelineError
from pipedream.budget.footprint import _HostMeter
from pipedream.common import tracebacks
from pipedream.common.guard import error_path
from pipedream.stage.stage_runner import UserCode
from pipedream.worker.failure import write_error
from torch import nn

_PACKAGE = os.path.dirname(pipedream.__file__)
_DATA = [(torch.ones(2, 3), torch.ones(2, 3))]


@pytest.fixture(autouse=True)
def usual_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEDREAM_TRACEBACK", raising=False)


_INTERRUPTED = """
import os, signal, pipedream, torch

class Interrupting(torch.nn.Linear):
    def forward(self, value):
        os.kill(os.getpid(), signal.SIGINT)
        return super().forward(value)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    batches = [(torch.ones(2, 3), torch.ones(2, 3))]
    pipedream.profile([Interrupting(3, 3)], batches, torch.nn.functional.mse_loss)
"""


class _Broken(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.deeper(value)

    def deeper(self, value: torch.Tensor) -> torch.Tensor:
        # Without the old traceback, which shorten() would have cut already.
        raise self._error.with_traceback(None)


def _shown(trace: TracebackType | None) -> list[str]:
    """Returns the functions of the frames. Those of pipedream are in brackets."""
    return [
        f"[{frame.name}]" if frame.filename.startswith(_PACKAGE) else frame.name
        for frame in traceback.extract_tb(trace)
    ]


def _function_of_ours(body: str) -> Any:
    """Returns a function whose code seems to be in the package."""
    namespace: dict[str, Any] = {}
    exec(compile(f"def function(*_):\n    {body}", f"{_PACKAGE}/memory.py", "exec"), namespace)
    return namespace["function"]


def _profile(model: Any) -> BaseException:
    try:
        pipedream.profile(model, _DATA, nn.functional.mse_loss, minibatches=1)
    except BaseException as error:
        return error
    raise AssertionError("no error")


@pytest.mark.parametrize("kind", [ValueError, KeyError, AssertionError])
def test_an_error_of_the_users_code_shows_the_way_to_it_through_their_code(kind: type[Exception]) -> None:
    error = _profile(nn.Sequential(nn.Linear(3, 3), _Broken(kind("no"))))
    assert type(error) is kind
    assert _shown(error.__traceback__) == ["_profile", "[call]", "forward", "deeper"]


def test_an_error_of_a_librarys_in_the_users_place_shows_the_librarys_frames() -> None:
    inner = PipelineError("stage 1 failed")
    try:
        with _HostMeter("cpu"):  # this meter is on during a worker's first minibatches
            UserCode(lambda what: "stage 1").run("forward", nn.Linear(4, 4), torch.ones(2, 3))
    except PipelineError as error:
        inner = error
    tracebacks.shorten(inner)
    assert inner.__cause__ is not None
    # The forward of Linear, without two frames of torch's module.py.
    assert _shown(inner.__cause__.__traceback__) == ["forward"]
    assert _shown(inner.__traceback__) == [
        "test_an_error_of_a_librarys_in_the_users_place_shows_the_librarys_frames"
    ]


@pytest.mark.parametrize(
    ("layers", "loss_fn", "function"),
    [
        ([nn.Linear(3, 3), nn.Linear(4, 3)], nn.functional.mse_loss, "forward"),
        ([nn.Linear(3, 2)], nn.functional.binary_cross_entropy, "binary_cross_entropy"),
    ],
)
def test_a_shape_that_torchs_layers_and_losses_do_not_take_shows_no_frame_of_ours(
    layers: list[nn.Module], loss_fn: Any, function: str
) -> None:
    try:
        pipedream.profile(nn.Sequential(*layers), _DATA, loss_fn, minibatches=1)
    except (RuntimeError, ValueError) as error:
        shown = _shown(error.__traceback__)
        assert shown[1:2] == ["[call]"]
        assert not any(name.startswith("[") for name in shown[2:])
        assert function in shown
        assert error.__notes__ == ["at minibatch 0 of the batches that are profiled"]
    else:
        raise AssertionError("no error")


@pytest.mark.slow
def test_an_interrupt_that_nobody_catches_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_INTERRUPTED, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, check=False, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == "pipedream: profile was interrupted\n"


def test_a_mistake_in_the_arguments_shows_where_the_user_made_it() -> None:
    assert _shown(_profile("model").__traceback__) == ["_profile", "[call]"]


def test_an_unknown_argument_is_told_with_the_nearest_one() -> None:
    plan = pipedream.Plan.straight(1, 1)
    mistyped: dict[str, Any] = {"microbatch": 2}
    with pytest.raises(TypeError, match="takes no argument 'microbatch': do you mean 'microbatches'"):
        pipedream.run(nn.Linear(3, 3), plan, data=_DATA, optimizer=torch.optim.SGD, **mistyped)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'xyz'"):
        pipedream.profile(nn.Linear(3, 3), _DATA, xyz=2)  # type: ignore[call-arg]


def test_an_error_that_nobody_foresaw_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pipedream.profiling.profiler.layers_of", _function_of_ours("raise AssertionError('our bug')")
    )
    assert _shown(_profile(nn.Linear(3, 3)).__traceback__)[-2:] == ["[profile]", "[function]"]


def test_all_frames_are_shown_where_the_environment_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEDREAM_TRACEBACK", "1")
    shown = _shown(_profile(_Broken(ValueError("no"))).__traceback__)
    assert "[profile]" in shown
    assert "_call_impl" in shown


def _fail_in_forward(error: Exception) -> Exception:
    """Returns the error that a worker raises when the user's layer raises this error."""
    try:
        UserCode(lambda what: f"stage 1 failed in {what}").run("forward", _Broken(error), torch.ones(2, 3))
    except PipelineError as raised:
        return raised
    raise AssertionError("no error")


def _told(folder: Path, error: Exception) -> dict[str, Any]:
    """Returns the document in which the caller reads a worker's error."""
    try:
        raise error
    except type(error) as raised:
        write_error(folder, 0, raised)
    told: dict[str, Any] = json.loads(error_path(folder, "0").read_text())
    return told


def test_a_worker_tells_the_users_frames_and_none_of_its_own(tmp_path: Path) -> None:
    told = _told(tmp_path, _fail_in_forward(KeyError("mask")))
    assert told["message"] == "stage 1 failed in forward: KeyError: 'mask'"
    lines = told["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.rpartition(" in ")[2] for line in lines if line.startswith("  File ")] == [
        "forward",
        "deeper",
    ]
    assert lines[-1] == "KeyError: 'mask'"
    assert _PACKAGE not in told["traceback"]


def test_a_worker_tells_no_frames_of_a_mistake_that_its_message_explains(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory is 3") as caught:
        _function_of_ours("raise ValueError('memory is 3')")()
    write_error(tmp_path, 0, caught.value)
    assert json.loads(error_path(tmp_path, "0").read_text())["traceback"] is None


def test_an_error_of_another_kind_keeps_its_name(tmp_path: Path) -> None:
    assert _told(tmp_path, KeyError("mask"))["message"] == "KeyError: 'mask'"
