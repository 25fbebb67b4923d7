"""partition(): the best plan by a cost model. Pure; any thread; needs no torch.

    paper        the exact optimum of the paper's formulas, by a search in C++ (csrc/planner)
    calibrated   what measured runtime costs and the simulator say of a run, searched from there (search.py)

Here are its inputs, its refusals, and the figures beside its answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipedream.common.checks import is_whole
from pipedream.common.units import parse_bandwidth
from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.prediction import predict_ms
from pipedream.planning.runtime_costs import RuntimeCosts, layer_cost_ms, runtime_of, stage_costs
from pipedream.planning.search import search

__all__ = ["make_plan", "partition"]

_COST_MODELS = ("paper", "calibrated")
_SEARCHED_PLANS = 400


def partition(
    profile: Profile,
    num_workers: int,
    bandwidth: str | float,
    *,
    memory: str | int | None = None,
    cost_model: str = "paper",
    straight: bool = False,
    workers_per_host: int | None = None,
) -> Plan:
    """The plan with the smallest predicted time per minibatch on at most `num_workers` workers.

    T(i..j, m) = (1/m) max( sum T_l, sum 4 (m-1) |w_l| / (m B) ) for a stage, 2 a_i / B for a boundary;
    ties go to fewer workers, then to fewer stages. Source: PipeDream (SOSP'19), section 3.1.

    `bandwidth` is a text with a unit ("10Gbit/s") or bytes per second. `straight` allows one replica per
    stage only.

    cost_model "calibrated" takes a profile from `calibrate`, and predicts what a run with schedule
    "pipedream" takes: the simulator executes its lists with the measured costs, and a search begins where
    the formulas end. workers_per_host: how many share the cores of one machine; None: each has a machine of
    its own.

    Raises ValueError for fewer than one worker, a bandwidth that is not positive, a cost model that is
    unknown or lacks its figures, and `memory`, which is not built yet; TypeError for arguments of another
    kind.
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            f"profile is a {type(profile).__name__}: give a Profile, for example Profile.load(path)"
        )
    if not is_whole(num_workers):
        raise TypeError(f"num_workers is {num_workers!r}: give a whole number")
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}: give at least 1")
    if memory is not None:
        raise ValueError(f"memory is {memory!r}: planning for a memory limit is not built yet, leave it out")
    if cost_model not in _COST_MODELS:
        raise ValueError(f"cost_model is {cost_model!r}: it is one of {', '.join(_COST_MODELS)}")
    if workers_per_host is not None and (not is_whole(workers_per_host) or workers_per_host < 1):
        raise ValueError(f"workers_per_host is {workers_per_host!r}: give at least 1, or leave it out")
    bytes_per_s = parse_bandwidth(bandwidth)
    if cost_model == "paper":
        stages, bottleneck_s = _solve(
            [layer.compute_ms for layer in profile.layers], profile, num_workers, bytes_per_s, straight
        )
        return make_plan(
            profile, stages, bytes_per_s, num_workers=num_workers, bottleneck_ms=bottleneck_s * 1e3
        )
    return _calibrated(profile, num_workers, bytes_per_s, straight, workers_per_host)


def make_plan(
    profile: Profile,
    stages: tuple[Stage, ...],
    bytes_per_s: float,
    *,
    num_workers: int = 0,
    cost_model: str = "paper",
    workers_per_host: int | None = None,
    bottleneck_ms: float | None = None,
) -> Plan:
    """The plan of these stages with the figures that the cost model has of it. bottleneck_ms: of the paper's,
    where it is known already."""
    if cost_model == "calibrated":
        return _make_calibrated(profile, stages, bytes_per_s, num_workers, workers_per_host)
    predicted = _predict(profile, stages, bytes_per_s)
    if bottleneck_ms is None:
        bottleneck_ms = max([*predicted["stage_ms"], *predicted["boundary_ms"]])
    return Plan(
        stages,
        model=profile.model,
        num_workers=num_workers,
        bandwidth_bytes_per_s=bytes_per_s,
        cost_model=cost_model,
        bottleneck_ms=bottleneck_ms,
        predicted={"samples_per_s": _samples_per_s(profile, bottleneck_ms), "memory_bytes": None} | predicted,
        max_shapes=profile.max_shapes or {},
        cuts=profile.cuts,
    )


def _solve(
    layers_ms: list[float], profile: Profile, num_workers: int, bytes_per_s: float, straight: bool
) -> tuple[tuple[Stage, ...], float]:
    """The optimum of the formulas, and its bottleneck in seconds."""
    from pipedream import _core

    found, bottleneck_s = _core.partition(
        [layer_ms / 1e3 for layer_ms in layers_ms],
        [float(layer.activation_bytes) for layer in profile.layers],
        [float(layer.parameter_bytes) for layer in profile.layers],
        num_workers,
        bytes_per_s,
        straight,
    )
    stages = tuple(Stage(first_layer, last_layer, replicas) for first_layer, last_layer, replicas in found)
    return stages, bottleneck_s


def _calibrated(
    profile: Profile, num_workers: int, bytes_per_s: float, straight: bool, workers_per_host: int | None
) -> Plan:
    runtime = _runtime(profile)
    layers_ms = [layer_cost_ms(layer, runtime) for layer in profile.layers]

    def plan_of(stages: tuple[Stage, ...]) -> Plan:
        return _make_calibrated(profile, stages, bytes_per_s, num_workers, workers_per_host)

    def score(stages: tuple[Stage, ...]) -> float:
        return plan_of(stages).bottleneck_ms or 0.0

    starts: list[tuple[Stage, ...]] = [(Stage(0, profile.num_layers - 1),)]
    for count in range(2, num_workers + 1):
        starts.append(_solve(layers_ms, profile, count, bytes_per_s, True)[0])
        if not straight:
            starts.append(_solve(layers_ms, profile, count, bytes_per_s, False)[0])
    found = search(
        starts,
        score,
        num_layers=profile.num_layers,
        num_workers=num_workers,
        straight=straight,
        plans_max=_SEARCHED_PLANS,
    )
    plan = plan_of(found.stages)
    return replace(plan, predicted=plan.predicted | {"search": found.to_dict()})


def _make_calibrated(
    profile: Profile,
    stages: tuple[Stage, ...],
    bytes_per_s: float,
    num_workers: int,
    workers_per_host: int | None,
) -> Plan:
    from pipedream import _core

    runtime = _runtime(profile)
    costs = stage_costs(profile, runtime, stages, bytes_per_s)
    predicted: dict[str, Any] = {"samples_per_s": None, "memory_bytes": None}
    predicted |= _predict(profile, stages, bytes_per_s)
    predicted["stage_ms"] = [
        cost.minibatch_ms / stage.num_replicas for cost, stage in zip(costs, stages, strict=True)
    ]
    predicted["stage_costs"] = [cost.to_dict() for cost in costs]
    predicted["links"] = [
        {"one_way_ms": both_ms / 2, "latency_ms": runtime.latency_ms} for both_ms in predicted["boundary_ms"]
    ]
    if workers_per_host is not None and workers_per_host > 1:
        predicted["host"] = {
            "num_workers": workers_per_host,
            "num_cores": runtime.num_cores,
            "alone_speed": runtime.alone_speed,
        }
    plan = Plan(
        stages,
        model=profile.model,
        num_workers=num_workers,
        bandwidth_bytes_per_s=bytes_per_s,
        cost_model="calibrated",
        predicted=predicted,
    )
    schedule = _core.ScheduleOptions("pipedream", list(plan.in_flight), 1, plan.placement)
    predicted_ms = predict_ms(plan, schedule)
    assert predicted_ms is not None
    predicted |= {"samples_per_s": _samples_per_s(profile, predicted_ms)}
    return replace(plan, bottleneck_ms=predicted_ms, predicted=predicted)


def _runtime(profile: Profile) -> RuntimeCosts:
    runtime = runtime_of(profile)
    if runtime is None:
        raise ValueError(
            "cost_model is 'calibrated', but the profile has no runtime figures:"
            " pipedream.calibrate(profile, model, data, ...) measures them"
        )
    return runtime


def _samples_per_s(profile: Profile, minibatch_ms: float) -> float | None:
    known = profile.batch_size is not None and minibatch_ms > 0
    return (profile.batch_size or 0) * 1e3 / minibatch_ms if known else None


def _predict(profile: Profile, stages: tuple[Stage, ...], bytes_per_s: float) -> dict[str, Any]:
    layers = profile.layers
    return {
        "stage_ms": [_stage_ms(profile, stage, bytes_per_s) for stage in stages],
        "boundary_ms": [
            2e3 * layers[stage.last_layer].activation_bytes / bytes_per_s for stage in stages[:-1]
        ],
        "stage_parameter_bytes": [_parameter_bytes(profile, stage) for stage in stages],
        "stage_layers": [[layers[stage.first_layer].name, layers[stage.last_layer].name] for stage in stages],
    }


def _stage_ms(profile: Profile, stage: Stage, bytes_per_s: float) -> float:
    """T(i..j, m) of the cost model, in milliseconds."""
    replicas = stage.num_replicas
    compute_ms = sum(layer.compute_ms for layer in profile.layers[stage.first_layer : stage.last_layer + 1])
    sync_ms = 4e3 * (replicas - 1) * _parameter_bytes(profile, stage) / (replicas * bytes_per_s)
    return max(compute_ms, sync_ms) / replicas


def _parameter_bytes(profile: Profile, stage: Stage) -> int:
    return sum(layer.parameter_bytes for layer in profile.layers[stage.first_layer : stage.last_layer + 1])
