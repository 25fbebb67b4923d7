"""How long the instructions of a schedule take, and what they send is on its way. Values that never change
once built; any thread; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipedream.common.document import check_number, check_whole

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["TRANSFERS", "StageTimes", "TransferTimes"]

TRANSFERS = ("SEND", "RECV")


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

    def durations(self, wakings_ms: Sequence[Mapping[str, float]] = ()) -> _core.StageDurations:
        """The value by which the core takes them. wakings_ms: by waking, what items of each kind take
        besides."""
        from pipedream import _core

        def either(one_ms: float | None, other_ms: float) -> float:
            return other_ms if one_ms is None else one_ms

        return _core.StageDurations(
            forward_ms=self.forward_ms,
            later_forward_ms=either(self.later_forward_ms, self.forward_ms),
            backward_ms=self.backward_ms,
            later_backward_ms=either(self.later_backward_ms, self.backward_ms),
            recompute_ms=either(self.recompute_ms, self.forward_ms),
            update_ms=self.update_ms,
            push_ms=either(self.push_ms, self.shard_ms),
            pull_ms=self.shard_ms,
            sync_latency_ms=self.sync_latency_ms,
            num_chunks=self.num_chunks,
            push_leads_ms=[*self.push_leads_ms],
            updates_whole=self.updates_whole,
            wakings_ms=[
                (ms.get("FORWARD", 0.0), ms.get("BACKWARD", 0.0), ms.get("UPDATE", 0.0)) for ms in wakings_ms
            ],
            num_replicas=self.num_replicas,
            spare_push_ms=self.spare_push_ms,
            spare_pull_ms=self.spare_shard_ms,
            spare_update_ms=self.spare_update_ms,
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

    def durations(self) -> _core.BoundaryDurations:
        """The value by which the core takes them."""
        from pipedream import _core

        return _core.BoundaryDurations(self.activation_ms, self.gradient_ms, self.latency_ms)
