"""What a plan's predicted figures say, in lines for a person. Pure; any thread; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipedream.common.checks import is_number
from pipedream.common.units import format_bytes
from pipedream.planning.factor_rule import FACTOR_CODEC, describe_factored

__all__ = ["describe_figures"]

_SAME_SHARE = 0.01  # by which plans differ that are called as fast
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
_FACTORED_FIELDS = ("num_weights", "weight_bytes", "factor_bytes")
_SEARCH_FIELDS = ("plans", "formulas_ms", "found_ms")


def describe_figures(
    bottleneck_ms: float | None, num_stages: int, predicted: Mapping[str, Any]
) -> Iterator[str]:
    """Lines for a person; of figures in another form, as files from elsewhere may have them, none."""
    memory_bytes = predicted.get("memory_bytes")
    if is_number(memory_bytes):
        repeats = predicted.get("recompute")
        again = f", with recompute at stages {repeats}" if repeats else ""
        yield f"memory at most {format_bytes(int(memory_bytes or 0))} per worker{again}"
    schedule, microbatches = predicted.get("schedule"), predicted.get("microbatches")
    if isinstance(schedule, str):
        m = f" with microbatches={microbatches}" if is_number(microbatches) else ""
        yield f"for schedule {schedule!r}{m}"
    yield from _describe_factors(bottleneck_ms, predicted)
    hidden = predicted.get("hidden_links")
    if isinstance(hidden, Mapping) and all(is_number(hidden.get(name)) for name in _HIDDEN_FIELDS):
        yield (
            f"more in flight, at the price of memory and staleness, hide the links: simulated without it"
            f" {hidden['before_ms']:.3f} ms, with it {hidden['after_ms']:.3f}"
        )
    yield from _describe_spares(bottleneck_ms, predicted.get("spare_shards"))
    found = predicted.get("search")
    if isinstance(found, Mapping) and all(is_number(found.get(name)) for name in _SEARCH_FIELDS):
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
    if isinstance(rows, list) and all(map(_is_of_factors, rows)):
        yield describe_factored(rows)
    factors_ms = predicted.get("with_factors_ms")
    if not isinstance(factors_ms, float) or not plan_ms:
        return
    if 0 < factors_ms < plan_ms * (1 - _FACTORS_GAIN_MIN):
        yield f"{plan_ms / factors_ms:.2f} x as fast is predicted of a plan for codec={FACTOR_CODEC}"


def _is_of_factors(row: Any) -> bool:
    return isinstance(row, Mapping) and all(is_number(row.get(name)) for name in _FACTORED_FIELDS)


def _describe_spares(plan_ms: float | None, figures: Any) -> Iterator[str]:
    if not isinstance(figures, Mapping) or not all(is_number(figures.get(n)) for n in ("offered", "used")):
        return
    if figures["used"] == 0:
        yield f"spare shards would not pay: {figures.get('why')}"
    elif is_number(plan_ms) and all(is_number(figures.get(name)) for name in _SPARE_FIELDS):
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
