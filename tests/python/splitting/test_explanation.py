"""Tests `pipedream explain`, which shows a model's layers, its cuts and the plan's stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipedream import Plan, cli
from pipedream.splitting.explanation import ExplainedLayer, Explanation, explain
from torch import nn
from twins import cross_entropy


class _Skipping(nn.Module):
    """A model with a skip, random numbers between modules, and a value that is passed outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.norm, self.head = (nn.Linear(4, 4) for _ in range(4))
        self.scale = 1.0
        self.body.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.scale = float(output.detach().numpy().sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.stem(x)
        x = self.norm(self.body(skip) + nn.functional.dropout(skip))
        out: torch.Tensor = self.head(x + skip) * self.scale
        return out


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4), torch.tensor([0, 1, 2])


_JOB = """
from test_explanation import _batch, _Skipping, cross_entropy
def make():
    return {"model": _Skipping(), "data": [_batch()], "loss_fn": cross_entropy}
"""


def test_layers_have_what_crosses_after_them_and_other_places_a_reason() -> None:
    explained = explain(_Skipping(), _batch(), cross_entropy)
    assert [(layer.name, layer.senders) for layer in explained.layers] == [("stem", ("stem",)), ("head", ())]
    tensor_bytes, sizes_bytes = 3 * 4 * 4, 2 * 8  # bytes of stem's output, and of the inputs' sizes
    assert explained.layers[0].crossing_bytes == tensor_bytes + sizes_bytes
    assert [layer.parameter_bytes for layer in explained.layers] == [80, 3 * 80]
    reasons = dict(explained.refused)
    assert list(reasons) == ["body", "norm"]
    assert "its loss is" in reasons["body"]
    assert "its loss is" in reasons["norm"]
    text = str(explained)
    assert "layers 2, places where it cannot be cut 2" in text and "  norm: its loss is" in text


def test_a_list_of_layers_can_be_cut_after_each() -> None:
    explained = explain(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), None)
    assert [(layer.name, layer.parameter_bytes) for layer in explained.layers] == [("0", 24), ("1", 0)]


def test_parameters_are_trainable_ones_and_those_without_values_are_refused() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    explained = explain([frozen, nn.Linear(4, 4, bias=False)], None)
    assert [layer.parameter_bytes for layer in explained.layers] == [0, 64]
    with pytest.raises(ValueError, match=r"parameter '0.weight' has no shape yet \(a lazy module\)"):
        explain(nn.Sequential(nn.LazyLinear(4)), None)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(x + self.body(x))  # type: ignore[no-any-return]


def test_a_model_on_the_meta_device_has_the_same_layers() -> None:
    model = _Residual()
    on_host = explain(model, _batch(), cross_entropy)
    on_meta = explain(model.to("meta"), _batch(), cross_entropy)
    assert [layer.name for layer in on_host.layers] == ["stem", "body", "head"]
    assert on_meta == on_host
    assert all(parameter.is_meta for parameter in model.parameters())


class _WithoutCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight @ self.weight


def test_a_model_that_calls_nothing_says_that() -> None:
    explained = explain(_WithoutCalls(), (torch.ones(2, 4), torch.zeros(2, dtype=torch.long)), cross_entropy)
    assert "it cannot be cut: no call of a module ends between its first and its last" in str(explained)


def test_the_command_prints_one_object_and_draws_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "job_to_explain.py").write_text(_JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["explain", "job_to_explain.py:make", "--json", "--output", "cuts.svg"])
    assert exit_info.value.code == 0
    explained = json.loads(capfd.readouterr().out)
    assert [layer["name"] for layer in explained["layers"]] == ["stem", "head"]
    assert explained["refused"][0]["name"] == "body"
    drawn = (tmp_path / "cuts.svg").read_text()
    # All values are below 1 KiB, so the unit is bytes.
    assert ">bytes that cross after the layer</text>" in drawn
    assert ">bytes of parameters</text>" in drawn


def test_a_good_place_has_fewer_bytes_than_both_beside_it() -> None:
    layers = [ExplainedLayer(str(i), 0, size) for i, size in enumerate([8, 4, 4, 9, 2, 7, 0])]
    assert Explanation("m", tuple(layers), ()).good_places() == [4]


def test_the_picture_marks_a_plans_cuts_and_takes_the_place_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "job_to_draw.py").write_text(_JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    Plan.straight(2, 2).save("plan.json")
    command = ["explain", "job_to_draw.py:make", "--output", "cuts.svg", "--plan"]
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command, "plan.json"])
    assert exit_info.value.code == 0
    shown = capfd.readouterr().out
    assert "not after" in shown and "ends with" not in shown
    assert ">cut of the plan</text>" in (tmp_path / "cuts.svg").read_text()
    Plan.straight(3, 3).save("other.json")
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command, "other.json"])
    assert exit_info.value.code == 2
    assert "the plan is of 3 layers, the model has 2" in capfd.readouterr().err
