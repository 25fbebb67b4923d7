"""Tests notices that the machine will be taken away (SIGTERM or SIGUSR1). A run saves itself at its next
boundary then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import psutil
import pytest
from farm import Farm
from mishaps import NUM_MINIBATCHES, minibatches, model_with, run, wait_for_file
from pipedream import Checkpoints, PeerLost
from pipedream.checkpoint.checkpoint_folder import checkpoints_in, folder_of, is_complete, minibatch_of
from pipedream.planning.plan import Plan, Stage
from pipedream.worker import notices

_AT = 3


class _EndedByNotice(BaseException):
    """Raised by the script's own handler of SIGTERM."""


@contextlib.contextmanager
def _script_ends_at_sigterm(told: Path | None = None) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        if told is not None:
            told.touch()
        raise _EndedByNotice

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _send(number: int, processes: tuple[int, ...], until: str) -> None:
    """Sends the signal in the first stage's forward. The stage then waits until the file `until` exists,
    before it reaches its next boundary.
    """
    notices.LOOK_S = 0.0
    for process in processes or (os.getpid(), os.getppid()):
        os.kill(process, number)
    wait_for_file(until)


def _checkpoints(path: Path, **how: object) -> Checkpoints:
    return Checkpoints(path, every="10h", **how)  # type: ignore[arg-type]


def _saved(path: Path) -> list[int]:
    assert all(map(is_complete, checkpoints_in(path)))
    return list(map(minibatch_of, checkpoints_in(path)))


def test_sigusr1_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    send = functools.partial(_send, signal.SIGUSR1, (os.getpid(),), str(tmp_path / "save"))
    result = run(model_with(send, stages=2, at=_AT), checkpoints=_checkpoints(tmp_path))
    assert len(result.losses) == NUM_MINIBATCHES
    assert _saved(tmp_path) == [_AT + 1, NUM_MINIBATCHES]
    assert not (tmp_path / "save").exists()


def test_replicas_of_the_first_stage_save_at_a_boundary_that_none_of_them_has_passed(tmp_path: Path) -> None:
    send = functools.partial(_send, signal.SIGUSR1, (os.getpid(),), str(tmp_path / "save"))
    plan = Plan((Stage(0, 0, num_replicas=2), Stage(1, 1)))
    how = {"plan": plan, "data": minibatches(40)}
    result = run(model_with(send, stages=2, at=4, rank=0), checkpoints=_checkpoints(tmp_path), **how)
    noticed, end = _saved(tmp_path)
    assert 6 < noticed < end == 40 and noticed % 2 == 0
    shutil.rmtree(checkpoints_in(tmp_path)[-1])
    continued = run(model_with(None, stages=2), checkpoints=_checkpoints(tmp_path), **how)
    assert continued.continued_at == noticed and continued.losses == result.losses


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_time_is_looked_at_at_each_boundary_and_the_end_is_saved_too(tmp_path: Path, replicas: int) -> None:
    plan = Plan((Stage(0, 0, num_replicas=replicas), Stage(1, 1)))
    checkpoints = Checkpoints(tmp_path, every="0.000001s", keep=99)
    run(model_with(None, stages=2), plan=plan, checkpoints=checkpoints, data=minibatches(50))
    *timed, end = _saved(tmp_path)
    assert end == 50 and timed and not any(minibatch % replicas for minibatch in timed)


def test_sigterm_saves_before_the_script_ends_as_it_would_have(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    send = functools.partial(_send, signal.SIGTERM, (os.getpid(),), str(tmp_path / "save"))
    with pytest.raises(_EndedByNotice), _script_ends_at_sigterm():
        run(model_with(send, stages=2, at=_AT), checkpoints=_checkpoints(tmp_path))
    assert is_complete(folder_of(tmp_path, _AT + 1))
    assert capfd.readouterr().err == "pipedream: saving a checkpoint before this process ends\n"
    continued = run(model_with(None, stages=2), checkpoints=_checkpoints(tmp_path))
    assert continued.continued_at in (_AT + 1, NUM_MINIBATCHES)
    assert continued.losses == run(model_with(None, stages=2)).losses


def test_sigterm_ends_a_script_whose_run_comes_to_no_boundary_within_grace(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    send = functools.partial(_send, signal.SIGTERM, (os.getpid(),), str(ended))
    with pytest.raises(_EndedByNotice), _script_ends_at_sigterm(ended):
        run(model_with(send, stages=2, at=_AT), checkpoints=_checkpoints(tmp_path / "C", grace=0.3))
    assert not _saved(tmp_path / "C")


def test_a_script_that_ignores_sigterm_is_saved_and_goes_on(tmp_path: Path) -> None:
    send = functools.partial(_send, signal.SIGTERM, (os.getpid(),), str(tmp_path / "save"))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        result = run(model_with(send, stages=2, at=_AT), checkpoints=_checkpoints(tmp_path))
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(result.losses) == NUM_MINIBATCHES
    assert _saved(tmp_path) == [_AT + 1, NUM_MINIBATCHES]


def test_without_grace_sigterm_ends_a_script_at_once(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    send = functools.partial(_send, signal.SIGTERM, (os.getpid(),), str(ended))
    with pytest.raises(_EndedByNotice), _script_ends_at_sigterm(ended):
        run(model_with(send, stages=2, at=_AT), checkpoints=_checkpoints(tmp_path / "C", grace=0))
    assert not _saved(tmp_path / "C")


def _run_rank(path: Path) -> None:
    """Trains at a rank. All ranks get SIGTERM, because torchrun passes it on."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the farm's server ignores SIGTERM
    (path.parent / os.environ["RANK"]).write_text(str(os.getpid()), encoding="utf-8")
    with mock.patch.object(notices, "LOOK_S", 0.0):
        run(
            model_with(functools.partial(_notify_ranks, path), stages=2, at=_AT, rank=0),
            checkpoints=_checkpoints(path),
        )


def _train_replicas(path: Path) -> None:
    with mock.patch.object(notices, "LOOK_S", 0.0):
        run(
            model_with(None, stages=2),
            plan=Plan((Stage(0, 0, num_replicas=2), Stage(1, 1))),
            data=minibatches(50),
            checkpoints=Checkpoints(path, every="0.000001s", keep=99),
        )


def test_ranks_of_torchrun_save_by_time_where_the_first_stage_has_replicas(
    farm: Farm, tmp_path: Path
) -> None:
    farm.results(_train_replicas, tmp_path, num_ranks=3)
    *timed, end = _saved(tmp_path)
    assert end == 50 and timed and not any(minibatch % 2 for minibatch in timed)


def _notify_ranks(path: Path) -> None:
    for rank in ("1", "0"):
        os.kill(int((path.parent / rank).read_text(encoding="utf-8")), signal.SIGTERM)


def test_ranks_of_torchrun_save_before_sigterm_ends_them(farm: Farm, tmp_path: Path) -> None:
    outcomes = farm.run(_run_rank, tmp_path / "C", num_ranks=2)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGTERM] * 2
    assert is_complete(folder_of(tmp_path / "C", _AT + 1))


class _NotifiesTheOther:
    """Data that send SIGTERM to rank 1 when rank 0 reads them. Rank 1 has read its own data, and waits for
    rank 0.
    """

    def __init__(self, note: Path) -> None:
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        if os.environ["RANK"] == "1":
            self._note.with_suffix(".new").write_text(str(os.getpid()), encoding="utf-8")
            self._note.with_suffix(".new").rename(self._note)
        else:
            wait_for_file(self._note)
            process = psutil.Process(int(self._note.read_text(encoding="utf-8")))
            process.terminate()
            process.wait(60.0)
        yield from minibatches()


def _run_notified(path: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    data = _NotifiesTheOther(path / "note")
    run(model_with(None, stages=2), data=data, checkpoints=_checkpoints(path / "C", grace=600.0))


def test_sigterm_ends_a_rank_at_once_that_has_not_begun_to_train(farm: Farm, tmp_path: Path) -> None:
    outcomes = farm.run(_run_notified, tmp_path, num_ranks=2)
    assert outcomes[1].exit_code == -signal.SIGTERM
    assert isinstance(outcomes[0].error, PeerLost), outcomes[0]
