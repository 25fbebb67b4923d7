"""profile() times the forward and backward of every layer of a model, on the model's device.

timed_passes.py explains how. Runs in the caller's thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipedream.common.checks import check_count, check_data, check_function, is_number
from pipedream.common.guard import check_main_guard
from pipedream.common.microbatches import Microbatches
from pipedream.common.progress_bar import progress_bar, seconds_bar
from pipedream.model.batches import own_loss, parts_of
from pipedream.model.boundary import device_of, to_device
from pipedream.model.data_copies import copy_of, generators_of_loader_kept
from pipedream.model.factored import factorable, rows_counted
from pipedream.model.initial_weights import WeightSource, check_weights, whole_for_a_check
from pipedream.model.layers import Model, check_shapes, layers_of, model_name
from pipedream.model.loss_state import loss_on, spare_loss
from pipedream.model.microbatch import batch_size_of
from pipedream.model.precision import autocast_dtype, autocast_left, autocast_region
from pipedream.model.references import check_loss_fn
from pipedream.model.stand_ins import is_on_meta
from pipedream.model.untouched import untouched
from pipedream.planning.layer_profile import LayerProfile, MicrobatchTimes, Profile, WeightFactors
from pipedream.planning.shapes import Shapes, larger_of, shapes_of
from pipedream.profiling.layer_sweep import SWEEPS_MAX, LayerSweep
from pipedream.profiling.microbatch_timing import microbatch_times, product_ms_per_replica
from pipedream.profiling.timed_passes import (
    Clock,
    CutPasses,
    LayerPasses,
    LossFunction,
    TimedPasses,
    make_clock,
    make_work_clock,
)
from pipedream.splitting.cut_model import CutModel, cut_model, needs_cutting
from pipedream.splitting.split_check import NUM_CHECKED, check_layers, without_bad_cuts

__all__ = ["profile"]

# The first minibatches also pay for allocation, thread pools and the choice of kernels.
_WARM_UP_MINIBATCHES = 5
# The number of blocks. A block has consecutive minibatches, so slow changes of the machine's speed show as
# differences between the blocks' means.
_BLOCKS = 10
_STUDENT_T = 2.262  # 95 % two-sided quantile for _BLOCKS - 1 degrees of freedom
_BLOCK_MINIBATCHES_MIN = 5
_TIME_ERROR_ENOUGH = 0.005
# The largest number of minibatches that are read, as a multiple of the number to time. Minibatches of other
# sizes, which are not timed, count as read.
_SKIPPED_FACTOR_MAX = 10
_WHOLE_SHARE = 0.7  # share of the seconds for whole minibatches; the rest is for microbatches

_log = logging.getLogger("pipedream")


def profile(
    model: Model,
    batches: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    minibatches: int = 1000,
    seconds: float | None = None,
    cuts: Sequence[str] | None = None,
    check: bool = True,
    autocast: str | torch.dtype | None = None,
    weights: WeightSource = None,
) -> Profile:
    """Measures what partition() needs: for each layer, the mean milliseconds of a minibatch's forward and
    backward, the bytes that cross the cut after it, and the bytes of its trainable parameters. Then it times
    microbatches for m = 2, 4, 8, ... as far as the minibatch allows (LayerProfile.microbatch_ms), in up to
    five rounds within three tenths of `seconds`, but each m at least once.

    batches: yields (inputs, targets), or dicts of the model's arguments by name. It is iterated again when it
        ends, unless it is a generator, or another object that gives each minibatch once. Minibatches with
        another number of samples than the first are not timed.
    loss_fn: (outputs, targets) -> scalar; with dicts, (outputs, batch) -> scalar. Its time belongs to the
        last layer. None: the loss in the model's output.
    minibatches: profiling stops when this many minibatches are measured, besides up to 5 for warm-up. It
        stops earlier if the mean time of a minibatch is known to 0.5 % (Profile.time_error).
    seconds: profiling also stops when this time has passed in all.
    model: an nn.Sequential or a list is used as its layers. Any other module is traced once, on the first
        minibatch. A layer is then the part of its forward between two places where it may be cut. It has the
        name of the module whose call ends it.
    cuts: the paths of the modules after which the model may be cut, ["layer2", "layer3"]. None: after any.
    check: first runs the model with all of its cuts and compares it with the whole model. A cut that changes
        the loss, a gradient or a buffer is left out, and logged. If `cuts` names such a cut, or if the model
        is a list with layers that are not torch's own, profile() raises ValueError instead.
    autocast: as in run(). It changes times and bytes, but not which cuts are found. None: the dtype of the
        autocast region around this call, if there is one.
    weights: as in run(), for a model on the meta device.

    The model is unchanged afterwards: weights, gradients, buffers, flags and counters. So are random number
    generators, including those of a DataLoader, and a loss that is a module or another object.

    A model on the meta device is timed on the host, layer by layer. Each layer gets its values, runs forward
    and backward on the first minibatch as often as there are minibatches to measure (at most 20), and returns
    to meta. So this needs the memory of the largest layer only. The check needs eight times the memory of the
    parameters and buffers. If this memory is not free, there is no check, and the log says so. Microbatches
    are not timed.

    Raises ValueError or TypeError for arguments or batches that do not fit. Source: PipeDream (SOSP'19),
    section 3.1.
    """
    check_main_guard()
    check_count("minibatches", minibatches)
    if seconds is not None and (not is_number(seconds) or seconds <= 0):
        raise ValueError(f"seconds is {seconds!r}: give a positive number, or None for no limit")
    check_data("batches", batches)
    if loss_fn is None:
        loss_fn = own_loss
    check_function("loss_fn", loss_fn)
    check_loss_fn(loss_fn)
    check_weights(weights)
    dtype = autocast_dtype(autocast)
    _check_names(cuts)
    named_layers = layers_of(model)
    layers = [layer for _, layer in named_layers]
    if not needs_cutting(model):
        for name, layer in named_layers:
            check_shapes(layer, f"{name}.")
    on_meta = is_on_meta(layers)
    device = torch.device("cpu") if on_meta else device_of(layers)
    loss_fn = spare_loss(loss_fn, layers)
    kept, placed = untouched(layers, loss_fn), loss_on(loss_fn, device)
    data_kept = generators_of_loader_kept(batches)
    with (
        kept,
        data_kept,
        placed,
        autocast_left() as regions,
        torch.enable_grad(),
        _shown(minibatches, seconds) as count,
    ):
        dtype = dtype or regions.get(device.type)
        how = _How(loss_fn, cuts, check, device, dtype, weights)
        measurement = _Measurement(functools.partial(_make_passes, model, how), layers)
        if on_meta:
            passes: TimedPasses | LayerSweep = _sweep(measurement, model, batches, how, minibatches, seconds)
        else:
            _measure(measurement, batches, device, minibatches, seconds, count)
            measurement.measure_microbatches(device, minibatches, seconds)
            assert measurement.passes is not None  # at least one minibatch was measured
            passes = measurement.passes
    no_times: list[tuple[MicrobatchTimes, ...] | None] = [None] * len(passes.layer_names)
    no_factors: list[list[WeightFactors] | None] = [None] * len(passes.layer_names)
    columns = (
        *measurement.means_ms(),
        passes.activation_bytes,
        passes.parameter_bytes,
        passes.saved_bytes,
        measurement.factors or no_factors,
        measurement.microbatch_ms or no_times,
        passes.frozen_bytes,
    )
    measured = [*itertools.starmap(LayerProfile, zip(passes.layer_names, *columns, strict=True))]
    chosen = passes.cuts
    if passes.left_out:
        names = [measured[layer].name for layer in sorted(passes.left_out)]
        _say_left_out(names, is_chosen=cuts is not None)
        measured = _joined(measured, passes.left_out)
        chosen = tuple(layer.name for layer in measured[:-1])
    return Profile(
        layers=tuple(measured),
        model=model_name(model),
        batch_size=measurement.batch_size,
        device=_device_name(device),
        minibatches=measurement.num_measured,
        time_error=measurement.time_error(),
        max_shapes=measurement.max_shapes,
        cuts=chosen,
    )


def _say_left_out(names: Sequence[str], *, is_chosen: bool) -> None:
    also = f" and {len(names) - 1} others" if len(names) > 1 else ""
    text = f"the model is not cut after {names[0]}{also}: some minibatches do not call what ends there"
    if is_chosen:
        raise ValueError(f"{text}; choose other cuts")
    _log.warning("%s", text)


def _joined(layers: Sequence[LayerProfile], left_out: Collection[int]) -> list[LayerProfile]:
    """Joins each layer in `left_out` with the layer after it. Some minibatch did not reach the end of such a
    layer.
    """
    joined: list[LayerProfile] = []
    before: LayerProfile | None = None
    for index, layer in enumerate(layers):
        whole = layer if before is None else before.joined_with(layer)
        before = whole if index in left_out else None
        if before is None:
            joined.append(whole)
    return joined


@dataclass
class _Measurement:
    make_passes: Callable[[Sequence[tuple[Any, Any]]], TimedPasses]
    """Makes the passes from the first minibatches, (inputs, targets) on the device."""
    layers: Sequence[nn.Module]
    passes: TimedPasses | None = None
    factors: list[list[WeightFactors]] | None = None  # [layer]
    forward_ms: list[list[float]] = field(default_factory=list)  # [minibatch][layer], warm-up included
    backward_ms: list[list[float]] = field(default_factory=list)
    batch_size: int | None = None
    max_shapes: Shapes = field(default_factory=dict)
    """The largest shapes of all minibatches that were read, including short ones."""
    microbatch_ms: list[tuple[MicrobatchTimes, ...]] | None = None  # [layer]
    first: tuple[Any, Any] | None = None
    """Minibatch 0, on the device."""

    def begin(self, first: Sequence[tuple[Any, Any]]) -> None:
        """Makes the passes. first: the first minibatches, on the device."""
        self.passes = self.make_passes(first)
        self.first = first[0]

    def measure_microbatches(self, device: torch.device, minibatches: int, seconds: float | None) -> None:
        """Times microbatches by microbatch_times(), after the whole minibatches."""
        assert self.passes is not None and self.first is not None
        self.microbatch_ms = microbatch_times(
            self.passes,
            *self.first,
            make_work_clock(device),
            whole_ms=sum(map(sum, self.means_ms())),
            rounds=minibatches,
            seconds=None if seconds is None else (1 - _WHOLE_SHARE) * seconds,
        )

    def measure(self, minibatch: int, inputs: Any, targets: Any, clock: Clock) -> None:
        assert self.passes is not None
        if self.factors is None:
            with rows_counted(factorable(nn.ModuleList(self.layers), self._named())) as rows:
                forward_ms, backward_ms = self.passes.run(minibatch, inputs, targets, clock)
            self.factors = self._factors_of(self.passes, rows, clock)
        else:
            forward_ms, backward_ms = self.passes.run(minibatch, inputs, targets, clock)
        self.forward_ms.append(forward_ms)
        self.backward_ms.append(backward_ms)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        named = nn.ModuleList(self.layers).named_parameters()
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def _factors_of(
        self, passes: TimedPasses, rows: Mapping[str, int], clock: Clock
    ) -> list[list[WeightFactors]]:
        """Returns the factors of each layer's weights. rows: the number of rows in a minibatch, by the
        weight's name.
        """
        product_ms: dict[tuple[torch.Size, torch.dtype, int], float] = {}  # shared by weights that are alike
        found: list[list[WeightFactors]] = [[] for _ in passes.layer_names]
        for name, parameter in self._named():
            if name in rows:
                row_bytes = sum(parameter.shape) * parameter.element_size()
                kind = (parameter.shape, parameter.dtype, rows[name])
                if kind not in product_ms:
                    product_ms[kind] = product_ms_per_replica(parameter, rows[name], clock)
                weight = WeightFactors(parameter.nbytes, rows[name] * row_bytes, product_ms[kind])
                found[passes.layer_of[id(parameter)]].append(weight)
        return found

    @property
    def num_warm_up(self) -> int:
        return min(_WARM_UP_MINIBATCHES, len(self.forward_ms) - 1)

    @property
    def num_measured(self) -> int:
        return len(self.forward_ms) - self.num_warm_up

    def time_error(self) -> float | None:
        """Returns half the width of the 95 % confidence interval of a minibatch's mean time, as a share of
        that mean. None if there are too few minibatches, or if they take no time.
        """
        sums_ms = [
            sum(forward_ms) + sum(backward_ms)
            for forward_ms, backward_ms in zip(
                self.forward_ms[self.num_warm_up :], self.backward_ms[self.num_warm_up :], strict=True
            )
        ]
        size = len(sums_ms) // _BLOCKS
        if size < _BLOCK_MINIBATCHES_MIN:
            return None
        means_ms = [statistics.fmean(sums_ms[i * size : (i + 1) * size]) for i in range(_BLOCKS)]
        mean_ms = statistics.fmean(means_ms)
        if mean_ms == 0:
            return None
        return _STUDENT_T * statistics.stdev(means_ms) / math.sqrt(_BLOCKS) / mean_ms

    def is_known_well(self) -> bool:
        """Whether the mean time is known well enough. This is tested after every 50 measured minibatches."""
        if self.num_measured % (_BLOCKS * _BLOCK_MINIBATCHES_MIN) or self.num_measured <= 0:
            return False
        error = self.time_error()
        return error is not None and error <= _TIME_ERROR_ENOUGH

    def means_ms(self) -> tuple[list[float], list[float]]:
        return _column_means(self.forward_ms[self.num_warm_up :]), _column_means(
            self.backward_ms[self.num_warm_up :]
        )


@contextlib.contextmanager
def _shown(minibatches: int, seconds: float | None) -> Iterator[Callable[[int], None]]:
    """Shows a bar of minibatches, or of seconds if they are the limit. Yields a function that takes the
    number of minibatches measured so far: 0 when measuring begins, then each number once.
    """
    if seconds is None:
        with progress_bar("profiling", minibatches, "minibatches") as advance:
            yield lambda num_done: advance(num_done > _WARM_UP_MINIBATCHES)
        return
    with seconds_bar("profiling", seconds) as start:
        yield lambda num_done: start()


def _measure(
    measurement: _Measurement,
    batches: Iterable[Any],
    device: torch.device,
    minibatches: int,
    seconds: float | None,
    count: Callable[[int], None],
) -> None:
    most = _WARM_UP_MINIBATCHES + minibatches
    deadline = None if seconds is None else time.perf_counter() + _WHOLE_SHARE * seconds
    clock = make_clock(device)
    stream = _repeat(batches)
    first = list(itertools.islice(stream, NUM_CHECKED))
    with _located(0):
        measurement.begin([_on_device(batch, minibatch, device) for minibatch, batch in enumerate(first)])
    count(0)
    for minibatch, batch in enumerate(itertools.chain(first, stream)):
        inputs, targets = parts_of(batch, minibatch)
        measurement.max_shapes = larger_of(measurement.max_shapes, shapes_of(batch))
        batch_size = batch_size_of(inputs, targets)
        if minibatch == 0:
            measurement.batch_size = batch_size
        # A shorter last batch would lower the mean below the time of a full minibatch.
        if batch_size == measurement.batch_size:
            on_device = _on_device(batch, minibatch, device)
            with _located(minibatch):
                measurement.measure(minibatch, *on_device, clock)
            count(len(measurement.forward_ms))
        num_done = len(measurement.forward_ms)
        if measurement.is_known_well():
            return
        # The time limit may shorten the warm-up, but at least one minibatch is measured after it.
        if deadline is not None and num_done >= 2 and time.perf_counter() >= deadline:
            return
        if num_done >= most or minibatch + 1 >= _SKIPPED_FACTOR_MAX * most:
            return


def _on_device(batch: Any, minibatch: int, device: torch.device) -> tuple[Any, Any]:
    inputs, targets = parts_of(batch, minibatch)
    return to_device(inputs, device), to_device(targets, device)


@contextlib.contextmanager
def _located(minibatch: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"at minibatch {minibatch} of the batches that are profiled")
        raise


def _check_names(cuts: Sequence[str] | None) -> None:
    is_list = isinstance(cuts, (list, tuple)) and all(isinstance(name, str) for name in cuts)
    if cuts is not None and not is_list:
        raise TypeError(f'cuts is {cuts!r}: give a list of paths of modules, as ["layer2", "layer3"]')


@dataclass(frozen=True)
class _How:
    """How the model is cut and run."""

    loss_fn: LossFunction
    cuts: Sequence[str] | None
    check: bool
    device: torch.device
    autocast: torch.dtype | None
    weights: WeightSource

    def region(self) -> contextlib.AbstractContextManager[Any]:
        return autocast_region(self.device.type, self.autocast)


def _make_passes(model: Model, how: _How, first: Sequence[tuple[Any, Any]]) -> TimedPasses:
    """Cuts the model and makes its passes. first: the first minibatches, on the device."""
    loss_fn, cuts = how.loss_fn, how.cuts
    cut = _cut(model, *first[0], how)
    if cut is not None:
        if how.check:
            cut = without_bad_cuts(cut, first, loss_fn, is_chosen=cuts is not None)
        if cut.offered:
            if cuts is None and cut.explain_checkpointed():
                _log.warning("%s", cut.explain_checkpointed())
            return CutPasses(cut, loss_fn, how.region)
        if cut.chosen is None and cut.explain():
            _log.warning("the model cannot be cut, so it is one layer: %s", cut.explain())
    elif how.check:
        check_layers(model, first, loss_fn)
    return LayerPasses(layers_of(model), loss_fn, how.region)


def _cut(model: Model, inputs: Any, targets: Any, how: _How) -> CutModel | None:
    """Cuts the model on a minibatch. Returns None for a list of layers, because a list needs no other
    cuts.
    """
    if not needs_cutting(model):
        if how.cuts is not None:
            raise ValueError(
                f"cuts is {how.cuts!r}, but the model is a list of layers: it is cut after its entries"
            )
        return None
    assert isinstance(model, nn.Module)
    cut = cut_model(model, inputs, targets, how.loss_fn, autocast=how.autocast, weights=how.weights)
    return cut if how.cuts is None else cut.at(how.cuts)


def _sweep(
    measurement: _Measurement,
    model: Model,
    batches: Iterable[Any],
    how: _How,
    minibatches: int,
    seconds: float | None,
) -> LayerSweep:
    """Measures a model on the meta device."""
    loss_fn, cuts, weights = how.loss_fn, how.cuts, how.weights
    read = list(itertools.islice(_repeat(batches), min(minibatches, SWEEPS_MAX)))
    measurement.max_shapes = functools.reduce(larger_of, map(shapes_of, read), {})
    inputs, targets = parts_of(read[0], 0)
    measurement.batch_size = batch_size_of(inputs, targets)
    cut = _cut(model, inputs, targets, how)
    if cut is not None:
        assert isinstance(model, nn.Module)
        if how.check and cut.offered:
            with whole_for_a_check(model, weights) as is_whole:
                if is_whole:
                    first = [parts_of(batch, minibatch) for minibatch, batch in enumerate(read[:NUM_CHECKED])]
                    cut = without_bad_cuts(cut, first, loss_fn, is_chosen=cuts is not None)
        model = cut
    passes = LayerSweep(model, loss_fn, weights, how.autocast)
    times = passes.run(inputs, targets, min(minibatches, SWEEPS_MAX) + _WARM_UP_MINIBATCHES, seconds)
    measurement.forward_ms, measurement.backward_ms = times
    return passes


def _repeat(batches: Iterable[Any]) -> Iterator[Any]:
    copied = copy_of(batches)
    is_one_pass = isinstance(batches, Iterator) or (copied is None and not hasattr(batches, "__len__"))
    if not is_one_pass and copied is not None:
        batches = copied  # counters of the user's data stay unchanged
    iterator = iter(batches)
    is_empty = True
    for batch in iterator:
        is_empty = False
        if isinstance(batch, Microbatches):
            raise ValueError(
                "batches yields Microbatches, and whole minibatches are timed: give minibatches that are as"
                " large as all microbatches together"
            )
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
