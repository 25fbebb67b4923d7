"""The state of a run that has ended. Another run continues from it: `run(..., state=previous.state)`.

The state has a JSON document, which is the same at all ranks, and one part per rank with the snapshots of the
rank's stages. Under torchrun each rank has its own part in memory. Local workers write their parts into a
folder, which the next run's workers read. The folder is removed when the state is freed. A process keeps the
state of its latest run; older states stay only if the user holds them. Any thread.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.checkpoint.stage_files import read_snapshots, write_snapshot
from pipedream.model.seeding import RngState, RngStream, data_seed, seed_all
from pipedream.planning.shapes import Shapes, checked_shapes

__all__ = ["KeptState", "RunState", "WorkerState"]

_DOCUMENT = "run.json"


@dataclass(frozen=True)
class WorkerState:
    """One rank's part of the state."""

    snapshots: list[StageSnapshot]
    """One snapshot per stage of the rank; at a spare, the snapshot of its shard."""
    process: dict[str, Any]
    """The states of the process's random number generators, as JSON."""
    data: dict[str, Any] | None
    """The states of the generators that the rank's data stream draws from, as JSON. None if these are the
    process's generators, or if the stream has drawn nothing."""

    @classmethod
    def of(cls, snapshots: list[StageSnapshot], stream: RngStream | None) -> WorkerState:
        left = None if stream is None else stream.left_at()
        return cls(snapshots, RngState.capture().to_document(), None if left is None else left.to_document())

    @property
    def num_bytes(self) -> int:
        return sum(snapshot.num_bytes for snapshot in self.snapshots)

    def save(self, folder: Path, rank: int) -> None:
        own = _folder_of(folder, rank)
        own.mkdir(parents=True, exist_ok=True)
        for snapshot in self.snapshots:
            write_snapshot(own, snapshot)
        generators = {"process": self.process, "data": self.data}
        _generators_of(folder, rank).write_text(json.dumps(generators), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, rank: int) -> WorkerState:
        return cls(read_snapshots(_folder_of(folder, rank)), **_read_generators(folder, rank))


def _folder_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _generators_of(folder: Path, rank: int) -> Path:
    return _folder_of(folder, rank) / "generators.json"


def _read_generators(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_generators_of(folder, rank).read_text(encoding="utf-8"))
    return found


class RunState:
    """The state of a run that has ended. Only run() uses it, as its argument `state`."""

    def __init__(
        self,
        document: Mapping[str, Any],
        own: WorkerState | None = None,
        folder: Path | None = None,
        remove: Callable[[], None] | None = None,
    ) -> None:
        """document: JSON, the same at all ranks. own: this rank's part; None if the parts of all ranks are in
        the folder. remove: removes the folder; called when this object is destroyed."""
        self.document = dict(document)
        self._own = own
        self._folder = folder
        if remove is not None:
            weakref.finalize(self, _remove_here, os.getpid(), remove)

    @classmethod
    def load(cls, folder: Path, remove: Callable[[], None]) -> RunState:
        """Reads the document that save() wrote. The workers' parts stay in the folder until they are
        needed."""
        document = json.loads((folder / _DOCUMENT).read_text(encoding="utf-8"))
        return cls(document, folder=folder, remove=remove)

    def save(self, folder: Path) -> None:
        """Writes the document."""
        folder.mkdir(exist_ok=True)
        (folder / _DOCUMENT).write_text(json.dumps(self.document), encoding="utf-8")

    def __repr__(self) -> str:
        return f"RunState(after {self.minibatch} minibatches)"

    def __reduce__(self) -> Any:
        """Pickles the state without the ranks' parts, because local workers read their parts from the folder.
        The unpickled copy does not remove the folder."""
        return RunState, (self.document, None, self._folder)

    @property
    def minibatch(self) -> int:
        """The first minibatch of the next run, counted through all runs before it."""
        return int(self.document["minibatch"])

    @property
    def begun_at(self) -> int:
        """The minibatch before which the pipeline was last empty."""
        return int(self.document["begun_at"])

    @property
    def base_seed(self) -> int:
        return int(self.document["base_seed"])

    @property
    def kinds(self) -> tuple[Shapes, ...]:
        """The shapes of minibatches for which memory was planned, in the form of Plan.shapes_apart."""
        return tuple(checked_shapes("state", kind) for kind in self.document["kinds"])

    @property
    def is_gathered(self) -> bool:
        """Whether the trained weights were copied into the caller's model."""
        return bool(self.document["is_gathered"])

    @property
    def name(self) -> str:
        """A name that is the same at all ranks and that no other state has."""
        return f"{self.document['name']} after {self.minibatch} minibatches"

    def of_rank(self, rank: int) -> WorkerState:
        if self._own is not None:
            return self._own
        assert self._folder is not None
        return WorkerState.load(self._folder, rank)

    def restore_generators(self, rank: int, stream: RngStream | None) -> None:
        """Restores the random generators of the rank's process, and of its data stream if it has one."""
        if self._own is not None:
            process, data = self._own.process, self._own.data
        else:
            assert self._folder is not None
            process, data = _read_generators(self._folder, rank).values()
        RngState.from_document(process).restore()
        if data is not None and stream is not None:
            stream.go_on_from(RngState.from_document(data))

    def seed_data(self) -> None:
        """Sets the process's random generators to the states with which the data of the next run begin."""
        generators = self.document["data_generators"]
        if generators is None:
            seed_all(data_seed(self.base_seed))
        else:
            RngState.from_document(generators).restore()

    def check(self, settings: Mapping[str, Any], seed: int | None) -> None:
        """Raises ValueError if a run with these settings cannot continue from this state."""
        if self.document["missing"]:
            raise ValueError(f"state cannot be gone on from: {self.document['missing']}")
        multiple = int(self.document["multiple"])
        if self.minibatch % multiple:
            raise ValueError(
                f"state is of a run that ended after {self.minibatch} minibatches, in the midst of a round of"
                f" updates: a run goes on after a multiple of {multiple} minibatches alone, so give each run"
                " so many"
            )
        for name, before in self.document["settings"].items():
            if settings[name] != before:
                raise ValueError(
                    f"{name} is {settings[name]!r}, and state is of a run with {before!r}: go on with the"
                    " same, or leave state out"
                )
        if seed is not None and seed != self.document["seed"]:
            raise ValueError(
                f"seed is {seed}, and state, whose random numbers go on, is of a run with"
                f" {self.document['seed']}: leave seed out, or give the same"
            )


def _remove_here(pid: int, remove: Callable[[], None]) -> None:
    """Calls `remove`, unless this process is a forked child of the process `pid`, which owns the folder."""
    if os.getpid() == pid:
        remove()


class KeptState:
    """Holds a result's state until the process begins its next run. After that the state stays in memory only
    if the user holds it."""

    _latest: KeptState | None = None

    def __init__(self, state: RunState) -> None:
        KeptState.let_go()
        KeptState._latest = self
        self._held: RunState | None = state
        self._state = weakref.ref(state)

    @classmethod
    def let_go(cls) -> None:
        """Releases the latest run's state. Call it when another run begins."""
        if cls._latest is not None:
            cls._latest._held, cls._latest = None, None

    def get(self) -> RunState:
        """Returns the state. Raises ValueError if it is gone."""
        state = self._state()
        if state is None:
            raise ValueError(
                "the state of this run is gone, as another run has begun since: a process keeps that of its"
                " latest run; take it before, as in state = result.state"
            )
        return state
