"""LayerSweep times the layers of a model on the meta device. Only one layer at a time has its parameters in
memory.

    layer 0   get its values, run forward and backward several times, return to meta
    layer 1   the same, on the output of layer 0
    ...

Each layer runs as a separate stage: its input is detached from the graph of earlier layers, and its backward
starts from gradients of ones. Owned by the thread that profiles.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from pipedream.model.boundary import boundary_input, map_tensors, tensors_of
from pipedream.model.draws import drawing_alike
from pipedream.model.initial_weights import WeightSource, materialised
from pipedream.model.layers import Model, layers_of, roots_of
from pipedream.model.stage_calls import StageCalls, backward, leaves_of
from pipedream.model.stage_module import StageModule
from pipedream.model.stand_ins import poisoned
from pipedream.profiling.timed_passes import (
    Clock,
    LossFunction,
    bytes_of,
    drop_gradients,
    make_clock,
    parameter_bytes_of,
    saved_tensors_counted,
)
from pipedream.splitting.cut_model import CutModel
from pipedream.splitting.splitter import stages_of

__all__ = ["SWEEPS_MAX", "LayerSweep"]

SWEEPS_MAX = 20
"""The largest number of runs of a layer, because more runs would not make the mean more exact."""
_SEED = 0  # the values are only timed, so any seed will do

Times = tuple[list[list[float]], list[list[float]]]
"""Milliseconds of forwards and of backwards, both as [run][layer]."""


class LayerSweep:
    def __init__(
        self,
        model: Model,
        loss_fn: LossFunction,
        weights: WeightSource,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._autocast = autocast
        self._loss_fn = loss_fn
        self._weights = weights
        self._begun: list[Clock] = []  # the clock to restart where a layer's own code begins
        self._roots = roots_of(model)
        if isinstance(model, CutModel):
            self.layer_names = model.layer_names
            self.cuts = model.chosen
            self.parameter_bytes = model.parameter_bytes()
            self.frozen_bytes = model.parameter_bytes(trained=False)
            self._stages: Sequence[StageModule] = [
                model.stage(layer, layer, layer, on_begin=self._begin if layer > 0 else None)
                for layer in range(len(self.layer_names))
            ]
        else:
            named = layers_of(model)
            self.layer_names = [name for name, _ in named]
            self.cuts = None
            layers = [layer for _, layer in named]
            self.parameter_bytes = parameter_bytes_of(layers)
            self.frozen_bytes = parameter_bytes_of(layers, trained=False)
            self._stages = stages_of(model, [(index, index) for index in range(len(layers))])
        self._buffer_names = {name for stage in self._stages for name, _ in stage.stage_buffers()}
        self.activation_bytes: list[int] = []
        self.saved_bytes: list[int] = []
        self.left_out: set[int] = set()

    def run(self, inputs: Any, targets: Any, num_runs: int, seconds: float | None) -> Times:
        """Runs each layer num_runs times, or until the layer's share of the seconds is over, but at least
        twice. Returns the times of the same number of runs for each layer.
        """
        deadline = None if seconds is None else time.perf_counter() + seconds
        forward: list[list[float]] = []  # [layer][run]
        backward: list[list[float]] = []
        value = inputs
        with materialised(self._roots, self._buffer_names, self._weights, _SEED):
            for stage in self._stages:
                left = len(self._stages) - len(forward)
                now = time.perf_counter()
                until = None if deadline is None else now + max(deadline - now, 0.0) / left
                with self._held(stage), drawing_alike(stage, torch.device("cpu")):
                    value, times = self._time(stage, value, targets, num_runs, until)
                forward.append([run.forward_ms for run in times])
                backward.append([run.backward_ms for run in times])
        num_common = min(map(len, forward))
        return _by_run(forward, num_common), _by_run(backward, num_common)

    @contextlib.contextmanager
    def _held(self, stage: StageModule) -> Iterator[None]:
        """In the with block, the stage has its values, and stand-ins for other stages' values."""
        held = stage.held_names()
        others = [p for p in stage.others_parameters() if p.is_meta]
        stand_ins = poisoned(others, torch.device("cpu"), stage.strays())
        with materialised(self._roots, held, self._weights, _SEED), stand_ins:
            yield

    def _time(
        self, stage: StageModule, value: Any, targets: Any, num_runs: int, until: float | None
    ) -> tuple[Any, list[_Run]]:
        times: list[_Run] = []
        is_last = stage is self._stages[-1]
        output: Any = None
        while len(times) < num_runs and (len(times) < 2 or until is None or time.perf_counter() < until):
            leaves = leaves_of(value, copies=True)
            sizes: list[int] = []
            is_first_run = not times
            counted = saved_tensors_counted([stage], sizes.append) if is_first_run else nullcontext()
            with counted:
                output, run = self._run(stage, leaves, targets if is_last else None, is_last=is_last)
            if is_first_run:
                self.saved_bytes.append(sum(sizes))
                self.activation_bytes.append(0 if is_last else bytes_of(tensors_of(output)))
            times.append(run)
            drop_gradients(stage)
        return output, times

    def _run(self, stage: StageModule, leaves: Any, targets: Any, *, is_last: bool) -> tuple[Any, _Run]:
        clock = make_clock(torch.device("cpu"))
        clock.start_minibatch()
        clock.start()
        self._begun = [clock]
        calls = StageCalls(stage, self._loss_fn, torch.device("cpu"), self._autocast)
        # Code outside calls must draw, and so branch, as in the earlier layers' runs.
        if stage.draws is not None:
            stage.draws.begin(0, 0, stage)
        output = calls.layers(map_tensors(boundary_input, leaves))
        if is_last:
            output = calls.loss(output, targets)
        clock.next()
        roots = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        backward(roots, [torch.ones_like(root) for root in roots])
        clock.stop()
        *_, forward_ms, backward_ms = clock.finish_minibatch()
        return leaves_of(output), _Run(forward_ms, backward_ms)

    def _begin(self) -> None:
        """Restarts the clock. Code outside calls runs at every stage, but its time belongs to the first
        layer.
        """
        for clock in self._begun:
            clock.next()


class _Run(NamedTuple):
    forward_ms: float
    backward_ms: float


def _by_run(by_layer: list[list[float]], num_runs: int) -> list[list[float]]:
    return [[of_layer[run] for of_layer in by_layer] for run in range(num_runs)]
