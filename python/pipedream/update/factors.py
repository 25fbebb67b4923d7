"""Sufficient factors: of a fully connected layer's weight replicas send each other not the gradient but its
two factors, where these are smaller, and each makes the mean gradient, and the next version, for itself.

    dense, per round and replica     2 (r - 1) / r  M N       gradients to the shards, and versions from them
    factors                          (r - 1)  K (M + N)       of K rows each, to each of the others

r: replicas; W: M x N. So factors pay for K r (M + N) < 2 M N (Zhang et al., Poseidon, ATC 2017, section 4.2).
The rule is planning/factor_rule.py's. The mean is one product, of the factors of all members of the round,
one below the other in the order of the replicas. Each replica makes it of the same values by the same call,
and so of the same bits; that replicas multiply alike is tried before the run. Owned by the worker's compute
thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedream.model.factored import Factors
from pipedream.planning import factor_rule

__all__ = ["FactorLayer", "RoundFactors", "are_smaller", "factors_of", "item_of", "mean_product"]


@dataclass(frozen=True)
class FactorLayer:
    """A weight whose gradient is pushed as factors."""

    name: str
    parameter: int
    """Its position among the stage's."""
    num_rows_max: int
    """The most rows of one replica in a round."""
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int:
        return self.num_outputs * self.num_inputs * self.dtype.itemsize

    @property
    def factor_bytes(self) -> int:
        """At most, of one replica in a round."""
        return self.num_rows_max * (self.num_outputs + self.num_inputs) * self.dtype.itemsize


def are_smaller(layer: FactorLayer, num_replicas: int, pushed_bytes: int | None = None) -> bool:
    """Whether factors are fewer bytes than what they stand for. pushed_bytes: of the whole gradient as it
    would be pushed else; None: as it is."""
    return factor_rule.are_smaller(layer.factor_bytes, layer.weight_bytes, num_replicas, pushed_bytes)


class RoundFactors:
    """Factors that the backwards of one replica leave of a round."""

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
    """Returns the tensors that travel: which layers have factors, and the gradients and inputs of each."""
    has_any = [of_layer is not None for of_layer in factors]
    tensors = [torch.tensor(has_any, device=device).to(torch.uint8)]
    for layer, of_layer in zip(layers, factors, strict=True):
        tensors += _none_of(layer, device) if of_layer is None else of_layer
    return tensors


def factors_of(tensors: Sequence[Tensor]) -> list[Factors | None]:
    """By layer, of an item."""
    has_any, *rest = tensors
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return [Factors(*pair) if has else None for has, pair in zip(has_any.tolist(), pairs, strict=True)]


def mean_product(factors: Mapping[int, Factors], num_members: int) -> Tensor:
    """The mean over a round's members of gradients that are given as factors, by replica: at least one."""
    gradients, inputs = _stacked([factors[replica] for replica in sorted(factors)])
    return torch.mm(gradients.div_(num_members).t(), inputs)


def _stacked(factors: Sequence[Factors]) -> Factors:
    """In memory of its own, which torch has aligned: where it lies may decide in which order it is added."""
    gradients, inputs = zip(*factors, strict=True)
    return Factors(torch.cat(gradients), torch.cat(inputs))


def _none_of(layer: FactorLayer, device: torch.device) -> Factors:
    widths = (layer.num_outputs, layer.num_inputs)
    return Factors(*(torch.empty(0, width, dtype=layer.dtype, device=device) for width in widths))


def _copy(factor: Tensor) -> Tensor:
    return factor.detach().clone(memory_format=torch.contiguous_format)
