"""What replicas of one stage push and pull, over queues in the place of the core's channels."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
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
        self.slow: set[str] = set()
        """Channels from which nothing leaves but for who waits."""
        self.posted: list[tuple[str, tuple[int, int]]] = []
        """Channel, and the address and bytes at which an item of it may land."""

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

    def post_items(self, channel: str, places: Sequence[tuple[int, int]]) -> None:
        self.posted += [(channel, place) for place in places]

    def wait_until_sent(self, channel: str, num_left_max: int, timeout_s: float = 1e9) -> bool:
        if timeout_s == 0.0:
            return channel not in self.slow
        self.waits.append((channel, num_left_max))
        self.sent.append(f"waited for {channel}")
        return True

    def num_minibatches(self) -> int | None:
        return self.known_end

    def end_events(self) -> int:
        return 0

    def num_queued(self, channel: str) -> int:
        return len(self.queues.get(channel, ()))


def channels_of(
    replica: int, num_replicas: int, num_spares: int = 0, *, posts: bool = False
) -> ReplicaChannels:
    """Named by sender and receiver: "push 0 1". posts: where versions are to land."""
    owners = range(num_replicas + num_spares)

    def names(what: str, *, sends: bool) -> Mapping[int, str]:
        found = owners if sends == (what == "push") else range(num_replicas)
        others = [other for other in found if other != replica]
        return {o: f"{what} {replica} {o}" if sends else f"{what} {o} {replica}" for o in others}

    return ReplicaChannels(
        names("push", sends=True),
        names("push", sends=False),
        names("pull", sends=True),
        names("pull", sends=False),
        frozenset(names("pull", sends=False) if posts else ()),
    )
