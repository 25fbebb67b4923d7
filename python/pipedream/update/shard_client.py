"""Makes a replica the client of its stage's shards. The replica pushes its gradients to the owners of the
shards, and pulls the versions that the owners make.

The core sends and receives (csrc/param_server/shard_exchange.h). On the host, gradients are pushed during
the backward that completes them (pushes.py). param_server.py shows how an owner updates its shard. A round is
the minibatches of one update. Owned by the worker's compute thread.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pipedream import _core
from pipedream.budget.footprint import storage_bytes
from pipedream.common.regions import Region
from pipedream.links.replica_channels import ReplicaChannels
from pipedream.model.boundary import TENSORS
from pipedream.update.factors import FactorExchange
from pipedream.update.gradients import StageGradients, all_in_order
from pipedream.update.pushes import EarlyPushes
from pipedream.update.shards import Piece, ShardLayout
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.tied import TiedParameters
from pipedream.update.weights import StageWeights

__all__ = ["ShardClient"]

_Leaving = dict[int, tuple["weakref.ref[torch.UntypedStorage]", int]]
"""The memory of pushed gradients: weak references to storages, with their bytes, by the reference's id()."""


class ShardClient(StageGradients):
    """Pushes one replica's gradients, and pulls the shards of the other owners."""

    takes_means = True

    def __init__(
        self,
        weights: StageWeights,
        optimizer: StageOptimizer,
        tied: TiedParameters,
        *,
        core: _core.Worker,
        layout: ShardLayout,
        rounds: _core.Rounds,
        replica: int,
        channels: ReplicaChannels,
        push_codec: str = "none",
        push_slots: Sequence[Tensor] = (),
        factors: FactorExchange | None = None,
        slot_of: Mapping[int, int] | None = None,
    ) -> None:
        """optimizer: updates the pieces of this replica's shard only.
        push_codec: the codec of the push channels.
        push_slots: slots of zeroed memory for pushes, each of ShardLayout.push_slot_bytes(). Each round whose
        pushes are unfinished takes one, so their number bounds these rounds.
        factors: exchanges the gradients of the weights in layout.shared.
        slot_of: the slot of each version at the start. None: slot 0 has the newest, the only version."""
        super().__init__(weights, optimizer, tied)
        self.layout = layout
        self._core = core
        self._rounds = rounds
        self._replica = replica
        self._channels = channels
        self._factors = factors
        self._others = sorted(channels.push_to)
        self._own_chunks = layout.leaving_chunks_of(replica)
        self._steps_by_element = not layout.whole_tensors  # such an optimizer keeps no gradients
        self._poisons = _core.poisons_released_slots()
        self._slot_of = dict(slot_of or {rounds.first_version: 0})
        self._push_slots = push_slots
        self._exchange = self._make_exchange(layout, push_codec)
        tied.take_shards_by(self._exchange.whole_version)
        self._loss_scale = 1.0  # the factor of the round's gradients (StageRunner.loss_scale)
        self._pushed: list[weakref.ref[torch.UntypedStorage]] = []  # storages of pushed gradients
        self._late: _Leaving = {}
        """The pushed gradients that were not sent yet when the round's last backward began."""
        self._has_pushed = False  # whether push() was called since the last wait for a free push slot
        self._pushes = EarlyPushes(
            self._exchange,
            len(self._leaves(0, 0)),
            () if factors is None else factors.parameters,
            # The leaves' hooks hold the pushes, and this object holds the leaves. So a strong reference to
            # this object would make a cycle.
            functools.partial(type(self)._push_factors, weakref.proxy(self)),
        )
        # On a GPU the hooks run on autograd's own threads, but only the worker's compute thread may call the
        # core.
        self._pushes_early = weights.own.slots[0].device.type == "cpu"
        if self._pushes_early:
            for slot in range(weights.own.num_slots):
                for parameter, leaf in enumerate(weights.own.leaves(slot)):
                    hook = functools.partial(self._pushes.accumulated, parameter)
                    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _make_exchange(self, layout: ShardLayout, push_codec: str) -> _core.ShardExchange:
        channels, tied = self._channels, self._tied.owned
        return self._core.make_exchange(
            tensors=TENSORS,
            rounds=self._rounds,
            replica=self._replica,
            shard=layout.row_of(self._replica),
            peers={
                other: (layout.row_of(other), channels.of(other), other in channels.posted_from)
                for other in channels.others
            },
            own_slots=[slot.data_ptr() for slot in self._weights.own.slots],
            tied_slots=[] if tied is None else [slot.data_ptr() for slot in tied.slots],
            push_slots=[slot.data_ptr() for slot in self._push_slots],
            push_codec=push_codec,
            slot_of=self._slot_of,
            keeps_gradients=layout.whole_tensors,
            holds_versions=layout.num_shards > self._rounds.num_replicas,
            posts_early=not self._poisons,
        )

    @property
    def around_backward(self) -> Region | None:
        return None if self._factors is None else self._factors.around_backward

    @property
    def received_channels(self) -> list[str]:
        """The channels on which the gradients and versions of other replicas arrive."""
        return self._channels.received

    def running(self) -> AbstractContextManager[None]:
        return super().running() if self._factors is None else self._factors.running()

    # Pushing.

    def begin_backward(self) -> None:
        """Waits until a push slot is free. One is usually free. The previous update waited for the other
        replicas' gradients, and in that time this replica can send about as many bytes."""
        if self._has_pushed:
            self._has_pushed = False
            self._exchange.wait_for_pushes(len(self._push_slots) - 1)

    def begin_last_backward(self, minibatch: int, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        num_minibatches = self._core.num_minibatches()
        if self._pushes_early and self._rounds.is_over_after(self._replica, minibatch, num_minibatches):
            self._late = self._leaving()
            self._pushes.begin(loss_scale, self._num_own(self._rounds.round_of(minibatch)))

    def push(self, minibatch: int, own_slot: int) -> None:
        """Sends this replica's gradients of the minibatch's round to the owners of the shards. Chunks that
        were sent during the backward are not sent again. own_slot: the slot of the version that the round's
        last backward read."""
        round_index = self._rounds.round_of(minibatch)
        num_own = self._num_own(round_index)
        own = self._take_gradients(own_slot)
        self._note_pushed(own)
        if self._factors is not None:
            if not self._factors.has_pushed:
                self._push_factors(num_own)
            self._factors.end_push(round_index)
        self._exchange.push(round_index, own, num_own)
        self._pushes.end()
        self._late = {}
        self._has_pushed = True

    def _push_factors(self, num_summed: int) -> None:
        """Pushes the factors of a round. Call it when all of them are complete. num_summed: the number of
        microbatches whose gradients are summed."""
        assert self._factors is not None
        item = self._factors.begin_push()
        self._note_pushed(item)
        self._exchange.push_factors(item, num_summed)

    def _note_pushed(self, tensors: Sequence[Tensor | None]) -> None:
        self._pushed = [ref for ref in self._pushed if ref() is not None]
        self._pushed += [weakref.ref(part.untyped_storage()) for part in tensors if part is not None]

    def num_bytes(self, own_slot: int) -> int:
        """Returns the bytes of gradients, including factors and pushed gradients that are not sent yet.
        Gradients that were unsent when the round's last backward began count until push() is over. They may
        have been in memory together with all gradients of that backward."""
        left_bytes = 0 if self._factors is None else self._factors.num_bytes
        pushed = self._late | self._leaving()
        copies = self._pushes.gradients.values() if self._loss_scale != 1.0 else ()
        left_bytes += storage_bytes([*copies]) + sum(num_bytes for _, num_bytes in pushed.values())
        return super().num_bytes(own_slot) + left_bytes

    def _leaving(self) -> _Leaving:
        return {id(ref): (ref, storage.nbytes()) for ref in self._pushed if (storage := ref()) is not None}

    def _num_own(self, round_index: int) -> int:
        return self._rounds.num_own_in(self._replica, round_index, self._core.num_minibatches())

    def _take_gradients(self, own_slot: int) -> list[Tensor | None]:
        """Takes the round's gradients of all parameters. Each is flat, in the parameter's order in memory,
        and without the loss scale."""
        leaves = self._leaves(own_slot, self._tied.owned_gradient_slot)
        gradients = [*self._weights.own.take_gradients(own_slot), *self._tied.collect()]
        early = self._pushes.gradients
        if self._factors is not None:
            self._factors.check(gradients)
        for index in early:
            gradients[index] = None
        own = all_in_order(gradients, leaves, self._loss_scale)
        for index, gradient in early.items():
            own[index] = gradient
        return own

    def whole_slot(self, newest_slot: int) -> int:
        """Returns the slot of the newest version whose shards have all been pulled."""
        slot = self._exchange.whole_slot()
        return newest_slot if slot is None else slot

    def _shaped(self, gradient: Tensor, piece: Piece) -> Tensor:
        """Returns the gradient in the form that the optimizer takes: flat for a piece, or in the shape of a
        whole parameter."""
        leaf = self._leaves(0, 0)[piece.parameter]
        return gradient.as_strided(leaf.shape, leaf.stride()) if piece.is_whole else gradient
