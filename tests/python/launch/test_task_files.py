"""task_files.py: what local workers are told by files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pipedream import PipelineError
from pipedream.launch.task_files import read_part, write_part
from torch import nn


def _tied_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def test_large_memory_is_mapped_from_a_file_and_written_for_oneself(tmp_path: Path) -> None:
    model = _tied_model()
    write_part(tmp_path, "model", model, "")
    assert len(list(tmp_path.glob("model-*.memory"))) == 1  # the tied one; the others are small
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


@pytest.mark.parametrize("size", [8, 1 << 16], ids=["in the pickle", "in a file"])
def test_a_view_that_a_module_keeps_of_a_buffer_shares_its_memory_there(tmp_path: Path, size: int) -> None:
    # It was a copy, which did not follow the buffer: a wrong loss, without a word.
    model = nn.BatchNorm1d(size)
    model.half = model.running_mean[: size // 2]
    write_part(tmp_path, "model", model, "")
    arrived = read_part(tmp_path, "model")
    arrived.running_mean.add_(1)
    assert arrived.half.tolist() == [1.0] * (size // 2)
    assert model.half.tolist() == [0.0] * (size // 2)


@pytest.mark.parametrize("full", ["model.pickle", "model-0.memory"])
def test_a_full_temporary_folder_is_named_with_the_remedy(tmp_path: Path, full: str) -> None:
    """It was said of the model that its classes should be defined elsewhere."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / full).symlink_to("/dev/full")
    with pytest.raises(PipelineError, match=f"cannot be written into {tmp_path}, where .* are free .*TMPDIR"):
        write_part(folder, "model", _tied_model(), "define its classes elsewhere")
