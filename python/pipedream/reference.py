"""Reference: the slow, obvious, single-process oracle of the schedules, in plain PyTorch.

It keeps a full copy of every weight version that may still be read and computes minibatch after
minibatch, so it shows what numbers a schedule must give, not how to get them fast. The fast path is
compared with it. Random numbers: see seeding.py.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from .boundary import check_loss, check_pair, device_of, to_device
from .seeding import RngState, RngStream, base_seed, data_seed, seed_all, stage_seed
from .splitter import Model, PlannedStage, StageModule, split

__all__ = ["ReferenceResult", "run"]

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


class RunnablePlan(Protocol):
    """What a run needs of a plan; plan.Plan is one."""

    @property
    def stages(self) -> Sequence[PlannedStage]: ...
    @property
    def in_flight(self) -> Sequence[int]: ...


@dataclass
class ReferenceResult:
    losses: list[float]
    """One per minibatch, in order, unrounded."""
    versions: list[list[tuple[int, int]]]
    """versions[stage][minibatch] = (read by the forward, read by the backward)."""


def run(
    model: Model,
    plan: RunnablePlan,
    *,
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: OptimizerFactory,
    epochs: int = 1,
    schedule: str = "pipedream",
    seed: int | None = None,
) -> ReferenceResult:
    """Trains the model in place as the schedule would. Arguments as pipedream.run's.

    Weight stashing: minibatch i reads version max(0, i - n_s + 1) of stage s, n_s = plan.in_flight[s], in its
    forward and its backward; its gradient then updates the stage's newest version i to version i + 1.
    Buffers are not versioned. With one stage this is plain training, bit for bit. Raises ValueError for
    what cannot be run. Source: PipeDream (SOSP'19), section 3.3; design.md, section 4.
    """
    if schedule != "pipedream":
        raise ValueError(f"schedule is {schedule!r}: only 'pipedream' is built")
    if any(stage.num_replicas > 1 for stage in plan.stages):
        raise ValueError(
            "the plan has replicated stages, which are not built: use partition(..., straight=True)"
        )
    modules = split(model, plan)
    device = device_of(modules)
    with _random_streams(len(modules), seed) as streams:
        stages = [
            _Stage(module, in_flight, optimizer, stream)
            for module, in_flight, stream in zip(modules, plan.in_flight, streams, strict=True)
        ]
        losses = []
        for minibatch, (inputs, targets) in enumerate(_minibatches(data, epochs)):
            value = to_device(inputs, device)
            for stage in stages:
                value = stage.forward(minibatch, value)
            with stages[-1].stream:
                loss = check_loss(loss_fn(value, to_device(targets, device)), minibatch)
            # One graph through all stages: each parameter's gradient is at the version its stage read.
            loss.backward()  # type: ignore[no-untyped-call]
            for stage in stages:
                stage.update(minibatch)
            losses.append(loss.item())
    return ReferenceResult(losses, [stage.versions_read for stage in stages])


class _Stage:
    """One stage's weight versions, and its optimizer on the newest: the model's own parameters."""

    def __init__(
        self,
        module: StageModule,
        in_flight: int,
        optimizer: OptimizerFactory,
        stream: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.stream = stream
        self.versions_read: list[tuple[int, int]] = []
        self._module = module
        self._in_flight = in_flight
        # The names inside the stage module, which is what functional_call replaces by.
        self._newest = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._copies = {0: self._copy_newest()}
        self._leaves: dict[str, torch.Tensor] = {}
        named = module.trainable_parameters()
        self._optimizer = _make_optimizer(optimizer, named) if named else None

    def forward(self, minibatch: int, value: Any) -> Any:
        version = max(0, minibatch - self._in_flight + 1)
        for old in [held for held in self._copies if held < version]:
            del self._copies[old]
        self._leaves = {name: copy.detach().requires_grad_() for name, copy in self._copies[version].items()}
        self.versions_read.append((version, version))
        with self.stream:
            return torch.func.functional_call(self._module, self._leaves, (value,))

    def update(self, minibatch: int) -> None:
        for name, parameter in self._newest.items():
            parameter.grad = self._leaves[name].grad
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._copies[minibatch + 1] = self._copy_newest()

    def _copy_newest(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._newest.items()}


def _make_optimizer(
    optimizer: OptimizerFactory, named_parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer of one stage. It is called with a list of its parameters, or with a list of (name,
    parameter) pairs when its first argument is called `named_parameters`.

    Raises TypeError for what does not give a torch.optim.Optimizer.
    """
    if not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}: give a function of the parameters, for example "
            f"functools.partial(torch.optim.SGD, lr=0.05)"
        )
    wants_names = _first_argument(optimizer) == "named_parameters"
    made = optimizer(
        list(named_parameters) if wants_names else [parameter for _, parameter in named_parameters]
    )
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer returned a {type(made).__name__}: return a torch.optim.Optimizer")
    return made


def _first_argument(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):  # a builtin without a signature
        return None


@contextlib.contextmanager
def _random_streams(
    num_stages: int, seed: int | None
) -> Iterator[Sequence[contextlib.AbstractContextManager[Any]]]:
    if num_stages == 1:
        if seed is not None:
            seed_all(seed)
        yield [contextlib.nullcontext()]
        return
    base = base_seed(seed)
    caller_state = RngState.capture()
    try:
        seed_all(data_seed(base))
        yield [RngStream(stage_seed(base, stage_index)) for stage_index in range(num_stages)]
    finally:
        caller_state.restore()


def _minibatches(data: Iterable[Any], epochs: int) -> Iterator[tuple[Any, Any]]:
    minibatch = 0
    for epoch in range(epochs):
        first_of_epoch = minibatch
        for batch in data:
            yield check_pair(batch, minibatch)
            minibatch += 1
        if minibatch == first_of_epoch:
            raise ValueError(
                f"data yielded nothing in epoch {epoch}: give data that can be iterated once per epoch, as a "
                f"DataLoader or a list"
            )
