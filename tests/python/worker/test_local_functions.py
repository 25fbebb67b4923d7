"""Tests local_functions.py: functions that workers cannot import by name arrive unchanged, or are refused."""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipedream.worker.task_files import read_part, write_part

TOP = 7
by_name = lambda value: value + TOP  # noqa: E731


def _sent(folder: Path, value: Any) -> Any:
    write_part(folder, "loss_fn", value, "give a function of a module")
    return read_part(folder, "loss_fn")


def _makers() -> dict[str, Callable[..., Any]]:
    rate, name, pair, rounded = 0.5, "rate", (1, (2, torch.float64)), math.floor

    def with_defaults(value: int, other: int = 3, *, factor: int = 2) -> int:
        return (value + other) * factor

    with_defaults.note = "kept"  # type: ignore[attr-defined]

    def with_plain_values(value: float) -> tuple[Any, ...]:
        return name, pair, rounded(value * rate), torch.nn.functional.relu is by_name

    return {"defaults": with_defaults, "plain": with_plain_values, "lambda": lambda value: value * TOP}


def test_lambdas_and_functions_made_in_others_do_what_they_did(tmp_path: Path) -> None:
    made = _makers()
    arrived = {name: _sent(tmp_path, function) for name, function in made.items()}
    assert arrived["defaults"](1) == 8 and arrived["defaults"](1, 1, factor=5) == 10
    assert arrived["defaults"].note == "kept"
    assert arrived["defaults"].__qualname__ == made["defaults"].__qualname__
    assert arrived["plain"](3.0) == ("rate", (1, (2, torch.float64)), 1, False)
    assert arrived["lambda"](2) == 14
    assert _sent(tmp_path, by_name)(1) == 8
    assert arrived["lambda"].__globals__ is globals()  # the module's global names are shared, not copied


def test_a_function_that_can_be_imported_is_sent_by_its_name(tmp_path: Path) -> None:
    assert _sent(tmp_path, _sent) is _sent
    assert _sent(tmp_path, torch.nn.functional.relu) is torch.nn.functional.relu


class _Holder:
    pass


def _in_a_closure(held: Any) -> Callable[..., Any]:
    return lambda outputs: (outputs, held)


def _as_a_default(held: Any) -> Callable[..., Any]:
    return lambda outputs, own=held: (outputs, own)


def _as_a_keyword_default(held: Any) -> Callable[..., Any]:
    return lambda outputs, *, own=held: (outputs, own)


def _as_an_attribute(held: Any) -> Callable[..., Any]:
    made: Any = lambda outputs: outputs  # noqa: E731
    made.held = held
    return made


@pytest.mark.parametrize(
    ("made", "how"),
    [
        (_in_a_closure, "as 'held' of the function around it"),
        (_as_a_default, "as the default of 'own'"),
        (_as_a_keyword_default, "as the default of 'own'"),
        (_as_an_attribute, "as its attribute 'held'"),
    ],
    ids=lambda made: getattr(made, "__name__", None),
)
@pytest.mark.parametrize(
    ("held", "named"),
    [
        ([], "a list"),
        ({}, "a dict"),
        (torch.ones(1), "a Tensor"),
        (torch.nn.Linear(1, 1), "a Linear"),
        (_Holder(), "a _Holder"),
        ((1, [2]), "a tuple with a list"),
        (_Holder().__init__, "a method-wrapper"),
    ],
    ids=lambda held: type(held).__name__,
)
def test_one_that_shares_more_than_plain_values_with_its_caller_is_refused_by_what_it_holds(
    tmp_path: Path, held: Any, named: str, made: Callable[[Any], Callable[..., Any]], how: str
) -> None:
    # For example, a loss may collect its terms in a list that is a default argument. The caller's list would
    # stay empty.
    said = f"<lambda> holds {named} {how}, of which each worker would have a copy"
    with pytest.raises(ValueError, match=re.escape("cannot be sent to the workers: ")) as refused:
        _sent(tmp_path, made(held))
    assert said in str(refused.value)


def test_functions_and_methods_that_one_holds_come_with_it(tmp_path: Path) -> None:
    """Tests a function that wraps another, and a forward that calls the forward that it replaces."""
    module = torch.nn.Linear(2, 2)
    former, twice = module.forward, lambda value: 2 * value
    module.forward = lambda value: twice(former(value))  # type: ignore[method-assign]
    arrived = _sent(tmp_path, torch.nn.Sequential(module, torch.nn.ReLU()))
    value = torch.ones(1, 2)
    assert torch.equal(arrived[0](value), 2 * torch.nn.functional.linear(value, module.weight, module.bias))
    loss, arrived_loss = lambda outputs: former(outputs).sum(), None
    arrived_loss = _sent(tmp_path, loss)
    assert torch.equal(arrived_loss(value), loss(value))


def test_one_that_was_replaced_arrives_as_it_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda module, value: former(module, value) + 1)
    patched = _sent_before(tmp_path, torch.nn.Linear.forward)
    module, value = torch.nn.Linear(2, 2), torch.ones(1, 2)
    expected = former(module, value) + 1
    monkeypatch.undo()  # a worker has not replaced the function
    assert torch.equal(patched()(module, value), expected)


def _sent_before(folder: Path, value: Any) -> Callable[[], Any]:
    write_part(folder, "loss_fn", value, "")
    return lambda: read_part(folder, "loss_fn")


def test_one_that_holds_itself_is_refused(tmp_path: Path) -> None:
    def factorial(number: int) -> int:
        return 1 if number == 0 else number * factorial(number - 1)

    with pytest.raises(ValueError, match="holds itself as 'factorial' of the function around it: define it"):
        _sent(tmp_path, factorial)


def test_the_default_at_fault_is_named_among_others(tmp_path: Path) -> None:
    def function(first: int, second: int = 2, third: Any = (), *, fourth: Any = [1]) -> None:  # noqa: B006
        pass

    with pytest.raises(ValueError, match="holds a list as the default of 'fourth'"):
        _sent(tmp_path, function)
    function.__kwdefaults__.clear()
    function.__defaults__ = (2, {})
    with pytest.raises(ValueError, match="holds a dict as the default of 'third'"):
        _sent(tmp_path, function)


def test_one_whose_name_has_no_value_yet_is_refused(tmp_path: Path) -> None:
    function = lambda: later  # noqa: E731
    with pytest.raises(ValueError, match="reads 'later' of the function around it, which has no value yet"):
        _sent(tmp_path, function)
    later = 3
    assert function() == later


def test_one_of_a_notebook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker would have the function's code, but not the notebook's names that the code reads.
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    exec("scale = 2\ndouble = lambda value: value * scale", vars(notebook))
    with pytest.raises(ValueError, match="cannot be sent to the workers"):
        _sent(tmp_path, notebook.double)
    notebook.__file__ = "script.py"
    assert _sent(tmp_path, notebook.double)(2) == 4
