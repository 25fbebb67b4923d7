"""Runs a plan in a plain script. Starts a local process for each worker, and loads the trained weights into
the caller's model.

    task_files.py         gives the workers their input: files in the run's folder, and a pipe
    fork_server.py        makes the processes
    worker_processes.py   watches and ends them
    local_worker.py       is the program of each process
    forwarder.py          iterates data that cannot be sent to workers, in this process
    failure.py            finds out why a run failed

    pipedream-xxxxxxxx/   is the run's folder: mode 0700, in the temporary folder
        owner             is a file that the process which made the folder locks (flock) until it ends

The result and the trained weights (safetensors) come back through the folder. A caller that is killed leaves
its folder behind, but the kernel frees the lock. So the next caller recognizes and removes such folders. It
does not touch folders of other users, or folders without a lock file. Runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from pipedream.callbacks.steering import Steering
from pipedream.checkpoint.run_state import RunState
from pipedream.common import errors
from pipedream.common.errors import PipelineError
from pipedream.common.guard import RUN_FOLDER_VARIABLE
from pipedream.data.first_minibatch import KeptMinibatch, first_of
from pipedream.launch.first_loss import FirstLoss
from pipedream.launch.fork_server import start_server
from pipedream.launch.forwarder import forwarding, forwarding_validation
from pipedream.launch.script_capture import CapturedScript, capture_script
from pipedream.launch.worker_processes import run_processes, signals_deferred
from pipedream.links.rendezvous import Rendezvous, host_store
from pipedream.model.batches import parts_of
from pipedream.model.data_copies import set_generators
from pipedream.model.factories import try_factories
from pipedream.model.layers import Model, roots_of
from pipedream.model.loss_state import check_loss_buffers, set_loss_state
from pipedream.model.seeding import base_seed, generators_kept
from pipedream.model.stage_module import StageModule, find_ties
from pipedream.optim import NativeOptimizer
from pipedream.planning.plan_schedule import mean_delays
from pipedream.report.result import RunResult
from pipedream.report.status import StatusBoard
from pipedream.splitting.splitter import split
from pipedream.stage.job import CallerSettings, JobOptions
from pipedream.update.gradients import updated_parameters
from pipedream.worker.cautions import warn_if_coarse, warn_if_late
from pipedream.worker.devices import choose_device_type
from pipedream.worker.failure import cause_of, is_explained, traceback_of
from pipedream.worker.interrupts import interrupts_end, interrupts_stop
from pipedream.worker.kept_state import STATE_FOLDER
from pipedream.worker.local_worker import STORE_PREFIX, run_local_worker
from pipedream.worker.notices import noticed_checkpoints, notices_save
from pipedream.worker.script_logging import ScriptLogging
from pipedream.worker.steering import LocalSteering
from pipedream.worker.task_files import (
    GraphReader,
    GraphWriter,
    WorkerTask,
    read_part,
    write_data,
    write_part,
    write_task,
    write_validation_data,
)
from pipedream.worker.weight_files import (
    are_complete,
    is_keeping,
    load_newest,
    load_weights,
    read_averages,
    read_loss_state,
    reserve_room,
)

__all__ = ["check_main_is_a_file", "run_folder", "run_locally"]

_KEEPING_S_MAX = 600.0


def run_locally(
    model: Model, data: Iterable[Any], options: JobOptions, first: KeptMinibatch, steering: Steering
) -> RunResult:
    """Trains in worker processes and updates the model in place.

    first: has minibatch 0 if it was already read. steering: calls the callbacks.

    Raises ValueError if something cannot be sent to the workers, and for a mistake that a worker has found.
    Also raises it if the workers' loss of minibatch 0 differs from the caller's. Raises WorkerLost, PeerLost
    and other PipelineErrors if the run fails. No worker is left behind. The caller's random generators stay
    as they were. A DataLoader's own generator ends in the state that it has after the data were iterated.
    """
    # These checks run before any worker starts.
    stages = split(model, options.plan)
    check_loss_buffers(stages, options.loss_fn)
    with signals_deferred(), generators_kept() as rng, run_folder() as folder:
        with GraphWriter(folder) as graph:
            write_task(graph, model, options)
            graph.flush()
            all_made = _try_factories(folder, stages, options)
            warn_if_late(options.plan, options.schedule_options(), all_made)
            warn_if_coarse(all_made)
            if any(not isinstance(made, NativeOptimizer) for made in all_made):
                start_server(compiler="before forks")
            script = capture_script([*(root for _, root in roots_of(model)), *_functions_of(options)], data)
            graph.add("script", script.state, "")
            forwards_validation = write_validation_data(graph, folder, options.validation)
            forwarded = write_data(graph, folder, data, options)
        if options.output.gather != "none":
            reserve_room(stages, options.plan, folder)
        write_part(folder, "rng", rng, "")
        write_part(folder, "settings", (CallerSettings.capture(), ScriptLogging.capture()), "")
        if forwarded is not None:
            first.parts = forwarded.first
        expected = FirstLoss(model, stages, options, first, lambda: _read_first(data, options))
        if forwarded is not None or forwards_validation:
            # The loss is computed before the forwarder starts, because afterwards the forwarder's thread
            # draws from the random generators that computing the loss uses and restores.
            expected.compute()
        board = StatusBoard(folder / "board", options.plan.workers_used, create=True)
        store, port = host_store()
        noticed = noticed_checkpoints(options)
        iterating = threading.Lock()
        task = WorkerTask(os.fspath(folder), port, secrets.randbits(64), options.links.keys)
        with (
            errors.position_kept(
                lambda: board.losses(options.plan.stages[-1].num_replicas, options.microbatches),
                lambda: None if board.newest() < 0 else board.newest(),
            ),
            Rendezvous(store, STORE_PREFIX) as rendezvous,
            forwarding(forwarded, data, options, task, rendezvous, iterating) as rng_of_forwarded,
            forwarding_validation(
                options if forwards_validation else None, folder, iterating
            ) as check_validation,
            _trained_weights_told(stages, options, folder, expected),
            _interrupts_told(options, board),
            notices_save(noticed, has_begun=lambda: board.newest() >= 0),
        ):
            told = LocalSteering(steering, options, board, folder, rendezvous)
            _launch(task, options, board, expected, script, told, check_validation)
        if options.output.gather != "none":
            _take_over(stages, options, folder)
        set_generators(data, read_part(folder, "generators"))
        result = RunResult.from_dict(json.loads((folder / "result.json").read_text(encoding="utf-8")))
        result.is_interrupted = board.is_stop_asked
        result.ema = read_averages(stages, options.plan, folder)
        state = _adopted_state(folder)
        rng_of_data = rng_of_forwarded()
        if rng_of_data is not None:
            state.document["data_generators"] = rng_of_data.to_document()
        result.keep(state)
        return result


def _adopted_state(folder: Path) -> RunState:
    """Moves the workers' stored state into a folder of its own. That folder is removed with the state."""
    with contextlib.ExitStack() as around:
        kept = around.enter_context(run_folder())
        (folder / STATE_FOLDER).rename(kept / STATE_FOLDER)
        return RunState.load(kept / STATE_FOLDER, around.pop_all().close)


def _interrupts_told(options: JobOptions, board: StatusBoard) -> contextlib.AbstractContextManager[None]:
    if not options.may_choose_boundaries:
        return interrupts_end(speaks=True)
    return interrupts_stop(board.ask_for_stop, lambda: board.newest() >= 0, speaks=True)


@contextlib.contextmanager
def _trained_weights_told(
    stages: list[StageModule], options: JobOptions, folder: Path, expected: FirstLoss
) -> Iterator[None]:
    """If the run in the with block fails, loads the newest weights of its workers into the model. The error
    then says so. Loads nothing with gather="none", or if the first loss has shown that the workers trained
    another model."""
    try:
        yield
    except Exception as error:
        if options.output.gather != "none" and expected.outcome != "different":
            with contextlib.suppress(OSError, PipelineError):
                _take_over_after(error, stages, options, folder)
        raise


def _take_over_after(error: Exception, stages: list[StageModule], options: JobOptions, folder: Path) -> None:
    """Loads the trained weights if the training was over. Otherwise loads the newest versions of the stages
    whose workers have written them."""
    if are_complete(options.plan, folder):
        _take_over(stages, options, folder)
        error.args = (f"{error}; the training was over, and the model has the trained weights",)
        return
    missing = load_newest(stages, options.plan, folder)
    if missing:
        names = f"stage{'s' if len(missing) > 1 else ''} {' and '.join(map(str, missing))}"
        error.args = (
            f"{error}; the model has the newest weights of the other stages, and of {names} those from before"
            " the run",
        )
    elif missing is not None and hasattr(error, "add_note"):  # add_note() exists from Python 3.11 on
        error.add_note("The model has the newest weights of all stages.")


def _take_over(stages: list[StageModule], options: JobOptions, folder: Path) -> None:
    load_weights(stages, options.plan, folder)
    set_loss_state(options.loss_fn, read_loss_state(options.plan, folder))


def check_main_is_a_file() -> None:
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    if main_file is not None and not Path(main_file).exists():
        raise ValueError(
            f"the script is {main_file!r}, which worker processes cannot import: save it to a file, or"
            " start it with torchrun"
        )


def _try_factories(
    folder: Path, stages: list[StageModule], options: JobOptions
) -> list[torch.optim.Optimizer]:
    """Calls the factories of optimizers and schedulers, as each worker will do. Calls copies of them that it
    reads from the folder, as the workers do, so that the caller's factories do not change."""
    ties = find_ties(stages)
    with GraphReader(folder) as graph:
        return try_factories(
            [updated_parameters(stage, ties) for stage in stages],
            graph.read("optimizer"),
            graph.read("lr_scheduler"),
            choose_device_type(),
            mean_delays(options.schedule_options()),
        )


def _read_first(data: Iterable[Any], options: JobOptions) -> tuple[Any, Any]:
    """Reads minibatch 0 with the random generators that the workers will have."""
    with generators_kept():
        options.seed_data(base_seed(options.seed))
        return parts_of(first_of(data), 0)


def _functions_of(options: JobOptions) -> list[Any]:
    return [
        *(options.loss_fn, options.optimizer, options.lr_scheduler),
        *(options.weight_fn, options.weights),
        *([] if options.validation is None else options.validation.functions()),
    ]


def _last_words_s(board: StatusBoard, folder: Path, peer_timeout_s: float) -> float:
    """Returns for how many seconds workers of a failed run may save their weights. It is 0 before any worker
    has reached minibatch 1, because hardly anything is trained. A worker has peer_timeout to finish its work
    item. If a worker has begun to write, all have much longer."""
    if board.newest() <= 0:
        return 0.0
    return _KEEPING_S_MAX if is_keeping(folder) else peer_timeout_s


def _launch(
    task: WorkerTask,
    options: JobOptions,
    board: StatusBoard,
    expected: FirstLoss,
    script: CapturedScript,
    told: LocalSteering,
    check: Callable[[], None] | None,
) -> None:
    """Runs the workers until all have ended. check: called now and then; may raise an error.

    Raises ValueError if the workers train another model than the caller's."""
    folder, plan, num_workers = Path(task.folder), options.plan, options.plan.workers_used

    def look() -> bool:
        told.look()
        if check is not None:
            check()
        differs = expected.differs(board, folder)
        if differs:
            raise ValueError(
                f"{differs}, with the same weights and data: {script.likely_cause()};"
                " PIPEDREAM_CHECK=0 trains nevertheless"
            )
        return differs is None or told.is_needed or check is not None

    codes = run_processes(
        run_local_worker,
        [(task, rank, num_workers) for rank in range(num_workers)],
        {RUN_FOLDER_VARIABLE: task.folder},
        functools.partial(is_explained, folder=folder),
        look,
        lambda: _last_words_s(board, folder, options.links.peer_timeout_s),
        look_s=told.period_s,
    )
    if codes:
        raise cause_of(codes, folder, board, plan) from traceback_of(folder)
    look()  # a short run may have ended before look() was called
    told.finish()


_PREFIX = "pipedream-"
_LOCK = "owner"
_LOCK_IN_THE_MAKING = "owner.new"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Makes a folder that only this user can read, and removes it at the end of the with block. First removes
    folders of callers that were killed."""
    _remove_left_ones(Path(tempfile.gettempdir()))
    # TemporaryDirectory makes the folder with mode 0700.
    with contextlib.ExitStack() as held, tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        held.callback(os.close, _lock(folder))  # the lock is held until the folder is removed
        yield folder


def _lock(folder: Path) -> int:
    """Locks the folder, and returns the lock's file descriptor. The lock ends when the descriptor is closed,
    at the latest with the process."""
    made = folder / _LOCK_IN_THE_MAKING
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    with contextlib.suppress(OSError):  # without locks there is no lock file, so nobody removes a left folder
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file gets its name after flock(), so that nobody finds it unlocked.
        made.rename(folder / _LOCK)
    return descriptor


def _remove_left_ones(temporary: Path) -> None:
    """Removes folders of killed callers. Leaves files that cannot be removed."""
    for folder in temporary.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    """Removes the folder if its owner has ended. No other user can write into a folder of mode 0700."""
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS:
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this raises an error if the owner lives
        shutil.rmtree(folder)
    finally:
        os.close(lock)
