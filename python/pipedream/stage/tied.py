"""Parameters tied across stages: one parameter that several stages use, with one update a minibatch.

The most upstream stage that uses it owns it. Every use of minibatch i, forward and backward, reads the same
version, vertical sync's max(0, i - n_0 + 1) where stages would differ (design.md, section 4).

    user    RECV tied_version   before the first forward of i: up to the version that i reads
            SEND tied_gradient  after the last backward of i: its gradient of i
    owner   RECV tied_gradient  before the update of i, which adds the users' to its own
            SEND tied_version   after it: version i + 1

The program says when (transfers.h); here is what is sent, and what becomes of what is received.
Version v lies in slot v mod K, K = versions kept: it is overwritten by v + K, right after the backward of the
last minibatch that reads it. Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipedream import _core
from pipedream.model.boundary import exportable
from pipedream.model.splitter import Tie
from pipedream.stage.weights import WeightVersions

__all__ = ["TiedParameters"]


class TiedParameters:
    """One stage's end of the ties it has, as owner of some and user of others."""

    def __init__(
        self,
        schedule: _core.ScheduleOptions,
        stage_index: int,
        ties: Sequence[Tie],
        versions: WeightVersions,
    ) -> None:
        """ties: those of this stage, in the order in which `versions` has their parameters."""
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
        # By owner: the newest version that has come from there.
        self._newest_received = dict.fromkeys(self._owners, schedule.first_minibatch)
        self._newest_owned = schedule.first_minibatch
        self._received: dict[int, list[Tensor]] = {}  # gradients of the next update, by user

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

    @property
    def newest_slot(self) -> int:
        """Of the newest version that is here, of all of them."""
        newest = [*self._newest_received.values(), *([self._newest_owned] if self._owned else [])]
        return self.slot_of(min(newest)) if newest else 0

    def slot_freed_by(self, minibatch: int) -> int | None:
        """The slot whose version no minibatch after this one reads, if the backwards of this one were the
        last to; it is written again by the update of this minibatch."""
        version = _core.tied_version(self._schedule, minibatch)
        read_later = version == _core.tied_version(self._schedule, minibatch + 1)
        if not self or read_later or self._versions.num_slots == 1:
            return None
        return self.slot_of(version)

    def gradients_for(self, owner: int, minibatch: int) -> list[Tensor]:
        """This stage's gradients of the minibatch, of what it shares with that owner; they are given up."""
        leaves = self._versions.leaves(self.slot_read_by(minibatch))
        return [
            exportable(_dense(_take_gradient(leaf), leaf)) for leaf in self._of(self._owners[owner], leaves)
        ]

    def take_gradients_from(self, user: int, gradients: list[Tensor]) -> None:
        """That user's part of the next update."""
        self._received[user] = gradients

    def collect(self, minibatch: int) -> list[Tensor | None]:
        """The gradients of the owned parameters, summed over all uses; the users' have come."""
        leaves = self._versions.leaves(self.slot_read_by(minibatch))
        total = {index: _take_gradient(leaves[index]) for index in self._owned}
        for user, indices in self._users.items():
            for index, gradient in zip(indices, self._received.pop(user), strict=True):
                mine = total[index]
                total[index] = gradient.clone() if mine is None else gradient + mine  # mine may be sparse
        return [total[index] for index in self._owned]

    def begin_update(self) -> tuple[int, int]:
        """(slot of the newest owned version, slot of the next)."""
        return self.slot_of(self._newest_owned), self.slot_of(self._newest_owned + 1)

    def finish_update(self) -> None:
        """The next version is written."""
        self._newest_owned += 1

    def version_for(self, user: int) -> list[Tensor]:
        """The newest version of what it shares with that user, which reads it without a copy: the slot is
        written again only after the user has had what is in it."""
        leaves = self._versions.leaves(self.slot_of(self._newest_owned))
        return [exportable(leaf) for leaf in self._of(self._users[user], leaves)]

    def take_version_from(self, owner: int, values: list[Tensor]) -> None:
        """The next version of what it shares with that owner."""
        self._newest_received[owner] += 1
        leaves = self._versions.leaves(self.slot_of(self._newest_received[owner]))
        with torch.no_grad():
            for leaf, value in zip(self._of(self._owners[owner], leaves), values, strict=True):
                leaf.copy_(value)  # of the same shape, whatever its strides

    @staticmethod
    def _of(indices: Sequence[int], leaves: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [leaves[index] for index in indices]


def _take_gradient(leaf: nn.Parameter) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
