"""A model in which something goes wrong at one stage and minibatch: always the same, without a clock.

The inputs of minibatch i are full of the number i, and every layer passes its input on unchanged, so each
layer sees which minibatch it has. Importable by worker processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pipedream
import psutil
import torch
from pipedream import RunResult, _core
from pipedream.links.replica_group import ReplicaGroup
from pipedream.planning.plan import Stage
from pipedream.stage.stage_runner import StageRunner
from pipedream.update.asynchronous_server import AsynchronousServer
from pipedream.update.param_server import ParameterServer
from pipedream.update.tied import TiedParameters
from pipedream.update.weights import WeightVersions

NUM_MINIBATCHES = 12
BOUND_S = 15.0  # the contract's: from the loss of a worker to the end of the run
SGD = functools.partial(torch.optim.SGD, lr=0.1)

Mishap = Callable[[], None]


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def suspend_all_ranks(seconds: float) -> None:
    """Stops all workers of this farm, this one included, and continues them after `seconds`, like Ctrl-Z and
    fg."""
    ranks = [str(rank.pid) for rank in psutil.Process(os.getppid()).children()]
    script = f'kill -STOP "$@"; sleep {seconds}; kill -CONT "$@"'
    subprocess.run(["sh", "-c", script, "sh", *ranks], check=True)


def wait_for_file(path: str | os.PathLike[str]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not Path(path).exists():
        assert time.monotonic() < deadline_s, f"{path} was not made"
        time.sleep(0.01)


def wait_until_stopped(pid: int) -> None:
    deadline_s = time.monotonic() + 60.0
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline_s, f"process {pid} was not stopped"
        time.sleep(0.01)


def be_stopped_after(gate: str) -> None:
    """Once the file is there: what this worker had sent before has then been used by whoever made it."""
    wait_for_file(gate)
    be_stopped()


def hold_the_gil() -> None:
    """In C code, without a break: the process lives and says beats, the interpreter does not run."""
    ctypes.PyDLL(None).sleep(3600)


def make_file(path: str) -> None:
    Path(path).touch()


def kill_parent_and_hang() -> None:
    """Kills this worker's launcher while the worker computes."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def raise_error() -> None:
    raise RuntimeError("the layer gave up")


class Layer(torch.nn.Module):
    """Passes its input on. At one minibatch notes pid and time in a file, and then has its mishap.

    rank: has it at this rank alone.
    """

    def __init__(
        self,
        mishap: Mishap | None = None,
        at: int = -1,
        note: str = "",
        *,
        rank: int | None = None,
        in_backward: bool = False,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self._mishap = mishap
        self._at = at
        self._note = note
        self._rank = rank
        self._in_backward = in_backward

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = value + 0 * self.weight
        if self._mishap is not None and int(value.flatten()[0]) == self._at:
            if self._in_backward:
                output.register_hook(lambda _: self.happen())  # type: ignore[no-untyped-call]
            else:
                self.happen()
        return output

    def happen(self) -> None:
        if self._rank is not None and os.environ["RANK"] != str(self._rank):
            return
        if self._note:
            note_moment(self._note)
        assert self._mishap is not None
        self._mishap()


def model_with(
    mishap: Mishap | None, *, stages: int = 3, stage: int = 0, at: int = 0, **how: Any
) -> torch.nn.Sequential:
    """One layer per stage, one of them with the mishap. how: further arguments of Layer."""
    layers = [Layer() for _ in range(stages)]
    layers[stage] = Layer(mishap, at, **how)
    return torch.nn.Sequential(*layers)


def minibatches(count: int = NUM_MINIBATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((4, 3), i, dtype=torch.float64), torch.zeros(4, 3).double()) for i in range(count)]


class NotesReader(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The minibatches, and in a file the pid of every process that reads one. From `stuck_at` on it hangs."""

    def __init__(self, note: str, stuck_at: int) -> None:
        self._minibatches = minibatches()
        self._note = note
        self._stuck_at = stuck_at

    def __len__(self) -> int:
        return len(self._minibatches)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with open(self._note, "a", encoding="utf-8") as file:
            print(os.getpid(), file=file)
        while index >= self._stuck_at:
            signal.pause()
        return self._minibatches[index]


def error_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def run(model: torch.nn.Sequential, **options: Any) -> RunResult:
    """pipedream.run with one stage per layer, as a rank of the farm or with local workers."""
    plan = options.pop("plan", None) or pipedream.Plan.straight(len(model), len(model))
    defaults: dict[str, Any] = {
        "data": minibatches(),
        "loss_fn": error_of,
        "optimizer": SGD,
        "progress": False,
        "seed": 0,
    }
    return pipedream.run(model, plan, **(defaults | options))


def run_until_lost(model: torch.nn.Sequential, folder: str, **options: Any) -> tuple[Exception | None, float]:
    """The error and when it came. The last rank to have one ends the rank that only stopped."""
    return _until_lost(lambda: run(model, **options), Path(folder), len(model))


def run_until_stopped_at(when: str, at_call: int, folder: str) -> tuple[Exception | None, float]:
    """Does what run_until_killed_at does, but stops rank 1 instead of killing it. Returns what run_until_lost
    returns."""

    def be_noted() -> None:
        note_moment(Path(folder) / "note")
        be_stopped()

    of = "allreduce" if when == "all_reduce" else "bsp"
    return _until_lost(
        lambda: run_until_killed_at(when, at_call, of=of, mishap=be_noted, peer_timeout=3.0), Path(folder), 3
    )


def _until_lost(
    train: Callable[[], RunResult], folder: Path, num_ranks: int
) -> tuple[Exception | None, float]:
    error = None
    try:
        train()
    except Exception as caught:
        error = caught
    ended_s = time.monotonic()
    (folder / f"ended-{os.environ['RANK']}").touch()
    if len(list(folder.glob("ended-*"))) == num_ranks - 1:
        pid, _ = noted(folder / "note")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return error, ended_s


def note_moment(note: str | os.PathLike[str]) -> None:
    """For noted(); the file is there at once with all that it holds, as others wait for it."""
    begun = Path(f"{os.fspath(note)}.{os.getpid()}")
    begun.write_text(f"{os.getpid()} {time.monotonic()}", encoding="utf-8")
    begun.replace(note)


def noted(note: str | os.PathLike[str]) -> tuple[int, float]:
    """(pid, monotonic time) that a layer noted before its mishap."""
    pid, moment_s = Path(note).read_text(encoding="utf-8").split()
    return int(pid), float(moment_s)


class Stubborn:
    """Yields minibatches until one where it raises."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(minibatches()):
            if i == self._at:
                raise OSError("the disk is full")
            yield batch


class FailingSGD(torch.optim.SGD):
    """Fails in its step number 5, which is minibatch 5's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self._num_steps = 0

    def step(self, closure: Any = None) -> Any:
        if self._num_steps == 5:
            raise ArithmeticError("the step is too long")
        self._num_steps += 1
        return super().step(closure)


class KillingSGD(torch.optim.SGD):
    """Kills the local worker of this rank in its step number 3, which is the update of round 3."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, lr=0.1)
        self._victim = f"pipedream-{rank}"
        self._num_steps = 0

    def step(self, closure: Any = None) -> Any:
        if self._num_steps == 3 and multiprocessing.current_process().name == self._victim:
            be_killed()
        self._num_steps += 1
        return super().step(closure)


def failing_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if int(outputs.flatten()[0]) == 4:
        raise LookupError("no such label")
    return error_of(outputs, targets)


_OWNERS = {
    "bsp": ParameterServer,
    "asp": AsynchronousServer,
    "allreduce": ReplicaGroup,
    "ties": TiedParameters,
}


def run_until_killed_at(
    when: str,
    at_call: int,
    *,
    of: str = "bsp",
    rank: int = 1,
    mishap: Mishap = be_killed,
    num_spares: int = 0,
    **options: Any,
) -> RunResult:
    """Plan 2-1, its first stage with spares; the rank has the mishap at this call of a method of its
    parameter server, of the group that it reduces with or of what it has of parameters tied across the
    stages."""
    method, num_calls = getattr(_OWNERS[of], when), 0

    def dying(server: Any, *args: Any, **more: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at_call:
            mishap()
        return method(server, *args, **more)

    if os.environ["RANK"] == str(rank):
        setattr(_OWNERS[of], when, dying)
    try:
        plan = pipedream.Plan((Stage(0, 0, num_replicas=2, num_spare_shards=num_spares), Stage(1, 1)))
        model = model_with(None, stages=2)
        if num_spares:
            model[0].register_parameter("wide", torch.nn.Parameter(torch.ones(100, dtype=torch.float64)))
        if of == "ties":
            model[1].register_parameter("tied", model[0].weight)
        return run(model, plan=plan, sync="bsp" if of == "ties" else of, **options)
    finally:
        setattr(_OWNERS[of], when, method)


def run_while_the_device_fails(model: torch.nn.Module, at: int) -> RunResult:
    """At rank 1 every call that touches the device fails from an update on, as after an error of CUDA's."""
    failed = False
    update, restore = StageRunner.update, WeightVersions.restore

    def fail() -> NoReturn:
        nonlocal failed
        failed = True
        raise RuntimeError("CUDA error: device-side assert triggered")

    def failing_update(runner: StageRunner, work: _core.WorkItem, scale: float | None) -> None:
        if work.minibatch == at:
            fail()
        update(runner, work, scale)

    def failing_restore(weights: WeightVersions, slot: int) -> None:
        if failed:
            fail()
        restore(weights, slot)

    if os.environ["RANK"] != "1":
        return run(model)
    with (
        mock.patch.object(StageRunner, "update", failing_update),
        mock.patch.object(WeightVersions, "restore", failing_restore),
    ):
        return run(model)
