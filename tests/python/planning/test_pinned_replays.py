"""Tests that simulations with random times give exactly the pinned figures.

If a figure changes, a rule of the simulation has changed, and users see other predictions.
"""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import pytest
from pipedream import _core
from pipedream.planning.simulator import Conditions, SharedHost, simulate

_KINDS = ("FORWARD", "BACKWARD", "UPDATE")

# Each case has a schedule, the replicas of its stages, their spares, and further options.
_CASES: list[tuple[str, list[int], list[int], dict[str, Any]]] = [
    ("pipedream", [1, 1, 1], [], {}),
    ("pipedream", [2, 1], [], {}),
    ("pipedream", [1, 3], [], {"staleness": 1}),
    ("pipedream", [1, 1, 1], [], {"recompute": [True, False, True], "ties": [(0, 2)]}),
    ("vertical_sync", [1, 2, 1], [], {"exchanges_norms": True}),
    ("2bw", [2, 2], [], {}),
    ("2bw", [1, 1, 1], [], {}),
    ("flush", [1, 1, 1, 1], [], {"exchanges_norms": True}),
    ("flush", [2, 3], [], {}),
    ("gpipe", [1, 2], [], {"recompute": [True, True]}),
    ("unstashed", [1, 1, 1], [], {}),
    ("interleaved", [1, 1, 1, 1], [], {}),
    ("model_parallel", [1, 1], [], {}),
    ("data_parallel", [3], [], {}),
    ("data_parallel", [2], [], {"uses_allreduce": True}),
    ("data_parallel", [2], [], {"asynchronous": True}),
    ("data_parallel", [3], [2], {}),
    ("pipedream", [3, 1], [1, 0], {}),
    ("pipedream", [2, 2], [], {"asynchronous": True}),
    ("pipedream", [4, 4], [], {}),
    ("gpipe", [1, 1, 1], [], {}),
    ("data_parallel", [3], [], {}),
]
# Each row has the time per minibatch (the makespan if there is no steady state), the bubble's share, and the
# sum of the end times of all instructions and transfers.
_FIGURES = [
    (11.1134, 0.5925767832127945, 40101.6974),
    (37.09618160507894, 0.5514651933402606, 217515.9187621379),
    (50.33094286688063, 0.4447887643394014, 576275.9595697058),
    (16.535878384014914, 0.758416198453909, 82620.7821677628),
    (17.52669230769231, 0.4900368655472954, 184041.66196000003),
    (52.50636008300863, 0.45760932529693454, 876325.0697043084),
    (78.5859772287006, 0.7998835867492081, 994274.0969167213),
    (67.31933106690089, 0.7130190351165664, 806831.0315246043),
    (38.469659415812465, 0.4900318976235212, 334404.4925062211),
    (6.331000000000003, 0.24219449270784, 19058.281000000006),
    (53.895537104740676, 0.5665986272582018, 333373.59270963183),
    (132.15118254391191, 0.625328912237544, 1738993.2179565823),
    (12.659999999999984, 0.27251184834123154, 23982.87599999999),
    (11.25892605655899, 0.2127572003854008, 29810.8330101659),
    (3.851266712005948, 0.0012686860101356334, 4242.1431669931635),
    (11.769647114182002, 0.6651054376419154, 13217.420455151645),
    (14.486333333333329, 0.6349524839503901, 73520.81099999999),
    (50.35699999999997, 0.6397845730365781, 675668.903833833),
    (8.320772233845746, 0.9126565159571746, 30512.114416864097),
    (22.03783570759714, 0.788657331533392, 348724.01488780766),
    (81.71377039999989, 0.7371346581280767, 745205.8665841601),
    (1.2686520013092235, 0.2712631105934, 3734.215379944736),
]


def _simulated(
    seed: int, schedule: str, replicas: list[int], spares: list[int], options: dict[str, Any]
) -> tuple[float, float, float]:
    draw = random.Random(seed)

    def times_ms(count: int) -> list[float]:
        return [draw.choice((0.0, round(draw.uniform(0, 9), 3))) for _ in range(count)]

    placement = _core.Placement.in_order(replicas, spares)
    if schedule == "interleaved":
        placement = _core.Placement.at_ranks([stage % 2 for stage in range(len(replicas))])
    least = max(replicas) * 4 if schedule == "2bw" else 1 + seed % 3
    asked = _core.ScheduleOptions(schedule, _core.derive_in_flight(replicas), least, placement, **options)
    stages = []
    for count, extra in zip(replicas, spares or [0] * len(replicas), strict=True):
        leads_ms = [(2 + lead, lead) for lead in times_ms(count + extra)]
        of_spare = times_ms(3)
        make_stage = functools.partial(
            _core.StageDurations,
            *times_ms(9),
            num_replicas=count if extra else None,
            spare_push_ms=of_spare[0],
            spare_pull_ms=of_spare[1],
            spare_update_ms=of_spare[2],
            num_chunks=1 if extra else draw.randint(1, 3),
            push_leads_ms=[] if extra else draw.choice(([], leads_ms)),
            updates_whole=draw.random() < 0.3,
        )
        stages.append(make_stage)
    waking_after_ms = [2.0, 9.0][: seed % 3]
    costs_ms = [[times_ms(3) for _ in waking_after_ms] for _ in replicas]
    factors = {kind: tuple(draw.uniform(0.5, 1.5) for _ in range(7)) for kind in _KINDS[: seed % 4]}
    simulation = simulate(
        [_core.make_program(asked, rank, 18) for rank in range(asked.num_workers)],
        [stage(wakings_ms=wakings_ms) for stage, wakings_ms in zip(stages, costs_ms, strict=True)],
        [_core.BoundaryDurations(*times_ms(3)) for _ in replicas[1:]],
        Conditions(
            SharedHost(2, 2, 1.25) if seed % 5 == 0 else None, factors, waking_after_ms, seed % 2 == 0
        ),
    )
    ends_ms = [step.end_ms for row in simulation.timeline for step in row]
    sum_ms = math.fsum([*ends_ms, *(transfer.end_ms for transfer in simulation.transfers)])
    return simulation.ms_per_minibatch or simulation.makespan_ms, simulation.bubble_share, sum_ms


@pytest.mark.parametrize("seed", range(len(_CASES)))
def test_a_replay_gives_the_same_figures_as_ever(seed: int) -> None:
    assert _simulated(seed, *_CASES[seed]) == _FIGURES[seed]
