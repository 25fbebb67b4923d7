"""Counts the files that rank 0 has open when all its links are open, for runs of several sizes.

    python bench/system/descriptors.py [--workers 16 256 1024]

The links are really opened, over tcp and shared memory on one machine. This process holds rank 0's ends, a
second process holds the other ends. Two ways are compared: links along the tree of rank_tree.py, which
pipedream uses, and two links between rank 0 and every other rank. The second way has small items here, so
that its memory fits. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from pipedream import Plan, _core
from pipedream.links.channels import RunChannel, channels_of_run, tree_name
from pipedream.links.descriptors import descriptor_limit_raised
from pipedream.links.options import LinkOptions
from pipedream.model.boundary import Boundary

RUN_ID = 1
SMALL = [("uint8", 1, 64)]


def links_of_run(num_workers: int) -> list[RunChannel]:
    """Returns rank 0's links in a run. Items that travel between stages have 64 KiB."""
    plan = Plan.straight(num_workers, num_workers)
    schedule = _core.ScheduleOptions(
        schedule="gpipe",
        in_flight=list(plan.in_flight),
        num_microbatches=1,
        placement=plan.placement,
        exchanges_norms=True,
    )
    cut = Boundary.of(torch.zeros(1 << 14, requires_grad=True))
    cuts = {0: cut} if num_workers > 1 else {}
    channels = channels_of_run(plan, schedule, num_workers, cuts, [], None, codec={})
    return [channel for channel in channels if 0 in (channel.sender, channel.receiver)]


def links_of_a_star(num_workers: int) -> list[RunChannel]:
    any_link = links_of_run(2)[-1]
    ends = [pair for rank in range(1, num_workers) for pair in ((0, rank), (rank, 0))]
    return [
        replace(
            any_link, name=tree_name(*pair), channel_id=i, sender=pair[0], receiver=pair[1], tensors=SMALL
        )
        for i, pair in enumerate(ends)
    ]


def hold_ends(channels: list[RunChannel], at_rank_0: bool, other: Connection) -> int:
    """Opens one side's ends of all channels. Returns how many file descriptors they take in this process."""
    core = _core.Worker(**LinkOptions(peer_timeout_s=120.0).core_arguments(), run_id=RUN_ID, plan_hash=1)
    core.pulse()
    before = len(os.listdir("/proc/self/fd"))
    for channel in channels:
        core.add_channel(
            name=channel.name,
            sends=(channel.sender == 0) == at_rank_0,
            peer="the others",
            channel_id=channel.channel_id,
            tensors=channel.tensors,
            num_items=channel.num_slots,
            on_device=False,
        )
    core.seal()
    other.send(core.listen())
    core.connect(other.recv())
    while not core.wait_open(0.2):
        core.pulse()
    num_open = len(os.listdir("/proc/self/fd")) - before
    other.send(None)  # says that all ends of this side are open
    other.recv()
    core.close(1.0)
    return num_open


def hold_the_others(channels: list[RunChannel], other: Connection) -> None:
    with descriptor_limit_raised():
        hold_ends(channels, False, other)


def measure(channels: list[RunChannel]) -> int:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold_the_others, args=(channels, there))
    process.start()
    with descriptor_limit_raised():
        num_open = hold_ends(channels, True, here)
    process.join()
    return num_open


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 9, 16, 64, 256, 1024])
    sizes = parser.parse_args().workers
    print("| workers | links of rank 0 | descriptors | a link to and from every rank | descriptors |")
    print("| --- | --- | --- | --- | --- |")
    for num_workers in sizes:
        tree, star = links_of_run(num_workers), links_of_a_star(num_workers)
        print(
            f"| {num_workers} | {len(tree)} | {measure(tree)} | {len(star)} | {measure(star)} |", flush=True
        )


if __name__ == "__main__":
    main()
