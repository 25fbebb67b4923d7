"""Sends and receives tensors and JSON documents outside the schedule: initial weights, final weights,
results, and word of a pause in which memory is planned again.

Tensors and documents are sent in pieces. Both ends know which tensor comes next, so a piece contains only
bytes. All calls block. The worker's compute thread makes them when it trains no minibatch: before the first
minibatch, in a pause, and after the last minibatch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.common.rank_tree import PIECE_BYTES
from pipedream.model.boundary import exportable

__all__ = [
    "receive_document",
    "receive_tensors",
    "relay_document",
    "relay_tensors",
    "send_document",
    "send_tensors",
]


def send_tensors(core: _core.Worker, channel: str, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        _send_bytes(core, channel, _bytes_of(exportable(tensor.cpu())))


def receive_tensors(core: _core.Worker, channel: str, tensors: list[Tensor]) -> None:
    """Receives the values that send_tensors() sent, and writes them into `tensors`, which may be on any
    device."""
    for tensor in tensors:
        landed = torch.empty(tensor.shape, dtype=tensor.dtype)
        _receive_bytes(core, channel, _bytes_of(landed))
        with torch.no_grad():
            tensor.copy_(landed)


def send_document(core: _core.Worker, channel: str, document: Any) -> None:
    """Sends a JSON document: first its size in bytes, then its text."""
    text = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    send_tensors(core, channel, [torch.tensor([text.numel()]), text])


def receive_document(core: _core.Worker, channel: str) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    receive_tensors(core, channel, [size])
    text = torch.empty(int(size), dtype=torch.uint8)
    receive_tensors(core, channel, [text])
    return json.loads(text.numpy().tobytes())


def relay_document(core: _core.Worker, source: str, sink: str) -> Any:
    """Receives a document, sends it on, and returns it."""
    document = receive_document(core, source)
    send_document(core, sink, document)
    return document


def relay_tensors(core: _core.Worker, source: str, sink: str, sizes_bytes: Iterable[int]) -> None:
    """Receives tensors and sends them on, piece by piece. sizes_bytes: the size of each tensor."""
    for num_bytes in sizes_bytes:
        for _ in range(0, num_bytes, PIECE_BYTES):
            core.send_item(sink, [torch.utils.dlpack.to_dlpack(_receive_piece(core, source))])


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _send_bytes(core: _core.Worker, channel: str, content: Tensor) -> None:
    for begin in range(0, content.numel(), PIECE_BYTES):
        piece = content[begin : begin + PIECE_BYTES]
        core.send_item(channel, [torch.utils.dlpack.to_dlpack(piece)])


def _receive_bytes(core: _core.Worker, channel: str, content: Tensor) -> None:
    for begin in range(0, content.numel(), PIECE_BYTES):
        piece = content[begin : begin + PIECE_BYTES]
        piece.copy_(_receive_piece(core, channel))


def _receive_piece(core: _core.Worker, channel: str) -> Tensor:
    item = core.receive_item(channel)
    assert item is not None  # receive_item() waits without a time-out
    (capsule,) = item.take_tensors()
    return from_dlpack(capsule)
