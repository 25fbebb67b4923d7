"""Validation describes held-out data on which a run evaluates its weights. Any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipedream.common.checks import check_data, check_function, is_whole

__all__ = ["LOSS", "Metric", "Validation", "check_validation"]

LOSS = "loss"
"""The name of the loss among the figures of every evaluation."""

Metric = Callable[[Any, Any], tuple[Any, Any] | Mapping[str, Any]]


@dataclass(frozen=True)
class Validation:
    """Held-out data that a run evaluates inside its pipeline.

    data: yields (inputs, targets) or dicts, as the training's data do. Each evaluation iterates it from the
        start, so give a DataLoader or a list.
    metrics: functions by name, (outputs, targets) -> (sum, count). The last stage calls them for each
        validation minibatch. An evaluation's figure is the sum of all sums over the sum of all counts. The
        loss is always measured.
    every: "epoch", or a number of minibatches, which is rounded up to the next point where all replicas have
        made their updates.
    outputs: True calls each metric once, with lists of all outputs and all targets. The lists are in host
        memory and take 4 GiB at most. A function of (outputs, targets) is called for each minibatch; its
        result is kept in place of the outputs. In both cases a metric may also return several figures by
        name, {"f1": 0.9}.
    ema: True evaluates the averages of callbacks.EMA in place of the weights.
    forward: (model, inputs) -> outputs, in place of the model's own forward in eval mode.
    """

    data: Iterable[Any]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    every: str | int = "epoch"
    outputs: bool | Callable[[Any, Any], Any] = False
    ema: bool = False
    forward: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        check_data("validation: data", self.data)
        if isinstance(self.data, Iterator):
            raise ValueError(
                "validation: data is an iterator, which can be read once, and every evaluation reads it:"
                " give a DataLoader, a list, or an object whose __iter__ starts again"
            )
        if not isinstance(self.metrics, Mapping):
            raise TypeError(
                f"validation: metrics is a {type(self.metrics).__name__}: give functions by name, as"
                ' {"accuracy": fn}'
            )
        for name, metric in self.metrics.items():
            if not isinstance(name, str) or name in ("", LOSS):
                raise ValueError(f"validation: a metric is called {name!r}: give it another name")
            check_function(f"validation: metric {name!r}", metric)
        is_number_of_minibatches = is_whole(self.every) and int(self.every) >= 1
        if self.every != "epoch" and not is_number_of_minibatches:
            raise ValueError(f"validation: every is {self.every!r}: use 'epoch' or a number of minibatches")
        if self.forward is not None:
            check_function("validation: forward", self.forward)
        if not isinstance(self.outputs, bool):
            check_function("validation: outputs", self.outputs)

    def functions(self) -> list[Callable[..., Any]]:
        """Returns the user's functions."""
        others = (self.forward, self.outputs)
        return [*self.metrics.values(), *(each for each in others if callable(each))]

    def said(self) -> str:
        """Returns the text that all ranks compare."""
        names = ", ".join(sorted(self.metrics))
        given = (
            f", outputs={self.outputs is True or 'function'}" * bool(self.outputs)
            + ", ema" * self.ema
            + ", forward" * (self.forward is not None)
        )
        return f"every={self.every!r}, metrics ({names}){given}"


def check_validation(name: str, value: Any) -> None:
    """Raises TypeError if this argument of run() is no Validation."""
    if value is not None and not isinstance(value, Validation):
        raise TypeError(
            f"{name} is a {type(value).__name__}: give pipedream.Validation(data, metrics=..., every=...)"
        )
