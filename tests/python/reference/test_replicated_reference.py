"""Tests the reference with replicated stages. Versions follow the formulas. A round is the minibatches of one
update. Without delays the reference equals training with larger minibatches. Otherwise it equals a loop that
is written out by hand here.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from models import CASES, Case
from pipedream import _core, reference
from pipedream.planning.plan import Plan, Stage
from torch import nn
from training import OPTIMIZERS, assert_close_state

# The tensors are tiny, so one thread is fastest.
pytestmark = pytest.mark.usefixtures("one_thread")

DRAINING = ("flush", "gpipe", "model_parallel")
PLANS = [(2, 1), (1, 2), (3, 1), (2, 2), (2, 1, 1), (1, 2, 1), (3, 2)]


def _plan(case: Case, num_replicas: Sequence[int]) -> Plan:
    stages = case.plan(len(num_replicas)).stages
    return Plan(
        tuple(
            Stage(stage.first_layer, stage.last_layer, replicas)
            for stage, replicas in zip(stages, num_replicas, strict=True)
        )
    )


def _options(case: Case, data: Sequence[Any], **options: Any) -> dict[str, Any]:
    return {"data": data, "loss_fn": case.loss_fn, "optimizer": OPTIMIZERS["sgd"], "seed": 1} | options


def _train_in_rounds(
    case: Case, model: nn.Module, data: Sequence[Any], minibatches_per_round: int
) -> list[float]:
    """Trains plainly with gradient accumulation. Each round of minibatches makes one step by the mean of its
    gradients.
    """
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    losses = []
    for begin in range(0, len(data), minibatches_per_round):
        members = data[begin : begin + minibatches_per_round]
        optimizer.zero_grad()
        for inputs, targets in members:
            loss = case.loss_fn(model(inputs), targets)
            (loss / len(members)).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("num_replicas", PLANS, ids=str)
@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync", "naive", "2bw", *DRAINING])
def test_the_versions_that_are_read_are_the_schedules(schedule: str, num_replicas: tuple[int, ...]) -> None:
    case = CASES["mlp"]
    plan = _plan(case, num_replicas)
    staleness = {"staleness": 2, "sync": "ssp"} if schedule == "pipedream" else {}
    microbatches = max((n - 1) * r for n, r in zip(plan.in_flight, num_replicas, strict=True))
    count = microbatches if schedule == "2bw" else 2
    result = reference.run(
        case.model(),
        plan,
        **_options(case, case.data(13), schedule=schedule, microbatches=count, **staleness),
    )
    options = _core.ScheduleOptions(
        schedule, plan.in_flight, count, plan.placement, staleness=staleness.get("staleness", 0)
    )
    assert result.microbatch_versions == [
        [
            [
                (
                    _core.forward_version(options, stage, minibatch, microbatch),
                    _core.backward_version(options, stage, minibatch, microbatch),
                )
                for microbatch in range(count)
            ]
            for minibatch in range(13)
        ]
        for stage in range(len(num_replicas))
    ]


@pytest.mark.parametrize("num_minibatches", [6, 7, 1])
def test_data_parallel_equals_training_with_larger_minibatches(num_minibatches: int) -> None:
    # A large minibatch has the samples of all replicas. The last one has fewer.
    case = CASES["transformer"]
    data = case.data(num_minibatches)
    model, plain = case.model(), case.model()
    plan = Plan((Stage(0, len(list(model)) - 1, 3),))
    result = reference.run(model, plan, **_options(case, data, schedule="data_parallel"))
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    large_losses = []
    for begin in range(0, num_minibatches, 3):
        inputs, targets = (torch.cat(parts) for parts in zip(*data[begin : begin + 3], strict=True))
        optimizer.zero_grad()
        loss = case.loss_fn(plain(inputs), targets)
        loss.backward()
        optimizer.step()
        large_losses.append(loss.item())
    rounds = [result.losses[begin : begin + 3] for begin in range(0, num_minibatches, 3)]
    assert [sum(losses) / len(losses) for losses in rounds] == pytest.approx(large_losses, rel=1e-12)
    assert_close_state(model.state_dict(), plain.state_dict(), 1e-10)
    assert result.versions == [[(i // 3, i // 3) for i in range(num_minibatches)]]


@pytest.mark.parametrize("num_replicas", PLANS, ids=str)
@pytest.mark.parametrize("schedule", DRAINING)
def test_draining_schedules_equal_plain_training_with_accumulation_over_the_least_common_multiple(
    schedule: str, num_replicas: tuple[int, ...]
) -> None:
    case = CASES["transformer"]
    data = case.data(11)
    model, plain = case.model(), case.model()
    result = reference.run(
        model, _plan(case, num_replicas), **_options(case, data, schedule=schedule, microbatches=2)
    )
    losses = _train_in_rounds(case, plain, data, math.lcm(2, *num_replicas) // 2)
    assert result.losses == pytest.approx(losses, rel=1e-12)
    assert_close_state(model.state_dict(), plain.state_dict(), 1e-10)


def _scale(weight: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, weight)
    return layer


@pytest.mark.parametrize("num_minibatches", [12, 11, 10, 1])
@pytest.mark.parametrize("staleness", [0, 1])
def test_weights_follow_the_recursion_worked_out_by_hand(num_minibatches: int, staleness: int) -> None:
    # The loss is (c b a x_i - y_i)^2, with one factor at each of three stages. The stages have 3, 2 and 1
    # replicas, and as many minibatches in flight at each replica. A minibatch reads a version of a that is
    # two updates late, one of b that is one update late, and the newest of c. A staleness adds to all three.
    rate = 0.05
    samples = [(math.sin(i + 1.0), math.cos(3.0 * i)) for i in range(num_minibatches)]
    weights = [[0.7], [-0.4], [1.1]]
    replicas, in_flight = (3, 2, 1), (3, 2, 1)
    sums = [0.0, 0.0, 0.0]
    losses = []
    for i, (x, y) in enumerate(samples):
        a, b, c = (weights[s][max(0, i // replicas[s] - in_flight[s] + 1 - staleness)] for s in range(3))
        error = c * b * a * x - y
        losses.append(error**2)
        for s, slope in enumerate((c * b * x, c * a * x, b * a * x)):
            sums[s] += 2 * error * slope
            if (i + 1) % replicas[s] == 0 or i + 1 == num_minibatches:
                num_members = i % replicas[s] + 1
                weights[s].append(weights[s][-1] - rate * sums[s] / num_members)
                sums[s] = 0.0
    model = nn.Sequential(_scale(0.7), _scale(-0.4), _scale(1.1))
    plan = Plan(tuple(Stage(s, s, replicas[s]) for s in range(3)))
    assert plan.in_flight == in_flight
    data = [
        (torch.tensor([[x]], dtype=torch.float64), torch.tensor([[y]], dtype=torch.float64))
        for x, y in samples
    ]
    result = reference.run(
        model,
        plan,
        data=data,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=rate),
        sync="ssp",
        staleness=staleness,
    )
    assert result.losses == pytest.approx(losses, rel=1e-12)
    assert [parameter.item() for parameter in model.parameters()] == pytest.approx(
        [stage[-1] for stage in weights], rel=1e-12
    )


class _Twice(nn.Module):
    """Uses the layer of the first stage, which owns it."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.shared(x))


@pytest.mark.parametrize("replicas", [(3, 2), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_tied_weight_follows_the_recursion_worked_out_by_hand(
    replicas: tuple[int, int], staleness: int
) -> None:
    # The loss is (w w x_i - y_i)^2. Both stages use w, and the first stage owns it. Both read the version
    # that is n_0 - 1 rounds late at the owner. Its r_0 replicas have n_0 minibatches in flight each, and a
    # round has r_0 minibatches. A staleness adds to the delay.
    rate, num_minibatches = 0.05, 11
    samples = [(math.sin(i + 1.0), math.cos(3.0 * i)) for i in range(num_minibatches)]
    weights, total, losses = [0.7], 0.0, []
    model = nn.Sequential(_scale(0.7), nn.Identity())
    model[1] = _Twice(cast(nn.Linear, model[0]))
    plan = Plan((Stage(0, 0, replicas[0]), Stage(1, 1, replicas[1])))
    for i, (x, y) in enumerate(samples):
        w = weights[max(0, i // replicas[0] - plan.in_flight[0] + 1 - staleness)]
        error = w * w * x - y
        losses.append(error**2)
        total += 2 * error * 2 * w * x
        if (i + 1) % replicas[0] == 0 or i + 1 == num_minibatches:
            weights.append(weights[-1] - rate * total / (i % replicas[0] + 1))
            total = 0.0
    data = [
        (torch.tensor([[x]], dtype=torch.float64), torch.tensor([[y]], dtype=torch.float64))
        for x, y in samples
    ]
    options: dict[str, Any] = {"sync": "ssp", "staleness": staleness}
    options["optimizer"] = functools.partial(torch.optim.SGD, lr=rate)
    result = reference.run(model, plan, data=data, loss_fn=nn.functional.mse_loss, **options)
    assert result.losses == pytest.approx(losses, rel=1e-12)
    assert next(model.parameters()).item() == pytest.approx(weights[-1], rel=1e-12)


def test_replica_counts_change_no_dropout_mask() -> None:
    # With a rate of 0 the weights stay the same, so only the masks could differ.
    case = CASES["dropout"]
    options = _options(case, case.data(6), optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    straight = reference.run(case.model(), case.plan(2), **options).losses
    for num_replicas in ((2, 1), (1, 3), (3, 2)):
        assert reference.run(case.model(), _plan(case, num_replicas), **options).losses == straight
    assert reference.run(case.model(), case.plan(2), **options | {"seed": 2}).losses != straight


def test_each_replica_has_running_statistics_of_its_own_whose_mean_is_returned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.25), nn.Linear(3, 1)).double()
    data = [
        (torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)) for _ in range(5)
    ]
    alone = [copy.deepcopy(model[0]) for _ in range(2)]
    for i, (inputs, _) in enumerate(data):
        alone[i % 2](inputs)
    reference.run(
        model,
        Plan((Stage(0, 0, 2), Stage(1, 1))),
        data=data,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
    )
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(replica, name) for replica in alone]).mean(0)
        assert torch.allclose(getattr(norm, name), mean, rtol=1e-12)
    assert norm.num_batches_tracked == 3, "of the first replica"


def test_momentum_and_the_scheduler_take_a_step_per_update() -> None:
    case = CASES["mlp"]
    data = case.data(5)
    options: dict[str, Any] = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "lr_scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    }
    model, plain = case.model(), case.model()
    reference.run(model, _plan(case, (2, 2)), **_options(case, data, schedule="flush", **options))
    optimizer = options["optimizer"](plain.parameters())
    scheduler = options["lr_scheduler"](optimizer)
    for begin in (0, 2, 4):
        optimizer.zero_grad()
        for inputs, targets in data[begin : begin + 2]:
            (case.loss_fn(plain(inputs), targets) / len(data[begin : begin + 2])).backward()
        optimizer.step()
        scheduler.step()
    assert_close_state(model.state_dict(), plain.state_dict(), 1e-10)


@pytest.mark.parametrize("num_minibatches", [8, 9, 10])
def test_replicas_that_update_alone_are_models_of_their_own_whose_mean_is_taken(num_minibatches: int) -> None:
    case = CASES["mlp"]
    data = case.data(num_minibatches, short_last=False)
    plan = Plan((Stage(0, len(list(case.model())) - 1, 2),))
    model = case.model()
    options = _options(case, data, schedule="data_parallel", sync_every=2)
    losses = reference.run(model, plan, **options).losses
    alone = [case.model(), case.model()]
    optimizers = [OPTIMIZERS["sgd"](replica.parameters()) for replica in alone]
    expected = []
    for minibatch, (inputs, targets) in enumerate(data):
        optimizers[minibatch % 2].zero_grad()
        loss = case.loss_fn(alone[minibatch % 2](inputs), targets)
        loss.backward()
        optimizers[minibatch % 2].step()
        expected.append(loss.item())
        if (minibatch + 1) % 4 == 0 or minibatch + 1 == num_minibatches:
            with torch.no_grad():
                for copies in zip(*(replica.parameters() for replica in alone), strict=True):
                    mean = torch.stack([parameter.detach() for parameter in copies]).mean(0)
                    for parameter in copies:
                        parameter.copy_(mean)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert_close_state(model.state_dict(), alone[0].state_dict(), 1e-10)


def test_allreduce_is_bsp() -> None:
    case = CASES["cnn"]
    models = [case.model(), case.model()]
    results = [
        reference.run(model, _plan(case, (2, 1)), **_options(case, case.data(5), sync=sync))
        for model, sync in zip(models, ("bsp", "allreduce"), strict=True)
    ]
    assert results[0] == results[1]
    assert all(
        torch.equal(one, other)
        for one, other in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("case_name", "num_replicas", "options", "message"),
    [
        ("mlp", (2, 1), {"sync": "asp"}, "sync is 'asp': what it reads depends on who is faster"),
        ("mlp", (2, 1), {"sync": "soon"}, "sync is 'soon': use one of 'bsp', 'ssp', 'asp', 'allreduce'"),
        ("mlp", (2, 1), {"staleness": 1}, "staleness is 1, and sync is 'bsp'"),
        (
            "mlp",
            (2, 1),
            {"sync": "ssp", "staleness": 1, "schedule": "flush"},
            "staleness is 1, and schedule is 'flush'",
        ),
        ("mlp", (2, 1), {"sync": "ssp", "staleness": -1}, "staleness is -1"),
        ("mlp", (2, 1), {"schedule": "interleaved"}, "it runs one replica of each stage"),
        (
            "mlp",
            (2, 1),
            {"schedule": "data_parallel"},
            "'data_parallel', and the plan has 2 stages",
        ),
        (
            "mlp",
            (3, 1),
            {"schedule": "pipedreams", "microbatches": 5},
            "schedule is 'pipedreams': use one of",
        ),
        ("mlp", (2, 1), {"sync": "ssp", "sync_every": 2}, "sync_every is 2, and sync is 'ssp'"),
        ("mlp", (2, 1), {"sync_every": 2, "max_grad_norm": 1.0}, "sync_every is 2, and max_grad_norm is 1.0"),
        ("tied_apart", (2, 1), {"sync_every": 2}, "of 2 and 1 replicas, share a parameter: each replica"),
        (
            "tied_apart",
            (2, 3),
            {"sync_every": 2},
            "stages 0 and 1, of 2 and 3 replicas, share a parameter",
        ),
    ],
)
def test_what_cannot_be_replicated_is_refused(
    case_name: str, num_replicas: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    case = CASES[case_name]
    with pytest.raises(ValueError, match=message):
        reference.run(case.model(), _plan(case, num_replicas), **_options(case, case.data(4), **options))
