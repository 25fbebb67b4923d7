"""Tests that a failure in local workers reaches the caller as one error, in time, and leaves no process."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mishaps import (
    BOUND_S,
    KillingSGD,
    Layer,
    NotesReader,
    be_killed,
    be_stopped_after,
    make_file,
    minibatches,
    model_with,
    noted,
    raise_error,
    run,
)
from pipedream import PeerLost, PipelineError, WorkerLost
from pipedream.launch.fork_server import start_server
from pipedream.launch.launcher import run_folder
from pipedream.planning.plan import Plan, Stage
from torch.utils.data import DataLoader


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Asserts that the test leaves no process that it has started.

    Processes of the farm and of multiprocessing may stay, and so may the server that forks workers.
    """
    start_server()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    left = [process for process in left if "resource_tracker" not in " ".join(process.cmdline())]
    assert not left


def _error_of(kind: type[Exception], call: Callable[[], Any]) -> Exception:
    """Returns the error that the call raises. Asserts that it has exactly this type, and one line."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return caught.value


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        # A zombie has ended, but its parent has not collected it yet.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(("stage", "at"), [(1, 1), (0, 7)], ids=["warm-up", "steady"])
def test_a_killed_worker_ends_the_run_and_names_stage_and_minibatch(
    tmp_path: Path, stage: int, at: int
) -> None:
    note, readers = tmp_path / "note", tmp_path / "readers"
    model = model_with(be_killed, stages=2, stage=stage, at=at, note=str(note), rank=stage)
    loader = DataLoader(NotesReader(str(readers), stuck_at=at + 2), batch_size=None, num_workers=1)
    error = _error_of(WorkerLost, lambda: run(model, data=loader))
    _, killed_s = noted(note)
    assert time.monotonic() - killed_s < BOUND_S
    text, _, kept = str(error).partition("; ")
    assert text == f"stage {stage} (rank {stage}) was killed by SIGKILL at minibatch {at}"
    assert not kept or f"of stage {stage} those from before the run" in kept
    # The error has all losses that were known, even those that the killed worker computed.
    assert list(error.losses) == [float(i * i) for i in range(len(error.losses))]  # type: ignore[attr-defined]
    assert at - 1 <= len(error.losses) <= at  # type: ignore[attr-defined]
    # This process has read the first minibatch, too.
    for pid in set(map(int, readers.read_text().split())) - {os.getpid()}:
        while _is_alive(pid):  # the kernel kills a reader when its parent has ended
            assert time.monotonic() - killed_s < BOUND_S
            time.sleep(0.01)


@pytest.mark.parametrize(("stage", "rank", "name"), [(0, 1, "stage 0 replica 1"), (1, 2, "stage 1")])
@pytest.mark.parametrize("at", [1, 7, 8])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_killed_replica_ends_the_run_and_is_named(
    tmp_path: Path, stage: int, rank: int, name: str, at: int, in_backward: bool
) -> None:
    if rank == 1 and at % 2 == 0:
        at += 1  # replica 1 has the odd minibatches
    note = tmp_path / "note"
    how: dict[str, Any] = {"note": str(note), "rank": rank, "in_backward": in_backward}
    model = model_with(be_killed, stages=2, stage=stage, at=at, **how)
    plan = Plan((Stage(0, 0, num_replicas=2), Stage(1, 1)))
    error = _error_of(WorkerLost, lambda: run(model, plan=plan))
    _, killed_s = noted(note)
    assert time.monotonic() - killed_s < BOUND_S
    text, _, kept = str(error).partition("; ")
    assert text == f"{name} (rank {rank}) was killed by SIGKILL at minibatch {at}"
    # `kept` names stages that keep the weights from before the run. Stage 0 is not among them: its other
    # replica has the newest ones.
    assert not kept or stage == 1
    assert list(error.losses) == [float(i * i) for i in range(len(error.losses))]  # type: ignore[attr-defined]


def test_a_killed_spare_ends_the_run_and_is_named() -> None:
    plan = Plan((Stage(0, 0, num_replicas=2, num_spare_shards=1), Stage(1, 1)))
    model = model_with(None, stages=2)
    model[0].register_parameter("wide", torch.nn.Parameter(torch.ones(100, dtype=torch.float64)))
    optimizer = functools.partial(KillingSGD, rank=3)
    error = _error_of(WorkerLost, lambda: run(model, plan=plan, optimizer=optimizer))
    assert str(error) == "stage 0 spare 0 (rank 3) was killed by SIGKILL at minibatch 6"


def test_a_run_after_failed_ones_trains_as_the_first_of_a_process_does(tmp_path: Path) -> None:
    first = run(model_with(None, stages=2))
    _error_of(WorkerLost, lambda: run(model_with(be_killed, stages=2, stage=1, at=4, rank=1)))
    _error_of(PipelineError, lambda: run(model_with(raise_error, stages=2, stage=0, at=4)))
    held: list[int] = []
    loss_fn = lambda outputs, targets: (outputs - targets).sum() + len(held)  # noqa: E731 (what cannot be sent)
    assert "loss_fn" in str(_error_of(ValueError, lambda: run(model_with(None, stages=2), loss_fn=loss_fn)))
    again = run(model_with(None, stages=2))
    assert (again.losses, again.versions) == (first.losses, first.versions)
    assert not set(again.worker_pids) & set(first.worker_pids)


def test_a_stopped_worker_ends_the_run(tmp_path: Path) -> None:
    note, gate = tmp_path / "note", str(tmp_path / "gate")
    model = model_with(functools.partial(be_stopped_after, gate), stages=2, stage=1, at=7, note=str(note))
    # Stage 1 stops in minibatch 7, after stage 0 has done the forward of minibatch 8. That forward needs the
    # gradient of minibatch 6. A worker that stopped at once might not have sent it. Afterwards stage 0 waits
    # for the gradient of minibatch 7.
    model[0] = Layer(functools.partial(make_file, gate), 8)
    # The stopped worker's neighbour notices. SIGTERM alone does not end a stopped process.
    error = _error_of(PeerLost, lambda: run(model, peer_timeout=3.0))
    _, stopped_s = noted(note)
    assert time.monotonic() - stopped_s < BOUND_S
    assert str(error).startswith("stage 0 at minibatch 7 (BACKWARD): stage 1 (rank 1) is lost")


def test_a_users_error_has_the_workers_traceback_as_its_cause() -> None:
    error = _error_of(PipelineError, lambda: run(model_with(raise_error, stages=2, stage=1, at=4)))
    assert str(error) == (
        "stage 1 (rank 1) failed at minibatch 4 in forward: RuntimeError: the layer gave up"
    )
    assert "mishaps.py" in str(error.__cause__)
    assert "in raise_error" in str(error.__cause__)
    assert "stage_runner.py" not in str(error.__cause__)  # the traceback has no frames of pipedream
    assert error.losses == [0.0, 1.0, 4.0, 9.0]  # type: ignore[attr-defined]


def test_an_error_in_data_that_are_forwarded_arrives_as_it_is() -> None:
    def batches() -> Iterator[Any]:
        yield from minibatches(3)
        raise OSError("the disk is full")

    error = _error_of(OSError, lambda: run(model_with(None, stages=2), data=batches()))
    assert str(error) == "the disk is full"
    losses = error.losses  # type: ignore[attr-defined]
    assert losses == [0.0, 1.0, 4.0][: len(losses)]


def test_a_killed_worker_ends_the_run_though_the_callers_data_never_yield_again(tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        yield from minibatches(6)
        threading.Event().wait()

    note = tmp_path / "note"
    model = model_with(be_killed, stages=2, stage=1, at=5, note=str(note))
    _error_of(WorkerLost, lambda: run(model, data=batches()))
    _, killed_s = noted(note)
    assert time.monotonic() - killed_s < BOUND_S
    # A thread still waits for the data. It must hold nothing that another run needs.
    assert run(model_with(None, stages=2), data=iter(minibatches(3))).losses == [0.0, 1.0, 4.0]


def test_a_model_that_a_worker_cannot_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here_only = types.ModuleType("only_in_the_caller")
    exec("import mishaps\nclass Layer(mishaps.Layer): ...", here_only.__dict__)
    monkeypatch.setitem(sys.modules, "only_in_the_caller", here_only)
    model = model_with(None, stages=2)
    model[1] = here_only.Layer()
    pickle.dumps(model)  # pickling succeeds, so the caller cannot notice the mistake
    error = _error_of(ValueError, lambda: run(model))
    assert "model cannot be rebuilt in a worker process" in str(error)
    assert "only_in_the_caller" in str(error)
    assert "define its classes" in str(error)


_LAUNCHER = """
import sys
from mishaps import kill_parent_and_hang, model_with, run

if __name__ == "__main__":
    run(model_with(kill_parent_and_hang, stages=2, stage=1, at=5, note=sys.argv[1]))
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_launcher_and_the_next_run_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, note, temporary = tmp_path / "train.py", tmp_path / "note", tmp_path / "temporary"
    script.write_text(_LAUNCHER, encoding="utf-8")
    temporary.mkdir()
    paths = os.pathsep.join(path for path in sys.path if path)
    launcher = subprocess.Popen(
        [sys.executable, str(script), str(note)],
        env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(temporary)},
    )
    family: set[psutil.Process] = set()
    deadline_s = time.monotonic() + 120
    while launcher.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= set(psutil.Process(launcher.pid).children(recursive=True))
        time.sleep(0.05)
    assert launcher.returncode == -signal.SIGKILL
    worker_pid, killed_s = noted(note)
    assert worker_pid in {process.pid for process in family}
    _, alive = psutil.wait_procs(family, timeout=BOUND_S)
    assert not alive
    assert time.monotonic() - killed_s < BOUND_S
    (left,) = temporary.glob("pipedream-*")
    assert (left / "task.pickle").exists()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with run_folder():
        assert not left.exists()


_ENDED_BY_SIGNAL = """
import os, signal, sys
from mishaps import model_with, run

def end_the_launcher():
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()

if __name__ == "__main__":
    run(model_with(end_the_launcher, stages=2, stage=1, at=2))
"""


@pytest.mark.slow
def test_a_signal_that_ends_the_script_finds_its_workers_and_its_folder_removed(tmp_path: Path) -> None:
    script, temporary = tmp_path / "train.py", tmp_path / "temporary"
    script.write_text(_ENDED_BY_SIGNAL, encoding="utf-8")
    temporary.mkdir()
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, str(script)], env=environment, check=False)
    assert done.returncode == -signal.SIGTERM
    assert not list(temporary.glob("pipedream-*"))
