"""Profiler: times every layer of a model, forward and backward, on the device the model is on.

Layers run one after the other on detached inputs, so that each layer's backward can be timed alone; the
values and gradients that flow are those of real training. Runs in the caller's thread.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from pipedream.common.checks import check_count, check_data, check_function, is_number
from pipedream.common.guard import check_main_guard
from pipedream.common.tracebacks import with_short_tracebacks
from pipedream.model.boundary import (
    boundary_input,
    check_loss,
    check_pair,
    device_of,
    map_tensors,
    tensors_of,
    to_device,
    untouched,
)
from pipedream.model.loss_placement import call_loss, loss_on, spare_loss
from pipedream.model.references import check_loss_fn, modules_carried_by
from pipedream.model.splitter import Model, layers_of, model_name
from pipedream.planning.layer_profile import LayerProfile, Profile

__all__ = ["profile"]

# The first minibatches also pay for allocation, thread pools and choice of kernels.
_WARM_UP_MINIBATCHES = 5
# Minibatches are read, those of another size than the first included, at most this often the number timed.
_SKIPPED_FACTOR_MAX = 10

LossFunction = Callable[[Any, Any], torch.Tensor]


@with_short_tracebacks
def profile(
    model: Model,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    minibatches: int = 1000,
    seconds: float | None = None,
) -> Profile:
    """Measures what partition needs: per layer the mean forward and backward time of a minibatch in
    milliseconds, the bytes that cross the cut after it and the bytes of its trainable parameters.

    batches: yields (inputs, targets); started again when it ends, unless it is a generator. Stops after
    `minibatches` measured ones (besides up to 5 of warm-up, discarded) or after `seconds` in all,
    whichever is first. loss_fn(outputs, targets) must give a scalar; its time goes to the last layer. Short
    minibatches are not timed. The model is left as it was: weights, gradients, buffers, flags and counters,
    random number generators; so is a loss that is a module or another object.

    Raises ValueError or TypeError for arguments or batches that do not fit. Source: PipeDream (SOSP'19),
    section 3.1.
    """
    check_main_guard()
    check_count("minibatches", minibatches)
    if seconds is not None and (not is_number(seconds) or seconds <= 0):
        raise ValueError(f"seconds is {seconds!r}: give a positive number, or None for no limit")
    check_data("batches", batches)
    check_function("loss_fn", loss_fn)
    check_loss_fn(loss_fn)
    named_layers = layers_of(model)
    layers = [layer for _, layer in named_layers]
    device = device_of(layers)
    measurement = _Measurement(layers)
    loss_fn = spare_loss(loss_fn)
    kept, placed = untouched([*layers, *modules_carried_by(loss_fn)]), loss_on(loss_fn, device)
    with kept, placed, torch.enable_grad(), _progress(minibatches) as advance:
        _measure(measurement, batches, loss_fn, device, minibatches, seconds, advance)
    forward_ms, backward_ms = measurement.means_ms()
    return Profile(
        layers=tuple(
            LayerProfile(
                name, forward_ms[i], backward_ms[i], measurement.activation_bytes[i], parameter_bytes
            )
            for i, ((name, _), parameter_bytes) in enumerate(
                zip(named_layers, _parameter_bytes(layers), strict=True)
            )
        ),
        model=model_name(model),
        batch_size=measurement.batch_size,
        device=_device_name(device),
        minibatches=measurement.num_measured,
    )


@dataclass
class _Measurement:
    layers: list[nn.Module]
    forward_ms: list[list[float]] = field(default_factory=list)  # [minibatch][layer], warm-up included
    backward_ms: list[list[float]] = field(default_factory=list)
    activation_bytes: list[int] = field(default_factory=list)
    batch_size: int | None = None

    @property
    def num_warm_up(self) -> int:
        return min(_WARM_UP_MINIBATCHES, len(self.forward_ms) - 1)

    @property
    def num_measured(self) -> int:
        return len(self.forward_ms) - self.num_warm_up

    def means_ms(self) -> tuple[list[float], list[float]]:
        return _column_means(self.forward_ms[self.num_warm_up :]), _column_means(
            self.backward_ms[self.num_warm_up :]
        )


def _measure(
    measurement: _Measurement,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    device: torch.device,
    minibatches: int,
    seconds: float | None,
    advance: Callable[[], None],
) -> None:
    most = _WARM_UP_MINIBATCHES + minibatches
    deadline = None if seconds is None else time.perf_counter() + seconds
    clock: _Clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    for minibatch, batch in enumerate(_repeat(batches)):
        inputs, targets = check_pair(batch, minibatch)
        batch_size = _batch_size(inputs)
        if minibatch == 0:
            measurement.batch_size = batch_size
        # A shorter last batch would pull the mean below what a full minibatch costs.
        if batch_size == measurement.batch_size:
            on_device = (to_device(inputs, device), to_device(targets, device))
            _measure_minibatch(measurement, minibatch, *on_device, loss_fn, clock)
            if len(measurement.forward_ms) > _WARM_UP_MINIBATCHES:
                advance()
        num_done = len(measurement.forward_ms)
        # The time limit cuts the warm-up short, but never to less than one minibatch.
        if deadline is not None and num_done >= 2 and time.perf_counter() >= deadline:
            return
        if num_done >= most or minibatch + 1 >= _SKIPPED_FACTOR_MAX * most:
            return


def _measure_minibatch(
    measurement: _Measurement,
    minibatch: int,
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    clock: _Clock,
) -> None:
    layers = measurement.layers
    clock.start_minibatch()
    # A copy, as a first layer that works in place would change the caller's data at every pass.
    value = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
    leaves_of: list[list[torch.Tensor]] = []
    outputs_of: list[list[torch.Tensor]] = []
    loss = None
    for layer_index, layer in enumerate(layers):
        is_last = layer_index == len(layers) - 1
        value, leaves = _detach(value)
        clock.start()
        value = layer(value)
        if is_last:
            loss = check_loss(call_loss(loss_fn, value, targets), minibatch)
        clock.stop()
        leaves_of.append(leaves)
        outputs_of.append([loss] if loss is not None else tensors_of(value))
    if not measurement.activation_bytes:
        measurement.activation_bytes = [
            sum(tensor.numel() * tensor.element_size() for tensor in outputs) for outputs in outputs_of[:-1]
        ] + [0]
    assert loss is not None  # a model has at least one layer
    gradients: list[torch.Tensor | None] = [torch.ones_like(loss)]
    del value, loss  # the graph of a layer is freed once its backward is done
    for layer_index in reversed(range(len(layers))):
        outputs = outputs_of.pop()
        wanted = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        clock.start()
        if wanted:
            torch.autograd.backward([output for output, _ in wanted], [gradient for _, gradient in wanted])
        clock.stop()
        gradients = [leaf.grad for leaf in leaves_of.pop()]
        # Each minibatch writes fresh gradients, as a training loop that sets them to None.
        for parameter in layers[layer_index].parameters():
            parameter.grad = None
    times = clock.finish_minibatch()
    measurement.forward_ms.append(times[: len(layers)])
    measurement.backward_ms.append(times[len(layers) :][::-1])


def _detach(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """The value without its graph, and the leaves that its gradients arrive in, in tensors_of order."""
    leaves: list[torch.Tensor] = []

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        leaves.append(tensor.detach().requires_grad_(tensor.requires_grad))
        return boundary_input(leaves[-1])

    return map_tensors(detach, value), leaves


class _Clock:
    """Times spans of one minibatch, in order."""

    def start_minibatch(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def finish_minibatch(self) -> list[float]:
        """Milliseconds of each span."""
        raise NotImplementedError


class _HostClock(_Clock):
    def start_minibatch(self) -> None:
        self._spans: list[float] = []

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._spans.append((time.perf_counter() - self._started) * 1e3)

    def finish_minibatch(self) -> list[float]:
        return self._spans


class _CudaClock(_Clock):
    """Events on the current stream, read after one synchronisation per minibatch: none between layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start_minibatch(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
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


def _repeat(batches: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(batches)
    is_one_pass = iterator is batches
    is_empty = True
    for batch in iterator:
        is_empty = False
        yield batch
    if is_empty:
        raise ValueError("batches is empty: profiling needs at least one minibatch")
    while not is_one_pass:
        num_batches = 0
        for batch in batches:
            num_batches += 1
            yield batch
        if num_batches == 0:
            return


def _parameter_bytes(layers: list[nn.Module]) -> list[int]:
    # A tied parameter counts where it is first used.
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


def _batch_size(inputs: Any) -> int | None:
    for tensor in tensors_of(inputs):
        if tensor.ndim > 0:
            return max(1, tensor.shape[0])
    return None


def _column_means(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        num_threads = torch.get_num_threads()
        threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
        return f"{platform.processor() or platform.machine() or 'cpu'}, {threads}"
    return device.type


@contextlib.contextmanager
def _progress(minibatches: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    if not (sys.stderr.isatty() and console.is_terminal):
        yield lambda: None
        return
    columns = (
        TextColumn("profiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("minibatches"),
        TimeRemainingColumn(),
    )
    to_terminal = sys.stdout.isatty()  # a file gets what the user prints
    with Progress(*columns, console=console, transient=True, redirect_stdout=to_terminal) as progress:
        task = progress.add_task("", total=minibatches)
        yield lambda: progress.advance(task)
