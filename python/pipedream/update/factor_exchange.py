"""One replica's exchange of factors with the others of its stage: those that its backwards leave, and of
every round those of all.

Before the chunks of a round goes one item with the factors of all weights that are pushed so. Nothing of them
is pulled: all have the same, and make the same of it. Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipedream import _core
from pipedream.common.errors import PipelineError
from pipedream.model.factored import FactoredLayers, Factors
from pipedream.update import pushes
from pipedream.update.factors import FactorLayer, RoundFactors, factors_of, item_of, mean_product

__all__ = ["FactorExchange"]


class FactorExchange:
    """The exchange of factors for the weights of one stage that are pushed so, at least one."""

    def __init__(
        self,
        core: pushes.ItemLinks,
        weights: Sequence[FactorLayer],
        layers: Mapping[str, Sequence[nn.Linear]],
        *,
        channels_to: Mapping[int, str],
        channels_from: Mapping[int, str],
        replica: int,
        device: torch.device,
    ) -> None:
        """weights: in the order of the stage's parameters. layers: by a weight's name, who has it; they leave
        factors between begin() and release(). channels_to, channels_from: by the other replica."""
        self._core = core
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
        self._pushed: list[Factors | None] | None = None  # of the round that is being pushed
        self._of_rounds: dict[int, dict[int, list[Factors | None]]] = {}
        """By round that is not over, and replica: those of each weight."""

    @property
    def parameters(self) -> list[int]:
        """The weights' positions among the stage's parameters."""
        return list(self._index_of)

    @property
    def num_bytes(self) -> int:
        """Bytes that backwards have left and that are not pushed."""
        return self._left.num_bytes

    def counts(self, parameter: int) -> bool:
        """Whether this replica counts a weight in the norm of all gradients, which only one does."""
        return self._index_of[parameter] % self._num_replicas == self._replica

    def push(self, num_summed: int) -> list[Tensor]:
        """To all others, what this replica has of a round, of so many microbatches. Gives what it sends."""
        self._pushed = self._left.take()
        item = item_of(self._weights, self._pushed, self._device)
        items = [(channel, pushes.item_of(item)) for channel in self.channels_to.values()]
        self._core.send_items(items, _core.ItemFields(num_minibatches=num_summed))
        return item

    @property
    def has_pushed(self) -> bool:
        """Whether that has been done of the round whose gradients are pushed now."""
        return self._pushed is not None

    def end_push(self, round_index: int) -> None:
        """All of the round is pushed."""
        assert self._pushed is not None
        self._of_rounds.setdefault(round_index, {})[self._replica] = self._pushed
        self._pushed = None

    def take_in(self, other: int, round_index: int, item: Sequence[Tensor]) -> None:
        """Takes the factors that this replica has pushed."""
        self._of_rounds.setdefault(round_index, {})[other] = factors_of(item)

    def mean_of(self, round_index: int, parameter: int, num_minibatches: int) -> Tensor | None:
        """The mean gradient of a weight over the round's minibatches, once all have come; None where nobody
        has one."""
        index = self._index_of[parameter]
        by_replica = {replica: found[index] for replica, found in self._of_rounds[round_index].items()}
        factors = {replica: found for replica, found in by_replica.items() if found is not None}
        return mean_product(factors, num_minibatches) if factors else None

    def end_round(self, round_index: int) -> None:
        """It is updated."""
        del self._of_rounds[round_index]

    def check(self, gradients: Sequence[Tensor | None]) -> None:
        """gradients: by parameter, that backwards have accumulated. Raises PipelineError for one that no
        layer has left as factors, which would be lost."""
        for weight in self._weights:
            if gradients[weight.parameter] is not None:
                raise PipelineError(
                    f"parameter {weight.name!r} has a gradient besides that of its layer, which the first"
                    " microbatch had not shown: leave 'factors' out of the codec of pushes"
                )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The layers leave factors inside, and are the user's again afterwards."""
        self._layers.install()
        try:
            yield
        finally:
            self._layers.remove()
