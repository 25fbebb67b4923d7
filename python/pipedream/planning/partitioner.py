"""partition(): the best plan by a cost model. Pure; any thread; needs no torch.

    paper        the exact optimum of the paper's formulas, by a search in C++ (csrc/planner)
    calibrated   what measured runtime costs and the simulator say of a run, searched from there (search.py)

Another schedule than "pipedream" is simulated and searched with either: the formulas know no bubble. Here
are its inputs, its refusals, and the figures beside its answer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipedream.common.units import parse_bandwidth
from pipedream.planning.alternatives import compare, model_parallel_ms
from pipedream.planning.factor_rule import FACTOR_CODEC, check_planned_codec, core_factors, factored_figures
from pipedream.planning.formulas import formula_figures, samples_per_s
from pipedream.planning.hidden_links import FEW_ROUNDS, SIMULATED_ITEMS_MAX, with_links_hidden
from pipedream.planning.layer_profile import Profile
from pipedream.planning.limits import Limits, NothingFitsError, make_limits, nothing_fits, solve_within
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.measured_starts import measured_starts
from pipedream.planning.partition_arguments import CUT_SCHEDULES, check_partition_arguments
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.plan_schedule import (
    any_schedule_of,
    minibatches_of_round,
    profile_of_rounds,
    schedule_of,
)
from pipedream.planning.prediction import STEADY_ROUNDS, predict_ms, steady_minibatches
from pipedream.planning.runtime_costs import FREE, RuntimeCosts, layer_cost_ms, runtime_of, stage_costs
from pipedream.planning.search import search
from pipedream.planning.spares import with_spares
from pipedream.planning.stage_links import StageLinks

__all__ = ["make_plan", "partition"]

_MICROBATCHES = (1, 2, 4, 8, 16, 32)  # of which m is chosen where it is free
_SEARCHED_PLANS = 400

Stages = tuple[Stage, ...]


def partition(
    profile: Profile,
    num_workers: int,
    bandwidth: str | float | LinkProfile,
    *,
    memory: str | int | Sequence[str | int] | None = None,
    cost_model: str = "paper",
    straight: bool = False,
    workers_per_host: int | None = None,
    schedule: str = "pipedream",
    microbatches: int | None = None,
    speeds: Sequence[float] | None = None,
    boundaries: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    optimizer_copies: float = 1.0,
    recompute: bool = True,
    hides_links: bool = True,
    spare_workers: int = 0,
    codec: Mapping[str, str] | None = None,
    sync: str = "bsp",
) -> Plan:
    """The plan with the smallest predicted time per minibatch on at most `num_workers` workers.

    T(i..j, m) = (1/m) max( sum T_l, sum 4 (m-1) |w_l| / (m B) ) for a stage, 2 a_i / B for a boundary;
    ties go to fewer workers, then to fewer stages. Source: PipeDream (SOSP'19), section 3.1.

    `bandwidth` is a text with a unit ("10Gbit/s") or bytes per second, or what profile_links() measured: a
    search then begins at the formulas' optima for some of the bandwidths found, and takes the plan that is
    fastest over the links that its own ranks have. `straight` allows one replica per stage only. `predicted`
    of the plan compares it with one worker, data and model parallelism and the straight pipeline.

    memory: what a worker may use ("16GiB" or bytes), of all or one for each: versions, gradients, the
        optimizer's state (optimizer_copies of the weights: 0 plain SGD, 1 momentum, 2 Adam), what replicas
        exchange and what the minibatches in flight keep; recompute allows stages to run their forward
        again where they do not fit.
    cost_model: "calibrated" takes a profile from `calibrate`, and predicts what a run takes: the simulator
        executes its lists with the measured costs, and a search begins where the formulas end.
    workers_per_host: how many share the cores of one machine, for the calibrated model; None: each has a
        machine of its own.
    schedule, microbatches: of the run, for the calibrated model's prediction; another schedule than
        "pipedream" is simulated with either model. None chooses m, where the schedule has microbatches;
        "2bw" gives all stages as many replicas, as its planner does (PipeDream-2BW, section 3.3).
    speeds: of each worker, by its rank; 2 takes half as long as the profile says.
    boundaries, replicas: the last layer of every stage but the last one, and each stage's replicas, where
        they are given.

    hides_links: by the paper's model, more minibatches are kept in flight than its rule says where the
        simulator shows that a slow link would cost more than 5 % otherwise, unless memory is limited.
    spare_workers: workers besides, as hosts without a GPU, that may serve as spare shards of replicated
        stages (docs/parameter-server.md); the plan has those that pay by the paper's formulas and by
        simulation, and says so, or why none does. By cost_model="paper" with schedule "pipedream" and one
        bandwidth.
    codec: {"pushes": "factors"} plans for replicas that push gradients of fully connected layers as their
        factors where these are smaller (docs/parameter-server.md), by a profile that has measured which. The
        plan carries it, and `run` takes it from there. A plan without says how much faster one with it is.
    sync: of the run: "asp" keeps more of what replicas share, which memory counts. "bsp" and "ssp" are alike.

    Raises ValueError for fewer than one worker, a bandwidth that is not positive, a cost model or schedule
    that is unknown or lacks its figures, and limits that no plan keeps to; TypeError for arguments of another
    kind.
    """
    links = bandwidth if isinstance(bandwidth, LinkProfile) else None
    check_partition_arguments(
        profile,
        num_workers,
        links,
        workers_per_host=workers_per_host,
        microbatches=microbatches,
        spare_workers=spare_workers,
        cost_model=cost_model,
        schedule=schedule,
        has_speeds=speeds is not None,
        has_codec=bool(codec),
        sync=sync,
    )
    planned_codec = check_planned_codec(codec, profile)
    asked = profile
    if not planned_codec:
        profile = profile.without_factors()
    bytes_per_s = (
        bandwidth.speeds_of_first(num_workers)[0]
        if isinstance(bandwidth, LinkProfile)
        else parse_bandwidth(bandwidth)
    )
    limits = make_limits(
        num_workers,
        memory=memory,
        speeds=speeds,
        boundaries=boundaries,
        replicas=replicas,
        optimizer_copies=optimizer_copies,
        recompute=recompute,
        sync=sync,
        profile=profile,
    )
    problem = _Problem(
        profile,
        num_workers,
        bytes_per_s,
        cost_model,
        straight,
        workers_per_host,
        schedule,
        microbatches,
        limits,
        links,
        planned_codec,
    )
    plan = problem.by_search() if problem.is_simulated else problem.by_formulas()
    if hides_links and not problem.is_simulated and memory is None:
        plan = problem.compared_with_factors(with_links_hidden(plan, problem.simulated_ms), asked)
        if "hidden_links" in plan.predicted and limits.any:
            plan = replace(plan, predicted=plan.predicted | limits.memory_with(plan, profile))
    return problem.with_spares(problem.with_alternatives(plan), spare_workers)


def make_plan(
    profile: Profile,
    stages: Stages,
    bytes_per_s: float,
    *,
    num_workers: int = 0,
    cost_model: str = "paper",
    workers_per_host: int | None = None,
    schedule: str = "pipedream",
    microbatches: int | None = None,
) -> Plan:
    """The plan of these stages, without a codec, with the figures that the cost model has of it."""
    problem = _Problem(
        profile.without_factors(),
        num_workers,
        bytes_per_s,
        cost_model,
        False,
        workers_per_host,
        schedule,
        microbatches,
        Limits(),
    )
    return problem.simulated_plan(stages) if problem.is_simulated else problem.formula_plan(stages)


@dataclass(frozen=True)
class _Problem:
    """What partition() was asked."""

    profile: Profile
    num_workers: int
    bytes_per_s: float
    """Of the slowest link that may be used, where they were measured."""
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
        return self.cost_model == "calibrated" or self.schedule != "pipedream"

    @functools.cached_property
    def runtime(self) -> RuntimeCosts:
        if self.cost_model == "paper":
            return FREE
        runtime = runtime_of(self.profile)
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

    def by_formulas(self) -> Plan:
        if self.links is not None and len(self.links.speeds_of_first(self.num_workers)) > 1:
            return self._by_measured_links(self.links)
        layers_ms = [layer.compute_ms for layer in self.profile.layers]
        stages, bottleneck_s, figures = self.solve(layers_ms, self.num_workers, self.straight)
        plan = self.formula_plan(stages, bottleneck_s * 1e3)
        return replace(plan, predicted=plan.predicted | figures)

    def _by_measured_links(self, links: LinkProfile) -> Plan:
        """By a search over the plans' own links."""
        layers_ms = [layer.compute_ms for layer in self.profile.layers]

        def optimum_at(bytes_per_s: float, num_workers: int, straight: bool) -> Stages:
            return replace(self, bytes_per_s=bytes_per_s).solve(layers_ms, num_workers, straight)[0]

        starts = measured_starts(links, self.num_workers, optimum_at, straight=self.straight)
        allowed = [stages for stages in starts if self._is_allowed(stages)] or starts[:1]
        return self._found_from(allowed, self.formula_plan, self.formula_plan)

    def _found_from(
        self, starts: Sequence[Stages], scored: Callable[[Stages], Plan], planned: Callable[[Stages], Plan]
    ) -> Plan:
        """The plan whose bottleneck is least, by search; planned: makes it, once found."""
        found = search(
            starts,
            lambda stages: scored(stages).bottleneck_ms or 0.0,
            num_layers=self.profile.num_layers,
            num_workers=self.num_workers,
            straight=self.straight,
            plans_max=_SEARCHED_PLANS,
            allowed=self._is_allowed,
        )
        plan = planned(found.stages)
        figures = {"search": found.to_dict()}
        if self.limits.any:
            figures |= self._limits_of(found.stages)
        return replace(plan, predicted=plan.predicted | figures)

    def formula_plan(self, stages: Stages, bottleneck_ms: float | None = None) -> Plan:
        predicted = formula_figures(self.limits.slowed(self.profile, stages), stages, self.links_of(stages))
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
        """The optimum of the formulas, its bottleneck in seconds, and what limits say of it."""
        from pipedream import _core

        if self.limits.any:
            if num_workers != self.num_workers:
                limits = self.limits.for_workers(num_workers)
                return solve_within(layers_ms, self.profile, num_workers, self.bytes_per_s, straight, limits)
            return solve_within(layers_ms, self.profile, num_workers, self.bytes_per_s, straight, self.limits)
        found, bottleneck_s = _core.partition(
            [layer_ms / 1e3 for layer_ms in layers_ms],
            [float(layer.activation_bytes) for layer in self.profile.layers],
            [float(layer.parameter_bytes) for layer in self.profile.layers],
            num_workers,
            self.bytes_per_s,
            straight,
            core_factors(self.profile, layers_ms),
        )
        return tuple(Stage(*stage) for stage in found), bottleneck_s, {}

    def simulated_ms(self, plan: Plan) -> float:
        """Per minibatch."""
        costed = replace(plan, predicted=plan.predicted | self._costs(plan.stages))
        predicted_ms = predict_ms(costed, schedule_of(costed, self.schedule, 1), steady_rounds=FEW_ROUNDS)
        assert predicted_ms is not None
        return predicted_ms

    def compared_with_factors(self, plan: Plan, profile: Profile) -> Plan:
        """The plan, which says how fast the best one with factors is. profile: which has them."""
        if self.codec or self.limits.any or self.links or not any(layer.factors for layer in profile.layers):
            return plan
        by_factors = replace(self, profile=profile, codec=FACTOR_CODEC).by_formulas()
        return replace(plan, predicted=plan.predicted | {"with_factors_ms": by_factors.bottleneck_ms})

    def with_spares(self, plan: Plan, spare_workers: int) -> Plan:
        def figures_of(stages: Stages) -> dict[str, Any]:
            return formula_figures(self.limits.slowed(self.profile, stages), stages, self.links_of(stages))

        return with_spares(plan, spare_workers, figures_of, self.simulated_ms)

    # By the simulator.

    def by_search(self) -> Plan:
        layers_ms = [layer_cost_ms(layer, self.runtime) for layer in self.profile.layers]
        starts: list[Stages] = []
        for count in range(1, self.num_workers + 1):
            for straight in {self.straight, True}:
                with contextlib.suppress(NothingFitsError):
                    if self.limits.memory_bytes:  # may fit, as the schedule keeps other versions
                        roomy = replace(self, limits=replace(self.limits, memory_bytes=()))
                        starts.append(roomy.solve(layers_ms, count, straight)[0])
                    starts.append(self.solve(layers_ms, count, straight)[0])
        if self.schedule == "2bw" and not self.straight:
            # Its planner's plans: all stages have as many replicas.
            equal = [
                tuple(replace(stage, num_replicas=self.num_workers // len(stages)) for stage in stages)
                for stages in starts
            ]
            starts += equal
        starts = [stages for stages in starts if self._is_allowed(stages)]
        if not starts and self.schedule == "2bw" and len(set(self.limits.num_replicas)) > 1:
            raise ValueError(
                f"replicas is {list(self.limits.num_replicas)}, but schedule '2bw' is planned with as many at"
                " all stages: give one number for all, or another schedule"
            )
        if not starts:
            raise NothingFitsError(nothing_fits(self.num_workers, self.limits, self.straight))
        without_spread = functools.partial(self.simulated_plan, spreads=False)
        return self._found_from(starts, without_spread, self.simulated_plan)

    def simulated_plan(self, stages: Stages, *, spreads: bool = True) -> Plan:
        """spreads: with the spread of single items about their mean; else what plans are compared by."""
        predicted: dict[str, Any] = {"samples_per_s": None, "memory_bytes": None}
        predicted |= formula_figures(self.profile, stages, self.links_of(stages)) | self._costs(stages)
        plan = self._plan(stages, bottleneck_ms=None, predicted=predicted)
        best_ms, best_m = min((ms, m) for m, ms in self._times_by_microbatches(plan))
        if spreads and self.runtime.spread.factors:
            options = schedule_of(plan, self.schedule, best_m)
            fits = steady_minibatches(plan) * plan.num_stages * best_m <= SIMULATED_ITEMS_MAX
            rounds = STEADY_ROUNDS if fits else FEW_ROUNDS
            predicted_ms = predict_ms(plan, options, steady_rounds=rounds)
            assert predicted_ms is not None
            best_ms = predicted_ms
        predicted["samples_per_s"] = samples_per_s(self.profile, best_ms)
        if self.schedule != "pipedream":
            predicted["schedule"] = self.schedule
        if self.schedule in CUT_SCHEDULES:
            predicted["microbatches"] = best_m
        return replace(plan, bottleneck_ms=best_ms, predicted=predicted)

    def _times_by_microbatches(self, plan: Plan) -> Iterator[tuple[int, float]]:
        choices: Sequence[int] = (1,)
        if self.microbatches is not None:
            choices = (self.microbatches,)
        elif self.schedule in CUT_SCHEDULES:
            largest = self.profile.batch_size or _MICROBATCHES[-1]
            choices = [m for m in _MICROBATCHES if m <= largest]
        for m in choices:
            try:
                options = schedule_of(plan, self.schedule, m)
                predicted_ms = predict_ms(plan, options, steady_rounds=FEW_ROUNDS, spreads=False)
            except ValueError:  # 2bw needs as many microbatches as are in flight
                if len(choices) == 1:
                    raise
                continue
            assert predicted_ms is not None
            yield m, predicted_ms

    def _costs(self, stages: Stages) -> dict[str, Any]:
        """What a prediction is made of."""
        links = self.links_of(stages)
        costs = stage_costs(
            self.limits.slowed(self.profile, stages),
            self.runtime,
            stages,
            links.replicas,
            minibatches=minibatches_of_round(Plan(stages), self.schedule) if self.codec else None,
        )
        predicted = formula_figures(self.profile, stages, links)
        # The paper's formulas have no latency.
        measured_ms = links.latency_ms if self.cost_model == "calibrated" else (0.0,) * len(stages)
        figures: dict[str, Any] = {
            "stage_ms": [
                cost.minibatch_ms / stage.num_replicas for cost, stage in zip(costs, stages, strict=True)
            ],
            "stage_costs": [cost.to_dict() for cost in costs],
            **({"spread": self.runtime.spread.to_dict()} if self.runtime.spread.factors else {}),
            "links": [
                {"one_way_ms": both_ms / 2, "latency_ms": max(self.runtime.latency_ms, latency_ms)}
                for both_ms, latency_ms in zip(predicted["boundary_ms"], measured_ms, strict=False)
            ],
        }
        workers_per_host = self.workers_per_host or 1
        if workers_per_host > 1 or self.runtime.alone_speed > 1:
            figures["host"] = {
                "num_workers": workers_per_host,
                "num_cores": self.runtime.num_cores,
                "alone_speed": self.runtime.alone_speed,
            }
        return figures

    def _is_allowed(self, stages: Stages) -> bool:
        if self.schedule == "2bw" and len({stage.num_replicas for stage in stages}) > 1:
            return False
        if not self.limits.any:
            return True
        with contextlib.suppress(NothingFitsError):
            self._limits_of(stages)
            return True
        return False

    def _limits_of(self, stages: Stages) -> dict[str, Any]:
        """Raises where the stages do not keep to the limits."""
        from pipedream import _core

        plan = Plan(stages)
        options = any_schedule_of(plan, self.schedule)
        versions = [_core.num_versions_kept(options, index) for index in range(len(stages))]
        return self.limits.figures_of(stages, profile_of_rounds(self.profile, plan, self.schedule), versions)

    # Beside other plans.

    def with_alternatives(self, plan: Plan) -> Plan:
        layers_ms = [layer_cost_ms(layer, self.runtime) for layer in self.profile.layers]
        speeds = self.limits.speeds
        free = replace(self, limits=Limits(speeds=speeds), schedule="pipedream", microbatches=None)
        fastest_first = Limits(speeds=tuple(sorted(speeds, reverse=True)))
        straight = free.solve(layers_ms, self.num_workers, True)[0]
        with contextlib.suppress(NothingFitsError):
            limits = replace(self.limits, last_layers=(), num_replicas=())
            straight = replace(self, limits=limits).solve(layers_ms, self.num_workers, True)[0]

        def minibatch_ms(stages: Stages) -> float:
            is_alone = sum(stage.num_replicas for stage in stages) == 1
            chosen = replace(free, limits=fastest_first) if is_alone else free
            one = chosen.simulated_plan(stages) if free.is_simulated else chosen.formula_plan(stages)
            return one.bottleneck_ms or 0.0

        def one_at_a_time_ms(stages: Stages) -> float:
            if not free.is_simulated:
                boundary_ms = free.formula_plan(stages).predicted["boundary_ms"]
                return model_parallel_ms(free.limits.slowed(free.profile, stages), boundary_ms)
            return replace(free, schedule="model_parallel").simulated_plan(stages).bottleneck_ms or 0.0

        times = compare(self.profile, self.num_workers, straight, minibatch_ms, one_at_a_time_ms)
        figures: dict[str, Any] = {"alternatives_ms": times}
        if speeds:
            figures["speeds"] = list(speeds[: plan.workers_used])
        given = {"boundaries": self.limits.last_layers, "replicas": self.limits.num_replicas}
        if any(given.values()):
            figures["given"] = [name for name, value in given.items() if value]
        if self.limits.memory_bytes:
            whole = Stage(0, self.profile.num_layers - 1)
            others = {
                "one_worker": (whole,),
                "data_parallel": (replace(whole, num_replicas=self.num_workers),),
                "straight": straight,
            }
            figures["without_room"] = [
                name for name, stages in others.items() if not self.limits.have_room(stages, self.profile)
            ]
        return replace(plan, predicted=plan.predicted | figures)

    def _plan(self, stages: Stages, *, bottleneck_ms: float | None, predicted: dict[str, Any]) -> Plan:
        if self.codec:
            of_rounds = profile_of_rounds(self.profile, Plan(stages), self.schedule)
            predicted["factored"] = factored_figures(of_rounds, stages)
        return Plan(
            stages,
            model=self.profile.model,
            num_workers=self.num_workers,
            bandwidth_bytes_per_s=self.links_of(stages).slowest(self.bytes_per_s),
            cost_model=self.cost_model,
            bottleneck_ms=bottleneck_ms,
            predicted=predicted,
            max_shapes=self.profile.max_shapes or {},
            cuts=self.profile.cuts,
            codec=dict(self.codec),
        )
