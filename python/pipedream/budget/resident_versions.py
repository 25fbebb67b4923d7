"""The weight versions of a stage that lie in device memory while the others wait in pinned host memory.

Three versions are there at most: the newest, the one that a backward reads, and the one that comes back or is
written. (A forward of vertical sync that reads another one waits for its copy.) Owned by the worker's compute
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pipedream.budget.copy_streams import CopyStreams

__all__ = ["ResidentVersions", "memory_of", "num_resident_versions"]

NUM_RESIDENT_VERSIONS = 3

_POISON = 0xFF  # bytes that are NaN as a float of any width


def num_resident_versions(num_versions: int) -> int:
    """How many of a stage's weight versions stay in device memory; all where offloading saves nothing."""
    return min(num_versions, NUM_RESIDENT_VERSIONS)


class ResidentVersions:
    """The versions of a stage that lie in device memory. Each has its home in host memory, written as soon as
    the version is; a device slot that is wanted for another is overwritten, as nothing is lost.

    A version goes by the slot that the core gives it, a device slot by its position.
    """

    def __init__(self, device_slots: Sequence[Tensor], homes: Sequence[Tensor], copies: CopyStreams) -> None:
        """homes: one per version kept. The slots are flat uint8 tensors of one size."""
        self._device_slots = device_slots
        self._homes = homes
        self._copies = copies
        self._held: list[int | None] = [None] * len(device_slots)
        self._position_of_memory = {memory_of(slot): p for p, slot in enumerate(device_slots)}
        # By version: the copies after which its home is whole, and it is here.
        self._gone_out: dict[int, Any] = {}
        self._come_in: dict[int, Any] = {}
        self._newest: int | None = None
        self._reading: int | None = None
        self._next: int | None = None
        self.on_move: Callable[[int, int | None], None] = lambda version, position: None
        """Told (version, its position or None for nowhere) before a copy or a write begins."""

    @property
    def num_versions(self) -> int:
        return len(self._homes)

    @property
    def homes(self) -> Sequence[Tensor]:
        """The versions' places in host memory, with all that was written. The CPU waits for the copies."""
        self._copies.finish()
        return self._homes

    def position_of(self, version: int) -> int | None:
        return self._held.index(version) if version in self._held else None

    def device_slot(self, version: int) -> Tensor:
        position = self.position_of(version)
        assert position is not None, f"version slot {version} is not in device memory, but {self._held} are"
        return self._device_slots[position]

    def version_at(self, memory: int) -> int | None:
        """The version in the device slot at an address; None for other memory."""
        position = self._position_of_memory.get(memory)
        return None if position is None else self._held[position]

    def read(self, version: int) -> None:
        """Brings the version into device memory. Call it before the compute stream is given work that reads
        the version."""
        self._fetch(version)
        self._copies.wait(self._come_in.pop(version, None))
        self._reading = version
        if version == self._next:
            self._next = None

    def prefetch(self, version: int) -> None:
        """The version that a backward will read next, after the one that is read now."""
        self._next = version
        self._fetch(version)

    def write(self, version: int) -> None:
        """Makes room in device memory for the version, which is then written from the newest one. written()
        follows."""
        position = self.position_of(version)
        if position is None:
            position = self._victim()
        former = self._held[position]
        if former is not None:  # the copies of what lies there are done before it is overwritten
            self._copies.wait(self._gone_out.get(former), self._come_in.pop(former, None))
        self._place(version, position)

    def written(self, version: int) -> None:
        self._newest = version
        # A backward has read what the home held before, so the copy from there is done.
        self._gone_out[version] = self._copies.out(self.device_slot(version), self._homes[version])

    def poison(self, version: int) -> None:
        """Nobody may read the version any more: whoever does gets NaN, here and at home."""
        self._copies.finish()  # the CPU fills the home
        if self.position_of(version) is not None:
            self.device_slot(version).fill_(_POISON)
        self._homes[version].fill_(_POISON)

    def _fetch(self, version: int) -> None:
        if self.position_of(version) is not None:
            return
        position = self._victim()
        former = self._held[position]
        after = [self._gone_out.get(version), None if former is None else self._gone_out.get(former)]
        self._place(version, position)
        slot = self._device_slots[position]
        self._come_in[version] = self._copies.into(self._homes[version], slot, *after)

    def _victim(self) -> int:
        """A device slot whose content nobody needs soon. There is one: three are held at most by those who
        ask, and the one who asks now holds none."""
        if None in self._held:
            return self._held.index(None)
        wanted = {self._newest, self._reading, self._next}
        for position, version in enumerate(self._held):
            if version not in wanted:
                return position
        # What was read last is needed no longer by whoever reads or writes another one now.
        assert self._reading not in (None, self._newest, self._next), self._held
        return self._held.index(self._reading)

    def _place(self, version: int, position: int) -> None:
        former = self._held[position]
        if former is not None and former != version:
            self.on_move(former, None)
        self._held[position] = version
        self.on_move(version, position)


def memory_of(tensor: Tensor) -> int:
    """The address of its storage."""
    return tensor.untyped_storage().data_ptr()
