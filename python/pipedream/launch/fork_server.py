"""The fork server is a child of this process that has imported torch and this package, and forks the workers.

    caller (this process)         fork server                      worker
    start_server()  --exec------> imports; no thread, no CUDA
    Process.start() --1 request-> forks a middle process,
                                  which forks -------------------> adopted by the caller
                    --2 task-------------------------------------> imports the script, runs the target
    waits for it, as for any child of its own  <------------------ exits

A new process needs seconds to import torch and to make its first optimizer; a fork takes milliseconds. The
server starts when it is first needed and stays until the caller ends, so that later runs use it, too. Each
worker gets the environment, working folder, script and files 0, 1 and 2 that the caller has when the worker
starts. But libraries read some environment variables only when they are loaded. If such a variable has
changed, another server is started.

After step 1 the middle process ends, and its child is an orphan. The caller is a subreaper at that time, so
the kernel makes the caller the worker's parent. So the caller learns the worker's exit status, and the worker
ends when the caller ends. The server ends when the thread that started it ends, at the latest with the
process. Any thread. The caller's part of this module does not import torch.
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

# Modules that the server imports before any fork. The comments name the first step of a worker that would
# otherwise import the module.
_PRELOADED = (
    "torch",
    "pipedream.worker.local_worker",
    "torch.utils.serialization.config",  # unpickling the first tensor imports it
    "numpy.random",  # seeding imports it
    "zmq",  # opening links imports it
)
# Module that torch's own optimizers import. If the caller has imported it or asks for it, the server imports
# it before the next fork. If the caller may need it later, the server imports it when no request waits.
_COMPILER = "torch._dynamo"
# Prefixes of environment variables that are read when a program or a library is loaded.
_OF_PROGRAMS = ("LD_", "GLIBC_", "MALLOC_", "PYTHON")
_OF_TORCH = ("TORCH", "PYTORCH_", "ATEN_", "C10_", "CUDA_", "NVIDIA_", "NCCL_", "PIPEDREAM_LIBZMQ")
_OF_KERNELS = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_")
_READ_AT_LOAD = (*_OF_PROGRAMS, *_OF_TORCH, *_OF_KERNELS)
_SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR", "CUDA_MODULE_LOADING")  # torch may set them while a script runs
# A request to fork is one byte, whose bits say which of the files 0, 1 and 2 are open. Two other values of
# the byte ask the server to import _COMPILER, at once or only if no other request waits. The server does not
# answer these two.
_REQUEST = struct.Struct("<B")
_IMPORT_COMPILER, _IMPORT_COMPILER_IF_IDLE = 0xFF, 0xFE
_ANSWER = struct.Struct("<q")  # the worker's pid; if the fork failed, minus the errno
_SIZE = struct.Struct("<Q")  # bytes of the pickled _Surroundings, with which a task begins
_NUM_FILES_MAX = 32
# Terminals and batch systems (Slurm's --signal) send these signals to all processes of a job. Workers ignore
# them, because the caller's script may have handlers for them. Without a handler the caller ends, and its
# workers end with it.
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
    """Starts the server if there is no usable one. Returns at once, while the server imports torch.

    compiler: makes the server also import torch's compiler. Otherwise torch's own optimizers would import it
    in every worker. "before forks" imports it before the next fork, "if idle" only if no fork waits."""
    with _lock:
        server = _server_of_this_process()
        if compiler == "before forks":
            server.import_compiler()
        elif compiler == "if idle":
            server.import_compiler_if_idle()


class Process(process.BaseProcess):
    """A process of multiprocessing that the fork server makes. Its target and arguments are pickled.

    environment: variables in addition to those of this process. The worker has them when it imports the
    script.
    """

    _start_method = None

    def __init__(self, *, environment: Mapping[str, str] | None = None, **how: Any) -> None:
        super().__init__(**how)
        self.environment = dict(environment or {})

    @staticmethod
    def _Popen(process_obj: Process) -> _Popen:  # noqa: N802 (multiprocessing calls it)
        return _Popen(process_obj)


class _InheritedFile:
    """Stands for an open file, such as a connection, in the pickled arguments. It has the file's index among
    the files that are sent to the worker."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        return _inherited_files[self._index]


_inherited_files: list[int] = []  # in a worker, the files that the caller has sent


class _Popen(popen_fork.Popen):
    DupFd = _InheritedFile

    def __init__(self, process_obj: Process) -> None:
        self._files: list[int] = []
        super().__init__(process_obj)

    def duplicate_for_child(self, file: int) -> int:
        self._files.append(file)
        return len(self._files) - 1

    def terminate(self) -> None:
        self.kill()  # workers ignore SIGTERM

    def _launch(self, process_obj: Process) -> None:
        task = io.BytesIO()
        set_spawning_popen(self)  # type: ignore[arg-type]  # it has the methods that pickling needs
        try:
            surroundings = pickle.dumps(_Surroundings(process_obj.environment))
            task.write(_SIZE.pack(len(surroundings)) + surroundings)
            reduction.dump(spawn.get_preparation_data(process_obj.name), task)
            reduction.dump(process_obj, task)
        finally:
            set_spawning_popen(None)
        # Each process holds one end of each of two pipes. When a process ends, its ends are closed, and the
        # other process notices it: this process at `sentinel`, the worker at the pipe of the task.
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
            pipe.write(task.getbuffer())  # after a broken pipe the worker's exit code says why


def _close_files(*files: int) -> None:
    for file in files:
        os.close(file)


class _Surroundings:
    """The caller's environment, umask, CPUs and niceness. A child usually inherits them from its parent, but
    a worker is forked from the server. So the caller sends them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(os.environ) | dict(environment)
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._cpus = os.sched_getaffinity(0)
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self.pid = os.getpid()
        """The id of the caller's process."""

    def apply(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        os.umask(self._umask)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        with contextlib.suppress(OSError):  # only root may lower the niceness
            os.setpriority(os.PRIO_PROCESS, 0, self._niceness)


# The functions and classes from here to serve() run in the caller's process.


class _Server:
    """The process of the fork server, and the socket to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.kind = _kind_of_server()
        self._has_compiler = False
        self._socket, there = socket.socketpair()
        with there, _held(_OF_THE_CALLER):  # blocked signals are inherited; serve() then ignores them
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
        """Makes the server, or the server that replaces it, import the compiler before the next fork."""
        if not self._has_compiler:
            self._has_compiler = True
            self._tell(_IMPORT_COMPILER)

    def import_compiler_if_idle(self) -> None:
        if not self._has_compiler:
            self._tell(_IMPORT_COMPILER_IF_IDLE)

    def _tell(self, request: int) -> None:
        with contextlib.suppress(OSError):  # if the server has ended, the next fork finds out
            self._socket.sendall(_REQUEST.pack(request))

    def fork(self, files: list[int]) -> int:
        """Returns the worker's pid, or minus an errno. Raises OSError if the server has ended."""
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
        """Closes this server and returns a new one, with the compiler if this one had it."""
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
        atexit.register(_close_server_at_exit)
        _server = _Server()
    else:
        _server = _server.replaced()
    return _server


def _close_server() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def _close_server_at_exit() -> None:
    """Closes the server when this process ends. Ignores Ctrl-C, because it would only print a traceback at
    this point."""
    if threading.current_thread() is not threading.main_thread():
        _close_server()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _close_server()
    finally:
        if before is not None:  # Python cannot put back a handler that is not Python's
            signal.signal(signal.SIGINT, before)


def _fork(files: list[int]) -> int:
    """Forks a worker that reads its task from files[0], and returns the worker's pid."""
    with _lock, _adopting_orphans():
        server = _server_of_this_process()
        try:
            pid = server.fork(files)
        except OSError:  # the server was killed, or ended with the thread that started it
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
    """Returns the path of the Python executable, and the environment variables that programs and libraries
    read when they are loaded. If any of them changes, the server is replaced."""
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
    """Blocks these signals in the with block, in this thread and in programs that it starts."""
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


# The functions from here on run in the server's process, and after a fork in the worker's process.


def serve(connection_file: int, parent_pid: int) -> None:
    """Runs the server until its parent ends or closes the connection."""
    _core.die_with_parent(parent_pid)
    for number in _OF_THE_CALLER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_CALLER)
    _import_for_all(*_PRELOADED)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # from here on the server prints nothing on stderr
    connection = socket.socket(fileno=connection_file)
    while True:
        request, files, _, _ = socket.recv_fds(connection, _REQUEST.size, _NUM_FILES_MAX)
        if not request:
            return
        (open_files,) = _REQUEST.unpack(request)
        if open_files in (_IMPORT_COMPILER, _IMPORT_COMPILER_IF_IDLE):
            if open_files == _IMPORT_COMPILER or not select.select([connection], [], [], 0)[0]:
                with contextlib.suppress(Exception):  # a worker raises the error again, and reports it
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
    gc.freeze()  # the collector leaves these objects alone, so forks keep sharing their pages


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
    os.waitpid(between, 0)  # from now on the caller is the worker's parent
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
        # The caller sends the task after this process has become its child.
        (size,) = _SIZE.unpack(_read(task, _SIZE.size))
        surroundings: _Surroundings = pickle.loads(_read(task, size))
        _core.die_with_parent(surroundings.pid)
        surroundings.apply()
        parent_sentinel = os.dup(task)
        code = spawn._main(task, parent_sentinel)
    finally:
        os._exit(code)


def _leave_signals_to_the_caller() -> None:
    """Sets signal handlers that do nothing.

    Programs that a worker executes have the default handlers again. A forked child of a worker gets the
    default handler for SIGTERM, because multiprocessing ends children by SIGTERM."""

    def do_nothing(_number: int, _frame: FrameType | None) -> None:
        pass

    def follow() -> None:
        if signal.getsignal(signal.SIGTERM) is do_nothing:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pass_on()

    # SIGTERM is blocked during a fork, so that the child gets it only when it has the default handler.
    hold = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM])
    pass_on = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM])
    for number in _OF_THE_CALLER:
        signal.signal(number, do_nothing)
    os.register_at_fork(before=hold, after_in_parent=pass_on, after_in_child=follow)


def _read(file: int, size: int) -> bytes:
    """Reads exactly `size` bytes, because another reader reads the bytes after them."""
    content = b""
    while len(content) < size:
        piece = os.read(file, size - len(content))
        if not piece:
            raise EOFError("the caller has ended")
        content += piece
    return content
