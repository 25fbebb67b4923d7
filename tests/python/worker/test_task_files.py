"""Tests task_files.py: what local workers read from files."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipedream import PipelineError
from pipedream.worker.task_files import GraphReader, GraphWriter, read_part, write_part
from torch import Tensor, nn


def _tied_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def test_large_memory_is_mapped_from_a_file_and_written_for_oneself(tmp_path: Path) -> None:
    model = _tied_model()
    write_part(tmp_path, "model", model, "")
    size = (tmp_path / "model.memory").stat().st_size
    # The tied weight counts once, and other tensors are too small for this file.
    assert size == model[0].weight.nbytes
    one, other = read_part(tmp_path, "model"), read_part(tmp_path, "model")
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert one[1].weight is one[0].weight
    assert torch.equal(one[0].weight, model[0].weight) and torch.equal(one[2].bias, model[2].bias)
    with torch.no_grad():
        one[0].weight.zero_()
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_model_on_the_meta_device_arrives_there(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = _tied_model()
    write_part(tmp_path, "model", model, "")
    arrived = read_part(tmp_path, "model")
    assert all(parameter.is_meta for parameter in arrived.parameters())
    assert arrived[1].weight is arrived[0].weight


class NotDecayed(nn.Parameter):
    """A class by which a script makes its parameter groups."""


def test_parameters_arrive_as_their_own_class_with_their_marks(tmp_path: Path) -> None:
    model = _tied_model()
    model[0].weight = model[1].weight = NotDecayed(torch.ones(2, 2))
    model[2].bias = NotDecayed(torch.zeros(2), requires_grad=False)
    model[0].weight.rank = 3
    write_part(tmp_path, "model", model, "")
    arrived = read_part(tmp_path, "model")
    assert type(arrived[0].weight) is NotDecayed and arrived[1].weight is arrived[0].weight
    assert arrived[0].weight.rank == 3 and arrived[0].weight.requires_grad
    assert type(arrived[2].bias) is NotDecayed and not arrived[2].bias.requires_grad
    assert type(arrived[2].weight) is nn.Parameter


class Named(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.own, self.of_kind = self.name_of, self.kind_of

    def name_of(self) -> str:
        return "the class's"

    @classmethod
    def kind_of(cls) -> str:
        return cls.__name__


def patched(module: nn.Module) -> str:
    return f"{type(module).__name__}'s patch"


def test_a_method_arrives_as_its_function_and_its_object(tmp_path: Path) -> None:
    """A method may be put into one object only. It must not arrive as the method of its class."""
    model = nn.ModuleList([Named(), Named(), Named()])
    patched.__name__ = "name_of"  # functools.wraps does the same
    try:
        model[1].name_of = types.MethodType(patched, model[1])  # type: ignore[method-assign]
    finally:
        patched.__name__ = "patched"
    model[2].name_of = types.MethodType(lambda module: module.own() + " and more", model[2])  # type: ignore[method-assign]
    write_part(tmp_path, "model", model, "")
    arrived = read_part(tmp_path, "model")
    names = [module.name_of() for module in arrived]
    assert names == ["the class's", "Named's patch", "the class's and more"]
    assert arrived[1].name_of.__self__ is arrived[1] and arrived[2].own.__self__ is arrived[2]
    assert [module.of_kind() for module in arrived] == ["Named"] * 3


@pytest.mark.parametrize("size", [8, 1 << 16], ids=["in the pickle", "in a file"])
def test_a_view_that_a_module_keeps_of_a_buffer_shares_its_memory_there(tmp_path: Path, size: int) -> None:
    # The view must follow the buffer. A copy would make the loss wrong without an error.
    model = nn.BatchNorm1d(size)
    model.half = model.running_mean[: size // 2]
    write_part(tmp_path, "model", model, "")
    arrived = read_part(tmp_path, "model")
    arrived.running_mean.add_(1)
    assert arrived.half.tolist() == [1.0] * (size // 2)
    assert model.half.tolist() == [0.0] * (size // 2)


@pytest.mark.parametrize("full", ["model.pickle", "model.memory"])
def test_a_full_temporary_folder_is_named_with_the_remedy(tmp_path: Path, full: str) -> None:
    """The error must not advise the user to define the model's classes elsewhere."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / full).symlink_to("/dev/full")
    with pytest.raises(PipelineError, match=f"cannot be written into {tmp_path}, where .* are free .*TMPDIR"):
        write_part(folder, "model", _tied_model(), "define its classes elsewhere")


class _Centred(nn.Module):
    """A loss that reads a buffer of the model."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.mean = norm.running_mean

    def forward(self, outputs: Tensor, _: Tensor) -> Tensor:
        return (outputs - self.mean).square().mean()


def _sent_together(folder: Path, data: Any, **parts: Any) -> GraphReader:
    """Returns a reader of the parts, and of "data" if the data could be sent."""
    with GraphWriter(folder) as graph:
        for name, value in parts.items():
            graph.add(name, value, "")
        is_sent = graph.add_data(data)
    return GraphReader(folder, [*parts, *(["data"] if is_sent else [])])


def test_what_the_loss_and_the_data_hold_of_the_model_is_the_workers_model_too(tmp_path: Path) -> None:
    # The loss must hold the model's own buffers. With copies it would always see the initial mean of the
    # batch norm.
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert isinstance(model[1], nn.BatchNorm1d)
    with _sent_together(tmp_path, [model], model=model, loss_fn=_Centred(model[1])) as graph:
        read = graph.read("data")[0]
        assert graph.read("model") is read
        assert graph.read("loss_fn").mean is read[1].running_mean


@pytest.mark.parametrize(
    "data",
    [
        [torch.arange(256.0) + i for i in range(3)],
        [np.arange(256, dtype=np.float32) + i for i in range(3)],
        [np.asfortranarray(np.arange(512, dtype=np.int64).reshape(32, 16)) + i for i in range(3)],
        torch.utils.data.TensorDataset(torch.randn(64, 16)),
    ],
    ids=["tensors", "arrays", "arrays by columns", "TensorDataset"],
)
def test_readers_of_data_in_memory_map_them_from_one_file(tmp_path: Path, data: Any) -> None:
    # If each reader had a copy, 400 MiB of data would take 3.2 GB at the start.
    with _sent_together(tmp_path, data) as graph:
        read = graph.read("data")
    assert (tmp_path / "task.pickle").stat().st_size < 3000 < (tmp_path / "task.memory").stat().st_size
    for own, there in zip(data[0:3], read[0:3], strict=True):
        one, other = (own[0], there[0]) if isinstance(own, tuple) else (own, there)
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
        assert getattr(one, "flags", None) == getattr(other, "flags", None) or other.flags.writeable
        other[:1] = 7  # for itself
        assert one.tolist() != other.tolist()


def test_an_array_that_the_user_maps_stays_in_the_users_file(tmp_path: Path) -> None:
    # The array must not be read into memory and written again.
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="w+", shape=(40_000,))
    tokens[:] = np.arange(40_000)
    tokens.flush()
    of_user = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r", offset=8_000)
    (tmp_path / "run").mkdir()
    with _sent_together(tmp_path / "run", [of_user, of_user[30_000:]]) as graph:
        whole, part = graph.read("data")
    assert not (tmp_path / "run/task.memory").exists()
    assert (whole[0], part[0], len(part)) == (4_000, 34_000, 6_000)
    assert type(whole) is np.memmap and not whole.flags.writeable


def test_data_that_cannot_be_sent_leave_nothing_in_the_files(tmp_path: Path) -> None:
    data = [torch.ones(1 << 20), (i for i in range(3))]
    with _sent_together(tmp_path, data, model=nn.Linear(300, 300)) as graph:
        assert graph.read("model").weight.shape == (300, 300)
    assert (tmp_path / "task.memory").stat().st_size == 300 * 300 * 4
