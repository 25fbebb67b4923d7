"""Fully connected layers whose weight's gradient is left as its factors: the gradient of what a layer gives
and what it was given, whose product it is (sufficient factors; Zhang et al., Poseidon, ATC 2017, section 4).

    dW = dY^T X         W: outputs x inputs, dY: rows x outputs, X: rows x inputs

rows: of a minibatch, all dimensions but the last in one. While a layer is factored its backward makes no dW,
so whatever gradient arrives at W comes from another use of it. Owned by the thread that runs the stage.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream.model.calls import is_compiled
from pipedream.model.references import places_of

__all__ = ["FactoredLayers", "Factors", "Take", "factorable", "rows_counted"]


class Factors(NamedTuple):
    """The factors of a weight's gradient, which is gradients^T inputs. Both are contiguous."""

    gradients: Tensor
    """Gradients of the outputs, rows x outputs."""
    inputs: Tensor
    """rows x inputs."""

    @property
    def num_rows(self) -> int:
        return len(self.inputs)


Take = Callable[[str, Tensor, Tensor], None]
"""Called in a backward, once for each use of a weight: (its name, gradients, inputs), as of Factors, which
may change afterwards."""


class FactoredLayers:
    """The factored weights of a stage, by their full names, wherever the stage uses them."""

    def __init__(self, layers: Mapping[str, Sequence[nn.Linear]], take: Take) -> None:
        """layers: by the weight's name, those that have it, as of factorable()."""
        self._layers = layers
        self._take = take
        self._is_open = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, these layers are factored."""
        self.install()
        try:
            yield
        finally:
            self.remove()

    def install(self) -> None:
        for name, layers in self._layers.items():
            for layer in layers:
                vars(layer)["forward"] = _Forward(self, name, layer)

    def remove(self) -> None:
        for layers in self._layers.values():
            for layer in layers:
                vars(layer).pop("forward", None)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward of the stage. What a forward differentiates for itself is none of it."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def used(self, name: str, node: Any, gradients: Tensor, inputs: Tensor) -> None:
        """node: of the weight in the graph."""
        # A layer's own hook may differentiate by the layer's inputs alone, also during this backward.
        if self._is_open and torch._C._will_engine_execute_node(node):
            self._take(name, gradients, inputs)


def factorable(stage: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, list[nn.Linear]]:
    """The parameters that the stage uses only as weights of fully connected layers, by name, each with these
    layers. Layers of a subclass, or with a forward of their own, may do anything and do not count."""
    if any(map(is_compiled, stage.modules())):
        return {}
    linear = {id(m._parameters): m for m in stage.modules() if isinstance(m, nn.Linear) and _is_plain(m)}
    names = {id(parameter): name for name, parameter in named if parameter.is_contiguous()}
    found: dict[str, dict[int, nn.Linear]] = {}
    others = set()
    for place in places_of([("", stage)]):
        name = names.get(id(place.tensor))
        if name is None:
            continue
        layer = linear.get(id(place.container))
        if layer is None or place.key != "weight":
            others.add(name)
        else:
            found.setdefault(name, {})[id(layer)] = layer
    return {name: list(layers.values()) for name, layers in found.items() if name not in others}


@contextlib.contextmanager
def rows_counted(layers: Mapping[str, Sequence[nn.Linear]]) -> Iterator[dict[str, int]]:
    """Gives how many rows the factors of each weight have, of the backwards that are done inside through
    forwards inside. layers: as of factorable()."""
    rows: dict[str, int] = {}

    def count(name: str, gradient: Tensor) -> None:
        rows[name] = rows.get(name, 0) + gradient.shape[:-1].numel()

    def note(name: str, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(functools.partial(count, name))  # type: ignore[no-untyped-call]

    handles = [
        layer.register_forward_hook(functools.partial(note, name))
        for name, of_weight in layers.items()
        for layer in of_weight
    ]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def _is_plain(module: nn.Linear) -> bool:
    return type(module) is nn.Linear and "forward" not in vars(module)


class _Forward:
    """Replaces a layer's forward."""

    def __init__(self, factored: FactoredLayers, name: str, layer: nn.Linear) -> None:
        self._factored = factored
        self._name = name
        self._layer = layer

    def __call__(self, input: Tensor) -> Tensor:  # by the name that nn.Linear has for it
        layer = self._layer
        # By autocast of the model's own the factors would be rounded; a weight that functional_call has made
        # has a gradient of its own. Left as they are, so that the weight's gradient shows them.
        if torch.is_autocast_enabled(input.device.type) or not layer.weight.is_leaf:
            return F.linear(input, layer.weight, layer.bias)
        output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            input, layer.weight, layer.bias, self._factored, self._name
        )
        return output


class _Linear(torch.autograd.Function):
    """nn.functional.linear without a gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, factored: FactoredLayers, name: str
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.factored, ctx.name = factored, name
        output = F.linear(inputs, weight, bias)
        # Of a view that a Function makes autograd refuses what is done in place, as by the next layer.
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        if torch.is_grad_enabled():  # this is to be differentiated, too, and dW is no part of it
            raise RuntimeError(
                f"the gradient of a gradient is asked for, and that of {ctx.name!r} is pushed as factors:"
                " leave 'factors' out of the codec of pushes"
            )
        inputs, weight = ctx.saved_tensors
        num_rows = gradient.shape[:-1].numel()
        gradients = gradient.reshape(num_rows, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            node = ctx.next_functions[1][0]
            ctx.factored.used(ctx.name, node, gradients, inputs.reshape(num_rows, inputs.shape[-1]))
        of_inputs = (gradients @ weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        of_bias = gradients.sum(0) if ctx.needs_input_grad[2] else None
        return of_inputs, None, of_bias, None, None
