"""Tests run() with modules that have a forward of their own. It must give the numbers of plain training if
the schedule drains, and the oracle's numbers otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from models import straight_plan
from oracle import assert_memory_as_predicted
from pipedream import RunResult, reference
from pipedream.model.batches import own_loss, parts_of
from pipedream.model.seeding import base_seed, generators_kept, seed_data
from pipedream.planning.plan import Plan
from pipedream.splitting.cut_model import cut_model
from torch import nn
from training import (
    State,
    assert_close_losses,
    assert_close_state,
    is_rank_0,
    state_of,
    tolerance,
    train_module_plainly,
)
from twins import TWINS, Batch, Output, Padded, Skipping, cross_entropy, padded_vectors

_SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_NUM_MINIBATCHES = 6
_RELATIVE = 1e-9  # allows for another order of float64 additions


def _plan(name: str, num_stages: int) -> Plan:
    """Returns a plan whose stages have about equally many layers."""
    twin = TWINS[name]
    num_layers = len(cut_model(twin.model(), *parts_of(twin.data(1)[0], 0), twin.loss_fn).layer_names)
    return straight_plan(
        num_layers, tuple(num_layers * stage // num_stages for stage in range(1, num_stages))
    )


def _train(
    name: str, plan: Plan, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[RunResult, State]:
    """Trains at this rank, or in local workers. Only rank 0 has the right initial weights."""
    twin = TWINS[name]
    model = twin.model(dtype)
    if not is_rank_0():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    options = {"data": twin.data(_NUM_MINIBATCHES, dtype), "optimizer": _SGD, "seed": 1, **options}
    loss_fn = None if twin.loss_fn is own_loss else twin.loss_fn
    result = pipedream.run(model, plan, loss_fn=loss_fn, progress=False, **options)
    return result, model.state_dict()


def _train_plainly(
    model: nn.Module, data: Iterable[Any], loss_fn: Callable[[Any, Any], torch.Tensor] = cross_entropy
) -> list[float]:
    return train_module_plainly(model, data, loss_fn, _SGD)


def _without_draws() -> list[str]:
    return [name for name, twin in TWINS.items() if not twin.draws]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", _without_draws())
def test_a_draining_schedule_trains_any_module_as_a_plain_loop_does(
    farm: Farm, name: str, num_stages: int
) -> None:
    plan = _plan(name, num_stages)
    result, state = farm.results(_train, name, plan, num_ranks=num_stages, schedule="flush")[0]
    twin = TWINS[name]
    model = twin.model()
    losses = _train_plainly(model, twin.data(_NUM_MINIBATCHES), twin.loss_fn)
    assert_close_losses(result.losses, losses, _RELATIVE)
    assert_close_state(state, state_of(model), _RELATIVE)
    assert_memory_as_predicted(result)


@pytest.mark.parametrize("name", TWINS)
def test_weight_stashing_of_any_module_gives_the_oracles_numbers(farm: Farm, name: str) -> None:
    plan = _plan(name, 3)
    result, state = farm.results(_train, name, plan, num_ranks=3)[0]
    assert_same_as_reference(name, plan, result, state)


def assert_same_as_reference(
    name: str,
    plan: Plan,
    result: RunResult,
    state: State,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    twin = TWINS[name]
    model, data = twin.model(dtype), twin.data(_NUM_MINIBATCHES, dtype)
    loss_fn = None if twin.loss_fn is own_loss else twin.loss_fn
    with torch.random.fork_rng():
        losses = reference.run(
            model, plan, data=data, loss_fn=loss_fn, optimizer=_SGD, seed=1, **options
        ).losses
    assert_close_losses(result.losses, losses, tolerance(dtype))
    assert_close_state(state, state_of(model), tolerance(dtype))


@pytest.mark.parametrize("schedule", ["flush", "pipedream"])
def test_a_replicated_stage_of_a_module_averages_buffers_of_its_own_alone(farm: Farm, schedule: str) -> None:
    """A stage also holds the modules of other stages. Their buffers must not change."""
    straight = _plan("residual", 2)
    plan = Plan((replace(straight.stages[0], num_replicas=2), straight.stages[1]))
    result, state = farm.results(_train, "residual", plan, num_ranks=3, schedule=schedule)[0]
    assert_same_as_reference("residual", plan, result, state, schedule=schedule)


@pytest.mark.parametrize("name", ["residual", "masked_transformer", "dropping"])
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 3, "schedule": "gpipe"},
        {"recompute": True},
        {"schedule": "2bw", "microbatches": 2},
        {"schedule": "vertical_sync"},
        {"max_grad_norm": 0.1, "schedule": "flush"},
    ],
    ids=str,
)
def test_what_a_run_may_do_it_does_for_any_module(farm: Farm, name: str, options: dict[str, Any]) -> None:
    plan = _plan(name, 2)
    result, state = farm.results(_train, name, plan, num_ranks=2, **options)[0]
    assert_same_as_reference(name, plan, result, state, **options)


@pytest.mark.parametrize("name", ["residual", "masked_transformer", "sharing"])
def test_autocast_reaches_every_stage_of_a_module(farm: Farm, name: str) -> None:
    plan, options = _plan(name, 2), {"autocast": "bfloat16", "dtype": torch.float32}
    result, state = farm.results(_train, name, plan, num_ranks=2, **options)[0]
    assert_same_as_reference(name, plan, result, state, **options)


def test_several_stages_of_a_module_may_be_one_workers(farm: Farm) -> None:
    name = "masked_transformer"  # its first and its last stage use the same tied parameter
    plan = _plan(name, 4)
    plan = Plan(tuple(replace(stage, worker=index % 2) for index, stage in enumerate(plan.stages)))
    options: dict[str, Any] = {"schedule": "interleaved", "microbatches": 2}
    result, state = farm.results(_train, name, plan, num_ranks=2, **options)[0]
    assert_same_as_reference(name, plan, result, state, **options)


def _train_frozen(plan: Plan, **options: Any) -> tuple[RunResult, State]:
    twin = TWINS["residual"]
    model = _frozen()
    options = {"data": twin.data(_NUM_MINIBATCHES), "optimizer": _SGD, "seed": 1, **options}
    return pipedream.run(model, plan, loss_fn=cross_entropy, progress=False, **options), model.state_dict()


def _frozen() -> nn.Module:
    """Returns a model in which nothing is trained before the second block."""
    model = TWINS["residual"].model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("stem", "blocks.0")))
    return model


def test_no_gradient_crosses_a_cut_that_nothing_before_it_needs(farm: Farm) -> None:
    result, state = farm.results(_train_frozen, _plan("residual", 3), num_ranks=3, schedule="flush")[0]
    model = _frozen()
    losses = _train_plainly(model, TWINS["residual"].data(_NUM_MINIBATCHES))
    assert_close_losses(result.losses, losses, _RELATIVE)
    assert_close_state(state, state_of(model), _RELATIVE)


def _batches(name: str) -> Iterator[Batch]:
    for inputs, targets in TWINS[name].data(_NUM_MINIBATCHES):
        yield inputs + torch.randn(()), targets


def _batches_of_a_seed(name: str, seed: int) -> list[Batch]:
    """Returns the minibatches that _batches() gives when its generators begin as in a run with this seed."""
    with generators_kept():
        seed_data(base_seed(seed), seed, 2)
        return list(_batches(name))


def test_local_workers_train_any_module_from_a_generator_that_draws() -> None:
    plan = _plan("residual", 2)
    result, state = _train("residual", plan, data=_batches("residual"), schedule="flush")
    model = TWINS["residual"].model()
    losses = _train_plainly(model, _batches_of_a_seed("residual", 1))
    assert_close_losses(result.losses, losses, _RELATIVE)
    assert_close_state(state, state_of(model), _RELATIVE)


def _dicts() -> Iterator[dict[str, Any]]:
    yield from TWINS["masked_transformer"].data(_NUM_MINIBATCHES)


def _outside(outputs: Output, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(outputs.logits, batch["input_ids"].roll(1, 1))


@pytest.mark.parametrize("loss_fn", [own_loss, _outside])
def test_dicts_that_the_caller_forwards_train_with_a_loss_inside_or_outside(
    loss_fn: Callable[[Any, Any], torch.Tensor],
) -> None:
    name = "masked_transformer"
    model, twin = TWINS[name].model(), TWINS[name]
    options: dict[str, Any] = {"data": _dicts(), "optimizer": _SGD, "seed": 1, "schedule": "flush"}
    pipedream.run(model, _plan(name, 2), loss_fn=loss_fn, progress=False, microbatches=3, **options)
    plain = twin.model()
    _train_plainly(plain, twin.data(_NUM_MINIBATCHES), loss_fn)
    assert_close_state(state_of(model), state_of(plain), _RELATIVE)


def test_one_stage_trains_on_dicts_too(farm: Farm) -> None:
    twin = TWINS["masked_transformer"]
    for plan in (straight_plan(1, ()), _plan(twin.name, 1)):
        result, _ = farm.results(_train, twin.name, plan, num_ranks=1)[0]
        losses = _train_plainly(twin.model(), twin.data(_NUM_MINIBATCHES), twin.loss_fn)
        assert_close_losses(result.losses, losses, _RELATIVE)


def test_profile_partition_and_run_take_any_module(farm: Farm) -> None:
    twin = TWINS["transformer"]
    data = twin.data(_NUM_MINIBATCHES)
    profile = pipedream.profile(twin.model(), data, cross_entropy, minibatches=2)
    plan = pipedream.partition(profile, num_workers=2, bandwidth="10Gbit/s", straight=True)
    result, _ = farm.results(_train, "transformer", plan, num_ranks=plan.workers_used, schedule="flush")[0]
    assert_close_losses(result.losses, _train_plainly(twin.model(), data), _RELATIVE)


class _Hooking(nn.Module):
    """Halves the gradient of a tensor that is used twice, by a hook."""

    def __init__(self, *, in_module: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8).double() for _ in range(3))
        self._in_module = in_module
        if in_module:
            self.first.register_forward_hook(_halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self._in_module:
            _halve(self.first, (), x)
        out: torch.Tensor = self.last(torch.tanh(self.second(x)) + x)
        return out


def _halve(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: gradient / 2)


def _train_hooking(in_module: bool, after: str) -> tuple[list[float], State]:
    torch.manual_seed(0)
    model = _Hooking(in_module=in_module)
    plan = replace(straight_plan(2, (1,)), cuts=(after,))
    data = TWINS["sharing"].data(_NUM_MINIBATCHES)
    options: dict[str, Any] = {"data": data, "loss_fn": cross_entropy, "optimizer": _SGD, "seed": 1}
    result = pipedream.run(model, plan, schedule="flush", progress=False, **options)
    return result.losses, model.state_dict()


@pytest.mark.parametrize(("in_module", "after"), [(True, "second"), (False, "first")])
def test_a_hook_at_a_tensor_that_crosses_is_called_once(farm: Farm, in_module: bool, after: str) -> None:
    losses, state = farm.results(_train_hooking, in_module, after, num_ranks=2)[0]
    torch.manual_seed(0)
    model = _Hooking(in_module=in_module)
    assert_close_losses(losses, _train_plainly(model, TWINS["sharing"].data(_NUM_MINIBATCHES)), _RELATIVE)
    assert_close_state(state, model.state_dict(), _RELATIVE)


def test_a_hook_that_both_sides_of_a_cut_would_call_is_refused(farm: Farm) -> None:
    outcome = farm.run(_train_hooking, False, "second", num_ranks=2)[0]
    assert "code between modules registers a hook at a tensor that crosses" in str(outcome.error)


def test_more_stages_than_cuts_are_refused_with_the_reasons() -> None:
    with pytest.raises(ValueError) as caught:
        _train("side_value", straight_plan(6, (1, 2, 3)))
    message = str(caught.value)
    assert "the plan has 4 stages but the model has 3 layers" in message
    assert "not after after: noting passes a tensor" in message


def _train_in_another_mode(name: str, plan: Plan) -> None:
    twin = TWINS[name]
    model = twin.model().train(is_rank_0())
    pipedream.run(model, plan, data=twin.data(2), loss_fn=twin.loss_fn, optimizer=_SGD, progress=False)


def test_ranks_that_find_other_places_to_cut_say_which(farm: Farm) -> None:
    outcomes = farm.run(_train_in_another_mode, "dropping", straight_plan(5, (2,)), num_ranks=2)
    message = str(outcomes[1].error)
    assert isinstance(outcomes[1].error, ValueError)
    assert "layer 0 of the model is " in message
    assert "at rank 1, but first (1 tensors, 2 sizes) at rank 0" in message


def test_a_stage_that_sees_another_course_of_the_forward_names_the_call() -> None:
    model = Skipping(left_out=1, in_forward=2)
    data = TWINS["tuples"].data(4, torch.float32)
    with pytest.raises(pipedream.PipelineError) as caught:
        pipedream.run(
            model, straight_plan(4, (2,)), data=data, loss_fn=cross_entropy, optimizer=_SGD, progress=False
        )
    message = str(caught.value)
    assert "failed at minibatch 2 in forward" in message
    assert "the forward ended without calling layers.1, as it did in the first minibatch" in message


class _ReadsLater(nn.Module):
    """A model whose forward may end by reading a parameter of the first module, without a gradient. It does
    so if inputs are long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.late(self.early(x))
        return out * self.early.weight.detach().norm() if len(x) > 2 else out


def _train_reading_later(plan: Plan) -> None:
    data = [(torch.ones(size, 3), torch.zeros(size, 3)) for size in (2, 2, 4)]
    loss_fn = nn.functional.mse_loss
    pipedream.run(_ReadsLater(), plan, data=data, loss_fn=loss_fn, optimizer=_SGD, progress=False)


def test_what_a_later_minibatch_alone_reads_of_another_stage_shows_in_its_loss(farm: Farm) -> None:
    """The last stage must not read the value that the parameter had before the training. Nobody would
    notice.
    """
    for outcome in farm.run(_train_reading_later, Plan.straight(2, 2), num_ranks=2):
        assert isinstance(outcome.error, pipedream.NonFiniteLoss)
        origin = "parameter 'early.weight', which another stage trains"
        assert f"the loss of minibatch 2 is nan, at stage 1 from {origin}: lower" in str(outcome.error)
        assert "whether its forward reads something there that it did not read in" in str(outcome.error)


class _Scores(nn.Module):
    """Scores each token of texts of shape (samples, length). A skip connection leads around the middle
    layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Output:
        embedded = self.embedding(input_ids)
        scores = self.head(embedded + self.middle(embedded).tanh() * attention_mask.unsqueeze(-1))
        return Output(scores, cross_entropy(scores.flatten(0, 1), labels.flatten()))


class _Padded:
    """Batches that are each padded to their longest text, in any order of lengths. The last batch is short.

    They are in no list, so that run() cannot look at all of them before the training.
    """

    shapes = [(4, 3), (4, 9), (4, 5), (4, 1), (4, 7), (2, 4)]

    def __iter__(self) -> Iterator[Batch]:
        for length, shape in enumerate(self.shapes):
            generator = torch.Generator().manual_seed(length)
            labels = torch.randint(11, shape, generator=generator)
            mask = torch.arange(shape[1]).expand(shape) < torch.arange(1, shape[0] + 1).unsqueeze(1)
            yield {"input_ids": labels * mask, "attention_mask": mask, "labels": labels}


def _train_padded(plan: Plan, data: Iterable[Batch], microbatches: int) -> tuple[RunResult, State]:
    model = _scores()
    result = pipedream.run(
        model, plan, data=data, optimizer=_SGD, schedule="flush", microbatches=microbatches, progress=False
    )
    return result, model.state_dict()


def _scores() -> _Scores:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return _Scores().double()


@pytest.mark.parametrize("as_list", [True, False], ids=["a list", "with the largest named"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_padded_batches_come_in_any_order(farm: Farm, as_list: bool, microbatches: int) -> None:
    plan = Plan.straight(3, 2)
    data = list(_Padded()) if as_list else _Padded()
    if not as_list:
        plan = plan.fitting(list(_Padded())[1])
    result, state = farm.results(_train_padded, plan, data, microbatches, num_ranks=2)[0]
    model = _scores()
    assert_close_losses(result.losses, _train_plainly(model, _Padded(), own_loss), _RELATIVE)
    assert_close_state(state, state_of(model), _RELATIVE)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_batch_longer_than_the_largest_that_was_named_is_planned_for(farm: Farm, microbatches: int) -> None:
    plan = Plan.straight(3, 2).fitting({"input_ids": torch.ones(4, 7), "labels": torch.ones(4, 9)})
    result, state = farm.results(_train_padded, plan, _Padded(), microbatches, num_ranks=2)[0]
    assert result.drained_at == [1]
    model = _scores()
    assert_close_losses(result.losses, _train_plainly(model, _Padded(), own_loss), _RELATIVE)
    assert_close_state(state, state_of(model), _RELATIVE)


class _OfBudget(_Scores):
    """Refuses more than 12 tokens: it takes short texts in large batches, or long ones in small batches."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Output:
        if input_ids.numel() > 12:
            raise RuntimeError("too many tokens")
        return super().forward(input_ids, attention_mask, labels)


def _train_within_budget(plan: Plan) -> None:
    model, shapes = _OfBudget(), [(4, 3), (3, 4)]
    data = [{name: torch.ones(shape, dtype=torch.long) for name in _NAMES} for shape in shapes]
    pipedream.run(model, plan, data=data, optimizer=_SGD, progress=False)


_NAMES = ("input_ids", "attention_mask", "labels")


def test_what_only_the_rehearsal_is_too_large_for_says_at_which_sizes(farm: Farm) -> None:
    """The error must not blame the first minibatch, which fits."""
    for outcome in farm.run(_train_within_budget, Plan.straight(3, 2), num_ranks=2):
        assert str(outcome.error) == (
            "the first minibatch at the largest sizes of any (input_ids (4, 4), attention_mask (4, 4), labels"
            " (4, 4); minibatch 1 has the largest input_ids, attention_mask, labels) does not pass stage 0"
            " (rank 0): RuntimeError: too many tokens"
        )


def _train_masked(plan: Plan, padded: tuple[bool, ...]) -> RunResult:
    torch.manual_seed(3)
    options: dict[str, Any] = {"data": padded_vectors(padded), "loss_fn": cross_entropy, "optimizer": _SGD}
    return pipedream.run(Padded().double(), plan, schedule="flush", progress=False, **options)


def test_a_tensor_that_later_minibatches_lack_crosses_as_none(farm: Farm) -> None:
    padded = (True, False, True, False)
    losses = farm.results(_train_masked, straight_plan(3, (1,)), padded, num_ranks=2)[0].losses
    torch.manual_seed(3)
    assert_close_losses(losses, _train_plainly(Padded().double(), padded_vectors(padded)), _RELATIVE)


def test_a_tensor_where_the_first_minibatch_has_none_is_refused_by_name(farm: Farm) -> None:
    """Without the error the tensor would be dropped at the cut, and the numbers would be wrong."""
    plan, padded = straight_plan(3, (1,)), (False, False, True)
    outcomes = farm.run(_train_masked, plan, padded, num_ranks=2)
    named = "minibatch 2: the value[1] is a Tensor, and None in the first minibatch"
    assert any(named in str(outcome.error) for outcome in outcomes), outcomes
    named = r"the inputs have a tensor of 2 dimensions at \[1\], and None in the first minibatch"
    with pytest.raises(ValueError, match=named):
        reference.run(
            Padded().double(), plan, data=padded_vectors(padded), loss_fn=cross_entropy, optimizer=_SGD
        )


class _Tempered(nn.Module):
    """Returns a tensor and a number that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        self.temperature *= 0.5
        return self.layer(x), self.temperature


class _Cooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = _Tempered(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, temperature = self.early(x)
        return torch.as_tensor(self.late(out) * temperature)


def test_a_number_that_changes_behind_a_cut_is_to_be_given_as_a_tensor() -> None:
    with pytest.raises(pipedream.PipelineError, match="give it as a tensor, as only tensors and"):
        pipedream.run(
            _Cooling(),
            straight_plan(2, (1,)),
            data=[(torch.ones(2, 3), torch.zeros(2, 3))] * 2,
            loss_fn=nn.functional.mse_loss,
            optimizer=_SGD,
            progress=False,
        )


class _Diverging(nn.Linear):
    """A layer whose outputs are NaN in the second minibatch if `diverges`."""

    def __init__(self, *, diverges: bool) -> None:
        super().__init__(3, 3)
        self.diverges = diverges

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out.sub(1e9).log() if self.diverges and len(x) > 2 else out


def _train_diverging(layer: int) -> None:
    data = [(torch.ones(size, 3), torch.zeros(size, 3)) for size in (2, 3)]
    model = nn.Sequential(*(_Diverging(diverges=index == layer) for index in range(2)))
    loss_fn = nn.functional.mse_loss
    pipedream.run(
        model, Plan.straight(2, 2), data=data, loss_fn=loss_fn, optimizer=_SGD, progress=False, seed=1
    )


@pytest.mark.parametrize(("layer", "origin"), [(0, "what came from stage 0"), (1, "aten.log in 1")])
def test_a_nan_names_where_it_was_made(farm: Farm, layer: int, origin: str) -> None:
    for outcome in farm.run(_train_diverging, layer, num_ranks=2):
        message = f"the loss of minibatch 1 is nan, at stage 1 from {origin}: lower the learning rate"
        assert message in str(outcome.error)
