"""Splitter: a model and a plan -> one module per stage, made of the model's own layers.

Nothing is copied: a stage holds the very layer objects of the model, so what trains a stage trains the
model. Runs in the caller's thread, before any worker exists.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipedream.model.batches import call_model
from pipedream.model.references import ByteSpan, Place, places_of

__all__ = [
    "CutForward",
    "Model",
    "StageModule",
    "Tie",
    "check_parameters",
    "check_shapes",
    "check_split",
    "find_ties",
    "is_list_of_layers",
    "layers_of",
    "model_name",
    "outline_of",
    "roots_of",
    "split",
    "tie_pairs",
]

_TRAINABLE_DTYPES = (torch.float32, torch.float64)


_NamedSpan = tuple[ByteSpan, str]
"""The memory of a parameter, and its full name."""


class PlannedStage(Protocol):
    @property
    def first_layer(self) -> int: ...
    @property
    def last_layer(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...


class StagePlan(Protocol):
    """What splitting needs of a plan; plan.Plan is one."""

    @property
    def stages(self) -> Sequence[PlannedStage]: ...
    @property
    def cuts(self) -> Sequence[str] | None: ...


@dataclass(frozen=True)
class _Layer:
    name: str
    prefix: str  # of its parameters' full names in the model: "" or "name."
    module: nn.Module


class StageModule(nn.Module):
    """Layers first_layer..last_layer of a model, run in order; the value is passed on as it is.

    A value is a tensor or nested tuples, lists and dicts of tensors. The layers are the model's own.
    """

    def __init__(
        self, stage_index: int, first_layer: int, layers: Sequence[tuple[str, str, nn.Module]]
    ) -> None:
        """layers: (name, prefix of its full parameter names, module) per layer."""
        super().__init__()
        self.stage_index = stage_index
        self.first_layer = first_layer
        self.last_layer = first_layer + len(layers) - 1
        self.layer_names = [name for name, _, _ in layers]
        self.layers = nn.ModuleList(module for _, _, module in layers)
        self._prefixes = [prefix for _, prefix, _ in layers]
        # Fresh containers are in training mode whatever their layers are in; they say what those say.
        self.training = self.layers.training = all(module.training for module in self.layers)

    def forward(self, value: Any) -> Any:
        layers = iter(self.layers)
        value = call_model(next(layers), value)
        for layer in layers:
            value = layer(value)
        return value

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(full name in the model, parameter), each trainable parameter once, in the model's order."""
        return [(name, parameter) for name, parameter in self._unique_parameters() if parameter.requires_grad]

    def frozen_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(full name in the model, parameter), each parameter without requires_grad once."""
        return [
            (name, parameter) for name, parameter in self._unique_parameters() if not parameter.requires_grad
        ]

    def stage_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """(full name in the model, buffer), each once, those that no state_dict holds included."""
        unique: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, layer in zip(self._prefixes, self.layers, strict=True):
            for name, buffer in layer.named_buffers():
                unique.setdefault(id(buffer), (prefix + name, buffer))
        return list(unique.values())

    def roots(self) -> list[tuple[str, nn.Module]]:
        """(prefix of the full names in the model, module): all modules that its code runs."""
        return list(zip(self._prefixes, self.layers, strict=True))

    def held_names(self) -> set[str]:
        """The full names of the parameters and buffers whose values it needs."""
        named = (*self._unique_parameters(), *self.stage_buffers())
        return {name for name, _ in named}

    def persistent_names(self) -> set[str]:
        """The full names of what a state_dict of the model holds, of all its modules."""
        return {
            f"{prefix}{path}.{name}" if path else prefix + name
            for prefix, root in self.roots()
            for path, module in root.named_modules()
            for name in (*module._parameters, *module._buffers)
            if name not in module._non_persistent_buffers_set
        }

    def others_parameters(self) -> list[nn.Parameter]:
        """Parameters of other stages in the modules that its code runs."""
        return []

    def place(self, device: torch.device) -> None:
        """Moves what it holds to the device."""
        self.to(device)

    def owns(self, name: str) -> bool:
        """Whether a full name in the model belongs to one of the stage's layers."""
        return any(name.startswith(prefix) for prefix in self._prefixes)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        """Makes the tensor the buffer of this full name in the model, which may be new."""
        for prefix, layer in zip(self._prefixes, self.layers, strict=True):
            if name.startswith(prefix):
                path, _, own_name = name.removeprefix(prefix).rpartition(".")
                layer.get_submodule(path)._buffers[own_name] = value
                return
        raise KeyError(name)

    def _unique_parameters(self) -> list[tuple[str, nn.Parameter]]:
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, layer in zip(self._prefixes, self.layers, strict=True):
            for name, parameter in layer.named_parameters():
                unique.setdefault(id(parameter), (prefix + name, parameter))
        return list(unique.values())


class CutForward(ABC):
    """A module whose layers are spans of its own forward; cut_model.CutModel is one."""

    module: nn.Module

    @property
    @abstractmethod
    def layer_names(self) -> list[str]:
        """One per layer."""

    @abstractmethod
    def stage(self, stage_index: int, first_layer: int, last_layer: int) -> StageModule:
        """The stage of these layers."""

    @property
    @abstractmethod
    def outline(self) -> list[str]:
        """A line per layer, equal where two processes cut the module in the same way."""

    @abstractmethod
    def at(self, names: Sequence[str]) -> CutForward:
        """The same with these cuts alone. Raises ValueError for one that there is not."""

    @abstractmethod
    def explain(self) -> str:
        """Why there are no more layers, or nothing."""


# What users may pass as a model, any module or a list of layers; and what a run makes of some modules.
Model = nn.Module | Sequence[nn.Module] | CutForward


@dataclass(frozen=True)
class Tie:
    """A trainable parameter that several stages use.

    One nn.Parameter object here; in separate processes each stage's is an object of its own, and the names
    say which belong together.
    """

    parameter: nn.Parameter
    stages: tuple[int, ...]
    """Ascending; the first one owns the parameter: its optimizer updates it."""
    names: tuple[str, ...]
    """Full name in the model at each of these stages."""


def find_ties(stages: Sequence[StageModule]) -> list[Tie]:
    """The trainable parameters that two or more of the stages use, in the order of the owners' parameters.

    A frozen parameter that stages share needs nothing, and is not listed.
    """
    uses: dict[int, list[tuple[int, str, nn.Parameter]]] = {}
    for stage in stages:
        for name, parameter in stage.trainable_parameters():
            uses.setdefault(id(parameter), []).append((stage.stage_index, name, parameter))
    return [
        Tie(
            parameter=of_one[0][2],
            stages=tuple(stage_index for stage_index, _, _ in of_one),
            names=tuple(name for _, name, _ in of_one),
        )
        for of_one in uses.values()
        if len(of_one) > 1
    ]


def tie_pairs(ties: Sequence[Tie]) -> list[tuple[int, int]]:
    """(owner, user): the stages that share parameters, each pair once, ascending."""
    return sorted({(tie.stages[0], user) for tie in ties for user in tie.stages[1:]})


def layers_of(model: Model) -> list[tuple[str, nn.Module]]:
    """(name, layer) in the order they run; what the profiler times and a plan may cut after.

    The children of an nn.Sequential, the entries of a list, tuple or nn.ModuleList; any other module,
    also an nn.Sequential with a forward or hooks of its own, is one single layer until it is cut
    (cut_model.py). Raises TypeError for
    anything else and ValueError for a model without layers.
    """
    return [(layer.name, layer.module) for layer in _layers(model)]


def model_name(model: Model) -> str:
    """The class's name; "layers" for a list."""
    if isinstance(model, CutForward):
        model = model.module
    return type(model).__name__ if isinstance(model, nn.Module) else "layers"


def roots_of(model: Model) -> list[tuple[str, nn.Module]]:
    """(prefix of the full names of its parameters and buffers, module): all that there is of the model.

    Raises as layers_of does."""
    return [(layer.prefix, layer.module) for layer in _layers(model)]


def outline_of(model: Model) -> list[str]:
    """A line per layer, by which two processes find out whether they have the same layers."""
    return model.outline if isinstance(model, CutForward) else [name for name, _ in layers_of(model)]


def is_list_of_layers(model: nn.Module) -> bool:
    """Whether the module's children are its layers, run one after the other."""
    return isinstance(model, nn.ModuleList) or (isinstance(model, nn.Sequential) and _is_plain(model))


def split(model: Model, plan: StagePlan) -> list[StageModule]:
    """One StageModule per stage of the plan. Raises as check_split does."""
    model = _cut_as_planned(model, plan)
    check_split(model, plan)
    if isinstance(model, CutForward):
        return [
            model.stage(stage_index, stage.first_layer, stage.last_layer)
            for stage_index, stage in enumerate(plan.stages)
        ]
    layers = [(layer.name, layer.prefix, layer.module) for layer in _layers(model)]
    return [
        StageModule(stage_index, stage.first_layer, layers[stage.first_layer : stage.last_layer + 1])
        for stage_index, stage in enumerate(plan.stages)
    ]


def check_split(model: Model, plan: StagePlan) -> None:
    """Raises ValueError, one line naming the value and the remedy, unless the plan can cut the model.

    Refused: more stages than layers, a plan of another number of layers, buffers (or modules with buffers)
    that two stages share, trainable parameters that are neither float32 nor float64, and places that hold
    what a stage cannot train: views of its parameters, and unregistered parameters of other stages.
    Parameters may be tied across stages: see find_ties.
    """
    model = _cut_as_planned(model, plan)
    layers = _layers(model)
    if isinstance(model, CutForward):
        _check_coverage(len(model.layer_names), plan, model.explain())
        check_parameters(model.module)
        _check_references(layers, [0], _check_storages(layers))
        return
    _check_coverage(len(layers), plan)
    stage_of_layer = [
        stage_index
        for stage_index, stage in enumerate(plan.stages)
        for _ in range(stage.first_layer, stage.last_layer + 1)
    ]
    for layer in layers:
        check_parameters(layer.module, layer.prefix)
    _check_shared_modules(layers, stage_of_layer)
    _check_shared_buffers(layers, stage_of_layer)
    spans = _check_storages(layers)
    _check_references(layers, stage_of_layer, spans)


def _cut_as_planned(model: Model, plan: StagePlan) -> Model:
    """A plan may count other layers than all that there are."""
    return model.at(plan.cuts) if isinstance(model, CutForward) and plan.cuts is not None else model


def check_parameters(module: nn.Module, prefix: str = "") -> None:
    """Raises ValueError for parameters that cannot be trained. prefix: of their full names."""
    check_shapes(module, prefix)
    for name, parameter in module.named_parameters(prefix=prefix.removesuffix(".")):
        if parameter.requires_grad and parameter.dtype not in _TRAINABLE_DTYPES:
            raise ValueError(
                f"parameter {name!r} has dtype {dtype_name(parameter.dtype)}: only float32 and float64 can be"
                f" trained; use model.float(), or freeze it with requires_grad_(False)"
            )


def check_shapes(module: nn.Module, prefix: str = "") -> None:
    """Raises ValueError for parameters without a shape. prefix: of their full names."""
    for name, parameter in module.named_parameters(prefix=prefix.removesuffix(".")):
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet (a lazy module): pass one minibatch through the model"
                f" before it is split"
            )


def _layers(model: Model) -> list[_Layer]:
    if isinstance(model, CutForward):
        model = model.module
        named = [(model_name(model), "", model)]
    elif isinstance(model, nn.Module) and is_list_of_layers(model):
        named = [(name, f"{name}.", module) for name, module in _children(model)]
    elif isinstance(model, nn.Module):
        named = [(model_name(model), "", model)]
    elif isinstance(model, (list, tuple)):
        named = [(str(layer_index), f"{layer_index}.", module) for layer_index, module in enumerate(model)]
    elif isinstance(model, type):
        raise TypeError(
            f"model is the class {model.__name__}: make a model of it, as {model.__name__}(...) does"
        )
    else:
        raise TypeError(f"model is a {type(model).__name__}: give an nn.Module or a list of layers")
    for name, _, module in named:
        if not isinstance(module, nn.Module):
            raise TypeError(f"layer {name!r} is a {type(module).__name__}, not an nn.Module: wrap it in one")
    if not named:
        raise ValueError("the model has no layers: give at least one")
    for _, prefix, module in named:
        _check_not_scripted(module, prefix)
    return [_Layer(name, prefix, module) for name, prefix, module in named]


def _check_not_scripted(layer: nn.Module, prefix: str) -> None:
    for name, module in layer.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"module {(prefix + name).removesuffix('.')!r} is compiled by torch.jit, so its weights can"
                " have no versions: give the module that it was made of, or torch.compile of that"
            )


def _children(model: nn.Module) -> Iterable[tuple[str, Any]]:
    # As they are in the table: named_children() would drop a layer that is used twice.
    return model._modules.items()


def _is_plain(model: nn.Sequential) -> bool:
    # Running the children one by one would skip what a subclass or a hook adds around them.
    hooks = (
        model._forward_hooks,
        model._forward_pre_hooks,
        model._backward_hooks,
        model._backward_pre_hooks,
    )
    return type(model).forward is nn.Sequential.forward and not any(hooks)


def _check_coverage(num_layers: int, plan: StagePlan, why_no_more: str = "") -> None:
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
            f"model; partition a profile of this one"
        )


def _check_shared_modules(layers: list[_Layer], stage_of_layer: list[int]) -> None:
    first_use: dict[int, tuple[int, str]] = {}
    for stage_index, layer in zip(stage_of_layer, layers, strict=True):
        for path, module in layer.module.named_modules(prefix=layer.name):
            if not any(True for _ in module.buffers()):
                continue  # parameters are tied then; without a state, each stage may have the same object
            first_stage, first_path = first_use.setdefault(id(module), (stage_index, path))
            if first_stage != stage_index:
                raise ValueError(
                    f"module {first_path!r} ({type(module).__name__}) of stage {first_stage} is also "
                    f"{path!r} of stage {stage_index}, and has buffers: keep them in one stage, or give each "
                    f"its own module"
                )


def _check_shared_buffers(layers: list[_Layer], stage_of_layer: list[int]) -> None:
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


def _check_storages(layers: list[_Layer]) -> list[_NamedSpan]:
    """The memory of the trainable parameters."""
    # Parameters that overlap in memory without being one object cannot be told apart from independent
    # ones by name, and would silently come untied once each has its own place in a version.
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


def _check_references(layers: list[_Layer], stage_of_layer: list[int], spans: list[_NamedSpan]) -> None:
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
        fixed: dict[tuple[int, Any], set[bool]] = {}  # of a tuple or partial: whether its parameters are tied
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
                # Through a module it may not be used: then a gradient says so.
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


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32", as the wire and the errors write it."""
    return str(dtype).removeprefix("torch.")
