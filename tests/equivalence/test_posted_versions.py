"""Tests that pulled versions are received directly into their slots while nobody reads these slots. They need
no other memory.
"""

from __future__ import annotations

import functools
import os
import random
import time
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from oracle import assert_equals_reference
from pipedream import NonFiniteLoss, RunResult, _core
from pipedream.planning.plan import Stage
from pipedream.stage.stage_runner import StageRunner
from pipedream.update.param_server import ParameterServer
from pipedream.update.shard_client import ShardClient
from training import OPTIMIZERS, State, Training, is_on_cuda, train_in_pipeline

_ON_HOST = pytest.mark.skipif(is_on_cuda(), reason="versions of a device have slots of their own")


def _training(case_name: str, replicas: tuple[int, ...], **how: Any) -> Training:
    return Training(case_name, len(replicas), replicas=replicas, **how)


def _train_late(
    training: Training, late_seed: int, *, poison: bool = True, **options: Any
) -> tuple[RunResult, State]:
    """Trains while every rank is late at random before and after each forward, backward, push and update.

    So a rank is also late before it waits for gradients and versions. With `poison`, slots that nobody may
    read are filled with NaN. The next version is then received only from the update on.
    """
    rank = int(os.environ.get("RANK", "0"))
    draws = random.Random(late_seed * 100 + rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEDREAM_POISON", str(int(poison)))
        for owner, name in (
            (StageRunner, "forward"),
            (StageRunner, "backward"),
            (ShardClient, "push"),
            (ParameterServer, "apply"),
        ):
            patch.setattr(owner, name, _late(getattr(owner, name), draws))
        return train_in_pipeline(training, **options)


def _late(method: Any, draws: random.Random) -> Any:
    @functools.wraps(method)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        time.sleep(draws.choice((0.0, 0.0, 0.001, 0.01)))
        done = method(*arguments, **options)
        time.sleep(draws.choice((0.0, 0.0, 0.0, 0.01)))
        return done

    return wrapped


@pytest.mark.parametrize(("transport", "poison"), [("tcp", True), ("auto", True), ("auto", False)])
@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        ((2, 1), {}),
        ((1, 3), {}),
        ((3, 2), {"sync": "ssp", "staleness": 1}),
        ((2, 2), {"sync": "ssp", "staleness": 2}),
        ((3, 1), {"schedule": "vertical_sync"}),
        ((2, 1), {"schedule": "naive"}),
        ((1, 2), {"schedule": "flush", "microbatches": 2}),
        ((2, 1), {"optimizer": OPTIMIZERS["adam"]}),
    ],
    ids=lambda value: "-".join(map(str, value)) or "bsp",
)
def test_no_forward_mixes_versions_however_late_one_is(
    farm: Farm, transport: str, poison: bool, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    training = _training("mlp", replicas, num_minibatches=17, short_last=False, **how)
    train = functools.partial(_train_late, late_seed=len(how), poison=poison)
    assert_equals_reference(farm, training, train=train, transport=transport)


@pytest.mark.parametrize("case_name", ["mlp", "tied_apart"])
def test_a_replica_may_read_versions_many_rounds_late(farm: Farm, case_name: str) -> None:
    # A stage with replicas keeps several versions, so several pulled versions may wait for a replica. A
    # channel with places only for its own stage's minibatches in flight would become full.
    training = _training(
        case_name, (1, 2), num_minibatches=31, short_last=False, schedule="vertical_sync", in_flight=(12, 1)
    )
    assert_equals_reference(farm, training)


def test_native_optimizers_read_what_has_landed_however_late_one_is(farm: Farm) -> None:
    arguments = {"lr": 0.05, "momentum": 0.9}
    training = _training(
        "mlp", (2, 2), num_minibatches=13, optimizer=functools.partial(torch.optim.SGD, **arguments)
    )
    native = functools.partial(pipedream.optim.SGD, **arguments)
    assert_equals_reference(farm, training, native=native, train=functools.partial(_train_late, late_seed=9))


def _slots(result: RunResult) -> dict[str, int | None]:
    """Returns the peak bytes of the slots for versions that owners of shards send, by memory term."""
    return {
        name: row["peak"]
        for terms in result.memory
        for name, row in terms.items()
        if name.startswith("pulled")
    }


@_ON_HOST
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_pulls_have_no_slots_of_their_own(farm: Farm, transport: str) -> None:
    training = _training("mlp", (2, 1))
    result, _ = assert_equals_reference(farm, training, transport=transport)
    assert len(_slots(result)) == 2
    assert set(_slots(result).values()) == {0}
    asynchronous = farm.results(
        train_in_pipeline, _training("mlp", (2, 1), sync="asp"), num_ranks=3, transport=transport
    )[0][0]
    assert all(_slots(asynchronous).values())


def _lands_in_the_version_that_is_read(patch: pytest.MonkeyPatch) -> None:
    make = _core.Worker.make_exchange

    def wrong(self: _core.Worker, *, own_slots: list[int], **spec: Any) -> _core.ShardExchange:
        return make(self, own_slots=[*own_slots[1:], own_slots[0]], **spec)

    patch.setattr(_core.Worker, "make_exchange", wrong)


def _train_wrongly(training: Training) -> tuple[RunResult, State]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEDREAM_POISON", "1")
        _lands_in_the_version_that_is_read(patch)
        return train_in_pipeline(training)


@_ON_HOST
def test_a_version_that_lands_elsewhere_is_caught_under_poison(farm: Farm) -> None:
    for outcome in farm.run(_train_wrongly, _training("mlp", (2, 1), num_minibatches=10), num_ranks=3):
        assert isinstance(outcome.error, NonFiniteLoss), outcome


def _num_crossings(num_replicas: int, num_chunks: int, num_rounds: int) -> int:
    """Trains a weight that has num_chunks chunks for each owner. Returns the number of this replica's calls
    of the core.
    """
    count = 0

    def counted(method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return method(*arguments, **options)

        return call

    mebibytes = num_replicas * num_chunks - 1
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024 * mebibytes, bias=False))
    with pytest.MonkeyPatch.context() as patch:
        for owner in (_core.Worker, _core.ShardExchange):
            for name, method in vars(owner).items():
                # pulse() is left out, because a timer calls it
                if callable(method) and not name.startswith("_") and name != "pulse":
                    patch.setattr(owner, name, counted(method))
        pipedream.run(
            model,
            pipedream.Plan((Stage(0, 0, num_replicas=num_replicas),)),
            data=[(torch.ones(1, 256), torch.zeros(1, 1))] * (num_replicas * num_rounds),
            loss_fn=lambda outputs, targets: (outputs.mean() - targets).square().mean(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            gather="none",
            progress=False,
        )
    return count


def _crossings_per_round(farm: Farm, num_replicas: int, num_chunks: int) -> float:
    few, many = (
        farm.results(_num_crossings, num_replicas, num_chunks, num_rounds, num_ranks=num_replicas)[0]
        for num_rounds in (2, 4)
    )
    return (many - few) / 2


def test_calls_of_the_core_grow_with_the_own_chunks_and_not_with_the_replicas(farm: Farm) -> None:
    with_two = _crossings_per_round(farm, 2, 1)
    assert _crossings_per_round(farm, 4, 1) == with_two
    # With two more chunks of its own, a replica makes four more calls: two for each chunk, for its mean and
    # its version.
    assert _crossings_per_round(farm, 2, 3) == with_two + 2 * 2
    assert with_two < 25
