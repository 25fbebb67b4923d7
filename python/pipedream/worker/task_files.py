"""The caller gives local workers their task: files in a folder that only this user can read, and a message
through a pipe (WorkerTask).

    task.pickle   optimizer, model, loss_fn, ..., data, as one graph of objects: if the loss holds a buffer of
                  the model, it also does so in each worker
    task.memory   the memory of large tensors and arrays, which workers map (host_pickler.py)

The caller writes the files. Every worker reads them into objects of its own. Any thread.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from pipedream.common import errors
from pipedream.data.batch_reader import ForwardedValidation
from pipedream.data.first_minibatch import PeekedData, describe_forwarded, first_of
from pipedream.data.stream import ForwardedData
from pipedream.links.keys import CurveKeys
from pipedream.model.batches import parts_of
from pipedream.model.data_copies import without_processes
from pipedream.model.layers import CutForward, Model, model_name
from pipedream.model.seeding import RngState, base_seed, generators_kept
from pipedream.model.validation import Validation
from pipedream.stage.job import JobOptions
from pipedream.worker.host_pickler import HostPickler, HostUnpickler, MemoryFile, room_told

__all__ = [
    "GraphReader",
    "GraphWriter",
    "WorkerTask",
    "folder_of_validation",
    "read_data",
    "read_larger",
    "read_part",
    "read_validation_data",
    "write_batch",
    "write_data",
    "write_larger",
    "write_part",
    "write_task",
    "write_validation_data",
]


@dataclass(frozen=True)
class WorkerTask:
    """The message that a local worker gets through a pipe, in addition to the files in the folder."""

    folder: str
    store_port: int
    run_id: int
    keys: CurveKeys | None
    """The secret keys. They are not in a file, because a caller that is killed could not remove the file."""


_GRAPH = "task"
_FORWARDED = "forwarded data"
# The order of the values in the file. A reader unpickles the values up to the one that it needs.
_OF_TASK = ("optimizer", "lr_scheduler", "model", "loss_fn", "weight_fn", "weights", "validation", "options")
_VALIDATION_DATA = "validation data"
_IN_GRAPH = (*_OF_TASK, "script", _VALIDATION_DATA, "data")
# Data have a smaller bound than other values, because each of their samples may be a small tensor.
_MAPPED_BYTES_MIN_OF_DATA = 1 << 10


class GraphWriter:
    """Writes values into one file, and their large memory into another file. If several values hold the same
    object, the reader gets one object, too. Owned by the thread that calls run()."""

    def __init__(self, folder: Path, name: str = _GRAPH) -> None:
        self._folder = folder
        self._path = folder / f"{name}.pickle"
        self._memory = MemoryFile(folder / f"{name}.memory")
        with room_told(folder):
            self._file = self._path.open("wb")
        self._pickler = HostPickler(_Output(folder, self._file), self._memory)

    def add(self, name: str, value: Any, remedy: str) -> None:
        try:
            self._pickler.dump(value)
        except errors.PipelineError:  # room_told() has raised it
            raise
        except Exception as error:
            raise ValueError(
                f"{name} ({_name_of(value)}) cannot be sent to the workers: {errors.one_line(error)};"
                f" {remedy}"
            ) from None

    def add_data(self, data: Any) -> bool:
        """Adds the data as the last value. Returns False if the data cannot be sent. The files are then
        unchanged."""
        self._pickler.mapped_bytes_min = _MAPPED_BYTES_MIN_OF_DATA
        self._pickler.sends_functions = False  # the caller iterates data that hold such functions
        return self.may_add(data)

    def may_add(self, value: Any) -> bool:
        """Adds the value and returns True. Returns False if the value cannot be sent. The files are then
        unchanged."""
        size, memory_size, memo = self._file.tell(), self._memory.size, self._pickler.memo.copy()
        try:
            self._pickler.dump(value)
        except errors.PipelineError:
            raise
        except Exception:  # a user's object may raise anything
            self._file.truncate(size)
            self._file.seek(size)
            self._memory.cut(memory_size)
            self._pickler.memo = memo
            return False
        return True

    def flush(self) -> None:
        with room_told(self._folder):
            self._file.flush()
        self._memory.flush()

    def __enter__(self) -> GraphWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with room_told(self._folder):
            self._file.close()
            self._memory.close()


class _Output:
    """The output file of the pickler. It raises PipelineError for its own errors, so that they differ from
    errors of pickled objects."""

    def __init__(self, folder: Path, file: BinaryIO) -> None:
        self._folder = folder
        self._file = file

    def write(self, content: bytes, /) -> None:
        with room_told(self._folder):
            self._file.write(content)


class GraphReader:
    """Reads the values that a GraphWriter has written. read() unpickles the values in order, up to the one
    that is asked for."""

    def __init__(self, folder: Path, names: Sequence[str] = _IN_GRAPH, file_name: str = _GRAPH) -> None:
        self._names = list(names)
        self._file = (folder / f"{file_name}.pickle").open("rb")
        self._unpickler = HostUnpickler(self._file)
        self._values: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        while name not in self._values:
            upcoming = self._names[len(self._values)]
            try:
                self._values[upcoming] = self._unpickler.load()
            except Exception as error:
                raise ValueError(
                    f"{upcoming} cannot be rebuilt in a worker process: {errors.one_line(error)}; define its"
                    " classes and functions in a module or script file that can be imported"
                ) from error
        return self._values[name]

    def __enter__(self) -> GraphReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def write_part(folder: Path, name: str, value: Any, remedy: str) -> None:
    """Writes a value into a file of its own. The value must not share objects with other values."""
    with GraphWriter(folder, name) as graph:
        graph.add(name, value, remedy)


def read_part(folder: Path, name: str) -> Any:
    with GraphReader(folder, [name], name) as graph:
        return graph.read(name)


def write_task(graph: GraphWriter, model: Model, options: JobOptions) -> None:
    """Writes the model and the options, without secret keys and without data."""
    of_functions = "use a function or class that is defined at the top level of a module"
    validation = options.validation and replace(options.validation, data=())
    without_secret = replace(options, links=replace(options.links, keys=None), validation=validation)
    for name in _OF_TASK:
        if name == "model":
            graph.add(name, model, "define its classes at the top level of a module")
        elif name == "options":
            graph.add(name, without_secret, "")
        else:
            graph.add(name, getattr(without_secret, name), of_functions)


def write_validation_data(graph: GraphWriter, folder: Path, validation: Validation | None) -> bool:
    """Writes the validation data. If they cannot be sent, writes a ForwardedValidation instead and returns
    True: the caller must then read the data and forward the minibatches."""
    data = () if validation is None else without_processes(validation.data)
    if graph.may_add(data):
        return False
    assert validation is not None
    with generators_kept():
        first = parts_of(first_of(validation.data), 0)
    handed_over = folder_of_validation(folder)
    handed_over.mkdir()
    graph.add(_VALIDATION_DATA, ForwardedValidation(handed_over, first), "give tensors that can be pickled")
    return True


def folder_of_validation(folder: Path) -> Path:
    return folder / "validation"


def read_validation_data(graph: GraphReader, rank: int) -> Any:
    data = graph.read(_VALIDATION_DATA)
    return replace(data, rank=rank) if isinstance(data, ForwardedValidation) else data


def write_batch(path: Path, batch: Any) -> None:
    """Writes a minibatch for another process. The file gets its final name when it is complete."""
    content = io.BytesIO()
    HostPickler(content, None).dump(batch)
    part = path.with_suffix(".part")
    part.write_bytes(content.getvalue())
    part.rename(path)


def write_data(
    graph: GraphWriter, folder: Path, data: Iterable[Any], options: JobOptions
) -> ForwardedData | None:
    """Writes the data for the workers and returns None. If the data cannot be sent, writes and returns a
    ForwardedData instead: the caller must then forward the minibatches."""
    if graph.add_data(without_processes(data)):
        return None
    options.seed_data(base_seed(options.seed))
    begin = RngState.capture()
    forwarded = describe_forwarded(data, options.plan, options.epochs, options.microbatches)
    if not isinstance(data, PeekedData):
        begin.restore()  # the run will iterate the data from the start again
    write_part(folder, _FORWARDED, forwarded, "")
    return forwarded


def read_data(graph: GraphReader, folder: Path) -> Any:
    """Returns the data; if the caller forwards them, the ForwardedData."""
    if (folder / f"{_FORWARDED}.pickle").exists():
        return read_part(folder, _FORWARDED)
    return graph.read("data")


def write_larger(folder: Path, segment_index: int, forwarded: ForwardedData) -> None:
    """Writes the description of the forwarded data of the run's next segment (segment.py). Call it before the
    workers hear that the current segment ends, because they then look for this file."""
    content = io.BytesIO()
    HostPickler(content, None).dump(forwarded)
    (folder / _larger_name(segment_index)).write_bytes(content.getvalue())


def read_larger(folder: Path | None, segment_index: int) -> ForwardedData | None:
    """Returns the description of the forwarded data of a segment; None if the data are over, so that there is
    no such segment. Call it after the workers have heard that the previous segment ends."""
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
