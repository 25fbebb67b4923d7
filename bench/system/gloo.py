"""Makes a process group of torch from the ranks that links.run_ranks() has started. They communicate over the
link by gloo."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from links import STORE_PORT


def join_ranks() -> str:
    """Makes the process group. Returns the name of the link's interface on this host."""
    interface = next(name for name in os.listdir("/sys/class/net") if name.startswith("pd"))
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    address = f"tcp://{os.environ['MASTER_ADDR']}:{STORE_PORT + 1}"
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", address, timedelta(minutes=10), num_ranks, rank)
    return interface
