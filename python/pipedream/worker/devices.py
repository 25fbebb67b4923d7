"""Chooses the device on which a worker of this machine computes."""

from __future__ import annotations

import os

import torch

from pipedream import _core

__all__ = ["choose_device", "choose_device_type"]

_REMEDY = (
    "install pipedream again where it finds an nvcc that fits the driver (CUDACXX names one), or set"
    " PIPEDREAM_DEVICE=host to train on the CPU"
)


def choose_device_type() -> str:
    """The device that the workers of this machine compute on, "cpu" or "cuda", as $PIPEDREAM_DEVICE says.

    Raises ValueError where torch finds a GPU and the core cannot use it: a training for a GPU would take the
    CPU, and nobody would know.
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


def choose_device(local_rank: int) -> torch.device:
    """Returns the device of this process, with its context made."""
    if choose_device_type() == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # makes the device's context, which may take seconds
    return device
