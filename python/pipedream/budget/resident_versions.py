"""Chooses which weight versions of a stage are in device memory, while the other versions wait in pinned host
memory.

At most three versions are in device memory: the newest, the one that a backward reads, and one that is copied
back or written. With vertical sync a forward may read yet another version, and then waits for its copy. The
worker's compute thread owns these objects.
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
    """Returns how many of a stage's weight versions stay in device memory. Returns all if offloading saves
    nothing."""
    return min(num_versions, NUM_RESIDENT_VERSIONS)


class ResidentVersions:
    """The versions of a stage that lie in device memory. Each version also has a home in host memory, and
    is copied there as soon as it is written. So a device slot may be overwritten as soon as another version
    needs it.

    In this class `version` is the index of the version's slot in the core, and `position` is the index of a
    device slot.
    """

    def __init__(self, device_slots: Sequence[Tensor], homes: Sequence[Tensor], copies: CopyStreams) -> None:
        """homes: one tensor per version kept. Device slots and homes are flat uint8 tensors of the same
        size.
        """
        self._device_slots = device_slots
        self._homes = homes
        self._copies = copies
        self._held: list[int | None] = [None] * len(device_slots)
        self._position_of_memory = {memory_of(slot): p for p, slot in enumerate(device_slots)}
        # For each version, the events of its newest copies: the copy to its home, and the copy into a device
        # slot.
        self._gone_out: dict[int, Any] = {}
        self._come_in: dict[int, Any] = {}
        self._newest: int | None = None
        self._reading: int | None = None
        self._next: int | None = None
        self.on_move: Callable[[int, int | None], None] = lambda version, position: None
        """Called with (version, position) before the version is copied or written into the device slot. The
        position is None if the version leaves the device."""

    @property
    def num_versions(self) -> int:
        return len(self._homes)

    @property
    def homes(self) -> Sequence[Tensor]:
        """The versions' places in host memory. The CPU first waits for all copies, so the places are up to
        date."""
        self._copies.finish()
        return self._homes

    def position_of(self, version: int) -> int | None:
        return self._held.index(version) if version in self._held else None

    def device_slot(self, version: int) -> Tensor:
        position = self.position_of(version)
        assert position is not None, f"version slot {version} is not in device memory, but {self._held} are"
        return self._device_slots[position]

    def version_at(self, memory: int) -> int | None:
        """Returns the version in the device slot at the address `memory`; None if no device slot begins
        there."""
        position = self._position_of_memory.get(memory)
        return None if position is None else self._held[position]

    def read(self, version: int) -> None:
        """Brings the version into device memory. Call it before the work that reads the version is given to
        the compute stream."""
        self._fetch(version)
        self._copies.wait(self._come_in.pop(version, None))
        self._reading = version
        if version == self._next:
            self._next = None

    def prefetch(self, version: int) -> None:
        """Begins to copy the version into device memory. The backward after the present one will read it."""
        self._next = version
        self._fetch(version)

    def write(self, version: int) -> None:
        """Makes room in device memory for the version. An update then computes it from the newest version.
        Call written() afterwards."""
        position = self.position_of(version)
        if position is None:
            position = self._victim()
        former = self._held[position]
        if former is not None:  # copies from and to the slot must be done before it is overwritten
            self._copies.wait(self._gone_out.get(former), self._come_in.pop(former, None))
        self._place(version, position)

    def written(self, version: int) -> None:
        self._newest = version
        # No copy still reads the home's former content, because a backward has already used that content.
        self._gone_out[version] = self._copies.out(self.device_slot(version), self._homes[version])

    def poison(self, version: int) -> None:
        """Fills the version with NaN, on the device and in host memory, because it must not be read again."""
        self._copies.finish()  # the CPU fills the home, which no copy may use then
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
        """Returns the position of a device slot that may be overwritten.

        At most three versions are needed: the newest, the one that is read, and the one that will be read
        next. The version that needs the slot becomes one of them, so one of the three slots is free."""
        if None in self._held:
            return self._held.index(None)
        wanted = {self._newest, self._reading, self._next}
        for position, version in enumerate(self._held):
            if version not in wanted:
                return position
        # The worker is about to read or write another version, so it no longer needs the version that it
        # read.
        assert self._reading not in (None, self._newest, self._next), self._held
        return self._held.index(self._reading)

    def _place(self, version: int, position: int) -> None:
        former = self._held[position]
        if former is not None and former != version:
            self.on_move(former, None)
        self._held[position] = version
        self.on_move(version, position)


def memory_of(tensor: Tensor) -> int:
    """Returns the address of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()
