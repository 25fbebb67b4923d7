"""Trains with asynchronous shards (sync="asp"). The order in which each shard received its gradients must be
given, because it depends on time.

    forward of a stage   runs when the version that the microbatch reads is complete, in the order of the
                         replica's own microbatches
    backward             runs when the last stage's forward has finished
    a gradient           is applied at each shard, after all earlier gradients in the shard's order

A shard consists of parts, which are updated one after another. Each part has its own optimizer, which steps
all parameters of the stage; only the part's elements of the result are used.

A replica's gradient is the sum over its microbatches in a round, divided by the sum of their shares. Version
j + 1 of a replica has each part as it was right after the replica's gradient of round j was applied. After a
drain, the newest version of every replica has the gradients of all replicas.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipedream.model.boundary import check_loss, map_tensors, to_device
from pipedream.reference.stages import cross
from pipedream.reference.trainer import Trainer
from pipedream.reference.updates import Updater
from pipedream.reference.versions import Versions

__all__ = ["AsynchronousTrainer", "AsynchronousWeights", "UpdateOrder"]

MakeUpdater = Callable[[Sequence[tuple[str, nn.Parameter]]], Updater]
Gradients = dict[str, Tensor | None]


class UpdateOrder(Protocol):
    """The order in which a shard received gradients, as report.result.UpdateOrder has it."""

    @property
    def parts(self) -> Sequence[Sequence[tuple[str, int, int]]]: ...
    @property
    def replicas(self) -> Sequence[int]: ...


@dataclass
class _WholeStage:
    """The order of updates of a stage without replicas."""

    parts: Sequence[Sequence[tuple[str, int, int]]]
    replicas: Sequence[int]


class _Shard:
    def __init__(self, order: UpdateOrder, updaters: list[Updater], num_replicas: int) -> None:
        self.order = order
        self.updaters = updaters
        """One updater for each part."""
        self.num_done = 0
        self.num_done_of = [0] * num_replicas


class AsynchronousWeights:
    """The weight versions of one stage, for each of its replicas."""

    def __init__(
        self,
        owned: Sequence[tuple[str, nn.Parameter]],
        make_updater: MakeUpdater,
        versions: Versions,
        stage_index: int,
        orders: Sequence[UpdateOrder],
        num_minibatches: int,
    ) -> None:
        """orders: one per shard; empty for a stage without replicas."""
        num_replicas = versions.num_replicas(stage_index)
        self._own_per_round = versions.own_per_round(stage_index)
        self._num_microbatches = num_minibatches * versions.num_microbatches
        if num_replicas == 1:
            whole = [(name, 0, parameter.numel()) for name, parameter in owned]
            orders = [_WholeStage([whole], [0] * num_minibatches)]
        self.names = [name for name, _ in owned]
        self._parameters = dict(owned)
        self._shards = [
            _Shard(order, [make_updater(_copies(owned)) for _ in order.parts], num_replicas)
            for order in orders
        ]
        self._num_parts = sum(len(order.parts) for order in orders)
        first = {name: parameter.detach().clone() for name, parameter in owned}
        self._versions = [[first] for _ in range(num_replicas)]
        self._num_missing = [[0] for _ in range(num_replicas)]
        self._gradients: list[list[Gradients]] = [[] for _ in range(num_replicas)]
        self._early: dict[int, tuple[Gradients, float]] = {}
        """(gradients, share) of each microbatch that waits for an earlier microbatch of the same replica, by
        the microbatch's number."""
        self._num_added = [0] * num_replicas
        self._open: list[tuple[Gradients, float]] = [({}, 0.0)] * num_replicas
        """For each replica, the sum of the gradients and of the shares in its present round."""

    def find(self, replica: int, version: int) -> dict[str, Tensor] | None:
        """Returns a weight version of the replica; None if the version is not complete yet."""
        missing = self._num_missing[replica]
        return self._versions[replica][version] if version < len(missing) and missing[version] == 0 else None

    def add(self, number: int, gradients: Gradients, share: float) -> None:
        """Adds the gradients of a microbatch. Microbatches may come in any order, but their gradients are
        added up in the order of the replica's microbatches. number: the microbatch's, counted through the
        run.
        """
        self._early[number] = gradients, share
        num_replicas = len(self._gradients)
        replica = number % num_replicas
        while (following := self._num_added[replica] * num_replicas + replica) in self._early:
            self._add_next(replica, *self._early.pop(following))
            is_last = following + num_replicas >= self._num_microbatches
            if is_last or self._num_added[replica] % self._own_per_round == 0:
                self._end_round(replica)
        for shard in self._shards:
            while self._apply_next(shard):
                pass

    def _add_next(self, replica: int, gradients: Gradients, share: float) -> None:
        self._num_added[replica] += 1
        sums, share_sum = self._open[replica]
        self._open[replica] = (
            {name: _sum(sums.get(name), gradient) for name, gradient in gradients.items()},
            share_sum + share,
        )

    def _end_round(self, replica: int) -> None:
        sums, share_sum = self._open[replica]
        self._open[replica] = {}, 0.0
        # If the shares add up to 1, gradients are not divided. So a single microbatch equals plain training
        # bit for bit.
        divisor = share_sum or 1.0
        self._gradients[replica].append(
            {n: g if g is None or divisor == 1.0 else g / divisor for n, g in sums.items()}
        )
        self._versions[replica].append({n: p.detach().clone() for n, p in self._parameters.items()})
        self._num_missing[replica].append(self._num_parts)

    def _apply_next(self, shard: _Shard) -> bool:
        """Applies the next gradient to the shard's next part. Returns False if that gradient is not known
        yet, or if all gradients are applied."""
        if shard.num_done == len(shard.order.replicas):
            return False
        replica = shard.order.replicas[shard.num_done]
        round_index, part = divmod(shard.num_done_of[replica], len(shard.order.parts))
        if round_index == len(self._gradients[replica]):
            return False
        updater = shard.updaters[part]
        for name, parameter in zip(self.names, updater.parameters, strict=True):
            gradient = self._gradients[replica][round_index][name]
            parameter.grad = None if gradient is None else gradient.clone()
        updater.optimize()
        if part + 1 == len(shard.order.parts):
            for of_part in shard.updaters:
                of_part.schedule()
        self._copy_part(shard, part, self._versions[replica][round_index + 1])
        self._num_missing[replica][round_index + 1] -= 1
        shard.num_done += 1
        shard.num_done_of[replica] += 1
        return True

    @torch.no_grad()
    def _copy_part(self, shard: _Shard, part: int, target: dict[str, Tensor]) -> None:
        newest = dict(zip(self.names, shard.updaters[part].parameters, strict=True))
        for name, first, count in shard.order.parts[part]:
            _in_memory(target[name])[first : first + count] = _in_memory(newest[name])[first : first + count]

    def drain(self) -> None:
        """Makes the shards' current state the newest version of every replica. Call it when all gradients so
        far are applied."""
        num_gradients = sum(map(len, self._gradients))
        newest = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        for shard in self._shards:
            assert shard.num_done == num_gradients * len(shard.order.parts), "another order than the run's"
            self._copy(shard, newest)
        for versions in self._versions:
            versions[-1] = newest

    def finish(self) -> None:
        """Copies the shards' final state into the model's parameters."""
        newest: dict[str, Tensor] = {name: parameter.data for name, parameter in self._parameters.items()}
        for shard in self._shards:
            assert shard.num_done == len(shard.order.replicas), "the order names gradients that there are not"
            self._copy(shard, newest)

    def _copy(self, shard: _Shard, target: dict[str, Tensor]) -> None:
        for part in range(len(shard.order.parts)):
            self._copy_part(shard, part, target)


@dataclass
class _Flight:
    """A microbatch in flight: its backward has not run."""

    minibatch: int
    microbatch: int
    value: Any
    """The input of the stage whose forward comes next."""
    targets: Any
    share: float
    """The share of its minibatch for which the microbatch counts."""
    is_empty: bool
    leaves: dict[int, Tensor] = field(default_factory=dict)
    """The leaves that the microbatch's forwards have read in place of parameters, by id(parameter)."""
    num_stages_done: int = 0


class AsynchronousTrainer(Trainer):
    """Trains all microbatches, in an order that the versions and the update orders allow."""

    def train_all(
        self, batches: Iterable[tuple[Any, Any]], weights: Sequence[AsynchronousWeights]
    ) -> list[float]:
        """Trains on the batches. Returns the loss of each minibatch. weights: one entry per stage."""
        of_minibatches = [self._flights(minibatch, *batch) for minibatch, batch in enumerate(batches)]
        num_minibatches, m = len(of_minibatches), self._num_microbatches
        self.microbatch_versions = [[[(0, 0)] * m for _ in range(num_minibatches)] for _ in self._stages]
        losses = [0.0] * num_minibatches
        num_forwarded = [[0] * len(stage.buffers) for stage in self._stages]
        for first, end in itertools.pairwise([0, *self._versions.drained_at, num_minibatches]):
            for of_stage in weights:
                of_stage.drain()
            flights = list(itertools.chain(*of_minibatches[first:end]))
            self._train_some(flights, weights, num_forwarded, losses)
        for of_stage, stage in zip(weights, self._stages, strict=True):
            of_stage.finish()
            stage.buffers.average()
        return losses

    def _train_some(
        self,
        flights: list[_Flight],
        weights: Sequence[AsynchronousWeights],
        num_forwarded: list[list[int]],
        losses: list[float],
    ) -> None:
        """Trains these microbatches until all have finished."""
        while flights:
            left = []
            for flight in flights:
                while flight.num_stages_done < len(self._stages) and self._forward_next(
                    flight, weights, num_forwarded
                ):
                    pass
                if flight.num_stages_done == len(self._stages):
                    losses[flight.minibatch] += self._backward(flight, weights)
                else:
                    left.append(flight)
            assert len(left) < len(flights), "the orders cannot have been those of a run"
            flights = left

    def _flights(self, minibatch: int, inputs: Any, targets: Any) -> list[_Flight]:
        pieces = self._cut(inputs, targets, minibatch)
        values = [to_device(piece, self._device) for piece, _ in pieces]
        if len(self._stages) > 1:
            values = [map_tensors(Tensor.clone, value) for value in values]
        on_device = [to_device(piece_targets, self._device) for _, piece_targets in pieces]
        made = [
            _Flight(minibatch, microbatch, *of_piece, is_empty=False)
            for microbatch, of_piece in enumerate(
                zip(values, on_device, self._shares(inputs, targets, pieces, minibatch), strict=True)
            )
        ]
        absent = range(len(made), self._num_microbatches)
        return [*made, *(_Flight(minibatch, microbatch, None, None, 0.0, True) for microbatch in absent)]

    def _forward_next(
        self,
        flight: _Flight,
        weights: Sequence[AsynchronousWeights],
        num_forwarded: list[list[int]],
    ) -> bool:
        """Runs the microbatch's forward at its next stage. Returns False if that is not possible yet."""
        stage_index, minibatch, microbatch = flight.num_stages_done, flight.minibatch, flight.microbatch
        stage = self._stages[stage_index]
        own_index, replica = divmod(minibatch * self._num_microbatches + microbatch, len(stage.buffers))
        version = self._versions.of_forward(stage_index, minibatch, microbatch)
        content = weights[stage_index].find(replica, version)
        if num_forwarded[stage_index][replica] < own_index or content is None:
            return False
        num_forwarded[stage_index][replica] += 1
        self.microbatch_versions[stage_index][minibatch][microbatch] = (version, version)
        stage.use(replica)
        if not flight.is_empty:
            names = weights[stage_index].names
            for name, parameter in zip(names, stage.parameters, strict=True):
                flight.leaves[id(parameter)] = content[name].clone().requires_grad_()
            with self._bound(flight.leaves):
                value = flight.value
                if stage_index > 0 and self._across_cut is not None:
                    value = cross(value, stage_index - 1, stage_index, self._across_cut)
                at = (minibatch, microbatch)
                value = stage.forward_on_copies(value, flight.targets, at)
                is_last = stage_index + 1 == len(self._stages)
                flight.value = value if is_last else stage.seeding_backward(value, at)
        if stage.statistics is not None and microbatch + len(stage.buffers) >= self._num_microbatches:
            stage.statistics.update()
        flight.num_stages_done += 1
        return True

    def _backward(self, flight: _Flight, weights: Sequence[AsynchronousWeights]) -> float:
        """Runs the microbatch's backward, and adds its gradients at all stages. Returns the microbatch's part
        of the minibatch's loss.
        """
        loss_value = 0.0
        if flight.share > 0:  # if the share is 0 the loss may be NaN, as a mean over no samples
            self._use_replicas(flight.minibatch, flight.microbatch)
            with self._bound(flight.leaves), self._statistics_kept():
                loss = check_loss(flight.value, flight.minibatch)
                loss_value = loss.item() * flight.share
                counted = loss if self._num_microbatches == 1 else loss * flight.share
                self._stages[-1].seed_backward((flight.minibatch, flight.microbatch))
                counted.backward()  # type: ignore[no-untyped-call]
        number = flight.minibatch * self._num_microbatches + flight.microbatch
        for of_stage, stage in zip(weights, self._stages, strict=True):
            gradients = {
                name: stage.gradient_of(parameter, flight.leaves[id(parameter)]) if flight.leaves else None
                for name, parameter in zip(of_stage.names, stage.parameters, strict=True)
            }
            of_stage.add(number, gradients, flight.share)
        return loss_value

    @contextlib.contextmanager
    def _bound(self, leaves: Mapping[int, Tensor]) -> Iterator[None]:
        self._bind(leaves)
        try:
            yield
        finally:
            self._unbind()


def _copies(owned: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    return [(name, copy.deepcopy(parameter)) for name, parameter in owned]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one + other


def _in_memory(tensor: Tensor) -> Tensor:
    """Returns a flat view of the elements, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
