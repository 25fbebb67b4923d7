"""Replicas of a stage reduce their gradients together, without a parameter server. Each replica has all of
the stage's parameters and the whole state of the optimizer. A round is the minibatches of one update.

    round t, at each replica
    UPDATE      the sum of all replicas' gradients (all-reduce), its mean, version t + 1 of all parameters

With sync_every = n, each replica updates weights of its own, and all replicas take the mean of their weights
once in n rounds:

    UPDATE      the weighted mean of the replica's own gradients, version t + 1 of its own weights; after
                every n-th round, and at the end of the run, the mean of all replicas' weights

Each replica then keeps an optimizer state of its own. Between two segments of a run (worker/segment.py) each
replica also keeps its own weights. If the stage owns tied parameters, it sends them after each update, whose
last step may be the mean of the weights. Each replica sends them to the replica of a using stage that has the
same microbatches.

After the all-reduce or the mean of the weights, all replicas have the same version, bit for bit. Gradients
are reduced in buckets, after the round's last backward. Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream import _core
from pipedream.links.replica_group import ReplicaGroup
from pipedream.model.layers import flat_view
from pipedream.update.gradients import RunStep, StageGradients, all_in_order
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.tied import TiedParameters
from pipedream.update.weights import StageWeights

__all__ = ["LocalSteps", "ReducedGradients"]

_BUCKET_BYTES = 4 << 20  # small tensors are joined up to this size


class _GroupGradients(StageGradients):
    """Base class for the gradients of one replica whose stage has a process group of torch.distributed."""

    takes_means = True

    def __init__(
        self,
        weights: StageWeights,
        optimizer: StageOptimizer,
        tied: TiedParameters,
        *,
        group: ReplicaGroup,
        rounds: _core.Rounds,
        replica: int,
        num_minibatches: Callable[[], int | None],
    ) -> None:
        """num_minibatches: returns the run's number of minibatches; None while it is not known here."""
        super().__init__(weights, optimizer, tied)
        self._group = group
        self._rounds = rounds
        self._replica = replica
        self._num_minibatches = num_minibatches


class ReducedGradients(_GroupGradients):
    """The gradients of a replica that updates with the mean gradient of all replicas."""

    _loss_scale = 1.0  # the factor in the round's gradients (StageRunner.loss_scale)

    def begin_last_backward(self, minibatch: int, loss_scale: float) -> None:
        self._loss_scale = loss_scale

    def take(self, minibatch: int, own_slot: int) -> None:
        """Collects the gradients of the minibatch's round, and computes their mean over all replicas. The
        mean is None for a parameter that has no gradient at any replica."""
        round_index = self._rounds.round_of(minibatch)
        leaves = self._leaves(own_slot, self._tied.owned_gradient_slot)
        gradients = [*self._weights.own.take_gradients(own_slot), *self._tied.collect()]
        flats = all_in_order(gradients, leaves, self._loss_scale)
        num_own = self._rounds.num_own_in(self._replica, round_index, self._num_minibatches())
        counts = torch.tensor([num_own, *(flat is not None for flat in flats)], dtype=torch.float64)
        counts = counts.to(self._weights.own.slots[0].device)
        self._group.all_reduce([counts])
        num_summed, *num_having = counts.tolist()
        num_minibatches = num_summed / self._rounds.num_microbatches
        used = [index for index, having in enumerate(num_having) if having > 0]
        for index in used:
            if flats[index] is None:
                flats[index] = torch.zeros_like(leaves[index].detach().flatten())
        self._taken = [None] * len(flats)
        buckets = list(_buckets_of([(index, flats[index]) for index in used]))
        flats.clear()
        self._group.all_reduce([flat for _, flat in buckets])
        for indices, flat in buckets:
            offset = flat.div_(num_minibatches).storage_offset()
            for index in indices:
                leaf = leaves[index]
                self._taken[index] = flat.as_strided(leaf.shape, leaf.stride(), offset)
                offset += leaf.numel()


class LocalSteps(_GroupGradients):
    """The gradients of a replica that updates its weights with its own gradients only. After every sync_every
    rounds it takes the mean of all replicas' weights."""

    def __init__(self, *arguments: Any, sync_every: int, **options: Any) -> None:
        """sync_every: rounds from one mean of the weights to the next."""
        super().__init__(*arguments, **options)
        self._sync_every = sync_every
        self._num_rounds = self._rounds.first_version
        self._num_own = 0  # this replica's microbatches in the round that is updated
        self._share = 1.0  # sum of the weights of these microbatches; all of a minibatch's together weigh 1

    def begin_last_backward(self, minibatch: int, loss_scale: float) -> None:
        self._share = loss_scale

    def take(self, minibatch: int, own_slot: int) -> None:
        """Collects the replica's own gradients of the minibatch's round, if the replica has a microbatch in
        it, and computes their mean."""
        round_index = self._rounds.round_of(minibatch)
        super().take(minibatch, own_slot)
        self._num_own = self._rounds.num_own_in(self._replica, round_index, self._num_minibatches())
        if self._num_own > 0 and self._share != 1.0:
            for index, gradient in enumerate(self._taken):
                if gradient is not None:
                    # This makes a new tensor, because two gradients may share memory.
                    self._taken[index] = gradient / self._share

    def apply(self, read_slot: int, write_slot: int, gradient_scale: float, run: RunStep) -> None:
        if self._num_own == 0:
            tied_read, tied_write = self._tied.begin_update()
            self._weights.own.copy_version(read_slot, write_slot)
            self._tied.copy_owned(tied_read, tied_write)
            self._finish()
        else:
            super().apply(read_slot, write_slot, gradient_scale, run)
        self._num_rounds += 1
        if self._num_rounds % self._sync_every == 0:
            self._average(write_slot)

    def finish(self, newest_slot: int, *, is_over: bool) -> None:
        if not is_over or self._num_rounds % self._sync_every == 0:
            return
        self._tied.wait_for_users(0)  # the mean overwrites memory from which the last version is sent
        self._average(newest_slot)
        # One replica of the owner stage sent this replica its tied parameters, before the owner's replicas
        # took the mean of their weights. So the replicas of this stage take the mean of these parameters,
        # too. All stages average one tied parameter at a time, so they get the same bits.
        for leaves in self._tied.newest_of_others(self._rounds.num_replicas):
            for leaf in leaves:
                self._average_leaves([leaf])

    def _average(self, slot: int) -> None:
        self._average_leaves(self._weights.own.leaves(slot))
        for leaf in self._tied.newest_owned_leaves:
            self._average_leaves([leaf])

    @torch.no_grad()
    def _average_leaves(self, leaves: Sequence[nn.Parameter]) -> None:
        flats = [flat_view(leaf.data) for leaf in leaves]
        buckets = list(_buckets_of(list(enumerate(flats))))
        self._group.all_reduce([bucket for _, bucket in buckets])
        for indices, bucket in buckets:
            mean = bucket.div_(self._group.num_replicas)
            parts = torch.split(mean, [flats[index].numel() for index in indices])
            if len(parts) > 1:  # a single part already lies in the leaf's memory
                torch._foreach_copy_([flats[index] for index in indices], list(parts))


def _buckets_of(flats: Sequence[tuple[int, Tensor | None]]) -> Iterator[tuple[list[int], Tensor]]:
    """Yields (indices, flat tensor). Joins consecutive tensors of one dtype up to _BUCKET_BYTES. A larger
    tensor stays as it is. indices: the numbers of the joined tensors."""
    bucket: list[tuple[int, Tensor]] = []

    def made() -> tuple[list[int], Tensor]:
        parts = [flat for _, flat in bucket]
        return [index for index, _ in bucket], parts[0] if len(parts) == 1 else torch.cat(parts)

    for index, flat in flats:
        assert flat is not None
        num_bytes = sum(held.nbytes for _, held in bucket) + flat.nbytes
        if bucket and (num_bytes > _BUCKET_BYTES or bucket[0][1].dtype != flat.dtype):
            yield made()
            bucket = []
        bucket.append((index, flat))
    if bucket:
        yield made()
