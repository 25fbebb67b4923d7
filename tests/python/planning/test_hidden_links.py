"""Tests how many more minibatches a plan has in flight over slow links."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.prediction import SIMULATED_ITEMS_MAX, with_links_hidden


def _plan(*replicas: int, boundary_ms: float, in_flight: tuple[int, ...] = ()) -> Plan:
    """Returns a plan with one layer per stage. Its slowest stage takes 10 ms per minibatch."""
    stages = tuple(Stage(index, index, count) for index, count in enumerate(replicas))
    predicted = {"boundary_ms": [boundary_ms] * (len(replicas) - 1)}
    return Plan(stages, bottleneck_ms=10.0, in_flight=in_flight, predicted=predicted)


def _half_of_the_time(plan: Plan) -> float:
    return 20.0 / plan.in_flight[0]


def test_replicas_share_what_is_on_its_way() -> None:
    """A link takes as long as two minibatches. So with replicas 2-1, stage 1 has one microbatch and the link
    has two. The two replicas of stage 0 share these three, so each has up to two of them, and one of its own.
    """
    found = with_links_hidden(_plan(2, 1, boundary_ms=20.0), _half_of_the_time)
    assert found.in_flight == (1 + 2, 1)
    found = with_links_hidden(_plan(1, 2, boundary_ms=20.0), _half_of_the_time)
    assert found.in_flight == (1 + 4, 1)


def test_a_plan_with_more_in_flight_than_the_links_need_keeps_them() -> None:
    plan = _plan(1, 1, boundary_ms=1.0, in_flight=(6, 1))
    assert with_links_hidden(plan, lambda asked: 20.0 if asked == plan else 1.0) == plan


def test_of_the_calibrated_model_the_slowest_stage_says_how_many_hide_a_link() -> None:
    """The calibrated model's bottleneck includes the wait for links, which more minibatches in flight would
    remove. So the time of the slowest stage counts instead.
    """
    plan = replace(_plan(1, 1, boundary_ms=16.0), cost_model="calibrated", bottleneck_ms=26.0)
    plan = replace(plan, predicted=plan.predicted | {"stage_ms": [10.0, 4.0]})
    found = with_links_hidden(plan, lambda asked: 26.0 if asked == plan else 10.0)
    assert found.in_flight == (1 + math.ceil(1 + 16.0 / 10.0), 1)
    # Each direction of the link takes 8 ms.
    slow = replace(plan, predicted=plan.predicted | {"stage_ms": [6.0, 4.0]})
    assert with_links_hidden(slow, lambda asked: 26.0 if asked == slow else 8.0).in_flight == (1 + 3, 1)


@pytest.mark.parametrize(("after_ms", "pays"), [(9.4, True), (9.6, False)])
def test_what_saves_less_than_a_twentieth_is_not_worth_the_memory(after_ms: float, pays: bool) -> None:
    plan = _plan(1, 1, boundary_ms=20.0)
    found = with_links_hidden(plan, lambda asked: 10.0 if asked == plan else after_ms)
    assert (found.in_flight == (4, 1)) == pays
    if pays:
        assert found.predicted["hidden_links"] == {"before_ms": 10.0, "after_ms": after_ms}
    else:
        assert found == plan


def test_a_plan_that_takes_long_to_simulate_is_left_as_it_is() -> None:
    def refuse(plan: Plan) -> float:
        raise AssertionError(f"simulated with {plan.in_flight}")

    plan = _plan(SIMULATED_ITEMS_MAX // 2, 1, boundary_ms=1e6)
    assert with_links_hidden(plan, refuse) == plan
    assert with_links_hidden(replace(plan, bottleneck_ms=None), refuse).in_flight == plan.in_flight
