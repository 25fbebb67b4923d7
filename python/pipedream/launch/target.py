"""Loads TARGET of the command line: "path/to/file.py:function" or "package.module:function".

The function takes no arguments. It returns a mapping or an object that has `model` and `data`. The result
also needs `loss_fn` unless the model's output has the loss, and `optimizer` for a run. The result may have
any other argument of pipedream.run, except `plan`. If the command line gives only the replicas of each stage,
such as "2-1", share_out() gives each stage its layers. Runs on the main thread of the command.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pipedream.data.first_minibatch import PeekedData, first_of, looked_at
from pipedream.launch.run_options import RUN_OPTIONS
from pipedream.model.batches import own_loss, parts_of
from pipedream.model.layers import layers_of
from pipedream.model.precision import autocast_dtype
from pipedream.model.seeding import generators_kept
from pipedream.planning.plan import Plan
from pipedream.splitting.cut_model import cut_model, needs_cutting

__all__ = ["Job", "load_job", "share_out"]


_NEEDED = ("model", "data")


@dataclass(frozen=True)
class Job:
    """The job that the user's function returned."""

    model: Any
    data: Any
    loss_fn: Any
    """None if the model's output has the loss."""
    options: dict[str, Any]
    """Further arguments of pipedream.run, including `optimizer` if the function returned it."""


def load_job(target: str, *, needs_optimizer: bool) -> Job:
    """Calls the function that `target` names.

    Raises ValueError if there is no such function, or if its result lacks a part. Also raises it if the
    result has an argument that pipedream.run does not take."""
    module_name, separator, function_name = target.rpartition(":")
    if not (separator and module_name and function_name):
        raise ValueError(f"target is {target!r}: write path/to/file.py:function or package.module:function")
    function = _find_function(target, module_name, function_name)
    given = _parts_of(function())
    needed = [*_NEEDED, "optimizer"] if needs_optimizer else _NEEDED
    for name in needed:
        if given.get(name) is None:
            raise ValueError(f"target {target!r} returned no {name!r}: it must return {', '.join(needed)}")
    _check_names(target, given)
    options = {name: value for name, value in given.items() if name not in _NEEDED}
    return Job(given["model"], given["data"], options.pop("loss_fn", None), options)


def _find_function(target: str, module_name: str, function_name: str) -> Callable[[], Any]:
    module = _import_file(module_name) if module_name.endswith(".py") else _import_module(target, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"target is {target!r}: {module_name} has no function {function_name!r}")
    found: Callable[[], Any] = function
    return found


def _import_file(path: str) -> ModuleType:
    # The file is imported by its plain name from its own folder, so that it can import its neighbours, as
    # with `python file.py`. Worker processes inherit sys.path, and import its classes by the same name.
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"target file is {path!r}: there is no such file")
    _prepend_to_path(str(file.parent))
    module = importlib.import_module(file.stem)
    if Path(module.__file__ or "").resolve() != file:
        raise ValueError(f"target file is {path!r}: another module is called {file.stem!r}, rename the file")
    return module


def _import_module(target: str, module_name: str) -> ModuleType:
    _prepend_to_path(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # If the target's module exists and imports a missing module, the target is right. The error about the
        # missing module is then raised as it is.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"target is {target!r}: there is no module {error.name!r} here") from None


def _prepend_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _parts_of(made: Any) -> dict[Any, Any]:
    """Returns the items of a mapping. For any other object returns its public attributes, and class
    attributes that are arguments of run()."""
    if isinstance(made, Mapping):
        return dict(made)
    own = [name for name in getattr(made, "__dict__", ()) if not name.startswith("_")]
    return {name: getattr(made, name) for name in dict.fromkeys([*_known(), *own]) if hasattr(made, name)}


def _check_names(target: str, given: Mapping[Any, Any]) -> None:
    known = _known()
    for name in given:
        if name in known:
            continue
        close = difflib.get_close_matches(str(name), known, n=1)
        remedy = f"do you mean {close[0]!r}?" if close else f"it may return {', '.join(known)}"
        if name == "plan":
            remedy = "give it with --plan FILE"
        raise ValueError(f"target {target!r} returned {name!r}, which pipedream.run does not take: {remedy}")


def _known() -> list[str]:
    """Returns the names that a job may have: all arguments of run() except the plan. --plan gives the
    plan."""
    return ["model", *(option.name for option in RUN_OPTIONS)]


def share_out(job: Job, counts: Sequence[tuple[int, int]], options: Mapping[str, Any]) -> Plan:
    """Makes a plan in which each stage has about the same share of the layers as it has of the replicas.

    counts: (replicas, spare shards) of each stage. options: further arguments of run(). To find the layers of
    a module, this runs the module once, as run() does."""
    plan = Plan.replicated(_num_layers(job, options), [replicas for replicas, _ in counts])
    return plan.with_spare_shards([spares for _, spares in counts])


def _num_layers(job: Job, options: Mapping[str, Any]) -> int:
    if not needs_cutting(job.model):
        return len(layers_of(job.model))
    if isinstance(looked_at(job.data), PeekedData):
        raise ValueError(
            f"data is {_named(job.data)}, which can be read once, and the model's layers are counted with its"
            " first minibatch: give --plan FILE, or let the target return a list or a DataLoader"
        )
    with generators_kept():
        inputs, targets = parts_of(first_of(job.data), 0)
        cut = cut_model(
            job.model,
            inputs,
            targets,
            own_loss if job.loss_fn is None else job.loss_fn,
            autocast=autocast_dtype(options.get("autocast")),
            weights=options.get("weights"),
        )
    return len(cut.layer_names)


def _named(data: Iterable[Any]) -> str:
    return (
        "an iterator" if isinstance(data, Iterator) else f"a {type(data).__name__} that no other process has"
    )
