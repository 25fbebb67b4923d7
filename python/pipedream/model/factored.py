"""Makes fully connected layers keep a weight's gradient as two factors, which are the gradients of the
layer's outputs and the layer's inputs. The gradient is the product of the factors (sufficient factors; Zhang
et al., Poseidon, ATC 2017, section 4).

    dW = dY^T X         W: outputs x inputs, dY: rows x outputs, X: rows x inputs

rows: all dimensions of a minibatch but the last, joined. The backward of a factored layer does not compute
dW. If a gradient still arrives at W, it comes from another use of W. Owned by the thread that runs the stage.
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
    """The two factors of a weight's gradient, both contiguous. The gradient is gradients^T @ inputs."""

    gradients: Tensor
    """Gradients of the outputs, rows x outputs."""
    inputs: Tensor
    """Inputs of the layer, rows x inputs."""

    @property
    def num_rows(self) -> int:
        return len(self.inputs)


Take = Callable[[str, Tensor, Tensor], None]
"""A function that a backward calls for each use of a weight, with (name of the weight, gradients, inputs) as
in Factors. Both tensors may change after the call.
"""


class FactoredLayers:
    """The factored weights of a stage, by their full names. This class replaces the forwards of the layers
    that use the weights.
    """

    def __init__(self, layers: Mapping[str, Sequence[nn.Linear]], take: Take) -> None:
        """layers: the result of factorable(): for each weight's name, the layers that use the weight."""
        self._layers = layers
        self._take = take
        self._is_open = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which the layers keep factors instead of computing the weights' gradients."""
        pairs = [(name, layer) for name, layers in self._layers.items() for layer in layers]
        for name, layer in pairs:
            vars(layer)["forward"] = _Forward(self, name, layer)
        try:
            yield
        finally:
            for _, layer in pairs:
                vars(layer).pop("forward", None)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A context around a backward of the stage. Factors count only in this context, so gradients that a
        forward computes internally are left out.
        """
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def used(self, name: str, node: Any, gradients: Tensor, inputs: Tensor) -> None:
        """Takes the factors of one use of a weight. A layer's backward calls this. node: the weight's node in
        the graph.
        """
        # A layer's hook may start a backward to the layer's inputs only, even during this backward. That
        # backward does not reach the weight, so its factors do not count.
        if self._is_open and torch._C._will_engine_execute_node(node):
            self._take(name, gradients, inputs)


def factorable(stage: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, list[nn.Linear]]:
    """Returns the parameters that the stage uses only as weights of fully connected layers, by name, with
    these layers. A subclass of nn.Linear, or a layer with a forward of its own, may do anything and does not
    count. Returns nothing if torch.compile compiled a module of the stage.
    """
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
    """Yields a dict with the number of rows of each weight's factors, by name. A backward adds its rows if it
    and its forward run in the with block. layers: the result of factorable().
    """
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
    """The forward of a factored layer. It takes the place of nn.Linear's."""

    def __init__(self, factored: FactoredLayers, name: str, layer: nn.Linear) -> None:
        self._factored = factored
        self._name = name
        self._layer = layer

    def __call__(self, input: Tensor) -> Tensor:  # nn.Linear's argument has this name, too
        layer = self._layer
        # In two cases the layer runs without factors: the model's own autocast would round the factors, and a
        # weight that functional_call made is not the parameter itself. A gradient then arrives at the weight,
        # which reveals such a case.
        if torch.is_autocast_enabled(input.device.type) or not layer.weight.is_leaf:
            return F.linear(input, layer.weight, layer.bias)
        output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            input, layer.weight, layer.bias, self._factored, self._name
        )
        return output


class _Linear(torch.autograd.Function):
    """nn.functional.linear that computes no gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, factored: FactoredLayers, name: str
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.factored, ctx.name = factored, name
        output = F.linear(inputs, weight, bias)
        # The next layer may change its input in place. Autograd forbids that for a view that a Function
        # returns.
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        if torch.is_grad_enabled():  # create_graph=True: the second derivative would lack the part through dW
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
