"""Trains many runs at once in one process. Each run reads the weight versions that a pipeline would read.

The runs differ only in their seeds and learning rates. The parameters of a run are a row of one tensor, so
one operation of torch computes all runs. Microbatches that read the same version at a stage are computed
together; batch norm still sees each microbatch by itself. The pipeline is straight and its stages are equal,
so stage s of S has S - s microbatches in flight.

    a minibatch   1. forward, stage by stage; each group of microbatches reads its own weight version
                  2. for the schedule unstashed: overwrites the versions that were read with the newest
                  3. backward of all stages; the gradients of all versions are added
                  4. one update of all stages

tests/python/test_study.py compares losses and weights with pipedream.reference.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pipedream
import torch
from optimizers import REAL, STACKED, Optimizer, Span
from pipedream import reference
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

Loss = Callable[[Tensor, Tensor], Tensor]

SCHEDULES = ("flush", "pipedream", "unstashed", "2bw")


@dataclass(frozen=True)
class Setting:
    """A schedule on a straight pipeline of equal stages."""

    schedule: str
    num_stages: int
    microbatches: int

    def version_read(self, stage: int, minibatch: int, microbatch: int) -> int:
        """Returns the version that this microbatch's forward reads, by the formulas of docs/schedules.md."""
        if self.schedule == "flush":
            return minibatch
        if self.schedule == "2bw":
            return max(0, minibatch - 1)
        in_flight = self.num_stages - stage
        number = minibatch * self.microbatches + microbatch
        return max(0, (number - in_flight + 1) // self.microbatches)

    def groups(self, stage: int, minibatch: int) -> list[tuple[int, int]]:
        """Returns pairs (version, number of microbatches that read it), in the order of the microbatches."""
        read = (self.version_read(stage, minibatch, q) for q in range(self.microbatches))
        return [(version, len(list(same))) for version, same in itertools.groupby(read)]

    def oldest_read(self, minibatch: int) -> int:
        return self.version_read(0, minibatch, 0)


@dataclass
class _Leaf:
    """One parameter of all runs, at the version that some microbatches read."""

    name: str
    version: int
    tensor: Tensor


class Stack:
    """Trains the runs of one setting. Their models differ only in the initial values."""

    def __init__(
        self,
        models: Sequence[nn.Sequential],
        rates: Sequence[float],
        setting: Setting,
        optimizer: str,
        loss_fn: Loss,
    ) -> None:
        self._setting, self._loss_fn = setting, loss_fn
        self._model = models[0]
        self._num_runs = len(models)
        self._stages = _equal_stages(models[0], setting.num_stages)
        self._spans = _spans(models[0])
        self._places = {name: (first, shape) for name, first, shape in self._spans}
        self._versions = {0: torch.stack([_row(model) for model in models])}
        dtype = self._versions[0].dtype
        self._optimizer: Optimizer = STACKED[optimizer](
            torch.tensor(rates, dtype=dtype)[:, None], self._spans
        )
        self._norms = _Norms(models[0], self._num_runs)
        self._num_done = 0

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Trains each run on one minibatch, and returns the losses. `inputs` and `targets` have the shape
        (runs, samples, ...).
        """
        minibatch = self._num_done
        leaves: list[_Leaf] = []
        value = inputs
        size = inputs.shape[1] // self._setting.microbatches
        if size * self._setting.microbatches != inputs.shape[1]:
            raise ValueError(
                f"{inputs.shape[1]} samples do not make {self._setting.microbatches} microbatches alike"
            )
        with self._norms.observed():
            for stage_index, layers in enumerate(self._stages):
                outputs, begin = [], 0
                for version, count in self._setting.groups(stage_index, minibatch):
                    part = value[:, begin : begin + count * size]
                    begin += count * size
                    parameters = self._leaves(version, layers, leaves)
                    outputs.append(self._call(layers, parameters, part, size))
                value = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
            losses: Tensor = vmap(self._loss_fn)(value, targets)
        if self._setting.schedule == "unstashed":
            for leaf in leaves:
                if leaf.version != minibatch:
                    # Written through .data, because autograd would refuse a change of tensors that it saved.
                    leaf.tensor.data.copy_(self._part(leaf.name, minibatch))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        gradients = torch.zeros_like(self._versions[minibatch])
        for leaf in leaves:
            assert leaf.tensor.grad is not None
            first, shape = self._places[leaf.name]
            gradients[:, first : first + shape.numel()] += leaf.tensor.grad.flatten(1)
        self._versions[minibatch + 1] = self._optimizer.step(self._versions[minibatch], gradients)
        self._num_done += 1
        for version in [v for v in self._versions if v < self._setting.oldest_read(self._num_done)]:
            del self._versions[version]
        return losses.detach()

    def weights(self, run: int) -> dict[str, Tensor]:
        """Returns the newest weights of one run, and its running statistics."""
        row = self._versions[self._num_done][run]
        values = {n: row[first : first + shape.numel()].view(shape) for n, first, shape in self._spans}
        return values | {name: value[run] for name, value in self._norms.statistics.items()}

    @torch.no_grad()
    def evaluate(self, judge: Callable[[nn.Module], float]) -> list[float]:
        """Returns judge(model) for the model of each run."""
        found = []
        for run in range(self._num_runs):
            self._model.load_state_dict(self.weights(run), strict=False)
            found.append(judge(self._model))
            self._model.train()
        return found

    def _leaves(self, version: int, layers: nn.Sequential, leaves: list[_Leaf]) -> dict[str, Tensor]:
        """Returns these layers' parameters at a version, by name, and adds them to `leaves`."""
        named = {}
        for name, _ in layers.named_parameters():
            part = self._part(name, version)
            # This leaf is overwritten before the backward. It is contiguous, because otherwise an operation
            # could save a contiguous copy for its backward, which would not be overwritten.
            leaf = part.clone() if self._setting.schedule == "unstashed" else part
            named[name] = leaf.requires_grad_()
            leaves.append(_Leaf(name, version, leaf))
        return named

    def _part(self, name: str, version: int) -> Tensor:
        """Returns one parameter of all runs, at a version."""
        first, shape = self._places[name]
        return self._versions[version][:, first : first + shape.numel()].unflatten(1, shape).detach()

    def _call(self, layers: nn.Sequential, parameters: dict[str, Tensor], value: Tensor, size: int) -> Tensor:
        def call(parameters: dict[str, Tensor], value: Tensor) -> tuple[Tensor, list[Tensor]]:
            outputs: Tensor = functional_call(layers, parameters, (value,))
            return outputs, self._norms.take()

        if not self._norms:
            outputs: Tensor = vmap(call)(parameters, value)[0]
            return outputs
        microbatches = value.unflatten(1, (-1, size))
        outputs, observed = vmap(vmap(call, in_dims=(None, 0)))(parameters, microbatches)
        self._norms.observe(layers, [each.flatten(1, 2) for each in observed])
        return outputs.flatten(1, 2)


def difference_from_reference(
    model: nn.Sequential,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Loss,
    setting: Setting,
    optimizer: str,
    rate: float = 0.01,
) -> float:
    """Trains these minibatches in float64, once here and once by pipedream.reference. Returns the largest
    difference of a loss, a weight or a running statistic. The reference trains `model` itself.
    """
    model.double().train()
    exact = [(x.double() if x.is_floating_point() else x, y) for x, y in batches]
    stack = Stack([copy.deepcopy(model)], [rate], setting, optimizer, loss_fn)
    losses = [float(stack.train(inputs[None], targets[None])) for inputs, targets in exact]
    result = reference.run(
        model,
        pipedream.Plan.straight(len(model), setting.num_stages),
        data=exact,
        loss_fn=loss_fn,
        optimizer=functools.partial(REAL[optimizer], lr=rate),
        schedule=setting.schedule,
        microbatches=setting.microbatches,
        seed=1,
    )
    expected, found = model.state_dict(), stack.weights(0)
    differences = [float((found[name] - expected[name]).abs().max()) for name in found]
    return max(*differences, *(abs(a - b) for a, b in zip(losses, result.losses, strict=True)))


class _Norms:
    """Updates the running statistics of a stack's batch norms, once per minibatch, with all its
    microbatches."""

    def __init__(self, model: nn.Module, num_runs: int) -> None:
        self._named = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
        self._taken: list[Tensor] = []
        self._inputs: dict[nn.Module, list[Tensor]] = {}
        self.statistics = {
            f"{name}.{kind}": getattr(norm, kind).expand(num_runs, -1).clone()
            for name, norm in self._named.items()
            for kind in ("running_mean", "running_var")
        }

    def __bool__(self) -> bool:
        return bool(self._named)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Observes the forward of a minibatch, as a context. At its end the running statistics are
        updated.
        """
        hooks = [norm.register_forward_pre_hook(self._keep) for norm in self._named.values()]
        for norm in self._named.values():
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm, hook in zip(self._named.values(), hooks, strict=True):
                norm.track_running_stats = True
                hook.remove()
        self._step()

    def _keep(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._taken.append(inputs[0].detach())

    def take(self) -> list[Tensor]:
        """Returns the inputs of the norms that were called since the last take(), in the order of the
        calls."""
        taken, self._taken = self._taken, []
        return taken

    def observe(self, layers: nn.Module, inputs: list[Tensor]) -> None:
        called = [module for module in layers.modules() if isinstance(module, _BatchNorm)]
        for norm, seen in zip(called, inputs, strict=True):
            self._inputs.setdefault(norm, []).append(seen)

    @torch.no_grad()
    def _step(self) -> None:
        for name, norm in self._named.items():
            inputs = torch.cat(self._inputs[norm], dim=1)  # has the shape (runs, samples, channels, ...)
            values = inputs.transpose(1, 2).flatten(2)
            assert norm.momentum is not None
            for kind, seen in (("running_mean", values.mean(2)), ("running_var", values.var(2))):
                self.statistics[f"{name}.{kind}"].lerp_(seen, norm.momentum)
        self._inputs.clear()


def _equal_stages(model: nn.Sequential, num_stages: int) -> list[nn.Sequential]:
    size, left = divmod(len(model), num_stages)
    if left:
        raise ValueError(f"{len(model)} layers do not make {num_stages} stages alike")
    return [model[first : first + size] for first in range(0, len(model), size)]


def _spans(model: nn.Module) -> list[Span]:
    spans, first = [], 0
    for name, parameter in model.named_parameters():
        spans.append((name, first, parameter.shape))
        first += parameter.numel()
    return spans


def _row(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
