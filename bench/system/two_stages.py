"""Compares the throughput of a balanced 2-stage pipeline on 2 cores with one process on one core.

    python bench/system/two_stages.py [--rounds 7] [--minibatches 200] [--kinds] [--device cuda] [--json FILE]

Each round runs both sides, one after the other, so that a change of the machine's speed affects both. Each
side is warmed up before it is timed. The ideal ratio is 2.0. Two cores share caches and memory, so the
benchmark also measures two independent processes at once and prints their ratio as `limit`. For the same runs
it prints:

- how close the pipeline comes to the rate of its slowest stage (ideal 1.0)
- the runtime's overhead per work item (ideal 0): the time from asking for the item to asking for the next, in
  which a worker neither runs user code nor waits for data

--kinds measures the overhead alone: by stage, kind of work item and part.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import time
from multiprocessing.pool import Pool
from typing import Any

import pipedream
import torch
from pipedream import _core
from pipedream.report.result import WorkSpan
from torch import nn

# Each model has a width and a batch size. A stage of "large" takes some 10 ms on a slow core. A stage of
# "small" takes far less than 1 ms, so that the runtime's own time shows.
MODELS = {"large": (768, 128), "small": (64, 8)}
LAYERS_PER_STAGE = 3


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2 * LAYERS_PER_STAGE):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def make_data(width: int, batch: int, num_minibatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pair = (torch.randn(batch, width), torch.randn(batch, width))
    return [pair] * num_minibatches


def one_process_ms(width: int, batch: int, num_minibatches: int, device: str) -> float:
    """Returns milliseconds per minibatch of a plain loop on one core, or on a GPU."""
    torch.set_num_threads(1)
    model = make_model(width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = make_data(width, batch, num_minibatches)
    num_warm_up = max(3, num_minibatches // 10)
    for minibatch, (inputs, targets) in enumerate(data):
        if minibatch == num_warm_up:
            began_s = time.perf_counter()
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return (time.perf_counter() - began_s) * 1e3 / (num_minibatches - num_warm_up)


def _plain_loop(arguments: tuple[int, int, int, str]) -> float:
    _core.keep_freed_memory()
    return one_process_ms(*arguments)


def two_processes_ms(pool: Pool, width: int, batch: int, num_minibatches: int, device: str) -> float:
    """Runs two independent processes at the same time. Returns the mean of their milliseconds per
    minibatch."""
    return statistics.mean(pool.map(_plain_loop, [(width, batch, num_minibatches, device)] * 2, chunksize=1))


def pipeline(width: int, batch: int, num_minibatches: int) -> pipedream.RunResult:
    torch.set_num_threads(1)
    model = make_model(width)
    return pipedream.run(
        model,
        pipedream.Plan.straight(len(model), 2),
        data=make_data(width, batch, num_minibatches),
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
        progress=False,
    )


def steady_ms(result: pipedream.RunResult) -> float:
    """Returns milliseconds per minibatch, from the times of the last stage's updates. The first tenth of the
    updates, but at least three, are left out.
    """
    done_ns = [span.completed_ns for span in result.spans[-1] if span.kind == "UPDATE"]
    first = max(3, len(done_ns) // 10)
    return (done_ns[-1] - done_ns[first]) / 1e6 / (len(done_ns) - 1 - first)


def slowest_stage_ms(result: pipedream.RunResult) -> float:
    """Returns milliseconds of user code per minibatch at the busiest stage. The first minibatches are left
    out, as in steady_ms().
    """
    first = max(3, len(result.losses) // 10)
    per_stage = [
        sum(span.compute_ns for span in spans if span.minibatch > first)
        / 1e6
        / (len(result.losses) - 1 - first)
        for spans in result.spans
    ]
    return max(per_stage)


def overheads_us(spans: list[WorkSpan]) -> list[tuple[str, float, float, float]]:
    """Returns the kind of each work item of a worker and three overheads in microseconds, except for the last
    item. The first overhead lasts from asking for the item until having it, the second until completing it,
    and the third until asking for the next item. User code and waiting do not count.
    """
    return [
        (
            span.kind,
            (span.ready_ns - span.asked_ns - span.wait_ns) / 1e3,
            (span.completed_ns - span.ready_ns - span.compute_ns) / 1e3,
            (following.asked_ns - span.completed_ns) / 1e3,
        )
        for span, following in itertools.pairwise(spans)
    ]


def overhead_us(result: pipedream.RunResult) -> list[float]:
    """Returns the overhead of each stage: the median over its work items."""
    return [statistics.median(sum(parts) for _, *parts in overheads_us(spans)) for spans in result.spans]


def print_kinds(name: str, rounds: int, num_minibatches: int) -> None:
    """Prints medians over the work items of all rounds, without the first tenth of each round."""
    rows: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    for _ in range(rounds):
        result = pipeline(*MODELS[name], num_minibatches)
        for stage, spans in enumerate(result.spans):
            for kind, *parts in overheads_us(spans[len(spans) // 10 :]):
                rows.setdefault((stage, kind), []).append((sum(parts), *parts))
    print(f"\n{name} model: overhead in us, median and lower quartile; medians of its parts")
    print(f"{'stage':>5} {'kind':9} {'median':>8} {'quartile':>8} {'asking':>8} {'doing':>8} {'leaving':>8}")
    for (stage, kind), items in sorted(rows.items()):
        total, asking, doing, leaving = zip(*items, strict=True)
        quartile = statistics.quantiles(total, n=4)[0]
        medians = [statistics.median(part) for part in (total, asking, doing, leaving)]
        numbers = " ".join(f"{n:8.1f}" for n in (medians[0], quartile, *medians[1:]))
        print(f"{stage:5} {kind:9} {numbers}")


def measure(pool: Pool, name: str, rounds: int, num_minibatches: int, device: str) -> dict[str, Any]:
    width, batch = MODELS[name]
    rows = []
    for round_index in range(rounds):
        plain_ms = one_process_ms(width, batch, num_minibatches, device)
        both_ms = two_processes_ms(pool, width, batch, num_minibatches, device)
        result = pipeline(width, batch, num_minibatches)
        rows.append(
            {
                "one_process_ms": plain_ms,
                "pipeline_ms": steady_ms(result),
                "limit": 2 * plain_ms / both_ms,
                "speed_up": plain_ms / steady_ms(result),
                "of_limit": both_ms / 2 / steady_ms(result),
                "of_slowest_stage": slowest_stage_ms(result) / steady_ms(result),
                "overhead_us": max(overhead_us(result)),
                "mean_overhead_us": max(result.overhead_us),
            }
        )
        print(f"{name}, round {round_index + 1} of {rounds}: speed-up {rows[-1]['speed_up']:.2f}", flush=True)
    summary: dict[str, Any] = {"model": name, "rounds": rounds, "minibatches": num_minibatches}
    for figure in rows[0]:
        values = [row[figure] for row in rows]
        summary[figure] = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return summary


IDEAL = {
    "limit": "2.0",
    "speed_up": "2.0",
    "of_limit": "1.0",
    "of_slowest_stage": "1.0",
    "overhead_us": "0",
    "mean_overhead_us": "0",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--minibatches", type=int, default=200, help="of the large model; the small: ten times"
    )
    parser.add_argument("--kinds", action="store_true", help="only the overhead, by stage, kind and part")
    parser.add_argument(
        "--device", default="cpu", help="of the plain loops; PIPEDREAM_DEVICE says the workers'"
    )
    parser.add_argument("--json", type=str, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    _core.keep_freed_memory()  # the workers do so too
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print(f"machine: {machine}")
    if options.kinds:
        print_kinds("large", options.rounds, options.minibatches)
        print_kinds("small", options.rounds, 10 * options.minibatches)
        return
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        summaries = [
            measure(pool, "large", options.rounds, options.minibatches, options.device),
            measure(pool, "small", options.rounds, 10 * options.minibatches, options.device),
        ]
    for summary in summaries:
        print(f"\n{summary['model']} model: {summary['rounds']} rounds, {summary['minibatches']} minibatches")
        print(f"{'figure':20} {'min':>9} {'median':>9} {'max':>9}   ideal")
        for figure, values in summary.items():
            if isinstance(values, dict):
                numbers = " ".join(f"{values[key]:9.3f}" for key in ("min", "median", "max"))
                print(f"{figure:20} {numbers}   {IDEAL.get(figure, '')}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(json.dumps({"machine": machine, "results": summaries}) + "\n")


if __name__ == "__main__":
    main()
