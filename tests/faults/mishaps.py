"""Makes models in which something goes wrong at one stage and minibatch. It happens always at the same point,
without a clock.

All inputs of minibatch i are the number i, and every layer returns its input unchanged. So each layer can
tell which minibatch it has. Worker processes can import this module.
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
BOUND_S = 15.0  # the longest time from the loss of a worker to the end of the run
SGD = functools.partial(torch.optim.SGD, lr=0.1)

Mishap = Callable[[], None]


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def suspend_all_ranks(seconds: float) -> None:
    """Stops all workers of this farm and continues them after `seconds`, like Ctrl-Z and fg. This worker is
    stopped too.
    """
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
    """Stops this worker when the file exists.

    Whoever made the file has then used everything that this worker had sent before.
    """
    wait_for_file(gate)
    be_stopped()


def hold_the_gil() -> None:
    """Holds the GIL in C code without a break. The process lives, and its transport still sends beats (signs
    of life), but the interpreter does not run.
    """
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
    """Returns its input. At one minibatch it writes its pid and the time to a file, and then has its mishap.

    `rank` is the only rank that has the mishap; None means every rank.
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
    """Returns a model with one layer per stage, one of which has the mishap. `how` has further arguments of
    that Layer.
    """
    layers = [Layer() for _ in range(stages)]
    layers[stage] = Layer(mishap, at, **how)
    return torch.nn.Sequential(*layers)


def minibatches(count: int = NUM_MINIBATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((4, 3), i, dtype=torch.float64), torch.zeros(4, 3).double()) for i in range(count)]


class NotesReader(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The minibatches. Each process that reads one writes its pid to a file. Reading blocks from minibatch
    `stuck_at` on.
    """

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
    """Calls pipedream.run with one stage per layer, as a rank of the farm or with local workers."""
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
    """Returns the run's error, and the time at which the run ended.

    The rank that had the mishap may be stopped but alive. The last of the other ranks to end kills it.
    """
    return _until_lost(lambda: run(model, **options), Path(folder), len(model))


def run_until_stopped_at(when: str, at_call: int, folder: str) -> tuple[Exception | None, float]:
    """Does what run_until_killed_at does, but stops rank 1 instead of killing it.

    Returns what run_until_lost returns.
    """

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
    """Writes pid and time for noted(). The file appears with its whole content, because others wait until it
    exists.
    """
    begun = Path(f"{os.fspath(note)}.{os.getpid()}")
    begun.write_text(f"{os.getpid()} {time.monotonic()}", encoding="utf-8")
    begun.replace(note)


def noted(note: str | os.PathLike[str]) -> tuple[int, float]:
    """Returns the pid and the monotonic time that a layer noted before its mishap."""
    pid, moment_s = Path(note).read_text(encoding="utf-8").split()
    return int(pid), float(moment_s)


class Stubborn:
    """Yields minibatches, and raises an error at one of them."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(minibatches()):
            if i == self._at:
                raise OSError("the disk is full")
            yield batch


class FailingSGD(torch.optim.SGD):
    """Fails in its step for minibatch 5."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self._num_steps = 0

    def step(self, closure: Any = None) -> Any:
        if self._num_steps == 5:
            raise ArithmeticError("the step is too long")
        self._num_steps += 1
        return super().step(closure)


class KillingSGD(torch.optim.SGD):
    """Kills the local worker of this rank in its fourth step."""

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
    """Trains plan 2-1, whose first stage may have spares. The rank has the mishap in one call of one method.

    `when` and `at_call` are the method and the number of its call. `of` is the class of the method: a
    parameter server, the group that reduces, or the parameters tied across stages.
    """
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
    """Makes calls that touch the device fail at rank 1 from one update on, as after an error of CUDA."""
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
