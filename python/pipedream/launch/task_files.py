"""What the local workers are told: files in a folder that only this user can read, and a task by a pipe.

Written by the caller from host memory, read by every worker, who thereby has copies of its own. Any thread.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from pipedream.common import errors
from pipedream.common.units import format_bytes
from pipedream.data.first_minibatch import PeekedIterator
from pipedream.data.stream import ForwardedData, without_processes
from pipedream.launch.forwarded import describe_forwarded
from pipedream.launch.local_functions import reduced_function
from pipedream.links.keys import CurveKeys
from pipedream.model.layers import CutForward, model_name
from pipedream.model.seeding import RngState, base_seed, seed_data
from pipedream.stage.job import JobOptions

__all__ = [
    "WorkerTask",
    "read_larger",
    "read_part",
    "write_data",
    "write_larger",
    "write_options",
    "write_part",
]


@dataclass(frozen=True)
class WorkerTask:
    """What a local worker process is told by a pipe, besides the files in the folder."""

    folder: str
    store_port: int
    run_id: int
    keys: CurveKeys | None
    """Not in a file: a caller that is killed cannot remove it."""


_MAPPED_BYTES_MIN = 1 << 16  # smaller memory is in the pickle


class _HostPickler(pickle.Pickler):
    """Writes tensors as they are in host memory: what is unpickled lies on no device of the caller's, and
    tensors that share memory, as a view that a module keeps of a buffer, share it there. Large memory goes
    into files, which whoever unpickles maps: it has the pages alone that it touches, so a worker those of its
    own stages."""

    def __init__(self, content: io.BytesIO, folder: Path | None, name: str) -> None:
        """folder: None leaves all in the pickle, and functions to those who can import them."""
        super().__init__(content)
        self._folder = folder
        self._name = name
        self._num_files = 0
        self._storages: dict[int, torch.UntypedStorage] = {}
        """By address, one object for each: the pickler knows objects again."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            kind = parametrize.type_before_parametrizations(value)
            # No worker loads a state_dict, for which weight_norm has a hook that cannot be sent either.
            attributes = vars(value) | {"_load_state_dict_pre_hooks": OrderedDict()}
            return _bare, (kind,), attributes, None, None, _parametrize_again
        if isinstance(value, types.FunctionType) and self._folder is not None:
            return reduced_function(value) or NotImplemented
        if isinstance(value, torch.TypedStorage):
            storage = value._untyped_storage
            return _typed, (self._storages.setdefault(storage._cdata, storage), value._dtype)
        if isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
            return self._reduce(value)
        return NotImplemented

    def _reduce(self, storage: Any) -> Any:
        on_host = storage if storage.device.type == "cpu" else storage.cpu()
        content = torch.empty(0, dtype=torch.uint8).set_(on_host).numpy()
        if self._folder is None or storage.nbytes() < _MAPPED_BYTES_MIN:
            return _storage_of, (content.tobytes(),)
        path = self._folder / f"{self._name}-{self._num_files}.memory"
        self._num_files += 1
        with _room_told(self._folder):
            content.tofile(path)  # on the host no copy
        return _map_storage, (os.fspath(path), storage.nbytes())


def _storage_of(content: bytes) -> torch.UntypedStorage:
    memory = torch.empty(len(content), dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
    return memory.untyped_storage()


def _map_storage(path: str, num_bytes: int) -> Any:
    return torch.UntypedStorage.from_file(path, shared=False, nbytes=num_bytes)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    make: Any = torch.TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def _bare(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _parametrize_again(module: nn.Module, attributes: dict[str, Any]) -> None:
    """What torch.nn.utils.parametrize makes of a module is of a class of its own, which cannot be sent."""
    vars(module).update(attributes)
    parametrize._inject_new_class(module)
    for name in attributes["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)


def _dumps(value: Any, folder: Path | None = None, name: str = "") -> bytes:
    content = io.BytesIO()
    _HostPickler(content, folder, name).dump(value)
    return content.getvalue()


@contextlib.contextmanager
def _room_told(folder: Path) -> Iterator[None]:
    """Around what writes into the folder of the run."""
    try:
        yield
    except OSError as error:
        temporary = folder.parent
        free = format_bytes(shutil.disk_usage(temporary).free)
        raise errors.PipelineError(
            f"what local workers are told cannot be written into {temporary}, where {free} are free"
            f" ({errors.one_line(error)}): make room there, or name another folder in TMPDIR"
        ) from None


def write_part(folder: Path, name: str, value: Any, remedy: str) -> None:
    try:
        content = _dumps(value, folder, name)
    except errors.PipelineError:  # of _room_told
        raise
    except Exception as error:
        raise ValueError(
            f"{name} ({_name_of(value)}) cannot be sent to the workers: {errors.one_line(error)}; {remedy}"
        ) from None
    with _room_told(folder):
        (folder / f"{name}.pickle").write_bytes(content)


def read_part(folder: Path, name: str) -> Any:
    try:
        return pickle.loads((folder / f"{name}.pickle").read_bytes())
    except Exception as error:
        raise ValueError(
            f"{name} cannot be rebuilt in a worker process: {errors.one_line(error)}; define its classes and"
            " functions in a module or script file that can be imported"
        ) from error


def write_options(folder: Path, options: JobOptions) -> None:
    remedy = "use a function or class that is defined at the top level of a module"
    for name in ("loss_fn", "optimizer", "lr_scheduler", "weight_fn", "weights"):
        write_part(folder, name, getattr(options, name), remedy)
    without_secret = replace(options, links=replace(options.links, keys=None))
    write_part(folder, "options", without_secret, "")


def write_data(folder: Path, data: Iterable[Any], options: JobOptions) -> ForwardedData | None:
    """Writes the data for the workers, or what stands for it when it must be forwarded from here."""
    forwarded: ForwardedData | None = None
    try:
        content = _dumps(without_processes(data))
    except Exception:  # whatever a user's object raises: then it stays here
        seed_data(base_seed(options.seed), options.seed, options.plan.workers_used)
        begin = RngState.capture()
        forwarded = describe_forwarded(data, options.plan, options.epochs)
        if not isinstance(data, PeekedIterator):
            begin.restore()  # it will be iterated anew
        content = _dumps(forwarded)
    with _room_told(folder):
        (folder / "data.pickle").write_bytes(content)
    return forwarded


def write_larger(folder: Path, segment_index: int, forwarded: ForwardedData) -> None:
    """With what a segment of the run (segment.py) begins, before the one before it is told of its end."""
    (folder / _larger_name(segment_index)).write_bytes(_dumps(forwarded))


def read_larger(folder: Path | None, segment_index: int) -> ForwardedData | None:
    """Once the segment before has been told of its end. None: that is the end of the data."""
    path = None if folder is None else folder / _larger_name(segment_index)
    if path is None or not path.exists():
        return None
    forwarded: ForwardedData = pickle.loads(path.read_bytes())
    return forwarded


def _larger_name(segment_index: int) -> str:
    return f"data of segment {segment_index}.pickle"


def _name_of(value: Any) -> str:
    if isinstance(value, CutForward):
        return model_name(value)
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__name__
