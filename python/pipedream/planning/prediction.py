"""Predicts the time of a run by simulating the schedule's lists of instructions, with the costs of each stage
that the plan has stored. A plan from the paper's formulas stores none. For such a plan the prediction is its
bottleneck.

A host has one network interface. So a worker sends everything (downstream, upstream and to replicas) over one
link, and receives everything over another one.

with_links_hidden() puts more microbatches in flight than Plan.in_flight has by default. It does so if a slow
link would otherwise leave a stage idle, and the simulator shows a gain that is worth the memory and
staleness. Pure; any thread; needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pipedream.common.document import read_value
from pipedream.planning.item_cost import EVEN, Spread, Waking
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.plan_schedule import minibatches_per_body, schedule_of, versions_kept
from pipedream.planning.runtime_costs import StageCosts, costs_of, predicted_rows
from pipedream.planning.simulator import Conditions, SharedHost, Simulation, simulate, steady_ms
from pipedream.planning.synced_bytes import all_reduce_ms, exchange_times, shard_shares

if TYPE_CHECKING:
    from pipedream import _core

__all__ = [
    "FEW_ROUNDS",
    "SIMULATED_ITEMS_MAX",
    "STEADY_ROUNDS",
    "LinkCosts",
    "boundary_links",
    "predict_ms",
    "predict_ms_of_run",
    "simulate_programs",
    "steady_minibatches",
    "with_links_hidden",
]

# Minibatches simulated for each replica, besides warm-up and cool-down. They are enough to draw each factor
# of the spread (item_cost.py) several times.
STEADY_ROUNDS = 100
# The fewest rounds simulated for a schedule that drains. A round is the work between two updates. Such a
# schedule is measured only from the end of its first round on.
_DRAINED_ROUNDS_MIN = 3
# The most minibatches that are simulated if whole rounds need more than was asked for.
_MINIBATCHES_MAX = 2_048


def predict_ms(
    plan: Plan,
    schedule: _core.ScheduleOptions,
    *,
    steady_rounds: int = STEADY_ROUNDS,
    spreads: bool = True,
) -> float | None:
    """Returns the milliseconds per minibatch in the steady state. If the plan has stored no costs of its
    stages, returns its bottleneck, which may be None.

    steady_rounds: number of minibatches of each replica, besides warm-up and cool-down. spreads: whether the
    times of single items vary about their mean (item_cost.py).
    """
    from pipedream import _core

    costs = costs_of(plan, drains=_core.drains_every_minibatch(schedule))
    if costs is None:
        return plan.bottleneck_ms
    times, transfers, conditions = _timing_of(plan, schedule, costs, boundary_links(plan))
    if not spreads:
        conditions = conditions._replace(spread=EVEN)
    num_minibatches = steady_minibatches(plan, schedule, steady_rounds)
    return steady_ms(schedule, num_minibatches, times, transfers, conditions)


def predict_ms_of_run(plan: Plan, schedule: _core.ScheduleOptions) -> float | None:
    """Returns the prediction of predict_ms() for a run that has ended. If a figure in the plan's file is
    wrong, returns the bottleneck and raises nothing.
    """
    try:
        return predict_ms(plan, schedule)
    except ValueError:
        return plan.bottleneck_ms


def steady_minibatches(plan: Plan, schedule: _core.ScheduleOptions, rounds: int = STEADY_ROUNDS) -> int:
    """Returns enough minibatches to see the steady state: `rounds` for each replica, plus warm-up and
    cool-down.
    """
    from pipedream import _core

    replicas = max(stage.num_replicas for stage in plan.stages)
    if not _core.drains_every_minibatch(schedule):
        in_flight = max(-(-max(schedule.in_flight) // schedule.num_microbatches), 1)
        return (rounds + 2 * in_flight) * replicas
    # Each round has its own warm-up and cool-down. If stages have different numbers of replicas, all stages
    # together have a longer round than each stage alone.
    asked = (rounds + 2) * replicas
    of_round = _core.rounds_of(schedule, 0).minibatches_per_round
    whole_rounds = max(-(-asked // of_round), _DRAINED_ROUNDS_MIN) * of_round
    return min(whole_rounds, max(asked, _MINIBATCHES_MAX))


def simulate_programs(
    plan: Plan,
    schedule: _core.ScheduleOptions,
    programs: Sequence[Sequence[_core.Instruction]],
    costs: Sequence[StageCosts],
    links: Sequence[LinkCosts],
    *,
    one_link: bool = True,
) -> Simulation:
    """Simulates the workers' lists of instructions with these costs of each stage and boundary, and with the
    plan's other figures. one_link: as in Conditions.
    """
    times, transfers, conditions = _timing_of(plan, schedule, costs, links)
    return simulate(
        programs,
        times,
        transfers,
        conditions._replace(one_link=one_link),
        minibatches_per_body=minibatches_per_body(schedule),
    )


def _timing_of(
    plan: Plan,
    schedule: _core.ScheduleOptions,
    costs: Sequence[StageCosts],
    links: Sequence[LinkCosts],
) -> tuple[list[_core.StageDurations], list[_core.BoundaryDurations], Conditions]:
    """Returns the times of each stage and boundary, and the other conditions, as the simulator takes them."""
    predicted, m = plan.predicted, schedule.num_microbatches
    wakings = read_value("predicted.waking", predicted.get("waking", []), tuple[Waking, ...])
    _check_counts(plan, costs, len(wakings))
    versions = versions_kept(schedule)
    host: SharedHost | None = read_value("predicted.host", predicted.get("host"), SharedHost | None)
    is_alone = host is not None and host.num_workers == 1
    speed = host.speed(1) if host is not None and is_alone else 1.0
    sizes: list[float | None] = [None] * plan.num_stages
    if predicted.get("stage_parameter_bytes") is not None:
        sizes = predicted_rows(plan, "stage_parameter_bytes", float, plan.num_stages, "stages")
    times = [
        _times(*stage, schedule, speed) for stage in zip(plan.stages, costs, versions, sizes, strict=True)
    ]
    conditions = Conditions(
        host=None if is_alone else host,
        spread=read_value("predicted.spread", predicted.get("spread", {}), Spread),
        waking_after_ms=[waking.after_ms for waking in wakings],
        one_link=True,
    )
    return times, [link.of_microbatch(m) for link in links], conditions


def _check_counts(plan: Plan, costs: Sequence[StageCosts], num_wakings: int) -> None:
    """Raises ValueError naming waking_ms or push_leads if a stage's costs have the wrong number of
    entries.
    """
    for index, (stage, cost) in enumerate(zip(plan.stages, costs, strict=True)):
        if len(cost.waking_ms) != num_wakings:
            raise ValueError(
                f"stage {index} has {len(cost.waking_ms)} waking_ms for {num_wakings} in predicted.waking:"
                " give one for each"
            )
        if cost.push_leads and len(cost.push_leads) != stage.num_replicas:
            raise ValueError(
                f"stage {index} has {len(cost.push_leads)} push_leads for {stage.num_replicas} replicas: give"
                " one for each, or none"
            )


def _times(
    stage: Stage,
    cost: StageCosts,
    num_versions: int,
    parameter_bytes: float | None,
    schedule: _core.ScheduleOptions,
    speed: float,
) -> _core.StageDurations:
    from pipedream import _core

    # After an all-reduce every replica updates all of the stage's parameters.
    updated = 1.0 if schedule.uses_allreduce else 1 / stage.num_replicas
    num_microbatches = schedule.num_microbatches
    update_ms = _update_ms(stage, cost, num_versions, updated) / speed
    if schedule.uses_allreduce:
        update_ms += all_reduce_ms(stage, cost.shard_ms * stage.num_replicas)
    exchange = exchange_times(stage, cost.shard_ms * stage.num_replicas, parameter_bytes)
    exchange["push_ms"] = cost.push_ms
    if stage.num_spare_shards:
        shares = shard_shares(stage.num_replicas, stage.num_spare_shards)
        update_ms, exchange["spare_update_ms"] = (
            _update_ms(stage, cost, num_versions, of_owner) / speed for of_owner in shares
        )
    elif not schedule.asynchronous:
        exchange["num_chunks"] = cost.num_chunks or 1
        exchange["updates_whole"] = schedule.exchanges_norms
        of_last = cost.backward.first if num_microbatches == 1 else cost.backward.later
        backward_ms = of_last(num_microbatches) / speed
        exchange["push_leads_ms"] = [
            (first * backward_ms, last * backward_ms) for first, last in cost.push_leads
        ]
    return _core.StageDurations(
        forward_ms=cost.forward.first(num_microbatches) / speed,
        later_forward_ms=cost.forward.later(num_microbatches) / speed,
        backward_ms=cost.backward.first(num_microbatches) / speed,
        later_backward_ms=cost.backward.later(num_microbatches) / speed,
        update_ms=update_ms,
        sync_latency_ms=cost.sync_latency_ms,
        wakings_ms=[
            (ms.get("FORWARD", 0.0), ms.get("BACKWARD", 0.0), ms.get("UPDATE", 0.0)) for ms in cost.waking_ms
        ],
        **exchange,
    )


def _update_ms(stage: Stage, cost: StageCosts, num_versions: int, share: float) -> float:
    """Returns the update time of a worker that owns `share` of the stage's parameters. The times in `cost`
    are for a share of 1 / r, so the part that grows with the parameters is scaled.
    """
    update_ms, of_shard_ms = cost.update_ms, cost.shard_update_ms
    if num_versions > 1:
        update_ms += cost.copy_ms
        of_shard_ms = None if of_shard_ms is None else of_shard_ms + cost.copy_ms
    return update_ms + (share * stage.num_replicas - 1) * (of_shard_ms or 0.0)


class LinkCosts(NamedTuple):
    """The time that a minibatch's tensors need to cross a boundary, from one stage to the next. An entry of
    `links` in a plan's `predicted`.
    """

    one_way_ms: float
    latency_ms: float
    back_ms: float | None = None
    """Time of the gradients, if it differs from one_way_ms."""

    def of_microbatch(self, num_microbatches: int) -> _core.BoundaryDurations:
        from pipedream import _core

        back_ms = self.one_way_ms if self.back_ms is None else self.back_ms
        return _core.BoundaryDurations(
            self.one_way_ms / num_microbatches, back_ms / num_microbatches, self.latency_ms
        )


def boundary_links(plan: Plan) -> list[LinkCosts]:
    """Returns the costs of boundaries that a simulated plan has stored. Raises ValueError naming a field."""
    return predicted_rows(plan, "links", LinkCosts, plan.num_stages - 1, "boundaries")


FEW_ROUNDS = 8  # rounds simulated for each plan that a search scores
SIMULATED_ITEMS_MAX = 100_000  # minibatches times stages; partition() would take too long to simulate more
_ROUNDING = 1e-9
_GAIN_MIN = 0.05  # least saving, as a share of the time per minibatch, for more microbatches in flight


def with_links_hidden(plan: Plan, simulated_ms: Callable[[Plan], float]) -> Plan:
    """Returns the plan with so many microbatches in flight that stages do not wait for links. Returns it
    unchanged if that saves too little, or would take too long to simulate. `predicted` has the times before
    and after the change. simulated_ms: function that returns a plan's milliseconds per minibatch.
    """
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
    """Returns the milliseconds per minibatch of the slowest stage or link. No number of microbatches in
    flight makes the plan faster than that. With cost model "paper" the plan's bottleneck is taken for it. The
    calibrated model's bottleneck also includes waiting for links.
    """
    if plan.cost_model != "calibrated":
        return plan.bottleneck_ms or 0.0
    one_way_ms = [both_ms / 2 for both_ms in plan.predicted["boundary_ms"]]
    slowest_ms: float = max([*plan.predicted["stage_ms"], *one_way_ms])
    return slowest_ms
