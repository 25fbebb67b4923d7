"""A worker's memory as one sum of named terms, predicted before the first minibatch (design.md, section 5).

What the pool holds is planned to the byte; what torch makes is predicted from a dry run. Given a limit, a
worker turns recompute on where it would not fit. Pure; any thread.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from . import _core
from .channels import RunChannel
from .footprint import Footprint, storage_bytes
from .plan import Plan
from .splitter import StageModule
from .table import format_table
from .units import format_bytes

__all__ = [
    "GRADIENTS",
    "MODEL",
    "OPTIMIZER_STATE",
    "STASH",
    "TIED_VERSIONS",
    "TORCH_OPTIMIZER_STATE",
    "TRANSIENT",
    "WEIGHT_VERSIONS",
    "MemoryPlan",
    "choose_recompute",
    "describe_memory",
    "model_bytes",
    "predict_state_bytes",
]

# Terms of the pool; received tensors and staging are named after their channels.
WEIGHT_VERSIONS = "weight versions"
TIED_VERSIONS = "tied weight versions"
OPTIMIZER_STATE = "optimizer state"
# Terms of torch's own memory.
MODEL = "model as given"
STASH = "stashed activations"
GRADIENTS = "parameter gradients"
TRANSIENT = "largest transient"
TORCH_OPTIMIZER_STATE = "optimizer state of torch"

_SLOT_ALIGNMENT = 256  # csrc/pool/pool.h, kSlotAlignment
_TENSOR_ALIGNMENT = 64  # csrc/channel/tensor.h, ItemSpec::kTensorAlignment
_GENERATOR_BYTES = 8192  # of a recompute: the state of torch's generators

Terms = dict[str, int]


@dataclass(frozen=True)
class MemoryPlan:
    """What the terms of one worker are made of. Bytes; the mappings are by stage, of the worker's own."""

    plan: Plan
    rank: int
    schedule: _core.ScheduleOptions
    footprints: Mapping[int, Footprint]
    channels: Sequence[RunChannel]
    weight_bytes: Mapping[int, int]
    """One version of the stage's own parameters."""
    tied_bytes: Mapping[int, int]
    """One version of the parameters that it shares with other stages."""
    placed_state_bytes: Mapping[int, int]
    """The optimizer's state that lies in the pool."""
    torch_state_bytes: Mapping[int, int]
    """The optimizer's state that torch makes."""
    model_bytes: int

    def terms(self) -> Terms:
        """The predicted terms."""
        terms: Terms = {}
        for channel in self.channels:
            if channel.receiver == self.rank:
                terms[channel.name] = channel.num_slots * _aligned(_item_bytes(channel), _SLOT_ALIGNMENT)
        for stage in self.plan.stages_of(self.rank):
            versions = _core.num_versions_kept(self.schedule, stage)
            tied_versions = _core.num_tied_versions_kept(self.schedule)
            for name, num_bytes in (
                (WEIGHT_VERSIONS, versions * self.weight_bytes[stage]),
                (TIED_VERSIONS, tied_versions * self.tied_bytes[stage]),
                (OPTIMIZER_STATE, self.placed_state_bytes[stage]),
                (TORCH_OPTIMIZER_STATE, self.torch_state_bytes[stage]),
            ):
                terms[name] = terms.get(name, 0) + num_bytes
        for name, num_bytes in self._torch_terms().items():
            terms[name] = num_bytes
        terms[MODEL] = self.model_bytes
        return {name: num_bytes for name, num_bytes in terms.items() if num_bytes > 0}

    def with_recompute(self, recompute: Sequence[bool]) -> MemoryPlan:
        changed = _core.ScheduleOptions(
            schedule=self.schedule.schedule,
            in_flight=self.schedule.in_flight,
            num_microbatches=self.schedule.num_microbatches,
            worker_of_stage=self.schedule.worker_of_stage,
            recompute=list(recompute),
        )
        return replace(self, schedule=changed)

    def _torch_terms(self) -> Terms:
        """What the forwards and backwards of the stages need beside the pool."""
        stash = transient = gradients = 0
        queued = _gradients_queued_max(self.schedule)
        recompute = self.schedule.recompute or [False] * self.plan.num_stages
        for stage in self.plan.stages_of(self.rank):
            footprint = self.footprints[stage]
            in_flight = _core.num_microbatches_in_flight(self.schedule, stage)
            kept, extra = footprint.stash_bytes, 0
            if recompute[stage]:
                kept = footprint.input_bytes + _GENERATOR_BYTES
                extra = footprint.input_bytes + footprint.stash_bytes
            stash += in_flight * kept
            # Beside them: the microbatches' own inputs, or gradients that wait for the neighbour's slots.
            stash += (in_flight if stage == 0 else queued[stage - 1]) * footprint.input_bytes
            # Tied gradients on their way to the owner, as many as the channel may hold.
            stash += self.tied_bytes[stage] * (self.schedule.in_flight[0] + 1)
            transient = max(transient, footprint.transient_bytes + extra)
            gradients += footprint.gradient_bytes
        return {STASH: stash, TRANSIENT: transient, GRADIENTS: gradients}


def _gradients_queued_max(schedule: _core.ScheduleOptions) -> list[int]:
    # Long enough to reach the steady phase and cool down again.
    report = _core.replay(schedule, 2 * max(schedule.in_flight) + 2)
    return list(report["gradients_queued_max"])


def choose_recompute(
    memory: MemoryPlan, given: Sequence[bool] | None, limit_bytes: int | None
) -> tuple[bool, ...]:
    """Where to recompute, per stage: as given; else where this worker would not fit into the limit.

    It is the worker's own affair: recompute changes nothing that its neighbours see. Raises ValueError,
    term by term, when the worker does not fit at all.
    """
    chosen = tuple(given) if given is not None else (False,) * memory.plan.num_stages
    if limit_bytes is None:
        return chosen
    while (needed := _sum_of(memory, chosen)) > limit_bytes:
        stage = None if given is not None else _best_saving(memory, chosen, needed)
        if stage is None:
            raise ValueError(_does_not_fit(memory.with_recompute(chosen), limit_bytes))
        chosen = _with(chosen, stage)
    return chosen


def _sum_of(memory: MemoryPlan, recompute: Sequence[bool]) -> int:
    return sum(memory.with_recompute(recompute).terms().values())


def _with(chosen: Sequence[bool], stage: int) -> tuple[bool, ...]:
    return tuple(flag or index == stage for index, flag in enumerate(chosen))


def _best_saving(memory: MemoryPlan, chosen: Sequence[bool], needed: int) -> int | None:
    """The worker's stage whose recompute saves most; None when none saves anything."""
    savings = {
        stage: needed - _sum_of(memory, _with(chosen, stage))
        for stage in memory.plan.stages_of(memory.rank)
        if not chosen[stage]
    }
    best = max(savings, key=lambda stage: savings[stage], default=None)
    return best if best is not None and savings[best] > 0 else None


def _does_not_fit(memory: MemoryPlan, limit_bytes: int) -> str:
    terms = memory.terms()
    total = sum(terms.values())
    listed = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in _largest_first(terms))
    return (
        f"memory is {format_bytes(limit_bytes)}, but {memory.plan.describe_worker(memory.rank)} needs"
        f" {format_bytes(total)}, {format_bytes(total - limit_bytes)} more, even with recompute where it"
        f" helps ({listed}): give more memory, more stages, smaller minibatches, or a schedule that keeps"
        " fewer versions, as '2bw' or 'flush'"
    )


def _largest_first(terms: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(terms.items(), key=lambda entry: -entry[1])


def describe_memory(
    worker_names: Sequence[str], memory: Sequence[Mapping[str, Mapping[str, int | None]]]
) -> str:
    """RunResult.memory as a table: predicted and peak bytes per worker and term."""
    rows: list[tuple[str, ...]] = []
    for worker, terms in zip(worker_names, memory, strict=True):
        label = worker
        for name, figures in sorted(terms.items(), key=lambda entry: -(entry[1]["predicted"] or 0)):
            rows.append((label, name, *(_bytes_or_blank(figures[kind]) for kind in ("predicted", "peak"))))
            label = ""
        sums = [sum(figures[kind] or 0 for figures in terms.values()) for kind in ("predicted", "peak")]
        rows.append(("", "sum", *map(format_bytes, sums)))
    return format_table(("worker", "term", "predicted", "peak"), rows, "<<>>")


def _bytes_or_blank(num_bytes: int | None) -> str:
    return "not measured" if num_bytes is None else format_bytes(num_bytes)


def _item_bytes(channel: RunChannel) -> int:
    return sum(_aligned(num_bytes, _TENSOR_ALIGNMENT) for _, _, num_bytes in channel.tensors)


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def model_bytes(stages: Sequence[StageModule]) -> int:
    """Parameters and buffers of the modules, each storage once."""
    tensors: list[Tensor] = []
    for stage in stages:
        tensors += [tensor for _, tensor in (*stage.trainable_parameters(), *stage.frozen_parameters())]
        tensors += [buffer for _, buffer in stage.stage_buffers()]
    return storage_bytes(list({id(tensor): tensor for tensor in tensors}.values()))


# Sizes that no real parameter has by accident: a state's dimension of such a size follows the parameter's.
_PROBE_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)


def predict_state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """What a torch optimizer will keep, found by one step on tiny parameters in the place of its own."""
    if optimizer is None:
        return 0
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    tiny_of: dict[int, nn.Parameter] = {}
    probe.param_groups = []
    for group in optimizer.param_groups:
        tiny_group = {name: value for name, value in group.items() if name != "params"}
        tiny_group["params"] = [tiny_of.setdefault(id(p), _tiny_like(p)) for p in group["params"]]
        probe.param_groups.append(tiny_group)
    try:
        type(optimizer).step(probe)
    except Exception:  # a step that needs more than parameters and gradients
        return 2 * storage_bytes([p for group in optimizer.param_groups for p in group["params"]])
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tiny = tiny_of[id(parameter)]
            sizes = dict(zip(_PROBE_SIZES, parameter.shape, strict=False))
            for value in probe.state[tiny].values():
                if isinstance(value, Tensor):
                    dims = [sizes.get(size, size) for size in value.shape]
                    total += math.prod(dims) * value.element_size()
    return total


def _tiny_like(parameter: Tensor) -> nn.Parameter:
    shape = _PROBE_SIZES[: parameter.dim()]
    tiny = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    tiny.grad = torch.zeros_like(tiny)
    return tiny
