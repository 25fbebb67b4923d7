"""Wraps a LightningModule's steps as a model, a loss and data for `pipedream.run`.

    Steps      The module. Its forward is training_step, or validation_step in eval mode.
    Recorder   The loss. It takes the loss from the output of Steps, and keeps a row of figures for each call.
    Batches    The data: a range of a loader's batches, each with its number.

A row has all values that one call of a step logged, and the states of its metrics. If batches are cut into
microbatches, a step is called for each microbatch. At the end of a run the rows return to
the Recorder of the process that called fit(). That process then logs them as if it had computed the steps.
Imports no Lightning. Runs on the workers' compute threads, and on the thread that called fit().
"""

from __future__ import annotations

import contextlib
import copy
import dis
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.common.microbatches import Microbatches
from pipedream.model.boundary import map_tensors, tensors_of
from pipedream.model.seeding import seed_all
from pipedream.splitting.evaluation_cut import in_eval_mode

__all__ = ["Batches", "Layout", "LoggedCall", "Recorder", "Row", "StandInTrainer", "Steps", "metrics_of"]

_PER_VALUE = 3  # a logged value has three columns: whether it was logged, the value, its batch size

Step = Callable[..., Any]


@dataclass(frozen=True)
class LoggedCall:
    """How a step calls `self.log` for one name."""

    options: dict[str, Any]
    dtype: torch.dtype
    metric: str | None
    """The name of the logged metric in the module; None if a number or tensor was logged."""

    @property
    def reduction(self) -> str:
        given = self.options.get("reduce_fx", "mean")
        return str(getattr(given, "__name__", given)).lower()


@dataclass
class Layout:
    """The columns of the rows of training steps or of validation steps, learned from the first batch."""

    calls: dict[str, LoggedCall] = field(default_factory=dict)
    states: dict[str, list[tuple[str, torch.Size, torch.dtype]]] = field(default_factory=dict)
    """The states of each metric, by its name."""
    is_known: bool = False


class StandInTrainer:
    """Replaces `self.trainer` in a worker's steps. It has only global_step and some plain facts, such as
    current_epoch."""

    def __init__(self, first_batch: int, first_step: int, **facts: Any) -> None:
        self._first_batch, self._first_step = first_batch, first_step
        self._batch: int | None = first_batch
        self.asked_for_step = False
        vars(self).update(facts)

    @property
    def global_step(self) -> int:
        self.asked_for_step = True
        if self._batch is None:
            raise ValueError(
                "a step reads self.global_step, which the first one did not: read it in every step"
            )
        num_before: int = (self._batch - self._first_batch) // self.accumulate_grad_batches
        return self._first_step + num_before

    def at(self, batch: int | None) -> None:
        """Sets the number of the batch whose step runs; None if the stages do not get the number."""
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(key for key in vars(self) if not key.startswith("_")))
        raise AttributeError(
            f"trainer.{name} is not known to a step, which runs in a worker: it has {known}, global_step"
        )


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """Returns the module's torchmetrics metrics, by name."""
    return {name: one for name, one in module.named_modules() if _is_metric(one)}


def _is_metric(module: nn.Module) -> bool:
    return any(
        kind.__name__ == "Metric" and kind.__module__ == "torchmetrics.metric"
        for kind in type(module).__mro__
    )


def _has_metrics_alone(module: nn.Module) -> bool:
    leaves = [one for one in module.modules() if _is_metric(one) or not list(one.children())]
    return _is_metric(module) or (bool(leaves) and all(map(_is_metric, leaves)))


def reads(function: Any, position: int) -> bool:
    """Whether a method's code reads its argument at this position; True if the code is not Python's. Position
    0 is self."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, types.CodeType):
        return True
    if code.co_argcount <= position:
        return bool(code.co_flags & 0x04)  # whether the method has *args
    name = code.co_varnames[position]
    if name in code.co_cellvars:
        return True
    return any(name in _names(instruction.argval) for instruction in dis.get_instructions(code))


def _names(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class Steps(nn.Module):
    """A LightningModule whose forward is its training_step, or its validation_step in eval mode.

    It uses the module's own parameters, buffers and children, so that names are the module's. Children that
    contain only metrics are left out, because they belong to no stage. Each step starts with empty metrics.
    """

    def __init__(self, module: Any, trainer: StandInTrainer) -> None:
        super().__init__()
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._modules = {
            name: child
            for name, child in module._modules.items()
            if child is None or not _has_metrics_alone(child)
        }
        vars(self)["lightning_module"] = module
        self.trainer = trainer
        self.layouts = {True: Layout(), False: Layout()}
        """The layout of training steps (True) and of validation steps (False)."""
        self.learns = False
        """Whether the next step defines the layout."""
        self.calls_eval = False
        """Whether training_step runs with the module in eval mode."""
        self.list_batches = {True: False, False: False}
        """Whether the loader's batches of training (True) or validation (False) are lists. The step gets
        lists then, although batches are sent as tuples."""
        self.reads_number = {
            True: _takes(module.training_step, 2) and reads(module.training_step, 2),
            False: _takes(module.validation_step, 2) and reads(module.validation_step, 2),
        }
        """Whether the step of training (True) or validation (False) reads its batch_idx or self.global_step.
        If so, the batch's number crosses every cut."""
        self.training = module.training

    @contextlib.contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Makes training_step run with the module in eval mode, within the with block."""
        with in_eval_mode([self]):
            self.training, self.calls_eval = True, True
            try:
                yield
            finally:
                self.calls_eval = False

    def forward(self, batch: Any, number: Any, total: Any = None, scale: Any = None) -> dict[str, Tensor]:
        module: Any = vars(self)["lightning_module"]
        if self.list_batches[self.training] and isinstance(batch, tuple):
            batch = list(batch)
        has_number = self.learns or self.reads_number[self.training]
        index = int(number) if has_number else 0
        self.trainer.at(index if has_number else None)
        step = module.training_step if self.training else module.validation_step
        takes_index = _takes(step, 2)
        with _Logging(self, module, batch) as logging:
            returned = step(batch, index) if takes_index else step(batch)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if self.training and not isinstance(loss, Tensor):
            raise ValueError(
                f"training_step of {type(module).__name__} returned {type(returned).__name__}: return the"
                ' loss, or a dict with "loss", for every batch'
            )
        row = logging.row(loss)
        if self.training:
            assert isinstance(loss, Tensor)
            return {"loss": loss, "row": row.detach()}
        return {"loss": logging.shown(loss), "held_out": row}


def _takes(step: Step, position: int) -> bool:
    code = getattr(getattr(step, "__func__", step), "__code__", None)
    return not isinstance(code, types.CodeType) or code.co_argcount > position or bool(code.co_flags & 0x04)


class _Logging:
    """Receives the calls of self.log of the step that runs in its `with` block."""

    def __init__(self, steps: Steps, module: Any, batch: Any) -> None:
        self._steps, self._module = steps, module
        self._layout = steps.layouts[steps.training]
        self._learns = steps.learns
        if self._learns:
            self._layout.calls.clear()
            self._layout.states.clear()
        self._batch_size = _batch_size_of(batch)
        self._values: dict[str, tuple[Any, int]] = {}
        self._metrics = metrics_of(module)
        self._around = contextlib.ExitStack()

    def __enter__(self) -> _Logging:
        module, attributes = self._module, vars(self._module)
        around = self._around
        around.callback(attributes.__setitem__, "_trainer", attributes.get("_trainer"))
        around.callback(attributes.__setitem__, "training", module.training)
        attributes["_trainer"], attributes["training"] = (
            self._steps.trainer,
            self._steps.training and not self._steps.calls_eval,
        )
        around.callback(attributes.pop, "log")
        attributes["log"] = self._log
        for metric in self._metrics.values():
            around.callback(vars(metric).update, dict(vars(metric)))
            metric.reset()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self._around.close()

    def _log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **options: Any) -> None:
        options |= dict(zip(_LOG_ARGUMENTS, args, strict=False))
        if isinstance(value, Mapping):
            raise ValueError(f"self.log({name!r}) was given a {type(value).__name__}: use self.log_dict")
        if self._learns:
            self._learn(name, value, options)
        elif name not in self._layout.calls:
            raise ValueError(
                f"a step has logged {name!r}, which the first one did not: log it in every step, or in none"
            )
        self._values[name] = (value, self._batch_size if batch_size is None else batch_size)

    def _learn(self, name: str, value: Any, options: dict[str, Any]) -> None:
        metric: str | None = None
        if isinstance(value, nn.Module):
            metric = next((known for known, one in self._metrics.items() if one is value), None)
            if metric is None:
                raise ValueError(f"self.log({name!r}) was given a metric that is no attribute of the module")
            value = getattr(value, "_forward_cache", None)
        dtype = value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()
        self._layout.calls[name] = LoggedCall(options, dtype, metric)

    def row(self, loss: Any) -> Tensor:
        """Returns the loss, the logged values and the metrics' states as one tensor. Then restores what
        __enter__() has replaced."""
        device = next((t.device for t in tensors_of(loss)), torch.device("cpu"))
        columns: list[Tensor] = [self._as_column(loss if isinstance(loss, Tensor) else 0.0, device)]
        if self._learns:
            self._layout.states = {
                name: _described(name, metric)
                for name, metric in self._metrics.items()
                if getattr(metric, "_update_count", 1)
            }
        for name, call in self._layout.calls.items():
            value, batch_size = self._values.get(name, (0.0, 0))
            if call.metric is not None:
                value = getattr(value, "_forward_cache", None) if name in self._values else None
                value = 0.0 if value is None else value
            flags = (float(name in self._values), value, float(batch_size))
            columns += [self._as_column(each, device) for each in flags]
        flat = [torch.stack(columns)]
        for name, states in self._layout.states.items():
            metric = self._metrics[name]
            flat.append(self._as_column(float(metric._update_count), device).reshape(1))
            flat += [getattr(metric, state).to(device, torch.float64).reshape(-1) for state, _, _ in states]
        self._around.close()
        return torch.cat(flat)

    def shown(self, loss: Any) -> Tensor:
        """Returns the loss of a validation step. It is the step's output, otherwise the first logged tensor
        of one element, otherwise 0."""
        found = [loss, *(value for value, _ in self._values.values())]
        numbers = [one for one in found if isinstance(one, Tensor) and one.numel() == 1]
        return numbers[0].reshape(()) if numbers else torch.zeros(())

    def _as_column(self, value: Any, device: torch.device) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.tensor(float(value), dtype=torch.float64, device=device)
        if value.numel() != 1:
            raise ValueError(
                f"a step has logged a tensor of {tuple(value.shape)}: log one number, as its mean()"
            )
        return value.to(device, torch.float64).reshape(())


_LOG_ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
)


def _described(name: str, metric: Any) -> list[tuple[str, torch.Size, torch.dtype]]:
    described = []
    for state in metric._defaults:
        value = getattr(metric, state)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"the metric {name!r} ({type(metric).__name__}) keeps every batch in a list, which no worker"
                " sends back: use one that counts, as with thresholds=100"
            )
        described.append((state, value.shape, value.dtype))
    return described


def _batch_size_of(batch: Any) -> int:
    return next((tensor.size(0) if tensor.dim() else 1 for tensor in tensors_of(batch)), 1)


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    return sum(value * share for value, share in zip(values, shares, strict=True))


_JOINS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "sum": lambda values, shares: sum(values),
    "min": lambda values, shares: min(values),
    "max": lambda values, shares: max(values),
}
"""Functions that join the values of a batch's pieces, by reduce_fx. Any other reduce_fx gives the mean
weighted by shares.
"""


@dataclass(frozen=True)
class Row:
    """The figures of one step, by name."""

    loss: float
    values: dict[str, tuple[float, int]]
    """(value, batch size) of each value that was logged, by name."""
    states: list[dict[str, tuple[int, dict[str, Tensor]]]]
    """For each microbatch, (number of updates, states) of each metric, by the metric's name."""

    @classmethod
    def of(cls, layout: Layout, numbers: Sequence[float]) -> Row:
        values, at = {}, 1
        for name in layout.calls:
            was_logged, value, batch_size = numbers[at : at + _PER_VALUE]
            if was_logged:
                values[name] = (value, int(batch_size))
            at += _PER_VALUE
        states: dict[str, tuple[int, dict[str, Tensor]]] = {}
        for metric, described in layout.states.items():
            updates, at, parts = int(numbers[at]), at + 1, {}
            for state, shape, dtype in described:
                count = shape.numel()
                parts[state] = (
                    torch.tensor(numbers[at : at + count], dtype=torch.float64).to(dtype).reshape(shape)
                )
                at += count
            states[metric] = (updates, parts)
        return cls(numbers[0], values, [states])

    @classmethod
    def joined(cls, rows: Sequence[Row], samples: Sequence[float], layout: Layout) -> Row:
        """Joins the rows of a batch's microbatches. Values are joined by their reduce_fx. Means, and the
        loss, are weighted by samples.
        """
        if len(rows) == 1:
            return rows[0]
        total = sum(samples)
        shares = [each / total for each in samples]
        values = {}
        for name in rows[0].values:
            found = [row.values[name] for row in rows]
            join = _JOINS.get(layout.calls[name].reduction, _mean)
            values[name] = (join([value for value, _ in found], shares), sum(size for _, size in found))
        return cls(
            sum(row.loss * share for row, share in zip(rows, shares, strict=True)),
            values,
            [states for row in rows for states in row.states],
        )


class _Rows(nn.Module):
    """A growing table of rows of equal width."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(0, 0, dtype=torch.float64)
        self.count = 0

    def add(self, head: Sequence[Any], row: Tensor) -> None:
        row = torch.cat([torch.stack([torch.as_tensor(one).to(row) for one in head]), row.detach()])
        if self.count == len(self.table):
            larger = row.new_zeros(max(64, 2 * self.count), len(row))
            larger[: self.count] = self.table.reshape(self.count, len(row)).to(row)
            self.table = larger
        self.table[self.count] = row
        self.count += 1

    def newest_first(self) -> Iterator[list[float]]:
        rows: list[list[float]] = self.table[: self.count].tolist()
        return reversed(rows)


class Recorder(nn.Module):
    """The loss of a run over Steps, which keeps a row for each call. Tracing and rehearsing also call it, so
    only the newest rows of a batch count. It is a module, because a run sends the state of a loss that is a
    module back to the caller.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained, self._held_out = _Rows(), _Rows()

    def forward(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
        loss = outputs["loss"]
        if "held_out" in outputs:
            self._held_out.add([batch["number"]], outputs["held_out"])
            return loss
        row = outputs["row"]
        self._trained.add([batch["number"], batch["total"], _batch_size_of(batch["batch"])], row)
        # The loss must depend on the row, so that the row is sent to the last stage. Its value does not
        # change.
        loss = torch.where(torch.zeros_like(loss, dtype=torch.bool), row.sum().to(loss.dtype), loss)
        return loss * batch["scale"] if "scale" in batch else loss

    def __deepcopy__(self, memo: Any) -> Recorder:
        """Returns the object itself, because an evaluation calls a copy of the loss, whose rows would be
        lost."""
        return self

    def begin(self) -> None:
        """Drops the rows of an earlier run. Call it before a run."""
        self._trained, self._held_out = _Rows(), _Rows()

    def trained(self) -> list[list[tuple[float, list[float]]]]:
        """Returns, for each batch in order, (samples, row) of each of its microbatches."""
        found: dict[int, list[tuple[float, list[float]]]] = {}
        for number, total, samples, *row in self._trained.newest_first():
            pieces = found.setdefault(int(number), [])
            if sum(count for count, _ in pieces) < total:
                pieces.insert(0, (samples, row))
        return [found[number] for number in sorted(found)]

    def held_out(self) -> list[list[float]]:
        """Returns the rows of the validation's batches, in order."""
        found: dict[int, list[float]] = {}
        for number, *row in self._held_out.newest_first():
            found.setdefault(int(number), row)
        return [found[number] for number in sorted(found)]


class Batches:
    """The batches first..end - 1 of a loader's epoch, each with its number. With accumulated gradients it
    yields several batches at a time, as Microbatches.

    Each worker reads the epoch in the same order for every part, because the random generators start from
    `seed`.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        first: int,
        end: int | None,
        *,
        seed: int,
        scales: Mapping[int, float],
        accumulated: int = 1,
        convert: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.loader = loader
        self.first = first
        self.end = end
        self.accumulated = accumulated
        self.has_lists = False
        """Whether the latest batch was a list."""
        self._seed = seed
        self._scales = dict(scales)
        self._convert = convert

    def __iter__(self) -> Iterator[Any]:
        items = self._items()
        if self.accumulated == 1:
            return items
        return map(Microbatches, iter(lambda: list(itertools.islice(items, self.accumulated)), []))

    def one_by_one(self) -> Batches:
        """Returns the same batches without accumulation."""
        other = copy.copy(self)
        other.accumulated = 1
        return other

    def _items(self) -> Iterator[dict[str, Any]]:
        seed_all(self._seed)
        for number, batch in enumerate(self.loader):
            if number == self.end:
                return
            if number >= self.first:
                yield self._item(number, batch)

    def _item(self, number: int, batch: Any) -> dict[str, Any]:
        self.has_lists = isinstance(batch, list)
        batch = _for_stages(batch)
        if self._convert is not None:
            batch = map_tensors(self._convert, batch)
        item = {"batch": batch, "number": torch.tensor(number), "total": torch.tensor(_batch_size_of(batch))}
        if self._scales:
            item["scale"] = torch.tensor(self._scales.get(number, 1.0))
        return item

    def __len__(self) -> int:
        length = len(self.loader) if self.end is None else self.end  # type: ignore[arg-type]
        return max(0, math.ceil((length - self.first) / self.accumulated))


def _for_stages(batch: Any) -> Any:
    """Converts a batch for the stages. Lists of tensors become tuples, because run() takes a list for one
    entry per sample. Texts become None, because they cannot cross a cut.
    """
    if isinstance(batch, str):
        return None
    if isinstance(batch, dict):
        return {name: _for_stages(value) for name, value in batch.items()}
    if not isinstance(batch, (list, tuple)) or hasattr(batch, "_fields"):
        return batch
    if batch and all(isinstance(one, str) for one in batch):
        return None
    if all(isinstance(one, (Tensor, list, tuple, dict)) for one in batch):
        return tuple(map(_for_stages, batch))
    return batch
