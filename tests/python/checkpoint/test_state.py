"""Tests the state of stages, which is written to a file and read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pipedream import Plan
from pipedream.checkpoint.state import mean_buffers, save_state, saved_values, set_state, state_bytes
from pipedream.model.stage_module import StageModule
from pipedream.splitting.splitter import split
from safetensors.torch import load_file
from torch import nn

_FLOAT8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)  # float8_e8m0fnu exists from torch 2.7 on
]


class _Odd(nn.Module):
    """Has a parameter that is not contiguous, a complex buffer, and a buffer without elements."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.full((3, 5), fill).t())
        self.register_buffer("phase", torch.full((2,), complex(fill, 1), dtype=torch.complex128))
        self.register_buffer("empty", torch.empty(0, 4))


def _make_model(fill: float) -> nn.Sequential:
    return nn.Sequential(_Odd(fill), nn.BatchNorm1d(3), _Odd(fill + 1))


def _stage(model: nn.Sequential) -> StageModule:
    (stage,) = split(model, Plan.straight(len(model), 1))
    return stage


def test_what_was_saved_is_loaded_in_place(tmp_path: Path) -> None:
    trained, fresh = _make_model(7.0), _make_model(0.0)
    trained[1].running_mean.fill_(5)
    weight, mean = fresh[0].transposed, fresh[1].running_mean
    save_state(_stage(trained), tmp_path / "state.safetensors")
    set_state(_stage(fresh), saved_values(tmp_path / "state.safetensors"))
    assert fresh[0].transposed is weight
    assert fresh[1].running_mean is mean
    assert weight.stride() == trained[0].transposed.stride()
    for name, value in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


def test_a_buffer_that_is_new_or_has_another_shape_is_taken_over(tmp_path: Path) -> None:
    trained, fresh = _make_model(7.0), _make_model(0.0)
    trained[2].register_buffer("cache", torch.arange(6.0))
    trained[0].empty = torch.ones(2, 4)
    save_state(_stage(trained), tmp_path / "state.safetensors")
    set_state(_stage(fresh), saved_values(tmp_path / "state.safetensors"))
    assert torch.equal(fresh[2].cache, torch.arange(6.0))
    assert torch.equal(fresh[0].empty, torch.ones(2, 4))


def test_a_buffer_that_is_taken_over_goes_where_its_model_is(tmp_path: Path) -> None:
    trained, fresh = _make_model(7.0), _make_model(0.0)
    trained[2].register_buffer("cache", torch.arange(6.0))
    trained[0].empty = torch.ones(2, 4)
    save_state(_stage(trained), tmp_path / "state.safetensors")
    stage = _stage(fresh)
    fresh.to("meta")
    set_state(stage, saved_values(tmp_path / "state.safetensors"))
    assert fresh[2].cache.is_meta
    assert fresh[0].empty.is_meta and fresh[0].empty.shape == (2, 4)


def test_any_reader_of_safetensors_reads_what_was_saved(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    kinds = [torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int32, *_FLOAT8]
    for index, dtype in enumerate(kinds):
        layer.register_buffer(f"of_{index}", torch.arange(index + 1).to(dtype))
    layer.register_buffer("count", torch.tensor(7))
    save_state(_stage(nn.Sequential(layer)), tmp_path / "state.safetensors")
    read = load_file(tmp_path / "state.safetensors")
    assert set(read) == {f"0.{name}" for name in layer.state_dict()}
    for name, value in layer.state_dict().items():
        assert read[f"0.{name}"].dtype == value.dtype
        assert torch.equal(read[f"0.{name}"].float(), value.float()), name


@pytest.mark.parametrize("dtype", _FLOAT8, ids=str)
def test_buffers_of_one_byte_have_means(dtype: torch.dtype) -> None:
    """A run with replicas averages their buffers at its end. Dtypes of one byte cannot be added directly."""
    values = [torch.tensor([1.0, 2.0, scale]).to(dtype) for scale in (1.0, 7.0)]
    (mean,) = mean_buffers({"scale": values[0]}, [{"scale": values[1]}]).values()
    assert mean.dtype == dtype and mean.float().tolist() == [1.0, 2.0, 4.0]


def test_a_file_is_written_into_the_room_that_was_reserved_for_it(tmp_path: Path) -> None:
    stage, path = _stage(_make_model(7.0)), tmp_path / "state.safetensors"
    path.write_bytes(bytes(state_bytes(stage)))
    inode = path.stat().st_ino
    save_state(stage, path)
    assert path.stat().st_ino == inode
    assert 0 < path.stat().st_size <= state_bytes(stage)
    set_state(_stage(_make_model(0.0)), saved_values(path))


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        save_state(_stage(_make_model(7.0)), path)
    assert not list(tmp_path.iterdir())
