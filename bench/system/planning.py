"""Measures how long it takes to plan and to simulate, up to 400 layers and 1,024 workers.

    python bench/system/planning.py [--rounds 3] [--json FILE]

Profiles are random, but the same in each run. Prints the CPU seconds of these computations. The first two are
the least of the rounds; the others are computed once:

    solve           pipedream.partition with the paper's cost model
    by factors      the search of `solve`, for replicas that push factors of a sixteenth of every weight's
                    size
    within memory   partition with a memory limit for each worker
    for flush       the search over simulated plans for the schedule flush, which also chooses m
    simulate        making the workers' lists for the plan that `solve` found, and replaying them with the
                    profile's times; for long plans only so many minibatches that there are some hundred
                    thousand instructions
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipedream import LayerProfile, Plan, Profile, _core, partition
from pipedream.common.units import parse_bandwidth
from pipedream.planning.factor_rule import core_factors
from pipedream.planning.layer_profile import WeightFactors
from pipedream.planning.prediction import steady_minibatches
from pipedream.planning.simulator import simulate

SIZES = ((23, 16), (40, 16), (136, 64), (400, 256), (400, 1024))
# With 136 layers, the most workers for the search within memory limits. Its time grows with the square of
# layers times workers.
LIMITED_WORKERS_MAX = 64
SEARCHED_WORKERS_MAX = 64  # so that the search takes only seconds
SIMULATED_ITEMS_MAX = 20_000  # largest product of minibatches and stages
BANDWIDTH = "10Gbit/s"


def make_profile(num_layers: int) -> Profile:
    generator = random.Random(num_layers)
    layers = [
        LayerProfile(
            f"layer{index}",
            generator.uniform(0.5, 5),
            generator.uniform(1, 10),
            generator.randrange(1 << 24) if index + 1 < num_layers else 0,
            generator.randrange(1 << 26),
            saved_bytes=generator.randrange(1 << 26),
        )
        for index in range(num_layers)
    ]
    return Profile(tuple(layers), batch_size=64)


def solve_by_factors(profile: Profile, num_workers: int) -> None:
    layers = [
        replace(layer, factors=(WeightFactors(layer.parameter_bytes, layer.parameter_bytes // 16),))
        for layer in profile.layers
    ]
    layers_ms = [layer.compute_ms for layer in layers]
    _core.partition(
        [layer_ms / 1e3 for layer_ms in layers_ms],
        [float(layer.activation_bytes) for layer in layers],
        [float(layer.parameter_bytes) for layer in layers],
        num_workers,
        parse_bandwidth(BANDWIDTH),
        factors=core_factors(replace(profile, layers=tuple(layers)), layers_ms),
    )


def least_s(rounds: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the CPU seconds of the fastest round, and the result of the work."""
    fastest, result = float("inf"), None
    for _ in range(rounds):
        began_s = time.process_time()
        result = work()
        fastest = min(fastest, time.process_time() - began_s)
    return fastest, result


def simulate_plan(profile: Profile, plan: Plan) -> int:
    """Replays a plan, and returns how many instructions were replayed."""
    options = _core.ScheduleOptions("pipedream", list(plan.in_flight), 1, plan.placement)
    count = min(steady_minibatches(plan, options, 16), SIMULATED_ITEMS_MAX // plan.num_stages)
    programs = [_core.make_program(options, rank, count) for rank in range(options.num_workers)]
    times = []
    for stage in plan.stages:
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]
        forward_ms, backward_ms = (
            sum(getattr(layer, name) for layer in layers) for name in ("forward_ms", "backward_ms")
        )
        times.append(_core.StageDurations(forward_ms, backward_ms))
    simulate(programs, times)
    return sum(map(len, programs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    print(
        f"{'layers':>6} {'workers':>7} {'solve s':>8} {'by factors s':>12} {'within memory s':>15}"
        f" {'for flush s':>11} {'simulate s':>10} {'instructions':>12}"
    )
    rows = []
    for num_layers, num_workers in SIZES:
        profile = make_profile(num_layers)
        solve_s, plan = least_s(options.rounds, functools.partial(partition, profile, num_workers, BANDWIDTH))
        factors_s, _ = least_s(options.rounds, functools.partial(solve_by_factors, profile, num_workers))
        limited_s = None
        if num_layers * num_workers <= 136 * LIMITED_WORKERS_MAX:
            limited_s, _ = least_s(
                1, functools.partial(partition, profile, num_workers, BANDWIDTH, memory="4GiB")
            )
        flush_s = None
        if num_workers <= SEARCHED_WORKERS_MAX:
            flush_s, _ = least_s(
                1, functools.partial(partition, profile, num_workers, BANDWIDTH, schedule="flush")
            )
        simulate_s, count = least_s(1, functools.partial(simulate_plan, profile, plan))
        row = {"layers": num_layers, "workers": num_workers, "stages": plan.num_stages, "solve_s": solve_s}
        row["by_factors_s"] = factors_s
        row |= {"within_memory_s": limited_s, "for_flush_s": flush_s}
        rows.append(row | {"simulate_s": simulate_s, "instructions": count})
        limited, flush = ("" if some_s is None else f"{some_s:.3f}" for some_s in (limited_s, flush_s))
        print(
            f"{num_layers:6} {num_workers:7} {solve_s:8.3f} {factors_s:12.3f} {limited:>15} {flush:>11}"
            f" {simulate_s:10.2f} {count:12}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
