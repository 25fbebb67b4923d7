"""Finds the pairs of workers whose sender can write into the receiver's device memory.

    receiver   offers a little of its device's memory
    sender     tries to write there (csrc/transport/device_offer.h), and publishes the result

This happens before memory is planned. Torch-free; compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipedream import _core
from pipedream.links.channels import RunChannel

__all__ = ["Reach", "agree_on_device_memory", "place_on_devices"]

Reach = dict[tuple[int, int], str]
"""(sender, receiver) -> why the sender cannot write into the receiver's device memory; empty if it can."""

ON_HOST = "a worker that computes on the host has no device memory"


def agree_on_device_memory(
    core: _core.Worker,
    rank: int,
    channels: Sequence[RunChannel],
    *,
    on_host: bool,
    publish: Callable[[str, Any], None],
    wait_for: Callable[[list[str]], list[Any]],
) -> Reach:
    """Finds out whether a sender of device tensors can write into the receiver's device memory, for all pairs
    to which this rank belongs. Both ranks of a pair get the same result.

    publish: puts a value into the run's rendezvous under a key. wait_for: waits for the values of several
    keys. on_host: whether this worker computes on the host; such a worker waits for no other.
    """
    pairs = {(c.sender, c.receiver) for c in channels if c.on_device}
    senders = sorted(sender for sender, receiver in pairs if receiver == rank)
    receivers = sorted(receiver for sender, receiver in pairs if sender == rank)
    if on_host:
        offer, why_none = "", ON_HOST
    else:
        offer, why_none = core.offer_device_memory() if senders else ("", "")
    publish(f"device memory/{rank}", {"offer": offer, "why": why_none})
    reach: Reach = {}
    if on_host:
        reach |= {(rank, receiver): ON_HOST for receiver in receivers}
    else:
        offers = wait_for([f"device memory/{receiver}" for receiver in receivers])
        for receiver, offered in zip(receivers, offers, strict=True):
            reach[rank, receiver] = offered["why"] or core.why_out_of_reach(offered["offer"])
    publish(f"reach/{rank}", {str(receiver): why for (_, receiver), why in reach.items()})
    found = wait_for([f"reach/{sender}" for sender in senders]) if offer else []
    for sender, by_receiver in zip(senders, found, strict=bool(offer)):
        reach[sender, rank] = by_receiver[str(rank)]
    return {(sender, rank): why_none for sender in senders} | reach


def place_on_devices(channels: Sequence[RunChannel], reach: Reach) -> list[RunChannel]:
    """Marks the channels on which the sender writes into the receiver's device memory. Returns all
    channels."""

    def is_placed(channel: RunChannel) -> bool:
        reached = reach.get((channel.sender, channel.receiver)) == ""
        return reached and channel.on_device and not channel.is_encoded

    return [replace(c, places_on_device=True) if is_placed(c) else c for c in channels]
