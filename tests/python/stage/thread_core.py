"""Stands in for the core between threads: its two calls for items outside the schedule."""

from __future__ import annotations

import queue
import threading
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

DEADLINE_S = 60.0  # far beyond any wait: only a deadlock gets here


class Item:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def take_tensors(self) -> list[Any]:
        # Copied no sooner: what is sent is read without a copy until it has arrived.
        return [to_dlpack(tensor.clone()) for tensor in self._tensors]


class ThreadCore:
    """Of all workers of a run."""

    def __init__(self) -> None:
        self.channels: dict[str, queue.Queue[list[Tensor]]] = {}
        self._lock = threading.Lock()  # two that ask for a new channel at once get the same

    def channel(self, name: str) -> queue.Queue[list[Tensor]]:
        with self._lock:
            return self.channels.setdefault(name, queue.Queue())

    def send_item(self, channel: str, tensors: list[Any], timeout_s: float = 1e9) -> bool:
        self.channel(channel).put([from_dlpack(capsule) for capsule in tensors])
        return True

    def receive_item(self, channel: str, timeout_s: float = 1e9) -> Item:
        return Item(self.channel(channel).get(timeout=DEADLINE_S))
