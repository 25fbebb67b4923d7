"""partition(): the exact optimum of the paper's cost model, as a Plan. Pure; any thread; needs no torch.

The search is C++ (csrc/planner); here are its inputs, its refusals, and the figures beside its answer.
"""

from __future__ import annotations

from pipedream.common.checks import is_whole
from pipedream.common.units import parse_bandwidth
from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Plan, Stage

__all__ = ["partition"]

_COST_MODELS = ("paper",)


def partition(
    profile: Profile,
    num_workers: int,
    bandwidth: str | float,
    *,
    memory: str | int | None = None,
    cost_model: str = "paper",
    straight: bool = False,
) -> Plan:
    """The plan with the smallest predicted time per minibatch on at most `num_workers` workers.

    T(i..j, m) = (1/m) max( sum T_l, sum 4 (m-1) |w_l| / (m B) ) for a stage, 2 a_i / B for a boundary;
    ties go to fewer workers, then to fewer stages. Source: PipeDream (SOSP'19), section 3.1.

    `bandwidth` is a text with a unit ("10Gbit/s") or bytes per second. `straight` allows one replica per
    stage only. Raises ValueError for fewer than one worker, a bandwidth that is not positive, a cost
    model that is unknown, and `memory`, which is not built yet; TypeError for arguments of another kind.
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
    bytes_per_s = parse_bandwidth(bandwidth)

    from pipedream import _core

    layers = profile.layers
    found, bottleneck_s = _core.partition(
        [layer.compute_ms / 1e3 for layer in layers],
        [float(layer.activation_bytes) for layer in layers],
        [float(layer.parameter_bytes) for layer in layers],
        num_workers,
        bytes_per_s,
        straight,
    )
    stages = tuple(Stage(first_layer, last_layer, replicas) for first_layer, last_layer, replicas in found)
    return Plan(
        stages,
        model=profile.model,
        num_workers=num_workers,
        bandwidth_bytes_per_s=bytes_per_s,
        cost_model=cost_model,
        bottleneck_ms=bottleneck_s * 1e3,
        predicted=_predict(profile, stages, bytes_per_s, bottleneck_s),
    )


def _predict(
    profile: Profile, stages: tuple[Stage, ...], bytes_per_s: float, bottleneck_s: float
) -> dict[str, object]:
    layers = profile.layers
    known = profile.batch_size is not None and bottleneck_s > 0
    return {
        "samples_per_s": (profile.batch_size or 0) / bottleneck_s if known else None,
        "memory_bytes": None,
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
