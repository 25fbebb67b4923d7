"""Measures the time for which checkpoints make a training wait.

    python bench/system/checkpoints.py [--every 50] [--minibatches 200] [--rounds 5] [--width 1024]

Trains fully connected layers on two workers with Adam. Each round trains without checkpoints, and then with a
checkpoint after every --every minibatches. Prints the share of the time for which checkpoints stalled the
workers, the milliseconds per minibatch with and without checkpoints, and their ratio.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile

import pipedream
import torch
from torch import nn


def _make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _train(options: argparse.Namespace, checkpoints: pipedream.Checkpoints | None) -> pipedream.RunResult:
    model = _make_model(options.width)
    inputs, targets = torch.randn(options.batch_size, options.width), torch.randint(10, (options.batch_size,))
    return pipedream.run(
        model,
        pipedream.Plan.straight(len(model), 2),
        data=[(inputs, targets)] * options.minibatches,
        loss_fn=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-4),
        schedule=options.schedule,
        microbatches=options.microbatches,
        checkpoints=checkpoints,
        progress=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--minibatches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--schedule", default="pipedream")
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    shares, with_ms, without_ms = [], [], []
    for _ in range(options.rounds):
        without_ms.append(_train(options, None).measured_ms)
        with tempfile.TemporaryDirectory() as folder:
            result = _train(options, pipedream.Checkpoints(folder, every=options.every))
        with_ms.append(result.measured_ms)
        stall_ms = max(worker["stall_ns"] for worker in result.checkpoints) / 1e6
        shares.append(stall_ms / (result.measured_ms * options.minibatches))
    stall, most = 100 * statistics.median(shares), 100 * max(shares)
    print(f"stall          {stall:.2f} % of the time, at most {most:.2f} %")
    both = [statistics.median(times) for times in (with_ms, without_ms)]
    print(f"per minibatch  {both[0]:.2f} ms with, {both[1]:.2f} ms without")
    ratios = [one / other for one, other in zip(with_ms, without_ms, strict=True)]
    print(f"ratio          {statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
