"""Tests splitter.py: a model and a plan become stages that consist of the model's own layers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import CASES, Case, TiedHead, straight_plan
from pipedream.model.layers import layers_of, model_name
from pipedream.model.stage_module import Tie, find_ties, tie_pairs
from pipedream.planning.plan import Plan
from pipedream.splitting.splitter import check_split, split
from torch import nn


def _linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def _refusal(model: Any, plan: Plan) -> str:
    with pytest.raises(ValueError) as caught:
        check_split(model, plan)
    message = str(caught.value)
    assert "\n" not in message
    with pytest.raises(ValueError):
        split(model, plan)
    return message


def test_sequential_gives_its_children_by_name() -> None:
    first, second = nn.Linear(2, 2), nn.ReLU()
    model = nn.Sequential(OrderedDict(body=first, act=second))
    assert layers_of(model) == [("body", first), ("act", second)]
    assert model_name(model) == "Sequential"


@pytest.mark.parametrize("container", [list, tuple, nn.ModuleList])
def test_lists_of_layers_give_their_entries(container: Any) -> None:
    layers = [nn.Linear(2, 2), nn.ReLU()]
    assert layers_of(container(layers)) == [("0", layers[0]), ("1", layers[1])]


def test_a_layer_used_twice_is_two_layers() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert [layer for _, layer in layers_of(model)] == [shared, model[1], shared]
    (stage,) = split(model, straight_plan(3, ()))
    assert [name for name, _ in stage.trainable_parameters()] == ["0.weight", "0.bias"]
    x = torch.ones(1, 2)
    assert torch.equal(stage(x), model(x))


class _Doubling(nn.Sequential):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = super().forward(value)
        return 2 * doubled


def test_any_other_module_is_one_layer() -> None:
    hooked = _linears(2)
    hooked.register_forward_hook(lambda module, args, output: output + 1)
    for model in (nn.Linear(2, 2), _Doubling(nn.Linear(2, 2), nn.ReLU()), hooked):
        assert layers_of(model) == [(type(model).__name__, model)]
        (stage,) = split(model, straight_plan(1, ()))
        x = torch.ones(3, 2)
        assert torch.equal(stage(x), model(x))
        assert [n for n, _ in stage.trainable_parameters()] == [n for n, _ in model.named_parameters()]


def test_what_is_not_a_model_is_refused() -> None:
    for model, message in (
        (3, "model is a int"),
        (nn.Linear, r"model is the class Linear: make a model of it, as Linear\(\.\.\.\) does"),
        ([nn.ReLU(), torch.relu], "layer '1' is a builtin_function_or_method"),
    ):
        with pytest.raises(TypeError, match=message):
            layers_of(model)
    for empty in ([], nn.Sequential(), nn.ModuleList()):
        with pytest.raises(ValueError, match="no layers"):
            layers_of(empty)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_stages_in_a_row_compute_what_the_model_computes(case: Case, num_stages: int) -> None:
    model = case.model()
    stages = split(model, case.plan(num_stages))
    assert len(stages) == num_stages
    ((inputs, _),) = case.data(1)
    torch.manual_seed(0)
    expected = model(inputs)
    torch.manual_seed(0)
    value = inputs
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_stages_share_out_the_models_parameters_and_buffers_by_full_name(case: Case) -> None:
    model = case.model()
    stages = split(model, case.plan(4))
    trainable = [(n, p) for stage in stages for n, p in stage.trainable_parameters()]
    frozen = [(n, p) for stage in stages for n, p in stage.frozen_parameters()]
    buffers = [(n, b) for stage in stages for n, b in stage.stage_buffers()]
    assert all(model.get_parameter(name) is parameter for name, parameter in trainable + frozen)
    # A parameter that is tied across stages is in the list of each of them. Its first use gives its name in
    # the model.
    first_uses: dict[int, str] = {}
    for name, parameter in trainable:
        first_uses.setdefault(id(parameter), name)
    assert list(first_uses.values()) == [n for n, p in model.named_parameters() if p.requires_grad]
    extra_uses = sum(len(tie.stages) - 1 for tie in find_ties(stages))
    assert len(trainable) + len(frozen) - extra_uses == len(list(model.parameters()))
    assert [n for n, _ in buffers] == [n for n, _ in model.named_buffers()]
    assert all(model.get_buffer(name) is buffer for name, buffer in buffers)


def test_a_stage_of_a_model_in_eval_mode_is_in_eval_mode() -> None:
    model = CASES["cnn"].model().eval()
    assert not any(
        module.training for stage in split(model, CASES["cnn"].plan(2)) for module in stage.modules()
    )
    model.train()
    assert all(module.training for stage in split(model, CASES["cnn"].plan(2)) for module in stage.modules())


def test_a_plan_of_another_number_of_layers_is_refused() -> None:
    assert "covers 2 layers but the model has 3" in _refusal(_linears(3), straight_plan(2, (1,)))
    assert "covers 4 layers but the model has 3" in _refusal(_linears(3), straight_plan(4, (1,)))


def test_a_plan_with_the_names_of_another_models_layers_is_refused() -> None:
    def named(*names: list[str]) -> Plan:
        return replace(straight_plan(3, (1,)), predicted={"stage_layers": [*names]})

    split(_linears(3), named(["0", "0"], ["1", "2"]))
    message = _refusal(_linears(3), named(["0", "0"], ["norm", "head"]))
    assert (
        "stage 1 of the plan has the layers 'norm' to 'head', which of this model are '1' to '2'" in message
    )


def test_more_stages_than_layers_are_refused() -> None:
    message = _refusal(_linears(3), straight_plan(4, (1, 2, 3)))
    assert "4 stages but the model has 3 layers" in message
    assert "at most 3 workers" in message
    assert "2 stages but the model has 1 layers" in _refusal(nn.Linear(2, 2), straight_plan(2, (1,)))


def test_a_parameter_tied_across_stages_is_found_with_its_stages_and_names() -> None:
    embedding = nn.Embedding(4, 2)
    model = nn.Sequential(embedding, nn.Linear(2, 2), TiedHead(embedding), nn.Linear(4, 2))
    stages = split(model, straight_plan(4, (1, 2)))
    assert find_ties(stages) == [Tie(embedding.weight, (0, 2), ("0.weight", "2.weight"))]
    assert [n for n, _ in stages[2].trainable_parameters()] == ["2.weight", "3.weight", "3.bias"]
    assert find_ties(split(model, straight_plan(4, (3,)))) == []  # both uses are in one stage


def test_ties_come_in_the_order_of_their_owners_parameters() -> None:
    first, second, third = (nn.Linear(2, 2, bias=False) for _ in range(3))
    for tied, untied in ((first, second), (second, first)):
        model = nn.Sequential(first, second, third, TiedHead(tied), TiedHead(third), TiedHead(untied))
        ties = find_ties(split(model, straight_plan(6, (3, 4))))
        assert [tie.parameter for tie in ties] == [first.weight, second.weight, third.weight]
        assert [tie.stages for tie in ties if tie.parameter is third.weight] == [(0, 2)]
    model = nn.Sequential(first, TiedHead(first), TiedHead(first))
    (tie,) = find_ties(split(model, straight_plan(3, (1, 2))))
    assert (tie.stages, tie.names) == ((0, 1, 2), ("0.weight", "1.weight", "2.weight"))


def test_a_frozen_parameter_in_two_stages_is_no_tie() -> None:
    embedding = nn.Embedding(4, 2).requires_grad_(False)
    stages = split(nn.Sequential(embedding, nn.Tanh(), TiedHead(embedding)), straight_plan(3, (1,)))
    assert find_ties(stages) == []
    assert [n for stage in stages for n, _ in stage.frozen_parameters()] == ["0.weight", "2.weight"]


def test_a_module_of_parameters_in_two_stages_ties_them() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Tanh(), nn.Sequential(nn.ReLU(), shared))
    ties = find_ties(split(model, straight_plan(3, (1,))))
    assert [tie.names for tie in ties] == [("0.weight", "2.1.weight"), ("0.bias", "2.1.bias")]


def test_a_module_with_buffers_in_two_stages_is_refused() -> None:
    for shared in (nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)):
        model = nn.Sequential(shared, nn.Tanh(), nn.Sequential(nn.ReLU(), shared))
        check_split(model, straight_plan(3, ()))
        message = _refusal(model, straight_plan(3, (1,)))
        assert "module '0' (BatchNorm1d) of stage 0 is also '2.1' of stage 1, and has buffers" in message
        assert "keep them in one stage" in message


def test_a_module_without_state_may_be_in_two_stages() -> None:
    shared = nn.ReLU()
    check_split(nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared), straight_plan(4, (2,)))


def test_a_buffer_in_two_stages_is_refused() -> None:
    first, second = nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False)
    second.running_mean = first.running_mean
    model = nn.Sequential(first, second)
    check_split(model, straight_plan(2, ()))
    message = _refusal(model, straight_plan(2, (1,)))
    assert "buffer '0.running_mean' of stage 0 is also '1.running_mean' of stage 1" in message


def test_parameters_that_share_memory_without_being_one_are_refused() -> None:
    model = _linears(2)
    model[1].weight = nn.Parameter(model[0].weight.data)
    message = _refusal(model, straight_plan(2, ()))
    assert "'0.weight' and '1.weight' share memory" in message
    # Recurrent layers on a GPU have their weights side by side in one block of memory. These weights do not
    # overlap.
    block = torch.zeros(8)
    model[0].weight, model[1].weight = (nn.Parameter(half.view(2, 2)) for half in block.chunk(2))
    check_split(model, straight_plan(2, (1,)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_trainable_parameters_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    model = _linears(2)
    model[1].to(dtype)
    message = _refusal(model, straight_plan(2, (1,)))
    assert f"'1.weight' has dtype {str(dtype)[6:]}" in message
    assert "only float32, float64 and bfloat16" in message
    model[1].requires_grad_(False)
    check_split(model, straight_plan(2, (1,)))


def test_a_lazy_parameter_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    assert "'0.weight' has no shape yet" in _refusal(model, straight_plan(2, (1,)))


class _Keeps(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.kept = kept


def test_a_view_of_a_parameter_that_was_made_once_is_refused() -> None:
    # A view of a weight, kept elsewhere, would show the initial weights for ever. A copy of it in a worker
    # process would do so, too.
    for view in (lambda weight: weight.t(), lambda weight: [weight.detach()[0]], lambda weight: weight.data):
        layer = _Keeps(None)
        layer.kept = view(layer.lin.weight)
        with pytest.raises(
            ValueError, match=r"^0\.kept.* is a view of parameter '0\.lin\.weight'.*in forward"
        ):
            check_split(nn.Sequential(layer), Plan.straight(1, 1))


def test_a_parameter_of_another_stage_that_is_not_registered_is_refused() -> None:
    first = nn.Linear(2, 2)
    model = nn.Sequential(first, _Keeps([first.weight]))
    check_split(model, Plan.straight(2, 1))
    with pytest.raises(ValueError, match=r"1\.kept\[0\] of stage 1 holds parameter '0\.weight' of stage 0"):
        check_split(model, Plan.straight(2, 2))


def test_a_frozen_parameter_of_another_stage_may_be_held() -> None:
    first = nn.Linear(2, 2).requires_grad_(False)
    check_split(nn.Sequential(first, _Keeps([first.weight])), Plan.straight(2, 2))


def test_a_tuple_of_tied_and_other_parameters_is_refused() -> None:
    tied = nn.Linear(2, 2)
    layer = _Keeps(None)
    layer.kept = (layer.lin.bias, tied.weight)
    layer.tied = tied
    check_split(nn.Sequential(tied, layer), Plan.straight(2, 1))
    with pytest.raises(
        ValueError, match=r"1\.kept\[1\] is in a tuple or partial with parameters that are tied"
    ):
        check_split(nn.Sequential(tied, layer), Plan.straight(2, 2))


def test_stages_that_share_parameters_are_paired_once_in_ascending_order() -> None:
    """ALBERT on three stages is such a model. The first and the last stage share one parameter, and all three
    share another one.
    """
    parameter = nn.Parameter(torch.zeros(1))
    ties = [Tie(parameter, (0, 2), ("a", "a")), Tie(parameter, (0, 1, 2), ("b", "b", "b"))]
    assert tie_pairs(ties) == [(0, 1), (0, 2)]
