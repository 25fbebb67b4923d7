"""Tests that nobody on the network can reach a run of local workers."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator

import pipedream
import pytest
import torch
from listeners import listening_addresses
from pipedream.links import rendezvous
from torch import nn


@pytest.mark.slow
def test_a_run_of_local_workers_listens_on_loopback_alone() -> None:
    heard: dict[str, bool] = {}

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # the caller iterates it during the run
        for _ in range(6):
            heard.update(listening_addresses(os.getpid()))
            yield torch.randn(4, 3), torch.randn(4, 2)

    pipedream.run(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)),
        pipedream.Plan.straight(2, 2),
        data=batches(),
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        progress=False,
    )
    assert len(heard) >= 3, "the store and the channels' ends listen"
    assert all(heard.values()), heard


def test_the_store_of_rank_0_listens_at_the_master_address_alone() -> None:
    # Rank 0 hosts the store if the launcher has none. torch's own store would listen on all interfaces.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = listening_addresses(os.getpid())
    rendezvous._hosted_at("127.0.0.1", port)
    (address,) = listening_addresses(os.getpid()).items() - before.items()
    assert address == (f"0100007F:{port:04X}", True)
    rendezvous._hosted_at.cache_clear()
