"""Tests calls.py: calls of modules are recorded, and the modules stay unchanged otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipedream.model.calls import calls_seen, is_compiled, visible_modules
from torch import nn


class _Doubling(nn.Linear):
    """A module that does something around its forward, as checkpointing modules do."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return 2 * super().__call__(*arguments, **keywords)


def _noting(noted: list[Any]) -> Callable[..., Any]:
    def handle(module: nn.Module, call: Callable[[], Any]) -> Any:
        output = call()
        noted.append((module, output))
        return output

    return handle


def test_a_call_is_seen_with_its_hooks_and_what_the_class_does_around_it() -> None:
    module, x, noted = _Doubling(2, 2), torch.ones(2), []  # type: ignore[var-annotated]
    module.register_forward_hook(lambda module, args, output: output + 1)
    expected = module(x)
    with calls_seen([module], _noting(noted)):
        assert type(module).__name__ == "_Doubling"
        assert isinstance(module, _Doubling)
        assert torch.equal(module(x), expected)
        assert torch.equal(noted[0][1], expected)
    module(x)
    assert len(noted) == 1
    assert type(module) is _Doubling


def test_what_the_handler_gives_is_what_the_caller_gets_and_the_call_need_not_be_made() -> None:
    module = nn.Linear(2, 2)
    with calls_seen([module], lambda module, call: "given"):
        assert module() == "given"


def test_an_error_leaves_the_modules_as_they_were() -> None:
    modules = [nn.Linear(2, 2), nn.ReLU()]
    with pytest.raises(KeyError), calls_seen(modules, _noting([])):
        raise KeyError
    assert [type(module) for module in modules] == [nn.Linear, nn.ReLU]
    assert not any("_pipedream" in name for module in modules for name in vars(module))


def test_modules_are_visible_by_their_first_name_but_for_those_in_compiled_ones() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), shared), nn.Sequential(shared, nn.Tanh()))
    assert visible_modules(model) == [*model.named_modules()][1:]
    model[1].compile(backend="eager")
    assert [name for name, _ in visible_modules(model)] == ["0", "0.0", "0.1", "1"]


def test_a_module_whose_calls_are_seen_is_not_taken_for_a_compiled_one() -> None:
    """If it were taken for a compiled module, the calls of its parts would no longer be seen."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU()))
    model[1].compile(backend="eager")
    with calls_seen([model[0], model[1]], _noting([])), calls_seen([model[0]], _noting([])):
        assert [is_compiled(module) for module in model] == [False, True]
        assert [name for name, _ in visible_modules(model)] == ["0", "0.0", "1"]
