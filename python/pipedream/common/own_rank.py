"""Reads the rank of this process from the environment that a launcher such as torchrun sets. Torch-free; any
thread.
"""

from __future__ import annotations

import os

__all__ = ["is_first_of_machine", "is_on_several_machines", "is_rank_0", "under_torchrun"]


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank_0() -> bool:
    """Whether this process is rank 0. Always True without torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


def is_first_of_machine() -> bool:
    """Whether this process is the first of its machine. Always True without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def is_on_several_machines() -> bool:
    if not under_torchrun() or os.environ["WORLD_SIZE"] == "1":
        return False
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but LOCAL_WORLD_SIZE, how many of these ranks are on"
            " this machine, is not set: set it and LOCAL_RANK, or start with torchrun, which does"
        )
    return os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]
