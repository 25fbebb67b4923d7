"""Tests boundary.py: a rehearsal plans the tensors that cross a cut, and every minibatch is checked against
that plan."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from models import BATCH, CASES, WIDTH, Case, straight_plan
from pipedream import _core
from pipedream.model.boundary import (
    Boundary,
    boundary_input,
    check_loss,
    map_tensors,
    tensors_of,
)
from pipedream.model.tensor_spec import TensorSpec
from pipedream.model.untouched import untouched
from pipedream.splitting.splitter import split
from rehearsing import boundaries_of
from torch import nn

Pair = namedtuple("Pair", "first second")


_GOOD_JSON = (
    '{"structure": {"tensor": 0}, '
    '"tensors": [{"dtype": "float32", "shape": [1], "requires_grad": true, "order": []}]}'
)


def _same(a: Any, b: Any) -> bool:
    """Returns whether structure, types and constants are equal, and the tensors are the same objects."""
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


_LEAVES = st.one_of(
    st.builds(torch.zeros, st.integers(0, 3)),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), child, max_size=3),
    ),
    max_leaves=8,
).filter(lambda value: bool(tensors_of(value)))


@given(_VALUES)
def test_flatten_unflatten_and_json_keep_structure_constants_and_tensors(value: Any) -> None:
    boundary = Boundary.of(value)
    tensors = boundary.flatten(value)
    boundary.check(tensors)
    assert _same(boundary.unflatten(tensors), value)
    received = Boundary.from_json(boundary.to_json())
    assert received == boundary
    assert _same(received.unflatten(tensors), value)


def test_a_tensor_that_occurs_twice_crosses_once() -> None:
    x, y = torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)
    boundary = Boundary.of((x, {"again": x, "y": y}))
    assert boundary.tensors == (
        TensorSpec(torch.float32, (2, 3), False),
        TensorSpec(torch.int64, (4,), False),
    )
    assert boundary.num_bytes == 2 * 3 * 4 + 4 * 8
    a, b = torch.ones(2, 3), torch.ones(4, dtype=torch.int64)
    built = boundary.unflatten([a, b])
    assert built[0] is a and built[1]["again"] is a
    with pytest.raises(ValueError, match="was the same tensor as another"):
        boundary.flatten((a, {"again": a.clone(), "y": b}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: torch.zeros(1)}, r"the output has the dict key 1: only str keys"),
        (Pair(torch.zeros(1), 2), r"the output is a Pair"),
        ([OrderedDict(x=torch.zeros(1))], r"the output\[0\] is a OrderedDict"),
        ({"x": (torch.zeros(1), {1, 2})}, r"the output\['x'\]\[1\] is a set"),
        ((torch.zeros(1), float("nan")), r"the output\[1\] is nan"),
        ((1, None), r"the output has no tensor"),
        (torch.zeros(1).to_sparse(), r"the output is a torch.sparse_coo tensor"),
        (torch.zeros((1,) * 9), r"the output has 9 dimensions: at most 8"),
        (torch.zeros(1).to(torch.float8_e5m2), r"the output has dtype float8_e5m2"),
    ],
)
def test_what_cannot_cross_is_refused_in_one_line(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Boundary.of(value, name="the output")
    assert "\n" not in str(caught.value)


def test_as_many_tensors_cross_as_the_core_takes_and_no_more() -> None:
    most = _core.NUM_TENSORS_MAX

    def core_takes(num_tensors: int) -> None:
        _core.channel_bytes([("float32", 1, 4)] * num_tensors, "none")

    core_takes(most)
    assert len(Boundary.of([torch.zeros(1) for _ in range(most)]).tensors) == most
    with pytest.raises(ValueError, match=f"at most {most}"):
        core_takes(most + 1)
    one_more = [torch.zeros(1) for _ in range(most + 1)]
    with pytest.raises(ValueError) as caught:
        Boundary.of(one_more, name="the output")
    assert str(caught.value) == (
        f"the output has {most + 1} tensors: at most {most} can cross a cut, so join some or cut elsewhere"
    )
    with pytest.raises(ValueError, match=f"the inputs has {most} tensors: at most {most - 1}"):
        Boundary.of(one_more[1:], name="the inputs", num_beside=1)


def test_as_many_dimensions_cross_as_the_core_takes_and_no_more() -> None:
    most = _core.NUM_DIMS_MAX
    _core.channel_bytes([("float32", most, 4)], "none")
    Boundary.of(torch.zeros((1,) * most))
    with pytest.raises(ValueError, match=f"at most {most}"):
        _core.channel_bytes([("float32", most + 1, 4)], "none")
    with pytest.raises(ValueError, match=f"{most + 1} dimensions: at most {most}"):
        Boundary.of(torch.zeros((1,) * (most + 1)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), r"the value is a Tensor, planned a tuple"),
        ([torch.zeros(2), 1, {}], r"the value is a list, planned a tuple"),
        ((torch.zeros(2), 1), r"the value has 2 items, planned 3"),
        ((torch.zeros(2), 2, {"a": torch.zeros(1)}), r"the value\[1\] is 2, planned the constant 1"),
        ((torch.zeros(2), True, {"a": torch.zeros(1)}), r"the value\[1\] is True, planned the constant 1"),
        ((torch.zeros(2), 1, {"b": torch.zeros(1)}), r"the value\[2\] has the keys \['b'\], planned \['a'\]"),
        ((torch.zeros(2), 1, {"a": 3}), r"the value\[2\]\['a'\] is a int, planned a tensor"),
        ((torch.zeros(0), 1, {"a": torch.zeros(1)}), r"tensor 0 has no extent in any dimension"),
        ((None, 1, {"a": None}), r"tensor 0 is None, and a tensor in the first minibatch"),
        ((torch.zeros(2, requires_grad=True), 1, {"a": torch.zeros(1)}), r"tensor 0 needs a gradient"),
    ],
)
def test_a_value_of_another_structure_is_refused_naming_stage_and_minibatch(value: Any, message: str) -> None:
    boundary = Boundary.of((torch.zeros(2), 1, {"a": torch.zeros(1)}))
    with pytest.raises(ValueError, match=f"^stage 1, minibatch 7: {message}") as caught:
        boundary.checked(value, stage=1, minibatch=7)
    assert "\n" not in str(caught.value)


def test_none_crosses_for_a_tensor_but_not_for_a_scalar() -> None:
    boundary = Boundary.of((torch.zeros(2), {"a": torch.zeros(3, 4)}, torch.zeros(())))
    sent = boundary.checked((torch.ones(2), {"a": None}, torch.ones(())))
    value = boundary.unflatten(sent)
    assert value == (sent[0], {"a": None}, sent[2])
    with pytest.raises(ValueError, match=r"^tensor 2 is None, and a tensor in the first minibatch"):
        boundary.flatten((torch.ones(2), {"a": None}, None))


def test_a_single_tensor_is_checked_for_structure_and_gradient_too() -> None:
    boundary = Boundary.of(torch.zeros(2))
    with pytest.raises(ValueError, match=r"^the value is a tuple, planned a tensor"):
        boundary.flatten((torch.zeros(2),))
    with pytest.raises(ValueError, match=r"^minibatch 3: tensor 0 needs a gradient"):
        boundary.checked(torch.zeros(2, requires_grad=True), minibatch=3)
    # A tensor may need no gradient, although one was planned.
    x = torch.zeros(2)
    assert Boundary.of(torch.zeros(2, requires_grad=True)).flatten(x) == [x]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(4, 3)] * 2, "2 tensors, planned 1"),
        ([torch.zeros(4, 3, dtype=torch.float64)], "tensor 0 is float64, planned float32"),
        ([torch.zeros(4)], r"tensor 0 has shape \(4,\) of rank 1, planned \(4, 3\) of rank 2"),
        ([torch.zeros(5, 3)], r"tensor 0 has shape \(5, 3\), larger than the planned \(4, 3\)"),
        ([torch.zeros(5, 1)], r"tensor 0 has shape \(5, 1\), larger"),
        ([torch.zeros(4, 4)], r"tensor 0 has shape \(4, 4\), larger"),
    ],
)
def test_tensors_other_than_planned_are_refused(tensors: list[torch.Tensor], message: str) -> None:
    boundary = Boundary.of(torch.zeros(4, 3))
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        boundary.check(tensors)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((torch.zeros(4, 3),), "the value is a tuple, planned a tensor"),
        (torch.zeros(4, 3, dtype=torch.float64), "tensor 0 is float64, planned float32"),
        (torch.zeros(5, 3), r"tensor 0 has shape \(5, 3\), larger than the planned \(4, 3\)"),
        (torch.zeros(4, 3, requires_grad=True), "tensor 0 needs a gradient"),
    ],
)
def test_a_value_is_checked_for_all_at_once(value: Any, message: str) -> None:
    boundary = Boundary.of(torch.zeros(4, 3))
    with pytest.raises(ValueError, match=f"^stage 0, minibatch 2: {message}"):
        boundary.checked(value, stage=0, minibatch=2)


def test_a_value_as_planned_or_smaller_passes_the_checks() -> None:
    for planned in (torch.zeros(4, 3), torch.zeros(4, 3, requires_grad=True)):
        boundary = Boundary.of(planned)
        for shape in ((4, 3), (1, 3), (0, 3)):
            value = torch.zeros(shape)
            assert boundary.checked(value)[0] is value
            assert boundary.unflatten([value]) is value
    a, b = torch.zeros(2), torch.zeros(3)
    several = Boundary.of({"a": a, "b": [b, 1]})
    assert [id(tensor) for tensor in several.checked({"a": a, "b": [b, 1]})] == [id(a), id(b)]


def test_smaller_batches_fit() -> None:
    boundary = Boundary.of(torch.zeros(4, 3))
    for shape in ((4, 3), (1, 3), (3, 4), (0, 3), (4, 2)):
        boundary.check([torch.zeros(shape)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"structure": {"tensor": 0}, "tensors": []}',
        _GOOD_JSON.replace('{"tensor": 0}', '{"set": [{"tensor": 0}]}'),
        _GOOD_JSON.replace("float32", "float31"),
        _GOOD_JSON.replace("[1]", "[-1]"),
        _GOOD_JSON.replace("[]", "[1]"),
    ],
)
def test_json_that_is_no_boundary_is_refused(text: str) -> None:
    assert Boundary.from_json(_GOOD_JSON) == Boundary.of(torch.zeros(1, requires_grad=True))
    with pytest.raises(ValueError, match="not a boundary"):
        Boundary.from_json(text)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_rehearsal_plans_what_training_then_sends(case: Case, num_stages: int) -> None:
    stages = split(case.model(), case.plan(num_stages))
    data = case.data(3, short_last=True)
    boundaries = boundaries_of(stages, data[0][0])
    assert len(boundaries) == num_stages - 1
    for minibatch, (inputs, _) in enumerate(data):
        value = inputs
        for stage, boundary in zip(stages, boundaries, strict=False):
            value = stage(value)
            tensors = boundary.flatten(value)
            boundary.check(tensors)
            if minibatch == 0:
                assert [tuple(t.shape) for t in tensors] == [spec.shape for spec in boundary.tensors]
            assert [t.dtype for t in tensors] == [spec.dtype for spec in boundary.tensors]
            assert [t.requires_grad for t in tensors] == [spec.requires_grad for spec in boundary.tensors]
            value = boundary.unflatten(tensors)


def test_a_rehearsal_of_a_nested_value_finds_the_expected_specs() -> None:
    case = CASES["lstm"]
    inputs = case.data(1)[0][0]
    tokens, packed = boundaries_of(split(case.model(), case.plan(3)), inputs)
    assert set(tokens.structure) == {"tuple"}
    assert packed.structure == {
        "dict": {
            "outputs": {"tensor": 0},
            "state": {"tuple": [{"tensor": 1}, {"tensor": 2}]},
            "skip": {"list": [{"tensor": 0}]},
            "scale": {"constant": 0.5},
        }
    }
    assert packed.tensors[1] == TensorSpec(torch.float64, (1, BATCH, WIDTH), True)
    case = CASES["frozen"]
    (frozen,) = boundaries_of(split(case.model(), case.plan(2)), case.data(1)[0][0])
    assert not frozen.tensors[0].requires_grad


def test_a_rehearsal_names_the_stage_whose_output_cannot_cross() -> None:
    class ToSet(nn.Module):
        def forward(self, value: torch.Tensor) -> Any:
            return {"x": {value}}

    model = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, 2), ToSet(), nn.Identity())
    plan = CASES["frozen"].plan(4)
    with pytest.raises(ValueError, match=r"the output of stage 2\['x'\] is a set"):
        boundaries_of(split(model, plan), torch.zeros(1, WIDTH))


def _everything(model: nn.Module) -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "weights": {n: p.detach().clone().tolist() for n, p in model.named_parameters()},
        "gradients": {
            n: None if p.grad is None else (id(p.grad), p.grad.tolist()) for n, p in model.named_parameters()
        },
        "buffers": {n: (id(b), b.tolist()) for n, b in model.named_buffers()},
        "training": [m.training for m in model.modules()],
    }


class _Messy(nn.Module):
    """Changes buffers, its mode and its input in its forward, and draws from generators."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("missing", None)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1  # makes a new object and changes no contents
        self.missing = torch.ones(1)
        random.random()
        np.random.random()
        self.eval()
        return torch.relu_(value)


def _messy_model() -> nn.Sequential:
    model = nn.Sequential(
        _Messy(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2)
    )
    model[1].weight.grad = torch.ones(WIDTH, WIDTH)
    model[4].eval()
    return model


def test_a_rehearsal_leaves_no_trace() -> None:
    model = _messy_model()
    inputs = torch.randn(4, WIDTH)
    kept = inputs.clone()
    before = _everything(model)
    boundaries_of(split(model, straight_plan(5, (1, 2, 3, 4))), inputs)
    assert _everything(model) == before
    assert torch.equal(inputs, kept)
    assert model[0].missing is None


def test_untouched_restores_after_an_error_and_hides_gradients_inside() -> None:
    model = _messy_model()
    before = _everything(model)
    with pytest.raises(KeyError), untouched([model]):
        assert model[1].weight.grad is None
        model(torch.randn(4, WIDTH)).sum().backward()
        assert model[1].weight.grad is not None
        raise KeyError
    assert _everything(model) == before


class _InitialisedByData(nn.Module):
    """A module like ActNorm. Its first minibatch sets it up, and every call is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialised, self.num_calls, self.mode, self.scale = False, 0, "new", None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if not self.is_initialised:
            self.is_initialised, self.mode, self.scale = True, "used", value.std()
        self.cached = value.detach()
        return value / self.scale


def test_a_layer_that_counts_or_sets_itself_up_is_untouched_too() -> None:
    # Otherwise the first minibatch of the training would be the layer's second one, and the losses would
    # differ from plain training's.
    layer = _InitialisedByData()
    before = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    with untouched([layer]):
        layer(torch.randn(4, WIDTH))
        assert (layer.is_initialised, layer.num_calls) == (True, 1)
    after = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    assert after == before
    assert before == {
        "training": True,
        "is_initialised": False,
        "num_calls": 0,
        "mode": "new",
        "scale": None,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boundary_input_lets_the_first_layer_work_in_place_with_right_gradients(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, dtype=dtype)
    weight = torch.randn(3, 3, dtype=dtype)
    expected = x.clone().requires_grad_()
    (torch.relu(expected) @ weight).square().sum().backward()

    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        nn.ReLU(inplace=True)(leaf)  # shows why boundary_input exists
    alias = boundary_input(leaf)
    assert alias.data_ptr() == leaf.data_ptr() and not alias.is_leaf and alias._base is None
    (nn.ReLU(inplace=True)(alias) @ weight).square().sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, expected.grad)


def test_boundary_input_passes_on_what_needs_no_gradient() -> None:
    tokens = torch.zeros(3, dtype=torch.int64)
    assert boundary_input(tokens) is tokens


def test_map_tensors_keeps_types_and_maps_each_tensor_once() -> None:
    x = torch.zeros(2)
    calls = []
    mapped = map_tensors(lambda t: (calls.append(t), t + 1)[1], Pair(x, [x, OrderedDict(a=3)]))
    assert len(calls) == 1
    assert isinstance(mapped, Pair) and isinstance(mapped.second[1], OrderedDict)
    assert mapped.first is mapped.second[0] and float(mapped.first[0]) == 1
    assert tensors_of(Pair(x, [x])) == [x]


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (0.5, TypeError, "returned a float for minibatch 3"),
        (torch.zeros(2), ValueError, r"shape \(2,\) for minibatch 3: return a scalar"),
        (torch.zeros(1), ValueError, r"shape \(1,\)"),
        (torch.zeros((), dtype=torch.int64), ValueError, "returned a int64 tensor"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_loss(loss, 3)
    scalar = torch.zeros(())
    assert check_loss(scalar, 3) is scalar


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 4, 5), (2, 3, 1, 1)])
@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_a_tensor_crosses_in_its_own_memory_with_the_strides_that_it_has(
    shape: tuple[int, ...], dims: tuple[int, ...]
) -> None:
    """The order of elements in memory crosses with the values. Otherwise a channels_last tensor would arrive
    in row-major order.
    """
    inverse = [dims.index(dim) for dim in range(4)]
    tensor = torch.randn([shape[dim] for dim in dims]).permute(inverse)
    boundary = Boundary.from_json(Boundary.of((tensor, torch.zeros(2))).to_json())
    sent = boundary.sent(boundary.checked((tensor, torch.zeros(2))))
    assert sent[0].is_contiguous()
    assert sent[0].data_ptr() == tensor.data_ptr()
    received, _ = boundary.received([part.clone() for part in sent])
    assert torch.equal(received, tensor)
    assert received.stride() == tensor.stride()


@pytest.mark.parametrize("change", [lambda x: x[:, :, 1:], lambda x: x[:1].expand(4, -1, -1, -1)])
def test_a_tensor_with_gaps_crosses_with_the_strides_of_a_clone(change: Any) -> None:
    for tensor in (change(torch.randn(2, 3, 4, 5)), change(torch.randn(2, 5, 4, 3).transpose(1, 3))):
        boundary = Boundary.of(tensor)
        (received,) = boundary.received([part.contiguous() for part in boundary.sent([tensor])])
        assert torch.equal(received, tensor)
        assert received.stride() == tensor.clone().stride()
