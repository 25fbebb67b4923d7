"""Timed passes: one forward and backward of a minibatch, with the time that each layer takes of them.

    list of layers   one after the other on detached inputs, so that each layer's backward is timed alone
    any module       its own forward; the clock is read where calls end that it may be cut after, and in the
                     backward where the gradient of what these calls returned is complete: autograd goes
                     back in the order in which the forward went on

The values and gradients that flow are those of real training. Owned by the thread that profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipedream.model.batches import call_model
from pipedream.model.boundary import boundary_input, check_loss, map_tensors, tensors_of
from pipedream.model.calls import calls_seen, module_names, visible_modules
from pipedream.model.clock import Clock
from pipedream.model.cut_model import CutModel
from pipedream.model.loss_placement import call_loss
from pipedream.model.trace import CallCounter, CallKey

__all__ = ["CutPasses", "LayerPasses", "TimedPasses"]

LossFunction = Callable[[Any, Any], Tensor]


class TimedPasses(Protocol):
    layer_names: list[str]
    parameter_bytes: list[int]
    """Trainable ones of each layer; a tied parameter counts where it is first used."""
    activation_bytes: list[int]
    """That cross behind each layer; known after the first minibatch."""

    def run(self, minibatch: int, inputs: Any, targets: Any, clock: Clock) -> tuple[list[float], list[float]]:
        """Milliseconds of each layer's forward and backward. Leaves no gradients."""


class LayerPasses:
    """Of a list of layers."""

    def __init__(self, named_layers: Sequence[tuple[str, nn.Module]], loss_fn: LossFunction) -> None:
        self.layer_names = [name for name, _ in named_layers]
        self._layers = [layer for _, layer in named_layers]
        self._loss_fn = loss_fn
        self.parameter_bytes = _parameter_bytes(self._layers)
        self.activation_bytes: list[int] = []

    def run(self, minibatch: int, inputs: Any, targets: Any, clock: Clock) -> tuple[list[float], list[float]]:
        clock.start_minibatch()
        # A copy, as a first layer that works in place would change the caller's data at every pass.
        value = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
        leaves_of: list[list[Tensor]] = []
        outputs_of: list[list[Tensor]] = []
        loss = None
        for layer_index, layer in enumerate(self._layers):
            is_last = layer_index == len(self._layers) - 1
            value, leaves = _detach(value)
            clock.start()
            value = call_model(layer, value)
            if is_last:
                loss = check_loss(call_loss(self._loss_fn, value, targets), minibatch)
            clock.stop()
            leaves_of.append(leaves)
            outputs_of.append([loss] if loss is not None else tensors_of(value))
        if not self.activation_bytes:
            self.activation_bytes = [
                sum(tensor.numel() * tensor.element_size() for tensor in outputs)
                for outputs in outputs_of[:-1]
            ] + [0]
        assert loss is not None  # a model has at least one layer
        gradients: list[Tensor | None] = [torch.ones_like(loss)]
        del value, loss  # the graph of a layer is freed once its backward is done
        for layer in reversed(self._layers):
            outputs = outputs_of.pop()
            wanted = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if output.requires_grad and gradient is not None
            ]
            clock.start()
            if wanted:
                torch.autograd.backward(
                    [output for output, _ in wanted], [gradient for _, gradient in wanted]
                )
            clock.stop()
            gradients = [leaf.grad for leaf in leaves_of.pop()]
            _drop_gradients(layer)
        times = clock.finish_minibatch()
        num_layers = len(self._layers)
        return times[:num_layers], times[num_layers:][::-1]


class CutPasses:
    """Of a module that is cut along its own forward."""

    def __init__(self, cut: CutModel, loss_fn: LossFunction) -> None:
        self._cut = cut
        self._loss_fn = loss_fn
        self.layer_names = cut.layer_names
        self.parameter_bytes = cut.parameter_bytes()
        self.activation_bytes = [*(place.num_bytes for place in cut.offered), 0]
        modules = dict(visible_modules(cut.module))
        self._names = module_names(cut.module)
        self._layers = {
            place.crossing.last: layer
            for layer, place in enumerate(cut.offered)
            if place.crossing is not None
        }
        self._seen = list({key.module: modules[key.module] for key in self._layers}.values())

    def run(self, minibatch: int, inputs: Any, targets: Any, clock: Clock) -> tuple[list[float], list[float]]:
        given = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
        pass_ = _CutPass(self._names, self._layers, clock)
        clock.start_minibatch()
        clock.start()
        with calls_seen(self._seen, pass_.call):
            output = call_model(self._cut.module, given)
        loss = check_loss(call_loss(self._loss_fn, output, targets), minibatch)
        del output, given
        clock.next()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        clock.stop()
        _drop_gradients(self._cut.module)
        return pass_.times(clock.finish_minibatch(), len(self._cut.layer_names))


class _CutPass:
    """One minibatch. A span is the work of the layers since the one before."""

    def __init__(self, names: dict[int, str], layers: dict[CallKey, int], clock: Clock) -> None:
        self._counter = CallCounter(names)
        self._layers = layers
        self._clock = clock
        self._forward: list[int] = []  # the layers at whose ends the clock was read
        self._backward: list[int] = []

    def call(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        key = self._counter.key_of_next(module)
        output = call(*arguments, **keywords)
        layer = self._layers.get(key)
        if layer is not None:
            self._end_forward_of(layer, output)
        return output

    def _end_forward_of(self, layer: int, output: Any) -> None:
        self._clock.next()
        self._forward.append(layer)
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._end_backward_behind(layer))  # type: ignore[no-untyped-call]

    def _end_backward_behind(self, layer: int) -> None:
        """The gradient of what the layer returned is complete; of several tensors the first counts."""
        if not self._backward or layer < self._backward[-1]:
            self._clock.next()
            self._backward.append(layer)

    def times(self, spans: list[float], num_layers: int) -> tuple[list[float], list[float]]:
        forward, backward = [0.0] * num_layers, [0.0] * num_layers
        num_forward = len(self._forward) + 1
        for layer, time in zip([*self._forward, num_layers - 1], spans[:num_forward], strict=True):
            forward[layer] += time
        # Where no gradient told the layers in between apart, the most downstream one has their time.
        for layer, time in zip([num_layers - 1, *self._backward], spans[num_forward:], strict=True):
            backward[layer] += time
        return forward, backward


def _parameter_bytes(layers: Sequence[nn.Module]) -> list[int]:
    counted: set[int] = set()
    sizes = []
    for layer in layers:
        size = 0
        for parameter in layer.parameters():
            if parameter.requires_grad and id(parameter) not in counted:
                counted.add(id(parameter))
                size += parameter.numel() * parameter.element_size()
        sizes.append(size)
    return sizes


def _drop_gradients(module: nn.Module) -> None:
    # Each minibatch writes fresh gradients, as a training loop that sets them to None.
    for parameter in module.parameters():
        parameter.grad = None


def _detach(value: Any) -> tuple[Any, list[Tensor]]:
    """The value without its graph, and the leaves that its gradients arrive in, in tensors_of order."""
    leaves: list[Tensor] = []

    def detach(tensor: Tensor) -> Tensor:
        leaves.append(tensor.detach().requires_grad_(tensor.requires_grad))
        return boundary_input(leaves[-1])

    return map_tensors(detach, value), leaves
