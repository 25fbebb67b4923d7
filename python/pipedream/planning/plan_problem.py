"""PlanProblem holds the arguments of one partition(). It makes a plan from given stages, with the figures
that the cost model predicts. Pure; any thread; needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipedream.common.document import write_value
from pipedream.planning.factor_rule import core_factors, factored_figures
from pipedream.planning.formulas import StageLinks, formula_figures, samples_per_s
from pipedream.planning.layer_profile import Profile
from pipedream.planning.limits import Limits, NothingFitsError, solve_within
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.plan_schedule import (
    any_schedule_of,
    microbatches_min,
    minibatches_of_round,
    profile_of_rounds,
    schedule_of,
)
from pipedream.planning.prediction import (
    FEW_ROUNDS,
    STEADY_ROUNDS,
    LinkCosts,
    predict_ms,
    steady_minibatches,
)
from pipedream.planning.program import rules_of
from pipedream.planning.runtime_costs import FREE, RuntimeCosts, StageCosts, costs_of, runtime_of, stage_costs
from pipedream.planning.simulator import SharedHost

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["PlanProblem", "Stages"]

# Minibatches times stages times microbatches. A longer simulation in which the times of items vary (their
# spread, item_cost.py) would take too long.
_SPREAD_ITEMS_MAX = 6_000

Stages = tuple[Stage, ...]


@dataclass(frozen=True)
class PlanProblem:
    """The arguments of one partition()."""

    profile: Profile
    num_workers: int
    bytes_per_s: float
    """Bandwidth in bytes per second. With measured links it is the bandwidth of the slowest link that may be
    used.
    """
    cost_model: str
    straight: bool
    workers_per_host: int | None
    schedule: str
    microbatches: int | None
    limits: Limits
    links: LinkProfile | None = None
    codec: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_simulated(self) -> bool:
        return self.cost_model == "calibrated" or not self.rules.has_cost_formulas

    @property
    def rules(self) -> _core.ScheduleRules:
        return rules_of(self.schedule)

    @functools.cached_property
    def runtime(self) -> RuntimeCosts:
        if self.cost_model == "paper":
            return FREE
        try:
            runtime = runtime_of(self.profile)
        except ValueError as error:
            raise ValueError(f"the profile's {error}: calibrate it anew") from None
        if runtime is None:
            raise ValueError(
                "cost_model is 'calibrated', but the profile has no runtime figures:"
                " pipedream.calibrate(profile, model, data, ...) measures them"
            )
        return runtime

    def links_of(self, stages: Stages) -> StageLinks:
        if self.links is None:
            return StageLinks.uniform(stages, self.bytes_per_s)
        return StageLinks.measured(stages, self.links)

    # By the paper's formulas.

    def formula_figures_of(self, stages: Stages) -> dict[str, Any]:
        profile = self.limits.slowed(self.profile, stages)
        return formula_figures(profile, stages, self.links_of(stages), microbatches=self.microbatches or 1)

    def formula_plan(self, stages: Stages, bottleneck_ms: float | None = None) -> Plan:
        predicted = self.formula_figures_of(stages)
        if bottleneck_ms is None:
            bottleneck_ms = max([*predicted["stage_ms"], *predicted["boundary_ms"]])
        rate = samples_per_s(self.profile, bottleneck_ms)
        return self._plan(
            stages,
            bottleneck_ms=bottleneck_ms,
            predicted={"samples_per_s": rate, "memory_bytes": None} | predicted,
        )

    def solve(
        self, layers_ms: list[float], num_workers: int, straight: bool
    ) -> tuple[Stages, float, dict[str, Any]]:
        """Returns the optimum of the paper's formulas within the limits: its stages, its bottleneck in
        seconds, and its figures of memory and recompute. Raises NothingFitsError if no plan keeps to the
        limits.
        """
        from pipedream import _core

        m = self.microbatches or 1
        if self.limits.any:
            limits = self.limits
            if num_workers != self.num_workers:
                limits = limits.for_workers(num_workers)
            return solve_within(layers_ms, self.profile, num_workers, self.bytes_per_s, straight, limits, m)
        found, bottleneck_s = _core.partition(
            [layer_ms / 1e3 for layer_ms in layers_ms],
            [float(layer.activation_bytes) for layer in self.profile.layers],
            [float(layer.parameter_bytes) for layer in self.profile.layers],
            num_workers,
            self.bytes_per_s,
            straight,
            core_factors(self.profile, layers_ms),
            m,
        )
        return tuple(Stage(*stage) for stage in found), bottleneck_s, {}

    # By the simulator.

    def simulated_ms(self, plan: Plan) -> float:
        """Returns the simulated milliseconds per minibatch, if every work item takes its mean time."""
        costed = self.costed(plan)
        options = schedule_of(costed, self.schedule, self.microbatches or 1)
        predicted_ms = predict_ms(costed, options, steady_rounds=FEW_ROUNDS, spreads=False)
        assert predicted_ms is not None
        return predicted_ms

    def costed(self, plan: Plan) -> Plan:
        """Returns the plan with the costs from which its time is predicted."""
        return replace(plan, predicted=plan.predicted | self._costs(plan.stages))

    def simulated_plan(
        self, stages: Stages, *, spreads: bool = True, in_flight: tuple[int, ...] = ()
    ) -> Plan:
        """Returns the plan of these stages with simulated figures. spreads: whether the times of single items
        vary about their mean (item_cost.py); False when plans are compared. in_flight: as in Plan.
        """
        predicted: dict[str, Any] = {"samples_per_s": None, "memory_bytes": None}
        predicted |= formula_figures(self.profile, stages, self.links_of(stages)) | self._costs(stages)
        plan = self._plan(stages, bottleneck_ms=None, predicted=predicted, in_flight=in_flight)
        best_ms, best_m = min((ms, m) for m, ms in self._times_by_microbatches(plan))
        if spreads and self.runtime.spread:
            options = schedule_of(plan, self.schedule, best_m)
            num_items = steady_minibatches(plan, options) * plan.num_stages * best_m
            rounds = STEADY_ROUNDS if num_items <= _SPREAD_ITEMS_MAX else FEW_ROUNDS
            predicted_ms = predict_ms(plan, options, steady_rounds=rounds)
            assert predicted_ms is not None
            best_ms = predicted_ms
        predicted["samples_per_s"] = samples_per_s(self.profile, best_ms)
        if best_m != self.microbatches:
            predicted["stage_ms"] = self._stages_ms(plan, costs_of(plan) or [], best_m)
        if self.codec:
            predicted["factored"] = self._factored(plan, best_m)
        microbatches = best_m if plan.schedule else None
        return replace(plan, bottleneck_ms=best_ms, predicted=predicted, microbatches=microbatches)

    def _times_by_microbatches(self, plan: Plan) -> Iterator[tuple[int, float]]:
        for m in self._fitting_choices(plan):
            options = schedule_of(plan, self.schedule, m)
            predicted_ms = predict_ms(plan, options, steady_rounds=FEW_ROUNDS, spreads=False)
            assert predicted_ms is not None
            yield m, predicted_ms

    def _fitting_choices(self, plan: Plan) -> Sequence[int]:
        """Returns the numbers of microbatches with which the plan keeps to the limits."""
        choices = self._microbatch_choices(plan)
        return [m for m in choices if self._keeps_to_limits(plan, m)] if self.limits.any else choices

    def _keeps_to_limits(self, plan: Plan, microbatches: int) -> bool:
        with contextlib.suppress(NothingFitsError):
            self.limits_of(plan, microbatches)
            return True
        return False

    def _microbatch_choices(self, plan: Plan) -> Sequence[int]:
        """Returns the numbers of microbatches to try. The sequence is empty if the plan needs more
        microbatches than the user or the batch size allows.
        """
        if not self.rules.needs_microbatches:
            return (self.microbatches or 1,)
        least = microbatches_min(plan, self.schedule)
        if self.microbatches is not None:
            return (self.microbatches,) if self.microbatches >= least else ()
        counts = self.profile.microbatch_counts()
        largest = self.profile.batch_size or max(least, counts[-1])
        return sorted({m for m in (*counts, least) if least <= m <= largest})

    def _costs(self, stages: Stages) -> dict[str, Any]:
        """Returns the figures from which a plan's time is predicted."""
        links = self.links_of(stages)
        if self.cost_model != "calibrated":  # the paper's formulas have no latency
            links = links.without_latency()
        profile = self.limits.slowed(self.profile, stages)

        def costs_with(minibatches: Sequence[float] | None) -> list[StageCosts]:
            return stage_costs(
                profile,
                self.runtime,
                stages,
                links.replicas,
                latency_ms=links.replica_latency_ms,
                minibatches=minibatches,
            )

        costs, drained = costs_with(None), None
        if self.codec:
            of_round = minibatches_of_round(any_schedule_of(Plan(stages), "flush"))
            drained = costs_with(of_round) if max(of_round) > 1 else None
        predicted = formula_figures(self.profile, stages, links)
        figures: dict[str, Any] = {
            "stage_ms": self._stages_ms(Plan(stages), costs, self.microbatches),
            "stage_costs": write_value(tuple(costs)),
            **({} if drained is None else {"drained_costs": write_value(tuple(drained))}),
            **({"spread": write_value(self.runtime.spread)} if self.runtime.spread else {}),
            **({"waking": write_value(self.runtime.waking)} if self.runtime.waking else {}),
            "links": [
                write_value(LinkCosts(both_ms / 2, max(self.runtime.latency_ms, latency_ms)))
                for both_ms, latency_ms in zip(predicted["boundary_ms"], links.latency_ms, strict=True)
            ],
        }
        # A plan may leave workers idle. Idle workers are not counted among those that share cores.
        num_workers = sum(stage.num_replicas for stage in stages)
        workers_per_host = min(self.workers_per_host or 1, num_workers)
        if workers_per_host > 1 or self.runtime.alone_speed > 1:
            host = SharedHost(workers_per_host, self.runtime.num_cores, self.runtime.alone_speed)
            figures["host"] = write_value(host)
        return figures

    def _stages_ms(self, plan: Plan, costs: Sequence[StageCosts], microbatches: int | None) -> list[float]:
        """Returns each stage's milliseconds per minibatch. microbatches None: the fewest that the schedule
        allows.
        """
        from pipedream import _core

        m = microbatches or microbatches_min(plan, self.schedule)
        options = schedule_of(plan, self.schedule, m)
        return [
            cost.stage_ms(stage.num_replicas, _core.rounds_of(options, index))
            for index, (cost, stage) in enumerate(zip(costs, plan.stages, strict=True))
        ]

    def _factored(self, plan: Plan, microbatches: int | None) -> list[dict[str, Any]]:
        """Returns for each stage the figures of the weights whose gradients are pushed as factors.
        microbatches None: the fewest that the schedule allows.
        """
        m = microbatches or microbatches_min(plan, self.schedule)
        of_rounds = profile_of_rounds(self.profile, plan, schedule_of(plan, self.schedule, m))
        return factored_figures(of_rounds, plan.stages)

    def is_allowed(self, stages: Stages) -> bool:
        is_equal = len({stage.num_replicas for stage in stages}) == 1
        if self.rules.has_equal_replicas and not is_equal and not self.limits.num_replicas:
            return False  # as in the schedule's own planner, unless the user fixes the replicas
        return bool(self._fitting_choices(Plan(stages)))

    def has_microbatches(self, stages: Stages) -> bool:
        """Whether a minibatch can be cut into as many microbatches as the schedule needs."""
        return bool(self._microbatch_choices(Plan(stages)))

    def has_room(self, stages: Stages) -> bool:
        """Whether the stages fit into the workers' memory with schedule "pipedream". Used for the plans with
        which the chosen plan is compared, because their times are also predicted for this schedule.
        """
        options = schedule_of(Plan(stages), "pipedream", self.microbatches or 1)
        return self.limits.have_room(stages, self.profile, options)

    def limits_of(self, plan: Plan, microbatches: int) -> dict[str, Any]:
        """Returns the figures of memory and recompute of the plan with this number of microbatches. Raises
        NothingFitsError if the plan does not keep to the limits.
        """
        options = schedule_of(plan, self.schedule, microbatches)
        return self.limits.figures_of(plan.stages, profile_of_rounds(self.profile, plan, options), options)

    def _plan(
        self,
        stages: Stages,
        *,
        bottleneck_ms: float | None,
        predicted: dict[str, Any],
        in_flight: tuple[int, ...] = (),
    ) -> Plan:
        is_asked = not self.rules.has_cost_formulas or self.microbatches is not None
        if self.codec:
            predicted["factored"] = self._factored(Plan(stages), self.microbatches)
        return Plan(
            stages,
            model=self.profile.model,
            num_workers=self.num_workers,
            bandwidth_bytes_per_s=self.links_of(stages).slowest(self.bytes_per_s),
            cost_model=self.cost_model,
            in_flight=in_flight,
            bottleneck_ms=bottleneck_ms,
            predicted=predicted,
            max_shapes=self.profile.max_shapes or {},
            cuts=self.profile.cuts,
            codec=dict(self.codec),
            schedule=self.schedule if is_asked else None,
            microbatches=self.microbatches or 1 if is_asked else None,
        )
