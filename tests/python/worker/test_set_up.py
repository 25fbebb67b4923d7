"""Tests set_up.py: the order of a worker's steps before its first minibatch."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pipedream
import psutil
import torch
from farm import Farm
from pipedream import Plan
from torch import Tensor, nn


class Watchful:
    """Data that record how many more sockets the process listens on when the first minibatch is read."""

    def __init__(self) -> None:
        self.num_listening: list[int] = []
        self._num_before = _num_listening()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.num_listening.append(_num_listening() - self._num_before)
        for _ in range(3):
            yield torch.ones(4, 2), torch.zeros(4, 2)


def _num_listening() -> int:
    return sum(c.status == psutil.CONN_LISTEN for c in psutil.Process().net_connections())


def _listening_at_first_minibatch() -> list[int]:
    data = Watchful()
    pipedream.run(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        Plan.straight(2, 2),
        data=data,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        progress=False,
    )
    return data.num_listening


def test_the_first_minibatch_is_read_before_there_are_links_which_processes_would_inherit(farm: Farm) -> None:
    # Workers of a DataLoader must not hold the sockets of the set-up open. Otherwise each run with
    # num_workers would wait for 10 s.
    assert farm.results(_listening_at_first_minibatch, num_ranks=2) == [[0], [0]]
