"""On which device a worker of this machine computes."""

from __future__ import annotations

import os

import torch

from pipedream import _core

__all__ = ["choose_device", "choose_device_type"]


def choose_device_type() -> str:
    """Where the workers of this machine compute, as $PIPEDREAM_DEVICE says: "cpu" or "cuda"."""
    wanted = os.environ.get("PIPEDREAM_DEVICE", "auto")
    if wanted not in ("auto", "host", "cuda"):
        raise ValueError(f"PIPEDREAM_DEVICE is {wanted!r}: use auto, host or cuda")
    usable = torch.cuda.is_available() and _core.cuda_available()
    if wanted == "cuda" and not usable:
        raise ValueError("PIPEDREAM_DEVICE is 'cuda', but there is no usable CUDA device, or no CUDA build")
    return "cuda" if usable and wanted != "host" else "cpu"


def choose_device(local_rank: int) -> torch.device:
    """Of this process, with its context made."""
    if choose_device_type() == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # makes the device's context, which may take seconds
    return device
