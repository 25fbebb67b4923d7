"""More minibatches in flight than the rule says (design.md, section 4), where a slow link would otherwise
leave a stage idle and the simulator says that this pays for their memory and staleness. Pure; any thread;
needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from pipedream.planning.plan import Plan
from pipedream.planning.plan_schedule import schedule_of
from pipedream.planning.prediction import steady_minibatches

__all__ = ["FEW_ROUNDS", "SIMULATED_ITEMS_MAX", "with_links_hidden"]

FEW_ROUNDS = 8  # simulated of each plan that is looked at
SIMULATED_ITEMS_MAX = 100_000  # minibatches times stages that partition() waits for
_ROUNDING = 1e-9
_GAIN_MIN = 0.05  # of the time per minibatch that more minibatches in flight must save


def with_links_hidden(plan: Plan, simulated_ms: Callable[[Plan], float]) -> Plan:
    """The plan, or the plan with as many in flight as hide the links, and in `predicted` what that brings.
    simulated_ms: per minibatch."""
    slowest_ms = _slowest_ms(plan)
    if plan.num_stages == 1 or not slowest_ms:
        return plan
    in_flight = [plan.in_flight[-1]]
    for index in range(plan.num_stages - 2, -1, -1):
        here, below = plan.stages[index].num_replicas, plan.stages[index + 1].num_replicas
        on_the_way = plan.predicted["boundary_ms"][index] / slowest_ms
        held = in_flight[0] * below + on_the_way
        in_flight.insert(0, max(plan.in_flight[index], 1 + math.ceil(held / here - _ROUNDING)))
    if tuple(in_flight) == plan.in_flight:
        return plan
    raised = replace(plan, in_flight=tuple(in_flight))
    schedule = schedule_of(raised, "pipedream", 1)
    if steady_minibatches(raised, schedule, FEW_ROUNDS) * plan.num_stages > SIMULATED_ITEMS_MAX:
        return plan
    before_ms, after_ms = simulated_ms(plan), simulated_ms(raised)
    if after_ms > before_ms * (1 - _GAIN_MIN):
        return plan
    figures = {"hidden_links": {"before_ms": before_ms, "after_ms": after_ms}}
    return replace(raised, predicted=raised.predicted | figures)


def _slowest_ms(plan: Plan) -> float:
    """Returns a minibatch's time at the stage or link that nothing can hide. The paper's formulas have it as
    the bottleneck; the calibrated model's has what waits for links besides."""
    if plan.cost_model != "calibrated":
        return plan.bottleneck_ms or 0.0
    one_way_ms = [both_ms / 2 for both_ms in plan.predicted["boundary_ms"]]
    slowest_ms: float = max([*plan.predicted["stage_ms"], *one_way_ms])
    return slowest_ms
