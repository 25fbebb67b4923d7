"""Tests fork_server.py: the state that a new process gets from the process that asked for it, and which
process is its parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pipedream.launch import fork_server
from pipedream.launch.fork_server import Process, start_server
from pipedream.worker.local_worker import _forked_children_die_with_this_process

_BOUND_S = 60.0  # bounds what takes milliseconds on an idle machine


def _tell(connection: Connection, function: Callable[..., Any], *args: Any) -> None:
    connection.send(function(*args))


def _found(function: Callable[..., Any], *args: Any, **environment: str) -> Any:
    """Returns the function's value, computed in a new process."""
    here, there = multiprocessing.Pipe()
    process = Process(target=_tell, args=(there, function, *args), environment=environment)
    process.start()
    there.close()
    found = here.recv()
    process.join()
    assert process.exitcode == 0
    return found


def _server_pid() -> int:
    start_server()
    assert fork_server._server is not None
    return fork_server._server._process.pid


def _beginning() -> tuple[int, int, bool, bool, str]:
    is_main = multiprocessing.current_process().name == "MainProcess"
    threads = len(list(Path("/proc/self/task").iterdir()))
    return os.getppid(), threads, torch.cuda.is_initialized(), is_main, sys.argv[0]


def test_a_process_is_the_callers_child_and_begins_with_one_thread_and_no_cuda() -> None:
    assert _found(_beginning) == (os.getpid(), 1, False, False, sys.argv[0])
    assert psutil.Process(_server_pid()).num_threads() == 1


def _surroundings() -> tuple[str, str | None, str | None, int, set[int]]:
    umask = os.umask(0)
    cpus = os.sched_getaffinity(0)
    return os.getcwd(), os.environ.get("OF_THE_CALLER"), os.environ.get("GIVEN"), umask, cpus


def test_a_process_has_the_surroundings_of_its_start_and_not_those_of_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_pid = _server_pid()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_CALLER", "now")
    umask, cpus = os.umask(0o027), os.sched_getaffinity(0)
    one_cpu = {min(cpus)}
    os.sched_setaffinity(0, one_cpu)
    try:
        found = _found(_surroundings, GIVEN="as well")
    finally:
        os.sched_setaffinity(0, cpus)
        os.umask(umask)
    assert found == (str(tmp_path), "now", "as well", 0o027, one_cpu)
    assert "GIVEN" not in os.environ
    monkeypatch.delenv("OF_THE_CALLER")
    assert _found(_surroundings)[1] is None
    assert _server_pid() == server_pid


_OF_A_JOB = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def _exit_codes_of_children() -> tuple[int | None, int]:
    """Returns two exit codes: of a process that multiprocessing has terminated, and of a program that ends
    itself by a signal.
    """
    for number in _OF_A_JOB:
        os.kill(os.getpid(), number)
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    child.terminate()
    child.join()
    return child.exitcode, subprocess.run(["sh", "-c", "kill -USR1 $$"], check=False).returncode


def test_what_a_batch_system_sends_to_all_processes_ends_neither_server_nor_worker() -> None:
    # Slurm sends SIGUSR1 to say that the time is nearly over. The signal must not kill the workers.
    fork_server._close_server()
    server_pid = _server_pid()
    os.kill(server_pid, signal.SIGUSR1)  # while the server starts
    assert _found(_exit_codes_of_children) == (-signal.SIGTERM, -signal.SIGUSR1)
    for number in _OF_A_JOB:
        os.kill(server_pid, number)
    assert _found(os.getppid) == os.getpid()
    assert _server_pid() == server_pid


def test_a_process_writes_where_the_caller_does(capfd: pytest.CaptureFixture[str]) -> None:
    _found(print, "from the process")
    assert capfd.readouterr().out == "from the process\n"


def test_a_variable_that_libraries_read_when_they_are_loaded_takes_another_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server_pid = _server_pid()
    monkeypatch.setenv("TORCH_OF_ANOTHER_RUN", "1")  # stands for any variable that begins with TORCH_
    assert _server_pid() != server_pid
    assert not psutil.pid_exists(server_pid)
    monkeypatch.undo()
    _server_pid()


def _parent_and_compiler() -> tuple[int, bool]:
    return os.getppid(), "torch._dynamo" in sys.modules


def test_a_server_that_was_killed_is_replaced_by_one_that_imports_what_it_was_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    server_pid = _server_pid()
    start_server(compiler="before forks")
    os.kill(server_pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(server_pid)])
    assert _found(_parent_and_compiler) == (os.getpid(), True)
    assert _server_pid() != server_pid


def test_a_server_has_the_compiler_from_the_first_process_of_a_caller_that_has_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The import of the compiler takes a second or two, and only torch's own optimizers need it.
    fork_server._close_server()
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert _found(_parent_and_compiler) == (os.getpid(), False)
    server_pid = _server_pid()
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    assert _found(_parent_and_compiler) == (os.getpid(), True)
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert _found(_parent_and_compiler) == (os.getpid(), True)
    assert _server_pid() == server_pid


def test_a_server_imports_the_compiler_for_later_only_where_no_fork_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_server._close_server()
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    server = psutil.Process(_server_pid())
    connection = fork_server._server_of_this_process()._socket
    send_fds = socket.send_fds

    def send_and_continue(*request: Any) -> int:
        sent = send_fds(*request)
        server.resume()
        return sent

    with monkeypatch.context() as patch:  # the server finds both requests at once
        patch.setattr(socket, "send_fds", send_and_continue)
        server.suspend()
        start_server(compiler="if idle")
        assert _found(_parent_and_compiler) == (os.getpid(), False)
    start_server(compiler="if idle")
    deadline = time.monotonic() + _BOUND_S
    # Until the server has read the request and finished importing.
    while _unread(connection) or server.status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
    assert _found(_parent_and_compiler) == (os.getpid(), True)


def _unread(connection: socket.socket) -> int:
    """Returns a number above 0 while the other end has not received everything."""
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _fork_an_orphan(connection: Connection) -> None:
    """Forks a child that begins to follow its parent only after the parent has ended."""

    def wait_for_the_parent() -> None:
        select.select([os.pidfd_open(parent)], [], [])

    parent = os.getpid()
    os.register_at_fork(after_in_child=wait_for_the_parent)
    _forked_children_die_with_this_process()
    if os.fork() == 0:
        connection.send("lives")
    os._exit(0)


def test_a_process_of_a_workers_whose_parent_has_ended_before_it_could_follow_it_ends() -> None:
    here, there = multiprocessing.Pipe()
    process = Process(target=_fork_an_orphan, args=(there,))
    process.start()
    there.close()
    process.join()
    with pytest.raises(EOFError):
        here.recv()


def _exit(code: int) -> None:
    raise SystemExit(code)


def test_the_exit_code_is_the_processes_own() -> None:
    process = Process(target=_exit, args=(7,))
    process.start()
    process.join()
    assert process.exitcode == 7
    process = Process(target=signal.pause)
    process.start()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


_CALLER = """
import os, signal, sys
from pipedream.launch import fork_server
fork_server.start_server()
print(fork_server._server._process.pid, flush=True)
if sys.argv[1] == "interrupted":
    kill = fork_server._Server.kill
    fork_server._Server.kill = lambda server: (os.kill(os.getpid(), signal.SIGINT), kill(server))
elif sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["by itself", "interrupted", "killed"])
def test_the_server_ends_with_the_process_that_started_it(how: str) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    # The server inherits the pipe of this process's output. So the output ends only when the server has ended
    # too.
    done = subprocess.run(
        [sys.executable, "-c", _CALLER, how],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        check=False,
        text=True,
    )
    # The end of the fork server must show no traceback.
    assert (done.returncode, done.stderr) == (-signal.SIGKILL if how == "killed" else 0, "")
    pid = int(done.stdout)
    deadline_s = time.monotonic() + _BOUND_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # ended, but not collected by its parent
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
