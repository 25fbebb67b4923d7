"""Replicas may send each other factors in place of gradients. The gradient of a fully connected layer's
weight is the product of two matrices, its factors. If the factors are smaller than the gradient, replicas
send each other the factors. Each replica then computes the mean gradient and the weight's next version.

With r replicas, a weight of M x N, and factors of K rows, a replica sends this many numbers in a round:

    as a gradient     2 (r - 1) / r  M N     gradients to the owners of shards, and its shard's new version
    as factors        (r - 1)  K (M + N)     its factors to each other replica

So factors are fewer bytes if K r (M + N) < 2 M N (Zhang et al., Poseidon, ATC 2017, section 4.2). The rule is
in planning/factor_rule.py. Each replica stacks the factors of all replicas in the order of the replicas, and
multiplies the two stacks by one call. So all replicas get the same mean, bit for bit. A trial before the run
shows whether replicas multiply alike (worker/factor_choice.py). No replica sends a version of these weights,
because all replicas make the same version. Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipedream.common.errors import PipelineError
from pipedream.model.factored import FactoredLayers, Factors

__all__ = [
    "FactorExchange",
    "FactorLayer",
    "RoundFactors",
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


class RoundFactors:
    """Collects the factors that one replica's backwards compute in a round."""

    def __init__(self, layers: Sequence[FactorLayer]) -> None:
        self._layers = layers
        self._uses: dict[str, list[Factors]] = {layer.name: [] for layer in layers}

    def add(self, name: str, gradients: Tensor, inputs: Tensor) -> None:
        """Copies and stores the factors of one use of the weight. FactoredLayers calls it in a backward."""
        self._uses[name].append(Factors(_copy(gradients), _copy(inputs)))

    @property
    def num_bytes(self) -> int:
        return sum(factor.nbytes for uses in self._uses.values() for factors in uses for factor in factors)

    def take(self) -> list[Factors | None]:
        """Returns the round's factors in the order of the layers, and forgets them. The entry of a weight
        that no backward used is None. Raises ValueError if a weight has more rows than num_rows_max."""
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
    """Returns the tensors to send: flags that say which layers have factors, then the two factors of every
    layer. The factors of a layer that has none are empty tensors."""
    has_any = [of_layer is not None for of_layer in factors]
    tensors = [torch.tensor(has_any, device=device).to(torch.uint8)]
    for layer, of_layer in zip(layers, factors, strict=True):
        tensors += _none_of(layer, device) if of_layer is None else of_layer
    return tensors


def factors_of(tensors: Sequence[Tensor]) -> list[Factors | None]:
    """Reads an item that item_of() has made. Returns the factors in the order of the layers; None for a layer
    that has none."""
    has_any, *rest = tensors
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return [Factors(*pair) if has else None for has, pair in zip(has_any.tolist(), pairs, strict=True)]


def mean_product(factors: Mapping[int, Factors], num_members: int) -> Tensor:
    """Returns the mean gradient of a weight over a round. factors: by replica, at least one. Replicas without
    factors are left out. num_members: the divisor, which is the number of minibatches in the round."""
    gradients, inputs = _stacked([factors[replica] for replica in sorted(factors)])
    return torch.mm(gradients.div_(num_members).t(), inputs)


def _stacked(factors: Sequence[Factors]) -> Factors:
    """Stacks the rows of all factors in two new tensors, even if there is only one pair of factors. The order
    in which a product is added up, and so its bits, depends on the alignment of the memory. Torch aligns new
    memory equally at all replicas."""
    gradients, inputs = zip(*factors, strict=True)
    return Factors(torch.cat(gradients), torch.cat(inputs))


def _none_of(layer: FactorLayer, device: torch.device) -> Factors:
    widths = (layer.num_outputs, layer.num_inputs)
    return Factors(*(torch.empty(0, width, dtype=layer.dtype, device=device) for width in widths))


def _copy(factor: Tensor) -> Tensor:
    return factor.detach().clone(memory_format=torch.contiguous_format)


class FactorExchange:
    """Exchanges the factors of one stage's weights between the replicas. At least one weight is pushed as
    factors."""

    def __init__(
        self,
        weights: Sequence[FactorLayer],
        layers: Mapping[str, Sequence[nn.Linear]],
        *,
        replica: int,
        num_replicas: int,
        device: torch.device,
    ) -> None:
        """weights: the weights pushed as factors, in the order of the stage's parameters.
        layers: by the weight's name, the layers that use it. They compute factors while the context of
        running() is open, and ordinary gradients otherwise."""
        self._weights = weights
        self._index_of = {weight.parameter: index for index, weight in enumerate(weights)}
        self._replica = replica
        self._num_replicas = num_replicas
        self._device = device
        self._left = RoundFactors(weights)
        self._layers = FactoredLayers(layers, self._left.add)
        self.around_backward = self._layers.backward
        self._pushed: list[Factors | None] | None = None  # factors of the round that is being pushed
        self._of_rounds: dict[int, dict[int, list[Factors | None]]] = {}
        """The factors of each weight, by round and replica. Each round's are kept until its update."""

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
        """Takes this replica's factors of a round, and returns the tensors to push."""
        self._pushed = self._left.take()
        return item_of(self._weights, self._pushed, self._device)

    @property
    def has_pushed(self) -> bool:
        """Whether begin_push() has taken the round's factors, and end_push() has not been called yet."""
        return self._pushed is not None

    def end_push(self, round_index: int) -> None:
        """Ends the push of a round. Keeps this replica's own factors, because the mean needs them too."""
        assert self._pushed is not None
        self._of_rounds.setdefault(round_index, {})[self._replica] = self._pushed
        self._pushed = None

    def take_in(self, other: int, round_index: int, item: Sequence[Tensor]) -> None:
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
        """Raises PipelineError if a weight has an accumulated gradient. The weight's layers give factors, so
        the gradient comes from another use and would be lost. gradients: by parameter."""
        for weight in self._weights:
            if gradients[weight.parameter] is not None:
                raise PipelineError(
                    f"parameter {weight.name!r} has a gradient besides that of its layer, which the first"
                    " microbatch had not shown: leave 'factors' out of the codec of pushes"
                )

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Makes the layers compute factors inside the context. Afterwards the layers compute gradients as the
        user wrote them."""
        return self._layers.installed()
