"""Tests channels on a link that is cut, stalls, is slow, changes bytes, or leads to a wrong peer. The channel
reports the right failure in bounded time. It loses nothing, and its memory stays bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
from bad_link import Mischief, Proxy, corrupt_at, cut_after, delay, stall_after
from pipedream import _core
from pipedream.links.keys import find_libzmq
from pipedream.links.liveness import Pulse
from torch.utils.dlpack import from_dlpack, to_dlpack

CHANNEL = "activations of stage 0 to stage 1"
NUM_ELEMENTS = 1 << 16
NUM_SLOTS = 3
HELLO_BYTES = 192
# A failure may take this much longer than peer_timeout, because the machine may be busy. An unbounded wait
# takes much longer.
SLACK_S = 15.0
PEER_TIMEOUT_S = 2.0
PATIENT_S = 30.0


def make_worker(*, sends: bool, peer_timeout_s: float = PEER_TIMEOUT_S, **options: Any) -> _core.Worker:
    core = _core.Worker(
        libzmq_path=find_libzmq(), peer_timeout_s=peer_timeout_s, shares_memory=False, beats=True, **options
    )
    core.add_channel(
        name=CHANNEL,
        sends=sends,
        peer="stage 1 (rank 1)" if sends else "stage 0 (rank 0)",
        channel_id=3,
        tensors=[("float32", 1, NUM_ELEMENTS * 4)],
        num_items=NUM_SLOTS,
    )
    core.seal()
    return core


@contextmanager
def linked(
    mischief: Mischief | None = None,
    *,
    sender_options: dict[str, Any] | None = None,
    receiver_options: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[_core.Worker, _core.Worker]]:
    """Yields a sender and a receiver in this process. If a mischief is given, a proxy with it connects
    them.
    """
    with ExitStack() as stack:
        receiver = make_worker(sends=False, **options, **(receiver_options or {}))
        sender = make_worker(sends=True, **options, **(sender_options or {}))
        for worker in (receiver, sender):
            stack.enter_context(Pulse(worker, options.get("peer_timeout_s", PEER_TIMEOUT_S)))
            stack.callback(worker.close, 0)
        endpoints = receiver.listen()
        if mischief is not None:
            address, *rest = endpoints[CHANNEL].split(" ")
            proxy = stack.enter_context(Proxy(address, mischief))
            endpoints[CHANNEL] = " ".join([proxy.endpoint, *rest])
        sender.connect(endpoints)
        yield sender, receiver


def tensor(minibatch: int) -> torch.Tensor:
    return torch.arange(NUM_ELEMENTS, dtype=torch.float32) + minibatch


def send(sender: _core.Worker, minibatch: int, timeout_s: float = PATIENT_S) -> bool:
    return sender.send_item(CHANNEL, [to_dlpack(tensor(minibatch))], timeout_s=timeout_s)


def receive(receiver: _core.Worker) -> torch.Tensor:
    item = receiver.receive_item(CHANNEL, timeout_s=PATIENT_S)
    assert item is not None, "nothing came"
    (capsule,) = item.take_tensors()
    return from_dlpack(capsule).clone()


def exchange(sender: _core.Worker, receiver: _core.Worker, num_items: int) -> None:
    for minibatch in range(num_items):
        assert send(sender, minibatch)
        assert torch.equal(receive(receiver), tensor(minibatch))


def failure_of(worker: _core.Worker, *, sends: bool) -> tuple[str, str]:
    """Sends or receives until the channel fails. Returns the kind of failure and its message."""
    with pytest.raises(_core.RunFailure) as raised:
        for minibatch in range(1000):
            if sends:
                assert send(worker, minibatch)
            else:
                receive(worker)
    kind, message = raised.value.args
    return kind, message


@pytest.mark.parametrize("after_items", [0, 1, 5])
def test_a_cut_link_is_a_lost_peer_at_both_ends(after_items: int) -> None:
    middle_of_an_item = HELLO_BYTES + after_items * NUM_ELEMENTS * 4 + NUM_ELEMENTS
    with linked(cut_after(middle_of_an_item)) as (sender, receiver):
        exchange(sender, receiver, after_items)
        began = time.monotonic()
        with suppress(_core.RunFailure):  # the sender may fail before it has sent all items
            for minibatch in range(NUM_SLOTS):
                send(sender, after_items + minibatch)
        for worker, sends in ((receiver, False), (sender, True)):
            kind, message = failure_of(worker, sends=sends)
            assert kind == "PeerLost"
            assert CHANNEL in message
            assert ("stage 1 (rank 1)" if sends else "stage 0 (rank 0)") in message
        assert time.monotonic() - began < SLACK_S


def test_a_link_that_stalls_is_a_lost_peer_within_the_bound() -> None:
    with linked(stall_after(HELLO_BYTES + NUM_ELEMENTS)) as (sender, receiver):
        began = time.monotonic()
        send(sender, 0)
        kind, message = failure_of(receiver, sends=False)
        assert kind == "PeerLost"
        assert "stage 0 (rank 0)" in message
        assert time.monotonic() - began < PEER_TIMEOUT_S + SLACK_S


def test_a_slow_link_loses_nothing() -> None:
    with linked(delay(0.01), peer_timeout_s=PATIENT_S) as (sender, receiver):
        exchange(sender, receiver, 10)


def test_a_changed_byte_never_arrives_as_a_tensor() -> None:
    # The positions come after ZeroMQ's greeting and HELLO. They are in the first item: in its header or its
    # payload.
    for position in range(500, 1100, 50):
        with linked(corrupt_at(position), checksums=True) as (sender, receiver):
            send(sender, 0)
            try:
                arrived = receive(receiver)
            except _core.RunFailure as failure:
                assert failure.args[0] in ("CorruptFrame", "PeerLost"), failure.args
            else:
                pytest.fail(f"byte {position} was changed, and {arrived[:4]} arrived")


def test_the_checksum_finds_a_changed_payload() -> None:
    with linked(corrupt_at(HELLO_BYTES + 4096), checksums=True) as (sender, receiver):
        send(sender, 0)
        kind, message = failure_of(receiver, sends=False)
        assert kind == "CorruptFrame"
        assert "payload_checksum" in message


def test_a_changed_payload_arrives_without_checksums() -> None:
    # The changed payload must arrive here. Otherwise the test above would prove nothing.
    with linked(corrupt_at(HELLO_BYTES + 4096)) as (sender, receiver):
        send(sender, 0)
        assert not torch.equal(receive(receiver), tensor(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run_id": 5}, "belongs to run"),
        ({"incarnation": 2}, "stale worker"),
        ({"plan_hash": 9}, "has another plan"),
    ],
)
def test_a_worker_of_another_run_is_refused(options: dict[str, int], words: str) -> None:
    with linked(sender_options=options) as (sender, receiver):
        # The sender may fail first, because HELLO comes before the first item.
        with suppress(_core.RunFailure):
            send(sender, 0)
        kind, message = failure_of(receiver, sends=False)
        assert kind == "CorruptFrame"
        assert words in message


def test_a_peer_that_never_reads_holds_the_sender_up_with_bounded_memory() -> None:
    with linked(peer_timeout_s=PATIENT_S) as (sender, receiver):
        accepted = 0
        while send(sender, accepted, timeout_s=1.0):
            accepted += 1
            assert accepted <= 2 * NUM_SLOTS, "more than the slots of both sides"
        assert accepted >= NUM_SLOTS
        for minibatch in range(accepted):  # no accepted item was lost
            assert torch.equal(receive(receiver), tensor(minibatch))
