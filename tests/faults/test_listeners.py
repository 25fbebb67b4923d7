"""Nobody on the network can reach a run of local workers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pipedream
import torch
from listeners import listening_addresses
from torch import nn


def test_a_run_of_local_workers_listens_on_loopback_alone() -> None:
    heard: dict[str, bool] = {}

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # iterated by the caller, during the run
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
