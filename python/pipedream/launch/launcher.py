"""Local workers for a plain script: torch elastic starts, watches and ends one process per stage.

What the workers need goes to them through a folder that only this user can read, and comes back the same
way; the weights come back as safetensors. Data that cannot be sent is iterated here and forwarded. Runs on
the caller's thread; forwarding on a thread of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import secrets
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes
from torch.utils.dlpack import to_dlpack

from pipedream import _core
from pipedream.checkpoint.state import load_state, save_state
from pipedream.common import errors
from pipedream.common.guard import RUN_FOLDER_VARIABLE, error_path, one_run_at_a_time
from pipedream.common.tracebacks import describe_user_error
from pipedream.data.stream import (
    NUM_COUNT_TENSORS,
    ForwardedData,
    describe_source,
    epochs_of,
    fingerprint,
    forwarded_counts,
    num_minibatches_of,
    without_processes,
)
from pipedream.launch.run_folder import run_folder
from pipedream.launch.worker import choose_device_type, run_worker
from pipedream.links.channels import CALLER, INPUTS, TARGETS, data_channels
from pipedream.links.descriptors import descriptor_limit_raised
from pipedream.links.keys import CurveKeys
from pipedream.links.pulse import Pulse
from pipedream.links.rendezvous import START_TIMEOUT_S, Rendezvous, connect_store, host_store
from pipedream.model.boundary import Boundary, check_pair
from pipedream.model.factories import try_factories
from pipedream.model.microbatch import check_alike, samples_of
from pipedream.model.seeding import RngState, base_seed, generators_kept, seed_data
from pipedream.model.splitter import Model, StageModule, find_ties, split
from pipedream.planning.plan import Plan
from pipedream.report.result import RunResult
from pipedream.report.status import NO_PID, StatusBoard
from pipedream.stage.gradients import updated_parameters
from pipedream.stage.job import CallerSettings, JobOptions, WorkerPlace

__all__ = ["run_locally"]

_SHUTDOWN_S = 5  # from SIGTERM to SIGKILL for the workers that are left
_WATCH_PERIOD_S = 0.05  # shorter than elastic's, to see who ends first
_WORKERS_PERIOD_S = 0.1
_PATIENCE_S = 3.0  # with the caller's data, when the run is over
_STORE_PREFIX = "pipedream"


@dataclass(frozen=True)
class _Errand:
    """What a local worker process is told by a pipe, besides the files in the folder."""

    folder: str
    store_port: int
    run_id: int
    caller_pid: int
    keys: CurveKeys | None
    """Not in a file: a caller that is killed cannot remove it."""


class _RemoteTraceback(Exception):  # noqa: N818 (not an error of its own: the cause that is shown)
    """The traceback of a worker process, as the cause of the error that the caller sees."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_locally(model: Model, data: Iterable[Any], options: JobOptions) -> RunResult:
    """Trains in worker processes and updates the model in place.

    Raises ValueError for what cannot be sent to the workers, and for whatever a worker found mistaken;
    WorkerLost, PeerLost and other PipelineErrors when the run fails. No process is left behind, and the
    caller's random number generators are as they were.
    """
    # What is known to be wrong is said before any process starts.
    stages = split(model, options.plan)
    _check_main_is_a_file()
    with generators_kept() as rng, run_folder() as folder:
        _write_part(folder, "model", model, "define its classes at the top level of a module")
        _write_options(folder, options)
        _try_factories(folder, stages, options)
        forwarded = _write_data(folder, data, options)
        _write_part(folder, "rng", rng, "")
        _write_part(folder, "settings", CallerSettings.capture(), "")
        board = StatusBoard(folder / "board", options.plan.workers_used, create=True)
        store, port = host_store()
        errand = _Errand(os.fspath(folder), port, secrets.randbits(64), os.getpid(), options.links.keys)
        with (
            errors.losses_kept(board.losses),
            Rendezvous(store, _STORE_PREFIX) as rendezvous,
            _forwarding(forwarded, data, options, errand, rendezvous),
        ):
            _launch(errand, options.plan, board)
        result = RunResult.from_dict(json.loads((folder / "result.json").read_text(encoding="utf-8")))
        if options.gather != "none":
            load_state(stages, folder / "weights.safetensors")
        return result


def _check_main_is_a_file() -> None:
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    if main_file is not None and not Path(main_file).exists():
        raise ValueError(
            f"the script is {main_file!r}, which worker processes cannot import: save it to a file, or"
            " start it with torchrun"
        )


# What goes to the workers.


class _HostPickler(pickle.Pickler):
    """Writes tensors as they are in host memory: what is unpickled lies on no device of the caller's."""

    def reducer_override(self, value: Any) -> Any:
        is_typed = isinstance(value, torch.TypedStorage)
        if not is_typed and not isinstance(value, torch.UntypedStorage):
            return NotImplemented
        storage: Any = value._untyped_storage if is_typed else value
        if storage.device.type != "cuda":
            return NotImplemented
        on_host = storage.cpu()
        if is_typed:
            make: Any = torch.TypedStorage
            on_host = make(wrap_storage=on_host, dtype=value._dtype, _internal=True)
        return on_host.__reduce__()


def _dumps(value: Any) -> bytes:
    content = io.BytesIO()
    _HostPickler(content).dump(value)
    return content.getvalue()


def _write_part(folder: Path, name: str, value: Any, remedy: str) -> None:
    try:
        content = _dumps(value)
    except Exception as error:
        raise ValueError(
            f"{name} ({_name_of(value)}) cannot be sent to the workers: {errors.one_line(error)}; {remedy}"
        ) from None
    (folder / f"{name}.pickle").write_bytes(content)


def _write_options(folder: Path, options: JobOptions) -> None:
    remedy = "use a function or class that is defined at the top level of a module"
    for name in ("loss_fn", "optimizer", "lr_scheduler"):
        _write_part(folder, name, getattr(options, name), remedy)
    without_secret = replace(options, links=replace(options.links, keys=None))
    _write_part(folder, "options", without_secret, "")


def _try_factories(folder: Path, stages: list[StageModule], options: JobOptions) -> None:
    """What the workers will call seconds from now, called here. From the folder: theirs are copies, too, and
    the caller's own stay as they are."""
    ties = find_ties(stages)
    try_factories(
        [updated_parameters(stage, ties) for stage in stages],
        _read_part(folder, "optimizer"),
        _read_part(folder, "lr_scheduler"),
        choose_device_type(),
    )


def _write_data(folder: Path, data: Iterable[Any], options: JobOptions) -> ForwardedData | None:
    """Writes the data for the workers, or what stands for it when it must be forwarded from here."""
    forwarded: ForwardedData | None = None
    try:
        content = _dumps(without_processes(data))
    except Exception:  # whatever a user's object raises: then it stays here
        seed_data(base_seed(options.seed), options.seed, options.plan.num_stages)
        begin = RngState.capture()
        forwarded = _describe_forwarded(data, options)
        if not isinstance(data, PeekedIterator):
            begin.restore()  # it will be iterated anew
        content = _dumps(forwarded)
    (folder / "data.pickle").write_bytes(content)
    return forwarded


def _describe_forwarded(data: Iterable[Any], options: JobOptions) -> ForwardedData:
    # An iterator gives its first minibatch once; _Forwarder puts it back in front.
    first = data.peek() if isinstance(data, PeekedIterator) else next(iter(data), None)
    if first is None:
        raise ValueError("data yields no minibatch: check the dataset, batch_size and drop_last")
    inputs, targets = check_pair(first, 0)
    length = num_minibatches_of(data, options.epochs)
    return ForwardedData(
        (inputs, targets),
        Boundary.of(inputs, name="the inputs", num_beside=NUM_COUNT_TENSORS),
        # A loss may need none.
        Boundary.of(targets, name="the targets", needs_tensor=False, num_beside=NUM_COUNT_TENSORS),
        length,
        describe_source(data.iterator if isinstance(data, PeekedIterator) else data),
    )


class PeekedIterator:
    """An iterator whose first item may be looked at before it is taken."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self._peeked: list[Any] = []

    def peek(self) -> Any | None:
        if not self._peeked:
            self._peeked = [item for item in [next(self.iterator, None)] if item is not None]
        return self._peeked[0] if self._peeked else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._peeked.pop() if self._peeked else next(self.iterator)

    def __reduce__(self) -> Any:
        raise TypeError("an iterator stays with the caller")


def _name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__name__


# Forwarding.


@contextlib.contextmanager
def _forwarding(
    forwarded: ForwardedData | None,
    data: Iterable[Any],
    options: JobOptions,
    errand: _Errand,
    rendezvous: Rendezvous,
) -> Iterator[None]:
    if forwarded is None:
        yield
        return
    forwarder = _Forwarder(forwarded, data, options, errand, rendezvous)
    forwarder.start()
    try:
        yield
    except errors.PipelineError as failure:
        forwarder.stop()
        if forwarder.error is not None:  # the user's own: it is why the workers stopped
            raise forwarder.error from failure
        raise
    finally:
        forwarder.stop()


class _Forwarder(threading.Thread):
    """Iterates the caller's data and sends inputs to the first stage and targets to the last."""

    def __init__(
        self,
        forwarded: ForwardedData,
        data: Iterable[Any],
        options: JobOptions,
        errand: _Errand,
        rendezvous: Rendezvous,
    ) -> None:
        super().__init__(name="pipedream-forwarder", daemon=True)
        self._forwarded = forwarded
        self._data = data
        self._options = options
        self._errand = errand
        self._rendezvous = rendezvous
        self._stopping = threading.Event()
        self._rng = RngState.capture()
        self.error: Exception | None = None
        """Raised by the user's data, or by what it yielded."""

    def stop(self) -> None:
        self._stopping.set()
        self.join(_PATIENCE_S)  # no longer: the user's data may never yield again

    def run(self) -> None:
        plan = self._options.plan
        core: _core.Worker | None = None
        pulse: Pulse | None = None
        links = self._options.links
        try:
            core = _core.Worker(**links.core_arguments(), run_id=self._errand.run_id, plan_hash=plan.hash())
            pulse = Pulse(core, links.peer_timeout_s)
            self._connect(core, plan)
            self._forward(core)
            while not self._stopping.wait(0.05):
                pass  # what was sent may still be on its way
        except (_core.RunFailure, errors.PipelineError):
            pass  # a worker failed or is gone: the launcher says which and why
        except Exception as error:
            self.error = error
            if core is not None:
                core.abort(errors.describe_error(error))  # at first: the store may not answer
            with contextlib.suppress(Exception):
                self._rendezvous.fail(errors.describe_error(error))
        finally:
            if core is not None:
                core.close(1.0)
            if pulse is not None:
                pulse.stop()

    def _connect(self, core: _core.Worker, plan: Plan) -> None:
        receivers = set()
        for channel in data_channels(plan, self._forwarded):
            if channel.sender == CALLER:
                channel.add_to(core, CALLER, plan)
                receivers.add(channel.receiver)
        core.seal()
        endpoints: dict[str, str] = {}
        for receiver in sorted(receivers):
            (published,) = self._wait_for(f"endpoints/{receiver}")
            endpoints |= published
        core.connect(endpoints)
        while not core.wait_open(0.1):
            self._check_stopping()

    def _wait_for(self, key: str) -> list[Any]:
        return self._rendezvous.wait_for(
            [key], START_TIMEOUT_S, lambda _: f"no {key}", meanwhile=self._check_stopping
        )

    def _forward(self, core: _core.Worker) -> None:
        forwarded = self._forwarded
        self._rng.restore()  # elastic draws while it starts the workers
        for minibatch, (inputs, targets, epoch) in enumerate(epochs_of(self._data, self._options.epochs)):
            check_alike(inputs, targets, self._options.microbatches, minibatch=minibatch)
            mark = fingerprint(inputs, targets)
            counts = forwarded_counts(epoch, samples_of(inputs, targets))
            for channel, boundary, value in (
                (INPUTS, forwarded.inputs, inputs),
                (TARGETS, forwarded.targets, targets),
            ):
                tensors = boundary.flatten(value, minibatch=minibatch)
                boundary.check(tensors, minibatch=minibatch)
                self._send(core, channel, [*tensors, counts], mark)
        core.send_end(INPUTS)
        core.send_end(TARGETS)

    def _send(self, core: _core.Worker, channel: str, tensors: list[torch.Tensor], mark: int) -> None:
        # A copy: the user's generator may reuse its memory for the next minibatch.
        copies = [tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        capsules = [to_dlpack(copy) for copy in copies]
        while not core.send_item(channel, capsules, mark, 0.1):
            self._check_stopping()
            capsules = [to_dlpack(copy) for copy in copies]

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise _core.RunFailure("Closed", "the run is over")


# Launching.


def _launch(errand: _Errand, plan: Plan, board: StatusBoard) -> None:
    # Not elastic's agent: its rendezvous listens on all interfaces and unpickles what it is sent.
    ranks = range(plan.workers_used)
    with (
        _quiet_elastic(),
        _environment(RUN_FOLDER_VARIABLE, errand.folder),
        _signal_handlers_kept(),
        _stragglers_killed(board) as first_codes,
    ):
        try:
            workers = start_processes(
                name="pipedream",
                entrypoint=_local_worker,
                args=dict.fromkeys(ranks, (errand,)),
                envs={rank: _environment_of(rank, plan.workers_used, errand) for rank in ranks},
                logs_specs=DefaultLogsSpecs(log_dir=os.path.join(errand.folder, "logs")),
                start_method="spawn",
            )
            try:
                ended = workers.wait(period=_WORKERS_PERIOD_S)
            finally:
                workers.close(timeout=_SHUTDOWN_S)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise
    assert ended is not None  # there is no time-out
    if ended.is_failed():
        codes = {rank: failed.exitcode for rank, failed in ended.failures.items()} | first_codes
        raise _cause_of(codes, Path(errand.folder), board, plan) from _traceback_of(Path(errand.folder))


def _environment_of(rank: int, num_workers: int, errand: _Errand) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": f"pipedream-{errand.run_id:016x}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _local_worker(errand: _Errand) -> None:
    """Entry point of a worker process."""
    _core.die_with_parent()
    if os.getppid() != errand.caller_pid:
        os._exit(1)  # it ended before that: nobody waits for this worker
    _forked_children_die_with_this_process()
    rank = int(os.environ["RANK"])
    folder = Path(errand.folder)
    board = StatusBoard(folder / "board", int(os.environ["WORLD_SIZE"]), create=False)
    board.write_pid(rank, os.getpid())
    try:
        with one_run_at_a_time(), descriptor_limit_raised():
            _run_errand(errand, folder, rank, board)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        _write_error(folder, rank, error)
        raise SystemExit(1) from None  # the caller reports; a traceback here would only repeat it
    board.write_pid(rank, NO_PID)


def _forked_children_die_with_this_process() -> None:
    """The processes of a DataLoader hold this one's sockets and memory: where it is killed, they would keep
    both for seconds."""
    forks_on_main_thread = False

    def note_thread() -> None:
        nonlocal forks_on_main_thread
        forks_on_main_thread = threading.current_thread() is threading.main_thread()

    def follow() -> None:
        if forks_on_main_thread:  # the signal comes when the thread ends that forked
            _core.die_with_parent()

    os.register_at_fork(before=note_thread, after_in_child=follow)


def _run_errand(errand: _Errand, folder: Path, rank: int, board: StatusBoard) -> None:
    settings: CallerSettings = _read_part(folder, "settings")
    settings.apply()  # before the model is rebuilt: its code may ask
    options: JobOptions = _read_part(folder, "options")
    options = replace(options, links=replace(options.links, keys=errand.keys))
    plan = options.plan
    model = _read_part(folder, "model")
    own_stages = plan.stages_of(rank)
    reads_data = 0 in own_stages or plan.num_stages - 1 in own_stages
    data = _read_part(folder, "data") if reads_data else ()
    # Not before: unpickling may import what draws random numbers.
    rng: RngState = _read_part(folder, "rng")
    rng.restore()
    store = connect_store(errand.store_port)
    with Rendezvous(store, _STORE_PREFIX, rank=rank, world_size=plan.workers_used) as rendezvous:
        place = WorkerPlace(
            rank=rank,
            world_size=plan.workers_used,
            local_rank=rank,
            run_id=errand.run_id,
            incarnation=0,
            rendezvous=rendezvous,
            board=board,
            returns_model=False,
        )
        result = run_worker(place, options, model, data)
    if rank == 0:
        if options.gather != "none":
            save_state(split(model, plan), folder / "weights.safetensors")
        (folder / "result.json").write_text(json.dumps(result.to_dict()), encoding="utf-8")


def _read_part(folder: Path, name: str) -> Any:
    try:
        return pickle.loads((folder / f"{name}.pickle").read_bytes())
    except Exception as error:
        raise ValueError(
            f"{name} cannot be rebuilt in a worker process: {errors.one_line(error)}; define its classes and"
            " functions in a module or script file that can be imported"
        ) from error


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Elastic logs every failure and signal at length; the caller gets one error instead."""
    prefixes = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
    # Elastic gives each of its loggers a level of its own, so the parent's would not do.
    loggers = [logging.getLogger(name) for name in [*logging.root.manager.loggerDict, *prefixes]]
    quieted = {logger for logger in loggers if logger.name.startswith(prefixes) and not logger.disabled}
    for logger in quieted:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in quieted:
            logger.disabled = False


@contextlib.contextmanager
def _stragglers_killed(board: StatusBoard) -> Iterator[dict[int, int]]:
    """Kills the workers that are still there _SHUTDOWN_S after another one failed.

    Elastic sends them SIGTERM at once, but waits 30 s before SIGKILL: a stopped worker, or one inside a
    long call of C code, would hold up the error for as long. Yields what will hold the exit codes, by
    rank, of the workers that ended first; elastic tells one only, which may be a consequence.
    """
    over = threading.Event()
    first_codes: dict[int, int] = {}

    def watch() -> None:
        while not (failed := _failed_workers(board)):
            if over.wait(_WATCH_PERIOD_S):
                return
        for rank, pid in failed.items():
            code = _exit_code(pid)
            if code is not None and code != -signal.SIGTERM:  # which elastic may have sent by now
                first_codes[rank] = code
        if over.wait(_SHUTDOWN_S):
            return
        for pid in board.pids().values():
            if _is_running(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    watcher = threading.Thread(target=watch, name="pipedream-watcher", daemon=True)
    watcher.start()
    try:
        yield first_codes
    finally:
        over.set()
        watcher.join()


def _failed_workers(board: StatusBoard) -> dict[int, int]:
    """Rank -> pid of the workers that ended before their work."""
    ended = {rank: pid for rank, pid in board.pids().items() if not _is_running(pid)}
    at_work = board.pids()  # looked at again: one may have finished and ended meanwhile
    return {rank: pid for rank, pid in ended.items() if rank in at_work}


# Both look at a child with WNOWAIT, as elastic still has to collect it; it may have done so already.


def _is_running(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def _exit_code(pid: int) -> int | None:
    """Negative for a signal; None for a child that runs or was collected."""
    with contextlib.suppress(ChildProcessError):
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    return None


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Elastic installs handlers of its own and leaves them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


# What went wrong.


def _write_error(folder: Path, rank: int, error: Exception) -> None:
    record = {
        "type": type(error).__name__,
        "message": errors.one_line(error)
        if type(error).__name__ in _ERROR_TYPES
        else errors.describe_error(error),
        "derived": getattr(error, "_pipedream_derived", False),
        "traceback": describe_user_error(error),
    }
    error_path(folder, str(rank)).write_text(json.dumps(record), encoding="utf-8")


def _read_errors(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _first_cause(folder: Path) -> dict[str, Any] | None:
    """The earliest error that is not the consequence of another worker's end."""
    records = _read_errors(folder)
    causes = [r for r in records if not r["derived"] and r["type"] != "PeerLost"]
    return next(iter(causes), None)


def _traceback_of(folder: Path) -> BaseException | None:
    cause = _first_cause(folder)
    return _RemoteTraceback(cause["traceback"]) if cause is not None and cause["traceback"] else None


_ERROR_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        RuntimeError,
        errors.PipelineError,
        errors.DataMismatch,
        errors.NonFiniteLoss,
        errors.PeerLost,
    )
}


def _cause_of(codes: dict[int, int], folder: Path, board: StatusBoard, plan: Plan) -> Exception:
    """One error for a run in which some workers failed: the first cause, not its consequences.

    codes: of workers that ended, by rank.
    """
    cause = _first_cause(folder)
    if cause is not None:
        return _ERROR_TYPES.get(cause["type"], errors.PipelineError)(cause["message"])
    # A worker that wrote nothing was killed. The launcher ends the others with SIGTERM: not the cause.
    written = {path.stem.removeprefix("error-") for path in folder.glob("error-*.json")}
    killed = [rank for rank in sorted(codes) if str(rank) not in written]
    if killed:
        rank = min(killed, key=lambda rank: codes[rank] == -signal.SIGTERM)
        return errors.WorkerLost(
            f"{plan.describe_worker(rank)} {_end_of(codes[rank])} {_position(board, rank)}"
        )
    records = _read_errors(folder)
    if not records:
        return errors.WorkerLost(f"workers ended with the exit codes {codes}")
    return _ERROR_TYPES.get(records[0]["type"], errors.PipelineError)(records[0]["message"])


def _end_of(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _position(board: StatusBoard, rank: int) -> str:
    minibatch = board.read(rank)
    return "before its first minibatch" if minibatch < 0 else f"at minibatch {minibatch}"
