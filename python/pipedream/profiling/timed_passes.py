"""TimedPasses runs a forward and backward of one minibatch, and measures the time of each layer.

    list of layers   The layers run one after another. The clock is read after each.
    any module       Its own forward runs. The clock is read at the ends of the calls after which it may be
                     cut.

In the backward the clock is read when the gradient of a layer's output is complete, because autograd goes
back through the layers in reverse order. So all layers are timed within one backward. A separate call of
autograd for each layer would add about 60 us to every layer's time.

Values and gradients are the same as in real training. Owned by the thread that profiles.

Clocks use the host's time or a GPU's events. On a GPU a backward's spans end on autograd's own thread.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.common.regions import Region
from pipedream.model.batches import call_model
from pipedream.model.boundary import check_loss, map_tensors, tensors_of
from pipedream.model.calls import calls_seen, module_names, visible_modules
from pipedream.model.loss_state import call_loss
from pipedream.model.trace import CallCounter, CallKey
from pipedream.splitting.cut_model import CutModel

__all__ = [
    "Clock",
    "CutPasses",
    "LayerPasses",
    "LossFunction",
    "TimedPasses",
    "bytes_of",
    "drop_gradients",
    "make_clock",
    "make_work_clock",
    "parameter_bytes_of",
    "saved_tensors_counted",
]

LossFunction = Callable[[Any, Any], Tensor]


class TimedPasses(ABC):
    """Runs minibatches, and measures the times of a model's layers. A subclass runs the model's forward."""

    layer_names: list[str]
    parameter_bytes: list[int]
    """Bytes of each layer's trainable parameters. The first layer that uses a tied parameter counts it."""
    frozen_bytes: list[int]
    """Bytes of each layer's parameters that are not trained, counted in the same way."""
    layer_of: dict[int, int]
    """The layer that counts a parameter, by the parameter's id."""
    activation_bytes: list[int]
    """Bytes that cross after each layer. Known after the first minibatch."""
    cuts: tuple[str, ...] | None = None
    """The cuts, as in Profile.cuts."""

    def __init__(
        self, modules: Sequence[nn.Module], loss_fn: LossFunction, region: Region = contextlib.nullcontext
    ) -> None:
        """region: makes a context for each forward."""
        self._modules = modules
        self._loss_fn = loss_fn
        self._region = region
        self.saved_bytes: list[int] = []
        """Bytes that autograd keeps for each layer's backward, without parameters, each storage once. Known
        after the first minibatch.
        """
        self.left_out: set[int] = set()
        """Layers whose last call some minibatch did not make."""

    def run(self, minibatch: int, inputs: Any, targets: Any, clock: Clock) -> tuple[list[float], list[float]]:
        """Runs a minibatch. Returns milliseconds of each layer's forward and backward. The parameters have no
        gradients afterwards.
        """
        # The inputs are cloned, because a first layer that works in place would change the caller's data.
        given = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
        pass_ = _Pass(len(self.layer_names), clock)
        measures_bytes = not self.saved_bytes
        saved: contextlib.AbstractContextManager[list[int]] = contextlib.nullcontext([])
        if measures_bytes:
            saved = pass_.saved_bytes(self._modules)
        clock.start_minibatch()
        clock.start()
        with saved as saved_bytes, self._region():
            output = self._forward(given, pass_)
            loss = check_loss(call_loss(self._loss_fn, output, targets), minibatch)
        del output, given
        pass_.backward(loss)
        self.left_out.update(pass_.layers_left_out())
        for module in self._modules:
            drop_gradients(module)
        if measures_bytes:
            self.saved_bytes = saved_bytes
        return pass_.times()

    @abstractmethod
    def _forward(self, value: Any, pass_: _Pass) -> Any:
        """Returns the model's output. Tells the pass where each layer but the last ends."""


class LayerPasses(TimedPasses):
    """Times a list of layers."""

    def __init__(
        self,
        named_layers: Sequence[tuple[str, nn.Module]],
        loss_fn: LossFunction,
        region: Region = contextlib.nullcontext,
    ) -> None:
        super().__init__([layer for _, layer in named_layers], loss_fn, region)
        self.layer_names = [name for name, _ in named_layers]
        self.parameter_bytes = parameter_bytes_of(self._modules)
        self.frozen_bytes = parameter_bytes_of(self._modules, trained=False)
        layers = [*enumerate(self._modules)][::-1]
        self.layer_of = {id(parameter): index for index, layer in layers for parameter in layer.parameters()}
        self.activation_bytes = []

    def _forward(self, value: Any, pass_: _Pass) -> Any:
        sizes = []
        for layer_index, layer in enumerate(self._modules[:-1]):
            value = call_model(layer, value)
            pass_.end_forward_of(layer_index, value)
            sizes.append(bytes_of(tensors_of(value)))
        self.activation_bytes = self.activation_bytes or [*sizes, 0]
        return call_model(self._modules[-1], value)


class CutPasses(TimedPasses):
    """Times a module that is cut along its own forward."""

    def __init__(self, cut: CutModel, loss_fn: LossFunction, region: Region = contextlib.nullcontext) -> None:
        super().__init__([cut.module], loss_fn, region)
        self.cuts = cut.chosen
        self.layer_names = cut.layer_names
        self.parameter_bytes = cut.parameter_bytes()
        self.frozen_bytes = cut.parameter_bytes(trained=False)
        spans = cut.cuts.first_spans_of_parameters(cut.offered)
        self.layer_of = {id(parameter): spans[name] for name, parameter in cut.module.named_parameters()}
        self.activation_bytes = [*(place.num_bytes for place in cut.offered), 0]
        modules = dict(visible_modules(cut.module))
        self._names = module_names(cut.module)
        self._layers = {
            place.crossing.last: layer
            for layer, place in enumerate(cut.offered)
            if place.crossing is not None
        }
        self._seen = list({key.module: modules[key.module] for key in self._layers}.values())

    def _forward(self, value: Any, pass_: _Pass) -> Any:
        counter = CallCounter(self._names)

        def see(module: nn.Module, call: Callable[[], Any]) -> Any:
            key: CallKey = counter.key_of_next(module)
            output = call()
            if key in self._layers:
                pass_.end_forward_of(self._layers[key], output)
            return output

        with calls_seen(self._seen, see):
            return call_model(self._modules[0], value)


class _Pass:
    """The forward and backward of one minibatch. Each reading of the clock ends a span, which is the work
    since the previous reading.
    """

    def __init__(self, num_layers: int, clock: Clock) -> None:
        self._num_layers = num_layers
        self._clock = clock
        self._forward: list[int] = []  # layers at whose ends the clock was read
        self._backward: list[int] = []

    def end_forward_of(self, layer: int, output: Any) -> None:
        self._clock.next()
        self._forward.append(layer)
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._end_backward_behind(layer))  # type: ignore[no-untyped-call]

    def backward(self, loss: Tensor) -> None:
        self._clock.next()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self._clock.stop()

    def layers_left_out(self) -> set[int]:
        return set(range(self._num_layers - 1)).difference(self._forward)

    def times(self) -> tuple[list[float], list[float]]:
        """Returns milliseconds of each layer's forward and backward."""
        spans, last = self._clock.finish_minibatch(), self._num_layers - 1
        forward, backward = [0.0] * self._num_layers, [0.0] * self._num_layers
        num_forward = len(self._forward) + 1
        for layer, span in zip([*self._forward, last], spans[:num_forward], strict=True):
            forward[layer] += span
        # If several layers have no gradient between them at which to read the clock, the last of these layers
        # gets the time of all.
        for layer, span in zip([last, *self._backward], spans[num_forward:], strict=True):
            backward[layer] += span
        return forward, backward

    @contextlib.contextmanager
    def saved_bytes(self, modules: Iterable[nn.Module]) -> Iterator[list[int]]:
        """Yields a list of bytes per layer, which is filled in the with block. A storage that two layers save
        counts for the first one.
        """
        num_bytes = [0] * self._num_layers

        def count(size: int) -> None:
            num_bytes[self._forward[-1] + 1 if self._forward else 0] += size

        with saved_tensors_counted(modules, count):
            yield num_bytes

    def _end_backward_behind(self, layer: int) -> None:
        """Reads the clock when the gradient of the layer's output is complete. If the output has several
        tensors, the first gradient that is complete counts.
        """
        if not self._backward or layer < self._backward[-1]:
            self._clock.next()
            self._backward.append(layer)


@contextlib.contextmanager
def saved_tensors_counted(modules: Iterable[nn.Module], count: Callable[[int], None]) -> Iterator[None]:
    """In the with block, count(bytes) is called for every storage that autograd keeps, except those of the
    modules' parameters.
    """
    seen = {_storage_of(parameter) for module in modules for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = _storage_of(tensor)
        if storage not in seen:
            seen.add(storage)
            count(tensor.untyped_storage().nbytes())
        return tensor.detach()  # an operation that saves its own output must not keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def parameter_bytes_of(layers: Sequence[nn.Module], *, trained: bool = True) -> list[int]:
    counted: set[int] = set()
    sizes = []
    for layer in layers:
        size = 0
        for parameter in layer.parameters():
            if parameter.requires_grad == trained and id(parameter) not in counted:
                counted.add(id(parameter))
                size += parameter.numel() * parameter.element_size()
        sizes.append(size)
    return sizes


def drop_gradients(module: nn.Module) -> None:
    # Each minibatch writes new gradients, as in a training loop that sets them to None.
    for parameter in module.parameters():
        parameter.grad = None


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else Clock()


def make_work_clock(device: torch.device) -> Clock:
    """Returns a clock for comparisons. On a host with one thread it counts this process's CPU time, which
    does not depend on other load.
    """
    if device.type == "cuda" or torch.get_num_threads() > 1:
        return make_clock(device)
    return Clock(time.process_time)


class Clock:
    """Times the consecutive spans of one minibatch, on the host."""

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        """now_s: returns the time. None: the machine's clock."""
        self._now_s = now_s or time.perf_counter

    def start_minibatch(self) -> None:
        self._spans: list[Any] = []

    def start(self) -> None:
        self._started: Any = self._now_s()

    def stop(self) -> None:
        self._spans.append((self._now_s() - self._started) * 1e3)

    def next(self) -> None:
        """Ends a span and starts the next one."""
        self.stop()
        self.start()

    def finish_minibatch(self) -> list[float]:
        """Returns the milliseconds of each span."""
        return self._spans


class CudaClock(Clock):
    """Records events on the current stream. Synchronises before and after a minibatch, never between
    layers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start_minibatch(self) -> None:
        super().start_minibatch()
        torch.cuda.synchronize(self._device)

    def start(self) -> None:
        self._started = self._record()

    def stop(self) -> None:
        self._spans.append((self._started, self._record()))

    def finish_minibatch(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [started.elapsed_time(stopped) for started, stopped in self._spans]

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
