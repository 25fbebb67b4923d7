"""Describes a plan as text for a person: its stages and its predicted figures. Pure; any thread;
torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from pipedream.common.checks import is_number
from pipedream.common.table import format_table, shorten
from pipedream.common.units import format_bandwidth, format_bytes
from pipedream.planning.factor_rule import FACTOR_CODEC, FACTORED_FIELDS, describe_factored
from pipedream.planning.plan_stage import in_flight_in_phase
from pipedream.planning.program import rules_of

if TYPE_CHECKING:
    from pipedream.planning.plan import Plan

__all__ = ["describe_plan"]

_HEADINGS = ("stage", "layers", "from .. to", "replicas", "in flight", "ms", "link ms", "parameters")

_CANDIDATE_HEADINGS = ("", "schedule", "m", "plan", "late", "bubble", "versions", "memory", "ms", "samples/s")
_SHORT_MS = 1.0  # in a stage that is shorter, the runtime's own time may matter
_SAME_SHARE = 0.01  # plans whose times differ by less count as equally fast
_GAIN_SHARE_MIN = 0.001
_FACTORS_GAIN_MIN = 0.02
_NAMES = {
    "one_worker": "one worker",
    "data_parallel": "data parallel",
    "model_parallel": "model parallel",
    "straight": "the straight pipeline",
}
_HIDDEN_FIELDS = ("before_ms", "after_ms")
_SPARE_FIELDS = ("without_ms", "simulated_ms", "simulated_without_ms")
_HOST_FIELDS = ("num_workers", "num_cores")
_SEARCH_FIELDS = ("plans", "formulas_ms", "found_ms")


def describe_plan(plan: Plan) -> str:
    """Returns a title, a table of the stages, and lines of figures. Figures of `predicted` that are malformed
    are left out, because they may come from a file.
    """
    table = format_table(_HEADINGS, [_row(plan, index) for index in range(plan.num_stages)], ">><>>>>>")
    return "\n".join([_title(plan), "", table, "", *_summary(plan)])


def _title(plan: Plan) -> str:
    workers = _count(plan.num_workers, "worker")
    if plan.workers_training < plan.num_workers:
        workers = f"{plan.workers_training} of {workers}"
    if plan.num_spares:
        workers += f" and {_count(plan.num_spares, 'spare shard')}"
    layers, stages = _count(plan.num_layers, "layer"), _count(plan.num_stages, "stage")
    title = f"plan for {plan.model or 'a model'} of {layers}: {stages} on {workers}"
    if plan.bandwidth_bytes_per_s is not None:
        title += f", {format_bandwidth(plan.bandwidth_bytes_per_s)}"
    return title


def _row(plan: Plan, stage_index: int) -> tuple[str, ...]:
    def figure(name: str) -> Any:
        figures = plan.predicted.get(name)
        if isinstance(figures, list) and stage_index < len(figures):
            return figures[stage_index]
        return None

    stage = plan.stages[stage_index]
    stage_ms, boundary_ms = figure("stage_ms"), figure("boundary_ms")
    parameter_bytes = figure("stage_parameter_bytes")
    return (
        str(stage_index),
        str(stage.first_layer) if stage.num_layers == 1 else f"{stage.first_layer}-{stage.last_layer}",
        _name_range(figure("stage_layers")),
        str(stage.num_replicas) + (f"+{stage.num_spare_shards}" if stage.num_spare_shards else ""),
        str(plan.in_flight[stage_index]),
        f"{stage_ms:.3f}" if is_number(stage_ms) else "",
        f"{boundary_ms:.3f}" if is_number(boundary_ms) else "",
        format_bytes(parameter_bytes) if is_number(parameter_bytes) else "",
    )


def _summary(plan: Plan) -> Iterator[str]:
    parts = [f"NOAM {plan.noam}"]
    if plan.bottleneck_ms is not None:
        parts.append(f"bottleneck {plan.bottleneck_ms:.3f} ms per minibatch")
    samples_per_s = plan.predicted.get("samples_per_s")
    if is_number(samples_per_s):
        parts.append(f"{samples_per_s:.1f} samples/s")
    if plan.cost_model is not None:
        parts.append(f"predicted by cost model {plan.cost_model!r}")
    yield ", ".join(parts)
    yield from _describe_host(plan.predicted.get("host"))
    rules, m = rules_of(plan.schedule or "pipedream"), plan.microbatches or 1
    round_of_all = math.lcm(m, *(stage.num_replicas for stage in plan.stages)) // m
    if rules.drains and round_of_all > 1:
        yield f"an update is of {round_of_all} minibatches, a round of all stages' replicas"
    in_phase = in_flight_in_phase(plan.in_flight, plan.stages)
    if rules.may_be_stale and in_phase != plan.in_flight and round_of_all > 1:
        held = ", ".join(map(str, in_phase))
        yield (
            "replicas that take turns wait for each other once a round: sync='ssp' with staleness=2, or"
            f" in_flight {held}, avoids it"
        )
    is_short = plan.bottleneck_ms is not None and 0 < plan.bottleneck_ms < _SHORT_MS
    if is_short and plan.num_stages > 1 and plan.cost_model == "paper":
        yield (
            "stages of a fraction of a millisecond: the runtime's own time, which the formulas leave out, may"
            " be more than a pipeline saves; `pipedream profile --calibrate` measures it"
        )
    if plan.schedule is not None:
        with_m = "" if plan.microbatches is None else f" with microbatches={plan.microbatches}"
        yield f"for schedule {plan.schedule!r}{with_m}, which run(schedule='auto') takes"
    yield from _describe_figures(plan.bottleneck_ms, plan.num_stages, plan.predicted)
    yield from _describe_candidates(plan.predicted)


def _describe_host(host: Any) -> Iterator[str]:
    if _has_numbers(host, _HOST_FIELDS) and host["num_workers"] > host["num_cores"]:
        workers, cores = _count(host["num_workers"], "worker"), _count(host["num_cores"], "core")
        yield f"{workers} of a host share {cores}: the predicted time assumes a core for each"


def _name_range(names: Any) -> str:
    if not (isinstance(names, list) and len(names) == 2 and all(isinstance(name, str) for name in names)):
        return ""
    first, last = names
    return shorten(first, 32) if first == last else f"{shorten(first, 14)} .. {shorten(last, 14)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _describe_figures(
    bottleneck_ms: float | None, num_stages: int, predicted: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a line for each kind of figure in `predicted`. Malformed figures, as a file may have, are left
    out.
    """
    memory_bytes = predicted.get("memory_bytes")
    if is_number(memory_bytes):
        repeats = predicted.get("recompute")
        again = f", with recompute at stages {repeats}" if repeats else ""
        yield f"memory at most {format_bytes(int(memory_bytes or 0))} per worker{again}"
    yield from _describe_factors(bottleneck_ms, predicted)
    hidden = predicted.get("hidden_links")
    if _has_numbers(hidden, _HIDDEN_FIELDS):
        yield (
            f"more in flight, at the price of memory and staleness, hide the links: simulated without it"
            f" {hidden['before_ms']:.3f} ms, with it {hidden['after_ms']:.3f}"
        )
    yield from _describe_spares(bottleneck_ms, predicted.get("spare_shards"))
    found = predicted.get("search")
    if _has_numbers(found, _SEARCH_FIELDS):
        gain = found["formulas_ms"] / found["found_ms"] - 1 if found["found_ms"] else 0.0
        verdict = "confirms the formulas' plan"
        if gain > _GAIN_SHARE_MIN:
            verdict = f"found one {100 * gain:.1f} % faster than the formulas'"
        yield f"a search over {found['plans']} simulated plans {verdict}"
    alternatives = predicted.get("alternatives_ms")
    if is_number(bottleneck_ms) and bottleneck_ms and isinstance(alternatives, Mapping):
        without_room = predicted.get("without_room")
        lacking = without_room if isinstance(without_room, list) else []
        yield from _describe_alternatives(bottleneck_ms, num_stages, alternatives, lacking)


def _describe_factors(plan_ms: float | None, predicted: Mapping[str, Any]) -> Iterator[str]:
    rows = predicted.get("factored")
    if isinstance(rows, list) and all(_has_numbers(row, FACTORED_FIELDS) for row in rows):
        yield describe_factored(rows)
    factors_ms = predicted.get("with_factors_ms")
    if not isinstance(factors_ms, float) or not plan_ms:
        return
    if 0 < factors_ms < plan_ms * (1 - _FACTORS_GAIN_MIN):
        yield f"{plan_ms / factors_ms:.2f} x as fast is predicted of a plan for codec={FACTOR_CODEC}"


def _has_numbers(figures: Any, names: Sequence[str]) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(figures, Mapping) and all(is_number(figures.get(name)) for name in names)


def _describe_spares(plan_ms: float | None, figures: Any) -> Iterator[str]:
    if not _has_numbers(figures, ("offered", "used")):
        return
    if figures["used"] == 0:
        yield f"spare shards would not pay: {figures.get('why')}"
    elif is_number(plan_ms) and _has_numbers(figures, _SPARE_FIELDS):
        yield (
            f"{figures['used']} of {figures['offered']} spare workers serve as shards: {plan_ms:.3f} ms per"
            f" minibatch, without them {figures['without_ms']:.3f}; simulated"
            f" {figures['simulated_ms']:.3f} and {figures['simulated_without_ms']:.3f}"
        )


def _describe_alternatives(
    plan_ms: float, num_stages: int, alternatives: Mapping[str, Any], without_room: Sequence[Any]
) -> Iterator[str]:
    times = {name: alternatives[key] for key, name in _NAMES.items() if is_number(alternatives.get(key))}
    if len(times) < len(_NAMES):
        return
    yield "speed: " + ", ".join(f"{time / plan_ms:.2f} x {name}" for name, time in times.items())
    lacking = [name for key, name in _NAMES.items() if key in without_room]
    if lacking:
        yield f"the memory has no room for {', '.join(lacking)}"
    if "one_worker" in without_room:
        return
    if times["one worker"] <= plan_ms * (1 + _SAME_SHARE):
        yield "do not pipeline this model here: one worker alone is as fast"
    elif num_stages == 1:
        yield "do not pipeline this model here: copies of the whole model are fastest"


def _describe_candidates(predicted: Mapping[str, Any]) -> Iterator[str]:
    """Yields the table of the schedules that were compared, if the plan has one. It has one if the user left
    the schedule or the number of microbatches to partition() by "auto".
    """
    rows = predicted.get("candidates")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        return
    yield format_table(_CANDIDATE_HEADINGS, [_candidate_cells(row) for row in rows], "<<><>>>>>>")
    if predicted.get("microbatch_times") == "scaled":
        yield (
            "the profile has no microbatch_ms: one of m microbatches is taken to last 1/m of its minibatch,"
            " and small ones may take longer; profile anew to measure it"
        )


def _candidate_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    def figure(name: str, form: Callable[[Any], str]) -> str:
        return form(row[name]) if is_number(row.get(name)) else ""

    replicas = row.get("replicas")
    return (
        "->" if row.get("chosen") is True else "",
        str(row.get("schedule")),
        figure("microbatches", str),
        "-".join(map(str, replicas)) if isinstance(replicas, list) else "",
        figure("delay", "{:.2f}".format),
        figure("bubble", lambda share: f"{100 * share:.0f} %"),
        figure("versions", str),
        figure("memory_bytes", lambda size: format_bytes(int(size))) or "too much",
        figure("ms", "{:.3f}".format),
        figure("samples_per_s", "{:.1f}".format),
    )
