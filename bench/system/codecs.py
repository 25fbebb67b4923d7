"""Measures the time until a loss is reached over a slow link, once with each codec.

    sudo .venv/bin/python bench/system/codecs.py [--bandwidth 50Mbit/s] [--seeds 2] [--minibatches 300]

A small character model learns Python's own source, in two stages on two hosts that a shaped link joins
(links.py). It is trained once for each seed and codec, in turn. Two figures judge a codec: the
loss on held-out text, and the time to a goal. The goal is the training loss, smoothed over 20 minibatches,
that the run without a codec has after two thirds of its minibatches. The plan keeps four minibatches in
flight at the first stage, so that only the link's rate limits the run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))

import pipedream
import torch
from links import Link, run_ranks
from tasks import Characters

SMOOTHED_OVER = 20
CODECS: dict[str, Any] = {
    "none": None,
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8",
    "bf16, topk:0.05": {"activations": "bf16", "gradients": "topk:0.05"},
    "int8, topk:0.05": {"activations": "int8", "gradients": "topk:0.05"},
    "topk:0.1": "topk:0.1",
}


class Task(Characters):
    """The study's character task, with one block per stage. In each direction 512 KiB cross the cut per
    minibatch."""

    _CONTEXT, _WIDTH, _HEADS, _BLOCKS, _BATCH_SIZE = 64, 64, 4, 2, 32


def train(codec: str, seed: int, num_minibatches: int, path: str) -> None:
    """Trains, as one rank."""
    torch.set_num_threads(1)
    task = Task()
    task.num_minibatches = num_minibatches
    model = task.make_model(seed)
    cut = len(model) // 2
    stages = [
        {"first_layer": first, "last_layer": last, "num_replicas": 1}
        for first, last in ((0, cut - 1), (cut, len(model) - 1))
    ]
    plan = pipedream.Plan.from_dict(
        {"format": "pipedream.plan/1", "stages": stages, "in_flight": [4, 1]}, source="codecs.py"
    )
    result = pipedream.run(
        model,
        plan,
        data=task.batches(seed),
        loss_fn=task.loss,
        optimizer=functools.partial(pipedream.optim.Adam, lr=2e-3),
        codec=CODECS[codec],
        # Over shared memory no link would be used, because the two namespaces are on one host.
        transport="tcp",
        insecure=True,
        seed=seed,
        progress=False,
    )
    if int(os.environ["RANK"]) == 0:
        done = [span.completed_ns for span in result.spans[-1] if span.kind == "UPDATE"]
        figures = {
            "losses": result.losses,
            "seconds": [(at - done[0]) / 1e9 for at in done],
            "ms": result.measured_ms,
            "compute_ms": [
                sum(s.compute_ns for s in spans) / 1e6 / len(result.losses) for spans in result.spans
            ],
            "bytes": result.bytes_sent / len(result.losses),
            "held_out": task.judge(model),
        }
        Path(path).write_text(json.dumps(figures))


def smoothed(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, end - SMOOTHED_OVER) : end]) for end in range(1, len(losses) + 1)]


def seconds_to(loss: float, figures: dict[str, Any]) -> float | None:
    pairs = zip(smoothed(figures["losses"]), figures["seconds"], strict=True)
    return next((seconds for reached, seconds in pairs if reached <= loss), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bandwidth", default="50Mbit/s")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--minibatches", type=int, default=300)
    parser.add_argument("--codecs", nargs="*", choices=CODECS, default=list(CODECS))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(*json.loads(options.rank_of))
        return
    found: dict[str, list[dict[str, Any]]] = {codec: [] for codec in options.codecs}
    with Link(options.bandwidth) as link:
        for seed in range(options.seeds):
            for codec in options.codecs:
                found[codec].append(run_ranks(link, __file__, [codec, seed, options.minibatches]))
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    goals = [smoothed(exact["losses"])[options.minibatches * 2 // 3] for exact in found["none"]]
    print(f"| {options.bandwidth} | ms per minibatch | KiB per minibatch | s to the loss | held-out loss |")
    print("| --- | --- | --- | --- | --- |")
    for codec, runs in found.items():
        held_out = ", ".join(f"{run['held_out']:.3f}" for run in runs)
        times = [seconds_to(goal, run) for goal, run in zip(goals, runs, strict=True)]
        print(
            f"| {codec} | {statistics.fmean(run['ms'] for run in runs):.1f}"
            f" | {statistics.fmean(run['bytes'] for run in runs) / 1024:.0f}"
            f" | {', '.join('not reached' if time is None else f'{time:.1f}' for time in times)}"
            f" | {held_out} |"
        )
    computed = [max(run["compute_ms"]) for runs in found.values() for run in runs]
    print(f"goals: {', '.join(f'{goal:.3f}' for goal in goals)}; the slower stage computes"
          f" {min(computed):.1f} to {max(computed):.1f} ms per minibatch")  # fmt: skip


if __name__ == "__main__":
    main()
