"""Measures what weight stashing costs: time per minibatch with and without it.

    python bench/system/stashing.py [--rounds 7] [--minibatches 150] [--json]

The schedule `pipedream` keeps several weight versions at a stage and writes each into a slot of its own. The
schedule `naive` keeps one version and updates it in place. Model, plan and order of work are the same, so the
ratio of the times is the cost of stashing. Each round runs both schedules in turn, so that a change of the
machine's speed affects both. The target is a ratio of at most 1.02.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from typing import Any

import pipedream
import torch
from torch import nn
from two_stages import MODELS, make_data, make_model, steady_ms

OPTIMIZERS: dict[str, Any] = {
    "native SGD": functools.partial(pipedream.optim.SGD, lr=1e-3, momentum=0.9),
    "torch SGD": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}


def run_ms(schedule: str, optimizer: str, num_minibatches: int) -> float:
    width, batch = MODELS["large"]
    torch.set_num_threads(1)
    model = make_model(width)
    result = pipedream.run(
        model,
        pipedream.Plan.straight(len(model), 2),
        data=make_data(width, batch, num_minibatches),
        loss_fn=nn.functional.mse_loss,
        optimizer=OPTIMIZERS[optimizer],
        schedule=schedule,
        progress=False,
    )
    return steady_ms(result)


def measure(optimizer: str, rounds: int, num_minibatches: int) -> dict[str, Any]:
    pairs = []
    for index in range(rounds):
        order = ("pipedream", "naive") if index % 2 == 0 else ("naive", "pipedream")
        taken = {schedule: run_ms(schedule, optimizer, num_minibatches) for schedule in order}
        pairs.append((taken["pipedream"], taken["naive"]))
        print(f"{optimizer}: stashing {pairs[-1][0]:.3f} ms, none {pairs[-1][1]:.3f} ms", flush=True)
    ratios = [stashing / none for stashing, none in pairs]
    return {
        "optimizer": optimizer,
        "stashing_ms": statistics.median(stashing for stashing, _ in pairs),
        "none_ms": statistics.median(none for _, none in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minibatches", type=int, default=150)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = [measure(name, arguments.rounds, arguments.minibatches) for name in OPTIMIZERS]
    if arguments.json:
        print(json.dumps(results))
        return
    for result in results:
        print(
            f"{result['optimizer']}: stashing / none {result['ratio']:.3f}"
            f" ({result['ratio_min']:.3f} to {result['ratio_max']:.3f}); medians {result['stashing_ms']:.3f}"
            f" and {result['none_ms']:.3f} ms per minibatch"
        )


if __name__ == "__main__":
    main()
