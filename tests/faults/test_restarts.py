"""Tests that the launcher starts a training again after a rank has died. The new run uses nothing of the old
one.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator

import pipedream
import pytest
import torch
from farm import Farm
from torch import Tensor, nn

_NUM_MINIBATCHES = 9


class _Product(nn.Module):
    """A layer whose weight's gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.bias


def _powers_of_two(dies_at: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    for minibatch in range(_NUM_MINIBATCHES):
        if minibatch == dies_at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        yield torch.full((1, 3), 2.0**minibatch, dtype=torch.float64), torch.zeros(1)


class _Powers(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """Powers of two. Their sum shows which of them are missing and which occur twice."""

    def __init__(self, dies_at: int | None) -> None:
        self.dies_at = dies_at

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return _powers_of_two(self.dies_at)


def _sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum()


def _train(sync: str, dies_at: int | None) -> tuple[list[float], ...]:
    """Trains. Returns the weight of the replicated stage, and the bias of the other stage."""
    model = nn.Sequential(_Product(), _Sum())
    pipedream.run(
        model,
        pipedream.Plan.replicated(2, (2, 1)),
        data=torch.utils.data.DataLoader(_Powers(dies_at), batch_size=None),
        loss_fn=_sum,
        optimizer=functools.partial(pipedream.optim.SGD, lr=1.0),
        sync=sync,
        peer_timeout=3.0,
        progress=False,
    )
    return tuple(part.tolist() for part in model.parameters())


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_a_start_that_is_retried_uses_every_gradient_once(farm: Farm, sync: str) -> None:
    script = f"retried {os.getpid()} {sync}"
    first = farm.run(_train, sync, 6, num_ranks=3, torchrun_id=script)
    assert first[1].exit_code == -signal.SIGKILL
    assert all(isinstance(first[rank].error, pipedream.PeerLost) for rank in (0, 2)), first
    again = farm.results(_train, sync, None, num_ranks=3, torchrun_id=script, attempt=1)
    rounds = [(1 + 2) / 2, (4 + 8) / 2, (16 + 32) / 2, (64 + 128) / 2, 256.0]
    assert again[0] == ([-sum(rounds)] * 3, [-float(_NUM_MINIBATCHES)] * 3)
