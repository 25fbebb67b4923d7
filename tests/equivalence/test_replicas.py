"""Tests that replicated stages give the oracle's numbers with every plan, schedule and optimizer that allows
replicas.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from codec_oracle import CodecOracle
from farm import Farm
from oracle import assert_equals_reference
from pipedream import reference
from pipedream.update.shards import ShardLayout
from torch import nn
from training import (
    OPTIMIZERS,
    CountingSGD,
    Overflowing,
    Training,
    Unsized,
    assert_close_losses,
    assert_close_state,
    train_by_reference,
    train_in_pipeline,
    weight_decay_by_name,
)

_PLANS = [(2, 1), (1, 2), (3, 1), (2, 2), (2, 1, 1), (1, 2, 1), (3, 2)]
_FLOAT16 = 1e-5  # relative tolerance for float32 gradients that were computed in float16
_NAMES = ["-".join(map(str, plan)) for plan in _PLANS]


def _training(case_name: str, replicas: tuple[int, ...], **how: Any) -> Training:
    return Training(case_name, len(replicas), replicas=replicas, **how)


@pytest.mark.parametrize("replicas", _PLANS, ids=_NAMES)
@pytest.mark.parametrize("case_name", ["cnn", "dropout"])
def test_a_plan_with_replicas_gives_the_references_result(
    farm: Farm, case_name: str, replicas: tuple[int, ...]
) -> None:
    # With 7 minibatches, the last round of 2 or 3 replicas is incomplete. A round is the minibatches of one
    # update.
    result, _ = assert_equals_reference(farm, _training(case_name, replicas))
    assert len(result.worker_names) == sum(replicas)


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
@pytest.mark.parametrize("replicas", [(4, 1), (1, 4)], ids=["4-1", "1-4"])
def test_four_replicas_of_a_stage_give_the_references_result(
    farm: Farm, replicas: tuple[int, ...], sync: str
) -> None:
    assert_equals_reference(farm, _training("cnn", replicas, sync=sync, num_minibatches=10))


@pytest.mark.parametrize("case_name", ["transformer", "mlp"])
def test_embeddings_and_float32_give_the_references_result(farm: Farm, case_name: str) -> None:
    assert_equals_reference(farm, _training(case_name, (2, 1), dtype=torch.float32))


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [
        ("vertical_sync", (2, 1)),
        ("vertical_sync", (1, 2)),
        ("flush", (2, 2)),
        ("gpipe", (1, 2)),
        ("naive", (2, 1)),
        ("model_parallel", (2, 2)),
    ],
    ids=str,
)
def test_other_schedules_give_the_references_result(
    farm: Farm, schedule: str, replicas: tuple[int, ...]
) -> None:
    assert_equals_reference(farm, _training("cnn", replicas, schedule=schedule))


# A round is the minibatches of one update. These schedules drain, so a round has lcm(2, 3) = 6 minibatches at
# both stages: 2 or 3 for each replica. The last round has 1, 3, 4 or 5.
@pytest.mark.parametrize("num_minibatches", [1, 3, 4, 5, 9, 11])
@pytest.mark.parametrize("replicas", [(2, 3), (3, 2)], ids=["2-3", "3-2"])
def test_a_short_round_of_several_minibatches_each_gives_the_references_result(
    farm: Farm, replicas: tuple[int, ...], num_minibatches: int
) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.5)  # Adam would hide a wrong divisor
    schedule = "gpipe" if num_minibatches % 2 == 0 else "flush"
    how: dict[str, Any] = {"schedule": schedule, "num_minibatches": num_minibatches, "optimizer": sgd}
    assert_equals_reference(farm, _training("cnn", replicas, short_last=False, **how))


@pytest.mark.parametrize("num_minibatches", [1, 2, 4, 5, 8])
def test_replicas_of_the_only_stage_may_be_told_of_the_end(farm: Farm, num_minibatches: int) -> None:
    how: dict[str, Any] = {"schedule": "data_parallel", "num_minibatches": num_minibatches}
    assert_equals_reference(farm, _training("mlp", (3,), **how))


def test_microbatches_with_two_versions_give_the_references_result(farm: Farm) -> None:
    how: dict[str, Any] = {"schedule": "2bw", "microbatches": 4, "short_last": False}
    assert_equals_reference(farm, _training("mlp", (2, 1), **how))


def _sgd_by_delay(parameters: Any, delay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1 / (1 + delay))


@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        ((1, 1, 1), {}),
        ((1, 1, 1), {"microbatches": 2}),
        ((2, 1), {"microbatches": 3}),
        ((1, 2), {"schedule": "unstashed", "microbatches": 4}),
        ((2, 1), {"schedule": "vertical_sync", "microbatches": 3}),
        ((1, 1), {"schedule": "2bw", "microbatches": 2}),
        ((2, 1), {"schedule": "flush"}),
        ((2, 1), {"sync": "ssp", "staleness": 1}),
    ],
    ids=str,
)
def test_an_optimizer_is_told_its_stages_mean_delay(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    """The rate depends on the delay, which the reference counts microbatch by microbatch."""
    assert_equals_reference(farm, _training("mlp", replicas, optimizer=_sgd_by_delay, **how))


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2)], ids=["2-1", "1-2", "3-2"])
def test_older_versions_give_the_references_result(
    farm: Farm, replicas: tuple[int, ...], staleness: int
) -> None:
    how: dict[str, Any] = {"sync": "ssp", "staleness": staleness, "num_minibatches": 11}
    assert_equals_reference(farm, _training("mlp", replicas, **how))


@pytest.mark.parametrize("name", ["adam", "adagrad", "by name"])
def test_an_optimizer_has_the_state_of_one_shard_and_gives_the_references_result(
    farm: Farm, name: str
) -> None:
    optimizer = {**OPTIMIZERS, "by name": weight_decay_by_name}[name]
    assert_equals_reference(farm, _training("cnn", (2, 1), optimizer=optimizer))


def _muon_with_adamw(named_parameters: Any) -> torch.optim.Optimizer:
    rest = functools.partial(torch.optim.AdamW, lr=0.01)
    return pipedream.optim.Muon(named_parameters, lr=0.05, rest=rest)


def test_muon_gives_the_references_result(farm: Farm) -> None:
    assert_equals_reference(farm, _training("mlp", (2, 1), optimizer=_muon_with_adamw))


def test_native_optimizers_give_the_result_of_torchs(farm: Farm) -> None:
    arguments = {"lr": 0.01, "weight_decay": 0.1}
    training = _training("mlp", (1, 2), optimizer=functools.partial(torch.optim.AdamW, **arguments))
    assert_equals_reference(farm, training, native=functools.partial(pipedream.optim.AdamW, **arguments))


def test_an_optimizer_that_needs_whole_tensors_has_them(farm: Farm) -> None:
    optimizer = functools.partial(torch.optim.Adafactor, lr=0.05)
    assert_equals_reference(farm, _training("mlp", (2, 1), optimizer=optimizer))


class _OfWholeTensors(torch.optim.SGD):
    """A subclass of SGD. Its step() might read whole tensors, so its shards are whole tensors."""


@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        ((3, 1), {}),
        ((1, 3), {"schedule": "flush", "max_grad_norm": 0.02}),
        ((3, 1), {"sync": "ssp", "staleness": 3, "num_minibatches": 14}),
    ],
    ids=["3-1", "1-3 flush", "3-1 ssp"],
)
def test_whole_tensors_of_unequal_sizes_wait_for_fewer_slots_than_there_are(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    """Each chunk is a whole tensor, and each slot is as large as the largest tensor. So fewer slots than
    chunks have room for the gradients of a round."""
    optimizer = functools.partial(_OfWholeTensors, lr=0.05, momentum=0.9)
    assert_equals_reference(farm, _training("transformer", replicas, optimizer=optimizer, **how))


# If the schedule drains, there is one norm for all stages. Otherwise each stage has its own norm.
_OF_NORMS = [
    *((schedule, (3, 2)) for schedule in ("flush", "gpipe", "pipedream", "vertical_sync", "naive")),
    ("flush", (2, 1)),
    ("pipedream", (1, 2)),
]


# The norm of every round is far above 0.02, so all gradients are clipped. Adam would hide a wrong divisor.
@pytest.mark.parametrize(("schedule", "replicas"), _OF_NORMS, ids=str)
def test_the_mean_of_a_rounds_gradients_is_clipped(
    farm: Farm, schedule: str, replicas: tuple[int, ...]
) -> None:
    how: dict[str, Any] = {"schedule": schedule, "max_grad_norm": 0.02}
    training = _training("cnn", replicas, **how)
    _, state = assert_equals_reference(farm, training)
    free = train_by_reference(replace(training, max_grad_norm=None))[1]
    assert any(not torch.allclose(state[name], free[name], rtol=1e-3) for name in state)


@pytest.mark.parametrize(
    "how",
    [
        {"sync": "ssp", "staleness": 2, "num_minibatches": 11},
        {"schedule": "2bw", "microbatches": 4, "short_last": False},
        {"optimizer": functools.partial(torch.optim.Adafactor, lr=0.05)},
    ],
    ids=["ssp", "2bw", "whole tensors"],
)
def test_stale_and_whole_shards_clip_alike(farm: Farm, how: dict[str, Any]) -> None:
    assert_equals_reference(farm, _training("mlp", (2, 1), max_grad_norm=0.02, **how))


def test_native_optimizers_clip_their_shard_by_the_norm_of_all(farm: Farm) -> None:
    arguments = {"lr": 0.05, "momentum": 0.9}
    training = _training(
        "mlp", (2, 1), optimizer=functools.partial(torch.optim.SGD, **arguments), max_grad_norm=0.02
    )
    assert_equals_reference(farm, training, native=functools.partial(pipedream.optim.SGD, **arguments))


@pytest.mark.parametrize("num_minibatches", [1, 2, 5])
def test_data_parallel_clips_the_mean_however_short_the_last_round_is(
    farm: Farm, num_minibatches: int
) -> None:
    training = _training(
        "mlp", (3,), schedule="data_parallel", max_grad_norm=0.02, num_minibatches=num_minibatches
    )
    assert_equals_reference(farm, training, data=Unsized(training.data()))


@pytest.mark.parametrize(("schedule", "replicas"), _OF_NORMS, ids=str)
def test_rounds_that_overflow_float16_are_skipped_at_all_replicas(
    farm: Farm, schedule: str, replicas: tuple[int, ...]
) -> None:
    how: dict[str, Any] = {"autocast": "float16", "max_grad_norm": 20.0, "num_minibatches": 31}
    sgd = functools.partial(CountingSGD, lr=1e-3)
    training = Overflowing(
        "mlp", len(replicas), torch.float32, sgd, replicas=replicas, schedule=schedule, **how
    )
    CountingSGD.num_steps = 0
    reference.run(training.model(), training.plan, **training.options())
    drains = schedule in ("flush", "gpipe")
    rounds = [-(-31 // (math.lcm(*replicas) if drains else count)) for count in replicas]
    assert 0 < CountingSGD.num_steps < sum(rounds), "no update was skipped, or all were"
    assert_equals_reference(farm, training, relative=_FLOAT16)


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_parameters_that_are_tied_within_the_only_stage_have_one_gradient(farm: Farm, sync: str) -> None:
    training = _training("tied_apart", (2,), schedule="data_parallel", sync=sync)
    assert_equals_reference(farm, training)


class _HalfFrozen(nn.Module):
    """A module whose second layer has no gradient in some minibatches."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.always = nn.Linear(width, width, bias)
        self.sometimes = nn.Linear(width, width, bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.always(inputs)
        return self.sometimes(output) if inputs[0, 0] > 0 else output


class _WholeTensorSGD(torch.optim.SGD):
    """A subclass of SGD. It gets whole tensors, as any optimizer does that is not known to work element by
    element.
    """


def _half_frozen(
    used: list[bool], fills: bool
) -> tuple[nn.Sequential, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Returns a model and its minibatches. With `fills` each gradient fills its chunk. Otherwise chunks have
    gaps between their gradients.
    """
    torch.manual_seed(0)
    width = 8 if fills else 3
    model = nn.Sequential(_HalfFrozen(width, not fills), nn.Linear(width, width, not fills)).double()
    inputs = [torch.full((2, width), 1.0 if use else -1.0).double() for use in used]
    return model, [(of_minibatch, torch.ones_like(of_minibatch)) for of_minibatch in inputs]


def _train_half_frozen(
    used: list[bool], sync: str, fills: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, data = _half_frozen(used, fills)
    plan = pipedream.Plan((pipedream.planning.plan.Stage(0, 1, 2),))
    make = _WholeTensorSGD if fills else torch.optim.SGD
    optimizer = functools.partial(make, lr=0.1, momentum=0.9, weight_decay=0.1)
    how: dict[str, Any] = {"sync": sync, "seed": 1, "progress": False}
    result = pipedream.run(model, plan, data=data, loss_fn=nn.functional.mse_loss, optimizer=optimizer, **how)
    return result.losses, model.state_dict()


@pytest.mark.parametrize(("sync", "fills"), [("bsp", False), ("bsp", True), ("allreduce", False)])
def test_a_parameter_without_a_gradient_at_any_replica_is_not_updated_and_a_missing_one_counts_as_zero(
    farm: Farm, sync: str, fills: bool
) -> None:
    used = [True, False, False, False, False, True]
    losses, state = farm.results(_train_half_frozen, used, sync, fills, num_ranks=2)[0]
    model, data = _half_frozen(used, fills)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    expected = []
    for first in range(0, len(used), 2):
        optimizer.zero_grad()
        for inputs, targets in data[first : first + 2]:
            loss = nn.functional.mse_loss(model(inputs), targets)
            expected.append(loss.item())
            (loss / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert_close_losses(losses, expected, 1e-12)
    assert_close_state(state, model.state_dict(), 1e-12)


class _WeightOfViews(nn.Module):
    """Sums views of its parameters. Their gradients lie in the memory of the sum's gradient. The backward
    still needs that memory for the other parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(4, 4))
        self.gain = nn.Parameter(torch.randn(4, 4))
        self.first = nn.Parameter(torch.randn(16))
        self.second = nn.Parameter(torch.randn(16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.base * self.gain + self.first.view(4, 4) + self.second.view(4, 4)
        return nn.functional.linear(inputs, weight)


def _views() -> tuple[nn.Sequential, pipedream.Plan, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(_WeightOfViews(), nn.Tanh(), nn.Linear(4, 4))
    data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(6)]
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"data": data, "loss_fn": nn.functional.mse_loss, "optimizer": optimizer}
    options |= {"seed": 1, "schedule": "data_parallel", "autocast": "float16"}
    return model, pipedream.Plan((pipedream.planning.plan.Stage(0, 2, 2),)), options


def _train_views(sync: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, plan, options = _views()
    result = pipedream.run(model, plan, sync=sync, progress=False, **options)
    return result.losses, model.state_dict()


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_a_loss_scale_is_taken_once_from_gradients_that_share_memory(farm: Farm, sync: str) -> None:
    losses, state = farm.results(_train_views, sync, num_ranks=2)[0]
    model, plan, options = _views()
    expected = reference.run(model, plan, **options)
    assert_close_losses(losses, expected.losses, _FLOAT16)
    assert_close_state(state, model.state_dict(), _FLOAT16)


def _train_views_alone(max_norm: float, microbatches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, _, options = _views()
    options |= {"autocast": None, "max_grad_norm": max_norm, "microbatches": microbatches}
    result = pipedream.run(model, pipedream.Plan.straight(3, 1), progress=False, **options)
    return result.losses, model.state_dict()


@pytest.mark.parametrize(("max_norm", "microbatches"), [(0.1, 1), (1e9, 2), (0.1, 2)])
def test_gradients_that_share_memory_are_clipped_and_added_up_once(
    farm: Farm, max_norm: float, microbatches: int
) -> None:
    losses, state = farm.results(_train_views_alone, max_norm, microbatches, num_ranks=1)[0]
    model, _, options = _views()
    expected = []
    for inputs, targets in options["data"]:
        loss = nn.functional.mse_loss(model(inputs), targets)
        expected.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient * (max_norm / norm).clamp(max=1.0))
    assert_close_losses(losses, expected, 1e-5)
    assert_close_state(state, model.state_dict(), 1e-5)
    model, _, options = _views()
    options |= {"autocast": None, "max_grad_norm": max_norm, "microbatches": microbatches}
    reference.run(model, pipedream.Plan.straight(3, 1), **options)
    assert_close_state(state, model.state_dict(), 1e-6)


@pytest.mark.parametrize("num_minibatches", [1, 2, 5, 6])
@pytest.mark.parametrize("replicas", [(2, 1), (1, 3), (2, 2)], ids=["2-1", "1-3", "2-2"])
def test_the_end_of_data_without_a_length_is_found_in_any_round(
    farm: Farm, replicas: tuple[int, ...], num_minibatches: int
) -> None:
    training = _training("mlp", replicas, num_minibatches=num_minibatches)
    assert_equals_reference(farm, training, data=Unsized(training.data()))


def test_epochs_do_not_end_a_round(farm: Farm) -> None:
    training = _training("dropout", (2, 1), epochs=3, num_minibatches=3, short_last=False, shuffled=True)
    result, _ = assert_equals_reference(farm, training)
    assert result.epoch_sizes == [3, 3, 3]


@pytest.mark.parametrize(
    ("replicas", "microbatches"),
    # A worker that gets data holds a group of minibatches besides those in flight. A group is the fewest
    # minibatches after which the rounds of all stages end. The last of these plans hangs if there is room for
    # fewer.
    [((2, 2), 1), ((1, 2, 1), 1), ((1, 2), 3)],
    ids=["2-2", "1-2-1", "1-2 with 3 microbatches"],
)
def test_what_the_caller_iterates_goes_to_the_replica_that_has_it(
    replicas: tuple[int, ...], microbatches: int
) -> None:
    training = _training("mlp", replicas, microbatches=microbatches)
    expected, expected_state = train_in_pipeline(training)
    data = (batch for batch in training.data())
    result, state = train_in_pipeline(training, data=data)
    assert_close_losses(result.losses, expected.losses, 1e-12)
    assert_close_state(state, expected_state, 1e-12)
    readers = [rank for rank, source in enumerate(result.data_sources) if "forwarded" in source]
    last = training.plan.num_stages - 1
    assert readers == [rank for rank in range(sum(replicas)) if {0, last} & {*training.plan.stages_of(rank)}]


def test_the_state_of_an_optimizer_is_shared_among_the_replicas(farm: Farm) -> None:
    training = _training("wide", (2, 1), optimizer=OPTIMIZERS["adam"])
    result, _ = assert_equals_reference(farm, training)
    states = [terms["optimizer state of torch"]["peak"] or 0 for terms in result.memory[:2]]
    straight, _ = assert_equals_reference(farm, Training("wide", 2, optimizer=OPTIMIZERS["adam"]))
    whole = straight.memory[0]["optimizer state of torch"]["peak"] or 0
    assert sum(states) == pytest.approx(whole, rel=0.05)
    assert max(states) <= 0.55 * whole


def _pushed_case(codec: str, grows: bool) -> tuple[nn.Sequential, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Returns a model and data. Shards have one chunk each, or two with topk, so that each chunk needs its
    own residual.
    """
    torch.manual_seed(0)
    inputs, hidden, outputs = (350, 700, 450) if codec.startswith("topk") else (70, 90, 30)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    sizes = [4] * (3 * 4 - 1)
    if grows:  # a larger minibatch in the third round
        sizes[7] = 5
    return model, [(torch.randn(n, inputs).double(), torch.randn(n, outputs).double()) for n in sizes]


def _train_with_encoded_pushes(
    codec: str, num_spares: int, grows: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, data = _pushed_case(codec, grows)
    stage = pipedream.planning.plan.Stage(0, len(model) - 1, 3, num_spare_shards=num_spares)
    result = pipedream.run(
        model,
        pipedream.Plan((stage,)),
        data=Unsized(data) if grows else data,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.5),
        codec={"pushes": codec},
        memory="1GiB",  # without a limit a plan of one stage does not check sizes
        seed=1,
        progress=False,
    )
    assert result.drained_at == ([6] if grows else [])
    return result.losses, model.state_dict()


@pytest.mark.parametrize(
    ("codec", "num_spares", "grows"),
    [
        ("bf16", 0, False),
        ("int8", 0, False),
        ("topk:0.1", 0, True),
        ("bf16", 1, False),
        ("topk:0.1", 2, True),
    ],
)
def test_encoded_pushes_give_the_mean_of_what_their_codec_makes_of_the_others_gradients(
    farm: Farm, codec: str, num_spares: int, grows: bool
) -> None:
    """`grows` is whether a larger minibatch makes the run plan its memory again."""
    ranks = 3 + num_spares
    losses, state = farm.results(_train_with_encoded_pushes, codec, num_spares, grows, num_ranks=ranks)[0]
    model, data = _pushed_case(codec, grows)
    parameters = list(model.parameters())
    named = list(model.named_parameters())
    layout = ShardLayout(named, 3, whole_tensors=False, num_spares=num_spares)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    codecs, expected = CodecOracle(None), []
    num_turns = 2 if codec.startswith("topk") else 1
    assert len(layout.chunks) == num_turns * ranks
    for first in range(0, len(data), 3):
        batches = data[first : first + 3]
        means = [torch.zeros_like(parameter) for parameter in parameters]
        for replica, (inputs, targets) in enumerate(batches):
            loss = nn.functional.mse_loss(model(inputs), targets)
            expected.append(loss.item())
            gradients = [g.flatten() for g in torch.autograd.grad(loss, parameters)]
            for chunk in layout.chunks:
                content = torch.zeros(chunk.num_bytes // 8).double()  # with the gaps between parameters
                for piece in chunk.pieces:
                    of_piece = gradients[piece.parameter][piece.first : piece.first + piece.count]
                    content[piece.begin_bytes // 8 :][: piece.count] = of_piece
                if chunk.shard != replica:
                    content = codecs.through(codec, (replica, chunk.begin_bytes), content)
                for piece in chunk.pieces:
                    target = means[piece.parameter].flatten()[piece.first : piece.first + piece.count]
                    target += content[piece.begin_bytes // 8 :][: piece.count] / len(batches)
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean
        optimizer.step()
    assert_close_losses(losses, expected, 1e-9)
    assert_close_state(state, model.state_dict(), 1e-9)


# ---- Replicas with sync="allreduce". An all-reduce does not add gradients in the order of the replicas ----


@pytest.mark.parametrize("replicas", _PLANS, ids=_NAMES)
def test_replicas_that_reduce_together_give_the_references_result(
    farm: Farm, replicas: tuple[int, ...]
) -> None:
    result, _ = assert_equals_reference(farm, _training("cnn", replicas, sync="allreduce"))
    assert not any("pushed" in term or "pulled" in term for terms in result.memory for term in terms)


@pytest.mark.parametrize("schedule", ["vertical_sync", "flush", "gpipe", "naive", "model_parallel"])
def test_other_schedules_reduce_together_to_the_references_result(farm: Farm, schedule: str) -> None:
    how: dict[str, Any] = {"schedule": schedule, "num_minibatches": 10, "short_last": False}
    sgd = functools.partial(torch.optim.SGD, lr=0.5)  # Adam would hide a wrong divisor
    assert_equals_reference(farm, _training("cnn", (3, 2), sync="allreduce", optimizer=sgd, **how))


@pytest.mark.parametrize(
    "how",
    [
        {"schedule": "2bw", "microbatches": 4, "short_last": False},
        {"max_grad_norm": 0.02},
        {"optimizer": functools.partial(torch.optim.Adafactor, lr=0.05)},
        {"dtype": torch.float32},
    ],
    ids=["2bw", "clipped", "whole tensors", "float32"],
)
def test_what_else_is_reduced_together_gives_the_references_result(farm: Farm, how: dict[str, Any]) -> None:
    assert_equals_reference(farm, _training("mlp", (2, 1), sync="allreduce", **how))


def test_rounds_that_overflow_are_skipped_where_replicas_reduce_together(farm: Farm) -> None:
    how: dict[str, Any] = {"autocast": "float16", "max_grad_norm": 20.0, "num_minibatches": 31}
    sgd = functools.partial(torch.optim.SGD, lr=1e-3)
    training = Overflowing(
        "mlp", 1, torch.float32, sgd, replicas=(2,), schedule="data_parallel", sync="allreduce", **how
    )
    assert_equals_reference(farm, training, relative=_FLOAT16)


@pytest.mark.parametrize("num_minibatches", [1, 2, 5, 6])
@pytest.mark.parametrize("replicas", [(3,), (1, 3), (2, 1)], ids=["3", "1-3", "2-1"])
def test_replicas_that_reduce_together_find_the_end_in_any_round(
    farm: Farm, replicas: tuple[int, ...], num_minibatches: int
) -> None:
    schedule = "data_parallel" if len(replicas) == 1 else "pipedream"
    how: dict[str, Any] = {"sync": "allreduce", "schedule": schedule, "num_minibatches": num_minibatches}
    training = _training("mlp", replicas, **how)
    assert_equals_reference(farm, training, data=Unsized(training.data()))


def test_local_workers_reduce_together() -> None:
    training = _training("mlp", (2, 1), sync="allreduce")
    result, state = train_in_pipeline(training)
    expected, expected_state = train_by_reference(training)
    assert_close_losses(result.losses, expected.losses, 1e-12)
    assert_close_state(state, expected_state, 1e-12)


def test_each_replica_that_reduces_together_has_the_whole_state(farm: Farm) -> None:
    training = _training("wide", (2, 1), optimizer=OPTIMIZERS["adam"], sync="allreduce")
    result, _ = assert_equals_reference(farm, training)
    states = [terms["optimizer state of torch"]["peak"] or 0 for terms in result.memory[:2]]
    straight, _ = assert_equals_reference(farm, Training("wide", 2, optimizer=OPTIMIZERS["adam"]))
    assert states == [straight.memory[0]["optimizer state of torch"]["peak"]] * 2


# ---- Replicas that take the mean of their weights once in several rounds ----


@pytest.mark.parametrize("sync_every", [2, 3])
@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2)], ids=["2-1", "1-2", "3-2"])
def test_replicas_that_update_alone_for_some_rounds_give_the_references_result(
    farm: Farm, replicas: tuple[int, ...], sync_every: int
) -> None:
    how: dict[str, Any] = {"sync_every": sync_every, "num_minibatches": 11, "optimizer": OPTIMIZERS["adam"]}
    assert_equals_reference(farm, _training("cnn", replicas, **how))


@pytest.mark.parametrize("schedule", ["vertical_sync", "flush", "naive"])
def test_other_schedules_keep_replicas_alike_once_in_some_rounds(farm: Farm, schedule: str) -> None:
    how: dict[str, Any] = {"schedule": schedule, "num_minibatches": 20, "short_last": False}
    assert_equals_reference(farm, _training("cnn", (3, 2), sync_every=2, **how))


@pytest.mark.parametrize("num_minibatches", [1, 5, 6])
def test_data_parallel_replicas_update_alone_to_the_end_of_any_round(
    farm: Farm, num_minibatches: int
) -> None:
    how: dict[str, Any] = {"schedule": "data_parallel", "num_minibatches": num_minibatches}
    training = _training("mlp", (3,), sync_every=2, **how)
    assert_equals_reference(farm, training, data=Unsized(training.data()))


def test_native_optimizers_update_alone(farm: Farm) -> None:
    arguments = {"lr": 0.05, "momentum": 0.9}
    training = _training(
        "mlp", (2, 1), optimizer=functools.partial(torch.optim.SGD, **arguments), sync_every=2
    )
    assert_equals_reference(farm, training, native=functools.partial(pipedream.optim.SGD, **arguments))


def _train_by_sparse_adam(sync: str) -> str:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    plan = pipedream.Plan((pipedream.planning.plan.Stage(0, 0, 2),))
    data = [(torch.tensor([[1]]), torch.zeros(1, 1, 3))] * 2
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "sync": sync, "progress": False}
    with pytest.raises(ValueError, match="SparseAdam") as caught:
        pipedream.run(model, plan, data=data, optimizer=torch.optim.SparseAdam, **options)
    return str(caught.value)


@pytest.mark.parametrize("sync", ["bsp", "allreduce"])
def test_an_optimizer_of_sparse_gradients_is_refused(farm: Farm, sync: str) -> None:
    message = (
        "stage 0 has 2 replicas, and optimizer is SparseAdam: replicas exchange dense gradients; use Adam, or"
        " a straight plan (partition(..., straight=True))"
    )
    assert farm.results(_train_by_sparse_adam, sync, num_ranks=2) == [message] * 2
