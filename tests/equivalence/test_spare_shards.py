"""Tests that spares change no number: a plan with them gives the oracle's losses, weights and versions. A
spare is a worker that owns a shard and computes no minibatches.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from oracle import assert_equals_reference, assert_memory_as_predicted
from training import (
    OPTIMIZERS,
    Training,
    Unsized,
    assert_close_losses,
    assert_close_state,
    train_by_reference,
    train_in_pipeline,
    weight_decay_by_name,
)

_PLANS = [((2, 1), (1, 0)), ((1, 2), (0, 1)), ((3, 1), (2, 0)), ((2, 2), (1, 1)), ((2, 1), (2, 0))]


def _name_of(plan: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    return "-".join(f"{replicas}+{spares}" for replicas, spares in zip(*plan, strict=True))


def _training(case_name: str, replicas: tuple[int, ...], spares: tuple[int, ...], **how: Any) -> Training:
    return Training(case_name, len(replicas), replicas=replicas, spares=spares, **how)


@pytest.mark.parametrize("plan", _PLANS, ids=map(_name_of, _PLANS))
@pytest.mark.parametrize("case_name", ["cnn", "dropout"])
def test_a_plan_with_spare_shards_gives_the_references_result(
    farm: Farm, case_name: str, plan: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    replicas, spares = plan
    result, _ = assert_equals_reference(farm, _training(case_name, replicas, spares))
    assert (
        len(result.worker_names)
        == len(result.memory)
        == len(set(result.worker_pids))
        == sum((*replicas, *spares))
    )
    assert result.worker_names[-1].endswith(f"(rank {sum((*replicas, *spares)) - 1})")
    assert [name for name in result.worker_names if "spare" in name] == result.worker_names[sum(replicas) :]


@pytest.mark.parametrize("spares", [1, 2])
@pytest.mark.parametrize("num_minibatches", [1, 5, 6])
def test_data_parallel_with_spare_shards_gives_the_references_result(
    farm: Farm, num_minibatches: int, spares: int
) -> None:
    how: dict[str, Any] = {"schedule": "data_parallel", "num_minibatches": num_minibatches}
    assert_equals_reference(farm, _training("mlp", (2,), (spares,), **how))


@pytest.mark.parametrize("schedule", ["vertical_sync", "flush", "gpipe", "naive", "model_parallel"])
def test_other_schedules_with_spare_shards_give_the_references_result(farm: Farm, schedule: str) -> None:
    assert_equals_reference(farm, _training("cnn", (3, 2), (1, 0), schedule=schedule))


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_microbatches_with_spare_shards_give_the_references_result(farm: Farm, schedule: str) -> None:
    how: dict[str, Any] = {"schedule": schedule, "microbatches": 4, "short_last": False}
    assert_equals_reference(farm, _training("mlp", (2, 1), (1, 0), **how))


@pytest.mark.parametrize("staleness", [1, 2])
def test_older_versions_with_spare_shards_give_the_references_result(farm: Farm, staleness: int) -> None:
    how: dict[str, Any] = {"sync": "ssp", "staleness": staleness, "num_minibatches": 11}
    assert_equals_reference(farm, _training("mlp", (3, 2), (1, 0), **how))


@pytest.mark.parametrize(
    "optimizer",
    [
        OPTIMIZERS["adam"],
        weight_decay_by_name,
        functools.partial(torch.optim.Adafactor, lr=0.05),  # needs whole tensors
    ],
    ids=["adam", "by name", "whole tensors"],
)
def test_a_spare_steps_as_a_replica_would(farm: Farm, optimizer: Any) -> None:
    assert_equals_reference(farm, _training("cnn", (2, 1), (1, 0), optimizer=optimizer))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_native_optimizers_of_spares_give_the_result_of_torchs(farm: Farm, name: str) -> None:
    arguments: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    training = _training(
        "mlp", (2, 1), (1, 0), optimizer=functools.partial(getattr(torch.optim, name), **arguments)
    )
    assert_equals_reference(
        farm, training, native=functools.partial(getattr(pipedream.optim, name), **arguments)
    )


def test_schedulers_step_at_spares_as_at_replicas(farm: Farm) -> None:
    scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    assert_equals_reference(farm, _training("mlp", (2, 1), (1, 0), lr_scheduler=scheduler))


@pytest.mark.parametrize("num_minibatches", [1, 2, 5, 6])
@pytest.mark.parametrize("plan", [((2, 1), (1, 0)), ((1, 3), (0, 1))], ids=_name_of)
def test_a_spare_learns_of_the_end_of_data_in_any_round(
    farm: Farm, plan: tuple[tuple[int, ...], tuple[int, ...]], num_minibatches: int
) -> None:
    training = _training("mlp", *plan, num_minibatches=num_minibatches)
    assert_equals_reference(farm, training, data=Unsized(training.data()))


def test_what_the_caller_iterates_goes_to_replicas_alone() -> None:
    training = _training("mlp", (2, 1), (1, 0))
    expected, _ = train_in_pipeline(training)
    result, _ = train_in_pipeline(training, data=(batch for batch in training.data()))
    assert result.losses == expected.losses
    assert [rank for rank, source in enumerate(result.data_sources) if "forwarded" in source] == [0, 1, 2]


def test_a_shard_of_more_chunks_than_a_spare_has_slots_gives_the_references_result(farm: Farm) -> None:
    # The spare has half of 12 MiB, which is seven chunks. It has four slots for the chunks of each replica.
    # With Adafactor shards have whole tensors, which are updated in one step.
    for optimizer in (OPTIMIZERS["sgd"], functools.partial(torch.optim.Adafactor, lr=0.05)):
        results = farm.results(_train_wide, optimizer, (1,), num_ranks=3)
        losses, state = farm.results(_train_wide, optimizer, (0,), num_ranks=2)[0]
        assert_close_losses(results[0][0], losses, 1e-12)
        assert_close_state(results[0][1], state, 1e-12)


def _train_wide(optimizer: Any, spares: tuple[int, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(724, 724) for _ in range(3))).double()
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(2, 724, generator=generator).double(), torch.zeros(2, 724).double()) for _ in range(7)
    ]
    result = pipedream.run(
        model,
        pipedream.Plan.replicated(3, [2]).with_spare_shards(spares),
        data=data,
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=optimizer,
        seed=1,
        progress=False,
    )
    return result.losses, model.state_dict()


def test_local_workers_with_a_spare_give_the_references_result() -> None:
    training = _training("mlp", (2, 1), (1, 0))
    result, state = train_in_pipeline(training)
    expected, expected_state = train_by_reference(training)
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)
    assert result.worker_names == [
        "stage 0 replica 0 (rank 0)",
        "stage 0 replica 1 (rank 1)",
        "stage 1 (rank 2)",
        "stage 0 spare 0 (rank 3)",
    ]
    assert_memory_as_predicted(result)
    assert {span.kind for span in result.spans[3]} == {"UPDATE"}


def test_what_owners_hold_and_exchange_is_as_their_shares(farm: Farm) -> None:
    training = _training("wide", (3, 1), (1, 0), optimizer=OPTIMIZERS["adam"], num_minibatches=9)
    result, _ = assert_equals_reference(farm, training)
    states = [result.memory[rank]["optimizer state of torch"]["peak"] or 0 for rank in (0, 1, 2, 4)]
    assert [state / sum(states) for state in states] == pytest.approx([0.2, 0.2, 0.2, 0.4], abs=0.02)
    stage = training.plan.stages[0]
    parameters = [
        p for layer in training.model()[stage.first_layer : stage.last_layer + 1] for p in layer.parameters()
    ]
    num_bytes = sum(p.nbytes for p in parameters)
    # In each of 3 rounds every replica pushes what it does not own, and pulls as many bytes.
    payload = 3 * 3 * 2 * 0.8 * num_bytes
    assert payload < result.bytes_synced < 1.1 * payload
    # A spare keeps as many versions as a replica, but only of its own shard.
    kept = {rank: result.memory[rank]["weight versions of stage 0"]["predicted"] or 0 for rank in (0, 4)}
    assert kept[4] / kept[0] == pytest.approx(0.4, abs=0.02)


def test_a_spare_of_a_model_on_the_meta_device_makes_its_shard(tmp_path: Any) -> None:
    plan = pipedream.Plan.replicated(4, [2, 1])

    def train(plan: pipedream.Plan, name: str) -> list[float]:
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        result = pipedream.run(
            model,
            plan,
            data=[(torch.ones(4, 8) * i, torch.zeros(4, 8)) for i in range(5)],
            loss_fn=torch.nn.functional.mse_loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.05),
            save=tmp_path / name,
            seed=1,
            progress=False,
        )
        return result.losses

    assert train(plan.with_spare_shards([1, 0]), "spare") == train(plan, "none")


def _planned_gradients(training: Training) -> int:
    result, _ = train_in_pipeline(training)
    return int(result.memory[0]["parameter gradients"]["predicted"] or 0) if result.memory else 0


def test_a_rounds_gradients_wait_for_spares_only_where_the_next_round_can_begin(farm: Farm) -> None:
    def planned(replicas: tuple[int, ...], spares: tuple[int, ...], **how: Any) -> int:
        training = _training("mlp", replicas, spares, **how)
        return farm.results(_planned_gradients, training, num_ranks=sum((*replicas, *spares)))[0]

    alone: dict[str, Any] = {"schedule": "data_parallel"}
    # Chunks for a spare may need to be copied before they are sent. A replica's own shard is not copied.
    assert planned((2,), (1,), **alone) < 1.5 * planned((2,), (0,), **alone)
    assert planned((2, 1), (1, 0)) > 1.5 * planned((2, 1), (0, 0))


def _error_without_memory(training: Training) -> str:
    with pytest.raises(ValueError) as caught:
        train_in_pipeline(training, memory="1KiB")
    return str(caught.value)


def test_a_spare_that_does_not_fit_is_refused_by_its_name(farm: Farm) -> None:
    refused = farm.results(_error_without_memory, _training("mlp", (2, 1), (1, 0)), num_ranks=4)
    said = (
        r"memory is 1.00 KiB, but stage 0 spare 0 \(rank 3\) needs \d+.\d+ .iB, \d+.\d+ .iB more"
        r" \(.*weight versions .*\): give more memory"
    )
    assert re.match(said, refused[3]), refused[3]


def _refused(spares: tuple[int, ...], **options: Any) -> str:
    training = _training("mlp", (2, 1), spares)
    with pytest.raises(ValueError) as caught:
        train_in_pipeline(training, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync": "asp"}, "sync is 'asp': spares push and pull by rounds"),
        ({"sync": "allreduce"}, "sync is 'allreduce': a collective pushes nothing to spares"),
        ({"sync_every": 2}, "sync_every is 2: a collective pushes nothing to spares"),
        (
            {"codec": {"pushes": "factors"}},
            "codec is {'pushes': 'factors'}, which pushes factors: replicas make versions of factors by",
        ),
        ({"max_grad_norm": 1.0}, "max_grad_norm is 1.0: replicas alone tell each other of norms"),
        ({"autocast": "float16"}, "autocast is 'float16': replicas alone tell each other of norms"),
    ],
)
def test_what_spares_have_no_part_in_is_refused(options: dict[str, Any], said: str) -> None:
    refused = _refused((1, 0), **options)
    assert refused.startswith(f"stage 0 has spare shards, and {said}")
    assert refused.endswith("or use a plan without num_spare_shards")


def test_ties_with_spares_are_refused() -> None:
    training = Training("tied_apart", 2, replicas=(2, 1), spares=(1, 0))
    with pytest.raises(ValueError, match=r"stage 0 has spare shards, and stages 0 and 1 share a parameter"):
        train_in_pipeline(training)


def test_a_spare_without_a_part_is_refused() -> None:
    plan = pipedream.Plan.replicated(2, [2, 1]).with_spare_shards([2, 0])
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1))
    with pytest.raises(ValueError) as caught:
        pipedream.run(
            model,
            plan,
            data=[(torch.ones(2, 1), torch.ones(2, 1))] * 4,
            loss_fn=torch.nn.functional.mse_loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            progress=False,
        )
    assert str(caught.value) == (
        "stage 0 has 2 spare shards, and its parameters, which are too few, give only 1 of them a part: use a"
        " plan with no more num_spare_shards than that"
    )
