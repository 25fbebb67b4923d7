"""What replicas of one stage push and pull, over queues in the place of the core's channels."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pipedream import _core
from pipedream.stage.shard_client import ReplicaChannels
from torch.utils.dlpack import from_dlpack

__all__ = ["ReplicaLinks", "channels_of"]


class ReplicaLinks:
    """What has been sent and not received, by channel; one for all replicas."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[Any]] = {}
        self.known_end: int | None = None
        self.sent: list[str] = []
        self.waits: list[tuple[str, int]] = []
        """For what was sent to leave: channel, items that may stay."""

    def send_item(self, channel: str, capsules: list[Any], fields: _core.ItemFields | None = None) -> bool:
        tensors = [from_dlpack(capsule).clone() for capsule in capsules]  # type: ignore[no-untyped-call]
        self.queues.setdefault(channel, deque()).append((tensors, fields or _core.ItemFields()))
        self.sent.append(channel)
        return True

    def receive_item(self, channel: str) -> Any:
        tensors, fields = self.queues[channel].popleft()
        return SimpleNamespace(fields=fields, take_tensors=lambda: tensors)

    def receive_any(self, channels: Any) -> Any:
        raise AssertionError("nobody serves here but the test")

    def stop_serving(self) -> None: ...

    def fail(self, why: str) -> None:
        raise AssertionError(why)

    def wait_until_sent(self, channel: str, num_left_max: int) -> bool:
        self.waits.append((channel, num_left_max))
        return True

    def num_minibatches(self) -> int | None:
        return self.known_end

    def num_queued(self, channel: str) -> int:
        return len(self.queues.get(channel, ()))


def channels_of(replica: int, num_replicas: int) -> ReplicaChannels:
    """Named by sender and receiver: "push 0 1"."""
    others = [other for other in range(num_replicas) if other != replica]

    def names(what: str, *, sends: bool) -> Mapping[int, str]:
        return {o: f"{what} {replica} {o}" if sends else f"{what} {o} {replica}" for o in others}

    return ReplicaChannels(
        names("push", sends=True),
        names("push", sends=False),
        names("pull", sends=True),
        names("pull", sends=False),
    )
