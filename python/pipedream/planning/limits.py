"""Defines the limits of a plan: memory and speed of each worker, and the stages and replicas that the user
fixes.

Pure; any thread; needs no torch. The search within limits is C++ (csrc/planner/limited_partition.h).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from pipedream.common.document import check_number, check_whole
from pipedream.common.rank_tree import NUM_PIECES, PIECE_BYTES, children_of
from pipedream.common.units import format_bytes, parse_size
from pipedream.planning.codec_choice import codec_between
from pipedream.planning.factor_rule import core_factors
from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Stage
from pipedream.planning.plan_stage import placement_of, ranks_of

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["Limits", "NothingFitsError", "make_limits", "nothing_fits", "solve_within"]

_TREE_BUFFERS_BYTES = NUM_PIECES * PIECE_BYTES  # per neighbour in the tree of ranks (common/rank_tree.py)
_ELEMENT_BYTES = 8  # assumed size of an element of data: a profile does not say the dtype
_SLACK_BYTES = 64 << 10  # alignment of slots, scalars, buffers of modules
_CROSSING_DTYPES = ("float32", "bfloat16")  # assumed dtypes of activations: a profile does not say them
_ENCODED_BYTES = 1 << 20  # size of the tensor about which _codec_shares() asks a codec


class NothingFitsError(ValueError):
    """Raised if no plan keeps to the limits."""


@dataclass(frozen=True)
class Limits:
    """The limits of one partition(). An empty tuple means that there is no limit of that kind."""

    speeds: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    last_layers: tuple[int, ...] = ()
    num_replicas: tuple[int, ...] = ()
    optimizer_copies: float = 1.0
    """Size of the optimizer's state, in copies of the weights: 0 for plain SGD, 1 with momentum, 2 for
    Adam.
    """
    recompute: bool = True
    """Whether a stage may repeat its forward (recompute) if its memory would not suffice otherwise."""

    data_bytes: float = 0.0
    """Bytes of one minibatch of data."""
    host_bytes: float = 0.0
    """Bytes that each worker needs whatever its stage is. If the model lies in host memory, these are the
    whole model and the buffers through which weights are sent. Otherwise 0.
    """
    num_workers: int = 1
    """The number of workers for which host_bytes was computed."""
    sync: str = "bsp"
    """How replicas synchronise. Memory depends on it: "asp" keeps more copies, and with "allreduce" every
    replica keeps the whole optimizer state (docs/parameter-server.md).
    """
    staleness: int = 0
    whole_tensors: bool = False
    """Whether a shard consists of whole tensors and is updated as one, instead of chunk by chunk."""
    has_spares: bool = False
    drains: bool = False
    """Whether the schedule drains: the pipeline is empty before each update. A replica may then train several
    minibatches between two updates.
    """
    codec: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The run's codecs for "activations" and "gradients"."""

    @property
    def any(self) -> bool:
        return bool(self.speeds or self.memory_bytes or self.last_layers or self.num_replicas)

    def for_workers(self, num_workers: int) -> Limits:
        """Returns the limits for a plan that uses the first num_workers workers only."""
        return replace(self, speeds=self.speeds[:num_workers], memory_bytes=self.memory_bytes[:num_workers])

    def slowed(self, profile: Profile, stages: Sequence[Stage]) -> Profile:
        """Returns the profile with the times of each layer as on the slowest worker of its stage."""
        if not self.speeds:
            return profile
        layers = list(profile.layers)
        for stage, ranks in zip(stages, ranks_of(placement_of(stages)), strict=True):
            speed = min(self.speeds[rank] for rank in ranks)
            for index in range(stage.first_layer, stage.last_layer + 1):
                layers[index] = layers[index].at_speed(speed)
        return replace(profile, layers=tuple(layers))

    def have_room(self, stages: Sequence[Stage], profile: Profile, options: _core.ScheduleOptions) -> bool:
        """Whether the stages fit into the workers' memory. If the plan needs one worker, the worker with the
        most memory counts.
        """
        memory_bytes = self.memory_bytes
        if sum(stage.num_replicas for stage in stages) == 1:
            memory_bytes = (max(memory_bytes),)
        limits = replace(self, memory_bytes=memory_bytes, speeds=(), last_layers=(), num_replicas=())
        with contextlib.suppress(NothingFitsError):
            limits.figures_of(stages, profile, options)
            return True
        return False

    def figures_of(
        self, stages: Sequence[Stage], profile: Profile, options: _core.ScheduleOptions
    ) -> dict[str, Any]:
        """Returns the figures of memory and recompute for given stages in a run with these options, in the
        form of solve_within(). A stage recomputes only if it would not fit otherwise.

        Raises NothingFitsError if the stages exceed the memory, or have other boundaries or replicas than the
        user fixed.
        """
        last_layers = tuple(stage.last_layer for stage in stages)
        counts = tuple(stage.num_replicas for stage in stages)
        if (self.last_layers and self.last_layers != last_layers) or (
            self.num_replicas and self.num_replicas != counts
        ):
            raise NothingFitsError("the plan has other boundaries or replicas than those that were given")
        figures = self.memory_with(stages, profile, options)
        if not self.memory_bytes:
            return figures
        rooms = [min(self.memory_bytes[rank] for rank in ranks) for ranks in ranks_of(placement_of(stages))]

        def exceed(figures: dict[str, Any]) -> list[bool]:
            return [has < needs for has, needs in zip(rooms, figures["stage_memory_bytes"], strict=True)]

        recompute = exceed(figures)
        if self.recompute and any(recompute):
            figures = self.memory_with(stages, profile, options, recompute)
            figures["recompute"] = [stage for stage, repeats in enumerate(recompute) if repeats]
        if any(exceed(figures)):
            num_workers = sum(counts)
            raise NothingFitsError(nothing_fits(num_workers, self.for_workers(num_workers), False))
        return figures

    def memory_costs(self, num_microbatches: int) -> _core.MemoryCosts:
        """Returns the constants from which the core counts a stage's memory. If the model lies in host
        memory, each worker holds the whole model, and pulled versions are received directly into their slots.
        """
        from pipedream import _core

        is_host = self.host_bytes > 0
        return _core.MemoryCosts(
            model_copies=0.0 if is_host else 1.0,
            state_copies=self.optimizer_copies,
            step_copies=self.optimizer_copies,
            data_bytes=self.data_bytes,
            num_microbatches=num_microbatches,
            activations=_codec_shares(codec_between(dict(self.codec), 0, 1)),
            gradients=_codec_shares(codec_between(dict(self.codec), 1, 0)),
            stages_apart=not is_host,
            asynchronous=self.sync == "asp",
            reduces_together=self.sync == "allreduce",
            whole_tensors=self.whole_tensors,
            posts_versions=is_host,
            has_spares=self.has_spares,
            drains=self.drains,
            staleness=self.staleness,
        )

    def memory_figures(self, stages: Sequence[Stage], own_bytes: Sequence[float]) -> dict[str, Any]:
        """Returns the memory figures of a plan: for each stage, the sum of its own_bytes and of the part of
        host_bytes that its workers need, and the largest sum. own_bytes: for each stage, the bytes of a
        worker that depend on the stage.
        """
        spared_bytes = _spared_bytes(stages, self)
        memory_bytes = [
            self.host_bytes + num_bytes - spared
            for num_bytes, spared in zip(own_bytes, spared_bytes, strict=True)
        ]
        return {"memory_bytes": max(memory_bytes), "stage_memory_bytes": memory_bytes}

    def memory_with(
        self,
        stages: Sequence[Stage],
        profile: Profile,
        options: _core.ScheduleOptions,
        recompute: Sequence[bool] = (),
    ) -> dict[str, Any]:
        """Returns the memory that given stages need in a run with these options. It may exceed the limits.
        recompute: one flag per stage; empty: no stage recomputes.
        """
        from pipedream import _core

        indices = range(len(stages))
        own_bytes = _core.memory_of_plan(
            [float(layer.activation_bytes) for layer in profile.layers],
            [float(layer.parameter_bytes) for layer in profile.layers],
            saved_bytes=_saved_bytes(profile),
            frozen_bytes=[float(layer.frozen_bytes) for layer in profile.layers],
            stages=[(stage.first_layer, stage.last_layer, stage.num_replicas) for stage in stages],
            in_flight=[_core.num_microbatches_in_flight(options, index) for index in indices],
            num_versions=[_core.num_versions_kept(options, index) for index in indices],
            own_per_round=[_core.rounds_of(options, index).own_per_round for index in indices],
            recompute=recompute or [False] * len(stages),
            costs=self.memory_costs(options.num_microbatches),
            factors=core_factors(profile, [layer.compute_ms for layer in profile.layers]),
        )
        return self.memory_figures(stages, own_bytes)


def make_limits(
    num_workers: int,
    *,
    memory: str | int | Sequence[str | int] | None,
    speeds: Sequence[float] | None,
    boundaries: Sequence[int] | None,
    replicas: Sequence[int] | None,
    optimizer_copies: float,
    profile: Profile,
    **stored: Any,
) -> Limits:
    """Checks arguments of partition() and makes the limits. stored: other fields of Limits, taken as they
    are. Raises ValueError or TypeError naming the argument that is wrong.
    """
    num_layers = profile.num_layers
    memory_bytes: tuple[float, ...] = ()
    if memory is not None:
        each: list[Any] = list(memory) if _is_several(memory) else [memory] * num_workers
        _check_count("memory", each, num_workers)
        memory_bytes = tuple(float(parse_size(one, "memory")) for one in each)
    for name, given in (("speeds", speeds), ("boundaries", boundaries), ("replicas", replicas)):
        if given is not None and not _is_several(given):
            raise TypeError(f"{name} is {given!r}: give a list of numbers")
    if speeds is not None:
        _check_count("speeds", speeds, num_workers)
        speeds = [check_number(f"speeds[{i}]", speed, positive=True) for i, speed in enumerate(speeds)]
    last_layers: tuple[int, ...] = ()
    if boundaries is not None:
        cuts = [check_whole(f"boundaries[{i}]", cut) for i, cut in enumerate(boundaries)]
        if cuts != sorted(set(cuts)) or (cuts and cuts[-1] >= num_layers - 1):
            raise ValueError(
                f"boundaries is {boundaries!r}: give the last layer of every stage but the last one, in"
                f" order, from 0 to {num_layers - 2}"
            )
        last_layers = (*cuts, num_layers - 1)
    counts = () if replicas is None else tuple(replicas)
    counts = tuple(check_whole(f"replicas[{i}]", count, at_least=1) for i, count in enumerate(counts))
    if sum(counts) > num_workers:
        raise ValueError(f"replicas is {list(counts)}, more than num_workers, {num_workers}")
    if counts and last_layers and len(counts) != len(last_layers):
        raise ValueError(
            f"replicas is {list(counts)}, of {len(counts)} stages, but boundaries makes {len(last_layers)}"
        )
    if len(counts) > num_layers:
        raise ValueError(f"replicas is {list(counts)}, but there are {num_layers} layers: a stage needs one")
    return Limits(
        speeds=tuple(speeds or ()),
        memory_bytes=memory_bytes,
        last_layers=last_layers,
        num_replicas=counts,
        optimizer_copies=check_number("optimizer_copies", optimizer_copies),
        data_bytes=float(
            sum(_ELEMENT_BYTES * math.prod(shape) for shape in (profile.max_shapes or {}).values())
        ),
        host_bytes=float(_host_bytes(profile, num_workers)),
        num_workers=num_workers,
        **stored,
    )


@functools.cache
def _codec_shares(name: str) -> tuple[float, float]:
    """Returns two sizes per byte of a tensor: of its encoded form, and of the residual, in which topk keeps
    what it has not sent. Both are for the dtype that needs most.
    """
    from pipedream import _core

    wire, residual = 0, 0
    for dtype in _CROSSING_DTYPES:
        _, wire_bytes, residual_bytes, encodes = _core.channel_bytes([(dtype, 1, _ENCODED_BYTES)], name)
        if encodes:
            wire, residual = max(wire, wire_bytes), max(residual, residual_bytes)
    return wire / _ENCODED_BYTES, residual / _ENCODED_BYTES


def _host_bytes(profile: Profile, num_workers: int) -> int:
    if not profile.is_of_host:
        return 0
    # The plan is not made yet, so nobody knows which rank has which stage. The largest number of neighbours
    # counts. Rank 0 or rank 1 has it.
    neighbours = max(_num_neighbours(rank, num_workers) for rank in range(min(num_workers, 2)))
    return profile.parameter_bytes + profile.frozen_bytes + neighbours * _TREE_BUFFERS_BYTES + _SLACK_BYTES


def _num_neighbours(rank: int, num_workers: int) -> int:
    """Returns the number of a rank's neighbours (its children and its parent) in the tree of ranks."""
    return len(children_of(rank, num_workers)) + (rank > 0)


def _spared_bytes(stages: Sequence[Stage], limits: Limits) -> list[int]:
    """Returns for each stage the part of host_bytes that its workers do not need. host_bytes has buffers for
    the largest number of neighbours that any rank may have, and the ranks of a stage may have fewer.
    """
    if not limits.host_bytes:
        return [0] * len(stages)
    num_used, spared = sum(stage.num_replicas for stage in stages), []
    most = max(_num_neighbours(rank, limits.num_workers) for rank in range(min(limits.num_workers, 2)))
    for ranks in ranks_of(placement_of(stages)):
        own = max(_num_neighbours(rank, num_used) for rank in ranks)
        spared.append((most - own) * _TREE_BUFFERS_BYTES)
    return spared


def solve_within(
    layers_ms: Sequence[float],
    profile: Profile,
    num_workers: int,
    bytes_per_s: float,
    straight: bool,
    limits: Limits,
    microbatches: int,
) -> tuple[tuple[Stage, ...], float, dict[str, Any]]:
    """Returns the optimum of the cost model within the limits: its stages, its bottleneck in seconds, and the
    figures of memory and recompute. Raises NothingFitsError if no plan keeps to the limits.
    """
    from pipedream import _core

    left_bytes = [has - limits.host_bytes for has in limits.memory_bytes]
    if left_bytes and min(left_bytes) <= 0:
        raise NothingFitsError(nothing_fits(num_workers, limits, straight))
    found = _core.partition_within(
        [layer_ms / 1e3 for layer_ms in layers_ms],
        [float(layer.activation_bytes) for layer in profile.layers],
        [float(layer.parameter_bytes) for layer in profile.layers],
        num_workers,
        bytes_per_s,
        saved_bytes=_saved_bytes(profile),
        frozen_bytes=[float(layer.frozen_bytes) for layer in profile.layers],
        forward_s=[layer.forward_ms / 1e3 for layer in profile.layers],
        speeds=limits.speeds,
        memory_bytes=left_bytes,
        costs=limits.memory_costs(microbatches),
        may_recompute=limits.recompute,
        last_layers=limits.last_layers,
        num_replicas=limits.num_replicas,
        num_replicas_max=1 if straight else num_workers,
        factors=core_factors(profile, layers_ms),
    )
    if found is None:
        raise NothingFitsError(nothing_fits(num_workers, limits, straight))
    found_stages, bottleneck_s, recompute, own_bytes = found
    stages = tuple(Stage(*stage) for stage in found_stages)
    figures = limits.memory_figures(stages, own_bytes)
    if any(recompute):
        figures["recompute"] = [stage for stage, repeats in enumerate(recompute) if repeats]
    return stages, bottleneck_s, figures


def _saved_bytes(profile: Profile) -> list[float]:
    """Returns the bytes that each layer saves for its backward. If they were not measured, they are assumed
    to equal the layer's activation_bytes.
    """
    return [
        float(layer.activation_bytes if layer.saved_bytes is None else layer.saved_bytes)
        for layer in profile.layers
    ]


def nothing_fits(num_workers: int, limits: Limits, straight: bool) -> str:
    """Returns the text of a NothingFitsError for the limits that the user gave."""
    asked = [f"{num_workers} workers"]
    if straight:
        asked.append("one replica per stage")
    if limits.memory_bytes:
        least, most = (format_bytes(int(pick(limits.memory_bytes))) for pick in (min, max))
        asked.append(f"memory of {least}" if least == most else f"memory of {least} to {most}")
    if limits.last_layers:
        asked.append(f"boundaries after layers {list(limits.last_layers[:-1])}")
    if limits.num_replicas:
        asked.append(f"replicas {list(limits.num_replicas)}")
    remedy = "give more memory, more workers, or smaller minibatches" if limits.memory_bytes else "relax one"
    return f"no plan has {', '.join(asked)}: {remedy}"


def _is_several(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Collection) and not isinstance(given, str)


def _check_count(name: str, given: Sequence[Any], num_workers: int) -> None:
    if len(given) != num_workers:
        raise ValueError(f"{name} has {len(given)} entries for {num_workers} workers: give one for each")
