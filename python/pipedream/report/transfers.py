"""Collects the times at which tensors were on their way between stages, and draws them in a trace. An item is
the tensors of one microbatch in one channel.

The core measures the times (csrc/channel/transfer.h). Plain values that are sent as JSON; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pipedream.links.channels import RunChannel
from pipedream.simulate.trace import Clock, Span, shift_ns, spread

__all__ = [
    "ChannelTransfers",
    "ReceivedTransfer",
    "SentTransfer",
    "combine_transfers",
    "draw_transfers",
    "transfers_from_json",
]


class SentTransfer(NamedTuple):
    """The times and sizes of an item at its sender. Times are on the monotonic clock of rank 0's machine."""

    minibatch: int
    microbatch: int
    wire_bytes: int
    """Bytes of the item's tensors after the codec."""
    queued_ns: int
    """When the stage gave the item to the channel."""
    started_ns: int
    """When the receiver had room for the item."""
    copied_ns: int | None
    """When the whole item was copied into staging buffers or into the receiver's memory. None if the
    transport read the tensors directly."""
    framed_ns: int
    """When the first chunk was given to the connection."""
    released_ns: int
    """When the connection had accepted the last chunk. The operating system may send the chunk later."""


class ReceivedTransfer(NamedTuple):
    """The times and sizes of an item at its receiver."""

    minibatch: int
    microbatch: int
    wire_bytes: int
    arrived_ns: int
    """When the receiver noticed the item's first chunk."""
    complete_ns: int
    """When the receiver had the item's last chunk. A copy to the device, or decoding, may follow."""


class ChannelTransfers(NamedTuple):
    """The latest items of one channel, as the sender and the receiver measured them. Oldest items come
    first."""

    channel: str
    sender_rank: int
    receiver_rank: int
    sent: list[SentTransfer]
    received: list[ReceivedTransfer]


def combine_transfers(
    channels: Iterable[RunChannel], reports: Sequence[dict[str, Any]]
) -> list[ChannelTransfers]:
    """Combines the workers' reports. All times become times on the clock of rank 0's machine."""
    found = []
    for channel in channels:
        at_sender, at_receiver = reports[channel.sender], reports[channel.receiver]
        sent, received = at_sender["transfers"][0], at_receiver["transfers"][1]
        sent_shift, received_shift = (
            shift_ns(Clock(*report["clock"]), Clock(*reports[0]["clock"]))
            for report in (at_sender, at_receiver)
        )
        found.append(
            ChannelTransfers(
                channel.name,
                channel.sender,
                channel.receiver,
                [_shifted_sent(row, sent_shift) for row in sent.get(channel.name, [])],
                [_shifted_received(row, received_shift) for row in received.get(channel.name, [])],
            )
        )
    return found


def _shifted_sent(row: Sequence[int], shift: int) -> SentTransfer:
    minibatch, microbatch, wire_bytes, queued, started, copied, framed, released = row
    return SentTransfer(
        *(minibatch, microbatch, wire_bytes, queued + shift, started + shift),
        copied + shift if copied != 0 else None,
        framed + shift,
        released + shift,
    )


def _shifted_received(row: Sequence[int], shift: int) -> ReceivedTransfer:
    minibatch, microbatch, wire_bytes, arrived, complete = row
    return ReceivedTransfer(minibatch, microbatch, wire_bytes, arrived + shift, complete + shift)


def transfers_from_json(rows: Sequence[Any]) -> list[ChannelTransfers]:
    """Makes transfers from their JSON form, in which tuples have become lists."""
    return [
        ChannelTransfers(
            channel,
            sender_rank,
            receiver_rank,
            [SentTransfer(*item) for item in sent],
            [ReceivedTransfer(*item) for item in received],
        )
        for channel, sender_rank, receiver_rank, sent, received in rows
    ]


def draw_transfers(
    transfers: ChannelTransfers,
    worker_names: Sequence[str],
    arguments: dict[str, Any],
    name_of: Callable[[int, int], str],
) -> tuple[list[Span], list[tuple[Span, Span]]]:
    """Returns the spans of one channel, on tracks of its two workers. Also returns an arrow from the sending
    to the arrival of each item.

    worker_names: the workers' names by rank. arguments: facts about the channel, which every span shows.
    name_of: returns the name of the item of (minibatch, microbatch).
    """
    sender, receiver = (worker_names[rank] for rank in (transfers.sender_rank, transfers.receiver_rank))
    send, receive = f"send {transfers.channel}", f"receive {transfers.channel}"

    def spans(worker: str, track: str, times: Iterable[tuple[Any, int, int]]) -> list[Span]:
        return spread(
            Span(worker, track, name_of(item.minibatch, item.microbatch), begin_ns, end_ns)._replace(
                args={
                    "minibatch": item.minibatch,
                    "microbatch": item.microbatch,
                    "bytes": item.wire_bytes,
                    **arguments,
                }
            )
            for item, begin_ns, end_ns in times
        )

    sent, received = transfers.sent, transfers.received
    queued = spans(sender, f"{send}: queued", ((i, i.queued_ns, i.started_ns) for i in sent))
    copied = spans(
        sender, f"{send}: copy", ((i, i.started_ns, i.copied_ns) for i in sent if i.copied_ns is not None)
    )
    on_wire = spans(sender, f"{send}: wire", ((i, i.framed_ns, i.released_ns) for i in sent))
    arrived = spans(receiver, receive, ((i, i.arrived_ns, i.complete_ns) for i in received))
    return [*queued, *copied, *on_wire, *arrived], list(_arrows(sent, on_wire, received, arrived))


def _arrows(
    sent: Sequence[SentTransfer],
    on_wire: Sequence[Span],
    received: Sequence[ReceivedTransfer],
    arrived: Sequence[Span],
) -> Iterator[tuple[Span, Span]]:
    """Yields an arrow for each item whose times both ends have kept."""
    begins = {(item.minibatch, item.microbatch): span for item, span in zip(sent, on_wire, strict=True)}
    for item, span in zip(received, arrived, strict=True):
        begin = begins.get((item.minibatch, item.microbatch))
        if begin is not None:
            yield begin, span
