"""Compares schedule="data_parallel" with a real DistributedDataParallel in the same number of processes.

The models have no batch norm, because its running statistics differ. DistributedDataParallel uses rank 0's in
every forward. In pipedream each replica has its own, and the result has their mean. In every update all ranks
have a minibatch, because the ranks of DistributedDataParallel need equally many.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from farm import Farm
from torch.nn.parallel import DistributedDataParallel
from training import (
    OPTIMIZERS,
    State,
    Training,
    assert_close_losses,
    assert_close_state,
    is_rank_0,
    tolerance,
    train_in_pipeline,
)

_NUM_RANKS = 2

# These groups are never destroyed. The destructor of a gloo group holds the GIL while it joins a thread. That
# thread may wait for the GIL, because the reductions of a backward refer to a Python object (torch 2.13).
_kept_groups: list[object] = []


def _train_with_ddp(training: Training, store_file: str) -> tuple[list[float], State]:
    """Trains at this rank. Returns its losses and the weights."""
    rank = 0 if is_rank_0() else 1
    store = dist.FileStore(store_file, _NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_NUM_RANKS)
    _kept_groups.append(dist.group.WORLD)
    try:
        model = DistributedDataParallel(training.model())
        optimizer = training.optimizer(model.parameters())
        losses = []
        for inputs, targets in list(training.data())[rank::_NUM_RANKS]:
            optimizer.zero_grad()
            loss = training.case.loss_fn(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: value.clone() for name, value in model.module.state_dict().items()}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_data_parallel_gives_the_result_of_distributed_data_parallel(
    farm: Farm, tmp_path: Path, sync: str, dtype: torch.dtype
) -> None:
    train = functools.partial(
        Training, "transformer", 1, dtype, OPTIMIZERS["sgd"], num_minibatches=8, short_last=False
    )
    training = train(replicas=(_NUM_RANKS,), schedule="data_parallel", sync=sync)
    result, state = farm.results(train_in_pipeline, training, num_ranks=_NUM_RANKS)[0]
    of_ranks = farm.results(_train_with_ddp, training, str(tmp_path / "store"), num_ranks=_NUM_RANKS)
    losses = [loss for of_round in zip(*(losses for losses, _ in of_ranks), strict=True) for loss in of_round]
    assert_close_losses(result.losses, losses, tolerance(dtype))
    assert_close_state(state, of_ranks[0][1], tolerance(dtype))
