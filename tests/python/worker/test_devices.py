"""Tests the device on which workers compute. It depends on what torch and the core find."""

from __future__ import annotations

import pytest
import torch
from pipedream import _core
from pipedream.worker.devices import choose_device_type

_NO_BUILD = "it was built without CUDA"
_OLD_DRIVER = "it was built with CUDA 13.0, which needs driver 580 or later, and the driver here runs 12.4"


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Imitates a machine on which torch and the core find a GPU."""
    monkeypatch.delenv("PIPEDREAM_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_core, "why_no_cuda", lambda: "")
    return monkeypatch


@pytest.mark.parametrize(("wanted", "chosen"), [("auto", "cuda"), ("cuda", "cuda"), ("host", "cpu")])
def test_a_gpu_is_taken_unless_the_host_is_asked_for(
    finds: pytest.MonkeyPatch, wanted: str, chosen: str
) -> None:
    finds.setenv("PIPEDREAM_DEVICE", wanted)
    assert choose_device_type() == chosen


@pytest.mark.parametrize("why", [_NO_BUILD, _OLD_DRIVER])
@pytest.mark.parametrize("wanted", [None, "auto", "cuda"])
def test_a_gpu_that_torch_finds_and_the_core_cannot_use_is_no_reason_to_train_on_the_cpu(
    finds: pytest.MonkeyPatch, wanted: str | None, why: str
) -> None:
    finds.setattr(_core, "why_no_cuda", lambda: why)
    if wanted is not None:
        finds.setenv("PIPEDREAM_DEVICE", wanted)
    with pytest.raises(ValueError) as caught:
        choose_device_type()
    message = str(caught.value)
    assert message.startswith(f"torch finds a GPU here that pipedream's core cannot use: {why}; install")
    assert message.endswith("set PIPEDREAM_DEVICE=host to train on the CPU") and "\n" not in message


def test_a_gpu_that_the_core_cannot_use_is_left_alone_where_the_host_is_asked_for(
    finds: pytest.MonkeyPatch,
) -> None:
    finds.setattr(_core, "why_no_cuda", lambda: _NO_BUILD)
    finds.setenv("PIPEDREAM_DEVICE", "host")
    assert choose_device_type() == "cpu"


def test_workers_compute_on_the_host_where_torch_finds_no_gpu(finds: pytest.MonkeyPatch) -> None:
    finds.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device_type() == "cpu"
    finds.setenv("PIPEDREAM_DEVICE", "cuda")
    with pytest.raises(ValueError, match="PIPEDREAM_DEVICE is 'cuda', but torch finds no CUDA device here"):
        choose_device_type()
