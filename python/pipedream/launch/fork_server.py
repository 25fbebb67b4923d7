"""The fork server: a child of this process, in which torch and this package are imported, forks the workers.

    this process                  fork server                      worker
    start_server()  --exec------> imports; no thread, no CUDA
    Process.start() --1 request-> forks between, which forks ----> adopted by this process
                    --2 task-------------------------------------> imports the script, runs the target
    waits for it, as for any child of its own  <------------------ exits

To import torch, and to make its first optimizer, takes a process seconds, to be forked milliseconds. The
server is started at the first need and kept until this process ends, so that the next workers find it. It
holds nothing of a run: every worker is told the environment, the working folder, the script and the files
0, 1 and 2 as they are when it starts. What libraries read when they are loaded, and never again, are
variables of the environment: where one of these has changed another server is started.

After step 1 the process between ends, and while this process is a subreaper the kernel gives it the orphan:
a worker's parent is the process that called, which learns its exit status and takes it along when it ends.
The server ends with the thread that started it, at the latest with the process. Any thread; torch-free, but
for the server.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from multiprocessing import popen_fork, process, reduction, spawn, util
from multiprocessing.context import set_spawning_popen
from types import FrameType
from typing import Any, Literal, NoReturn

from pipedream import _core
from pipedream.common.errors import PipelineError, one_line

__all__ = ["Process", "serve", "start_server"]

# What is imported before any fork, and what would import it in every worker.
_PRELOADED = (
    "torch",
    "pipedream.worker.local_worker",
    "torch.utils.serialization.config",  # the first tensor that is unpickled
    "numpy.random",  # the first seed
    "zmq",  # the first link
)
# By the first of torch's own optimizers: before the next fork for a caller that has it, or says so, and while
# nobody waits for one that may come to need it.
_COMPILER = "torch._dynamo"
# How the names begin of variables that are read when a program or a library is loaded.
_OF_PROGRAMS = ("LD_", "GLIBC_", "MALLOC_", "PYTHON")
_OF_TORCH = ("TORCH", "PYTORCH_", "ATEN_", "C10_", "CUDA_", "NVIDIA_", "NCCL_", "PIPEDREAM_LIBZMQ")
_OF_KERNELS = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_")
_READ_AT_LOAD = (*_OF_PROGRAMS, *_OF_TORCH, *_OF_KERNELS)
_SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR", "CUDA_MODULE_LOADING")  # when it is used, which may be later
# To fork: of the files 0, 1 and 2 those that are open, as bits. Or to import _COMPILER, without an answer: at
# once, or where no other request waits.
_REQUEST = struct.Struct("<B")
_IMPORT_COMPILER, _IMPORT_COMPILER_IF_IDLE = 0xFF, 0xFE
_ANSWER = struct.Struct("<q")  # the worker's pid, or minus the error's number
_SIZE = struct.Struct("<Q")  # of what a task begins with
_NUM_FILES_MAX = 32
# Terminals and batch systems (Slurm's --signal) send these to all processes of a job. What they mean is for a
# handler of the script, and where it has none the workers end with the caller.
_OF_THE_CALLER = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


def start_server(*, compiler: Literal["if idle", "before forks"] | None = None) -> None:
    """Starts what run() would start, and returns at once: the server imports torch meanwhile. compiler: and
    then what the first of torch's own optimizers would import in every worker, unless a fork waits already,
    or before any."""
    with _lock:
        server = _server_of_this_process()
        if compiler == "before forks":
            server.import_compiler()
        elif compiler == "if idle":
            server.import_compiler_if_idle()


class Process(process.BaseProcess):
    """A process of multiprocessing that the fork server makes; target and arguments are sent by value.

    environment: on top of this process's, there when the script is imported.
    """

    _start_method = None

    def __init__(self, *, environment: Mapping[str, str] | None = None, **how: Any) -> None:
        super().__init__(**how)
        self.environment = dict(environment or {})

    @staticmethod
    def _Popen(process_obj: Process) -> _Popen:  # noqa: N802 (multiprocessing calls it)
        return _Popen(process_obj)


class _InheritedFile:
    """An open file among the arguments, such as a connection's: its position among those that are sent."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        return _inherited_files[self._index]


_inherited_files: list[int] = []  # of a process that was forked


class _Popen(popen_fork.Popen):
    DupFd = _InheritedFile

    def __init__(self, process_obj: Process) -> None:
        self._files: list[int] = []
        super().__init__(process_obj)

    def duplicate_for_child(self, file: int) -> int:
        self._files.append(file)
        return len(self._files) - 1

    def terminate(self) -> None:
        self.kill()  # no worker listens to SIGTERM

    def _launch(self, process_obj: Process) -> None:
        task = io.BytesIO()
        set_spawning_popen(self)  # type: ignore[arg-type]  # it has what is asked of one
        try:
            surroundings = pickle.dumps(_Surroundings(process_obj.environment))
            task.write(_SIZE.pack(len(surroundings)) + surroundings)
            reduction.dump(spawn.get_preparation_data(process_obj.name), task)
            reduction.dump(process_obj, task)
        finally:
            set_spawning_popen(None)
        # Of each, one end is open as long as a process lives: the worker's, which this one waits for (the
        # sentinel), and this process, which the worker may watch.
        end_read, end_write = os.pipe()
        task_read, task_write = os.pipe()
        self.finalizer = util.Finalize(self, _close_files, (end_read, task_write))
        self.sentinel = end_read
        try:
            self.pid = _fork([task_read, end_write, *self._files])
        finally:
            os.close(task_read)
            os.close(end_write)
        with contextlib.suppress(BrokenPipeError), open(task_write, "wb", closefd=False) as pipe:
            pipe.write(task.getbuffer())  # it has ended where the pipe is broken, which its exit code says


def _close_files(*files: int) -> None:
    for file in files:
        os.close(file)


class _Surroundings:
    """The surroundings that a process has from the one that starts it, beside open files and working
    folder."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(os.environ) | dict(environment)
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._cpus = os.sched_getaffinity(0)
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self.pid = os.getpid()
        """The id of the process that starts it."""

    def apply(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        os.umask(self._umask)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        with contextlib.suppress(OSError):  # only root lowers it
            os.setpriority(os.PRIO_PROCESS, 0, self._niceness)


# This process's end.


class _Server:
    """The server's process and the socket to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.kind = _kind_of_server()
        self._has_compiler = False
        self._socket, there = socket.socketpair()
        with there, _held(_OF_THE_CALLER):  # until the server, which inherits that, ignores them
            self._process = subprocess.Popen(
                self._command(there.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )

    def _command(self, file: int) -> list[str]:
        code = (
            f"import sys; sys.path[:] = {sys.path!r};"
            f" from pipedream.launch.fork_server import serve; serve({file}, {self.owner})"
        )
        flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        return [os.fsdecode(spawn.get_executable()), *flags, "-c", code]

    def is_usable(self) -> bool:
        return self.kind == _kind_of_server() and self._process.poll() is None

    def import_compiler(self) -> None:
        """Has the server, or its replacement, import the compiler before the next fork."""
        if not self._has_compiler:
            self._has_compiler = True
            self._tell(_IMPORT_COMPILER)

    def import_compiler_if_idle(self) -> None:
        if not self._has_compiler:
            self._tell(_IMPORT_COMPILER_IF_IDLE)

    def _tell(self, request: int) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the next fork finds
            self._socket.sendall(_REQUEST.pack(request))

    def fork(self, files: list[int]) -> int:
        """The pid, or minus the number of an error. Raises OSError when the server is gone."""
        if _COMPILER in sys.modules:
            self.import_compiler()
        standard = [file for file in (0, 1, 2) if _is_open(file)]
        request = _REQUEST.pack(sum(1 << file for file in standard))
        socket.send_fds(self._socket, [request], [*standard, *files])
        answer = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
        if len(answer) < _ANSWER.size:
            raise ConnectionResetError("the fork server has ended")
        (number,) = _ANSWER.unpack(answer)
        return int(number)

    def replaced(self) -> _Server:
        """Another one, told what this one was."""
        self.close()
        another = _Server()
        if self._has_compiler:
            another.import_compiler()
        return another

    def close(self) -> None:
        self._socket.close()
        if self.owner == os.getpid():
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


_server: _Server | None = None
_lock = threading.Lock()


def _server_of_this_process() -> _Server:
    global _server
    if _server is not None and _server.owner == os.getpid() and _server.is_usable():
        return _server
    if _server is None:
        atexit.register(_close_server)
        _server = _Server()
    else:
        _server = _server.replaced()
    return _server


def _close_server() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def _fork(files: list[int]) -> int:
    """The pid of a worker that reads its task from files[0]."""
    with _lock, _adopting_orphans():
        server = _server_of_this_process()
        try:
            pid = server.fork(files)
        except OSError:  # it may have been killed, or have ended with the thread that started it
            server.kill()
            try:
                pid = _server_of_this_process().fork(files)
            except OSError as error:
                raise PipelineError(
                    f"the process that forks workers ended ({one_line(error)}): stderr says why"
                ) from None
    if pid < 0:
        raise PipelineError(f"no worker process could be forked: {os.strerror(-pid)}")
    return pid


def _kind_of_server() -> tuple[object, ...]:
    """Equal for processes that may have the same server."""
    names = [name for name in os.environ if name.startswith(_READ_AT_LOAD) and name not in _SET_BY_TORCH]
    return (spawn.get_executable(), *((name, os.environ[name]) for name in sorted(names)))


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _held(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Inside they wait, for this thread and for what it executes."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    was = ctypes.c_int(0)
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, was.value, 0, 0, 0)


# The server's end.


def serve(connection_file: int, parent_pid: int) -> None:
    """The life of the server: until its parent ends, or closes the connection."""
    _core.die_with_parent(parent_pid)
    for number in _OF_THE_CALLER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_CALLER)
    _import_for_all(*_PRELOADED)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # from now on nothing of it is the user's concern
    connection = socket.socket(fileno=connection_file)
    while True:
        request, files, _, _ = socket.recv_fds(connection, _REQUEST.size, _NUM_FILES_MAX)
        if not request:
            return
        (open_files,) = _REQUEST.unpack(request)
        if open_files in (_IMPORT_COMPILER, _IMPORT_COMPILER_IF_IDLE):
            if open_files == _IMPORT_COMPILER or not select.select([connection], [], [], 0)[0]:
                with contextlib.suppress(Exception):  # the worker raises it again, where it is heard
                    _import_for_all(_COMPILER)
            continue
        pid = _fork_orphan(connection, open_files, files)
        for file in files:
            os.close(file)
        connection.sendall(_ANSWER.pack(pid))


def _import_for_all(*names: str) -> None:
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared by all stays shared


def _fork_orphan(connection: socket.socket, open_files: int, files: list[int]) -> int:
    pid_read, pid_write = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(pid_read)
        os.close(pid_write)
        return -(error.errno or 1)
    if between == 0:
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            os.close(pid_read)
            os.close(pid_write)
            connection.close()
            _be_worker(open_files, files)
        os.write(pid_write, _ANSWER.pack(pid))
        os._exit(0)
    os.close(pid_write)
    os.waitpid(between, 0)  # afterwards the worker has its parent
    with open(pid_read, "rb") as pipe:
        (pid,) = _ANSWER.unpack(pipe.read())
    return int(pid)


def _be_worker(open_files: int, files: list[int]) -> NoReturn:
    code = 1
    try:
        _leave_signals_to_the_caller()
        given = iter(files)
        for standard in range(3):
            if open_files & 1 << standard:
                file = next(given)
                os.dup2(file, standard)
                os.close(file)
        task, _, *_inherited_files[:] = given
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
        # The caller sends the task when the worker has become its child.
        (size,) = _SIZE.unpack(_read(task, _SIZE.size))
        surroundings: _Surroundings = pickle.loads(_read(task, size))
        _core.die_with_parent(surroundings.pid)
        surroundings.apply()
        parent_sentinel = os.dup(task)
        code = spawn._main(task, parent_sentinel)
    finally:
        os._exit(code)


def _leave_signals_to_the_caller() -> None:
    """Sets signal handlers that do nothing. Programs that a worker executes get the signals' default actions
    back, and its forked children that of SIGTERM, by which multiprocessing ends them."""

    def do_nothing(_number: int, _frame: FrameType | None) -> None:
        pass

    def follow() -> None:
        if signal.getsignal(signal.SIGTERM) is do_nothing:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pass_on()

    # A child that is ended as soon as it is forked must not handle that, too.
    hold = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM])
    pass_on = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM])
    for number in _OF_THE_CALLER:
        signal.signal(number, do_nothing)
    os.register_at_fork(before=hold, after_in_parent=pass_on, after_in_child=follow)


def _read(file: int, size: int) -> bytes:
    """No more than that: what follows is for another reader."""
    content = b""
    while len(content) < size:
        piece = os.read(file, size - len(content))
        if not piece:
            raise EOFError("the caller has ended")
        content += piece
    return content
