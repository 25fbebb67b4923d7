"""Tests Muon: two optimizers that act as one, with one learning-rate schedule, one state and one list of
parameters.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from pipedream.budget.footprint import storage_bytes
from pipedream.budget.optimizer_memory import predict_state_bytes
from pipedream.optim import Muon, NAdamW
from pipedream.update.shards import works_by_element
from torch import Tensor, nn


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.hidden = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.lm_head = nn.Linear(12, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.hidden(self.embedding(tokens))))


def _train(model: nn.Module, *steppers: Any, num_steps: int = 5, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        tokens = torch.randint(20, (6,), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        for stepper in steppers:
            stepper.step()


def _is_equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def _parts(model: _Model, lr: float) -> list[torch.optim.Optimizer]:
    others = [p for name, p in model.named_parameters() if name != "hidden.weight"]
    muon = torch.optim.Muon(
        [model.hidden.weight], lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", momentum=0.8
    )
    return [muon, NAdamW(others, lr=lr, weight_decay=0.1)]


def test_hidden_matrices_are_muons_and_all_else_the_other_optimizers() -> None:
    model = _Model()
    other = copy.deepcopy(model)
    muon = Muon(model.named_parameters(), lr=0.05, momentum=0.8)
    parts = _parts(other, 0.05)
    halve = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    _train(model, muon, halve(muon))
    _train(other, *parts, *(halve(part) for part in parts))
    assert _is_equal(model, other)
    assert muon.describe() == (
        "Muon trains hidden.weight; NAdamW trains embedding.weight, hidden.bias, norm.weight, norm.bias,"
        " lm_head.weight"
    )


def test_the_script_chooses_the_matrices_and_the_other_optimizer() -> None:
    named = list(_Model().named_parameters())
    muon = Muon(
        named,
        lr=0.1,
        matrices=lambda name, parameter: name == "lm_head.weight",
        rest=functools.partial(torch.optim.SGD, lr=0.3),
    )
    assert muon.describe().startswith(
        "Muon trains lm_head.weight; SGD trains embedding.weight, hidden.weight"
    )
    assert [group["lr"] for group in muon.param_groups] == [0.1, 0.3]


@pytest.mark.parametrize("names", [["hidden.weight"], ["norm.weight", "norm.bias"]])
def test_a_stage_may_lack_either_kind_of_parameter(names: list[str]) -> None:
    model = _Model()
    before = copy.deepcopy(model)
    _train(model, Muon([(name, p) for name, p in model.named_parameters() if name in names]), num_steps=1)
    changed = [
        name
        for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True)
        if not torch.equal(p, q)
    ]
    assert changed == names


@pytest.mark.parametrize("how", ["state_dict", "copy"])
def test_state_goes_on_in_another(how: str) -> None:
    model = _Model()
    muon = Muon(model.named_parameters(), lr=0.05)
    _train(model, muon, num_steps=2)
    if how == "copy":
        other, again = copy.deepcopy((model, muon))
    else:
        other = copy.deepcopy(model)
        again = Muon(other.named_parameters(), lr=0.9)
        again.load_state_dict(copy.deepcopy(muon.state_dict()))
    _train(model, muon, first=2)
    _train(other, again, first=2)
    assert _is_equal(model, other)


def test_its_memory_is_predicted_and_replicas_own_whole_tensors() -> None:
    model = _Model()
    muon = Muon(model.named_parameters())
    predicted = predict_state_bytes(muon)
    _train(model, muon, num_steps=1)
    kept = [value for state in muon.state.values() for value in state.values()]
    assert storage_bytes(kept) == predicted
    assert not works_by_element(muon)


def test_a_matrix_must_have_two_dimensions() -> None:
    with pytest.raises(ValueError, match="2D"):
        Muon(_Model().named_parameters(), matrices=lambda name, parameter: True)


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"install torch 2\.9"):
        Muon(_Model().named_parameters())
