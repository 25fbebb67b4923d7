"""Tests compiling.py: its regions import the compiler's modules, or keep the compiler from being imported."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
from pipedream.common.compiling import unmarked_until_compiling


def _plain(value: int) -> str:
    return f"plain {value}"


@functools.wraps(_plain)
def _marked(value: int) -> str:
    return f"marked {_plain(value)}"


def test_the_mark_counts_from_the_import_of_the_compiler_on(monkeypatch: pytest.MonkeyPatch) -> None:
    call = unmarked_until_compiling(_marked)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert call(1) == "plain 1"
    compiler: Any = object()
    monkeypatch.setitem(sys.modules, "torch._dynamo", compiler)
    assert call(2) == "marked plain 2"


def test_what_has_no_mark_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert unmarked_until_compiling(_plain)(1) == "plain 1"


_TRAINS = """
import functools, sys, torch
from pipedream import optim
from pipedream.budget.footprint import make_meter
from pipedream.model.stage_calls import run_backward
from pipedream.model.factories import try_factories
from pipedream.stage.job import CallerSettings
CallerSettings.capture().apply()
layer = torch.nn.Linear(2, 2)
optimizer = optim.SGD(layer.parameters(), lr=0.1)
with make_meter(torch.device("cpu")) as meter:
    layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert meter.peak_bytes > 0
run_backward([layer(torch.ones(1, 2))], [torch.ones(1, 2)])
adam = functools.partial(torch.optim.Adam, lr=0.1)
(made,) = try_factories([list(layer.named_parameters())], adam, None, "cpu")
print(type(made).__name__, {"torch._dynamo", "torch.fx.experimental.symbolic_shapes"} & {*sys.modules})
torch.optim.Adam(layer.parameters())
print("torch._dynamo" in sys.modules)
"""


def test_the_meter_a_native_step_a_stages_backward_and_a_tried_factory_do_without_the_compiler() -> None:
    ended = subprocess.run([sys.executable, "-c", _TRAINS], capture_output=True, text=True, check=True)
    assert ended.stdout == "Adam set()\nTrue\n"
