"""Tests the memory in use along a simulated timeline: tensors that a schedule keeps, and tensors on their way
between stages.
"""

from __future__ import annotations

from typing import Any

import pytest
from pipedream import _core
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.simulator import simulate
from pipedream.simulate.simulated_memory import memory_in_use

_WEIGHTS, _SAVED, _CUT = 1000, 100_000, 10
_STAGES = 3


def _peaks(
    schedule: str,
    m: int = 1,
    *,
    replicas: tuple[int, ...] = (1,) * _STAGES,
    recompute: bool = False,
    cut_bytes: int = 0,
    device: str | None = None,
    **options: Any,
) -> list[float]:
    """Returns each worker's peak bytes, less four terms: one version of the weights, the model, the gradients
    and the momentum.
    """
    num_stages = len(replicas)
    layers = [
        LayerProfile(f"layer{i}", 1.0, 2.0, cut_bytes * (i + 1 < num_stages), _WEIGHTS, saved_bytes=_SAVED)
        for i in range(num_stages)
    ]
    plan = Plan(tuple(Stage(i, i, count) for i, count in enumerate(replicas)))
    recomputes = [recompute] * num_stages
    schedule_options = _core.ScheduleOptions(
        schedule, list(plan.in_flight), m, plan.placement, recompute=recomputes
    )
    programs = [_core.make_program(schedule_options, rank, 12) for rank in range(plan.workers_used)]
    transfers = [_core.BoundaryDurations(0.25, 0.25)] * (num_stages - 1)
    simulation = simulate(programs, _core.StageDurations(1 / m, 2 / m), transfers)
    uses = memory_in_use(simulation, plan, Profile(tuple(layers), device=device), schedule_options, **options)
    assert all(row == sorted(row, key=lambda use: use.begin_ms) for row in uses)
    # All memory is given back at the end.
    assert all(row[0].num_bytes == pytest.approx(row[-1].num_bytes) for row in uses)
    return [max(use.num_bytes for use in row) - 4 * _WEIGHTS for row in uses]


@pytest.mark.parametrize(
    ("schedule", "m", "kept", "versions"),
    [
        ("pipedream", 1, (3, 2, 1), (3, 2, 1)),
        ("flush", 6, (3 / 6, 2 / 6, 1 / 6), (1, 1, 1)),
        ("gpipe", 6, (1, 1, 1), (1, 1, 1)),
        ("2bw", 3, (3 / 3, 2 / 3, 1 / 3), (2, 2, 2)),
        ("model_parallel", 1, (1, 1, 1), (1, 1, 1)),
    ],
)
def test_a_stage_keeps_what_its_schedule_has_in_flight(
    schedule: str, m: int, kept: tuple[float, ...], versions: tuple[int, ...]
) -> None:
    wanted = [n * _SAVED + (v - 1) * _WEIGHTS for n, v in zip(kept, versions, strict=True)]
    assert _peaks(schedule, m) == pytest.approx(wanted)


def test_a_recompute_keeps_one_microbatch_and_all_inputs() -> None:
    assert _peaks("flush", 3, recompute=True) == pytest.approx([_SAVED / 3] * 3)
    inputs = [peak - _SAVED / 3 for peak in _peaks("gpipe", 3, recompute=True, cut_bytes=3 * _CUT)]
    # A stage keeps three inputs, and in a backward also the gradient of its output. The first stage receives
    # no inputs, and the last one receives no gradients.
    assert inputs[0] == pytest.approx(_CUT)
    assert inputs[1] == pytest.approx(3 * _CUT + _CUT)
    assert inputs[2] >= 3 * _CUT


def test_what_travels_is_in_the_memory_of_both_ends() -> None:
    peaks = (_peaks("model_parallel", cut_bytes=num_bytes) for num_bytes in (_CUT, 0))
    apart = [more - less for more, less in zip(*peaks, strict=True)]
    # At its peak the first stage has a gradient, the last stage has an input, and the middle one has both.
    assert apart == [_CUT, 2 * _CUT, _CUT]


def test_replicas_have_what_they_exchange_and_the_optimizer_is_asked_for() -> None:
    # Replicas need copies of gradients, slots for pushes and slots for pulls, each for half of the weights.
    # They save the momentum of the other half.
    assert _peaks("data_parallel", replicas=(2,)) == pytest.approx([_SAVED + (3 - 1) / 2 * _WEIGHTS] * 2)
    on_host = _peaks("data_parallel", replicas=(2,), device="x86_64, 2 threads")
    assert on_host == pytest.approx([_SAVED + (2 - 1) / 2 * _WEIGHTS] * 2)
    assert _peaks("model_parallel", replicas=(1,), optimizer_copies=2.0) == pytest.approx([_SAVED + _WEIGHTS])
