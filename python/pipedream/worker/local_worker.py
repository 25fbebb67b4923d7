"""Runs in a local worker's process: reads the worker's part of the run from the folder, trains, and writes
the result into the folder.

Runs on the main thread of the process. The fork server starts the process. If the caller dies, the process
dies, too.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipedream import _core
from pipedream.common.guard import one_run_at_a_time
from pipedream.links.descriptors import descriptor_limit_raised
from pipedream.links.rendezvous import Rendezvous, connect_store
from pipedream.model.data_copies import generator_states
from pipedream.model.layers import Model, roots_of
from pipedream.model.seeding import RngState
from pipedream.report.status import StatusBoard
from pipedream.stage.job import CallerSettings, JobOptions, WorkerPlace
from pipedream.worker.failure import write_error
from pipedream.worker.kept_state import STATE_FOLDER
from pipedream.worker.notices import signals_left_to_caller
from pipedream.worker.script_logging import ScriptLogging
from pipedream.worker.script_state import ScriptState
from pipedream.worker.task_files import (
    GraphReader,
    WorkerTask,
    read_data,
    read_part,
    read_validation_data,
    write_part,
)
from pipedream.worker.worker import run_worker

__all__ = ["STORE_PREFIX", "register_classes", "run_local_worker"]

STORE_PREFIX = "pipedream"
_OUTPUTS_MODULES = ("transformers.utils.output_capturing", "transformers.utils.generic")  # newer name first


def run_local_worker(task: WorkerTask, rank: int, num_workers: int) -> None:
    """The entry point of a worker process. Ends the process with status 1 after an error, which it has
    written into the folder."""
    _forked_children_die_with_this_process()
    os.environ.update(_environment_of(task, rank, num_workers))
    folder = Path(task.folder)
    try:
        with one_run_at_a_time(), descriptor_limit_raised():
            _train(task, folder, rank, StatusBoard(folder / "board", num_workers, create=False))
    except Exception as error:
        write_error(folder, rank, error)
        raise SystemExit(1) from None  # the caller shows the error, so no traceback is printed here


def _environment_of(task: WorkerTask, rank: int, num_workers: int) -> dict[str, str]:
    """Returns the environment variables that torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": f"pipedream-{task.run_id:016x}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _forked_children_die_with_this_process() -> None:
    """Makes the forked processes of a DataLoader die with this process. They inherit its sockets and memory,
    and would keep both for seconds after this process was killed."""
    forks_on_main_thread, pid = False, 0

    def note_fork() -> None:
        nonlocal forks_on_main_thread, pid
        forks_on_main_thread, pid = threading.current_thread() is threading.main_thread(), os.getpid()

    def follow() -> None:
        if forks_on_main_thread:  # the kernel sends the signal when the forking thread ends, not the process
            _core.die_with_parent(pid)

    os.register_at_fork(before=note_fork, after_in_child=follow)


def _train(task: WorkerTask, folder: Path, rank: int, board: StatusBoard) -> None:
    settings: tuple[CallerSettings, ScriptLogging] = read_part(folder, "settings")
    for each in settings:
        each.apply()  # the model's code may read the settings when it is unpickled
    with GraphReader(folder) as graph:
        options: JobOptions = graph.read("options")
        model = graph.read("model")
        register_classes(model)
        plan = options.plan
        own_stages = plan.stages_of(rank)
        reads_data = 0 in own_stages or plan.num_stages - 1 in own_stages
        script: ScriptState = graph.read("script")
        script.apply()
        if reads_data and options.validation is not None:
            held_out = replace(options.validation, data=read_validation_data(graph, rank))
            options = replace(options, validation=held_out)
        data = read_data(graph, folder) if reads_data else ()
    options = replace(options, links=replace(options.links, keys=task.keys))
    # The generators are set after unpickling, because unpickling may import modules that draw random numbers.
    rng: RngState = read_part(folder, "rng")
    rng.restore()
    signals_left_to_caller(options.checkpoints)
    store = connect_store(task.store_port)
    with Rendezvous(store, STORE_PREFIX, rank=rank, world_size=plan.workers_used) as rendezvous:
        place = WorkerPlace(
            rank=rank,
            world_size=plan.workers_used,
            local_rank=rank,
            run_id=task.run_id,
            incarnation=0,
            rendezvous=rendezvous,
            board=board,
            stop_order=board if options.may_choose_boundaries else None,
            folder=folder,
        )
        note_error = functools.partial(write_error, folder, rank)
        result = run_worker(place, options, model, data, note_error=note_error)
    if rank == 0:  # this rank has read all data
        write_part(folder, "generators", generator_states(data), "")
        result.state.save(folder / STATE_FOLDER)
        (folder / "result.json").write_text(json.dumps(result.to_dict()), encoding="utf-8")


def register_classes(model: Model) -> None:
    """Registers the classes of the model's modules with transformers. In the caller a module's constructor
    does so, but a worker gets its modules without a constructor call.

    transformers looks up in this registry which outputs of inner modules a model's forward collects, such as
    the router logits of a mixture of experts. Without the entry these outputs are None.
    """
    modules = [module for _, root in roots_of(model) for module in root.modules()]
    for name in _OUTPUTS_MODULES:
        registry: Any = getattr(sys.modules.get(name), "_CAN_RECORD_REGISTRY", None)
        if registry is None:
            continue
        for module in modules:
            if hasattr(module, "_can_record_outputs"):
                # All versions of transformers use str(class) as the key. Newer versions have a __setitem__
                # that takes the module, so dict.__setitem__ is called, which works with all versions.
                dict.__setitem__(registry, str(type(module)), module._can_record_outputs)
        return
