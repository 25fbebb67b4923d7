"""What one worker's stages have in its pool: planned, added as terms, and handed out again as versions,
optimizer state and homes of what is offloaded.

Made, which adds the terms, before the core is sealed; prepared after. On the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.budget.footprint import Footprint
from pipedream.budget.memory import (
    GRADIENTS,
    OFFLOADED_ACTIVATIONS,
    OFFLOADED_VERSIONS,
    OPTIMIZER_STATE,
    STASH,
    TIED_VERSIONS,
    TRANSIENT,
    WEIGHT_VERSIONS,
    MemoryPlan,
    choose_savings,
    model_bytes,
    native_step_bytes,
    num_activation_homes,
    predict_state_bytes,
    predict_step_bytes,
    slot_bytes,
)
from pipedream.budget.offload import (
    Offload,
    ResidentVersions,
    StageOffload,
    forced_offload,
    make_copy_streams,
    num_resident_versions,
)
from pipedream.budget.torch_pool import SEGMENT_SLACK_BYTES, TORCH_TENSORS, TorchPool, wants_torch_pool
from pipedream.launch.agreed_run import AgreedRun
from pipedream.links.channels import RunChannel
from pipedream.model.splitter import StageModule
from pipedream.stage.gradients import updated_parameters
from pipedream.stage.stage_loop import PreparedStage
from pipedream.stage.tied import TiedParameters
from pipedream.stage.weights import StageOptimizer, StageWeights, split_tied, weight_layout

__all__ = ["StagePool"]


class StagePool:
    """What this worker's stages have in the pool of its core."""

    def __init__(
        self,
        run: AgreedRun,
        core: _core.Worker,
        device: torch.device,
        footprints: Mapping[int, Footprint],
        channels: Sequence[RunChannel],
    ) -> None:
        """Decides where to recompute and to offload. footprints: by stage, of this worker's."""
        self.run = run
        """As agreed, with what is recomputed to save memory."""
        self.predicted: dict[str, int] = {}
        """By term of RunResult.memory."""
        self._core = core
        self._device = device
        self._optimizers: dict[int, StageOptimizer] = {}  # by stage
        self._offload: dict[int, Offload] = {}  # by stage, what is done
        self._torch_pool_bytes = 0
        if run.own_stages():
            self._plan(footprints, channels)

    def _plan(self, footprints: Mapping[int, Footprint], channels: Sequence[RunChannel]) -> None:
        options = self.run.options
        memory = choose_savings(
            self._memory_plan(footprints, channels), options.recompute, options.memory_bytes
        )
        self.run = replace(self.run, options=replace(options, recompute=tuple(memory.schedule.recompute)))
        self.predicted = memory.terms()
        self._add_terms(memory)
        if wants_torch_pool(self._device):
            self._pool_torch_terms()
            self.predicted[TRANSIENT] = max(memory.step_bytes.values())  # updates are not in the pool
        if not all(footprints[stage.stage_index].is_measured for stage in self.run.own_stages()):
            for term in (STASH, TRANSIENT, GRADIENTS):
                self.predicted.pop(term, None)

    def prepare(self) -> list[PreparedStage]:
        """The stages, with weights and optimizer state in the pool."""
        return [self._prepare(stage) for stage in self.run.own_stages()]

    def make_torch_pool(self) -> TorchPool | None:
        if self._torch_pool_bytes == 0:
            return None
        return TorchPool(from_dlpack(self._core.hold_slot(TORCH_TENSORS)))

    def _memory_plan(self, footprints: Mapping[int, Footprint], channels: Sequence[RunChannel]) -> MemoryPlan:
        """Of this worker without any saving. Makes the optimizers, which say what they need."""
        own_bytes: dict[int, int] = {}
        tied_bytes: dict[int, int] = {}
        placed_bytes: dict[int, int] = {}
        torch_bytes: dict[int, int] = {}
        step_bytes: dict[int, int] = {}
        for stage in self.run.own_stages():
            index = stage.stage_index
            own, tied = split_tied(stage, self.run.tied_parameters_of(index))
            named = updated_parameters(stage, self.run.ties)
            optimizer = StageOptimizer(
                self.run.options.optimizer, named, self.run.options.lr_scheduler, f"stage {index}"
            )
            self._optimizers[index] = optimizer
            own_bytes[index] = slot_bytes(weight_layout(own)[0])
            tied_bytes[index] = slot_bytes(weight_layout(tied)[0])
            placed_bytes[index] = optimizer.num_placed_states * slot_bytes(weight_layout(named)[0])
            if optimizer.is_native:
                torch_bytes[index] = 0
                step_bytes[index] = native_step_bytes(stage, len(named))
            else:
                torch_bytes[index] = predict_state_bytes(optimizer.optimizer)
                step_bytes[index] = predict_step_bytes(optimizer.optimizer, self._device.type)
        return MemoryPlan(
            self.run.options.plan,
            self.run.rank,
            self.run.schedule(),
            footprints,
            channels,
            own_bytes,
            tied_bytes,
            placed_bytes,
            torch_bytes,
            model_bytes(self.run.stages if self._device.type == "cpu" else self.run.own_stages()),
            self._device.type,
            dict.fromkeys(own_bytes, forced_offload()),
            step_bytes,
        )

    def _pool_torch_terms(self) -> None:
        """What torch makes lies in one term of the pool instead of beside it."""
        parts = [self.predicted.pop(term, 0) for term in (STASH, TRANSIENT, GRADIENTS)]
        self._torch_pool_bytes = sum(parts) + SEGMENT_SLACK_BYTES
        self._core.add_term(TORCH_TENSORS, self._torch_pool_bytes, 1)

    def _add_terms(self, memory: MemoryPlan) -> None:
        """The pool's terms of the stages, as they are planned."""
        for stage, own_bytes in memory.weight_bytes.items():
            offload = Offload(memory.offloads_versions(stage), memory.offloads_activations(stage))
            self._offload[stage] = offload
            num_versions = _core.num_versions_kept(memory.schedule, stage)
            if offload.versions:
                self._core.add_term(_term(OFFLOADED_VERSIONS, stage), own_bytes, num_versions, staging=True)
                num_versions = num_resident_versions(num_versions)
            self._core.add_term(_term(WEIGHT_VERSIONS, stage), own_bytes, num_versions)
            if offload.activations:
                self._core.add_term(
                    _term(OFFLOADED_ACTIVATIONS, stage),
                    memory.footprints[stage].offloadable_bytes,
                    num_activation_homes(memory.schedule, stage),
                    staging=True,
                )
            if self.run.ties_of(stage):
                num_tied_versions = _core.num_tied_versions_kept(memory.schedule)
                self._core.add_term(_term(TIED_VERSIONS, stage), memory.tied_bytes[stage], num_tied_versions)
            num_states = self._optimizers[stage].num_placed_states
            if num_states:
                slot_bytes = memory.placed_state_bytes[stage] // num_states
                self._core.add_term(_term(OPTIMIZER_STATE, stage), slot_bytes, num_states)

    def _prepare(self, stage: StageModule) -> PreparedStage:
        """Puts the stage's weights and its optimizer's state into the pool."""
        index, schedule = stage.stage_index, self.run.schedule()
        ties = self.run.ties_of(index)

        def slots(term: str, num_slots: int) -> list[Tensor]:
            # The pool hands slots out in any order; only that each is one version's matters.
            return [from_dlpack(self._core.hold_slot(_term(term, index))) for _ in range(num_slots)]

        num_versions = _core.num_versions_kept(schedule, index)
        offload = self._offload[index]
        copies = make_copy_streams(self._device)
        own_slots = slots(
            WEIGHT_VERSIONS, num_resident_versions(num_versions) if offload.versions else num_versions
        )
        resident: ResidentVersions | None = None
        if offload.versions:
            resident = ResidentVersions(own_slots, slots(OFFLOADED_VERSIONS, num_versions), copies)
        nothing = [torch.empty(0, dtype=torch.uint8, device=self._device)]
        tied_slots = slots(TIED_VERSIONS, _core.num_tied_versions_kept(schedule)) if ties else nothing
        weights = StageWeights(stage, own_slots, tied_slots, self.run.tied_parameters_of(index), resident)
        optimizer = self._optimizers[index]
        optimizer.place_state(slots(OPTIMIZER_STATE, optimizer.num_placed_states))
        tied = TiedParameters(schedule, index, ties, weights.tied)
        stage_offload: StageOffload | None = None
        if offload.names():
            frozen = [parameter for _, parameter in stage.frozen_parameters()]
            num_homes = num_activation_homes(schedule, index) if offload.activations else 0
            homes = slots(OFFLOADED_ACTIVATIONS, num_homes)
            stage_offload = StageOffload(
                self._device, copies, homes, resident, [*own_slots, *tied_slots, *frozen]
            )
        return PreparedStage(stage, weights, tied, optimizer, stage_offload)


def _term(name: str, stage_index: int) -> str:
    return f"{name} of stage {stage_index}"
