"""Parameters tied across stages: one parameter that several stages use, with one update a minibatch.

The most upstream stage that uses it owns it. Every use of minibatch i, forward and backward, reads the same
version, vertical sync's max(0, i - n_0 + 1) where stages would differ (design.md, section 4).

    user    PULL  before the first forward of i: the versions up to the one it reads
            PUSH  after the last backward of i: its gradient of i
    owner   at the update of i: adds the users' gradients to its own, steps, sends version i + 1

No end waits for room: neither is more than n_0 minibatches ahead of the other, and the channels hold as many.
Version v lies in slot v mod K, K = versions kept: it is overwritten by v + K, right after the backward of the
last minibatch that reads it. Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from pipedream import _core
from pipedream.links.channels import tied_gradients_name, tied_weights_name
from pipedream.model.boundary import exportable
from pipedream.model.splitter import Tie
from pipedream.stage.weights import WeightVersions

__all__ = ["TieLinks", "TiedParameters"]


class TieLinks:
    """The ways from a worker's stages to those that they share parameters with: by the core's channels, or
    from hand to hand between two stages of this worker, whose program has them in the right order."""

    def __init__(self, core: _core.Worker, schedule: _core.ScheduleOptions) -> None:
        self._core = core
        self._schedule = schedule
        self._in_hand: defaultdict[str, deque[list[Tensor]]] = defaultdict(deque)

    def send(self, channel: str, ends: tuple[int, int], tensors: list[Tensor]) -> None:
        """ends: the two stages. The tensors are read later, without a copy."""
        if self._is_local(ends):
            self._in_hand[channel].append(tensors)
        else:
            self._core.send_item(channel, [to_dlpack(exportable(tensor)) for tensor in tensors])

    def receive(self, channel: str, ends: tuple[int, int]) -> list[Tensor]:
        if self._is_local(ends):
            return self._in_hand[channel].popleft()
        item = self._core.receive_item(channel)
        assert item is not None  # there is no time-out
        return [from_dlpack(capsule) for capsule in item.take_tensors()]

    def _is_local(self, ends: tuple[int, int]) -> bool:
        first, second = ends
        placement = self._schedule.placement
        return placement.rank_of(first) == placement.rank_of(second)


class TiedParameters:
    """One stage's end of the ties it has, as owner of some and user of others."""

    def __init__(
        self,
        links: TieLinks,
        schedule: _core.ScheduleOptions,
        stage_index: int,
        ties: Sequence[Tie],
        versions: WeightVersions,
    ) -> None:
        """ties: those of this stage, in the order in which `versions` has their parameters."""
        self._links = links
        self._schedule = schedule
        self._stage = stage_index
        self._versions = versions
        self._owned = [index for index, tie in enumerate(ties) if tie.stages[0] == stage_index]
        # The other stage -> positions of the parameters that travel between the two.
        self._users: dict[int, list[int]] = {}
        self._owners: dict[int, list[int]] = {}
        for index, tie in enumerate(ties):
            if tie.stages[0] != stage_index:
                self._owners.setdefault(tie.stages[0], []).append(index)
                continue
            for user in tie.stages[1:]:
                self._users.setdefault(user, []).append(index)
        self._newest_pulled = 0
        self._newest_owned = 0

    def __bool__(self) -> bool:
        return bool(self._users or self._owners)

    @property
    def owned(self) -> list[int]:
        """Positions of the tied parameters that this stage updates."""
        return self._owned

    def slot_of(self, version: int) -> int:
        return version % self._versions.num_slots

    def slot_read_by(self, minibatch: int) -> int:
        return self.slot_of(_core.tied_version(self._schedule, minibatch)) if self else 0

    def pull_for(self, minibatch: int) -> None:
        """Waits until the version that the minibatch reads is here."""
        if self._owners:
            self._pull_until(_core.tied_version(self._schedule, minibatch))

    def pull_last(self, num_minibatches: int) -> None:
        """Waits for the final version, which no minibatch reads."""
        if self._owners:
            self._pull_until(num_minibatches)

    @property
    def newest_slot(self) -> int:
        """Of the newest version that is here."""
        return self.slot_of(max(self._newest_pulled, self._newest_owned)) if self else 0

    def slot_freed_by(self, minibatch: int) -> int | None:
        """The slot whose version no minibatch after this one reads, if the backwards of this one were the
        last to; it is written again by the update of this minibatch."""
        version = _core.tied_version(self._schedule, minibatch)
        read_later = version == _core.tied_version(self._schedule, minibatch + 1)
        if not self or read_later or self._versions.num_slots == 1:
            return None
        return self.slot_of(version)

    def push(self, minibatch: int) -> None:
        """Sends the owners this stage's gradients of the minibatch."""
        if not self._owners:
            return
        gradients = self._versions.take_gradients(self.slot_read_by(minibatch))
        leaves = self._versions.leaves(0)
        for owner, indices in self._owners.items():
            sent = [_dense(gradients[index], leaves[index]) for index in indices]
            self._links.send(tied_gradients_name(owner, self._stage), (owner, self._stage), sent)

    def collect(self, minibatch: int) -> list[Tensor | None]:
        """The gradients of the owned parameters, summed over all uses; waits for the users'."""
        if not self._owned:
            return []
        slot = self.slot_read_by(minibatch)
        leaves = self._versions.leaves(slot)
        total = {index: leaves[index].grad for index in self._owned}
        for index in self._owned:
            leaves[index].grad = None
        for user, indices in self._users.items():
            received = self._links.receive(tied_gradients_name(self._stage, user), (self._stage, user))
            for index, gradient in zip(indices, received, strict=True):
                mine = total[index]
                total[index] = gradient.clone() if mine is None else gradient + mine  # mine may be sparse
        return [total[index] for index in self._owned]

    def begin_update(self) -> tuple[int, int]:
        """(slot of the newest owned version, slot of the next)."""
        return self.slot_of(self._newest_owned), self.slot_of(self._newest_owned + 1)

    def publish(self) -> None:
        """The next version is written: the users get it."""
        if not self._owned:
            return
        self._newest_owned += 1
        leaves = self._versions.leaves(self.slot_of(self._newest_owned))
        for user, indices in self._users.items():
            # Read without a copy: the slot is written again only after the user has had what is in it.
            sent = [leaves[index].detach() for index in indices]
            self._links.send(tied_weights_name(self._stage, user), (self._stage, user), sent)

    def _pull_until(self, version: int) -> None:
        while self._newest_pulled < version:
            self._newest_pulled += 1
            leaves = self._versions.leaves(self.slot_of(self._newest_pulled))
            with torch.no_grad():
                for owner, indices in self._owners.items():
                    ends = (owner, self._stage)
                    received = self._links.receive(tied_weights_name(*ends), ends)
                    for index, value in zip(indices, received, strict=True):
                        leaves[index].copy_(value)  # of the same shape, whatever its strides


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
