"""Records what every stream of two workers on GPUs did, to show that copies run while kernels compute.

    torchrun --nproc-per-node 2 bench/system/device_timeline.py --folder FOLDER [--transport tcp]
             [--width 4096] [--batch 4096] [--minibatches 30]

Both workers compute on GPUs of this machine, or on the same GPU if it has only one. Torch's profiler records
the copies and kernels of all streams of each worker, including pipedream's own streams. The program writes
into FOLDER:

    worker-<rank>.json.gz    kernels and copies, for ui.perfetto.dev
    run.json.gz              the work of both workers' compute threads, and when each item was queued, copied
                             and on the wire between them (RunResult.save_trace)

Prints JSON objects. Each rank prints these figures from the profiler:

    copy_ms                  time in which copies of 64 KiB or more ran
    copy_beside_kernels_ms   the part of copy_ms in which kernels also ran
    share                    copy_beside_kernels_ms / copy_ms
    kernel_ms                time in which kernels ran

Rank 0 prints samples_per_s of the run, and `channels` with figures for each channel: its transport and
overlap_share as in RunResult.channels, and these figures from RunResult.transfers:

    copy_ms                  time in which the sender copied items to staging buffers or into the receiver's
                             memory
    copy_beside_work_ms      the part of copy_ms in which the sender's compute thread was at work
    wire_ms                  time in which items were on the wire, from the frame of the first chunk until the
                             receiver had the last chunk
    wire_beside_work_ms      the part of wire_ms in which the receiver's compute thread was at work
    wire_beside_copies_ms    the part of wire_ms in which the sender copied items

On a GPU a compute thread is at work while it launches kernels, which may run later; the profiler shows when
they ran. Without a GPU only rank 0's figures are printed.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pipedream
import torch
from pipedream.report.transfers import ChannelTransfers
from torch import nn

Interval = tuple[float, float]

_COPY_BYTES_MIN = 64 << 10
_LAYERS_PER_STAGE = 3


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2 * _LAYERS_PER_STAGE):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins intervals that overlap. Returns intervals that cover the same times, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length_of(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def common_length(one: list[Interval], other: list[Interval]) -> float:
    """Returns for how long intervals of both lists last at the same time. The lists come from joined()."""
    length, index = 0.0, 0
    for begin, end in one:
        while index < len(other) and other[index][1] <= begin:
            index += 1
        at = index
        while at < len(other) and other[at][0] < end:
            length += min(end, other[at][1]) - max(begin, other[at][0])
            at += 1
    return length


def overlap_of(events: list[dict[str, Any]]) -> dict[str, float | None]:
    """Returns a rank's figures from the events of the profiler's trace, whose times are microseconds."""

    def intervals(category: str) -> list[Interval]:
        return joined(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("ph") == "X"
            and event.get("cat") == category
            and (category == "kernel" or event.get("args", {}).get("bytes", 0) >= _COPY_BYTES_MIN)
        )

    copies, kernels = intervals("gpu_memcpy"), intervals("kernel")
    copy_us = length_of(copies)
    both_us = common_length(copies, kernels)
    return {
        "copy_ms": copy_us / 1e3,
        "copy_beside_kernels_ms": both_us / 1e3,
        "share": both_us / copy_us if copy_us else None,
        "kernel_ms": length_of(kernels) / 1e3,
    }


def channel_times(transfers: ChannelTransfers, result: pipedream.RunResult) -> dict[str, float]:
    """Returns a channel's figures in milliseconds, which the top of this file explains."""

    def computing(rank: int) -> list[Interval]:
        return joined((span.ready_ns, span.completed_ns) for span in result.spans[rank])

    complete_ns = {(i.minibatch, i.microbatch): i.complete_ns for i in transfers.received}
    copies = joined((i.started_ns, i.copied_ns) for i in transfers.sent if i.copied_ns is not None)
    wire = joined(
        (i.framed_ns, complete_ns[i.minibatch, i.microbatch])
        for i in transfers.sent
        if (i.minibatch, i.microbatch) in complete_ns
    )
    return {
        "copy_ms": length_of(copies) / 1e6,
        "copy_beside_work_ms": common_length(copies, computing(transfers.sender_rank)) / 1e6,
        "wire_ms": length_of(wire) / 1e6,
        "wire_beside_work_ms": common_length(wire, computing(transfers.receiver_rank)) / 1e6,
        "wire_beside_copies_ms": common_length(wire, copies) / 1e6,
    }


def watched_run(arguments: argparse.Namespace, rank: int) -> pipedream.RunResult:
    model = make_model(arguments.width)
    # Both ranks have equal data, because make_model() sets the seed.
    data = torch.randn(arguments.batch, arguments.width)
    has_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CUDA] if has_gpu else []
    train = functools.partial(
        pipedream.run,
        model,
        pipedream.Plan.straight(len(model), 2),
        data=[(data, data)] * arguments.minibatches,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(pipedream.optim.SGD, lr=1e-4),
        transport=arguments.transport,
        progress=False,
    )
    if not activities:
        return train()
    with torch.profiler.profile(activities=activities) as profiler:
        result = train()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(arguments.folder / f"worker-{rank}.json.gz"))
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--minibatches", type=int, default=30)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ["RANK"])
    result = watched_run(arguments, rank)
    profile = arguments.folder / f"worker-{rank}.json.gz"
    if profile.exists():
        events = json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
        print(json.dumps({"rank": rank, **overlap_of(events)}), flush=True)
    if rank == 0:
        result.save_trace(arguments.folder / "run.json.gz")
        channels = {
            channel.name: {
                "transport": channel.transport,
                "overlap_share": channel.overlap_share,
                **channel_times(transfers, result),
            }
            for channel, transfers in zip(result.channels, result.transfers, strict=True)
        }
        print(json.dumps({"channels": channels, "samples_per_s": result.samples_per_s}), flush=True)


if __name__ == "__main__":
    main()
