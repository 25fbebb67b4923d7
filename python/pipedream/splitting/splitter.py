"""Makes one module per stage from a model and a plan, out of the model's own layers. State that the stages of
a plan cannot share raises an error of one line.

Runs in the caller's thread, before any worker exists.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pipedream.model.layers import Layer, Model, check_parameters, model_name, named_layers
from pipedream.model.references import ByteSpan, Place, places_of
from pipedream.model.stage_module import StageModule
from pipedream.planning.plan import Plan
from pipedream.splitting.crossing import Fillers
from pipedream.splitting.cut_model import CutModel

__all__ = [
    "check_split",
    "layer_names_of",
    "outline_of",
    "split",
    "stages_of",
]


def split(model: Model, plan: Plan) -> list[StageModule]:
    """Returns one StageModule per stage of the plan. Raises as check_split() does."""
    model = _cut_as_planned(model, plan)
    check_split(model, plan)
    return stages_of(model, [(stage.first_layer, stage.last_layer) for stage in plan.stages])


def stages_of(
    model: Model, spans: Iterable[tuple[int, int]], fillers: Fillers | None = None
) -> list[StageModule]:
    """Returns a stage for each span (first layer, last layer). fillers: makes the stand-ins for tensors that
    no code of a stage reads (crossing.py). Stages that run one after the other in this process may share it;
    if it is None, each stage has its own.
    """
    if isinstance(model, CutModel):
        return [model.stage(index, first, last, fillers) for index, (first, last) in enumerate(spans)]
    layers = named_layers(model)
    return [StageModule(index, first, layers[first : last + 1]) for index, (first, last) in enumerate(spans)]


def layer_names_of(model: Model) -> list[str]:
    """Returns the names of the layers that a plan counts."""
    return model.layer_names if isinstance(model, CutModel) else [layer.name for layer in named_layers(model)]


def outline_of(model: Model) -> list[str]:
    """Returns a line per layer. Two processes compare the lines to check that they have the same layers."""
    return model.outline if isinstance(model, CutModel) else layer_names_of(model)


def check_split(model: Model, plan: Plan) -> None:
    """Raises ValueError, one line naming the value and the remedy, unless the plan can cut the model.

    These are refused:
    - more stages than layers, and a plan for another number of layers or for layers of other names,
    - buffers, or modules with buffers, that two stages share,
    - parameters without a shape, and trainable ones of other dtypes than float32, float64 and bfloat16,
    - parameters that overlap in memory and are not one nn.Parameter,
    - places that hold a view of a stage's parameter, because the stage could not train it,
    - places that hold an unregistered parameter of another stage, for the same reason,
    - a tuple or partial with parameters that are tied across stages and parameters that are not.

    Parameters may be tied across stages: see find_ties().
    """
    model = _cut_as_planned(model, plan)
    layers, names = named_layers(model), layer_names_of(model)
    is_cut = isinstance(model, CutModel)
    why_no_more = model.explain() if isinstance(model, CutModel) else ""
    _check_coverage(len(names), plan, why_no_more, has_cuts=not is_cut or plan.cuts is not None)
    if is_cut or names != [model_name(model)]:  # a single layer is the whole model
        _check_names(names, plan)
    # All stages of a model that is cut along its own forward hold the whole module.
    spans = [(0, 0)] if is_cut else [(stage.first_layer, stage.last_layer) for stage in plan.stages]
    stage_of_layer = [index for index, (first, last) in enumerate(spans) for _ in range(first, last + 1)]
    for layer in layers:
        check_parameters(layer.module, layer.prefix)
    _check_shared_modules(layers, stage_of_layer)
    _check_shared_buffers(layers, stage_of_layer)
    _check_references(layers, stage_of_layer, _check_storages(layers))


def _check_names(names: Sequence[str], plan: Plan) -> None:
    """Raises ValueError for a plan that names other layers than the model's. A plan that was written by hand
    names no layers.
    """
    planned = plan.predicted.get("stage_layers")
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


def _cut_as_planned(model: Model, plan: Plan) -> Model:
    """Returns the model with those of its cuts after which layers of the plan end."""
    return model.at(plan.cuts) if isinstance(model, CutModel) and plan.cuts is not None else model


def _check_coverage(num_layers: int, plan: Plan, why_no_more: str = "", *, has_cuts: bool = True) -> None:
    """Raises ValueError unless the plan has as many layers as the model, and no more stages than layers.
    why_no_more: why the model cannot be cut at more places. has_cuts: whether the plan names its cuts, or the
    model has no cuts to name.
    """
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
    if plan.num_layers != num_layers:
        fault = "" if has_cuts else ", or lacks the cuts of its profile"
        raise ValueError(
            f"the plan covers {plan.num_layers} layers but the model has {num_layers}: it is a plan for"
            f" another model{fault}; partition a profile of this one"
        )


_NamedSpan = tuple[ByteSpan, str]
"""The memory of a parameter, and its full name."""


def _check_shared_modules(layers: list[Layer], stage_of_layer: list[int]) -> None:
    first_use: dict[int, tuple[int, str]] = {}
    for stage_index, layer in zip(stage_of_layer, layers, strict=True):
        for path, module in layer.module.named_modules(prefix=layer.name):
            if not any(True for _ in module.buffers()):
                continue  # its parameters become tied; a module without state may be shared
            first_stage, first_path = first_use.setdefault(id(module), (stage_index, path))
            if first_stage != stage_index:
                raise ValueError(
                    f"module {first_path!r} ({type(module).__name__}) of stage {first_stage} is also "
                    f"{path!r} of stage {stage_index}, and has buffers: keep them in one stage, or give each "
                    f"its own module"
                )


def _check_shared_buffers(layers: list[Layer], stage_of_layer: list[int]) -> None:
    first_use: dict[int, tuple[int, str]] = {}
    for stage_index, layer in zip(stage_of_layer, layers, strict=True):
        for name, buffer in layer.module.named_buffers(remove_duplicate=False):
            path = layer.prefix + name
            first_stage, first_path = first_use.setdefault(id(buffer), (stage_index, path))
            if first_stage != stage_index:
                raise ValueError(
                    f"buffer {first_path!r} of stage {first_stage} is also {path!r} of stage "
                    f"{stage_index}: keep them in one stage, or give each its own copy"
                )


def _check_storages(layers: list[Layer]) -> list[_NamedSpan]:
    """Returns the memory of the trainable parameters. Raises ValueError if parameters overlap."""
    # Parameters may overlap in memory without being one object. Each would get its own place in a weight
    # version, so they would silently no longer share values. Names do not reveal this, so the memory is
    # compared.
    spans: list[_NamedSpan] = []
    trainable: list[_NamedSpan] = []
    seen: set[int] = set()
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            span = ByteSpan.of(parameter)
            if id(parameter) in seen or span is None:
                continue
            seen.add(id(parameter))
            spans.append((span, layer.prefix + name))
            if parameter.requires_grad:
                trainable.append(spans[-1])
    spans.sort(key=lambda entry: (str(entry[0].device), *entry[0][1:]))
    for (earlier, name), (later, later_name) in itertools.pairwise(spans):
        if earlier.overlaps(later):
            raise ValueError(
                f"parameters {name!r} and {later_name!r} share memory but are two nn.Parameter objects: "
                f"tie them by using one nn.Parameter in both places"
            )
    return trainable


def _check_references(layers: list[Layer], stage_of_layer: list[int], spans: list[_NamedSpan]) -> None:
    names: dict[int, tuple[int, str]] = {}
    own: set[tuple[int, int]] = set()  # (stage, id of a parameter that is registered in it)
    for stage_index, layer in zip(stage_of_layer, layers, strict=True):
        for name, parameter in layer.module.named_parameters():
            own.add((stage_index, id(parameter)))
            if parameter.requires_grad:
                names.setdefault(id(parameter), (stage_index, layer.prefix + name))
    num_stages_of = Counter(key for _, key in own)
    of_storage: dict[tuple[torch.device, int], list[_NamedSpan]] = {}
    for span, name in spans:
        of_storage.setdefault((span.device, span.storage), []).append((span, name))
    for stage_index in sorted(set(stage_of_layer)):
        roots = [
            (layer.name, layer.module)
            for layer, stage in zip(layers, stage_of_layer, strict=True)
            if stage == stage_index
        ]
        # The key is the place of a tuple or partial. The value says whether parameters in it are tied: True,
        # False or both.
        fixed: dict[tuple[int, Any], set[bool]] = {}
        for place in places_of(roots):
            key = id(place.tensor)
            if key in names and place.held is not place.tensor and place.container is not None:
                fixed.setdefault(place.where, set()).add(num_stages_of[key] > 1)
                if len(fixed[place.where]) > 1:
                    raise ValueError(
                        f"{place.path} is in a tuple or partial with parameters that are tied to other stages"
                        " and parameters that are not: keep them in a list"
                    )
            if key not in names:
                _check_no_view(place, of_storage)
            elif (stage_index, key) not in own and not place.is_outside:
                # A parameter that is held through a module is accepted, because it may be unused. If it is
                # used, its gradient reveals that.
                other, name = names[key]
                raise ValueError(
                    f"{place.path} of stage {stage_index} holds parameter {name!r} of stage {other} without"
                    " registering it, so the stages would not know that it is tied: make it an nn.Parameter"
                    " attribute of the layer (self.x = parameter), or keep both layers in one stage"
                )


def _check_no_view(place: Place, of_storage: dict[tuple[torch.device, int], list[_NamedSpan]]) -> None:
    span = ByteSpan.of(place.tensor)
    for other, name in of_storage.get((span.device, span.storage), ()) if span is not None else ():
        if span is not None and span.overlaps(other):
            raise ValueError(
                f"{place.path} is a view of parameter {name!r} that was made once, so it would keep the"
                " initial weights: make it in forward(), from the parameter as it is then"
            )
