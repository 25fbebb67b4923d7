"""Tests the reference with boundaries at which the pipeline drains. The part between two boundaries is a
separate run, which starts from the state at the end of the part before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from covering import parametrize_pairs
from models import CASES
from pipedream import _core, reference
from pipedream.planning.plan import Plan, Stage
from pipedream.reference.versions import Versions
from training import assert_close_losses, assert_close_state

# The tensors are tiny, so one thread is fastest.
pytestmark = pytest.mark.usefixtures("one_thread")

_SGD = functools.partial(torch.optim.SGD, lr=0.05)  # without momentum, so it has no state
_SCHEDULES = ("pipedream", "vertical_sync", "naive", "2bw", "flush", "gpipe", "model_parallel")
_PLANS = [(1, 1), (1, 1, 1), (2, 1), (1, 2), (3, 1), (2, 2)]


def _plan(case_name: str, num_replicas: Sequence[int]) -> Plan:
    stages = CASES[case_name].plan(len(num_replicas)).stages
    pairs = zip(stages, num_replicas, strict=True)
    return Plan(tuple(Stage(stage.first_layer, stage.last_layer, replicas) for stage, replicas in pairs))


def _run(case_name: str, model: Any, plan: Plan, data: Sequence[Any], **options: Any) -> Any:
    loss_fn = CASES[case_name].loss_fn
    return reference.run(model, plan, data=data, loss_fn=loss_fn, optimizer=_SGD, seed=1, **options)


@parametrize_pairs(case_name=("transformer", "tied_apart"), schedule=_SCHEDULES, num_replicas=_PLANS)
def test_a_boundary_ends_one_run_and_begins_another(
    case_name: str, schedule: str, num_replicas: tuple[int, ...]
) -> None:
    case, plan = CASES[case_name], _plan(case_name, num_replicas)
    multiple = math.lcm(*num_replicas)
    data = case.data(6 * multiple)
    drained_at = [2 * multiple, 3 * multiple]
    how = {"schedule": schedule, "microbatches": 6 if schedule == "2bw" else 1}
    whole = case.model()
    together = _run(case_name, whole, plan, data, drained_at=drained_at, **how)
    by_parts, losses = case.model(), []
    for begin, end in zip([0, *drained_at], [*drained_at, len(data)], strict=True):
        part = _run(case_name, by_parts, plan, data[begin:end], **how)
        losses += part.losses
        for stage, versions in enumerate(part.versions):
            rounds = multiple if schedule in ("flush", "gpipe", "model_parallel") else num_replicas[stage]
            # The 6 microbatches are spread evenly over the replicas.
            rounds = rounds if schedule != "2bw" else 1
            found = together.versions[stage][begin:end]
            assert found == [(f + begin // rounds, b + begin // rounds) for f, b in versions]
    assert_close_losses(together.losses, losses, 1e-9)
    assert_close_state(whole.state_dict(), by_parts.state_dict(), 1e-9)


@pytest.mark.parametrize("num_replicas", _PLANS, ids=str)
@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync", "naive", "2bw", "flush"])
def test_what_is_read_after_a_boundary_is_what_a_program_reads_that_begins_there(
    schedule: str, num_replicas: tuple[int, ...]
) -> None:
    plan = _plan("mlp", num_replicas)
    microbatches = 6 if schedule == "2bw" else 1
    data = CASES["mlp"].data(18)
    first = 6
    result = _run(
        "mlp",
        CASES["mlp"].model(),
        plan,
        data,
        schedule=schedule,
        microbatches=microbatches,
        drained_at=[first],
    )
    options = _core.ScheduleOptions(
        schedule, list(plan.in_flight), microbatches, plan.placement, first_minibatch=first
    )
    for stage, versions in enumerate(result.versions):
        assert [forward for forward, _ in versions[first:]] == [
            _core.forward_version(options, stage, minibatch) for minibatch in range(first, len(data))
        ]


@pytest.mark.parametrize("num_replicas", [(1, 1), (1, 1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync", "2bw"])
@pytest.mark.parametrize("drained_at", [(), (2,), (4, 6, 12)], ids=str)
def test_each_update_decides_on_one_scale_of_float16_wherever_it_drains(
    drained_at: Sequence[int], schedule: str, num_replicas: tuple[int, ...]
) -> None:
    plan = _plan("mlp", num_replicas)
    versions = Versions(schedule, plan.in_flight, num_replicas, 0, drained_at=drained_at)
    known = [versions.overflows_known(minibatch) for minibatch in range(30)]
    for stage, replicas in enumerate(num_replicas):
        for round_index in range(9):
            knows = [minibatch for minibatch, rounds in enumerate(known) if (stage, round_index) in rounds]
            assert len(knows) == replicas, "each replica tells of it with one activation"
            end = (round_index + 1) * replicas
            assert all(minibatch >= end for minibatch in knows)
            assert not any(end <= boundary < knows[0] for boundary in drained_at), "it was told in between"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"drained_at": [3]}, "drained_at names minibatch 3, inside of a round: give multiples of 2"),
        ({"drained_at": [-2]}, "drained_at"),
        ({"drained_at": [4, 2]}, r"drained_at is \[4, 2\]: give the minibatches in order"),
    ],
)
def test_boundaries_that_cannot_be_are_refused_in_one_line(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        _run("mlp", CASES["mlp"].model(), _plan("mlp", (2, 1)), CASES["mlp"].data(4), **how)
    assert "\n" not in str(caught.value)
