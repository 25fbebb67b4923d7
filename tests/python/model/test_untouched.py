"""untouched.py: what a module keeps is put back. test_boundary.py has buffers, gradients and generators."""

from __future__ import annotations

from collections import deque

import torch
from pipedream.model.untouched import untouched
from torch import Tensor, nn
from twins import TWINS


def _num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_hooks_that_a_forward_installs_are_gone_and_those_before_stay() -> None:
    """They stayed, while the attribute that says so was put back: the next forward installed them again, and
    a Mixtral whose router logits hooks collect had them twice."""
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


class _Remembers(nn.Module):
    """Of its minibatches, in every kind of attribute; what it gives depends on all of them."""

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
        remembered = [self.hidden, self.bank.sum(0), *self.latest, *self.history, *self.nested[0], noise]
        return sum(remembered, inputs * len(self.sizes) * self.counts["forwards"])


def test_what_a_forward_remembers_in_attributes_is_as_it_was() -> None:
    """Numbers and flags alone were put back: a hidden state, a memory bank or a list of what came before had
    seen the first minibatch twice or more when the training began, without a word."""
    model, fresh, inputs = _Remembers(), _Remembers(), torch.ones(4, 2)
    for _ in range(2):
        bank, history = model.bank, model.history
        with untouched([model]):
            model(inputs + 1)
            model(inputs + 2)
        assert model.bank is bank
        assert model.history is history
        assert torch.equal(model(inputs), fresh(inputs))
