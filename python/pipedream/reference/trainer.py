"""Trains one minibatch after another, with the weight versions that a schedule reads.

A microbatch's share is the part of its minibatch for which it counts; the shares of a minibatch add up to 1.
A leaf is a copy of a weight version that microbatches read in place of the parameter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedream.common.microbatches import Microbatches
from pipedream.model.boundary import check_loss, map_tensors, to_device
from pipedream.model.ignored_labels import IgnoredLabels, with_other_labels
from pipedream.model.microbatch import check_alike, chunk, counts_of, samples_of, sizes_of, weights
from pipedream.model.precision import LossScaler
from pipedream.model.references import places_of
from pipedream.model.untouched import untouched
from pipedream.reference.stages import At, CutFunction, Recomputed, Stage, cross
from pipedream.reference.updates import History
from pipedream.reference.versions import Versions

__all__ = ["Trainer"]


class Trainer:
    """Trains minibatches, with the steps that reference/__init__.py lists."""

    def __init__(
        self,
        stages: list[Stage],
        versions: Versions,
        *,
        tied: set[int],
        device: torch.device,
        weight_fn: Callable[[Any], Any] | None,
        across_cut: CutFunction | None,
        max_grad_norm: float | None,
        scaler: LossScaler | None,
        sync_every: int,
    ) -> None:
        """tied: ids of the parameters that several stages use."""
        self.microbatch_versions: list[list[list[tuple[int, int]]]] = [[] for _ in stages]
        """microbatch_versions[stage][minibatch][microbatch] = (version that the forward read, version that
        the backward read)."""
        self._stages = stages
        self._versions = versions
        self._tied = tied
        self._device = device
        self._num_microbatches = versions.num_microbatches
        self._weight_fn = weight_fn
        self._ignored_labels = IgnoredLabels()
        self._across_cut = across_cut
        self._max_grad_norm = max_grad_norm
        self._scaler = scaler
        self._overflows: set[tuple[int, int]] = set()  # (stage, round) of each update with an overflow
        self._scale: float | None = None
        self._sync_every = sync_every
        self._parameters = {id(p): p for stage in stages for p in stage.parameters}
        self._bound_leaves: dict[int, Tensor] = {}
        """The leaves that the modules hold at present in place of parameters, by the parameter's id."""
        self._leaves: dict[tuple[int, int], Tensor] = {}
        """All leaves of the present minibatch, by (id of a replica's parameter, version)."""
        self._histories = {
            id(p): History(p, versions.versions_back)
            for stage in stages
            for updater in stage.updaters
            for p in updater.parameters
        }

    def train(self, minibatch: int, inputs: Any, targets: Any) -> float:
        """Trains one minibatch. Returns its loss."""
        pieces = self._cut(inputs, targets, minibatch)
        shares = self._shares(inputs, targets, pieces, minibatch)
        scale = self._next_scale(minibatch)
        self._note_versions(minibatch)
        try:
            losses = self._compute(minibatch, pieces, shares, scale)
        finally:
            self._unbind()
        self._add_gradients(minibatch, shares, scale)
        self._update(
            minibatch, [stage_index for stage_index in self._all if self._ends_round(stage_index, minibatch)]
        )
        return sum(losses)

    def _cut(self, inputs: Any, targets: Any, minibatch: int) -> list[tuple[Any, Any]]:
        for stage in self._stages:
            stage.in_microbatches = isinstance(inputs, Microbatches) or isinstance(targets, Microbatches)
        return _pieces_of(inputs, targets, self._num_microbatches, minibatch)

    def _compute(
        self,
        minibatch: int,
        pieces: Sequence[tuple[Any, Any]],
        shares: Sequence[float],
        scale: float | None,
    ) -> list[float]:
        """Runs all microbatches of a minibatch. Their gradients are then in the leaves. Returns the part of
        the minibatch's loss that each microbatch has. Microbatches with share 0 are left out."""
        losses = []
        backwards = []
        for microbatch, ((piece, piece_targets), share) in enumerate(zip(pieces, shares, strict=True)):
            at = (minibatch, microbatch)
            self._use_replicas(*at)
            leaves = self._read(minibatch, microbatch)
            self._bind(leaves)
            loss, recomputed = self._forward(at, piece, piece_targets)
            if share == 0:
                continue  # the loss may be NaN, as a mean over no samples
            # A single microbatch is not multiplied, so that it equals plain training bit for bit.
            counted = loss if self._num_microbatches == 1 else loss * share
            root = counted if scale is None else counted * scale
            backwards.append((at, leaves, root, recomputed))
            losses.append(loss.item() * share)
        self._update_statistics()
        self._overwrite(minibatch)
        for at, leaves, root, recomputed in backwards:
            self._use_replicas(*at)
            self._carry_gradients(leaves)
            self._bind(leaves)
            with self._statistics_kept():
                self._stages[-1].seed_backward(at)
                root.backward()  # type: ignore[no-untyped-call]
                for stage_again in reversed(recomputed):
                    stage_again.backward()
            # Gradients of two leaves may share memory. The next backward would add to this memory twice.
            for leaf in leaves.values():
                leaf.grad = None if leaf.grad is None else leaf.grad.clone()
        return losses

    @property
    def minibatches_between_drains(self) -> int:
        return math.lcm(*(self._versions.minibatches_per_round(stage) for stage in self._all))

    def use_first_replicas(self) -> None:
        """Gives the modules the buffers of every stage's first replica."""
        for stage in self._stages:
            stage.use(0)

    def _carry_gradients(self, leaves: Mapping[int, Tensor]) -> None:
        """Moves the gradients of earlier microbatches to the leaves of the next backward, if these have
        another version. So gradients are added in the order of the microbatches.
        """
        found = {id(leaf): key for key, leaf in self._leaves.items()}
        for leaf in leaves.values():
            of_replica, version = found[id(leaf)]
            for (held, other), before in self._leaves.items():
                if held == of_replica and other != version and before.grad is not None:
                    before.grad, leaf.grad = None, before.grad

    def end_round(self, num_minibatches: int) -> None:
        """Ends the last round, which may have fewer minibatches than other rounds."""
        begun = [
            stage_index
            for stage_index, stage in enumerate(self._stages)
            if any(updater.minibatches for updater in stage.updaters)
        ]
        self._update(num_minibatches - 1, begun)

    def finish(self, num_minibatches: int) -> None:
        """Ends the last round, and sets parameters and buffers to their means over the replicas. Call it when
        all minibatches are trained."""
        self.end_round(num_minibatches)
        for stage in self._stages:
            stage.average()
            stage.buffers.average()

    def _shares(
        self, inputs: Any, targets: Any, pieces: Sequence[tuple[Any, Any]], minibatch: int
    ) -> list[float]:
        """Returns the share of each microbatch. Raises ValueError if these shares are wrong, because the loss
        ignores some labels, such as -100 (model/ignored_labels.py).
        """
        of_pieces = [piece_targets for _, piece_targets in pieces]
        if self._weight_fn is not None and self._num_microbatches > 1:
            return weights(counts_of(self._weight_fn, of_pieces, minibatch))
        counts = sizes_of(inputs, targets, samples_of(inputs, targets), self._num_microbatches)
        if self._num_microbatches > 1:
            found = self._ignored_labels.look(targets, of_pieces, counts)
            for uneven, piece in itertools.product(found, pieces):
                labels = uneven.of(piece[1])
                loss_with = functools.partial(self._loss_with, piece, labels)
                self._ignored_labels.judge(
                    uneven, labels, loss_with, minibatch=minibatch, num_microbatches=self._num_microbatches
                )
        return weights(counts)

    def _loss_with(self, piece: tuple[Any, Any], labels: Tensor, others: Tensor) -> float:
        """Returns the loss that the microbatch would have if `others` replaced `labels`. Changes no state."""
        value, targets = (to_device(with_other_labels(part, labels, others), self._device) for part in piece)
        with untouched([stage.module for stage in self._stages], self._stages[-1].loss_fn), torch.no_grad():
            for stage in self._stages:
                value = stage.forward_again(value, targets, {})
        return float(value)

    @contextlib.contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Wraps a backward. Forwards inside it, which layers with activation checkpointing repeat, do not
        count for the running statistics."""
        with contextlib.ExitStack() as around:
            for stage in self._stages:
                if stage.statistics is not None:
                    around.enter_context(stage.statistics.microbatch(collect=False))
            yield

    def _bind(self, leaves: Mapping[int, Tensor]) -> None:
        """Puts the leaves into the modules in place of the parameters. They stay there for the backward,
        because layers with activation checkpointing run their forward again in it.
        """
        now = self._bound_leaves
        changed = {
            id(now.get(key, self._parameters[key])): leaf
            for key, leaf in leaves.items()
            if now.get(key) is not leaf
        }
        if changed:
            self._replace(changed)
            self._bound_leaves = {**now, **leaves}

    def _unbind(self) -> None:
        self._replace({id(leaf): self._parameters[key] for key, leaf in self._bound_leaves.items()})
        self._bound_leaves = {}

    def _replace(self, others: Mapping[int, Tensor]) -> None:
        """Replaces tensors in all places of the modules that hold them. others: the new tensor, by the id()
        of the tensor that it replaces."""
        for place in list(places_of(("", stage.module) for stage in self._stages)):
            if id(place.tensor) in others and place.container is not None:
                place.container[place.key] = place.filled(lambda tensor: others.get(id(tensor), tensor))

    def _use_replicas(self, minibatch: int, microbatch: int) -> None:
        for stage_index, stage in enumerate(self._stages):
            stage.use(self._versions.replica_of(stage_index, minibatch, microbatch))

    def _update_statistics(self) -> None:
        """Updates the running statistics of each replica, by the replica's microbatches of this minibatch."""
        for stage in self._stages:
            for replica, statistics in enumerate(stage.statistics_of):
                stage.use(replica)
                statistics.update()

    def _note_versions(self, minibatch: int) -> None:
        for stage_index, of_stage in enumerate(self.microbatch_versions):
            of_stage.append(
                [
                    (
                        self._versions.of_forward(stage_index, minibatch, microbatch),
                        self._versions.of_backward(stage_index, minibatch, microbatch),
                    )
                    for microbatch in range(self._num_microbatches)
                ]
            )

    def _read(self, minibatch: int, microbatch: int) -> dict[int, Tensor]:
        """Returns the leaves that the microbatch reads, by the parameter's id. Microbatches of a minibatch
        that read the same version share a leaf.
        """
        leaves = {}
        for stage_index, stage in enumerate(self._stages):
            version = self._versions.of_forward(stage_index, minibatch, microbatch)
            newest = stage.updater_of(stage.replica).parameters
            for parameter, of_replica in zip(stage.parameters, newest, strict=True):
                read = version
                if id(parameter) in self._tied:
                    read = self._versions.of_tied(stage_index, minibatch, microbatch)
                key = id(of_replica), read
                if key not in self._leaves:
                    self._leaves[key] = self._histories[id(of_replica)].leaf(read)
                leaves[id(parameter)] = self._leaves[key]
        return leaves

    def _forward(self, at: At, inputs: Any, targets: Any) -> tuple[Tensor, list[Recomputed]]:
        """Returns the loss of a microbatch, and the forwards that must be repeated for its backward."""
        recomputed = []
        value = to_device(inputs, self._device)
        targets = to_device(targets, self._device)
        if len(self._stages) > 1:
            # In the pipeline a first layer that works in place cannot change the caller's data, because the
            # worker reads its own. With one stage it can, as in plain training, so the data are not copied.
            value = map_tensors(Tensor.clone, value)
        for stage_index, stage in enumerate(self._stages):
            if stage_index > 0 and self._across_cut is not None:
                value = cross(value, stage_index - 1, stage_index, self._across_cut)
            if stage.recomputes_newest:
                recomputed.append(Recomputed(stage, value, targets, at))
                value = recomputed[-1].outputs()
            else:
                # All stages are in one graph of autograd. So each parameter's gradient is taken at the
                # version that its stage read.
                value = stage.forward(value, targets, at)
                if stage_index + 1 < len(self._stages):
                    value = stage.seeding_backward(value, at)
        return check_loss(value, at[0]), recomputed

    def _overwrite(self, minibatch: int) -> None:
        """Overwrites the leaves with the newest version, at stages that do not stash."""
        for stage_index, stage in enumerate(self._stages):
            if self._versions.stashes(stage_index):
                continue
            newest = self._versions.of_backward(stage_index, minibatch)
            for updater in stage.updaters:
                for parameter, of_replica in zip(stage.parameters, updater.parameters, strict=True):
                    for (held, version), leaf in self._leaves.items():
                        if held == id(of_replica) and version != newest and id(parameter) not in self._tied:
                            # With .data, autograd does not notice that a tensor that it has saved changes.
                            leaf.data.copy_(of_replica.detach())

    def _next_scale(self, minibatch: int) -> float | None:
        """Returns the factor by which the minibatch's loss is multiplied; None without float16. It depends on
        the overflows that the last stage of the pipeline would know of.
        """
        if self._scaler is None:
            return None
        if minibatch % self._versions.minibatches_per_scale == 0:
            known = self._versions.overflows_known(minibatch)
            self._scale = self._scaler.next_scale(bool(known & self._overflows))
        return self._scale

    @property
    def _all(self) -> range:
        return range(len(self._stages))

    def _ends_round(self, stage_index: int, minibatch: int) -> bool:
        return (minibatch + 1) % self._versions.minibatches_per_round(stage_index) == 0

    def _add_gradients(self, minibatch: int, shares: Sequence[float], scale: float | None) -> None:
        """Adds a minibatch's gradients to those of its round, which are in the parameters' `grad`."""
        shown = {
            id(of_replica): (stage, parameter)
            for stage in self._stages
            for updater in stage.updaters
            for parameter, of_replica in zip(stage.parameters, updater.parameters, strict=True)
        }
        for (of_replica, _), leaf in self._leaves.items():
            stage, known = shown[of_replica]
            gradient, parameter = stage.gradient_of(known, leaf), self._histories[of_replica].parameter
            if gradient is None:
                continue
            if scale is not None:
                gradient = gradient / scale
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._leaves.clear()
        for stage_index, stage in enumerate(self._stages):
            for microbatch in range(self._num_microbatches):
                updater = stage.updater_of(self._versions.replica_of(stage_index, minibatch, microbatch))
                updater.minibatches.add(minibatch)
                updater.share += shares[microbatch] if microbatch < len(shares) else 0.0

    def _update(self, minibatch: int, stages: Sequence[int]) -> None:
        """Makes the updates at the end of a round. stages: the stages whose rounds end with the minibatch."""
        for stage_index in stages:
            updaters = self._stages[stage_index].updaters
            for updater in updaters:
                # If each replica has its own updater, the updater's gradients are of a part of each
                # minibatch.
                count = len(updater.minibatches) if len(updaters) == 1 else updater.share
                # The gradient of a single minibatch is not divided, so that it equals plain training bit for
                # bit.
                for parameter in updater.parameters:
                    if parameter.grad is not None and count not in (0, 1):
                        parameter.grad /= count
        skipped = self._overflowed_stages(minibatch, stages) if self._scaler is not None else set()
        self._clip(stages)
        for stage_index in stages:
            stage = self._stages[stage_index]
            for updater in stage.updaters:
                if stage_index not in skipped and updater.minibatches:
                    updater.step()
                updater.minibatches.clear()
                updater.share = 0.0
            num_rounds = minibatch // self._versions.minibatches_per_round(stage_index) + 1
            if num_rounds % self._sync_every == 0:
                stage.average()
            for parameter in itertools.chain(*(updater.parameters for updater in stage.updaters)):
                parameter.grad = None
                self._histories[id(parameter)].add()

    def _overflowed_stages(self, minibatch: int, stages: Sequence[int]) -> set[int]:
        """Returns those of `stages` that skip their update, because a gradient is not finite. If the schedule
        drains, an overflow at one stage counts for all stages.
        """
        overflowed = {
            stage_index
            for stage_index in stages
            for p in self._stages[stage_index].parameters
            if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        }
        if overflowed and self._versions.drains:
            overflowed = set(stages)
        self._overflows |= {
            (stage_index, minibatch // self._versions.minibatches_per_round(stage_index))
            for stage_index in overflowed
        }
        return overflowed

    def _clip(self, stages: Sequence[int]) -> None:
        if self._max_grad_norm is None:
            return
        together = [self._stages[stage_index].parameters for stage_index in stages]
        if self._versions.drains:
            together = [list(itertools.chain(*together))]
        for parameters in together:
            torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)


def _pieces_of(inputs: Any, targets: Any, num_microbatches: int, minibatch: int) -> list[tuple[Any, Any]]:
    """Returns (inputs, targets) of each microbatch. Raises ValueError if inputs and targets cannot be cut
    into the same pieces."""
    count = samples_of(inputs, targets)
    input_pieces, target_pieces = (
        chunk(value, num_microbatches, name=name, minibatch=minibatch, num_samples=count)
        for name, value in (("the inputs", inputs), ("the targets", targets))
    )
    check_alike(inputs, targets, num_microbatches, minibatch=minibatch)
    return list(zip(input_pieces, target_pieces, strict=True))
