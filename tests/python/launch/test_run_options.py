"""Tests run_options.py: its table of arguments agrees with the arguments that run() takes, with those that
ranks compare, and with docs/."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pipedream
import pytest
import torch
from pipedream.common.agreement import settings_of
from pipedream.launch.run_options import NEEDED, RUN_OPTIONS, check_arguments, options_table
from pipedream.links.options import LinkOptions
from pipedream.planning.job import Replication
from pipedream.stage.job import JobOptions, MemoryOptions, OutputOptions

_PAGE = Path(__file__).parents[3] / "docs" / "running.md"


def test_the_signature_of_run_has_the_names_and_defaults() -> None:
    of_run = [
        (name, NEEDED if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(pipedream.run).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    assert [(option.name, option.default) for option in RUN_OPTIONS] == of_run


def test_every_default_passes_its_own_check() -> None:
    check_arguments(**{option.name: option.default for option in RUN_OPTIONS if option.default is not NEEDED})


def test_ranks_compare_every_argument_but_each_ones_own_and_what_is_not_built() -> None:
    values = dict.fromkeys(field.name for field in dataclasses.fields(JobOptions))
    inside = {
        "links": LinkOptions(),
        "replication": Replication(),
        "memory": MemoryOptions(None, None),
        "output": OutputOptions("rank0", None, True),
    }
    compared = settings_of(JobOptions(**values | inside))  # type: ignore[arg-type]
    own = {"data", "loss_fn", "optimizer", "on_epoch_end", "bind", "ports", "insecure", "progress", "trace"}
    assert {option.name for option in RUN_OPTIONS if option.is_built} == set(compared) | own


def test_the_readme_has_the_table() -> None:
    assert options_table() in _PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", [o for o in RUN_OPTIONS if not o.is_built], ids=lambda option: option.name)
def test_another_value_of_what_is_not_built_is_refused(option: object) -> None:
    assert not check_arguments(**{option.name: option.default})  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"^{option.name} is 'x': this is not built yet, leave it at "):  # type: ignore[attr-defined]
        check_arguments(**{option.name: "x"})  # type: ignore[attr-defined]


def test_a_value_of_what_is_not_built_is_not_shown_at_length() -> None:
    with pytest.raises(ValueError, match=r"^recovery is ") as error:
        check_arguments(recovery=[(torch.randn(64, 64), torch.randn(64))] * 9)
    assert len(str(error.value)) < 200


def test_an_optimizer_that_was_made_already_is_refused_with_what_makes_one() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for name, value, example in (
        ("optimizer", optimizer, "torch.optim.SGD, lr=0.1"),
        ("optimizer", "sgd", "torch.optim.SGD, lr=0.1"),
        ("lr_scheduler", scheduler, "torch.optim.lr_scheduler.StepLR, step_size=1000"),
    ):
        text = f"^{name} is a {type(value).__name__}: give a function .* as functools.partial\\({example}\\)$"
        with pytest.raises(TypeError, match=text):
            check_arguments(**{name: value})
