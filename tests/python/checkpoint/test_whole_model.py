"""Tests the whole model of a checkpoint, written to a file and loaded into a model."""

from __future__ import annotations

import functools
from pathlib import Path

import pipedream
import pytest
import torch
from farm import Farm
from pipedream import Plan
from pipedream.checkpoint.whole_model import export_checkpoint, load_checkpoint
from safetensors.torch import load_file
from torch import nn
from written_checkpoints import write_checkpoint


class _Tied(nn.Module):
    """Has a head that reads the weight of the embedding, a frozen layer, and a buffer that no
    state_dict has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
        self.body[3].weight = self.body[0].weight
        self.body[1].requires_grad_(False)
        self.body[1].register_buffer("cache", torch.rand(2), persistent=False)


def _make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = _Tied().body
    with torch.no_grad():
        model[2].running_mean.copy_(torch.rand(3))
    return model


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_export_is_the_state_dict_of_the_model(tmp_path: Path, suffix: str) -> None:
    trained = _make_model(1)
    write_checkpoint(tmp_path / "C", trained, Plan.straight(4, 3))
    output = tmp_path / f"model{suffix}"
    written = export_checkpoint(tmp_path / "C", output)
    assert written["minibatch"] == 6 and written["unused"] == []
    state = load_file(output) if suffix == ".safetensors" else torch.load(output, weights_only=True)
    assert set(state) == set(trained.state_dict())
    for name, value in trained.state_dict().items():
        assert torch.equal(state[name], value), name
    _make_model(2).load_state_dict(state)


def test_a_checkpoint_is_loaded_into_a_model_in_place(tmp_path: Path) -> None:
    trained, fresh = _make_model(1), _make_model(2)
    folder = write_checkpoint(tmp_path, trained, Plan.straight(4, 2))
    weight = fresh[0].weight
    pipedream.load_checkpoint(folder, fresh)
    assert fresh[0].weight is weight is fresh[3].weight
    assert torch.equal(fresh[1].cache, trained[1].cache)
    for name, value in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


class _TiedByName(nn.Module):
    """A module that is cut along its forward. Both stages have the weight under the embedding's name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.body(self.embedding(inputs)))
        return outputs


def _train_tied(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = _TiedByName()
    pipedream.run(
        model,
        Plan.straight(3, 2),
        data=[(torch.arange(4), torch.arange(4))] * 3,
        loss_fn=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        checkpoints=folder,
        progress=False,
    )
    return model.state_dict()


def test_a_weight_that_stages_tie_under_one_name_is_loaded(farm: Farm, tmp_path: Path) -> None:
    state = farm.results(_train_tied, tmp_path, num_ranks=2)[0]
    fresh = _TiedByName()
    load_checkpoint(tmp_path, fresh)
    for name, value in state.items():
        assert torch.equal(fresh.state_dict()[name], value), name


def test_buffers_of_replicas_become_their_means(tmp_path: Path) -> None:
    trained, fresh = _make_model(1), _make_model(2)
    write_checkpoint(tmp_path, trained, Plan.replicated(4, [1, 3]))
    load_checkpoint(tmp_path, fresh)
    assert torch.allclose(fresh[2].running_mean, trained[2].running_mean + 1)


def test_a_model_that_does_not_fit_is_refused_by_its_first_parameter_that_differs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, _make_model(1), Plan.straight(4, 2))
    wider = _make_model(2)
    wider[1] = nn.Linear(3, 7)
    with pytest.raises(
        ValueError, match=r"parameter '1\.weight' is float32 \[7, 3\] in the model and .*\[3, 3\]"
    ):
        load_checkpoint(tmp_path, wider)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is float64 \[5, 3\] in the model"):
        load_checkpoint(tmp_path, _make_model(2).double())
    with pytest.raises(ValueError, match=r"the model has a parameter '4\.weight', and .* has none"):
        load_checkpoint(tmp_path, _make_model(2).append(nn.Linear(5, 5)))
    with pytest.raises(ValueError, match=r"has a parameter '3\.bias', and the model has none"):
        load_checkpoint(tmp_path, _make_model(2)[:3].append(nn.Embedding.from_pretrained(torch.rand(5, 3))))
    with pytest.raises(ValueError, match="materialise"):
        load_checkpoint(tmp_path, _make_model(2).to("meta"))


def test_an_export_says_what_it_cannot_write(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, _make_model(1), Plan.straight(4, 2))
    with pytest.raises(ValueError, match="must end in"):
        export_checkpoint(tmp_path, tmp_path / "model.bin")
