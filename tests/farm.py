"""Makes a farm of processes that stand in for the ranks of torchrun. The processes start once and run case
after case.

A new process would need seconds to import torch. The farm's fork server makes a rank in milliseconds. Each
rank is a real process, with the environment variables and the store that torchrun gives. A rank that dies or
exceeds the deadline is replaced, so a case may kill its ranks. Owned by the thread that runs the tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from pipedream.launch.fork_server import Process, start_server
from pipedream.links.rendezvous import host_store

__all__ = ["Farm", "Outcome"]

_NUM_RANKS_MAX = 6
_DEADLINE_S = 120.0  # far longer than any case takes, so only a hang exceeds it
_LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case at one rank: its value, its error or its exit code."""

    value: Any = None
    """The function's result."""
    error: BaseException | None = None
    """The error that the function raised."""
    trace: str = ""
    """The rank's traceback of that error."""
    exit_code: int | None = None
    """The exit code if the process died; also -9 if it was killed at the deadline."""


class Farm:
    """Plays torchrun on this machine, with ranks 0, 1, ...."""

    def __init__(self) -> None:
        # The fork server imports the compiler once. Otherwise the first optimizer of each rank would import
        # it, which takes 2 s.
        start_server(compiler="before forks")
        self._store, self._port = host_store()
        self._ranks: list[tuple[Process, Connection]] = []
        self._case_indices = itertools.count()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int,
        torchrun_id: str = "",
        attempt: int = 0,
        ranks_per_machine: int | None = None,
        rank_0_hosts_store: bool = False,
        deadline_s: float = _DEADLINE_S,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Calls function(*args, **kwargs) at ranks 0 .. num_ranks - 1 and waits for all of them.

        The function is sent by name, and the arguments by value.

        - torchrun_id: cases with the same id look like calls of one script. "" makes each case a separate
          script.
        - attempt: how often torchrun has restarted that script.
        - ranks_per_machine: the number that ranks are told. None puts all on one machine.
        - rank_0_hosts_store: whether to imitate a launcher that has no store.
        """
        assert num_ranks <= _NUM_RANKS_MAX
        while len(self._ranks) < num_ranks:
            self._ranks.append(self._start(len(self._ranks)))
        environment = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(ranks_per_machine or num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port() if rank_0_hosts_store else self._port),
            "TORCHELASTIC_USE_AGENT_STORE": str(not rank_0_hosts_store),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_RUN_ID": torchrun_id or f"case-{os.getpid()}-{next(self._case_indices)}",
        }
        task = pickle.dumps((environment, function, args, kwargs))
        for _, connection in self._ranks[:num_ranks]:
            connection.send_bytes(task)
        return self._collect(num_ranks, time.monotonic() + deadline_s)

    def results(self, function: Callable[..., Any], *args: Any, num_ranks: int, **kwargs: Any) -> list[Any]:
        """Runs a case that must succeed at all ranks. Returns the function's results by rank."""
        outcomes = self.run(function, *args, num_ranks=num_ranks, **kwargs)
        for rank, outcome in enumerate(outcomes):
            assert outcome.exit_code is None, f"rank {rank} ended with {outcome.exit_code}: {outcomes}"
        failed = [f"rank {rank}: {outcome.trace}" for rank, outcome in enumerate(outcomes) if outcome.error]
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks.clear()

    def _start(self, rank: int) -> tuple[Process, Connection]:
        here, there = multiprocessing.Pipe()
        process = Process(target=_serve, args=(rank, there), name=f"rank {rank}", daemon=True)
        process.start()
        there.close()
        return process, here

    def _collect(self, num_ranks: int, deadline_s: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < num_ranks:
            pending = [rank for rank in range(num_ranks) if rank not in outcomes]
            connections = [self._ranks[rank][1] for rank in pending]
            ready = wait(connections, timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                outcomes |= {rank: self._give_up(rank) for rank in pending}
            for rank, connection in zip(pending, connections, strict=True):
                if connection not in ready:
                    continue
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = self._replace(rank)
        return [outcomes[rank] for rank in range(num_ranks)]

    def _give_up(self, rank: int) -> Outcome:
        process, _ = self._ranks[rank]
        os.kill(process.pid, signal.SIGUSR1)  # the rank prints on stderr where it hangs
        process.join(_LAST_WORDS_S)
        process.kill()
        return self._replace(rank)

    def _replace(self, rank: int) -> Outcome:
        process, connection = self._ranks[rank]
        process.join()
        connection.close()
        self._ranks[rank] = self._start(rank)
        return Outcome(exit_code=process.exitcode)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _serve(rank: int, connection: Connection) -> None:
    """Performs one task after the other, as a rank, until the farm closes."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            task = connection.recv_bytes()
            connection.send_bytes(_perform(rank, task))


def _perform(rank: int, task: bytes) -> bytes:
    try:
        environment, function, args, kwargs = pickle.loads(task)
        local_rank = rank % int(environment["LOCAL_WORLD_SIZE"])
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        os.environ.update(environment)
        # Each case begins with fresh generators, as a new script does. They differ from rank to rank.
        torch.manual_seed(rank)
        random.seed(rank)
        try:
            outcome = Outcome(value=function(*args, **kwargs))
        finally:
            for name in environment:
                del os.environ[name]
        return pickle.dumps(outcome)
    except BaseException as error:
        return pickle.dumps(Outcome(error=_sendable(error), trace=traceback.format_exc()))


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
