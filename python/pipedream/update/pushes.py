"""The pushes of one replica. It sends its gradients of a round to the owners of the shards, chunk by chunk.
Factors (factors.py) are pushed once all factors of the round are complete.

Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import to_dlpack

from pipedream import _core
from pipedream.common.errors import PipelineError
from pipedream.model.boundary import exportable
from pipedream.update.gradients import in_order
from pipedream.update.shards import Chunk

__all__ = ["ItemLinks", "RoundPushes", "bytes_of", "copied_bytes", "item_of"]


class ItemLinks(Protocol):
    """The part of the core that carries items between replicas."""

    def make_exchange(self, **spec: Any) -> _core.ShardExchange: ...
    def send_items(self, items: Sequence[tuple[str, list[Any]]], fields: _core.ItemFields = ...) -> None: ...
    def wait_until_sent(self, channel: str, num_left_max: int, timeout_s: float = ...) -> bool: ...
    def num_minibatches(self) -> int | None: ...
    def receive_any(self, channels: Sequence[str]) -> tuple[int, _core.ReceivedItem] | None: ...
    def stop_serving(self) -> None: ...
    def fail(self, why: str) -> None: ...


class RoundPushes:
    """Pushes one replica's gradients of a round, chunk by chunk, in a fixed order. A chunk is sent as soon as
    the backward has accumulated its gradients, or when the backward is over. Hooks of the leaves call
    accumulated().

    A layer that checkpoints itself may accumulate a parameter's gradient several times in one backward. If
    that happens in the first backward, the parameter waits for the end of every later one."""

    def __init__(
        self,
        core: ItemLinks,
        channels: Mapping[int, str],
        chunks: Mapping[int, Sequence[Chunk]],
        dtypes: Mapping[int, torch.dtype],
        num_parameters: int,
        *,
        feeds_back: bool,
        factored: Collection[int] = (),
        push_factors: Callable[[int], None] | None = None,
        before_sending: Callable[[Tensor | None], None] | None = None,
    ) -> None:
        """channels: by receiver.
        chunks: by shard, in the order in which they are sent.
        dtypes: by shard, the dtype in which its chunks travel.
        feeds_back: whether the codec adds to a gradient the values that it left out of earlier ones.
        factored: the parameters whose gradients are pushed as factors.
        push_factors: called to push the gradients of these parameters, with the number of microbatches.
        before_sending: called before a chunk is sent: with the copy if a copy of the chunk is sent, otherwise
            with None.
        """
        self._core = core
        self._channels = channels
        self._chunks = chunks
        self._dtypes = dtypes
        self._feeds_back = feeds_back
        self._factored = frozenset(factored)
        self._push_factors = push_factors
        self._before_sending = before_sending
        self._complete: set[int] = set()  # factored parameters that are complete in this backward
        self._accumulated: dict[int, Tensor] = {}
        """By parameter: the leaf of each parameter without factors whose gradient of this backward is
        complete."""
        self.gradients: dict[int, Tensor] = {}
        """By parameter: the flat, unscaled gradients that were sent, at least in part, before the backward
        was over."""
        self._num_accumulated = [0] * num_parameters  # in this backward
        self._once: list[bool] | None = None  # whether the first backward accumulated each parameter once
        self._num_sent = dict.fromkeys(channels, 0)  # chunks of this round that have left
        self._awaited = {
            other: [frozenset(piece.parameter for piece in chunk.pieces) for chunk in chunks[other]]
            for other in channels
        }
        """The parameters of each chunk, by receiver."""
        self._is_open = False
        self._loss_scale = 1.0
        self._num_summed = 1

    def begin(self, loss_scale: float, num_summed: int) -> None:
        """Begins the last backward of a round. loss_scale: the factor of its loss. num_summed: how many
        microbatches' gradients are summed after it."""
        self._is_open = True
        self._loss_scale = loss_scale
        self._num_summed = num_summed

    def accumulated(self, parameter: int, leaf: Tensor) -> None:
        """Notes that a backward has added to the leaf's gradient, and sends the chunks that are complete
        now."""
        if not self._is_open:
            return
        self._num_accumulated[parameter] += 1
        if parameter in self._accumulated or parameter in self._complete:
            raise PipelineError(
                "a parameter's gradient was accumulated again after it had been pushed, which the first"
                " backward had not done: a layer that checkpoints itself must do so in every minibatch"
            )
        if self._once is None or not self._once[parameter]:
            return
        if parameter in self._factored:
            self._complete.add(parameter)
            if len(self._complete) == len(self._factored):
                assert self._push_factors is not None
                with _disable_current_modes():  # a meter must not count this with the backward
                    self._push_factors(self._num_summed)
            return
        if leaf.grad is None:  # the layer has made no gradient
            return
        self._accumulated[parameter] = leaf
        with _disable_current_modes():  # as above
            self._send(self._completed(), self._num_summed)

    def send_rest(self, gradients: Sequence[Tensor | None], num_summed: int) -> None:
        """Sends the chunks that are not sent yet, after the round's last backward. gradients: all of the
        round, by parameter.
        num_summed: how many microbatches' gradients they are the sum of."""
        self._is_open = False
        rest = [
            self._item(other, chunk, [gradients[piece.parameter] for piece in chunk.pieces])
            for other in self._channels
            for chunk in self._chunks[other][self._num_sent[other] :]
        ]
        self._send(rest, num_summed)
        if self._once is None:
            self._once = [count == 1 for count in self._num_accumulated]
        self.gradients = {}
        self._accumulated = {}
        self._complete = set()
        self._num_accumulated = [0] * len(self._num_accumulated)
        self._num_sent = dict.fromkeys(self._channels, 0)

    def _completed(self) -> list[tuple[str, list[Any]]]:
        """Returns the chunks of which all gradients are there now, for all owners."""
        items = []
        for other, awaited in self._awaited.items():
            while self._num_sent[other] < len(awaited) and self._has(awaited[self._num_sent[other]]):
                chunk = self._chunks[other][self._num_sent[other]]
                items.append(self._item(other, chunk, [self._flat(p.parameter) for p in chunk.pieces]))
                self._num_sent[other] += 1
        return items

    def _has(self, parameters: frozenset[int]) -> bool:
        return parameters <= self._accumulated.keys()

    def _flat(self, parameter: int) -> Tensor | None:
        if parameter not in self.gradients:
            leaf = self._accumulated[parameter]
            gradient = in_order(leaf.grad, leaf, self._loss_scale)
            assert gradient is not None
            self.gradients[parameter] = gradient
        return self.gradients[parameter]

    def _item(self, other: int, chunk: Chunk, gradients: Sequence[Tensor | None]) -> tuple[str, list[Any]]:
        # With feedback a chunk is sent even if its gradient is missing, because it also carries the values
        # that the codec left out of earlier gradients.
        always = self._feeds_back and self._dtypes[other].is_floating_point
        flags = torch.tensor([always or part is not None for part in gradients], dtype=torch.uint8)
        content = _content(chunk, gradients).view(self._dtypes[other])
        if self._before_sending is not None:
            self._before_sending(None if is_filled(chunk) else content)
        return self._channels[other], item_of([flags.to(content.device), content])

    def _send(self, items: Sequence[tuple[str, list[Any]]], num_summed: int) -> None:
        if items:
            self._core.send_items(items, _core.ItemFields(num_minibatches=num_summed))


def item_of(tensors: Sequence[Tensor]) -> list[Any]:
    """The capsules by which the core takes the tensors of an item."""
    return [to_dlpack(exportable(tensor)) for tensor in tensors]


def is_filled(chunk: Chunk) -> bool:
    """Whether one gradient fills the chunk, so that the chunk is sent without a copy."""
    return chunk.pieces[0].num_bytes == chunk.num_bytes


def _content(chunk: Chunk, gradients: Sequence[Tensor | None]) -> Tensor:
    """Returns the bytes of a chunk, without a copy if one piece fills the chunk. gradients: the gradients of
    the parameters that the chunk's pieces belong to."""
    first, gradient = chunk.pieces[0], gradients[0]
    if gradient is not None and is_filled(chunk):
        return bytes_of(gradient[first.first : first.first + first.count])
    device = next((gradient.device for gradient in gradients if gradient is not None), None)
    content = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=device)
    places = content.split_with_sizes(chunk.split_bytes)
    zeros = [gap for gap in places[::2] if gap.numel()]  # codecs read the gaps between pieces, too
    targets, sources = [], []
    for piece, place, of_piece in zip(chunk.pieces, places[1::2], gradients, strict=True):
        if of_piece is None:
            zeros.append(place)
            continue
        targets.append(place)
        whole = bytes_of(of_piece)
        first_byte = piece.first * of_piece.element_size()
        sources.append(whole if piece.is_whole else whole[first_byte : first_byte + piece.num_bytes])
    if targets:
        torch._foreach_copy_(targets, sources)
    if zeros:
        torch._foreach_zero_(zeros)
    return content


def copied_bytes(chunks: Iterable[Chunk]) -> int:
    """Returns how many bytes of these chunks are copied before they are sent."""
    return sum(chunk.num_bytes for chunk in chunks if not is_filled(chunk))


def bytes_of(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)
