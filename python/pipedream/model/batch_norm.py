"""Makes batch norm work with microbatches. Each microbatch is normalised by its own statistics.

MinibatchStatistics updates the running statistics once per minibatch, as in GPipe. It uses the mean and
variance over all microbatches of the minibatch. If the data yield Microbatches, it is not used: the running
statistics are updated once per microbatch, as in a plain loop that accumulates gradients.

EvaluatedNorms detects a wrong gradient. The backward of a norm in eval mode reads the running statistics
again. Torch updates these in place and does not count the update as a version. So if another minibatch trains
the norm between a forward and its backward, the gradient is silently wrong. A plain loop has the same fault.

Source: GPipe (NeurIPS'19), section 2.2. Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pipedream.model.stage_module import StageModule

__all__ = ["EvaluatedNorms", "MinibatchStatistics", "has_batch_norm"]


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(part, _BatchNorm) for part in module.modules())


class _Moments:
    """Count, mean and sum of squared deviations per channel, merged from parts (Chan et al., 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.squares: Tensor | None = None

    def merge(self, values: Tensor, dtype: torch.dtype) -> None:
        """Adds the values of one microbatch. values: (batch, channels, ...)."""
        if values.numel() == 0:
            return
        dims = [dim for dim in range(values.dim()) if dim != 1]
        variance, mean = torch.var_mean(values.detach().to(dtype), dims, correction=0)
        count = values.numel() // values.shape[1]
        squares = variance * count
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total = self.count + count
        distance = mean - self.mean
        self.squares = self.squares + squares + distance**2 * (self.count * count / total)
        self.mean = self.mean + distance * (count / total)
        self.count = total


class MinibatchStatistics:
    """Collects the batch norms' statistics of one stage over a minibatch. Use `microbatch()` around each
    forward, `recomputation()` around each backward, and `update()` after the last forward.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._norms = [module for module in stage.modules() if isinstance(module, _BatchNorm)]
        self._moments: dict[_BatchNorm, _Moments] = {}
        self._tracking: list[_BatchNorm] = []  # norms that tracked statistics at the latest forward

    def __bool__(self) -> bool:
        return bool(self._norms)

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """A context around the forward of one microbatch."""
        # Norms in eval mode are included, because the forward itself may switch a norm's mode.
        norms = self._tracking = [norm for norm in self._norms if _tracks(norm)]
        hooks = [norm.register_forward_pre_hook(self._collect) for norm in norms]
        try:
            with _not_tracking(norms):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """A context around forwards that are repeated, in a recompute or in the backward of layers that
        checkpoint themselves. It collects nothing, because microbatch() has collected the statistics of the
        first forward.
        """
        with _not_tracking(self._tracking):
            yield

    def update(self) -> None:
        """Updates the running statistics. Call it when the minibatch is complete."""
        with torch.no_grad():
            for norm, moments in self._moments.items():
                _update_running(norm, moments)
        self._moments.clear()

    def _collect(self, norm: Any, inputs: tuple[Any, ...]) -> None:
        assert norm.running_mean is not None
        if not norm.training:
            return
        self._moments.setdefault(norm, _Moments()).merge(inputs[0], norm.running_mean.dtype)


def _tracks(norm: _BatchNorm) -> bool:
    # norm.__dict__ is used because nn.Module's __getattr__ and __setattr__ take ten times as long.
    fields = norm.__dict__
    return fields["track_running_stats"] and fields["_buffers"]["running_mean"] is not None


@contextlib.contextmanager
def _not_tracking(norms: list[_BatchNorm]) -> Iterator[None]:
    # A norm that does not track running statistics uses the batch's statistics in training, and changes no
    # buffer. In eval mode it still uses its running statistics.
    for norm in norms:
        norm.__dict__["track_running_stats"] = False
    try:
        yield
    finally:
        for norm in norms:
            norm.__dict__["track_running_stats"] = True


def _update_running(norm: _BatchNorm, moments: _Moments) -> None:
    if moments.mean is None or moments.squares is None:
        return
    assert norm.running_mean is not None
    assert norm.running_var is not None
    share = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            share = 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(moments.mean, share or 0.0)
    norm.running_var.lerp_(moments.squares / max(moments.count - 1, 1), share or 0.0)


Item = tuple[int, int]
"""A microbatch as (minibatch, microbatch)."""


class EvaluatedNorms:
    """Detects norms whose running statistics change between a forward in eval mode and its backward. Call
    `check()` after each forward that has a graph.
    """

    def __init__(self, stage: StageModule) -> None:
        names = {id(buffer): name.rpartition(".")[0] for name, buffer in stage.stage_buffers()}
        self._stage_index = stage.stage_index
        self._norms: list[tuple[str, nn.Module, Tensor]] = []
        """Each norm with its name and the tensor that counts its steps."""
        for module in stage.modules():
            if isinstance(module, _NormBase) and module.running_mean is not None:
                counter = module.num_batches_tracked
                assert counter is not None
                self._norms.append((names.get(id(counter), type(module).__name__), module, counter))
        self._counts = [counter._version for _, _, counter in self._norms]
        self._evaluated: list[Item | None] = [None] * len(self._norms)
        """For each norm, the item that it evaluated last."""

    def __bool__(self) -> bool:
        return bool(self._norms)

    def check(self, item: Item, in_flight: Container[Item]) -> None:
        """Checks the norms after the forward of a microbatch. item: the microbatch. in_flight: the
        microbatches whose backward is yet to come.

        Raises ValueError if a norm has been trained after it ran in eval mode for a microbatch in flight.
        """
        for index, (name, norm, counter) in enumerate(self._norms):
            # Two tests are needed: a norm in training mode may not count its steps, and a norm that is in
            # eval mode now may have been trained earlier in this forward.
            has_trained = norm.training or counter._version != self._counts[index]
            self._counts[index] = counter._version
            if not has_trained:
                self._evaluated[index] = item
                continue
            evaluated = self._evaluated[index]
            if evaluated is not None and evaluated in in_flight:
                raise ValueError(
                    f"stage {self._stage_index}: layer {name} was evaluated in minibatch {evaluated[0]} and"
                    f" trained in minibatch {item[0]}, before the backward of minibatch {evaluated[0]}, which"
                    " would read running statistics that have moved: leave it in one mode, or give"
                    " schedule='flush' with microbatches=1"
                )
