"""Compares the native optimizers with torch.optim's: numbers, state, schedulers and refusals must be the
same.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipedream import _core, optim
from torch import Tensor

SIZES = (0, 1, 7, 64, 1000)
NUM_STEPS = 20

SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]
ADAM_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "maximize": True},
    {"amsgrad": True, "weight_decay": 0.1, "betas": (0.5, 0.9)},
    {"betas": (0.0, 0.99), "eps": 1e-3},
]
NADAM_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"betas": (0.99, 0.99), "momentum_decay": 0.1},
    {"betas": (0.3, 0.9), "eps": 1e-3},
]
CASES = [
    *(("SGD", options) for options in SGD_OPTIONS),
    *(("NAdamW", options) for options in NADAM_OPTIONS),
    *((name, options) for name in ("Adam", "AdamW") for options in ADAM_OPTIONS),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
]


def native_of(name: str) -> Callable[..., optim.NativeOptimizer]:
    return getattr(optim, name)


def torch_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name == "NAdamW":

        def nadam(params: Any, **options: Any) -> torch.optim.Optimizer:
            options = {"weight_decay": 1e-2, "decoupled_weight_decay": True, **options}
            return torch.optim.NAdam(params, foreach=False, **options)

        return nadam
    return functools.partial(getattr(torch.optim, name), foreach=False)


def make_parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, dtype=dtype, generator=generator).requires_grad_() for n in SIZES]


def copies_of(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone().requires_grad_() for parameter in parameters]


def give_gradients(seed: int, *lists: list[Tensor]) -> None:
    """Gives the same random gradients to each list of parameters."""
    generator = torch.Generator().manual_seed(seed)
    for parameters in zip(*lists, strict=True):
        gradient = torch.randn(parameters[0].shape, dtype=parameters[0].dtype, generator=generator)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def assert_equal(native: list[Tensor], expected: list[Tensor]) -> None:
    """Asserts equality up to rounding. Parameters are about 1 in size, and errors of single steps add up."""
    for one, other in zip(native, expected, strict=True):
        tolerance = 1e-12 if one.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def step_both(native: torch.optim.Optimizer, expected: torch.optim.Optimizer, first: int, last: int) -> None:
    parameters = [
        [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for optimizer in (native, expected)
    ]
    for step in range(first, last):
        give_gradients(step, *parameters)
        native.step()
        expected.step()
    assert_equal(*parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_torch_in_place(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    expected = copies_of(parameters)
    step_both(
        native_of(name)(parameters, lr=0.05, **options), torch_of(name)(expected, lr=0.05, **options), 0, 20
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_torch_out_of_place(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    read = make_parameters(dtype)
    expected = copies_of(read)
    write = [torch.full_like(parameter, math.nan) for parameter in read]
    native = native_of(name)(copies_of(read), lr=0.05, **options)
    of_torch = torch_of(name)(expected, lr=0.05, **options)
    for step in range(NUM_STEPS):
        give_gradients(step, expected)
        before = copies_of(read)
        native.step_out_of_place(read, write, [parameter.grad for parameter in expected])
        of_torch.step()
        for one, other in zip(read, before, strict=True):
            assert torch.equal(one, other)  # the version that was read has not changed
        assert_equal(write, expected)
        read, write = write, read


@given(
    lr=st.floats(0, 0.5),
    momentum=st.floats(0, 0.99),
    dampening=st.floats(-0.5, 1),
    weight_decay=st.floats(0, 0.5),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sgd_equals_torch_for_any_options(
    nesterov: bool, momentum: float, dampening: float, seed: int, **options: Any
) -> None:
    nesterov = nesterov and momentum > 0
    options |= {"momentum": momentum, "nesterov": nesterov, "dampening": 0.0 if nesterov else dampening}
    parameters = make_parameters(seed=seed)
    expected = copies_of(parameters)
    step_both(optim.SGD(parameters, **options), torch.optim.SGD(expected, foreach=False, **options), 0, 5)


@given(
    name=st.sampled_from(["Adam", "AdamW"]),
    lr=st.floats(0, 0.5),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
    eps=st.floats(1e-8, 1),
    weight_decay=st.floats(0, 0.5),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_adam_equals_torch_for_any_options(name: str, seed: int, **options: Any) -> None:
    parameters = make_parameters(seed=seed)
    expected = copies_of(parameters)
    step_both(native_of(name)(parameters, **options), torch_of(name)(expected, **options), 0, 5)


@given(
    lr=st.floats(0, 0.5),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
    eps=st.floats(1e-8, 1),
    weight_decay=st.floats(0, 0.5),
    momentum_decay=st.floats(0, 1),
    maximize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_nadamw_equals_torch_for_any_options(seed: int, **options: Any) -> None:
    parameters = make_parameters(seed=seed)
    expected = copies_of(parameters)
    step_both(optim.NAdamW(parameters, **options), torch_of("NAdamW")(expected, **options), 0, 5)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdamW"])
def test_large_parameters_on_several_threads_equal_torch(name: str) -> None:
    parameters = [torch.randn(300_000, dtype=torch.float64).requires_grad_(), torch.randn(5).requires_grad_()]
    expected = copies_of(parameters)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        step_both(native_of(name)(parameters, lr=0.05), torch_of(name)(expected, lr=0.05), 0, 3)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("gradient_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_any_memory_format(
    name: str, weight_format: torch.memory_format, gradient_format: torch.memory_format
) -> None:
    weight = torch.randn(4, 3, 5, 2, dtype=torch.float64).to(memory_format=weight_format).requires_grad_()
    expected = copies_of([weight])
    options = {"lr": 0.05} | ({"momentum": 0.9} if name == "SGD" else {})
    native, of_torch = native_of(name)([weight], **options), torch_of(name)(expected, **options)
    for step in range(3):
        give_gradients(step, [weight], expected)
        assert weight.grad is not None
        weight.grad = weight.grad.contiguous(memory_format=gradient_format)
        native.step()
        of_torch.step()
    assert_equal([weight], expected)
    assert weight.is_contiguous(memory_format=weight_format)


def test_a_model_may_change_its_memory_format_between_steps() -> None:
    weight = torch.randn(4, 3, 5, 2, dtype=torch.float64).requires_grad_()
    expected = copies_of([weight])
    native, of_torch = optim.Adam([weight]), torch.optim.Adam(expected, foreach=False)
    step_both(native, of_torch, 0, 2)
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    step_both(native, of_torch, 2, 4)


def test_a_transposed_parameter_equals_torch() -> None:
    parameters = [torch.randn(5, 3, dtype=torch.float64).t().requires_grad_()]
    expected = [parameters[0].detach().contiguous().requires_grad_()]
    step_both(optim.SGD(parameters, momentum=0.9), torch.optim.SGD(expected, momentum=0.9), 0, 3)


SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["step", "cosine", "one_cycle", "lambda"])
# A float64 lr is tested too, because torch computes 1 - lr * weight_decay in the dtype of lr.
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_lr_schedulers_work(name: str, lr: float | Tensor, scheduler: Callable[..., Any]) -> None:
    parameters = make_parameters()
    expected = copies_of(parameters)
    # OneCycleLR changes the momentum as well.
    options = {"momentum": 0.9} if name == "SGD" else {}
    native = native_of(name)(parameters, lr=copy.deepcopy(lr), **options)
    of_torch = torch_of(name)(expected, lr=copy.deepcopy(lr), **options)
    of_native, of_other = scheduler(native), scheduler(of_torch)
    for step in range(NUM_STEPS):
        step_both(native, of_torch, step, step + 1)
        of_native.step()
        of_other.step()
        assert float(native.param_groups[0]["lr"]) == float(of_torch.param_groups[0]["lr"])


def test_groups_have_options_of_their_own() -> None:
    parameters = make_parameters()
    expected = copies_of(parameters)

    def groups(of: list[Tensor]) -> list[dict[str, Any]]:
        return [{"params": of[:2], "lr": 0.2}, {"params": of[2:], "momentum": 0.9, "maximize": True}]

    native = optim.SGD(groups(parameters), lr=0.01)
    assert native.num_state_tensors == 1
    step_both(native, torch.optim.SGD(groups(expected), lr=0.01), 0, NUM_STEPS)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_state_is_torchs_and_moves_both_ways(name: str, options: dict[str, Any]) -> None:
    native_parameters = make_parameters()
    torch_parameters = copies_of(native_parameters)
    native = native_of(name)(native_parameters, lr=0.05, **options)
    of_torch = torch_of(name)(torch_parameters, lr=0.05, **options)
    step_both(native, of_torch, 0, 3)
    native_state, torch_state = native.state_dict()["state"], of_torch.state_dict()["state"]
    assert {index: set(state) for index, state in native_state.items()} == {
        index: {key for key, value in state.items() if value is not None}
        for index, state in torch_state.items()
        if any(value is not None for value in state.values())
    }
    # Each optimizer continues from the other's state. Before it loads the state, it has other options.
    native_next, torch_next = copies_of(torch_parameters), copies_of(native_parameters)
    native_again, torch_again = native_of(name)(native_next, lr=0.9), torch_of(name)(torch_next, lr=0.9)
    native_again.load_state_dict(of_torch.state_dict())
    torch_again.load_state_dict(copy.deepcopy(native.state_dict()))
    # Torch converts this number to the parameter's dtype when it loads it.
    for state in torch_again.state.values():
        if "mu_product" in state:
            state["mu_product"] = state["mu_product"].float()
    step_both(native_again, torch_again, 3, 6)
    step_both(native, of_torch, 3, 6)
    assert_equal(native_next, native_parameters)


def test_loaded_state_is_a_copy() -> None:
    parameters = make_parameters()
    source = optim.Adam(parameters)
    give_gradients(0, parameters)
    source.step()
    target = optim.Adam(copies_of(parameters))
    target.load_state_dict(source.state_dict())
    for one, other in zip(source.state.values(), target.state.values(), strict=True):
        assert one["step"] == other["step"] == 1
        assert one["step"].data_ptr() != other["step"].data_ptr()
        assert one["exp_avg"].numel() == 0 or one["exp_avg"].data_ptr() != other["exp_avg"].data_ptr()


def test_a_copied_optimizer_steps_alone() -> None:
    parameters = make_parameters()
    native = optim.SGD(parameters, lr=0.1, momentum=0.9)
    placed = place(native)
    give_gradients(0, parameters)
    native.step()
    other = copy.deepcopy(native)
    before = [tensor.clone() for tensor in placed]
    give_gradients(1, [parameter for group in other.param_groups for parameter in group["params"]])
    other.step()
    assert all(torch.equal(one, two) for one, two in zip(placed, before, strict=True))


def place(optimizer: optim.NativeOptimizer) -> list[Tensor]:
    """Places the state. Returns its tensors, parameter by parameter."""
    placed: list[Tensor] = []
    indices: list[int] = []

    def make(parameter_index: int, parameter: Tensor) -> list[Tensor]:
        indices.append(parameter_index)
        tensors = [torch.zeros_like(parameter) for _ in range(optimizer.num_state_tensors)]
        placed.extend(tensors)
        return tensors

    optimizer.place_state(make)
    assert indices == list(range(len(SIZES)))
    return placed


@pytest.mark.parametrize(("name", "options"), CASES)
def test_state_lives_where_it_is_placed(name: str, options: dict[str, Any]) -> None:
    parameters = make_parameters()
    expected = copies_of(parameters)
    native = native_of(name)(parameters, lr=0.05, **options)
    assert native.num_state_tensors == (
        (1 if options.get("momentum") else 0) if name == "SGD" else 2 + options.get("amsgrad", False)
    )
    placed = place(native)
    of_torch = torch_of(name)(expected, lr=0.05, **options)
    step_both(native, of_torch, 0, 3)
    kept = [
        value
        for state in native.state.values()
        for key, value in state.items()
        if key not in ("step", "mu_product")
    ]
    assert {id(tensor) for tensor in kept} == {id(tensor) for tensor in placed}
    # Loading copies the new state into the memory of the old one.
    native.load_state_dict(of_torch.state_dict())
    kept = [
        value
        for state in native.state.values()
        for key, value in state.items()
        if key not in ("step", "mu_product")
    ]
    assert {id(tensor) for tensor in kept} == {id(tensor) for tensor in placed}
    step_both(native, of_torch, 3, 6)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_displaced_state_goes_on_in_memory_of_the_optimizers_own(name: str, options: dict[str, Any]) -> None:
    parameters = make_parameters()
    expected = copies_of(parameters)
    native = native_of(name)(parameters, lr=0.05, **options)
    placed = place(native)
    of_torch = torch_of(name)(expected, lr=0.05, **options)
    step_both(native, of_torch, 0, 3)
    native.displace_state()
    for tensor in placed:
        tensor.fill_(float("nan"))
    step_both(native, of_torch, 3, 5)
    place(native)
    step_both(native, of_torch, 5, 7)


def test_state_may_be_placed_after_it_was_loaded() -> None:
    parameters = make_parameters()
    expected = copies_of(parameters)
    native, of_torch = optim.Adam(parameters), torch.optim.Adam(expected, foreach=False)
    step_both(native, of_torch, 0, 3)
    placed = place(native)
    step_both(native, of_torch, 3, 6)
    assert any(bool(tensor.count_nonzero()) for tensor in placed)


def test_placed_state_has_to_fit() -> None:
    native = optim.Adam([torch.randn(3, 4).requires_grad_()])
    with pytest.raises(ValueError, match=r"parameter 0: it must return 2 tensors with its shape \(3, 4\)"):
        native.place_state(lambda _, parameter: [torch.zeros_like(parameter)])
    with pytest.raises(ValueError, match=r"strides \(4, 1\)"):
        native.place_state(lambda _, parameter: [torch.zeros(4, 3).t(), torch.zeros(3, 4)])


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_parameter_without_gradient_stays_or_is_copied(name: str) -> None:
    parameters = [torch.randn(5).requires_grad_(), torch.randn(5).requires_grad_()]
    before = copies_of(parameters)
    native = native_of(name)(parameters, lr=0.5, **({"momentum": 0.9} if name == "SGD" else {}))
    parameters[0].grad = torch.ones(5)
    native.step()
    assert not torch.equal(parameters[0], before[0])
    assert torch.equal(parameters[1], before[1])
    assert parameters[1] not in native.state
    write = [torch.zeros(5), torch.zeros(5)]
    native.step_out_of_place(parameters, write, [None, torch.ones(5)])
    assert torch.equal(write[0], parameters[0])
    assert not torch.equal(write[1], parameters[1])


def test_sgd_makes_sparse_gradients_dense() -> None:
    weights = [torch.randn(6, 2, dtype=torch.float64).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        weights[1].copy_(weights[0])
    native, of_torch = optim.SGD(weights[:1], lr=0.1), torch.optim.SGD(weights[1:], lr=0.1)
    for indices in ([0, 2, 2], [5, 1, 0]):
        for weight in weights:
            weight.grad = None
            torch.nn.functional.embedding(
                torch.tensor(indices), weight, sparse=True
            ).square().sum().backward()
        native.step()
        of_torch.step()
    assert_equal(weights[:1], weights[1:])


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradient_scale_multiplies_the_gradients_first(name: str, options: dict[str, Any]) -> None:
    read = make_parameters()
    expected = copies_of(read)
    native = native_of(name)(copies_of(read), lr=0.05, **options)
    of_torch = torch_of(name)(expected, lr=0.05, **options)
    give_gradients(0, read, expected)
    gradients = [parameter.grad for parameter in read]
    before = [None if gradient is None else gradient.clone() for gradient in gradients]
    for parameter in expected:
        assert parameter.grad is not None
        parameter.grad *= 0.125
    write = [torch.empty_like(parameter) for parameter in read]
    native.step_out_of_place(read, write, gradients, gradient_scale=0.125)
    of_torch.step()
    assert_equal(write, expected)
    assert all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(gradients, before, strict=True)
    )


def test_autograd_notices_a_step_between_forward_and_backward() -> None:
    weight = torch.randn(3, 3).requires_grad_()
    native = optim.SGD([weight], lr=0.1)
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3, 3)
    native.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_closure_gives_the_loss() -> None:
    weight = torch.ones(3).requires_grad_()
    native = optim.SGD([weight], lr=0.1)

    def closure() -> Tensor:
        native.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert native.step(closure).item() == 3
    assert torch.allclose(weight, torch.full((3,), 0.8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.SGD(p, lr=-0.1), "lr is -0.1"),
        (lambda p: optim.SGD(p, lr=math.nan), "lr is nan"),
        (lambda p: optim.SGD(p, lr=torch.tensor([0.1, 0.2])), "lr is a tensor of 2 elements"),
        (lambda p: optim.SGD(p, momentum=-1), "momentum is -1"),
        (lambda p: optim.SGD(p, nesterov=True), "nesterov needs momentum > 0"),
        (lambda p: optim.Adam(p, betas=(0.9, 1.0)), "each must be at least 0 and below 1"),
        (lambda p: optim.Adam(p, eps=-1e-8), "eps is -1e-08"),
        (lambda p: optim.AdamW(p, weight_decay=-0.1), "weight_decay is -0.1"),
        (lambda p: optim.SGD([{"params": p, "lr": -2}]), "lr is -2"),
    ],
)
def test_an_option_out_of_range_is_refused(make: Callable[[list[Tensor]], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_parameters())


def test_an_option_that_goes_bad_later_is_refused_at_the_step() -> None:
    parameters = make_parameters()
    native = optim.Adam(parameters)
    native.param_groups[0]["lr"] = math.nan
    give_gradients(0, parameters)
    with pytest.raises(ValueError, match="lr is nan"):
        native.step()


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable", "differentiable"])
def test_options_of_torchs_own_implementations_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        optim.Adam(make_parameters(), **{option: True})


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3, dtype=torch.float16), "torch.float16 parameter on cpu.*use torch.optim.Adam"),
        (torch.ones(3, dtype=torch.complex64), "torch.complex64 parameter"),
        (torch.ones(3, 4)[:, ::2], "with gaps or overlaps"),
    ],
)
def test_a_parameter_that_the_core_cannot_take_is_refused(weight: Tensor, message: str) -> None:
    weight = weight.detach().requires_grad_()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(TypeError, match=message):
        optim.Adam([weight]).step()


def test_adam_refuses_sparse_gradients_as_torch_does() -> None:
    weight = torch.randn(6, 2).requires_grad_()
    torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    with pytest.raises(TypeError, match="sparse gradient"):
        optim.Adam([weight]).step()


@pytest.mark.skipif(_core.built_with_cuda(), reason="this build has CUDA kernels")
def test_a_build_without_cuda_says_so() -> None:
    with pytest.raises(ValueError, match="built without CUDA"):
        _core.sgd_step(
            [],
            dtype="float32",
            first_step=True,
            lr=0.1,
            momentum=0.0,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
            maximize=False,
            device="cuda",
        )


@pytest.mark.skipif(
    not (torch.cuda.is_available() and _core.cuda_available()), reason="no GPU, or the core cannot use it"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_the_host_on_a_gpu(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    expected = make_parameters(dtype)
    parameters = [parameter.detach().cuda().requires_grad_() for parameter in expected]
    on_host, on_gpu = (native_of(name)(of, lr=0.05, **options) for of in (expected, parameters))
    for step in range(NUM_STEPS):
        give_gradients(step, expected, parameters)
        on_host.step()
        on_gpu.step()
    assert_equal([parameter.cpu() for parameter in parameters], expected)
