"""Tests training_arguments.py: it refuses, by name, an argument that a pipeline cannot honour."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pipedream.integrations.training_arguments import REFUSED, check_training_arguments


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_argument_is_named_with_its_value_and_the_remedy(name: str) -> None:
    message = f"{name} of TrainingArguments is 'given', which a pipeline refuses: "
    with pytest.raises(ValueError, match=message):
        check_training_arguments(SimpleNamespace(**{name: "given"}))


def test_what_stands_for_nothing_is_not_refused() -> None:
    given = zip(REFUSED, [None, False, "", [], {}, SimpleNamespace(value="no")] * 4, strict=False)
    check_training_arguments(SimpleNamespace(**dict(given)))


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "paged_lion_32bit", "schedule_free_sgd", "adalomo"])
def test_an_optimizer_that_stages_cannot_make_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"optim of TrainingArguments is '{name}'"):
        check_training_arguments(SimpleNamespace(optim=SimpleNamespace(value=name)))
    check_training_arguments(SimpleNamespace(optim=SimpleNamespace(value="adamw_torch_fused")))
