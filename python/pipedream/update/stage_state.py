"""A stage that continues an earlier run may start with several weight versions, because the first
microbatches read older versions. So a snapshot at the end of a run has all these versions.

The slot of a version may differ between the runs. An example with three slots:

    version                                8    9    10
    slots at the end of one run            2    0    1      as the updates have written them
    slots at the start of the next         0    1    2      in the order of the versions

Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipedream import _core
from pipedream.checkpoint.snapshot import StageSnapshot, on_host
from pipedream.model.stage_module import StageModule
from pipedream.update.loss_scale import LossScaling
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.tied import TiedParameters
from pipedream.update.weights import StageWeights, WeightVersions

__all__ = ["HeldVersions", "StageStart", "take_snapshot"]

_Versions = Mapping[int, Mapping[str, Tensor]]


class HeldVersions:
    """Older versions that a continued run reads at a stage without stashing. Such a stage has one slot, which
    holds these versions one after the other. With n_s microbatches in flight at the stage, the first n_s - 1
    forwards read them. An example with one microbatch per minibatch, in which F10, B10 and U10 are the
    forward, the backward and the update of minibatch 10:

        continues at 10, n_s = 3      F10 reads 8    F11 reads 9    F12 reads 10    B10, U10
        the slot has                        8              9               10        10, 11

    Near its end a run copies such versions for the next run, as soon as the stage knows where the end is. At
    that time no update has overwritten them."""

    def __init__(self, contents: Mapping[int, Mapping[str, Tensor]] | None = None, newest: int = 0) -> None:
        """contents: by version, the copies from the previous run. newest: the version that is in the slot at
        the start."""
        self.contents = {version: dict(values) for version, values in (contents or {}).items()}
        self._newest = newest

    def __bool__(self) -> bool:
        return bool(self.contents)

    def load(self, version: int, versions: WeightVersions, slot: int) -> None:
        """Loads the version into the slot before a work item reads the slot. No version newer than the newest
        at the start is loaded. Drops the versions older than the loaded one, because no later item reads
        them."""
        version = min(version, self._newest)
        self._copy(version, versions, slot)
        self.contents = {v: values for v, values in self.contents.items() if v >= version}
        if version == self._newest:
            self.contents.clear()

    def load_newest(self, versions: WeightVersions, slot: int) -> None:
        """Loads the newest version for an evaluation. Keeps the older ones, which later items may read."""
        if self.contents:
            self._copy(self._newest, versions, slot)

    def _copy(self, version: int, versions: WeightVersions, slot: int) -> None:
        for name, leaf in versions.contents(slot).items():
            leaf.data.copy_(self.contents[version][name])  # autograd does not count a write to .data

    def keep(self, version: int, versions: WeightVersions, slot: int) -> None:
        """Copies the version that is in the slot, because the next update may overwrite the slot."""
        if version not in self.contents:
            self.contents[version] = _on_host(versions.contents(slot))


@dataclass(frozen=True)
class StageStart:
    """The versions that are in a stage's slots when its program starts."""

    slot_of: dict[int, int] = field(default_factory=lambda: {0: 0})
    """The slot of each version."""
    older: _Versions = field(default_factory=dict)
    """By slot, the contents of all versions except the newest."""
    older_tied: Mapping[int, _Versions] = field(default_factory=dict)
    """For tied parameters: by owner and by slot, the contents of all versions except the newest."""

    @classmethod
    def of(cls, schedule: _core.ScheduleOptions, stage: int, snapshot: StageSnapshot | None) -> StageStart:
        """Returns the versions with which the stage starts. snapshot: None if the run does not continue an
        earlier run."""
        newest = _core.rounds_of(schedule, stage).first_version
        oldest = _core.oldest_version(schedule, stage)
        slot_of = {version: version - oldest for version in range(oldest, newest + 1)}
        if snapshot is None:
            return cls(slot_of)
        older = {slot: snapshot.versions[version] for version, slot in slot_of.items() if version < newest}
        older_tied = {
            owner: {
                (version - max(versions)) % _core.num_tied_versions_kept(schedule, owner): content
                for version, content in versions.items()
                if version < max(versions)
            }
            for owner, versions in snapshot.tied.items()
        }
        held = None
        if not _core.stashes_versions(schedule, stage):
            held = HeldVersions({v: values for v, values in snapshot.versions.items() if v <= newest}, newest)
        return cls(slot_of, older, older_tied, held)

    held: HeldVersions | None = None
    """Versions that lie in no slot, at a stage that does not stash."""

    @property
    def newest_slot(self) -> int:
        return self.slot_of[max(self.slot_of)]


def take_snapshot(
    core: _core.Worker,
    stage: StageModule,
    weights: StageWeights,
    tied: TiedParameters,
    optimizer: StageOptimizer,
    loss_scaling: LossScaling | None,
    held: HeldVersions,
    *,
    replica: int,
    minibatch: int,
) -> StageSnapshot:
    """Copies the state of a stage. Call it when all work before the minibatch is done. held: copies of
    versions that lie in no slot. Raises ValueError for state that cannot be stored."""
    tensors, optimizer_document = optimizer.state()
    document: dict[str, Any] = {}
    if loss_scaling is not None:
        document["loss_scaling"] = loss_scaling.state(minibatch)
    kept = _copied(weights.own, core.kept_versions(stage.stage_index, minibatch))
    return StageSnapshot(
        stage.stage_index,
        replica,
        minibatch,
        versions=held.contents | kept,
        tied={
            owner: _copied(weights.tied[owner], slots) for owner, slots in tied.kept_slots(minibatch).items()
        },
        buffers={name: on_host(buffer) for name, buffer in stage.stage_buffers()},
        optimizer=tensors,
        optimizer_document=optimizer_document,
        document=document,
    )


def _copied(versions: WeightVersions, slot_of: Mapping[int, int]) -> dict[int, dict[str, Tensor]]:
    return {version: _on_host(versions.contents(slot)) for version, slot in slot_of.items()}


def _on_host(contents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: on_host(tensor) for name, tensor in contents.items()}
