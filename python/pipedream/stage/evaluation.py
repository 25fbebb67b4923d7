"""Runs the evaluations at the stages of one worker: forwards of validation minibatches. The last stage
measures loss and metrics. An evaluation is due at a boundary between two minibatches (boundaries.py).

    begin          before the first FORWARD after the boundary: copies what forwards write, tells the core
    EVALUATE       runs layers in eval mode, with the weights of the boundary and the copies
    last EVALUATE  finds no more validation minibatches; the last stage then has a result

If callbacks must hear of the evaluation before the next FORWARD, there is no begin, and the first EVALUATE
makes the copies. Evaluations make no gradients. Layers run on copies of the buffers and of the frozen weights
that forwards write, and the loss is a copy, too. So all of these, generators and modes are unchanged
afterwards. The EVALUATE items of one evaluation form a block: no other item runs in between. If a stage has
replicas, only replica 0 evaluates, with its own buffers. Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipedream import _core
from pipedream.common.errors import DataMismatch
from pipedream.data.batch_reader import ValidationReader
from pipedream.model.boundary import Boundary, map_tensors, tensors_of, to_device
from pipedream.model.loss_state import spare_loss
from pipedream.model.microbatch import samples_of
from pipedream.model.seeding import generators_kept
from pipedream.model.stage_calls import StageCalls
from pipedream.model.stage_module import FrozenWrites, StageModule
from pipedream.model.validation import LOSS, Metric, Validation
from pipedream.splitting.evaluation_cut import in_eval_mode
from pipedream.stage.boundaries import EVALUATE
from pipedream.stage.outgoing import nothing_like, settled, written_memory
from pipedream.stage.user_code import UserCode
from pipedream.update.averages import Averages
from pipedream.update.tied import TiedParameters
from pipedream.update.weights import StageWeights

__all__ = ["EvaluatedStage", "EvaluationPlan", "Evaluations", "Measures", "evaluation_name"]

_OUTPUT_BYTES_MAX = 4 << 30  # bound of the outputs and targets that metrics get at once

Figures = dict[str, float]

_Copy = tuple[dict[str, Any], str, Tensor | None]
"""A module's table of buffers or parameters, a name in it, and a copy of the tensor there."""


@dataclass(frozen=True)
class EvaluatedStage:
    """The parts of one stage that its evaluations use."""

    stage: StageModule
    """The stage as the eval-mode forward is cut. `trained` is the stage as the forward in training is cut."""
    trained: StageModule
    weights: StageWeights
    tied: TiedParameters
    averages: Averages | None
    """The averages to evaluate. None: the weights are evaluated."""
    boundary_in: Boundary | None
    """The tensors from the stage upstream in the eval-mode forward; None at the first stage."""
    boundary_out: Boundary | None
    """The tensors to the stage downstream in the eval-mode forward; None at the last stage."""

    def bind(self, work: _core.WorkItem) -> None:
        """Makes the layers read what is evaluated: the averages, or the weights before work.minibatch."""
        averages, weights = self.averages, self.weights
        if averages is None:
            weights.bind(work.read_slot, self.tied.slots_at(work.minibatch))
            return
        values, num_own = averages.updated_values(), len(weights.own.names)
        tied = {
            owner: values[num_own:] if owner == work.stage else averages.used_values(owner)
            for owner in self.tied.owners
        }
        weights.bind_values(values[:num_own], tied)


@dataclass(frozen=True)
class EvaluationPlan:
    """The parts of a worker's evaluations that are known before the worker trains."""

    stages: Sequence[StageModule]
    """This worker's stages, as the eval-mode forward is cut."""
    boundaries: Mapping[int, Boundary]
    """The cuts at these stages, by the index of the stage upstream."""
    seed: int
    """The seed of the random draws of validation data."""


def evaluation_name(boundary: int) -> str:
    """Returns the name under which callbacks find the figures of the evaluation at this boundary."""
    return f"evaluation at {boundary}"


class Measures:
    """Collects the losses and metrics of an evaluation at the last stage."""

    def __init__(
        self,
        validation: Validation,
        loss_fn: Callable[[Any, Any], Tensor],
        weight_fn: Callable[[Any], Any] | None,
    ) -> None:
        self.loss_fn = loss_fn
        self._weight_fn = weight_fn
        self._metrics: Mapping[str, Metric] = validation.metrics
        self._keeps_outputs = validation.outputs
        """True keeps whole outputs. A function returns the part of an output to keep. False keeps nothing."""
        self._losses: list[tuple[Tensor, float]] = []
        self._sums: dict[str, list[tuple[Any, Any]]] = {}
        self._kept: list[tuple[Any, Any]] = []
        self._num_kept_bytes = 0
        self.num_samples = 0
        self.begin()

    def begin(self) -> None:
        self._losses, self._kept, self._num_kept_bytes, self.num_samples = [], [], 0, 0
        self._sums = {name: [] for name in self._metrics}

    def add(self, loss: Tensor, output: Any, inputs: Any, targets: Any) -> None:
        """Adds one minibatch. Raises ValueError if the kept outputs would take too much memory, and TypeError
        if a metric returns no pair."""
        count = samples_of(inputs, targets) or 1
        self.num_samples += count
        weight = float(count if self._weight_fn is None else self._weight_fn(targets))
        if weight:  # the loss of a minibatch of weight 0 is the mean of nothing, NaN
            self._losses.append((loss.detach(), weight))
        if self._keeps_outputs:
            self._keep(output, targets)
            return
        for name, metric in self._metrics.items():
            self._sums[name].append(_pair(name, metric(output, targets)))

    def _keep(self, output: Any, targets: Any) -> None:
        if callable(self._keeps_outputs):
            output = self._keeps_outputs(output, targets)
        on_host = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), (output, targets))
        self._num_kept_bytes += sum(tensor.nbytes for tensor in tensors_of(on_host))
        if self._num_kept_bytes > _OUTPUT_BYTES_MAX:
            raise ValueError(
                "validation: outputs is True, and outputs and targets take more than"
                f" {_OUTPUT_BYTES_MAX >> 30} GiB of host memory: leave outputs out, and let each metric"
                " return a sum and a count of its minibatch"
            )
        self._kept.append(on_host)

    def result(self) -> Figures:
        """Returns the figures of the evaluation, and begins the next. The loss is the mean weighted by the
        minibatches' weights. A metric is the sum of its values divided by the sum of its counts. A metric of
        whole outputs may return several figures by name instead. Raises ValueError if two figures have one
        name, and TypeError as add() does."""
        several: Figures = {}
        if self._keeps_outputs:
            outputs, targets = ([pair[index] for pair in self._kept] for index in (0, 1))
            for name, metric in self._metrics.items():
                returned = metric(outputs, targets)
                if isinstance(returned, Mapping):
                    clash = returned.keys() & ({LOSS, *several} | self._metrics.keys() - {name})
                    if clash:
                        raise ValueError(
                            f"validation: metric {name!r} returned {min(clash)!r}, which is another figure:"
                            " give it a name of its own"
                        )
                    several |= {key: float(value) for key, value in returned.items()}
                    del self._sums[name]  # begin() below makes it again
                else:
                    self._sums[name] = [_pair(name, returned)]
        losses = [(loss.item(), weight) for loss, weight in self._losses]
        total = sum(weight for _, weight in losses)
        figures = {LOSS: sum(loss * weight for loss, weight in losses) / (total or 1.0)}
        for name, pairs in self._sums.items():
            count = sum(float(count) for _, count in pairs)
            figures[name] = sum(float(value) for value, _ in pairs) / (count or 1.0)
        self.begin()
        return figures | several


def _pair(name: str, returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise TypeError(
            f"validation: metric {name!r} returned a {type(returned).__name__}: return (sum, count)"
        )
    return returned[0], returned[1]


class Evaluations:
    """Runs the evaluations of one worker, at replica 0 of its stages. It is a BoundaryListener."""

    def __init__(
        self,
        core: _core.Worker,
        schedule: _core.ScheduleOptions,
        stages: Mapping[int, EvaluatedStage],
        *,
        reader: ValidationReader | None,
        measures: Measures | None,
        show: Callable[[int, int, Figures], None],
        user: UserCode,
        device: torch.device,
        autocast: torch.dtype | None,
        describe: str,
    ) -> None:
        """reader: reads the validation data, at the first and the last stage.
        measures: collects loss and metrics, at the last stage.
        show: called as show(boundary, samples, figures) for each result at the last stage.
        describe: describes the worker in errors."""
        self.fields = _core.ItemFields()
        """The header fields that the core sends with the tensors of the latest EVALUATE."""
        self.results: list[tuple[int, int, Figures]] = []
        """(boundary, samples, figures) of each evaluation, at the last stage."""
        self._core = core
        self._schedule = schedule
        self._stages = stages
        self._reader = reader
        self._measures = measures
        self._show = show
        self._user = user
        self._device = device
        self._describe = describe
        self._autocast = autocast
        self._calls = {index: StageCalls(one.stage, None, device, autocast) for index, one in stages.items()}
        self._first = min(stages)
        self._last = schedule.num_stages - 1
        self._boundary = -1  # the boundary of the last evaluation that began here
        self._frozen = {index: FrozenWrites(one.trained) for index, one in stages.items()}
        self._kept: dict[tuple[int, int], list[_Copy]] = {}
        """For each (stage, boundary), copies of what forwards write."""
        self._kept_losses: dict[int, Any] = {}
        """Copies of the loss, by boundary, at the last stage."""
        self._running: contextlib.ExitStack | None = None  # None if no evaluation runs here
        self._written_memory: dict[int, set[int]] = {}  # by stage, during an evaluation
        self._num_over = 0  # number of this worker's stages that have ended the evaluation

    # The calls of a BoundaryListener.

    def begin(self, stage: int, minibatch: int, events: int) -> None:
        if not events & EVALUATE or minibatch <= self._boundary:
            return  # no evaluation is due, or it is over: an earlier stage of this worker began it
        self._kept[stage, minibatch] = self._copies_of(stage)
        if stage == self._last:
            self._kept_losses[minibatch] = self._copy_of_loss()
        if stage == self._first:
            self._core.begin_evaluation(minibatch)

    def reach(self, stage: int, minibatch: int, events: int) -> None:
        """Does nothing: the core decides when the evaluation runs."""

    # Work items.

    def evaluate(self, work: _core.WorkItem) -> list[Tensor]:
        """Does one EVALUATE, and returns the tensors to send; an empty list at the last stage. If the first
        stage finds no more minibatches, it tells the other stages."""
        stage = work.stage
        if self._running is None:
            self._begin_block(work.minibatch)
        batch = self._read(work)
        is_over = batch is None if stage == 0 else work.is_end_of_data
        self.fields = _core.ItemFields(
            data_fingerprint=work.data_fingerprint if batch is None else batch[2], is_end_of_data=is_over
        )
        one = self._stages[stage]
        if is_over:
            work.tensors.clear()
            self._end_stage(work)
            boundary = one.boundary_out
            return [] if boundary is None else nothing_like(boundary, self._device, gradients=False)
        if one.boundary_in is None:
            assert batch is not None
            value = to_device(batch[0], self._device, copy=True)
        else:
            value = one.boundary_in.unflatten(one.boundary_in.received(work.tensors))
            work.tensors.clear()
        one.bind(work)
        with generators_kept(), torch.no_grad():
            output = self._user.run("validation", self._calls[stage].layers, value)
            if one.boundary_out is not None:
                return self._sent(one.boundary_out, output, work)
            assert batch is not None
            self._user.run("validation", self._measure, output, batch)
        return []

    def finish(self) -> None:
        """Gives the modules their own modes and buffers back, at the end of an evaluation or after a
        failure."""
        if self._running is not None:
            self._running.close()
            self._running = None
        if self._reader is not None:
            self._reader.end()

    def _sent(self, boundary: Boundary, output: Any, work: _core.WorkItem) -> list[Tensor]:
        try:
            tensors = boundary.checked(output, stage=work.stage)
        except ValueError as error:
            raise ValueError(
                f"validation minibatch {work.microbatch}: {error}; memory is planned for the first validation"
                " minibatch, or the largest of a list: put the largest first"
            ) from None
        memory = self._written_memory[work.stage]
        return boundary.sent([settled(tensor, memory) for tensor in tensors])

    def _measure(self, output: Any, batch: tuple[Any, Any, int]) -> None:
        assert self._measures is not None
        targets = to_device(batch[1], self._device)
        loss = self._calls[self._last].loss(output, targets)
        self._measures.add(loss, output, batch[0], targets)

    def _read(self, work: _core.WorkItem) -> tuple[Any, Any, int] | None:
        """Returns (inputs, targets, fingerprint) of the minibatch. Returns None after the last minibatch, and
        at stages that are neither first nor last, which read no data. The last stage compares its fingerprint
        with that of the first stage."""
        if self._reader is None or work.stage not in (0, self._last):
            return None
        batch = self._user.run("reading validation data", self._reader.next)
        if work.stage > 0:
            told = None if work.is_end_of_data else work.data_fingerprint
            if told != (None if batch is None else batch[2]):
                raise self._mismatch(work)
        return batch

    def _mismatch(self, work: _core.WorkItem) -> DataMismatch:
        return DataMismatch(
            f"validation minibatch {work.microbatch} is not the same data at stage 0 and {self._describe}:"
            " both iterate validation's data, so its order must follow from the seeded generators of torch,"
            " random and numpy, or be fixed"
        )

    # A block.

    def _begin_block(self, boundary: int) -> None:
        self._boundary, self._num_over = boundary, 0
        if self._reader is not None:
            self._reader.begin(boundary)
        if self._measures is not None:
            kept = boundary in self._kept_losses
            loss_fn = self._kept_losses.pop(boundary) if kept else self._copy_of_loss()
            stage = self._stages[self._last].stage
            self._calls[self._last] = StageCalls(stage, loss_fn, self._device, self._autocast)
        self._running = running = contextlib.ExitStack()
        for index, one in self._stages.items():
            copies = self._kept.pop((index, boundary), None)
            roots = [root for _, root in one.stage.roots()]
            running.enter_context(in_eval_mode(roots))
            running.enter_context(_with_copies(self._copies_of(index) if copies is None else copies))
            running.callback(setattr, one.trained, "draws", one.trained.draws)
            one.trained.draws = None
        self._written_memory = {index: written_memory(one.stage) for index, one in self._stages.items()}

    def _end_stage(self, work: _core.WorkItem) -> None:
        if work.stage == self._last and self._measures is not None:
            num_samples = self._measures.num_samples
            figures = self._user.run("validation", self._measures.result)
            self.results.append((work.minibatch, num_samples, figures))
            self._show(work.minibatch, num_samples, figures)
        self._num_over += 1
        if self._num_over == len(self._stages):
            self.finish()

    def _copies_of(self, stage: int) -> list[_Copy]:
        """Returns copies of the stage's buffers, and of frozen parameters that forwards may write. A forward
        may replace a buffer, so each copy goes with the buffer's place."""
        one = self._stages[stage]
        frozen = {id(parameter) for _, parameter in self._frozen[stage].suspects()}
        roots = [root for each in (one.trained, one.stage) for _, root in each.roots()]
        modules = {id(module): module for root in roots for module in root.modules()}.values()
        memo: dict[int, Tensor] = {}  # a tensor in two places has one copy
        copies: list[_Copy] = []
        for module in modules:
            for name, buffer in module._buffers.items():
                copies.append((module._buffers, name, None if buffer is None else _copy_of(buffer, memo)))
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in frozen:
                    copies.append((module._parameters, name, _copy_of(parameter, memo)))
        return copies

    def _copy_of_loss(self) -> Any:
        """Returns a copy of the loss, which may have a state (a centre, a count)."""
        assert self._measures is not None
        roots = [root for _, root in self._stages[self._last].trained.roots()]
        return spare_loss(self._measures.loss_fn, roots)


def _copy_of(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(copy, requires_grad=False) if is_parameter else copy
    return memo[id(tensor)]


@contextlib.contextmanager
def _with_copies(copies: Sequence[_Copy]) -> Iterator[None]:
    """Puts copies into their places until the context ends. The originals are not written, because a graph
    that waits for its backward may have saved them."""
    former = [(table, name, table.get(name)) for table, name, _ in copies]
    for table, name, copy in copies:
        table[name] = copy
    try:
        yield
    finally:
        for table, name, tensor in former:
            table[name] = tensor
