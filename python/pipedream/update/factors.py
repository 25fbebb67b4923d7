"""Sufficient factors. The gradient of a fully connected layer's weight is the product of two matrices, its
factors. If the factors are smaller than the gradient, replicas send each other the factors. Each replica
then makes the mean gradient, and the next version, for itself.

    dense, per round and replica     2 (r - 1) / r  M N       gradients to the shards, and versions from them
    factors                          (r - 1)  K (M + N)       of K rows each, to each of the others

There are r replicas, the weight is M x N, and a replica's factors have K rows. So factors are fewer bytes if
K r (M + N) < 2 M N (Zhang et al., Poseidon, ATC 2017, section 4.2). The rule is in planning/factor_rule.py.
The mean is one product: the factors of all members of the round are stacked, in the order of the replicas.
Each replica multiplies the same values by the same call, and so gets the same bits. A trial before the run
shows whether replicas multiply alike. Owned by the worker's compute thread.

FactorExchange sends one item with the factors of all such weights before the chunks of a round. No version
of these weights is sent, because all replicas make the same one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipedream.common.errors import PipelineError
from pipedream.model.factored import FactoredLayers, Factors
from pipedream.planning import factor_rule

__all__ = [
    "FactorExchange",
    "FactorLayer",
    "RoundFactors",
    "are_smaller",
    "factors_of",
    "item_of",
    "mean_product",
]


@dataclass(frozen=True)
class FactorLayer:
    """A weight whose gradient is pushed as factors."""

    name: str
    parameter: int
    """The weight's position among the stage's parameters."""
    num_rows_max: int
    """The most rows that one replica has in a round."""
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int:
        return self.num_outputs * self.num_inputs * self.dtype.itemsize

    @property
    def factor_bytes(self) -> int:
        """The most bytes of one replica's factors in a round."""
        return self.num_rows_max * (self.num_outputs + self.num_inputs) * self.dtype.itemsize


def are_smaller(layer: FactorLayer, num_replicas: int, pushed_bytes: int | None = None) -> bool:
    """Whether a layer's factors are fewer bytes than its gradient. pushed_bytes: bytes of the gradient as the
    codec would push it; None: without a codec."""
    return factor_rule.are_smaller(layer.factor_bytes, layer.weight_bytes, num_replicas, pushed_bytes)


class RoundFactors:
    """The factors that one replica's backwards leave in a round."""

    def __init__(self, layers: Sequence[FactorLayer]) -> None:
        self._layers = layers
        self._uses: dict[str, list[Factors]] = {layer.name: [] for layer in layers}

    def add(self, name: str, gradients: Tensor, inputs: Tensor) -> None:
        """Adds factors as FactoredLayers gives them."""
        self._uses[name].append(Factors(_copy(gradients), _copy(inputs)))

    @property
    def num_bytes(self) -> int:
        return sum(factor.nbytes for uses in self._uses.values() for factors in uses for factor in factors)

    def take(self) -> list[Factors | None]:
        """Returns the round's factors by layer; None for a weight that no backward used. Raises ValueError
        for more rows than are planned for."""
        taken: list[Factors | None] = []
        for layer in self._layers:
            uses, self._uses[layer.name] = self._uses[layer.name], []
            factors = None if not uses else uses[0] if len(uses) == 1 else _stacked(uses)
            if factors is not None and factors.num_rows > layer.num_rows_max:
                raise ValueError(
                    f"a round gives {layer.name!r} {factors.num_rows} rows at one replica, and its factors"
                    f" were planned for {layer.num_rows_max}: make the plan fit the largest minibatch"
                    " (plan.fitting), or leave 'factors' out of the codec of pushes"
                )
            taken.append(factors)
        return taken


def item_of(
    layers: Sequence[FactorLayer], factors: Sequence[Factors | None], device: torch.device
) -> list[Tensor]:
    """Returns the tensors to send: flags that say which layers have factors, then the gradient factor and the
    input factor of each such layer."""
    has_any = [of_layer is not None for of_layer in factors]
    tensors = [torch.tensor(has_any, device=device).to(torch.uint8)]
    for layer, of_layer in zip(layers, factors, strict=True):
        tensors += _none_of(layer, device) if of_layer is None else of_layer
    return tensors


def factors_of(tensors: Sequence[Tensor]) -> list[Factors | None]:
    """The factors in an item, by layer."""
    has_any, *rest = tensors
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return [Factors(*pair) if has else None for has, pair in zip(has_any.tolist(), pairs, strict=True)]


def mean_product(factors: Mapping[int, Factors], num_members: int) -> Tensor:
    """Returns the mean gradient of a weight over a round. factors: by replica; at least one replica has
    factors. num_members: how many minibatches the round has."""
    gradients, inputs = _stacked([factors[replica] for replica in sorted(factors)])
    return torch.mm(gradients.div_(num_members).t(), inputs)


def _stacked(factors: Sequence[Factors]) -> Factors:
    """Copies the factors into one new tensor. Torch aligns the new memory equally at all replicas. Otherwise
    the order of additions, and so the result's bits, might differ."""
    gradients, inputs = zip(*factors, strict=True)
    return Factors(torch.cat(gradients), torch.cat(inputs))


def _none_of(layer: FactorLayer, device: torch.device) -> Factors:
    widths = (layer.num_outputs, layer.num_inputs)
    return Factors(*(torch.empty(0, width, dtype=layer.dtype, device=device) for width in widths))


def _copy(factor: Tensor) -> Tensor:
    return factor.detach().clone(memory_format=torch.contiguous_format)


class FactorExchange:
    """Exchanges the factors of one stage's weights. At least one weight is pushed as factors."""

    def __init__(
        self,
        weights: Sequence[FactorLayer],
        layers: Mapping[str, Sequence[nn.Linear]],
        *,
        channels_to: Mapping[int, str],
        channels_from: Mapping[int, str],
        replica: int,
        device: torch.device,
    ) -> None:
        """weights: in the order of the stage's parameters.
        layers: the layers that have a weight, by its name. They leave factors inside running().
        channels_to, channels_from: by the other replica."""
        self._weights = weights
        self._index_of = {weight.parameter: index for index, weight in enumerate(weights)}
        self.channels_to = channels_to
        self.channels_from = channels_from
        self._replica = replica
        self._num_replicas = 1 + len(channels_to)
        self._device = device
        self._left = RoundFactors(weights)
        self._layers = FactoredLayers(layers, self._left.add)
        self.around_backward = self._layers.backward
        self._pushed: list[Factors | None] | None = None  # factors of the round that is being pushed
        self._of_rounds: dict[int, dict[int, list[Factors | None]]] = {}
        """The factors of each weight, by round and replica. They are dropped after the update of the
        round."""

    @property
    def parameters(self) -> list[int]:
        """The weights' positions among the stage's parameters."""
        return list(self._index_of)

    @property
    def num_bytes(self) -> int:
        """Bytes of factors that backwards have computed and that are not pushed yet."""
        return self._left.num_bytes

    def counts(self, parameter: int) -> bool:
        """Whether this replica counts the weight in the norm of all gradients. Exactly one replica does."""
        return self._index_of[parameter] % self._num_replicas == self._replica

    def begin_push(self) -> list[Tensor]:
        """Returns the tensors that push this replica's factors of a round."""
        self._pushed = self._left.take()
        return item_of(self._weights, self._pushed, self._device)

    @property
    def has_pushed(self) -> bool:
        """Whether the factors of the round that is being pushed have been sent."""
        return self._pushed is not None

    def end_push(self, round_index: int) -> None:
        """Ends the push of a round, and keeps this replica's factors of it."""
        assert self._pushed is not None
        self._of_rounds.setdefault(round_index, {})[self._replica] = self._pushed
        self._pushed = None

    def take_in(self, other: int, round_index: int, item: Sequence[Tensor]) -> None:
        """Takes the factors that another replica has pushed."""
        self._of_rounds.setdefault(round_index, {})[other] = factors_of(item)

    def mean_of(self, round_index: int, parameter: int, num_minibatches: int) -> Tensor | None:
        """Returns the mean gradient of a weight over the round's minibatches; None if no replica has a
        gradient. Call it after all factors of the round have been received."""
        index = self._index_of[parameter]
        by_replica = {replica: found[index] for replica, found in self._of_rounds[round_index].items()}
        factors = {replica: found for replica, found in by_replica.items() if found is not None}
        return mean_product(factors, num_minibatches) if factors else None

    def end_round(self, round_index: int) -> None:
        """Drops the factors of a round, after its update."""
        del self._of_rounds[round_index]

    def check(self, gradients: Sequence[Tensor | None]) -> None:
        """Raises PipelineError if a weight has an accumulated gradient that is not in any layer's factors,
        because that gradient would be lost. gradients: the accumulated gradients, by parameter."""
        for weight in self._weights:
            if gradients[weight.parameter] is not None:
                raise PipelineError(
                    f"parameter {weight.name!r} has a gradient besides that of its layer, which the first"
                    " microbatch had not shown: leave 'factors' out of the codec of pushes"
                )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Makes the layers compute factors inside the context. Afterwards the layers compute gradients as the
        user wrote them."""
        self._layers.install()
        try:
            yield
        finally:
            self._layers.remove()
