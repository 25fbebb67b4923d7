"""Pickles objects for other processes of this machine. Tensors are pickled from host memory. Large memory
goes into a file that the other processes map.

    value -> HostPickler -> name.pickle
                        `-> MemoryFile, name.memory  <- mapped by each process that unpickles

A process loads only those pages of a mapped file that it touches. So a worker loads only its own stages,
and all readers of the same data share their pages. The pickler is owned by the thread that writes. Any thread
unpickles.
"""

from __future__ import annotations

import contextlib
import inspect
import mmap
import os
import pickle
import shutil
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pipedream.common import errors
from pipedream.common.units import format_bytes
from pipedream.worker.local_functions import reduced_function

__all__ = ["HostPickler", "HostUnpickler", "MemoryFile", "room_told"]

_MAPPED_BYTES_MIN = 1 << 16  # smaller memory is put into the pickle
_ALIGNMENT = 64  # bytes; allocators align memory in the same way


class HostPickler(pickle.Pickler):
    """Pickles tensors with their contents. A tensor on a GPU is copied to host memory, and is unpickled in
    host memory. Tensors that share memory, such as a buffer and a view of it, also share memory after they
    are unpickled."""

    def __init__(self, content: Any, memory: MemoryFile | None) -> None:
        """content: an object with write(). memory: the file for tensors and arrays of at least
        mapped_bytes_min. With None all tensors are in the pickle, and functions are pickled by their names.
        """
        super().__init__(content)
        self.mapped_bytes_min = _MAPPED_BYTES_MIN
        self.sends_functions = memory is not None
        self._memory = memory
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Storages by address. A storage has one object here, because the pickler finds shared memory by the
        identity of the object."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            kind = parametrize.type_before_parametrizations(value)
            # Hooks of load_state_dict are left out. weight_norm's hook cannot be pickled, and no worker loads
            # a state_dict.
            attributes = vars(value) | {"_load_state_dict_pre_hooks": OrderedDict()}
            return _bare, (kind,), attributes, None, None, _parametrize_again
        if isinstance(value, types.FunctionType) and self.sends_functions:
            return reduced_function(value) or NotImplemented
        if isinstance(value, (staticmethod, classmethod)):
            return type(value), (value.__func__,)
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, types.MethodType) and not _is_of_its_class(value):
            return _bound, (value.__func__, value.__self__)
        if _is_of_a_kind_of_its_own(value):
            return _parameter, (type(value), value.data, value.requires_grad, vars(value))
        if isinstance(value, torch.TypedStorage):
            storage = value._untyped_storage
            return _typed, (self._storages.setdefault(storage._cdata, storage), value._dtype)
        if isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
            return self._reduce(value)
        if isinstance(value, np.ndarray):
            return self._reduce_array(value)
        return NotImplemented

    def _reduce(self, storage: Any) -> Any:
        on_host = storage if storage.device.type == "cpu" else storage.cpu()
        content = torch.empty(0, dtype=torch.uint8).set_(on_host).numpy()
        if self._memory is None or storage.nbytes() < self.mapped_bytes_min:
            return _storage_of, (content.tobytes(),)
        return _mapped_storage, self._memory.append(content)

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        if self._memory is None or array.nbytes < self.mapped_bytes_min or array.dtype.hasobject:
            return NotImplemented
        order: Literal["C", "F"] = "C" if array.flags.c_contiguous else "F"
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            return NotImplemented
        if type(array) is np.memmap and order == "C":
            place = _place_in_file(array)
            if place is not None:
                return _users_file, (*place, array.dtype, array.shape)
        if type(array) not in (np.ndarray, np.memmap):
            return NotImplemented
        content = array.reshape(-1, order=order).view(np.uint8)
        return _mapped_array, (*self._memory.append(content), array.dtype, array.shape, order)


def _place_in_file(array: np.memmap[Any, Any]) -> tuple[str, str, int] | None:
    """Returns (path, mode, offset) of memory that the user has mapped from a file. Returns None if a worker
    that maps the file might find other contents."""
    filename, mapping, mode = array.filename, getattr(array, "_mmap", None), str(array.mode)
    if mapping is None or filename is None or mode not in ("r", "r+", "w+") or not os.path.isfile(filename):
        return None
    begin = np.frombuffer(mapping, dtype=np.uint8).__array_interface__["data"][0]
    # array.offset is the offset of the whole mapped array, even if `array` is a slice of it. The mapping
    # begins at the start of the page of that offset.
    first = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = first + array.__array_interface__["data"][0] - begin
    return os.path.abspath(filename), "r" if mode == "r" else "r+", offset


def _users_file(path: str, mode: Any, offset: int, dtype: Any, shape: tuple[int, ...]) -> Any:
    return np.memmap(path, dtype, mode, offset, shape)


class MemoryFile:
    """A file with the memory of large tensors and arrays, one behind the other. The first append() makes the
    file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self.size = 0

    def append(self, content: np.ndarray[Any, Any]) -> tuple[str, int, int]:
        """Appends the content. Returns (path, offset, size in bytes)."""
        with room_told(self._path.parent):
            if self._file is None:
                self._file = self._path.open("wb")
            padding = -self.size % _ALIGNMENT
            self._file.write(bytes(padding))
            self._file.write(content.data)  # this makes no copy
        offset, self.size = self.size + padding, self.size + padding + content.nbytes
        return os.fspath(self._path), offset, content.nbytes

    def cut(self, size: int) -> None:
        if self._file is not None:
            self._file.truncate(size)
            self._file.seek(size)
            self.size = size

    def flush(self) -> None:
        if self._file is not None:
            with room_told(self._path.parent):
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class HostUnpickler(pickle.Unpickler):
    """Reads what a HostPickler has written. Mapped memory is private: a process that writes to a page gets a
    copy of that page."""

    def __init__(self, content: BinaryIO) -> None:
        super().__init__(content)
        self._mappings: dict[str, mmap.mmap] = {}

    def load(self) -> Any:
        token = _mappings.set(self._mappings)
        try:
            return super().load()
        finally:
            _mappings.reset(token)


# The mappings of the running HostUnpickler, by path. An object that was read from a mapping keeps the mapping
# open.
_mappings: ContextVar[dict[str, mmap.mmap]] = ContextVar("_mappings")


def _mapping_of(path: str, num_bytes: int) -> mmap.mmap:
    """Returns a mapping of at least num_bytes. Maps the file again if it has grown since it was mapped."""
    mappings = _mappings.get()
    if path not in mappings or len(mappings[path]) < num_bytes:
        with open(path, "rb") as file:
            mappings[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return mappings[path]


def _mapped_storage(path: str, offset: int, num_bytes: int) -> torch.UntypedStorage:
    mapping = _mapping_of(path, offset + num_bytes)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=offset, count=num_bytes).untyped_storage()


def _mapped_array(
    path: str, offset: int, num_bytes: int, dtype: Any, shape: tuple[int, ...], order: Any
) -> Any:
    mapping = _mapping_of(path, offset + num_bytes)
    return np.ndarray(shape, dtype, mapping, offset, order=order)


def _storage_of(content: bytes) -> torch.UntypedStorage:
    memory = torch.empty(len(content), dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
    return memory.untyped_storage()


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    make: Any = torch.TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def _is_of_its_class(method: types.MethodType) -> bool:
    """Whether the class has this method under its name. Pickle sends a method by its name only. So it cannot
    send a method that was made for one object or that replaces the class's method."""
    owner = method.__self__ if isinstance(method.__self__, type) else type(method.__self__)
    if owner is not method.__self__ and method.__name__ in getattr(method.__self__, "__dict__", {}):
        return False  # the object has an attribute of its own under this name
    found = inspect.getattr_static(owner, method.__name__, None)
    return getattr(found, "__func__", found) is method.__func__


def _bound(function: Callable[..., Any], holder: Any) -> types.MethodType:
    return types.MethodType(function, holder)


def _is_of_a_kind_of_its_own(value: Any) -> bool:
    """Whether the value's class is a subclass of nn.Parameter that pickle would send as a plain
    nn.Parameter."""
    kind = type(value)
    reduce: Any = kind.__reduce_ex__
    is_special = kind is not nn.Parameter and nn.Parameter in kind.__mro__
    return is_special and reduce is nn.Parameter.__reduce_ex__


def _parameter(
    kind: type[nn.Parameter], content: Tensor, requires_grad: bool, marks: dict[str, Any]
) -> nn.Parameter:
    made: nn.Parameter = torch.Tensor._make_subclass(kind, content, requires_grad)
    vars(made).update(marks)
    return made


def _bare(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _parametrize_again(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Makes the module's class again. torch.nn.utils.parametrize makes a class for each module, and such a
    class cannot be pickled."""
    vars(module).update(attributes)
    parametrize._inject_new_class(module)
    for name in attributes["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)


@contextlib.contextmanager
def room_told(folder: Path) -> Iterator[None]:
    """If a write in the with block fails, raises PipelineError with the room that is left on the disk.
    folder: the folder of the run."""
    try:
        yield
    except OSError as error:
        temporary = folder.parent
        free = format_bytes(shutil.disk_usage(temporary).free)
        raise errors.PipelineError(
            f"what local workers are told cannot be written into {temporary}, where {free} are free"
            f" ({errors.one_line(error)}): make room there, or name another folder in TMPDIR"
        ) from None
