"""untouched.py: what a module keeps is put back. test_boundary.py has buffers, gradients and generators."""

from __future__ import annotations

import torch
from pipedream.model.untouched import untouched
from torch import nn
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
