"""Trains minibatch after minibatch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedream.model.boundary import check_loss, map_tensors, to_device
from pipedream.model.ignored_labels import IgnoredLabels, with_other_labels
from pipedream.model.microbatch import check_alike, chunk, counts_of, piece_sizes, samples_of, weights
from pipedream.model.precision import LossScaler
from pipedream.model.references import places_of
from pipedream.model.untouched import untouched
from pipedream.reference.cuts import CutFunction, cross
from pipedream.reference.stages import At, Recomputed, Stage
from pipedream.reference.updates import History
from pipedream.reference.versions import Versions

__all__ = ["Trainer", "cut"]


class Trainer:
    """Trains minibatch after minibatch."""

    def __init__(
        self,
        stages: list[Stage],
        versions: Versions,
        *,
        tied: set[int],
        device: torch.device,
        num_microbatches: int,
        weight_fn: Callable[[Any], Any] | None,
        across_cut: CutFunction | None,
        max_grad_norm: float | None,
        scaler: LossScaler | None,
        sync_every: int,
    ) -> None:
        """tied: ids of the parameters that several stages use."""
        self.versions_read: list[list[tuple[int, int]]] = [[] for _ in stages]
        self._stages = stages
        self._versions = versions
        self._tied = tied
        self._device = device
        self._num_microbatches = num_microbatches
        self._weight_fn = weight_fn
        self._ignored_labels = IgnoredLabels()
        self._across_cut = across_cut
        self._max_grad_norm = max_grad_norm
        self._scaler = scaler
        self._overflows: set[tuple[int, int]] = set()  # (stage, round)
        self._scale: float | None = None
        self._sync_every = sync_every
        self._histories = {
            id(p): History(p) for stage in stages for updater in stage.updaters for p in updater.parameters
        }

    def train(self, minibatch: int, inputs: Any, targets: Any) -> float:
        """One minibatch; its loss."""
        pieces = cut(inputs, targets, self._num_microbatches, minibatch)
        shares = self._shares(inputs, targets, pieces, minibatch)
        for stage in self._stages:
            stage.begin(minibatch)
        leaves = self._read(minibatch)
        scale = self._next_scale(minibatch)
        losses = []
        backwards = []
        with self._bound(leaves):
            for microbatch, ((piece, piece_targets), share) in enumerate(zip(pieces, shares, strict=True)):
                at = (minibatch, microbatch)
                loss, recomputed = self._forward(at, piece, piece_targets)
                if share == 0:
                    continue  # its loss may be NaN, a mean over nothing
                # A single microbatch is multiplied by nothing, so that it is plain training to the last bit.
                counted = loss if self._num_microbatches == 1 else loss * share
                backwards.append((counted if scale is None else counted * scale, recomputed, at))
                losses.append(loss.item() * share)
            for stage in self._stages:
                if stage.statistics is not None:
                    stage.statistics.update()
            self._overwrite(minibatch, leaves)
            for root, recomputed, at in backwards:
                with self._statistics_kept():
                    self._stages[-1].seed_backward(at)
                    root.backward()  # type: ignore[no-untyped-call]
                    for stage_again in reversed(recomputed):
                        stage_again.backward()
        self._add_gradients(minibatch, leaves, scale)
        self._update(
            minibatch, [stage_index for stage_index in self._all if self._ends_round(stage_index, minibatch)]
        )
        return sum(losses)

    def finish(self, num_minibatches: int) -> None:
        """The last round is over, however few minibatches it has."""
        begun = [
            stage_index
            for stage_index, stage in enumerate(self._stages)
            if any(updater.num_added for updater in stage.updaters)
        ]
        self._update(num_minibatches - 1, begun)
        for stage in self._stages:
            stage.average()
            stage.buffers.average()

    def _shares(
        self, inputs: Any, targets: Any, pieces: Sequence[tuple[Any, Any]], minibatch: int
    ) -> list[float]:
        """Each microbatch's share of the minibatch. Raises ValueError for a loss that wants others."""
        of_pieces = [piece_targets for _, piece_targets in pieces]
        if self._weight_fn is not None and self._num_microbatches > 1:
            return weights(counts_of(self._weight_fn, of_pieces, minibatch))
        counts = piece_sizes(samples_of(inputs, targets), self._num_microbatches)
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
        """The loss of a microbatch with other labels in the place of these; leaves no trace."""
        value, targets = (to_device(with_other_labels(part, labels, others), self._device) for part in piece)
        with untouched([stage.module for stage in self._stages], self._stages[-1].loss_fn), torch.no_grad():
            for stage in self._stages:
                value = stage.forward_again(value, targets, {})
        return float(value)

    @contextlib.contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Around a backward, in which layers that checkpoint themselves run again."""
        with contextlib.ExitStack() as around:
            for stage in self._stages:
                if stage.statistics is not None:
                    around.enter_context(stage.statistics.microbatch(collect=False))
            yield

    @contextlib.contextmanager
    def _bound(self, leaves: dict[int, Tensor]) -> Iterator[None]:
        """The layers read the leaves, wherever they hold parameters; in the backward too, where layers that
        checkpoint themselves run again."""
        self._replace(leaves)
        try:
            yield
        finally:
            parameters = {id(p): p for stage in self._stages for p in stage.parameters}
            self._replace({id(leaf): parameters[key] for key, leaf in leaves.items()})

    def _replace(self, others: Mapping[int, Tensor]) -> None:
        """Puts others in the places of the tensors that have these ids."""
        for place in list(places_of(("", stage.module) for stage in self._stages)):
            if id(place.tensor) in others and place.container is not None:
                place.container[place.key] = place.filled(lambda tensor: others.get(id(tensor), tensor))

    def _read(self, minibatch: int) -> dict[int, Tensor]:
        """The leaf of each parameter, by the parameter's id, at the version that the minibatch reads."""
        leaves = {}
        for stage_index, stage in enumerate(self._stages):
            version = self._versions.of_forward(stage_index, minibatch)
            read = (version, self._versions.of_backward(stage_index, minibatch))
            self.versions_read[stage_index].append(read)
            newest = stage.updater_of(minibatch).parameters
            for parameter, of_replica in zip(stage.parameters, newest, strict=True):
                is_tied = id(parameter) in self._tied
                leaves[id(parameter)] = self._histories[id(of_replica)].leaf(
                    self._versions.of_tied(stage_index, minibatch) if is_tied else version
                )
        return leaves

    def _forward(self, at: At, inputs: Any, targets: Any) -> tuple[Tensor, list[Recomputed]]:
        """The loss of a microbatch, and what is to be recomputed for its backward."""
        recomputed = []
        value = to_device(inputs, self._device)
        targets = to_device(targets, self._device)
        if len(self._stages) > 1:
            # A first layer that works in place must not change the caller's data, which every worker reads
            # for itself. With one stage a plain loop would change them too.
            value = map_tensors(Tensor.clone, value)
        for stage_index, stage in enumerate(self._stages):
            if stage_index > 0 and self._across_cut is not None:
                value = cross(value, stage_index - 1, stage_index, self._across_cut)
            if stage.recomputes_newest:
                recomputed.append(Recomputed(stage, value, targets, at))
                value = recomputed[-1].outputs()
            else:
                # One graph through all stages: each parameter's gradient is at the version its stage read.
                value = stage.forward(value, targets, at)
                if stage_index + 1 < len(self._stages):
                    value = stage.seeding_backward(value, at)
        return check_loss(value, at[0]), recomputed

    def _overwrite(self, minibatch: int, leaves: dict[int, Tensor]) -> None:
        """Without stashing the backward finds the newest version where its forward found an older one."""
        for stage_index, stage in enumerate(self._stages):
            if self._versions.of_backward(stage_index, minibatch) == self.versions_read[stage_index][-1][0]:
                continue
            newest = stage.updater_of(minibatch).parameters
            for parameter, of_replica in zip(stage.parameters, newest, strict=True):
                if id(parameter) not in self._tied:
                    # .data: autograd must not see that what it saved has changed.
                    leaves[id(parameter)].data.copy_(of_replica.detach())

    def _next_scale(self, minibatch: int) -> float | None:
        """What float16 multiplies the minibatch's loss by, as the last stage can know it."""
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

    def _add_gradients(self, minibatch: int, leaves: dict[int, Tensor], scale: float | None) -> None:
        """Of a minibatch to those of its round, which are in `grad` of the parameters."""
        for stage in self._stages:
            updater = stage.updater_of(minibatch)
            updater.num_added += 1
            for parameter, of_replica in zip(stage.parameters, updater.parameters, strict=True):
                gradient = stage.gradient_of(parameter, leaves[id(parameter)])
                if gradient is None:
                    continue
                if scale is not None:
                    gradient = gradient / scale
                of_replica.grad = gradient if of_replica.grad is None else of_replica.grad + gradient

    def _update(self, minibatch: int, stages: Sequence[int]) -> None:
        """Of these stages, whose round ends with the minibatch."""
        for updater in itertools.chain(*(self._stages[stage_index].updaters for stage_index in stages)):
            # A single minibatch is divided by nothing, so that it is plain training to the last bit.
            for parameter in updater.parameters:
                if parameter.grad is not None and updater.num_added > 1:
                    parameter.grad /= updater.num_added
        skipped = self._overflowed_stages(minibatch, stages) if self._scaler is not None else set()
        self._clip(stages)
        for stage_index in stages:
            stage = self._stages[stage_index]
            for updater in stage.updaters:
                if stage_index not in skipped and updater.num_added > 0:
                    updater.step()
                updater.num_added = 0
            num_rounds = minibatch // self._versions.minibatches_per_round(stage_index) + 1
            if num_rounds % self._sync_every == 0:
                stage.average()
            for parameter in itertools.chain(*(updater.parameters for updater in stage.updaters)):
                parameter.grad = None
                self._histories[id(parameter)].add()

    def _overflowed_stages(self, minibatch: int, stages: Sequence[int]) -> set[int]:
        """Those of the stages, whose round ends with the minibatch, that skip their update. Where the
        pipeline drains, one's overflow is everybody's."""
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


def cut(inputs: Any, targets: Any, num_microbatches: int, minibatch: int) -> list[tuple[Any, Any]]:
    """(inputs, targets) of each microbatch. Raises ValueError for what cannot be cut alike."""
    count = samples_of(inputs, targets)
    input_pieces, target_pieces = (
        chunk(value, num_microbatches, name=name, minibatch=minibatch, num_samples=count)
        for name, value in (("the inputs", inputs), ("the targets", targets))
    )
    check_alike(inputs, targets, num_microbatches, minibatch=minibatch)
    return list(zip(input_pieces, target_pieces, strict=True))
