"""Tests untouched.py: the attributes of a module are restored. test_boundary.py tests buffers, gradients and
generators."""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from pipedream.model.untouched import untouched
from torch import Tensor, nn
from twins import TWINS


def _num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_hooks_that_a_forward_installs_are_gone_and_those_before_stay() -> None:
    """The hooks that a forward installs must be removed together with the flag that says that they are
    installed. If only the flag were reset, the next forward would install them again, and a Mixtral would
    collect all router logits twice.
    """
    twin = TWINS["routed"]
    model, (inputs, _) = twin.model(), twin.data(1)[0]
    seen: list[str] = []
    model.last.register_forward_hook(lambda module, args, output: seen.append("last"))
    for _ in range(2):
        with untouched([model]):
            model(inputs)
        assert _num_hooks(model) == 1
    model(inputs)
    model(inputs)
    assert _num_hooks(model) == 1 + len(model.blocks)
    assert seen == ["last"] * 4


def test_a_hook_that_removes_itself_is_there_again() -> None:
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(lambda module, args, output: handle.remove())
    with untouched([model]):
        model(torch.zeros(1, 2))
        assert _num_hooks(model) == 0
    assert _num_hooks(model) == 1


@dataclass
class _Record:
    mean: Tensor
    count: int = 0


@dataclass(slots=True)
class _Slotted:
    count: int


class _Recent(list[Tensor]):
    total = 0


class _Remembers(nn.Module):
    """Remembers its minibatches in every kind of attribute. Its output depends on all of these."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(2)
        self.bank = torch.zeros(3, 2)
        self.latest: deque[Tensor] = deque(maxlen=2)
        self.history: list[Tensor] = []
        self.counts = {"forwards": 0}
        self.sizes: set[int] = set()
        self.nested = ([torch.zeros(2)],)
        self.generator = torch.Generator()
        self.numbers = np.zeros(2)
        self.draws = [random.Random(1), np.random.default_rng(1), np.random.RandomState(1)]
        self.record = _Record(torch.zeros(2))
        self.slotted = _Slotted(0)
        self.recent = _Recent()
        self.long = [0] * 2000
        self.frame = torch.zeros(2)
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        mean = inputs.mean(0)
        self.hidden = self.hidden + mean
        self.bank[len(self.history)] = mean
        self.latest.append(mean)
        self.history.append(mean)
        self.counts["forwards"] += 1
        self.sizes.add(len(inputs) + self.counts["forwards"])
        self.nested[0][0] += mean
        noise = torch.rand(2, generator=self.generator)
        self.numbers += 1
        self.record.count += 1
        self.record.mean.data += mean
        self.slotted.count += 1
        self.recent.append(mean)
        self.recent.total += 1
        self.long.append(len(self.long))
        self.frame.data += mean
        self.scale.data += mean
        python, numpy, old_numpy = self.draws
        drawn = python.random() + numpy.random() + old_numpy.random_sample()
        numbers = [
            self.numbers[0],
            self.record.count,
            self.slotted.count,
            len(self.recent),
            self.recent.total,
        ]
        noise = noise + drawn + sum(numbers) + len(self.long) + self.record.mean + self.frame + self.scale
        remembered = [self.hidden, self.bank.sum(0), *self.latest, *self.history, *self.nested[0], noise]
        return sum(remembered, inputs * len(self.sizes) * self.counts["forwards"])


def test_what_a_forward_remembers_in_attributes_is_as_it_was() -> None:
    """Numbers, flags, a hidden state, a memory bank and a list are all restored. Otherwise the training would
    begin with a module that has seen the first minibatch.
    """
    model, fresh, inputs = _Remembers(), _Remembers(), torch.ones(4, 2)
    for _ in range(2):
        bank, history = model.bank, model.history
        with untouched([model]):
            model(inputs + 1)
            model(inputs + 2)
        assert model.bank is bank
        assert model.history is history
        assert torch.equal(model(inputs), fresh(inputs))


def test_a_flag_that_says_what_is_trained_is_as_it_was() -> None:
    """A model may freeze a layer while it is profiled. The layer must not stay frozen in the training."""
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with untouched([model]):
        model.requires_grad_(False)
        model.bias.requires_grad_(True)
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False]


def test_an_object_of_another_library_and_what_it_holds_are_left_alone() -> None:
    model, lock = nn.Linear(2, 2), threading.Lock()
    model.lock, model.log = lock, logging.getLogger("pipedream.tests")
    with untouched([model]):
        model.log.setLevel(logging.ERROR)
        lock.acquire()
    assert lock.locked()
    assert model.log.level == logging.ERROR


def test_tensors_that_are_not_a_number_or_no_plain_memory_are_compared() -> None:
    model = nn.Linear(2, 2)
    model.expanded = torch.full((1,), torch.nan).expand(3)
    model.sparse = torch.eye(2).to_sparse()
    model.on_meta = torch.empty(2, device="meta")
    with untouched([model]):
        model(torch.zeros(1, 2))
    assert model.expanded.isnan().all()


_steps = 0
_counts = {"losses": 0}
_mean: Tensor | None = None
_loaded: list[str] | None = None


def _count() -> None:
    global _steps
    _steps += 1


def _counting_loss(output: Tensor, _: Tensor) -> Tensor:
    global _mean, _loaded
    _count()
    _counts["losses"] += 1
    _mean = output.detach().mean()
    _loaded = _loaded or ["a table"]
    return output.mean() * _steps


class _CountsInGlobals(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        _count()
        return value * _steps


def test_what_code_counts_in_global_names_is_as_it_was() -> None:
    """A loss may count its steps by `global step`. The trace and the rehearsal must not count as steps."""
    model, value = _CountsInGlobals(), torch.ones(2)
    with untouched([model], _counting_loss):
        for _ in range(2):
            _counting_loss(model(value), value)
        assert _steps == 4
    assert (_steps, _mean, _counts) == (0, None, {"losses": 0})
    assert _loaded == ["a table"]  # stays, because it would only be loaded again


@dataclass(slots=True)
class _State:
    steps: int = 0


_list, _log, _tally, _tensor = [0], [0.5], Counter("a"), torch.zeros(())
_state, _space, _loaded_names = _State(), SimpleNamespace(steps=0), list[str]()
_queue: queue.Queue[int] = queue.Queue()


class _CountsInObjects(nn.Module):
    steps = 0

    def forward(self, value: Tensor) -> Tensor:
        _list[0] += 1
        _log.append(_list[0] / 2)
        _tally["b"] += 1
        _tensor.add_(1)
        _state.steps += 1
        _space.steps += 1
        type(self).steps += 1
        _queue.put(1)
        _loaded_names.append("a name")
        return value * _list[0] * _state.steps


def test_what_code_counts_in_global_objects_is_as_it_was() -> None:
    """Trial runs must not change counts in global objects and lists."""
    model, value = _CountsInObjects(), torch.ones(2)
    with untouched([model]):
        assert model(model(value)).tolist() == [4.0, 4.0]
        assert _CountsInObjects.steps == 2
    assert (_list, _log, _tally, _tensor.item()) == ([0], [0.5], {"a": 1}, 0)
    assert (_state.steps, _space.steps, _CountsInObjects.steps) == (0, 0, 0)
    # Not restored: a library's queue, and names that are loaded once.
    assert _queue.unfinished_tasks == 2 and len(_loaded_names) == 2
