"""Trains a model of models.py in three ways: as a pipeline, by pipedream.reference, and in a plain loop.

Worker processes import this module, so everything that they need is a module-level name. Comments call
pipedream.reference the oracle: it computes the expected numbers without workers.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pipedream
import torch
from models import CASES, LARGE_CASES, Batch, Case
from pipedream import RunResult, _core, reference
from pipedream.model.batches import call_model, parts_of
from pipedream.planning.plan import Plan
from torch import nn
from torch.utils.data import DataLoader

State = dict[str, torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
}


def weight_decay_by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Decays matrices only. The layers of the model called "0..." have another learning rate."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        decay = 0.1 if parameter.dim() > 1 else 0.0
        rate = 0.02 if name.startswith("0") else 0.05
        groups.setdefault((decay, rate), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay, "lr": rate} for (decay, rate), group in groups.items()]
    )


_OPTIONS = (
    *("schedule", "microbatches", "lr_scheduler", "recompute", "autocast", "max_grad_norm"),
    *("sync", "staleness", "sync_every"),
)


@dataclass(frozen=True)
class Training:
    """Describes a small training: model, data and options. It is equal in every process."""

    case_name: str
    num_stages: int
    dtype: torch.dtype = torch.float64
    optimizer: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["sgd"]
    num_minibatches: int = 7
    epochs: int = 1
    short_last: bool = True
    shuffled: bool = False
    seed: int | None = 1
    in_flight: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    """Replicas of each stage; () is one replica of each."""
    spares: tuple[int, ...] = ()
    """Spare shards of each stage; () is none."""
    schedule: str | pipedream.Program = "pipedream"
    microbatches: int = 1
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    recompute: bool | tuple[int, ...] | None = None
    autocast: str | None = None
    max_grad_norm: float | None = None
    sync: str = "bsp"
    staleness: int = 0
    sync_every: int = 1

    @property
    def case(self) -> Case:
        return {**CASES, **LARGE_CASES}[self.case_name]

    @property
    def plan(self) -> Plan:
        plan = self.case.plan(self.num_stages)
        program = self.schedule if isinstance(self.schedule, pipedream.Program) else None
        replicas = self.replicas or (program.replicas if program else ())
        if max(replicas, default=1) > 1:
            stages = zip(plan.stages, replicas, strict=True)
            plan = Plan(tuple(replace(stage, num_replicas=count) for stage, count in stages))
        if self.spares:
            plan = plan.with_spare_shards(self.spares)
        num_workers = 2 if self.schedule == "interleaved" else program.num_workers if program else None
        if num_workers is not None and num_workers < plan.num_stages:
            return Plan(tuple(replace(s, worker=i % num_workers) for i, s in enumerate(plan.stages)))
        return Plan(plan.stages, in_flight=self.in_flight) if self.in_flight else plan

    @property
    def num_workers(self) -> int:
        return self.plan.workers_used

    def model(self) -> nn.Sequential:
        return self.case.model(self.dtype)

    def data(self) -> Iterable[Batch]:
        batches = self.case.data(self.num_minibatches, self.dtype, short_last=self.short_last)
        # A list has the methods of a dataset that a DataLoader needs.
        return DataLoader(batches, batch_size=None, shuffle=True) if self.shuffled else batches  # type: ignore[arg-type]

    def options(self) -> dict[str, Any]:
        """Returns arguments for both pipedream.run and reference.run. Some arguments with default values are
        left out.
        """
        always = {
            "data": self.data(),
            "loss_fn": self.case.loss_fn,
            "optimizer": self.optimizer,
            "epochs": self.epochs,
            "seed": self.seed,
        }
        return always | {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in _OPTIONS and getattr(self, field.name) != field.default
        }


@dataclass(frozen=True)
class Overflowing(Training):
    """A training whose loss is so large that its first minibatches overflow float16 at the initial loss
    scale.
    """

    loss_factor: float = 30.0

    def options(self) -> dict[str, Any]:
        return super().options() | {"loss_fn": functools.partial(_large_loss, self.loss_factor)}


def _large_loss(factor: float, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return factor * nn.functional.mse_loss(outputs.float(), targets)


class CountingSGD(torch.optim.SGD):
    num_steps = 0
    """Steps in this process. Skipped updates do not count."""

    def step(self, closure: Any = None) -> Any:
        CountingSGD.num_steps += 1
        return super().step(closure)


class Unsized:
    """Minibatches that can be iterated again, but have no len(). So nobody knows the largest one before the
    run."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def train_in_pipeline(training: Training, **options: Any) -> tuple[RunResult, State]:
    """Runs a rank's part, or a whole local run. Only rank 0 gives the right initial weights."""
    model = training.model()
    if not is_rank_0():
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
    options = {**training.options(), "progress": False, **options}
    result = pipedream.run(model, training.plan, **options)
    return result, model.state_dict()


def is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def is_on_cuda() -> bool:
    """Returns whether workers compute on a GPU here. All workers of a test share it."""
    wanted = os.environ.get("PIPEDREAM_DEVICE", "auto")
    return wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available() and _core.cuda_available())


def state_of(model: nn.Module) -> State:
    """Returns the model's state_dict in host memory, as a pipeline run returns it."""
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@functools.cache
def train_by_reference(training: Training) -> tuple[reference.ReferenceResult, State]:
    """Trains by the oracle. The result is cached and shared: do not change it."""
    model = model_of_oracle(training)
    with torch.random.fork_rng():
        result = reference.run(model, training.plan, **training.options())
    return result, state_of(model)


def model_of_oracle(training: Training) -> nn.Module:
    """Returns the model on the same kind of device as the workers', so that random numbers and rounding are
    the same.
    """
    return training.model().to("cuda" if is_on_cuda() else "cpu")


def train_plainly(training: Training) -> tuple[list[float], State]:
    """Trains in a loop as any PyTorch user would write it, without autocast. It accumulates gradients, clips
    by the norm of all gradients, and steps the scheduler after each optimizer step.
    """
    assert training.autocast is None
    model = training.model()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = training.optimizer(parameters)
    scheduler = training.lr_scheduler(optimizer) if training.lr_scheduler else None
    losses = []
    if training.seed is not None:
        torch.manual_seed(training.seed)
    for _ in range(training.epochs):
        for inputs, targets in training.data():
            optimizer.zero_grad()
            losses.append(accumulate(model, training, inputs, targets))
            if training.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return losses, model.state_dict()


def accumulate(model: nn.Module, training: Training, inputs: Any, targets: Any) -> float:
    """Adds up a minibatch's gradients, microbatch by microbatch. Returns the minibatch's loss."""
    if training.microbatches == 1:
        loss = training.case.loss_fn(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()
    total = 0.0
    chunks = (torch.chunk(tensor, training.microbatches) for tensor in (inputs, targets))
    for some_inputs, some_targets in zip(*chunks, strict=True):
        loss = training.case.loss_fn(model(some_inputs), some_targets)
        loss = loss * (len(some_targets) / len(targets))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def train_module_plainly(
    model: nn.Module,
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
) -> list[float]:
    """Trains any module in a plain loop, on any data that run() takes."""
    optimizer = make_optimizer(model.parameters())
    losses = []
    for minibatch, batch in enumerate(data):
        inputs, targets = parts_of(batch, minibatch)
        optimizer.zero_grad()
        loss = loss_fn(call_model(model, inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
    return losses


def tolerance(dtype: torch.dtype) -> float:
    """Returns the relative difference that losses and weights may have if sums are added in another order."""
    return 1e-9 if dtype == torch.float64 else 1e-5


def assert_close_losses(losses: list[float], expected: list[float], relative: float) -> None:
    assert len(losses) == len(expected)
    for minibatch, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        assert abs(loss - wanted) <= relative * abs(wanted), f"minibatch {minibatch}: {loss}, not {wanted}"


def assert_close_state(state: State, expected: State, relative: float) -> None:
    """Asserts that states are equal: integers exactly, and floats up to `relative` of the tensor's largest
    element.
    """
    assert state.keys() == expected.keys()
    for name, wanted in expected.items():
        if not wanted.is_floating_point():
            assert torch.equal(state[name], wanted), name
            continue
        assert state[name].dtype == wanted.dtype
        difference = (state[name] - wanted).abs().max().item()
        assert difference <= relative * wanted.abs().max().item(), f"{name}: {difference}"


def assert_equal_state(state: State, expected: State) -> None:
    """Asserts that states are equal bit for bit."""
    assert state.keys() == expected.keys()
    for name, wanted in expected.items():
        assert torch.equal(state[name], wanted), name


def expected_versions(
    plan: Plan,
    num_minibatches: int,
    *,
    schedule: str | pipedream.Program = "pipedream",
    staleness: int = 0,
    microbatches: int = 1,
) -> list[list[tuple[int, int]]]:
    """Returns a list of stages, each a list of minibatches, each a pair of weight versions. The first is read
    by the forward of the minibatch's first microbatch, and the second by the backward of its last one.
    """
    how: dict[str, Any] = {"schedule": schedule, "staleness": staleness, "microbatches": microbatches}
    return [
        [(read[0][0], read[-1][1]) for read in of_stage]
        for of_stage in expected_microbatch_versions(plan, num_minibatches, **how)
    ]


def expected_microbatch_versions(
    plan: Plan, num_minibatches: int, *, schedule: str, staleness: int, microbatches: int
) -> list[list[list[tuple[int, int]]]]:
    """Returns a list of stages, of minibatches and of microbatches. For each microbatch it has the versions
    that its forward and its backward must read.
    """
    m, replicas = microbatches, [stage.num_replicas for stage in plan.stages]
    drains = schedule in ("flush", "gpipe", "interleaved", "model_parallel", "data_parallel")
    rounds = [math.lcm(m, *(replicas if drains else [count])) // m for count in replicas]

    def read(minibatch: int, microbatch: int, stage: int) -> tuple[int, int]:
        round_index = minibatch // rounds[stage]
        if drains:
            return round_index, round_index
        k = minibatch * m + microbatch
        own = [rounds[s] * m // replicas[s] for s in range(plan.num_stages)]
        forward = max(0, (k // replicas[stage] - plan.in_flight[stage] + 1) // own[stage] - staleness)
        if schedule == "vertical_sync":
            seen = max(0, (k // replicas[0] - plan.in_flight[0] + 1) // own[0])
            forward = seen * rounds[0] // rounds[stage]
        elif schedule == "2bw":
            forward = max(0, round_index - 1)
        return forward, round_index if schedule in ("naive", "unstashed") else forward

    return [
        [[read(i, q, stage) for q in range(m)] for i in range(num_minibatches)]
        for stage in range(plan.num_stages)
    ]
