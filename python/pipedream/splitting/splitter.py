"""Splitter: a model and a plan -> one module per stage, made of the model's own layers.

Runs in the caller's thread, before any worker exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipedream.model.layers import CutForward, Model, check_parameters, model_name, named_layers
from pipedream.model.stage_module import StageModule
from pipedream.splitting.sharing_checks import (
    check_references,
    check_shared_buffers,
    check_shared_modules,
    check_storages,
)

__all__ = ["PlannedStage", "StagePlan", "check_split", "split"]


class PlannedStage(Protocol):
    @property
    def first_layer(self) -> int: ...
    @property
    def last_layer(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...


class StagePlan(Protocol):
    """The parts of a plan that splitting needs; plan.Plan has them."""

    @property
    def stages(self) -> Sequence[PlannedStage]: ...
    @property
    def cuts(self) -> Sequence[str] | None: ...


def split(model: Model, plan: StagePlan) -> list[StageModule]:
    """One StageModule per stage of the plan. Raises as check_split does."""
    model = _cut_as_planned(model, plan)
    check_split(model, plan)
    if isinstance(model, CutForward):
        return [
            model.stage(stage_index, stage.first_layer, stage.last_layer)
            for stage_index, stage in enumerate(plan.stages)
        ]
    layers = [(layer.name, layer.prefix, layer.module) for layer in named_layers(model)]
    return [
        StageModule(stage_index, stage.first_layer, layers[stage.first_layer : stage.last_layer + 1])
        for stage_index, stage in enumerate(plan.stages)
    ]


def check_split(model: Model, plan: StagePlan) -> None:
    """Raises ValueError, one line naming the value and the remedy, unless the plan can cut the model.

    Refused: more stages than layers, a plan of another number of layers, buffers (or modules with buffers)
    that two stages share, trainable parameters of other dtypes than float32, float64 and bfloat16, and places
    that hold what a stage cannot train: views of its parameters, and unregistered parameters of other stages.
    Parameters may be tied across stages: see find_ties.
    """
    model = _cut_as_planned(model, plan)
    layers = named_layers(model)
    if isinstance(model, CutForward):
        _check_coverage(len(model.layer_names), plan, model.explain(), has_cuts=plan.cuts is not None)
        _check_names(model.layer_names, plan)
        check_parameters(model.module)
        check_references(layers, [0], check_storages(layers))
        return
    _check_coverage(len(layers), plan)
    if not (len(layers) == 1 and layers[0].name == model_name(model)):  # which is whole, however it is cut
        _check_names([layer.name for layer in layers], plan)
    stage_of_layer = [
        stage_index
        for stage_index, stage in enumerate(plan.stages)
        for _ in range(stage.first_layer, stage.last_layer + 1)
    ]
    for layer in layers:
        check_parameters(layer.module, layer.prefix)
    check_shared_modules(layers, stage_of_layer)
    check_shared_buffers(layers, stage_of_layer)
    spans = check_storages(layers)
    check_references(layers, stage_of_layer, spans)


def _check_names(names: Sequence[str], plan: StagePlan) -> None:
    """Raises ValueError for a plan that names other layers. One that is written by hand names none."""
    planned = getattr(plan, "predicted", {}).get("stage_layers")
    if not isinstance(planned, list) or len(planned) != len(plan.stages):
        return
    for stage_index, (stage, of_plan) in enumerate(zip(plan.stages, planned, strict=True)):
        of_model = [names[stage.first_layer], names[stage.last_layer]]
        if of_plan != of_model:
            of_both = [" to ".join(map(repr, layers)) for layers in (of_plan, of_model)]
            raise ValueError(
                f"stage {stage_index} of the plan has the layers {of_both[0]}, which of this model are"
                f" {of_both[1]}: it is a plan for another model; partition a profile of this one"
            )


def _cut_as_planned(model: Model, plan: StagePlan) -> Model:
    """A plan may count other layers than all that there are."""
    return model.at(plan.cuts) if isinstance(model, CutForward) and plan.cuts is not None else model


def _check_coverage(
    num_layers: int, plan: StagePlan, why_no_more: str = "", *, has_cuts: bool = True
) -> None:
    """has_cuts: whether the plan says where layers end, or the model has no other places for that."""
    num_stages = len(plan.stages)
    if num_stages > num_layers and why_no_more:
        raise ValueError(
            f"the plan has {num_stages} stages but the model has {num_layers} layers, as it cannot be cut at"
            f" more places: {why_no_more}"
        )
    if num_stages > num_layers:
        raise ValueError(
            f"the plan has {num_stages} stages but the model has {num_layers} layers: a stage needs at least "
            f"one layer, so partition for at most {num_layers} workers"
        )
    next_layer = 0
    for stage_index, stage in enumerate(plan.stages):
        if stage.first_layer != next_layer or stage.last_layer < stage.first_layer:
            raise ValueError(
                f"stage {stage_index} of the plan has layers {stage.first_layer} to {stage.last_layer}, but "
                f"must start at layer {next_layer}: give every layer to exactly one stage, in order"
            )
        next_layer = stage.last_layer + 1
    if next_layer != num_layers:
        raise ValueError(
            f"the plan covers {next_layer} layers but the model has {num_layers}: it is a plan for another "
            f"model{'' if has_cuts else ', or lacks the cuts of its profile'}; partition a profile of this"
            " one"
        )
