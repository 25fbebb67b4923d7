"""Measures how much of a slow link's time hides behind computing, with two workers on two hosts.

    sudo .venv/bin/python bench/system/overlap.py [--bandwidth 1Gbit/s] [--minibatches 120] [--rounds 3]

Each stage computes for longer than its tensors travel, and the plan keeps so many minibatches in flight that
the link's one-way time is hidden. The target is that in the steady phase the workers wait for tensors for at
most 2 % of the time. For comparison the benchmark also runs with as few minibatches in flight as a fast link
needs; then the workers wait for part of the link's time. It also prints the run's table of channels
(RunResult.describe_channels).

The hosts are network namespaces, joined by a shaped link (links.py). The workers find each other and
communicate over the link only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from links import RUN_OPTIONS, Link, run_ranks
from torch import nn

BATCH = 64
# One tensor of 2 MiB crosses the boundary forward, and one back. Each takes 17 ms at 1 Gbit/s.
WIDTH = 8192
INNER = 1024
WARM_UP = 10


class Block(nn.Module):
    """A block that is wide at the boundary, and has enough arithmetic inside to be the bottleneck."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, INNER)
        self.inside = nn.Sequential(*[nn.Linear(INNER, INNER) for _ in range(repeats)])
        self.leave = nn.Linear(INNER, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not inputs.requires_grad:  # makes the first stage compute this gradient, too
            inputs = inputs.detach().requires_grad_()
        return self.leave(torch.relu(self.inside(self.enter(inputs))))  # type: ignore[no-any-return]


def train(in_flight: list[int], repeats: int, num_minibatches: int, path: str) -> None:
    """Trains, as one rank."""
    import pipedream

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(Block(repeats), Block(repeats))
    plan = pipedream.Plan.from_dict(
        {
            "format": "pipedream.plan/1",
            "stages": [{"first_layer": stage, "last_layer": stage, "num_replicas": 1} for stage in range(2)],
            "in_flight": in_flight,
        },
        source="overlap.py",
    )
    batch = (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
    result = pipedream.run(
        model,
        plan,
        data=[batch] * num_minibatches,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: pipedream.optim.SGD(parameters, lr=1e-3),
        **RUN_OPTIONS,
    )
    if int(os.environ["RANK"]) == 0:
        Path(path).write_text(json.dumps(figures(result)))


def figures(result: Any) -> dict[str, Any]:
    """Returns each worker's figures and the time per minibatch in the steady phase, without the first and the
    last minibatches. Also returns the table of channels, which is about the whole run."""
    last = len(result.losses) - WARM_UP
    waited, elapsed = [], []
    for spans in result.spans:
        steady = [span for span in spans if WARM_UP <= span.minibatch < last]
        waited.append(sum(span.wait_ns for span in steady))
        elapsed.append(steady[-1].completed_ns - steady[0].asked_ns)
    last_stage = [s for s in result.spans[-1] if s.kind == "UPDATE" and WARM_UP <= s.minibatch < last]
    return {
        "wait_share": [w / e for w, e in zip(waited, elapsed, strict=True)],
        "ms": (last_stage[-1].completed_ns - last_stage[0].completed_ns) / 1e6 / (len(last_stage) - 1),
        "compute_ms": [
            sum(span.compute_ns for span in spans if WARM_UP <= span.minibatch < last)
            / 1e6
            / (last - WARM_UP)
            for spans in result.spans
        ],
        "channels": result.describe_channels(),
    }


def compute_ms(repeats: int) -> float:
    """Returns the milliseconds that one block takes for a forward and a backward on one core. Unlike in the
    run, no other stage computes at the same time."""
    torch.set_num_threads(1)
    block, inputs = Block(repeats), torch.randn(BATCH, WIDTH, requires_grad=True)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        block(inputs).sum().backward()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bandwidth", default="1Gbit/s")
    parser.add_argument("--minibatches", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=12, help="linear layers inside a stage")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train(*json.loads(options.rank_of))
        return
    rounds = []
    with Link(options.bandwidth) as link:
        assert link.bytes_per_s is not None
        one_way_ms = BATCH * WIDTH * 4 / link.bytes_per_s * 1e3
        busy_ms = compute_ms(options.repeats)
        hidden = 1 + math.ceil(1 + 2 * one_way_ms / busy_ms)
        print(
            f"link {options.bandwidth}: {one_way_ms:.1f} ms one way per minibatch; a stage computes"
            f" {busy_ms:.1f} ms; {hidden} minibatches in flight hide the link",
            flush=True,
        )
        for _ in range(options.rounds):
            row = {
                name: run_ranks(link, __file__, [[n, 1], options.repeats, options.minibatches])
                for name, n in (("fast link's", 2), ("hidden", hidden))
            }
            rounds.append(row)
            for name, found in row.items():
                shares = ", ".join(f"{share:.2%}" for share in found["wait_share"])
                computed = ", ".join(f"{ms:.1f}" for ms in found["compute_ms"])
                print(f"{name}: waits {shares}; {found['ms']:.1f} ms a minibatch, computes {computed} ms")
            print(row["hidden"]["channels"], flush=True)
    for name in ("fast link's", "hidden"):
        worst = [max(row[name]["wait_share"]) for row in rounds]
        print(
            f"{name}: waiting for data, larger of the two workers: median {statistics.median(worst):.2%}"
            f" ({min(worst):.2%} to {max(worst):.2%})"
        )
    if options.json:
        print(json.dumps(rounds))


if __name__ == "__main__":
    main()
