"""StageModule runs the layers of one stage. Tie describes a parameter that several stages use.

Nothing is copied: a stage holds the model's own layer objects, so training the stage trains the model. Made
in the caller's thread; then used by the compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipedream.model.batches import call_model

if TYPE_CHECKING:
    from pipedream.model.draws import DrawSites, KeyedDraws

__all__ = ["FrozenWrites", "StageModule", "Tie", "find_ties", "tie_pairs"]

_SMALL_BYTES = 64 * 1024


class StageModule(nn.Module):
    """A module that runs layers first_layer..last_layer of a model in order. Each layer gets the value that
    the layer before it returned.

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
        self.traced_draws: DrawSites | None = None
        """The places at which the model draws random numbers; None for a list of layers."""
        self.modules_at_cuts: frozenset[str] = frozenset()
        """Names of modules whose call has ended at one of the stage's cuts, inside a call that has not ended
        there.
        """
        self.draws: KeyedDraws | None = None
        """Seeds the generators while the stage trains."""
        self._prefixes = [prefix for _, prefix, _ in layers]
        # New containers are in training mode. They take the mode of their layers instead.
        self.training = self.layers.training = all(module.training for module in self.layers)

    def forward(self, value: Any) -> Any:
        layers = iter(self.layers)
        value = call_model(next(layers), value)
        for layer in layers:
            value = layer(value)
        return value

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns (full name in the model, parameter) for each trainable parameter, each once, in the model's
        order.
        """
        return [(name, parameter) for name, parameter in self._unique_parameters() if parameter.requires_grad]

    def frozen_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns (full name in the model, parameter) for each parameter without requires_grad, each once."""
        return [
            (name, parameter) for name, parameter in self._unique_parameters() if not parameter.requires_grad
        ]

    def stage_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Returns (full name in the model, buffer) for each buffer once, including buffers that are not in
        the state_dict.
        """
        unique: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, layer in self.roots():
            for name, buffer in layer.named_buffers():
                unique.setdefault(id(buffer), (prefix + name, buffer))
        return list(unique.values())

    def roots(self) -> list[tuple[str, nn.Module]]:
        """Returns (prefix of the full names in the model, module) for all modules that the stage's code
        runs.
        """
        return list(zip(self._prefixes, self.layers, strict=True))

    def held_names(self) -> set[str]:
        """Returns the full names of the parameters and buffers whose values the stage needs."""
        named = (*self._unique_parameters(), *self.stage_buffers())
        return {name for name, _ in named}

    def persistent_names(self) -> set[str]:
        """Returns the full names of the entries that the model's state_dict has for the stage's modules."""
        return {
            f"{prefix}{path}.{name}" if path else prefix + name
            for prefix, root in self.roots()
            for path, module in root.named_modules()
            for name in (*module._parameters, *module._buffers)
            if name not in module._non_persistent_buffers_set
        }

    def others_parameters(self) -> list[nn.Parameter]:
        """Returns parameters of other stages that lie in modules that the stage's code runs."""
        return []

    def strays(self) -> list[torch.Tensor]:
        """Returns parameters and buffers of other stages that the stage's code reads without needing their
        values.
        """
        return []

    def place(self, device: torch.device) -> None:
        """Moves the stage's parameters and buffers to the device."""
        self.to(device)

    def owns(self, name: str) -> bool:
        """Whether a full name in the model belongs to one of the stage's layers."""
        return any(name.startswith(prefix) for prefix in self._prefixes)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        """Makes the tensor the buffer with this full name in the model. The name may be new."""
        for prefix, layer in zip(self._prefixes, self.layers, strict=True):
            if name.startswith(prefix):
                path, _, own_name = name.removeprefix(prefix).rpartition(".")
                layer.get_submodule(path)._buffers[own_name] = value
                return
        raise KeyError(name)

    def _unique_parameters(self) -> list[tuple[str, nn.Parameter]]:
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, layer in self.roots():
            for name, parameter in layer.named_parameters():
                unique.setdefault(id(parameter), (prefix + name, parameter))
        return list(unique.values())


class FrozenWrites:
    """Finds the frozen parameters that a stage's forwards may write, such as those of a momentum encoder."""

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage
        self._marks = {name: _mark_of(parameter) for name, parameter in stage.frozen_parameters()}

    def suspects(self) -> list[tuple[str, nn.Parameter]]:
        """Returns (full name, parameter) for the small frozen parameters, and for those that were written
        since this object was made.
        """
        return [
            (name, parameter)
            for name, parameter in self._stage.frozen_parameters()
            if parameter.nbytes <= _SMALL_BYTES or _mark_of(parameter) != self._marks[name]
        ]


def _mark_of(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


@dataclass(frozen=True)
class Tie:
    """A trainable parameter that several stages use.

    In this process the parameter is one nn.Parameter object. In separate processes each stage has its own
    object, and `names` says which objects belong together.
    """

    parameter: nn.Parameter
    stages: tuple[int, ...]
    """The stages, ascending. The first one owns the parameter: the optimizer of that stage updates it."""
    names: tuple[str, ...]
    """The parameter's full name in the model at each of these stages."""


def find_ties(stages: Sequence[StageModule]) -> list[Tie]:
    """Returns the trainable parameters that two or more of the stages use, in the order of the owners'
    parameters.

    Frozen parameters that stages share need no exchange and are not listed.
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
    """Returns (owner, user) for the stages that share parameters, each pair once, ascending."""
    return sorted({(tie.stages[0], user) for tie in ties for user in tie.stages[1:]})
