"""Sharing checks: what the stages of a plan cannot share, refused in one line. Stateless; any thread."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch

from pipedream.model.layers import Layer
from pipedream.model.references import ByteSpan, Place, places_of

__all__ = ["check_references", "check_shared_buffers", "check_shared_modules", "check_storages"]

_NamedSpan = tuple[ByteSpan, str]
"""The memory of a parameter, and its full name."""


def check_shared_modules(layers: list[Layer], stage_of_layer: list[int]) -> None:
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


def check_shared_buffers(layers: list[Layer], stage_of_layer: list[int]) -> None:
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


def check_storages(layers: list[Layer]) -> list[_NamedSpan]:
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


def check_references(layers: list[Layer], stage_of_layer: list[int], spans: list[_NamedSpan]) -> None:
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
