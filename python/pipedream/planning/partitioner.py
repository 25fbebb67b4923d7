"""partition() finds the best plan by a cost model. Pure except for its progress on stderr; any thread;
torch-free.

    paper        the exact optimum of the paper's formulas, by a search in C++ (csrc/planner)
    calibrated   the best time by measured runtime costs and the simulator; the search starts from the
                 formulas' optimum (search.py)

Any schedule other than "pipedream" is simulated and searched with either cost model, because the formulas
leave out the bubble, which is the time that workers spend waiting.

plan_search.py finds the plan. This module checks the arguments, adds figures to the plan, and chooses the
spare shards. A spare shard only makes the synchronisation of replicas shorter. The formulas choose the number
of spares (synced_bytes.py). Then the simulator checks that the plan becomes faster.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TextIO

from pipedream.common.units import parse_bandwidth
from pipedream.planning.factor_rule import check_has_factors, split_codec
from pipedream.planning.layer_profile import Profile
from pipedream.planning.limits import Limits, NothingFitsError, make_limits
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.partition_arguments import AUTO, DELAY_MAX, check_partition_arguments
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.plan_problem import PlanProblem, Stages
from pipedream.planning.plan_schedule import schedule_of
from pipedream.planning.plan_search import best_plan, compared_with_factors
from pipedream.planning.prediction import with_links_hidden
from pipedream.planning.program import rules_of, schedule_name
from pipedream.planning.runtime_costs import layer_cost_ms
from pipedream.planning.schedule_choice import best_of_schedules

__all__ = ["SearchProgress", "partition", "with_spares"]

_FIRST_S = 1.0
_TERMINAL_PERIOD_S = 0.25
_LINE_PERIOD_S = 5.0
_CLEAR_LINE = "\r\x1b[K"


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
    microbatches: int | str | None = None,
    delay_max: float = DELAY_MAX,
    speeds: Sequence[float] | None = None,
    boundaries: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    optimizer_copies: float = 1.0,
    recompute: bool = True,
    hides_links: bool = True,
    spare_workers: int = 0,
    codec: str | Mapping[str, str] | None = None,
    sync: str = "bsp",
    staleness: int = 0,
    whole_tensors: bool = False,
    progress: bool = True,
) -> Plan:
    """Returns the plan with the smallest predicted time per minibatch on at most `num_workers` workers.

    The cost of a stage is T(i..j, m) = (1/m) max( sum T_l, sum 4 (m-1) |w_l| / (m B) ). The cost of a
    boundary between two stages is 2 a_i / B. m is the number of replicas, T_l the time of a layer, |w_l| the
    bytes of its parameters, a_i the bytes of the tensors that cross the boundary, and B the bandwidth. Ties
    go to fewer workers, then to fewer stages. Source: PipeDream (SOSP'19), section 3.1.

    `bandwidth` is a text with a unit ("10Gbit/s"), a number of bytes per second, or the result of
    profile_links(). With measured links a search starts from the formulas' optima for some of the bandwidths.
    Each plan is timed over the links between its own ranks, and the fastest that is found is returned.
    `straight` allows one replica per stage only. The plan's `predicted` compares it with one worker, data
    parallelism, model parallelism and the straight pipeline.

    memory: the memory that a worker may use, "16GiB" or bytes; one value for all workers, or one for each. It
        must hold weight versions, gradients, the optimizer's state, buffers for what replicas exchange, and
        the tensors that microbatches in flight keep.
    optimizer_copies: the optimizer's state, in copies of the weights: 0 for plain SGD, 1 with momentum, 2 for
        Adam. With float32 masters of bfloat16 weights these are 2, 4 and 6.
    recompute: whether a stage may repeat its forward if its memory would not suffice otherwise.
    cost_model: "paper", or "calibrated", which needs a profile from `calibrate` and predicts the time of a
        run. The simulator executes the run's lists of instructions with the measured costs, and a search
        starts from the formulas' optimum.
    workers_per_host: how many workers share the cores of one machine, for the calibrated model. None: each
        worker has a machine of its own.
    schedule, microbatches: the schedule and number of microbatches of the run, for the prediction. Any
        schedule other than "pipedream" is simulated with either cost model. microbatches=None lets
        partition() choose the number if the schedule needs microbatches. "2bw" gives all stages the same
        number of replicas, as its own planner does (PipeDream-2BW, section 3.3). The times of small
        microbatches are the profile's microbatch_ms. Either argument may be "auto". Then the candidates are
        "flush", "pipedream" and "unstashed", with the numbers of microbatches that the minibatch allows. The
        highest predicted rate wins among those whose delay is at most delay_max. Rates within 1 % of the
        highest count as equal: among these the smallest delay wins, then a schedule that stashes.
        `run(schedule="auto")` uses the plan's choice, and print(plan) shows the candidates.
    delay_max: with "auto", the largest mean delay of gradients that is allowed, in updates, at the stage
        where it is largest. 0 allows "flush" only.
    speeds: the speed of each worker, by rank. A worker of speed 2 takes half the profile's time.
    boundaries, replicas: fix the last layer of every stage but the last one, and the replicas of each stage.

    hides_links: whether the plan keeps more microbatches in flight than Plan.in_flight has by default, if
        this hides slow links: the simulator must show a gain of 5 % or more. Applies to schedule "pipedream",
        and with "auto" also to "unstashed", unless memory is limited.
    spare_workers: additional workers, such as hosts without a GPU, that may serve as spare shards of
        replicated stages (docs/parameter-server.md). The plan uses as many as make it faster by the paper's
        formulas and by simulation. If it uses none, it says why. Needs cost_model="paper", schedule
        "pipedream" and one bandwidth.
    codec: {"pushes": "factors"} plans for replicas that push the gradients of fully connected layers as
        factors where these are smaller (docs/parameter-server.md). The profile must have measured them. `run`
        takes this codec from the plan. A plan by the formulas without this codec, limits and measured links
        says how much faster the best plan with this codec is, if that is more than 2 %. With `memory`, codecs
        of "activations" and "gradients" (or one name for both) reserve the room that encoded tensors take;
        give the same codec to `run`. Predicted times assume tensors that are not encoded.
    sync, staleness: the values for the run, because memory depends on them. "ssp" keeps versions and
        gradients of more updates, "asp" keeps more of what replicas share, and with "allreduce" each replica
        has the optimizer's whole state.
    whole_tensors: reserves the memory that two features need: optimizers that do not work element by element,
        so that shards are whole tensors of unequal sizes, and norms of gradients (max_grad_norm).
    progress: whether a search that takes longer than a second reports its progress on stderr.

    Raises ValueError for fewer than one worker, a bandwidth that is not positive, and an unknown cost model
    or schedule. Also raises it for missing figures, and if no plan keeps to the limits. Raises TypeError for
    arguments of a wrong type.
    """
    links = bandwidth if isinstance(bandwidth, LinkProfile) else None
    planned_codec, crossing_codec = split_codec(codec, has_limit=memory is not None)
    check_partition_arguments(
        profile,
        num_workers,
        links,
        workers_per_host=workers_per_host,
        microbatches=microbatches,
        delay_max=delay_max,
        spare_workers=spare_workers,
        cost_model=cost_model,
        schedule=schedule,
        has_speeds=speeds is not None,
        codec=planned_codec or {},
        sync=sync,
        staleness=staleness,
    )
    schedule, chooses = schedule_name(schedule), AUTO in (schedule, microbatches)
    asked = profile
    if planned_codec:
        check_has_factors(profile)
    else:
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
        profile=profile,
        recompute=recompute,
        sync=sync,
        staleness=staleness,
        whole_tensors=whole_tensors,
        has_spares=spare_workers > 0,
        drains=schedule != AUTO and rules_of(schedule).drains,
        codec=crossing_codec,
    )
    problem = PlanProblem(
        profile,
        num_workers,
        bytes_per_s,
        cost_model,
        straight,
        workers_per_host,
        schedule,
        microbatches if isinstance(microbatches, int) else None,
        limits,
        links,
        planned_codec,
    )
    is_free = hides_links and memory is None
    with SearchProgress(enabled=progress) as shown:
        if chooses:
            finished = _with_links_hidden if is_free else None
            plan, problem = best_of_schedules(problem, delay_max, finished, shown.advance)
        else:
            plan = best_plan(problem, shown.advance)
    if not chooses and is_free and problem.rules.has_cost_formulas:
        plan = _with_links_hidden(plan, problem)
    if hides_links and not problem.is_simulated and memory is None:
        plan = compared_with_factors(plan, problem, asked)
    plan = _with_alternatives(plan, problem)
    return with_spares(plan, spare_workers, problem.formula_figures_of, problem.simulated_ms)


def _with_links_hidden(plan: Plan, problem: PlanProblem) -> Plan:
    if problem.rules.drains:
        return plan
    raised = with_links_hidden(plan, problem.simulated_ms)
    if raised.in_flight == plan.in_flight:
        return plan
    if problem.is_simulated:
        with_more = problem.simulated_plan(plan.stages, in_flight=raised.in_flight)
        raised = replace(with_more, predicted=raised.predicted | with_more.predicted)
    if problem.limits.any:
        options = schedule_of(raised, problem.schedule, problem.microbatches or 1)
        more = problem.limits.memory_with(raised.stages, problem.profile, options)
        raised = replace(raised, predicted=raised.predicted | more)
    return raised


def _with_alternatives(plan: Plan, problem: PlanProblem) -> Plan:
    """Adds to `predicted` the times of other plans, and the names of the arguments that the user fixed."""
    layers_ms = [layer_cost_ms(layer, problem.runtime) for layer in problem.profile.layers]
    speeds = problem.limits.speeds
    free = replace(problem, limits=Limits(speeds=speeds), schedule="pipedream", microbatches=None)
    fastest_first = Limits(speeds=tuple(sorted(speeds, reverse=True)))
    straight = free.solve(layers_ms, problem.num_workers, True)[0]
    with contextlib.suppress(NothingFitsError):
        limits = replace(problem.limits, last_layers=(), num_replicas=())
        straight = replace(problem, limits=limits).solve(layers_ms, problem.num_workers, True)[0]

    def minibatch_ms(stages: Stages) -> float:
        is_alone = sum(stage.num_replicas for stage in stages) == 1
        chosen = replace(free, limits=fastest_first) if is_alone else free
        one = chosen.simulated_plan(stages) if free.is_simulated else chosen.formula_plan(stages)
        return one.bottleneck_ms or 0.0

    def one_at_a_time_ms(stages: Stages) -> float:
        if not free.is_simulated:
            boundary_ms = free.formula_plan(stages).predicted["boundary_ms"]
            # The paper's time is the sum of all layers' times and of each boundary's times in both
            # directions.
            return free.limits.slowed(free.profile, stages).compute_ms + float(sum(boundary_ms))
        return replace(free, schedule="model_parallel").simulated_plan(stages).bottleneck_ms or 0.0

    whole = Stage(0, problem.profile.num_layers - 1)
    others = {
        "one_worker": (whole,),
        "data_parallel": (replace(whole, num_replicas=problem.num_workers),),
        "straight": straight,
    }
    times = {name: minibatch_ms(stages) for name, stages in others.items()}
    # The time of model parallelism is that of the straight plan with one minibatch at a time.
    figures: dict[str, Any] = {"alternatives_ms": times | {"model_parallel": one_at_a_time_ms(straight)}}
    if speeds:
        figures["speeds"] = list(speeds[: plan.workers_used])
    given = {"boundaries": problem.limits.last_layers, "replicas": problem.limits.num_replicas}
    if any(given.values()):
        figures["given"] = [name for name, value in given.items() if value]
    if problem.limits.memory_bytes:
        figures["without_room"] = [name for name, stages in others.items() if not problem.has_room(stages)]
    return replace(plan, predicted=plan.predicted | figures)


class SearchProgress:
    """Shows the progress of a search over plans on stderr. A context manager.

    A search that ends within a second shows nothing. A terminal gets one line that changes and disappears at
    the end. Any other output (a log file, CI) gets a line every few seconds.
    """

    def __init__(self, *, enabled: bool = True, file: TextIO | None = None) -> None:
        """file: the output; None is stderr."""
        self._file = file or sys.stderr
        self._enabled = enabled
        self._is_terminal = self._file.isatty()
        self._has_line = False
        self._next_s = time.monotonic() + _FIRST_S

    def __enter__(self) -> SearchProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._has_line:
            print(_CLEAR_LINE, end="", file=self._file, flush=True)

    def advance(self, num_plans: int, plans_max: int, least_ms: float) -> None:
        """Shows the number of plans seen so far and the largest number that may be seen. least_ms:
        milliseconds per minibatch of the fastest plan so far.
        """
        now_s = time.monotonic()
        if not self._enabled or now_s < self._next_s:
            return
        self._next_s = now_s + (_TERMINAL_PERIOD_S if self._is_terminal else _LINE_PERIOD_S)
        best = f"{least_ms:.3f} ms per minibatch"
        text = f"planning: {num_plans} of at most {plans_max} plans simulated, {best}"
        if self._is_terminal:
            print(f"{_CLEAR_LINE}{text}", end="", file=self._file, flush=True)
            self._has_line = True
        else:
            print(text, file=self._file, flush=True)


_GAIN_MIN = 1e-3  # least gain, as a share of the time per minibatch, that is worth a spare worker


def with_spares(
    plan: Plan,
    spare_workers: int,
    figures_of: Callable[[Stages], dict[str, Any]],
    simulated_ms: Callable[[Plan], float],
) -> Plan:
    """Returns the plan with as many of the spare workers as make it faster. Each spare is added to the stage
    that is slowest at that moment. `predicted` says how much time the spares save, or why none is used.

    figures_of: stages -> their figures by the paper's formulas. simulated_ms: plan -> its simulated
    milliseconds per minibatch.
    """
    if spare_workers == 0:
        return plan
    stages, figures, why = _most_that_pay(plan.stages, spare_workers, figures_of)
    said: dict[str, Any] = {"offered": spare_workers, "used": 0, "why": why}
    if stages == plan.stages:
        return replace(plan, predicted=plan.predicted | {"spare_shards": said})
    spared = replace(plan, stages=stages)
    before_ms, after_ms = simulated_ms(plan), simulated_ms(spared)
    if after_ms > before_ms * (1 - _GAIN_MIN):
        said["why"] = "simulated, the replicas' exchange hides behind what they compute"
        return replace(plan, predicted=plan.predicted | {"spare_shards": said})
    formula_ms = plan.bottleneck_ms or 0.0
    said |= {
        "used": spared.num_spares,
        "why": "",
        "without_ms": formula_ms,
        "simulated_without_ms": before_ms,
        "simulated_ms": after_ms,
    }
    bottleneck_ms = _bottleneck_ms(figures)
    rate = plan.predicted.get("samples_per_s")
    faster = {"samples_per_s": None if rate is None else rate * formula_ms / bottleneck_ms}
    predicted = plan.predicted | figures | faster | {"spare_shards": said}
    return replace(spared, bottleneck_ms=bottleneck_ms, predicted=predicted)


def _bottleneck_ms(figures: dict[str, Any]) -> float:
    slowest: float = max([*figures["stage_ms"], *figures["boundary_ms"]])
    return slowest


def _most_that_pay(
    stages: Stages, spare_workers: int, figures_of: Callable[[Stages], dict[str, Any]]
) -> tuple[Stages, dict[str, Any], str]:
    """Returns the stages with the number of spares that makes the plan fastest, their figures, and the reason
    why no more spares are used.

    A single spare may bring no gain: if two stages are equally slow, each needs a spare before the plan is
    faster. So spares are added as long as the slowest stage becomes faster.
    """
    best, best_figures = stages, figures_of(stages)
    figures, why = best_figures, "other stages are as slow, and there are too few spare workers for all"
    for _ in range(spare_workers):
        slowest = figures["stage_ms"].index(max(figures["stage_ms"]))
        refused = _why_no_more(stages, figures, slowest)
        if refused:
            why = refused
            break
        stages = _one_more(stages, slowest)
        of_more = figures_of(stages)
        if of_more["stage_ms"][slowest] >= figures["stage_ms"][slowest] * (1 - _GAIN_MIN):
            why = "the slowest stage would not be faster"
            break
        figures = of_more
        if _bottleneck_ms(figures) <= _bottleneck_ms(best_figures) * (1 - _GAIN_MIN):
            best, best_figures = stages, figures
    return best, best_figures, why


def _why_no_more(stages: Stages, figures: dict[str, Any], slowest: int) -> str:
    stage = stages[slowest]
    if max(figures["boundary_ms"], default=0.0) >= figures["stage_ms"][slowest]:
        return "a link between stages is slowest"
    if stage.num_replicas == 1:
        return f"stage {slowest}, the slowest, has no replicas"
    if stage.num_replicas == 2:
        return f"stage {slowest} has 2 replicas, whose links carry as much with spares as without"
    if stage.num_spare_shards == stage.num_replicas:
        return f"stage {slowest} has as many spares as replicas"
    return ""


def _one_more(stages: Stages, slowest: int) -> Stages:
    more = replace(stages[slowest], num_spare_shards=stages[slowest].num_spare_shards + 1)
    return (*stages[:slowest], more, *stages[slowest + 1 :])
