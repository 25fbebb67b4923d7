"""Parameters may be tied across stages: several stages use one parameter, and one of them, the owner, updates
it once per round. A round is the minibatches of one update.

The owner is the most upstream stage that uses the parameter. All uses of a microbatch, forward and backward,
read the same version. If the schedule lets stages read different versions of their own weights, that is the
version which vertical sync would read at the owner (docs/schedules.md).

    user    RECV tied_version   before a forward: versions up to the one that the forward reads
            SEND tied_gradient  after its last backward of a minibatch: its gradient of that minibatch
    owner   RECV tied_gradient  after its own last backward of the minibatch: adds the users' gradients
            SEND tied_version   after the update of the round: the next version

With replicas, the gradient goes to the owner's replica that has the sender's last microbatch of the
minibatch. Each replica of the owner sends every replica of a user the pieces of the version that it has
updated. The core's program says when each transfer happens (transfers.h). This module gives the core the
tensors to send, and stores received tensors.

There are K slots, with autograd leaves as in weights.py. Version v lies in slot (v - v0) mod K, where v0 is
the version at the start. Version v + K overwrites version v, right after the last backward that reads version
v. The gradients of a round are in the leaves of the version that was read last. Owned by the worker's compute
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipedream import _core
from pipedream.model.boundary import exportable
from pipedream.model.stage_module import Tie
from pipedream.update.averages import Averages
from pipedream.update.shards import Piece, piece_of, whole_pieces
from pipedream.update.weights import WeightVersions

__all__ = ["TiedParameters", "ties_by_owner"]

_NO_TENSOR = torch.zeros(1, dtype=torch.uint8)  # stands for the pieces of a replica that has none


def ties_by_owner(stage_index: int, ties: Sequence[Tie]) -> dict[int, list[Tie]]:
    """Returns the stage's ties by their owners, in the order of the owners."""
    found: dict[int, list[Tie]] = {}
    for tie in ties:
        if stage_index in tie.stages:
            found.setdefault(tie.stages[0], []).append(tie)
    return dict(sorted(found.items()))


class _Group:
    """The parameters that a stage shares with one owner stage, and that get new versions together. The owner
    may be the stage itself.
    """

    def __init__(
        self,
        schedule: _core.ScheduleOptions,
        owner: int,
        versions: WeightVersions,
        pieces: Sequence[Sequence[Piece]],
    ) -> None:
        """pieces: the pieces of these parameters that each replica of the owner sends."""
        self._schedule = schedule
        self.owner = owner
        self.versions = versions
        self.pieces = pieces
        self._first = _core.rounds_of(schedule, owner).first_version
        self.gradient_slot = 0
        """The slot of the version that the latest backward read."""
        self.newest_of = [self._first] * len(pieces)
        """By replica of the owner, the newest version that it has sent. If this stage is the owner, the
        newest version that this replica has made."""
        self.whole_version: Callable[[], int] | None = None
        """Returns the newest version of which all shards are here. None unless the stage owns the parameters
        and has replicas with shards."""

    def slot_of(self, version: int) -> int:
        return (version - self._first) % self.versions.num_slots

    def slot_read_by(self, minibatch: int, microbatch: int = 0) -> int:
        return self.slot_of(_core.tied_version(self._schedule, self.owner, minibatch, microbatch))

    def kept_from(self, minibatch: int) -> range:
        """Returns the versions that are kept for this minibatch and later ones, from the oldest to the
        newest."""
        oldest = _core.tied_version(self._schedule, self.owner, minibatch)
        return range(oldest, self.newest + 1)

    def slot_at(self, boundary: int) -> int:
        return self.slot_of(_core.rounds_of(self._schedule, self.owner).num_begun(0, boundary))

    def take_gradients(self) -> list[Tensor | None]:
        """Takes the gradients that backwards have accumulated, summed over the leaves of all versions."""
        found: list[Tensor | None] = [None] * len(self.versions.leaves(0))
        for slot in range(self.versions.num_slots):
            of_slot = self.versions.take_gradients(slot)
            found = [_sum(one, other) for one, other in zip(found, of_slot, strict=True)]
        return found

    @property
    def newest(self) -> int:
        """The newest version of which this worker has all pieces."""
        return min(self.newest_of) if self.whole_version is None else self.whole_version()

    def views(self, slot: int, pieces: Sequence[Piece]) -> list[Tensor]:
        self.versions.settle(slot)
        leaves = self.versions.leaves(slot)
        return [piece_of(leaves[piece.parameter], piece) for piece in pieces]


class TiedParameters:
    """The tied parameters of one stage, which owns some of them and uses others."""

    def __init__(
        self,
        schedule: _core.ScheduleOptions,
        stage_index: int,
        ties: Sequence[Tie],
        versions: Mapping[int, WeightVersions],
        *,
        replica: int = 0,
        pieces: Mapping[int, Sequence[Sequence[Piece]]] | None = None,
        wait_until_sent: Callable[[int, int], None] | None = None,
        averages: Averages | None = None,
    ) -> None:
        """ties: the ties of this stage.
        versions: by owner, the versions of the parameters in the order of the ties.
        replica: this worker's replica of the stage.
        pieces: for owners with several shards, the pieces of this stage's parameters that each replica of the
            owner sends. From an owner without an entry one replica sends whole parameters.
        wait_until_sent: called as wait_until_sent(user, n). It waits until at most n versions are still to be
            sent to the user.
        averages: takes the versions that come from owners."""
        self._schedule = schedule
        self._stage = stage_index
        self._replica = replica
        self._wait_until_sent = wait_until_sent
        self._averages = averages
        by_owner = ties_by_owner(stage_index, ties)
        self._groups = {
            owner: _Group(
                schedule,
                owner,
                versions[owner],
                (pieces or {}).get(owner) or [whole_pieces(versions[owner].leaves(0))],
            )
            for owner in by_owner
        }
        # For each stage that uses parameters of this stage, the positions of these parameters.
        self._users: dict[int, list[int]] = {}
        for index, tie in enumerate(by_owner.get(stage_index, ())):
            for user in tie.stages[1:]:
                self._users.setdefault(user, []).append(index)
        self._owned = self._groups.get(stage_index)
        self._received: dict[int, list[Tensor | None]] = {}  # gradients of the next update, by user
        self._num_replicas = schedule.placement.num_replicas
        self._has_replicas = any(
            schedule.placement.num_replicas(stage) > 1 for stage in (stage_index, *self._users, *self._groups)
        )

    def __bool__(self) -> bool:
        return bool(self._groups)

    def take_shards_by(self, whole_version: Callable[[], int]) -> None:
        """Tells this object that the core writes the other replicas' shards of the owned parameters into
        their slots. whole_version: returns the newest version of which all shards are here."""
        if self._owned is not None:
            self._owned.whole_version = whole_version

    @property
    def owners(self) -> list[int]:
        """The stages that own tied parameters which this stage uses. This stage may be one of them."""
        return list(self._groups)

    @property
    def owned(self) -> WeightVersions | None:
        """The versions of the tied parameters that this stage updates."""
        return None if self._owned is None else self._owned.versions

    def owned_leaves(self, slot: int) -> list[nn.Parameter]:
        return [] if self._owned is None else self._owned.versions.leaves(slot)

    @property
    def newest_owned_leaves(self) -> list[nn.Parameter]:
        """The leaves of the version that this replica has made last."""
        return [] if self._owned is None else self.owned_leaves(self._owned.slot_of(self._newest_owned))

    def newest_of_others(self, num_replicas: int) -> list[list[nn.Parameter]]:
        """Returns, for each other stage that owns tied parameters of this stage, the leaves of their newest
        version. num_replicas: only owners with this number of replicas are returned."""
        return [
            group.versions.leaves(group.slot_of(group.newest))
            for owner, group in self._groups.items()
            if owner != self._stage and self._num_replicas(owner) == num_replicas
        ]

    def copy_owned(self, read_slot: int, write_slot: int) -> None:
        if self._owned is not None:
            self._owned.versions.copy_version(read_slot, write_slot)

    @property
    def owned_gradient_slot(self) -> int:
        """The slot of the version of owned parameters that the latest backward read."""
        return 0 if self._owned is None else self._owned.gradient_slot

    def slots_read_by(self, minibatch: int, microbatch: int = 0) -> dict[int, int]:
        """Returns by owner the slot that the microbatch reads."""
        return {owner: group.slot_read_by(minibatch, microbatch) for owner, group in self._groups.items()}

    def slots_at(self, boundary: int) -> dict[int, int]:
        """Returns by owner the slot of the version that the minibatches before this boundary have made
        (stage/boundaries.py)."""
        return {owner: group.slot_at(boundary) for owner, group in self._groups.items()}

    def begin_backward(self, minibatch: int, microbatch: int) -> None:
        """Moves the round's gradients so far to the leaves of the version that this backward reads, because
        the backward adds its own gradients there."""
        for group in self._groups.values():
            slot = group.slot_read_by(minibatch, microbatch)
            if slot != group.gradient_slot:
                group.versions.move_gradients(group.gradient_slot, slot)
                group.gradient_slot = slot

    def separate_gradients(self) -> None:
        for group in self._groups.values():
            group.versions.separate_gradients(group.gradient_slot)

    def rescale(self, factor: float) -> None:
        if self._owned is None:
            return
        self._owned.versions.scale_gradients(self._owned.gradient_slot, factor)
        for user, received in self._received.items():
            self._received[user] = [None if part is None else part * factor for part in received]

    def kept_slots(self, minibatch: int) -> dict[int, dict[int, int]]:
        """Returns by owner the versions that a run needs if it continues with this minibatch, and the slot of
        each. Call it when all updates before the minibatch are here."""
        return {
            owner: {version: group.slot_of(version) for version in group.kept_from(minibatch)}
            for owner, group in self._groups.items()
        }

    def kept_owned_slots(self, minibatch: int) -> dict[int, int]:
        """Returns the owned versions that a run needs if it continues with this minibatch, and the slot of
        each. This replica may have only its own shard of the newest version."""
        if self._owned is None:
            return {}
        oldest = self._owned.kept_from(minibatch).start
        versions = range(oldest, self._newest_owned + 1)
        return {version: self._owned.slot_of(version) for version in versions}

    @property
    def newest_slots(self) -> dict[int, int]:
        """Returns by owner the slot of the newest version of which all shards are here."""
        return {owner: group.slot_of(group.newest) for owner, group in self._groups.items()}

    def poison_freed_by(self, minibatch: int, microbatch: int = 0) -> None:
        """Fills a version with NaN after the replica's last microbatch that reads it. A later update writes
        the slot again. If there are replicas, owned versions are not filled, because they may still be sent
        to another replica."""
        next_minibatch, next_microbatch = self._own_after(minibatch, microbatch)
        for owner, group in self._groups.items():
            version = _core.tied_version(self._schedule, owner, minibatch, microbatch)
            oldest = _core.oldest_tied_version(self._schedule, owner, next_minibatch, next_microbatch)
            is_leaving = group is self._owned and self._has_replicas
            if version < oldest and group.versions.num_slots > 1 and not is_leaving:
                group.versions.poison(group.slot_of(version))

    def _own_after(self, minibatch: int, microbatch: int) -> tuple[int, int]:
        """Returns the (minibatch, microbatch) that this replica has after the given one."""
        m = self._schedule.num_microbatches
        return divmod(minibatch * m + microbatch + self._num_replicas(self._stage), m)

    def gradients_for(self, owner: int) -> list[Tensor]:
        """Takes this stage's gradients of a minibatch for the parameters that it shares with the owner. The
        first tensor says which parameters have a gradient, because an optimizer skips a parameter without any
        gradient."""
        group = self._groups[owner]
        leaves, gradients = group.versions.leaves(group.gradient_slot), group.take_gradients()
        are_there = [gradient is not None for gradient in gradients]
        flags = torch.tensor(are_there, dtype=torch.uint8, device=leaves[0].device)
        pairs = zip(gradients, leaves, strict=True)
        return [flags, *(exportable(_dense(gradient, leaf)) for gradient, leaf in pairs)]

    def take_gradients_from(self, user: int, received: list[Tensor]) -> None:
        """Adds the user's gradients of one minibatch to the gradients of the next update."""
        flags, *content = received
        gradients = [g if is_there else None for g, is_there in zip(content, flags.tolist(), strict=True)]
        before = self._received.get(user)
        if before is not None:
            gradients = [_sum(one, other) for one, other in zip(before, gradients, strict=True)]
        self._received[user] = gradients

    def collect(self) -> list[Tensor | None]:
        """Takes the gradients of the owned parameters, summed over all uses. Call it after the users'
        gradients have been received."""
        if self._owned is None:
            return []
        total = self._owned.take_gradients()
        for user, indices in self._users.items():
            for index, gradient in zip(indices, self._received.pop(user, ()), strict=False):
                if gradient is not None:
                    mine = total[index]
                    # `mine` is the right operand, because torch adds a sparse tensor only there.
                    total[index] = gradient.clone() if mine is None else gradient + mine
        return total

    def begin_update(self) -> tuple[int, int]:
        """Returns (slot of the newest owned version, slot of the next). The second slot still holds an old
        version, so this waits until that version has been sent to all users."""
        if self._owned is None:
            return 0, 0
        newest = self._newest_owned
        self.wait_for_users(self._owned.versions.num_slots - 1)
        return self._owned.slot_of(newest), self._owned.slot_of(newest + 1)

    def wait_for_users(self, num_left_max: int) -> None:
        """Waits until at most num_left_max owned versions are still to be sent to each user."""
        if self._wait_until_sent is not None:
            for user in self._users:
                self._wait_until_sent(user, num_left_max)

    def finish_update(self) -> None:
        """Ends an update. Call it when the next version is written."""
        if self._owned is not None:
            self._owned.newest_of[self._own_index] += 1

    def version_for(self, user: int) -> list[Tensor]:
        """Returns this replica's pieces of the newest version of the parameters that the user shares. The
        core sends contiguous pieces from their slot, without a copy."""
        assert self._owned is not None
        shared = self._users[user]
        pieces = [piece for piece in self._owned.pieces[self._own_index] if piece.parameter in shared]
        views = self._owned.views(self._owned.slot_of(self._newest_owned), pieces)
        return [exportable(view) for view in views] or [_NO_TENSOR]

    def take_version_from(self, owner: int, replica: int, values: list[Tensor]) -> None:
        """Stores a replica's pieces of the next version of the parameters that this stage shares with the
        owner."""
        group = self._groups[owner]
        index = replica if len(group.pieces) > 1 else 0
        group.newest_of[index] += 1
        pieces = group.pieces[index]
        views = group.views(group.slot_of(group.newest_of[index]), pieces)
        with torch.no_grad():
            for view, value in zip(views, values[: len(views)], strict=True):
                view.copy_(value)  # the shape is the same, the strides may differ
        if self._averages is not None:
            self._averages.add_used(owner, index, pieces, views)

    @property
    def _own_index(self) -> int:
        assert self._owned is not None
        return self._replica if len(self._owned.pieces) > 1 else 0

    @property
    def _newest_owned(self) -> int:
        """The newest version that this replica has made."""
        assert self._owned is not None
        return self._owned.newest_of[self._own_index]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
