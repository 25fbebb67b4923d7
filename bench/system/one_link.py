"""Compares one ZeroMQ connection per pair of workers with one per channel.

    python bench/system/one_link.py

This is a prototype in pyzmq with PAIR sockets and a monitor for each, as csrc/transport/zmq has them. It
opens the connections of one worker of a replicated plan: first one connection per channel, then one per peer.
It measures:

- the file descriptors, and the time to open all connections
- the time of a message of 4 KiB and its answer, while nothing else is sent
- the time of such a message right after a push of 64 chunks of 1 MiB. The push goes over another connection
  if there is one per channel, and over the same connection if there is one per peer.

Both ends of a connection are processes of this machine. Each round measures both ways in turn, and each
figure is the least of all rounds. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from multiprocessing.connection import Connection

import torch
import zmq
from pipedream import Plan, _core
from pipedream.links.channels import channels_of_run
from pipedream.model.boundary import Boundary

SMALL_BYTES, CHUNK_BYTES, NUM_CHUNKS = 4096, 1 << 20, 64
PLANS = {"1-1": (1, 1), "2-2": (2, 2), "4-4": (4, 4), "8": (8,)}


def channel_ends(replicas: tuple[int, ...]) -> tuple[int, int]:
    """Returns two figures of the worker with the most channels: their number, and to how many other workers
    they lead. `replicas` has the number of replicas of each stage.
    """
    plan = Plan.replicated(len(replicas), replicas)
    schedule = _core.ScheduleOptions(
        schedule="pipedream",
        in_flight=list(plan.in_flight),
        num_microbatches=1,
        placement=plan.placement,
    )
    cuts = {stage: Boundary.of(torch.zeros(4, requires_grad=True)) for stage in range(len(replicas) - 1)}
    channels: Counter[int] = Counter()
    peers: dict[int, set[int]] = {}
    for channel in channels_of_run(plan, schedule, sum(replicas), cuts, [], None, codec={}):
        for rank, peer in ((channel.sender, channel.receiver), (channel.receiver, channel.sender)):
            channels[rank] += 1
            peers.setdefault(rank, set()).add(peer)
    rank, num_channels = channels.most_common(1)[0]
    return num_channels, len(peers[rank])


def make_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PAIR)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.get_monitor_socket()
    return socket


def answer(there: Connection) -> None:
    """Runs the other end of the connections. Binds as many sockets as it is told, answers small messages and
    drops chunks.
    """
    while True:
        context = zmq.Context()
        num_sockets = there.recv()
        sockets = [make_socket(context) for _ in range(num_sockets)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
        there.send(ports)
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        closing = False
        while not closing:
            for socket, _ in poller.poll():
                message = socket.recv(copy=False)
                closing = closing or len(message.buffer) == 0
                if len(message.buffer) <= SMALL_BYTES:
                    socket.send(b"answer")
        context.destroy(linger=1000)


class Ends:
    """This process's ends of num_sockets open connections."""

    def __init__(self, other: Connection, num_sockets: int) -> None:
        before, began = len(os.listdir("/proc/self/fd")), time.perf_counter()
        self._context = zmq.Context()
        other.send(num_sockets)
        self.sockets = [make_socket(self._context) for _ in range(num_sockets)]
        for socket, port in zip(self.sockets, other.recv(), strict=True):
            socket.connect(f"tcp://127.0.0.1:{port}")
        for socket in self.sockets:
            socket.send(b"HELLO")
        for socket in self.sockets:
            socket.recv()
        self.open_ms = (time.perf_counter() - began) * 1e3
        self.num_files = len(os.listdir("/proc/self/fd")) - before

    def small_us(self) -> float:
        """Returns the time of a small message and its answer, on the first connection."""
        small, began = bytes(SMALL_BYTES), time.perf_counter()
        self.sockets[0].send(small)
        self.sockets[0].recv()
        return (time.perf_counter() - began) * 1e6

    def small_behind_a_push_us(self, *, shares: bool) -> float:
        """Sends a push, then a small message on the first connection. Returns the time until its answer.
        `shares` is whether the push is on the first connection too; otherwise it is on the last one.
        """
        chunk = bytes(CHUNK_BYTES)
        for _ in range(NUM_CHUNKS):
            self.sockets[0 if shares else -1].send(chunk, copy=False)
        return self.small_us()

    def close(self) -> None:
        self.sockets[0].send(b"")
        self.sockets[0].recv()
        self._context.destroy(linger=0)


Figures = tuple[float, float, float, float]


def measure(other: Connection, num_sockets: int, *, shares: bool) -> Figures:
    ends = Ends(other, num_sockets)
    small_us = min(ends.small_us() for _ in range(200))
    figures = (ends.num_files, ends.open_ms, small_us, ends.small_behind_a_push_us(shares=shares))
    ends.close()
    return figures


def least(found: list[Figures]) -> Figures:
    files, opens, smalls, behinds = zip(*found, strict=True)
    return min(files), min(opens), min(smalls), min(behinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    other, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(there,), daemon=True)
    process.start()
    print("| plan | connections | descriptors | ms to open | 4 KiB and back, us | behind a push, us |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, replicas in PLANS.items():
        counts = dict(zip(("channels", "peers"), channel_ends(replicas), strict=True))
        found: dict[str, list[Figures]] = {what: [] for what in counts}
        for _ in range(rounds):
            for what, count in counts.items():
                found[what].append(measure(other, count, shares=what == "peers"))
        for what, count in counts.items():
            files, open_ms, small_us, behind_us = least(found[what])
            row = f"{count}, of {what} | {files} | {open_ms:.1f} | {small_us:.0f} | {behind_us:.0f}"
            print(f"| {name} | {row} |", flush=True)
    process.kill()


if __name__ == "__main__":
    main()
