"""Injects a fault at one step of a worker: at an instruction of its program, or at an operation on a file of
a checkpoint.

A run without a fault lists its steps. Each other run has a fault at one of these steps, which have the same
names in every run. The hooks wrap functions of pipedream, in the processes of workers only. Worker processes
can import this module.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pipedream
import torch
from mishaps import be_killed, be_stopped, error_of, note_moment, noted
from pipedream import Checkpoints, _core
from pipedream.checkpoint.writer import CheckpointWriter
from pipedream.planning.plan import Plan, Stage
from pipedream.stage.stage_loop import WorkerLoop
from torch import Tensor, nn

KINDS = ("kill", "stop", "full disk")
_CLAIMED, _HAPPENED = "claimed", "happened"
# These parts of file names differ in every run.
_TOKENS = re.compile(r"\.[0-9a-f]+\.part\Z|(?<=removed-)[0-9a-f]+-")
_CREATES = os.O_CREAT | os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Injection:
    """A fault, and the step at which it happens."""

    folder: str
    """The folder in which all workers note their steps, or that the fault has happened."""
    checkpoints: str
    kind: str = ""
    """One of KINDS, or "" to list the steps."""
    step: str = ""

    def steps(self) -> list[str]:
        """Returns the steps of a run without a fault, each once."""
        listed = [path.read_text(encoding="utf-8").splitlines() for path in Path(self.folder).glob("steps-*")]
        return list(dict.fromkeys(step for of_rank in listed for step in of_rank))

    @property
    def has_happened(self) -> bool:
        return Path(self.folder, _HAPPENED).exists()

    def claim(self) -> bool:
        """Returns whether this worker is the first to reach the step. Only the first one has the fault."""
        try:
            os.close(os.open(Path(self.folder, _CLAIMED), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def kill_stopped(self) -> None:
        """Kills the process that the fault has stopped, as torchrun's agent does with ranks that do
        not end.
        """
        if self.kind == "stop" and self.has_happened:
            with contextlib.suppress(ProcessLookupError):
                os.kill(noted(Path(self.folder, _HAPPENED))[0], signal.SIGKILL)


class _Hooks:
    """The hooks of one worker's process."""

    def __init__(self, injection: Injection) -> None:
        self._injection = injection
        self._rank = int(os.environ["RANK"])
        self._num_instructions = 0
        self._is_full = False
        self._lock = threading.Lock()

    def note_instruction(self, what: str) -> None:
        self._note(f"rank {self._rank}, instruction {self._num_instructions}: {what}")
        self._num_instructions += 1

    def note_file(self, operation: str, path: str, *, takes_room: bool) -> None:
        folder = self._injection.checkpoints + os.sep
        if not path.startswith(folder):
            return
        self._note(f"{operation} {_TOKENS.sub('', path.removeprefix(folder))}")
        if takes_room and self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _note(self, step: str) -> None:
        injection = self._injection
        if not injection.kind:
            path = Path(injection.folder, f"steps-{self._rank}")
            with self._lock, path.open("a", encoding="utf-8") as file:
                print(step, file=file)
        elif step == injection.step and injection.claim():
            note_moment(Path(injection.folder, _HAPPENED))
            if injection.kind == "full disk":
                self._is_full = True
            else:
                {"kill": be_killed, "stop": be_stopped}[injection.kind]()


_hooks: _Hooks | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Tells the hooks of an operation on a file before Python does it. It stays installed, because an audit
    hook cannot be removed.
    """
    if _hooks is None:
        return
    if event == "open" and isinstance(args[0], (str, os.PathLike)):
        if args[2] & _CREATES:
            _hooks.note_file("open", os.fspath(args[0]), takes_room=True)
    elif event == "os.rename":
        _hooks.note_file("rename", os.fspath(args[1]), takes_room=False)
    elif event in ("os.mkdir", "os.remove", "os.rmdir"):
        name, folder = os.fspath(args[0]), args[-1]
        if folder >= 0:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        _hooks.note_file(event.removeprefix("os."), name, takes_room=event == "os.mkdir")


@functools.cache
def _begin_to_audit() -> None:
    sys.addaudithook(_audit)


@contextlib.contextmanager
def _hooked(injection: Injection) -> Iterator[None]:
    global _hooks
    _begin_to_audit()
    hooks = _hooks = _Hooks(injection)
    do, save, fsync = WorkerLoop._do, CheckpointWriter.save, os.fsync

    def hooked_do(loop: WorkerLoop, runner: Any, work: _core.WorkItem) -> Any:
        hooks.note_instruction(f"{work.kind} {work.minibatch}")
        return do(loop, runner, work)

    def hooked_save(writer: CheckpointWriter, header: Any, *args: Any) -> None:
        hooks.note_instruction(f"SNAPSHOT {header.minibatch}")
        save(writer, header, *args)

    def hooked_fsync(descriptor: int) -> None:
        hooks.note_file("fsync", os.readlink(f"/proc/self/fd/{descriptor}"), takes_room=True)
        fsync(descriptor)

    with (
        mock.patch.object(WorkerLoop, "_do", hooked_do),
        mock.patch.object(CheckpointWriter, "save", hooked_save),
        mock.patch.object(os, "fsync", hooked_fsync),
    ):
        try:
            yield
        finally:
            _hooks = None


_entered = contextlib.ExitStack()


class _InjectingSGD(torch.optim.SGD):
    """SGD that installs the hooks in the local worker that makes it. The worker lives for one run."""

    def __init__(self, params: Any, injection: Injection | None) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        if injection is not None and "RANK" in os.environ and _hooks is None:
            _entered.enter_context(_hooked(injection))


@dataclass(frozen=True)
class Program:
    """A small training. Its model has buffers and draws random numbers."""

    schedule: str
    replicas: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return sum(self.replicas)

    @property
    def num_minibatches(self) -> int:
        """Returns enough for three boundaries. The last one is the end of the run."""
        return 3 * max(self.replicas)

    def model(self) -> nn.Sequential:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(5)
            return nn.Sequential(
                *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.25)),
                *(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.25), nn.Linear(6, 2)),
            ).double()

    def plan(self) -> Plan:
        (first, last) = self.replicas
        return Plan((Stage(0, 2, num_replicas=first), Stage(3, 6, num_replicas=last)))

    def data(self) -> list[tuple[Tensor, Tensor]]:
        draw = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
        return [(draw(4, 4), draw(4, 2)) for _ in range(self.num_minibatches)]


@dataclass(frozen=True)
class Ended:
    """How a run ended at one rank, or at its caller."""

    error: Exception | None
    losses: Sequence[float]
    continued_at: int | None
    state: dict[str, Tensor]
    threads: Sequence[str]
    """Names of the run's checkpoint threads that are still alive after the run."""

    def is_same(self, other: Ended) -> bool:
        """Returns whether both runs succeeded with the same losses and state, bit for bit."""
        return (
            self.error is None
            and other.error is None
            and self.losses == other.losses
            and self.state.keys() == other.state.keys()
            and all(torch.equal(value, other.state[name]) for name, value in self.state.items())
        )


def train(
    program: Program, checkpoints: str, injection: Injection | None, *, keep: int = 1, **options: Any
) -> Ended:
    """Trains at a rank of the farm, or as the caller of local workers."""
    model, result, error = program.model(), None, None
    is_rank = "RANK" in os.environ
    how: dict[str, Any] = {
        "data": program.data(),
        "loss_fn": error_of,
        "optimizer": functools.partial(_InjectingSGD, injection=None if is_rank else injection),
        "schedule": program.schedule,
        "checkpoints": Checkpoints(checkpoints, every=1, keep=keep),
        "seed": 3,
        "progress": False,
    }
    with _hooked(injection) if is_rank and injection is not None else contextlib.nullcontext():
        try:
            result = pipedream.run(model, program.plan(), **how | options)
        except Exception as caught:
            error = caught
    if error is not None and injection is not None and is_rank:
        _end_stopped(injection, program.num_ranks)
    threads = [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name]
    losses, continued_at = ([], None) if result is None else (result.losses, result.continued_at)
    return Ended(error, losses, continued_at, model.state_dict(), threads)


def _end_stopped(injection: Injection, num_ranks: int) -> None:
    """Kills the stopped rank when all others have ended. So the others had to notice by themselves that it is
    lost.
    """
    Path(injection.folder, f"ended-{os.environ['RANK']}").touch()
    if len(list(Path(injection.folder).glob("ended-*"))) == num_ranks - 1:
        injection.kill_stopped()
