"""Chooses the device on which a worker of this machine computes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from pipedream import _core

__all__ = ["choose_device", "choose_device_type", "device_wanted"]

_REMEDY = (
    "install pipedream again where it finds an nvcc that fits the driver (CUDACXX names one), or set"
    " PIPEDREAM_DEVICE=host to train on the CPU"
)


def choose_device_type() -> str:
    """Returns the type of device on which the workers of this machine compute: "cpu" or "cuda".
    $PIPEDREAM_DEVICE chooses it: auto, host or cuda.

    Raises ValueError if torch finds a GPU that the core cannot use. Otherwise a training that is meant for
    the GPU would run on the CPU without a warning.
    """
    wanted = os.environ.get("PIPEDREAM_DEVICE", "auto")
    if wanted not in ("auto", "host", "cuda"):
        raise ValueError(f"PIPEDREAM_DEVICE is {wanted!r}: use auto, host or cuda")
    if wanted == "host":
        return "cpu"
    if not torch.cuda.is_available():
        if wanted == "cuda":
            raise ValueError(
                "PIPEDREAM_DEVICE is 'cuda', but torch finds no CUDA device here: use host, or auto"
            )
        return "cpu"
    why_not = _core.why_no_cuda()
    if why_not:
        raise ValueError(f"torch finds a GPU here that pipedream's core cannot use: {why_not}; {_REMEDY}")
    return "cuda"


@contextlib.contextmanager
def device_wanted(wanted: str | None) -> Iterator[None]:
    """Sets $PIPEDREAM_DEVICE in the with block. None leaves it as it is."""
    before = os.environ.get("PIPEDREAM_DEVICE")
    if wanted is not None:
        os.environ["PIPEDREAM_DEVICE"] = wanted
    try:
        yield
    finally:
        if wanted is not None:
            os.environ.pop("PIPEDREAM_DEVICE")
            if before is not None:
                os.environ["PIPEDREAM_DEVICE"] = before


def choose_device(local_rank: int) -> torch.device:
    """Returns the device of this process. If the device is a GPU, this makes its CUDA context."""
    if choose_device_type() == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # this makes the device's context, which may take seconds
    return device
