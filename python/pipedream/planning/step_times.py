"""How long the instructions of a schedule take, and what they send is on its way. Values that never change
once built; any thread; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipedream.common.document import check_number, check_whole

__all__ = ["SYNC", "TRANSFERS", "StageTimes", "TransferTimes"]

TRANSFERS = ("SEND", "RECV")
SYNC = ("push", "pull")
"""The kinds of what goes between the replicas of a stage."""


@dataclass(frozen=True)
class StageTimes:
    """How long a stage takes, in milliseconds: per microbatch, and `update_ms` per update.

    `recompute_ms` None stands for forward_ms. `later_forward_ms` and `later_backward_ms` are of all
    microbatches of a minibatch but the first, which meets a new version and no gradients; None: as the first.
    `shard_ms` is how long a replica's shard, pushed or pulled, is on its way to one other replica; `push_ms`
    is of what is pushed, where that is not as much; `sync_latency_ms` is besides, as a link's.
    A shard travels in `num_chunks` equal chunks: one is updated, and leaves for the others, while the next
    come. `push_leads_ms` are by its owner: how long before the end of the last backward the first of its
    chunks is pushed, and the last one; none: all are after it. `updates_whole`: an update waits for all
    chunks, as where norms are measured.

    Of a stage with spares, who count on from its num_replicas, `spare_push_ms` is how long a push to a spare
    is on its way, and `spare_shard_ms` what of a pull from it is left when all pushes have come: its chunks
    leave while others come.

    Raises ValueError naming the field for what is negative or not finite.
    """

    forward_ms: float
    backward_ms: float
    update_ms: float = 0.0
    recompute_ms: float | None = None
    shard_ms: float = 0.0
    later_forward_ms: float | None = None
    later_backward_ms: float | None = None
    push_ms: float | None = None
    sync_latency_ms: float = 0.0
    num_replicas: int | None = None
    spare_push_ms: float = 0.0
    spare_shard_ms: float = 0.0
    spare_update_ms: float = 0.0
    num_chunks: int = 1
    push_leads_ms: Sequence[tuple[float, float]] = ()
    updates_whole: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("forward_ms", "backward_ms", "update_ms", "shard_ms", "sync_latency_ms"),
            *("spare_push_ms", "spare_shard_ms", "spare_update_ms"),
        ):
            check_number(name, getattr(self, name))
        check_whole("num_chunks", self.num_chunks, at_least=1)
        for leads_ms in self.push_leads_ms:
            for lead_ms in leads_ms:
                check_number("push_leads_ms", lead_ms)
        for name in ("recompute_ms", "later_forward_ms", "later_backward_ms", "push_ms"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))

    def is_spare(self, replica: int) -> bool:
        return self.num_replicas is not None and replica >= self.num_replicas

    def of_exchange(self, kind: str, owner: int) -> float:
        """Milliseconds of what is pushed to the owner of a shard, or pulled from it; of a norm none."""
        if kind not in SYNC:
            return 0.0
        if self.is_spare(owner):
            return self.spare_push_ms if kind == "push" else self.spare_shard_ms
        return self.shard_ms if kind == "pull" or self.push_ms is None else self.push_ms

    def of(self, opcode: str, microbatch: int = 0, replica: int = 0) -> float:
        """Milliseconds of one instruction."""
        if opcode == "FORWARD":
            later_ms = self.later_forward_ms if microbatch else None
            return self.forward_ms if later_ms is None else later_ms
        if opcode == "RECOMPUTE":
            return self.forward_ms if self.recompute_ms is None else self.recompute_ms
        if opcode == "BACKWARD":
            later_ms = self.later_backward_ms if microbatch else None
            return self.backward_ms if later_ms is None else later_ms
        if opcode == "UPDATE":
            return self.spare_update_ms if self.is_spare(replica) else self.update_ms
        if opcode in TRANSFERS:  # they keep the link, not the worker
            return 0.0
        raise ValueError(
            f"opcode is {opcode!r}: known are FORWARD, RECOMPUTE, BACKWARD, UPDATE, SEND and RECV"
        )


@dataclass(frozen=True)
class TransferTimes:
    """How long one microbatch is on its way over a boundary, in milliseconds, downstream and upstream. What
    tied parameters and norms send takes no time beside it; what replicas do StageTimes.shard_ms says."""

    activation_ms: float = 0.0
    gradient_ms: float = 0.0
    latency_ms: float = 0.0
    """Besides, in which the link may carry the next item."""

    def __post_init__(self) -> None:
        for name in ("activation_ms", "gradient_ms", "latency_ms"):
            check_number(name, getattr(self, name))

    def of(self, kind: str) -> float:
        """Milliseconds of one item of an edge of that kind."""
        return {"activation": self.activation_ms, "gradient": self.gradient_ms}.get(kind, 0.0)
