"""Tests the reference. Without delays it must equal plain training. With delays it must equal a loop that is
written out by hand here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import Row, covering_rows, parametrize_pairs
from models import CASES, Case, TiedHead, squared_error, straight_plan
from pipedream import reference
from pipedream.planning.plan import Plan, Stage
from torch import nn
from torch.utils.data import DataLoader
from training import (
    OPTIMIZERS,
    State,
    Training,
    assert_close_losses,
    assert_close_state,
    assert_equal_state,
    expected_versions,
    train_by_reference,
    train_plainly,
)

# The tensors are tiny, so one thread is fastest.
pytestmark = pytest.mark.usefixtures("one_thread")

DRAINING = ("flush", "gpipe", "model_parallel", "interleaved")
DELAYED = ("pipedream", "vertical_sync", "2bw")


def _train_plainly(
    model: nn.Module,
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    epochs: int = 1,
) -> list[float]:
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def _assert_equal_state(model: nn.Module, expected: nn.Module) -> None:
    state, expected_state = model.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected_state[name]), name


@parametrize_pairs(case_name=list(CASES), name=list(OPTIMIZERS), dtype=(torch.float32, torch.float64))
def test_one_stage_equals_a_plain_loop_bit_for_bit(case_name: str, name: str, dtype: torch.dtype) -> None:
    case, optimizer = CASES[case_name], OPTIMIZERS[name]
    data = case.data(4, dtype, short_last=True)
    plain, model = case.model(dtype), case.model(dtype)
    torch.manual_seed(3)
    plain_losses = _train_plainly(plain, data, case.loss_fn, optimizer, epochs=2)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    result = reference.run(
        model, case.plan(1), data=data, loss_fn=case.loss_fn, optimizer=optimizer, epochs=2
    )
    assert result.losses == plain_losses
    assert result.versions == [[(i, i) for i in range(8)]]
    _assert_equal_state(model, plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_stage_equals_a_plain_loop_also_with_a_seed_and_a_shuffling_loader() -> None:
    case = CASES["dropout"]
    loader = DataLoader(case.data(6), batch_size=None, shuffle=True)
    options = {"data": loader, "loss_fn": case.loss_fn, "optimizer": OPTIMIZERS["sgd"], "epochs": 2}
    first = reference.run(case.model(), case.plan(1), seed=12, **options).losses
    torch.manual_seed(99)
    assert reference.run(case.model(), case.plan(1), seed=12, **options).losses == first
    torch.manual_seed(12)
    assert _train_plainly(case.model(), loader, case.loss_fn, OPTIMIZERS["sgd"], epochs=2) == first
    assert reference.run(case.model(), case.plan(1), seed=13, **options).losses != first


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_several_stages_read_delayed_versions(case: Case, num_stages: int) -> None:
    num_minibatches = 8
    data = case.data(num_minibatches)
    plain, model = case.model(), case.model()
    plain_losses = _train_plainly(plain, data, case.loss_fn, OPTIMIZERS["sgd"])
    result = reference.run(
        model, case.plan(num_stages), data=data, loss_fn=case.loss_fn, optimizer=OPTIMIZERS["sgd"], seed=1
    )
    for stage_index in range(num_stages):
        lag = num_stages - stage_index - 1
        expected = [(max(0, i - lag),) * 2 for i in range(num_minibatches)]
        assert result.versions[stage_index] == expected
    assert len(result.losses) == num_minibatches
    if case.draws:
        return
    # No stage is late at the first minibatch. Later the weights differ from plain training's at each stage
    # that is late and has parameters.
    assert result.losses[0] == plain_losses[0]
    delayed_trains = any(
        p.requires_grad for layer in list(model)[: case.cuts[num_stages][-1]] for p in layer.parameters()
    )
    assert (result.losses[1:] != plain_losses[1:]) == delayed_trains


def _scale(weight: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, weight)
    return layer


def test_weights_follow_the_recursion_worked_out_by_hand() -> None:
    # The loss is (c b a x_i - y_i)^2, with one factor at each of three stages. Minibatch i reads version i -
    # 2 of a, version i - 1 of b and version i of c.
    rate = 0.05
    samples = [(0.5, 1.0), (-1.0, 0.3), (0.8, -0.2), (1.2, 0.7), (0.1, 0.1), (-0.4, 0.9)]
    a, b, c = [0.7], [-0.4], [1.1]
    losses = []
    for i, (x, y) in enumerate(samples):
        a_read, b_read, c_read = a[max(0, i - 2)], b[max(0, i - 1)], c[i]
        error = c_read * b_read * a_read * x - y
        losses.append(error**2)
        a.append(a[i] - rate * 2 * error * c_read * b_read * x)
        b.append(b[i] - rate * 2 * error * c_read * a_read * x)
        c.append(c[i] - rate * 2 * error * b_read * a_read * x)

    model = nn.Sequential(_scale(a[0]), _scale(b[0]), _scale(c[0]))
    data = [tuple(torch.tensor([[value]], dtype=torch.float64) for value in sample) for sample in samples]
    result = reference.run(
        model,
        straight_plan(3, (1, 2)),
        data=data,
        loss_fn=squared_error,
        optimizer=functools.partial(torch.optim.SGD, lr=rate),
    )
    assert result.losses == pytest.approx(losses, rel=1e-9)
    assert [layer.weight.item() for layer in model] == pytest.approx([a[-1], b[-1], c[-1]], rel=1e-9)


def test_versions_follow_the_plans_in_flight() -> None:
    case = CASES["mlp"]
    plan = Plan((Stage(0, 1), Stage(2, 4)), in_flight=(5, 3))
    result = reference.run(
        case.model(), plan, data=case.data(7), loss_fn=case.loss_fn, optimizer=OPTIMIZERS["sgd"]
    )
    assert [read for read, _ in result.versions[0]] == [0, 0, 0, 0, 0, 1, 2]
    assert [read for read, _ in result.versions[1]] == [0, 0, 0, 1, 2, 3, 4]


def test_buffers_are_updated_in_the_order_of_the_minibatches() -> None:
    # With a rate of zero all versions are equal, so the statistics must be those of plain training.
    case = CASES["cnn"]
    plain, model = case.model(), case.model()
    still = functools.partial(torch.optim.SGD, lr=0.0)
    losses = _train_plainly(plain, case.data(5), case.loss_fn, still)
    result = reference.run(model, case.plan(4), data=case.data(5), loss_fn=case.loss_fn, optimizer=still)
    assert result.losses == losses
    _assert_equal_state(model, plain)
    assert int(model[1].num_batches_tracked) == 5


def test_several_stages_repeat_with_a_seed_and_leave_the_global_generators_alone() -> None:
    case = CASES["dropout"]
    loader = DataLoader(case.data(6), batch_size=None, shuffle=True)

    def losses(seed: int | None) -> list[float]:
        return reference.run(
            case.model(),
            case.plan(3),
            data=loader,
            loss_fn=case.loss_fn,
            optimizer=OPTIMIZERS["adam"],
            epochs=2,
            seed=seed,
        ).losses

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = losses(5)
    assert torch.equal(torch.get_rng_state(), before)
    unseeded = losses(None)
    torch.rand(1)
    assert losses(5) == first
    assert losses(None) != unseeded  # the draw before has changed torch's state
    torch.manual_seed(1)
    assert losses(None) == unseeded
    assert losses(6) != first


def test_a_stage_draws_the_same_numbers_wherever_else_the_model_is_cut() -> None:
    # Dropout is in the first stage. A cut elsewhere in the model must not change its masks.
    layers = [nn.Linear(8, 8).double(), nn.Dropout(0.5), nn.Linear(8, 8).double(), nn.Linear(8, 4).double()]
    data, still = CASES["mlp"].data(4), functools.partial(torch.optim.SGD, lr=0.0)
    results = [
        reference.run(
            nn.Sequential(*copy.deepcopy(layers)),
            straight_plan(4, cuts),
            data=data,
            loss_fn=squared_error,
            optimizer=still,
            seed=3,
        ).losses
        for cuts in ((2,), (2, 3))
    ]
    assert results[0] == results[1]


def test_the_optimizer_is_called_once_per_stage_with_names_if_it_asks_for_them() -> None:
    case = CASES["tied"]
    seen: list[Any] = []

    def by_name(named_parameters: Any) -> torch.optim.Optimizer:
        seen.append([name for name, _ in named_parameters])
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

    def by_parameter(parameters: Any) -> torch.optim.Optimizer:
        seen.append(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    model = case.model()
    options = {"data": case.data(2), "loss_fn": case.loss_fn}
    reference.run(model, case.plan(3), optimizer=by_name, **options)
    # The second stage is one linear layer, the third begins with a Tanh.
    assert seen == [["0.weight", "1.weight", "1.bias"], ["3.weight", "3.bias"], ["5.weight", "5.bias"]]
    seen.clear()
    reference.run(model, case.plan(2), optimizer=by_parameter, **options)
    assert [p for stage in seen for p in stage] == list(model.parameters())


def _is_running(name: str) -> bool:
    """Returns whether a buffer is a running statistic of a batch norm. Microbatches change these
    statistics.
    """
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def _without_running(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not _is_running(name)}


def _assert_trains_plainly(training: Training, relative: float = 1e-9) -> None:
    """Asserts that losses and weights are those of a plain loop with gradient accumulation."""
    result, state = train_by_reference(training)
    losses, plain_state = train_plainly(training)
    assert_close_losses(result.losses, losses, relative)
    if training.microbatches > 1:
        state, plain_state = _without_running(state), _without_running(plain_state)
    assert_close_state(state, plain_state, relative)


# With several stages dropout draws other masks than a plain loop, so models with dropout are left out.
_NOT_DRAWING = [name for name, case in CASES.items() if not case.draws]


def _pairs(schedules: tuple[str, ...], microbatch_counts: tuple[int, ...]) -> list[Row]:
    """Returns rows with every pair of values of case, number of stages, number of microbatches and
    schedule."""
    factors = {
        "schedule": schedules,
        "num_stages": (1, 2, 3, 4),
        "microbatches": microbatch_counts,
        "case_name": _NOT_DRAWING,
    }
    return covering_rows(factors, _is_enough_for_2bw)


def _is_enough_for_2bw(row: Row) -> bool:
    return row.get("schedule") != "2bw" or row.get("microbatches", 4) >= row.get("num_stages", 1)


def _name(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


@pytest.mark.parametrize("row", _pairs(DRAINING, (1, 3, 4)), ids=_name)
def test_schedules_that_drain_equal_plain_gradient_accumulation(row: Row) -> None:
    # A minibatch of 6 samples in 4 microbatches gives pieces of 2, 2 and 2. A short last minibatch would have
    # too few samples.
    _assert_trains_plainly(Training(**row, num_minibatches=4, short_last=row["microbatches"] < 4))


_UNDELAYED_AT_ONE_STAGE = [name for name in (*DELAYED, "naive", *DRAINING) if name != "2bw"]


# With one stage all these schedules do the same. So each schedule is tested with a few models only, and each
# model with two schedules.
@pytest.mark.parametrize(
    ("case_name", "schedule"),
    [
        (list(CASES)[(i + shift) % len(CASES)], _UNDELAYED_AT_ONE_STAGE[i % len(_UNDELAYED_AT_ONE_STAGE)])
        for i in range(len(CASES))
        for shift in (0, 3)
    ],
)
def test_one_stage_of_any_schedule_but_2bw_is_plain_training(case_name: str, schedule: str) -> None:
    training = Training(case_name, 1, torch.float32, num_minibatches=4, epochs=2, schedule=schedule)
    result, state = train_by_reference(training)
    losses, plain_state = train_plainly(training)
    assert result.losses == losses
    assert_equal_state(state, plain_state)
    _assert_trains_plainly(replace(training, dtype=torch.float64, microbatches=3))


def test_microbatches_count_by_their_samples() -> None:
    # 5 samples in 4 microbatches are 2, 2 and 1.
    training = Training("mlp", 1, microbatches=4)
    case = training.case
    data = [(inputs[:5], targets[:5]) for inputs, targets in case.data(3)]
    plain, model = case.model(), case.model()
    losses = _train_plainly(plain, data, case.loss_fn, training.optimizer)
    options = training.options() | {"data": data}
    result = reference.run(model, case.plan(3), **options | {"schedule": "flush"})
    assert_close_losses(result.losses, losses, 1e-9)
    assert_close_state(model.state_dict(), plain.state_dict(), 1e-9)


def _owner_stages(case: Case, num_stages: int, model: nn.Sequential) -> tuple[dict[str, int], set[str]]:
    """Returns a dict from a parameter's name to the stage that owns it, and the names of parameters that
    several stages use.
    """
    cuts = case.cuts[num_stages]
    stages_of: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = int(name.split(".")[0])
        stages_of.setdefault(id(parameter), set()).add(sum(layer >= cut for cut in cuts))
    named = dict(model.named_parameters())
    owners = {name: min(stages_of[id(parameter)]) for name, parameter in named.items()}
    return owners, {name for name, parameter in named.items() if len(stages_of[id(parameter)]) > 1}


def _train_delayed(
    training: Training,
    version_of: Callable[[int, int], int],
    tied_version_of: Callable[[int], int],
    *,
    region: Callable[[], Any] = contextlib.nullcontext,
) -> tuple[list[float], State]:
    """Trains by hand with the given versions. For microbatch k of the run, a copy of the model gets for stage
    s the weights of version_of(s, k). The copy computes the gradients. The gradients of a minibatch then
    change the newest weights.
    """
    case = training.case
    model = training.model()
    owners, tied = _owner_stages(case, training.num_stages, model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = training.optimizer(trainable.values())
    scheduler = training.lr_scheduler(optimizer) if training.lr_scheduler else None
    former = [{name: p.detach().clone() for name, p in trainable.items()}]
    losses = []
    for i, (inputs, targets) in enumerate(training.data()):
        optimizer.zero_grad()
        reader = model
        total = 0.0
        for q, (micro_inputs, micro_targets) in enumerate(
            zip(
                torch.chunk(inputs, training.microbatches),
                torch.chunk(targets, training.microbatches),
                strict=True,
            )
        ):
            k = i * training.microbatches + q
            reader = copy.deepcopy(model)
            parameters = dict(reader.named_parameters())
            for name in trainable:
                version = tied_version_of(k) if name in tied else version_of(owners[name], k)
                parameters[name].data.copy_(former[version][name])
                parameters[name].grad = None
            with region():
                loss = case.loss_fn(reader(micro_inputs), micro_targets)
            (loss * (len(micro_targets) / len(targets))).backward()
            total += loss.item() * len(micro_targets) / len(targets)
            for name, parameter in trainable.items():
                gradient = parameters[name].grad
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        losses.append(total)
        if training.max_grad_norm is not None:
            for stage_index in range(training.num_stages):
                own = [p for name, p in trainable.items() if owners[name] == stage_index]
                nn.utils.clip_grad_norm_(own, training.max_grad_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        former.append({name: p.detach().clone() for name, p in trainable.items()})
        for buffer, read in zip(model.buffers(), reader.buffers(), strict=True):
            buffer.copy_(read)
    return losses, model.state_dict()


def _by_hand(training: Training) -> tuple[Callable[[int, int], int], Callable[[int], int]]:
    """Returns two functions for a straight pipeline: the version that (stage, microbatch) reads, and the
    version of a tied parameter that a microbatch reads."""
    depth, m = training.num_stages, training.microbatches
    if training.schedule == "pipedream":
        return (lambda s, k: max(0, (k - (depth - s - 1)) // m)), (lambda k: max(0, (k - (depth - 1)) // m))
    delay = depth - 1 if training.schedule == "vertical_sync" else m
    return (lambda s, k: max(0, (k - delay) // m)), (lambda k: max(0, (k - delay) // m))


@pytest.mark.parametrize("row", _pairs(DELAYED, (1, 2, 4)), ids=_name)
def test_delayed_schedules_equal_a_hand_written_delayed_loop(row: Row) -> None:
    training = Training(**row, short_last=False)
    result, state = train_by_reference(training)
    losses, expected = _train_delayed(training, *_by_hand(training))
    assert_close_losses(result.losses, losses, 1e-9)
    if training.microbatches > 1:
        state, expected = _without_running(state), _without_running(expected)
    assert_close_state(state, expected, 1e-9)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_tied_parameter_is_read_at_one_version_by_all_its_stages(num_stages: int) -> None:
    # This shows that the test above can fail. If the last stage reads another version of the tied parameter,
    # the losses differ.
    training = Training("tied_apart", num_stages)
    result, _ = train_by_reference(training)
    version_of, _ = _by_hand(training)
    losses, _ = _train_delayed(training, version_of, lambda i: i)
    assert result.losses[0] == pytest.approx(losses[0], rel=1e-12)
    with pytest.raises(AssertionError, match="minibatch"):
        assert_close_losses(result.losses, losses, 1e-6)


def test_a_tied_parameter_is_stashed_with_naive_too() -> None:
    # Only the tied weight is trained, so no other weight could make naive differ from stashing.
    case = CASES["tied_apart"]

    def only_the_tied(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 0.05 if name == "0.weight" else 0.0} for name, p in named_parameters]
        return torch.optim.SGD(groups, lr=0.0)

    stashing, naive = (
        train_by_reference(Training(case.name, 3, optimizer=only_the_tied, schedule=schedule))
        for schedule in ("pipedream", "naive")
    )
    assert naive[0].losses == stashing[0].losses
    assert_equal_state(naive[1], stashing[1])
    assert len(set(naive[0].losses)) == len(naive[0].losses)


def test_the_owner_of_a_tied_parameter_alone_has_it_in_its_optimizer() -> None:
    seen: list[list[str]] = []

    def by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.append([name for name, _ in named_parameters])
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

    train_by_reference(Training("tied_apart", 4, optimizer=by_name))
    # The last stage has only the tied parameter, which another stage owns. So no optimizer is made for it.
    assert seen == [
        ["0.weight"],
        ["1.conv.weight", "1.conv.bias"],
        ["2.weight", "2.bias", "3.weight", "3.bias"],
    ]


def test_2bw_is_a_step_with_the_gradient_at_the_weights_before_the_newest() -> None:
    # PipeDream-2BW (ICML'21), section 3.1: W(t + 1) = W(t) - rate * gradient at W(t - 1).
    case, rate = CASES["transformer"], 0.05
    older, newest = case.model(), case.model()
    losses = []
    for inputs, targets in case.data(6):
        loss = case.loss_fn(older(inputs), targets)
        gradients = torch.autograd.grad(loss, list(older.parameters()))
        losses.append(loss.item())
        older = copy.deepcopy(newest)
        with torch.no_grad():
            for parameter, gradient in zip(newest.parameters(), gradients, strict=True):
                parameter.sub_(rate * gradient)
    still = functools.partial(torch.optim.SGD, lr=rate)
    for num_stages in (1, 2, 3):
        training = Training(
            case.name, num_stages, optimizer=still, num_minibatches=6, short_last=False, schedule="2bw"
        )
        result, state = train_by_reference(replace(training, microbatches=3))
        assert_close_losses(result.losses, losses, 1e-9)
        assert_close_state(state, newest.state_dict(), 1e-9)


@pytest.mark.parametrize("schedule", [*DELAYED, "naive", *DRAINING])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_versions_are_those_of_the_table(num_stages: int, schedule: str) -> None:
    training = Training("mlp", num_stages, short_last=False, schedule=schedule, microbatches=4)
    result, _ = train_by_reference(training)
    assert result.versions == expected_versions(training.plan, 7, schedule=schedule, microbatches=4)


def test_versions_of_three_stages_are_those_worked_out_by_hand() -> None:
    def read(schedule: str, of_backward: int = 0) -> list[list[int]]:
        training = Training("mlp", 3, num_minibatches=3, schedule=schedule, microbatches=3)
        result = train_by_reference(training)[0]
        return [[k[of_backward] for i in stage for k in i] for stage in result.microbatch_versions]

    delayed = [[0, 0, 0, 0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2]]
    assert read("pipedream") == delayed
    assert read("unstashed") == delayed
    assert read("vertical_sync") == delayed[:1] * 3
    assert read("2bw") == [[0, 0, 0, 0, 0, 0, 1, 1, 1]] * 3
    assert read("flush") == delayed[2:] * 3
    assert read("unstashed", of_backward=1) == delayed[2:] * 3


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("case_name", ["cnn", "transformer", "tied_apart", "lstm"])
def test_naive_differs_from_stashing_once_a_stage_has_been_updated_in_between(
    case_name: str, num_stages: int
) -> None:
    for microbatches in (1, 3):
        training = Training(case_name, num_stages, microbatches=microbatches)
        stashing = train_by_reference(training)[0].losses
        naive = train_by_reference(replace(training, schedule="naive"))[0].losses
        # In naive's first backward the weights are still those of its forward.
        assert naive[0] == stashing[0]
        assert all(math.isfinite(loss) for loss in naive)
        with pytest.raises(AssertionError, match="minibatch"):
            assert_close_losses(naive, stashing, 1e-9)


@pytest.mark.parametrize("training", [Training("mlp", 2), Training("frozen", 4)], ids=lambda t: t.case_name)
def test_naive_is_stashing_where_no_stage_but_the_last_passes_a_gradient_on(training: Training) -> None:
    # The backward of a linear layer reads its weight only to compute the gradient of its input.
    stashing, state = train_by_reference(training)
    naive, naive_state = train_by_reference(replace(training, schedule="naive"))
    assert naive.losses == stashing.losses
    assert_equal_state(naive_state, state)


@pytest.mark.parametrize("recompute", [None, True, [0], [1, 2]])
def test_naive_is_the_recursion_worked_out_by_hand(recompute: Any) -> None:
    # Each of three stages computes y = q (p x). Forwards read old weights, backwards read new ones. For the
    # gradient of q the backward needs p x. This product is the forward's, unless the stage recomputes it.
    rate, samples = 0.05, [(0.5, 1.0), (-1.0, 0.3), (0.8, -0.2), (1.2, 0.7), (0.1, 0.1), (-0.4, 0.9)]
    recomputed = {0, 1, 2} if recompute is True else set(recompute or [])
    former = [[(0.7, 1.2)], [(-0.4, 0.9)], [(1.1, 0.8)]]
    losses = []
    for i, (x, y) in enumerate(samples):
        read = [stage[max(0, i - lag)] for stage, lag in zip(former, (2, 1, 0), strict=True)]
        newest = [stage[i] for stage in former]
        inputs = [x]
        for p, q in read:
            inputs.append(q * p * inputs[-1])
        error = inputs[-1] - y
        losses.append(error**2)
        gradient = 2 * error
        for s in (2, 1, 0):
            p, q = newest[s]
            between = (p if s in recomputed else read[s][0]) * inputs[s]
            former[s].append((p - rate * gradient * q * inputs[s], q - rate * gradient * between))
            gradient *= q * p
    model = nn.Sequential(*(_scale(weight) for stage in former for weight in stage[0]))
    data = [tuple(torch.tensor([[value]], dtype=torch.float64) for value in sample) for sample in samples]
    result = reference.run(
        model,
        straight_plan(6, (2, 4)),
        data=data,
        loss_fn=squared_error,
        optimizer=functools.partial(torch.optim.SGD, lr=rate),
        schedule="naive",
        recompute=recompute,
    )
    assert result.losses == pytest.approx(losses, rel=1e-9)
    expected = [weight for stage in former for weight in stage[-1]]
    assert [layer.weight.item() for layer in model] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("case_name", CASES)
def test_a_recomputed_forward_at_the_same_weights_changes_nothing(case_name: str, microbatches: int) -> None:
    # With one minibatch in flight, naive reads the same version in forward and backward. So a recompute could
    # differ only by new dropout masks, or by buffers that change twice.
    training = Training(
        case_name, 3, in_flight=(1, 1, 1), microbatches=microbatches, schedule="naive", num_minibatches=4
    )
    expected, expected_state = train_by_reference(training)
    for recompute in (True, (0, 2)):
        result, state = train_by_reference(replace(training, recompute=recompute))
        # The results may differ by the order in which a tied parameter's gradients are added.
        assert_close_losses(result.losses, expected.losses, 1e-12)
        assert_close_state(state, expected_state, 1e-12)
    one_stage = replace(training, num_stages=1, in_flight=())
    assert train_by_reference(replace(one_stage, recompute=True))[0] == train_by_reference(one_stage)[0]


@pytest.mark.parametrize("schedule", [*DELAYED, *DRAINING])
def test_recompute_changes_no_number_where_the_backward_reads_what_the_forward_read(schedule: str) -> None:
    for case_name in ("cnn", "dropout"):
        training = Training(case_name, 3, schedule=schedule, microbatches=3)
        expected, expected_state = train_by_reference(training)
        result, state = train_by_reference(replace(training, recompute=True))
        assert result == expected
        assert_equal_state(state, expected_state)


def test_naive_with_recompute_differs_from_naive() -> None:
    for case_name in ("cnn", "transformer", "lstm"):
        training = Training(case_name, 3, schedule="naive")
        losses = train_by_reference(training)[0].losses
        again = train_by_reference(replace(training, recompute=True))[0].losses
        assert again[0] == losses[0]
        with pytest.raises(AssertionError, match="minibatch"):
            assert_close_losses(again, losses, 1e-9)


@pytest.mark.parametrize("schedule", DELAYED)
@pytest.mark.parametrize("case_name", ["mlp", "cnn", "transformer", "tied", "tied_apart", "lstm"])
def test_gradients_are_the_slopes_of_the_loss_at_the_versions_read(case_name: str, schedule: str) -> None:
    """Compares steps of plain gradient descent with central differences of a loss. This is the loss of the
    whole model with the versions that minibatch 4 reads at each stage.
    """
    num_stages, minibatch, rate = 3, 4, 0.05
    training = Training(
        case_name,
        num_stages,
        optimizer=functools.partial(torch.optim.SGD, lr=rate),
        num_minibatches=minibatch + 1,
        short_last=False,
        schedule=schedule,
        microbatches=3 if schedule == "2bw" else 1,
    )
    case = training.case
    states = [case.model().state_dict()]
    for count in range(1, minibatch + 2):
        model = case.model()
        reference.run(model, training.plan, **training.options() | {"data": training.data()[:count]})
        states.append(model.state_dict())
    model = case.model()
    owners, tied = _owner_stages(case, num_stages, model)
    version_of, tied_version_of = _by_hand(training)
    first = minibatch * training.microbatches  # all microbatches of a minibatch of 2bw read the same version
    read = {
        name: states[tied_version_of(first) if name in tied else version_of(stage, first)][name]
        for name, stage in owners.items()
    }
    inputs, targets = training.data()[minibatch]

    def loss_at(weights: State) -> float:
        reader = case.model()
        with torch.no_grad():
            for name, parameter in reader.named_parameters():
                parameter.copy_(weights[name])
            pieces = zip(
                inputs.chunk(training.microbatches), targets.chunk(training.microbatches), strict=True
            )
            losses = [case.loss_fn(reader(x), y).item() for x, y in pieces]
        return sum(losses) / len(losses)

    generator = torch.Generator().manual_seed(5)
    for stage_index in range(num_stages):
        own = [name for name, stage in owners.items() if stage == stage_index]
        if not own:
            continue
        direction = {n: torch.randn(read[n].shape, generator=generator, dtype=torch.float64) for n in own}
        step = 1e-6
        up, down = (
            loss_at(read | {n: read[n] + sign * step * direction[n] for n in own}) for sign in (1, -1)
        )
        slope = (up - down) / (2 * step)
        taken = {n: (states[minibatch][n] - states[minibatch + 1][n]) / rate for n in own}
        measured = sum(float((taken[n] * direction[n]).sum()) for n in own)
        assert measured == pytest.approx(slope, rel=1e-5, abs=1e-8)
        assert abs(slope) > 1e-4


_STEP_LR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_clipping_where_the_pipeline_drains_is_by_the_norm_over_all_stages(
    num_stages: int, microbatches: int
) -> None:
    for schedule in DRAINING:
        for case_name in ("transformer", "tied_apart"):
            training = Training(
                case_name,
                num_stages,
                schedule=schedule,
                microbatches=microbatches,
                max_grad_norm=0.3,
                num_minibatches=4,
            )
            _assert_trains_plainly(training)
            unclipped, _ = train_by_reference(replace(training, max_grad_norm=None))
            with pytest.raises(AssertionError, match="minibatch"):
                assert_close_losses(train_by_reference(training)[0].losses, unclipped.losses, 1e-6)


@pytest.mark.parametrize("schedule", DELAYED)
@pytest.mark.parametrize("case_name", ["transformer", "tied_apart"])
def test_clipping_and_schedulers_of_delayed_schedules_are_each_stages_own(
    case_name: str, schedule: str
) -> None:
    training = Training(
        case_name,
        3,
        short_last=False,
        schedule=schedule,
        microbatches=3,
        max_grad_norm=0.2,
        lr_scheduler=_STEP_LR,
    )
    result, state = train_by_reference(training)
    losses, expected = _train_delayed(training, *_by_hand(training))
    assert_close_losses(result.losses, losses, 1e-9)
    assert_close_state(state, expected, 1e-9)


def test_a_scheduler_follows_every_update() -> None:
    for schedule in DRAINING:
        training = Training("cnn", 3, schedule=schedule, lr_scheduler=_STEP_LR, optimizer=OPTIMIZERS["adam"])
        _assert_trains_plainly(training)
    assert not _same_losses(training, replace(training, lr_scheduler=None))


def _same_losses(training: Training, other: Training) -> bool:
    return train_by_reference(training)[0].losses == train_by_reference(other)[0].losses


_BFLOAT16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync", "flush"])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("case_name", ["mlp", "cnn", "transformer", "tied_apart"])
def test_autocast_is_around_each_stage_and_the_loss(case_name: str, num_stages: int, schedule: str) -> None:
    training = Training(
        case_name, num_stages, torch.float32, short_last=False, schedule=schedule, autocast="bfloat16"
    )
    version_of, tied_version_of = _by_hand(training)
    if schedule == "flush":
        version_of, tied_version_of = (lambda s, i: i), (lambda i: i)
    result, state = train_by_reference(training)
    losses, expected = _train_delayed(training, version_of, tied_version_of, region=_BFLOAT16)
    assert result.losses == pytest.approx(losses, rel=1e-3)
    # A tied parameter's gradients may be added in another order, which may change the last bits in bfloat16.
    assert_close_state(state, expected, 2e-2)
    if num_stages == 1:
        assert result.losses == losses
        assert_equal_state(state, expected)
    assert all(tensor.dtype == torch.float32 for tensor in state.values() if tensor.is_floating_point())
    assert not _same_losses(training, replace(training, autocast=None))


class _Probe(torch.autograd.Function):
    """Passes a value on. In the backward it records the mean gradient, and makes the weight's gradient
    infinite if the layer asks for that."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, probe: Any) -> torch.Tensor:
        ctx.probe = probe
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        probe = ctx.probe
        probe.gradients.append(gradients[0].sum().item())
        is_spoilt = len(probe.gradients) - 1 in probe.overflows_at
        return gradients[0], torch.tensor([math.inf if is_spoilt else 1.0]), None


class _ProbeLayer(nn.Module):
    """A layer whose weight has the gradient 1, whatever the loss scale is. In the backwards that
    `overflows_at` names, the gradient is infinite.
    """

    def __init__(self, overflows_at: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.overflows_at = overflows_at
        self.gradients: list[float] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        probed: torch.Tensor = _Probe.apply(value, self.weight, self)
        return probed


def _sum_of_outputs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.float().sum()


def _scales(overflows_at: list[tuple[int, ...]], schedule: str, **options: Any) -> tuple[list[float], Any]:
    """Trains with one layer per stage. Returns the loss scale of each minibatch divided by the first scale,
    and the layers.
    """
    layers = [_ProbeLayer(at) for at in overflows_at]
    result = reference.run(
        nn.Sequential(*layers),
        straight_plan(len(layers), tuple(range(1, len(layers)))),
        data=[(torch.ones(1, 1), torch.ones(1, 1))] * 10,
        loss_fn=_sum_of_outputs,
        optimizer=functools.partial(torch.optim.SGD, lr=2.0**16),
        schedule=schedule,
        autocast="float16",
        **options,
    )
    assert result.losses == [1.0] * 10  # the values of the user's loss_fn, without the scale
    first = layers[-1].gradients[0]
    assert first == 2.0**16
    return [gradient / first for gradient in layers[-1].gradients], layers


def test_an_overflow_halves_the_loss_scale_once_and_skips_the_update_of_its_stage() -> None:
    # Stage 0 of 3 first reads the version of its update of minibatch 2 in minibatch 5. The activation of
    # minibatch 5 tells the last stage about the overflow. A second overflow before that happened at the same
    # scale, so it changes nothing.
    scales, layers = _scales([(2, 3), (), ()], "pipedream")
    assert scales == [1.0] * 5 + [0.5] * 5
    # An update changes a weight by lr * gradient / scale, which is 1 at the first scale and 2 at the second.
    assert layers[0].weight.item() == -(3 * 1 + 5 * 2)
    assert layers[1].weight.item() == layers[2].weight.item() == -(5 * 1 + 5 * 2)


def test_the_last_stage_knows_its_own_overflow_at_the_next_minibatch() -> None:
    scales, layers = _scales([(), (), (2,)], "pipedream")
    assert scales == [1.0] * 3 + [0.5] * 7
    assert layers[2].weight.item() == -(2 * 1 + 7 * 2)
    assert layers[0].weight.item() == -(3 * 1 + 7 * 2)


@pytest.mark.parametrize("schedule", DRAINING)
def test_where_the_pipeline_drains_all_stages_skip_together(schedule: str) -> None:
    scales, layers = _scales([(2,), (), ()], schedule, lr_scheduler=_STEP_LR)
    assert scales == [1.0] * 3 + [0.5] * 7
    # An update changes the weight by rate * gradient / scale, so halving the scale doubles the change. The
    # scheduler halves the rate after every second update that is not skipped. The ten updates change the
    # weight by 1, 1, 0 (skipped), 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125.
    expected = 2 * 1 + 2 * (2 * 0.5 + 2 * 0.25 + 2 * 0.125 + 1 * 0.0625)
    assert [layer.weight.item() for layer in layers] == [-expected] * 3


def test_2bw_tells_an_overflow_when_the_next_minibatch_but_one_starts() -> None:
    options: dict[str, Any] = {"schedule": "2bw"}
    # A stage with several microbatches in flight starts a minibatch before it has made the previous
    # minibatch's update.
    scales, _ = _scales_of_2bw([(4, 5), ()], **options)
    assert scales == [1.0] * 4 + [0.5] * 6
    scales, _ = _scales_of_2bw([(), (4, 5)], **options)
    assert scales == [1.0] * 3 + [0.5] * 7


def _scales_of_2bw(overflows_at: list[tuple[int, ...]], schedule: str) -> tuple[list[float], Any]:
    """Does what _scales does, with two microbatches per minibatch. Here overflows_at counts microbatches."""
    layers = [_ProbeLayer(at) for at in overflows_at]
    reference.run(
        nn.Sequential(*layers),
        straight_plan(len(layers), tuple(range(1, len(layers)))),
        data=[(torch.ones(2, 1), torch.ones(2, 1))] * 10,
        loss_fn=_sum_of_outputs,
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        schedule=schedule,
        microbatches=2,
        autocast="float16",
    )
    gradients = layers[-1].gradients[::2]
    return [gradient / gradients[0] for gradient in gradients], layers


def test_float16_trains_as_float32_does_to_its_precision() -> None:
    for schedule in ("pipedream", "flush"):
        training = Training("mlp", 3, torch.float32, schedule=schedule, microbatches=3)
        exact, exact_state = train_by_reference(training)
        result, state = train_by_reference(replace(training, autocast="float16"))
        assert result.losses != exact.losses
        assert result.losses == pytest.approx(exact.losses, rel=1e-2)
        assert_close_state(state, exact_state, 1e-2)


def _still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("schedule", ["pipedream", "naive", "2bw", "flush"])
def test_running_statistics_step_once_a_minibatch_by_the_statistics_over_its_microbatches(
    schedule: str, momentum: float | None
) -> None:
    case = CASES["cnn"]
    model, data = case.model(), case.data(4)
    for norm in (model[1], model[4]):
        norm.momentum = momentum
    means, variances = torch.zeros(4).double(), torch.ones(4).double()
    for count, (inputs, _) in enumerate(data, start=1):
        # The statistics are those of the whole minibatch. The number of microbatches changes only the inputs
        # of the second norm.
        values = model[0](inputs).detach().transpose(0, 1).flatten(1)
        share = momentum or 1 / count
        means = (1 - share) * means + share * values.mean(dim=1)
        variances = (1 - share) * variances + share * values.var(dim=1)
    reference.run(
        model,
        case.plan(3),
        data=data,
        loss_fn=case.loss_fn,
        optimizer=_still,
        schedule=schedule,
        microbatches=3,
        recompute=True,
    )
    torch.testing.assert_close(model[1].running_mean, means, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model[1].running_var, variances, rtol=1e-12, atol=1e-12)
    assert int(model[1].num_batches_tracked) == int(model[4].num_batches_tracked) == 4
    assert model[1].track_running_stats
    assert not model[1]._forward_pre_hooks


def test_microbatches_are_normalised_by_their_own_statistics() -> None:
    norm = nn.BatchNorm1d(8).double()
    seen: list[torch.Tensor] = []

    def keep(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.detach())
        return outputs.sum()

    ((inputs, targets),) = CASES["mlp"].data(1)
    reference.run(
        nn.Sequential(norm),
        straight_plan(1, ()),
        data=[(inputs, targets)],
        loss_fn=keep,
        optimizer=_still,
        schedule="gpipe",
        microbatches=2,
    )
    for piece, outputs in zip(inputs.chunk(2), seen, strict=True):
        deviation = piece.var(dim=0, correction=0)
        torch.testing.assert_close(outputs, (piece - piece.mean(dim=0)) / (deviation + norm.eps).sqrt())


def test_a_norm_in_eval_mode_stays_as_it_is_under_microbatches() -> None:
    case = CASES["cnn"]
    model = case.model()
    model[1].eval()
    before = copy.deepcopy(model[1].state_dict())
    reference.run(
        model, case.plan(2), data=case.data(2), loss_fn=case.loss_fn, optimizer=_still, microbatches=2
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model[1].state_dict().items())


def test_a_layer_shared_by_two_stages_trains_as_the_unsplit_model() -> None:
    shared = nn.Linear(8, 8).double()
    layers = [shared, nn.Tanh(), nn.Linear(8, 8).double(), shared, nn.Linear(8, 4).double()]
    plain, model = (nn.Sequential(*copy.deepcopy(layers)) for _ in range(2))
    case = CASES["mlp"]
    losses = _train_plainly(plain, case.data(5), case.loss_fn, OPTIMIZERS["sgd"])
    result = reference.run(
        model,
        straight_plan(5, (2, 3)),
        data=case.data(5),
        loss_fn=case.loss_fn,
        optimizer=OPTIMIZERS["sgd"],
        schedule="flush",
        microbatches=2,
    )
    assert_close_losses(result.losses, losses, 1e-9)
    assert_close_state(model.state_dict(), plain.state_dict(), 1e-9)


def test_a_frozen_parameter_used_by_two_stages_stays_as_it_is() -> None:
    embedding = nn.Embedding(13, 8).double().requires_grad_(False)
    model = nn.Sequential(embedding, nn.Linear(8, 8).double(), TiedHead(embedding))
    before = embedding.weight.clone()
    case = CASES["tied"]
    result = reference.run(
        model,
        straight_plan(3, (1, 2)),
        data=case.data(5),
        loss_fn=case.loss_fn,
        optimizer=OPTIMIZERS["sgd"],
    )
    assert len(set(result.losses)) == 5
    assert torch.equal(embedding.weight, before)


class _Doubles(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.mul_(2)


def test_the_data_of_several_stages_stay_as_they_are_when_the_first_layer_works_in_place() -> None:
    model = nn.Sequential(_Doubles(), nn.Linear(8, 8).double(), nn.Linear(8, 4).double())
    data = CASES["mlp"].data(3)
    for schedule, recompute in (("pipedream", None), ("naive", True)):
        reference.run(
            model,
            straight_plan(3, (2,)),
            data=data,
            loss_fn=squared_error,
            optimizer=OPTIMIZERS["sgd"],
            epochs=2,
            schedule=schedule,
            recompute=recompute,
        )
        for (inputs, _), (expected, _) in zip(data, CASES["mlp"].data(3), strict=True):
            assert torch.equal(inputs, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schedule": "zero_bubble"}, ValueError, "schedule is 'zero_bubble': use one of 'pipedream'"),
        ({"microbatches": 0}, ValueError, "microbatches is 0"),
        (
            {"schedule": "2bw", "plan": straight_plan(5, (1, 2, 3))},
            ValueError,
            "microbatches is 1, but schedule '2bw' has 4 of them in flight",
        ),
        ({"recompute": [0, 2]}, ValueError, "recompute names stage 2, but the plan has stages 0 to 1"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm is 0.0"),
        ({"autocast": "float64"}, ValueError, "autocast is 'float64'"),
        ({"plan": straight_plan(3, (1,))}, ValueError, "covers 3 layers but the model has 5"),
        ({"data": []}, ValueError, "nothing in epoch 0"),
        ({"data": iter(CASES["mlp"].data(1)), "epochs": 2}, ValueError, "nothing in epoch 1"),
        (
            {"data": [(torch.zeros(6, 8).double(), torch.zeros(5, 4).double())], "microbatches": 6},
            ValueError,
            "minibatch 0 has inputs that make 6 microbatches and targets that make 5",
        ),
        (
            {"data": [(torch.zeros(8, 8).double(), torch.zeros(5, 4).double())], "microbatches": 4},
            ValueError,
            "minibatch 0 has inputs that make 4 microbatches and targets that make 3",
        ),
        ({"data": [torch.zeros(3)]}, TypeError, "minibatch 0 of the data is a Tensor"),
        ({"loss_fn": lambda outputs, targets: 1.0}, TypeError, "loss_fn returned a float"),
        ({"optimizer": "sgd"}, TypeError, "optimizer is a str"),
        ({"optimizer": lambda parameters: None}, TypeError, "optimizer returned a NoneType"),
    ],
)
def test_unusable_arguments_are_refused_in_one_line(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = CASES["mlp"]
    arguments = {
        "plan": case.plan(2),
        "data": case.data(1),
        "loss_fn": case.loss_fn,
        "optimizer": OPTIMIZERS["sgd"],
    } | options
    with pytest.raises(error, match=message) as caught:
        reference.run(case.model(), **arguments)
    assert "\n" not in str(caught.value)
