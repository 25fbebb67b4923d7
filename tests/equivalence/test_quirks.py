"""Tests that runs with models, data and optimizers that do unusual things equal a plain loop, or are
refused.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from covering import parametrize_pairs
from farm import Farm
from pipedream import Plan, reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

_NUM_MINIBATCHES = 10
_WIDTH = 6


def _linear() -> nn.Linear:
    return nn.Linear(_WIDTH, _WIDTH, dtype=torch.float64)


def _data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shape = (_NUM_MINIBATCHES, 4, _WIDTH)
    inputs, targets = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return list(zip(inputs, targets, strict=True))


def _model(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


_OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def _run(make_model: Callable[[], nn.Sequential], num_stages: int, **options: Any) -> tuple[Any, ...]:
    """Trains at this rank. Returns the losses, and the state of the model afterwards. `options` are arguments
    of run().
    """
    model = make_model()
    arguments = {"data": _data(), "loss_fn": nn.functional.mse_loss, "optimizer": _OPTIMIZER, "seed": 1}
    arguments |= {"plan": Plan.straight(len(model), num_stages), "progress": False} | options
    result = pipedream.run(model, **arguments)
    return result.losses, dict(model.named_parameters()) | dict(model.named_buffers())


def _expect(make_model: Callable[[], nn.Sequential], num_stages: int, **options: Any) -> tuple[Any, ...]:
    model = make_model()
    arguments = {"data": _data(), "loss_fn": nn.functional.mse_loss, "optimizer": _OPTIMIZER, "seed": 1}
    arguments |= {"plan": Plan.straight(len(model), num_stages)} | options
    result = reference.run(model, **arguments)
    return result.losses, dict(model.named_parameters()) | dict(model.named_buffers())


def _assert_equals_reference(
    farm: Farm, make_model: Callable[[], nn.Sequential], num_stages: int, **options: Any
) -> None:
    losses, state = farm.results(_run, make_model, num_stages, num_ranks=num_stages, **options)[0]
    wanted_losses, wanted_state = _expect(make_model, num_stages, **options)
    assert losses == pytest.approx(wanted_losses, rel=1e-9)
    assert state.keys() == wanted_state.keys()
    for name, wanted in wanted_state.items():
        torch.testing.assert_close(state[name], wanted, rtol=1e-9, atol=1e-12)


class _CountsInABuffer(nn.Module):
    """Returns a buffer, which its next forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(64, dtype=torch.float64))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return value, self.count


class _MakesItsBuffer(_CountsInABuffer):
    """Replaces the buffer in its first forward, and then changes the new one in place."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.count.numel() != 128:
            self.count = torch.zeros(128, dtype=torch.float64)
        return super().forward(value)


class _CountsInAWorkspace(nn.Module):
    """Returns a tensor of an attribute, which its next forward overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.workspace = torch.zeros(64, dtype=torch.float64)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        self.workspace.fill_(float(value.detach().sum()))
        return value, self.workspace


class _UsesTheCount(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        value, count = pair
        return value * (1 + count[0] / 10)


def _model_with_a_buffer_as_output() -> nn.Sequential:
    return _model(_linear(), _CountsInABuffer(), _linear_of_first(), _UsesTheCount())


def _model_with_a_new_buffer_as_output() -> nn.Sequential:
    return _model(_linear(), _MakesItsBuffer(), _linear_of_first(), _UsesTheCount())


def _model_with_a_workspace_as_output() -> nn.Sequential:
    return _model(_linear(), _CountsInAWorkspace(), _linear_of_first(), _UsesTheCount())


class _OnFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(pair[0]), pair[1]


def _linear_of_first() -> nn.Module:
    return _OnFirst()


@pytest.mark.parametrize(
    "make_model",
    [
        _model_with_a_buffer_as_output,
        _model_with_a_new_buffer_as_output,
        _model_with_a_workspace_as_output,
    ],
)
def test_an_output_that_the_next_forward_overwrites_arrives_as_it_was_sent(
    farm: Farm, make_model: Callable[[], nn.Sequential]
) -> None:
    _assert_equals_reference(farm, make_model, 2)


def _model_with_spectral_norms(how: str) -> nn.Sequential:
    """Returns a model whose forwards read buffers and then change them."""
    norm = nn.utils.spectral_norm if how == "hook" else nn.utils.parametrizations.spectral_norm
    torch.manual_seed(5)
    return nn.Sequential(*(layer for _ in range(4) for layer in (norm(_linear()), nn.Tanh())))


@parametrize_pairs(
    schedule=("pipedream", "naive", "flush", "interleaved"),
    how=("hook", "parametrization"),
    recompute=(True, [1, 2]),
)
def test_a_recompute_of_spectral_norms_reads_what_the_forward_read(
    farm: Farm, how: str, schedule: str, recompute: Any
) -> None:
    make_model = functools.partial(_model_with_spectral_norms, how)
    num_workers = 2 if schedule == "interleaved" else 4
    options = {"schedule": schedule, "microbatches": 2, "recompute": recompute}
    plan = Plan.straight(8, 4, num_workers=num_workers)
    _assert_equals_reference(farm, make_model, num_workers, plan=plan, **options)


# ---- A gradient that waits to be sent must not share memory with one to which the next backward adds ----

_DEADLINE_S = 60.0
# This is the number of forwards, and of backwards, that a stage has before it trains on microbatches. Layers
# count them in lists, because a rehearsal does not restore lists.
_NUM_REHEARSED = 2


class _Waits(torch.autograd.Function):
    """Returns its input. Its backward calls the layer's wait()."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: _WaitsInItsBackward) -> Tensor:
        ctx.layer = layer
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.layer.wait()
        return gradients[0], None


class _WaitsInItsBackward(nn.Module):
    """Waits in its backwards of the training at rank 1 until a file exists, the gate. Does not wait in the
    rehearsal or in the oracle.
    """

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.linear = _linear()
        self._gate = gate
        self._backwards: list[None] = []

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = _Waits.apply(self.linear(value), self)  # type: ignore[no-untyped-call]
        return output

    def wait(self) -> None:
        self._backwards.append(None)
        if os.environ.get("RANK") != "1" or len(self._backwards) <= _NUM_REHEARSED:
            return
        deadline_s = time.monotonic() + _DEADLINE_S
        while not Path(self._gate).exists():
            assert time.monotonic() < deadline_s, f"{self._gate} was not made"
            time.sleep(0.001)


class _AddsPositions(nn.Module):
    """Adds a parameter. With one sample, autograd gives the input and the parameter the same gradient, in the
    same memory.

    Makes the file `gate` in its sixth forward of the training at rank 2.
    """

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(_WIDTH, dtype=torch.float64))
        self._gate = gate
        self._forwards: list[None] = []

    def forward(self, value: Tensor) -> Tensor:
        self._forwards.append(None)
        if os.environ.get("RANK") == "2" and len(self._forwards) == 6 + _NUM_REHEARSED:
            Path(self._gate).touch()
        return torch.tanh(value + self.positions.unsqueeze(0))


def _model_with_a_shared_gradient(gate: str) -> nn.Sequential:
    return _model(_linear(), _WaitsInItsBackward(gate), _AddsPositions(gate))


def test_a_gradient_that_waits_to_be_sent_is_not_the_memory_of_a_parameters(
    farm: Farm, tmp_path: Path
) -> None:
    # Minibatches have three microbatches of one sample. Stage 1 waits until stage 2 has run two backwards of
    # minibatch 1. So the first of these gradients waits to be sent while the second is added to the
    # parameter's gradient. Autograd gives the parameter the first gradient's memory, so the gradient must be
    # sent from a copy.
    make_model = functools.partial(_model_with_a_shared_gradient, str(tmp_path / "gate"))
    plan = Plan(Plan.straight(3, 3).stages, in_flight=(7, 7, 1))
    data = [(inputs[:3], targets[:3]) for inputs, targets in _data()]
    _assert_equals_reference(farm, make_model, 3, plan=plan, data=data, microbatches=3)
    assert (tmp_path / "gate").exists()


class _Conjugate(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return torch.complex(value, 2 * value).conj()


class _Imaginary(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.imag


def _model_with_a_conjugate() -> nn.Sequential:
    return _model(_linear(), _Conjugate(), _Imaginary(), _linear())


def test_a_lazy_conjugate_crosses_a_cut(farm: Farm) -> None:
    _assert_equals_reference(farm, _model_with_a_conjugate, 2)


class _StopsSomeGradients(nn.Module):
    """Lets no gradient through for some minibatches, so that layers before it have none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, value: Tensor) -> Tensor:
        with torch.set_grad_enabled(bool(value.detach().sum() > 0)):
            out: Tensor = self.linear(value)
        return out


def _model_that_stops_some_gradients() -> nn.Sequential:
    return _model(_linear(), _linear(), _StopsSomeGradients(), _linear())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "flush", "microbatches": 2},
        {"schedule": "gpipe", "microbatches": 2, "recompute": True},
        {"schedule": "flush", "max_grad_norm": 0.1},  # the norm is that of the stages with gradients
        {"plan": Plan.replicated(4, [2, 1, 1])},
    ],
)
def test_momentum_rests_where_a_later_stage_gives_no_gradient(farm: Farm, options: dict[str, Any]) -> None:
    num_stages = 3
    plan = options.get("plan")
    make = _model_that_stops_some_gradients
    num_ranks = num_stages if plan is None else plan.workers_used
    losses, state = farm.results(_run, make, num_stages, num_ranks=num_ranks, **options)[0]
    wanted_losses, wanted_state = _expect(make, num_stages, **options)
    assert losses == pytest.approx(wanted_losses, rel=1e-9)
    for name, wanted in wanted_state.items():
        torch.testing.assert_close(state[name], wanted, rtol=1e-9, atol=1e-12)


class _PassesOnAPenalty(nn.Module):
    """Returns an additional number without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = _linear(), nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(value), self.scale.square()


class _AddsThePenaltyAtTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        value, penalty = pair
        out: Tensor = self.linear(value)
        return out + penalty if value.detach().sum() > 0 else out


def _model_with_a_number_that_is_used_at_times() -> nn.Sequential:
    return _model(_linear(), _PassesOnAPenalty(), _AddsThePenaltyAtTimes(), _linear())


@pytest.mark.parametrize("options", [{}, {"schedule": "flush", "microbatches": 2}])
def test_momentum_rests_where_the_loss_uses_no_number_from_upstream(
    farm: Farm, options: dict[str, Any]
) -> None:
    _assert_equals_reference(farm, _model_with_a_number_that_is_used_at_times, 2, **options)


class _MakesABuffer(nn.Module):
    """Registers a cache in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        if self.mean.numel() != _WIDTH:
            self.mean = torch.zeros(_WIDTH, dtype=torch.float64)
        self.mean.mul_(0.9).add_(value.detach().mean(dim=0), alpha=0.1)
        return self.linear(value) + self.mean


def _model_with_a_buffer_that_grows() -> nn.Sequential:
    return _model(_linear(), nn.Tanh(), _MakesABuffer(), _linear())


def test_a_buffer_that_changes_its_shape_in_training_comes_back(farm: Farm) -> None:
    _assert_equals_reference(farm, _model_with_a_buffer_that_grows, 2)


def _plain_model() -> nn.Sequential:
    return _model(_linear(), nn.Tanh(), _linear(), nn.Tanh(), _linear())


class _ReusesItsMemory:
    """Yields the same tensors again and again, with new contents."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = (torch.empty_like(tensor) for tensor in _data()[0])
        for pair in _data():
            inputs.copy_(pair[0])
            targets.copy_(pair[1])
            yield inputs, targets


def _collate_into(buffers: tuple[Tensor, Tensor], samples: list[Any]) -> tuple[Tensor, Tensor]:
    for buffer, parts in zip(buffers, zip(*samples, strict=True), strict=True):
        torch.stack(parts, out=buffer)
    return buffers


def _loader_that_reuses_its_memory() -> DataLoader[Any]:
    samples = [sample for pair in _data() for sample in zip(*pair, strict=True)]
    inputs, targets = _data()[0]
    collate_fn = functools.partial(_collate_into, (inputs.clone(), targets.clone()))
    return DataLoader(samples, batch_size=len(inputs), collate_fn=collate_fn)  # type: ignore[arg-type]


@pytest.mark.parametrize("make_data", [_ReusesItsMemory, _loader_that_reuses_its_memory])
@pytest.mark.parametrize("in_flight", [(3,), (3, 2), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_data_that_reuses_its_memory_trains_as_data_that_does_not(
    farm: Farm, in_flight: tuple[int, ...], make_data: Callable[[], Any], recompute: bool
) -> None:
    # With several minibatches in flight, the last stage must not train on the targets of the newest
    # minibatch.
    num_stages = len(in_flight)
    plan = Plan(Plan.straight(5, num_stages).stages, in_flight=in_flight)
    options: dict[str, Any] = {"plan": plan, "recompute": recompute}
    losses, _ = farm.results(
        _run, _plain_model, num_stages, num_ranks=num_stages, data=make_data(), **options
    )[0]
    assert losses == pytest.approx(_expect(_plain_model, num_stages, **options)[0], rel=1e-9)


# ---- The next layers reach parameters in another way than by the module's own attribute ----


class _Keeps(nn.Module):
    """Computes with its weight, and keeps it in another place too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin = _linear()
        self._how = how
        if how == "list":
            self.kept: Any = [self.lin.weight]
        if how == "partial":
            self.kept = functools.partial(nn.functional.linear, weight=self.lin.weight)
        if how == "after a forward":
            self.kept = None

    def forward(self, value: Tensor) -> Tensor:
        if self._how == "after a forward":
            self.kept = self.kept or {"weight": self.lin.weight}
            return nn.functional.linear(value, self.kept["weight"], self.lin.bias)
        if self._how == "partial":
            return self.kept(value, bias=self.lin.bias)  # type: ignore[no-any-return]
        return nn.functional.linear(value, self.kept[0], self.lin.bias)


class _KeepsNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = _linear()

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.lin(value)
        return output


def _model_that_keeps_parameters() -> nn.Sequential:
    return _model(_Keeps("list"), nn.Tanh(), _Keeps("after a forward"), _Keeps("partial"), _linear())


def _model_that_keeps_none() -> nn.Sequential:
    return _model(_KeepsNothing(), nn.Tanh(), _KeepsNothing(), _KeepsNothing(), _linear())


def test_parameters_that_layers_keep_elsewhere_are_trained(farm: Farm) -> None:
    # Layers that keep parameters elsewhere must not compute with the initial weights, nor lose the gradients.
    losses, state = farm.results(_run, _model_that_keeps_parameters, 2, num_ranks=2)[0]
    for make_model in (_model_that_keeps_none, _model_that_keeps_parameters):
        wanted_losses, wanted = _expect(make_model, 2)
        assert losses == pytest.approx(wanted_losses, rel=1e-9), make_model
        for name, tensor in wanted.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


def _places_after_a_run() -> bool:
    model = _model_that_keeps_parameters()
    plan = Plan(Plan.straight(len(model), 1).stages, in_flight=(3,))
    loss_fn = nn.functional.mse_loss
    pipedream.run(model, plan, data=_data(), loss_fn=loss_fn, optimizer=_OPTIMIZER, progress=False)
    kept = [model[0].kept[0], model[2].kept["weight"], model[3].kept.keywords["weight"]]
    return all(tensor is model[i].lin.weight for tensor, i in zip(kept, (0, 2, 3), strict=True))


def test_afterwards_layers_keep_the_models_own_parameters(farm: Farm) -> None:
    assert farm.results(_places_after_a_run, num_ranks=1) == [True]


class _UsesAnother(nn.Module):
    """Computes with the weight of a layer that it does not register."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, value: Tensor) -> Tensor:
        return nn.functional.linear(value, self.others[0].weight)


def _model_that_uses_another_stage() -> nn.Sequential:
    first = _linear()
    return _model(first, nn.Tanh(), _linear(), _UsesAnother(first))


def test_a_gradient_for_a_parameter_of_another_stage_is_told_by_its_name(farm: Farm) -> None:
    outcomes = farm.run(_run, _model_that_uses_another_stage, 2, num_ranks=2)
    for outcome in outcomes:
        assert (
            "stage 1 (rank 1) failed at minibatch 0 in backward: ValueError: parameter '0.weight' was"
            in str(outcome.error)
        )


def test_unregistered_modules_of_the_same_stage_train(farm: Farm) -> None:
    _assert_equals_reference(farm, _model_that_uses_another_stage, 1)


class _Checkpointed(nn.Module):
    """Runs again in the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(_linear(), nn.BatchNorm1d(_WIDTH, dtype=torch.float64), nn.Tanh())
        self._use_reentrant = use_reentrant

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layers, value, use_reentrant=self._use_reentrant)
        return output


class _NotCheckpointed(_Checkpointed):
    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.layers(value)
        return output


def _model_with_checkpoints(layer: Callable[[bool], nn.Module]) -> nn.Sequential:
    return _model(_linear(), layer(True), layer(False), _linear())


def _train_plainly() -> tuple[list[float], dict[str, Tensor]]:
    model = _model_with_checkpoints(_Checkpointed)
    optimizer = _OPTIMIZER(model.parameters())
    losses = []
    for inputs, targets in _data():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("schedule", ["pipedream", "flush"])
def test_checkpointed_batch_norms_count_a_minibatch_once_under_microbatches(
    farm: Farm, schedule: str
) -> None:
    options: dict[str, Any] = {"microbatches": 2, "schedule": schedule}
    make_model = functools.partial(_model_with_checkpoints, _Checkpointed)
    losses, state = farm.results(_run, make_model, 2, num_ranks=2, **options)[0]
    for layer in (_NotCheckpointed, _Checkpointed):
        wanted_losses, wanted = _expect(functools.partial(_model_with_checkpoints, layer), 2, **options)
        assert losses == pytest.approx(wanted_losses, rel=1e-9)
        for name, tensor in wanted.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
    assert state["1.layers.1.num_batches_tracked"] == _NUM_MINIBATCHES


def test_without_microbatches_checkpointed_batch_norms_are_those_of_a_plain_loop(farm: Farm) -> None:
    # In a plain loop, a checkpointed batch norm counts two steps per minibatch: one in the forward, and one
    # in the backward, which repeats the forward.
    make_model = functools.partial(_model_with_checkpoints, _Checkpointed)
    wanted_losses, wanted = _train_plainly()
    losses, state = farm.results(_run, make_model, 2, num_ranks=2, schedule="flush")[0]
    assert losses == pytest.approx(wanted_losses, rel=1e-9)
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
    assert state["1.layers.1.num_batches_tracked"] == 2 * _NUM_MINIBATCHES


class _AssignsData(torch.optim.Optimizer):
    """An optimizer that replaces .data. Other optimizers write into it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


class _SignSGD(pipedream.optim.SGD):
    """A subclass of SGD with its own step()."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad.sign())


@pytest.mark.parametrize("optimizer", [_AssignsData, functools.partial(_SignSGD, lr=0.01)])
def test_a_step_of_its_own_is_the_one_that_is_taken(farm: Farm, optimizer: Any) -> None:
    _assert_equals_reference(farm, _plain_model, 2, optimizer=optimizer)


def _error_of_the_transposed(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.t(), targets)


def _distance_to_the_target(outputs: Tensor, targets: Tensor | None) -> Tensor:
    return ((outputs - (0.5 if targets is None else targets)) ** 2).mean()


def _pairs_with(kind: str) -> list[tuple[Tensor, Any]]:
    """Returns minibatches of 5 samples, the last two of 4. Their targets have no samples, or have them in
    another dimension than 0.
    """
    pairs = [(torch.cat((inputs, targets[:1])), targets) for inputs, targets in _data()]
    pairs[-2:] = [(inputs[:4], other) for inputs, other in pairs[-2:]]
    make: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "transposed": lambda inputs, _: torch.tanh(2 * inputs).t(),
        "scalars": lambda _, other: other[0, 0],
        "none": lambda *_: None,
    }
    return [(inputs, make[kind](inputs, other)) for inputs, other in pairs]


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize(
    ("targets", "microbatches"), [("transposed", 1), ("scalars", 1), ("scalars", 4), ("none", 1), ("none", 4)]
)
def test_targets_need_no_samples_and_in_one_piece_not_in_dimension_0(
    farm: Farm, targets: str, microbatches: int, num_stages: int
) -> None:
    # 5 samples in 4 microbatches are cut into 2, 2, 1 and 0. At the empty microbatch the last stage must not
    # read data that stage 0 does not read.
    options: dict[str, Any] = {"data": _pairs_with(targets), "microbatches": microbatches}
    options["loss_fn"] = _error_of_the_transposed if targets == "transposed" else _distance_to_the_target
    _assert_equals_reference(farm, _plain_model, num_stages, **options)


def _channels_last_model() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64) for _ in range(4)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shape = (_NUM_MINIBATCHES, 2, 4, 5, 5)
    inputs, targets = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return [
        (i.contiguous(memory_format=torch.channels_last), t) for i, t in zip(inputs, targets, strict=True)
    ]


@pytest.mark.parametrize(
    "optimizer", [_OPTIMIZER, functools.partial(pipedream.optim.SGD, lr=0.05, momentum=0.9)]
)
def test_channels_last_parameters_train_alike(farm: Farm, optimizer: Any) -> None:
    _assert_equals_reference(farm, _channels_last_model, 2, optimizer=optimizer, data=_images())


def _numbers_after_runs(num_stages: int, seed: int | None) -> tuple[float, float, list[float], list[float]]:
    torch.manual_seed(11)
    without_run = torch.rand(1).item()
    losses = []
    torch.manual_seed(11)
    for _ in range(2):
        model = _model_with_dropout()
        result = pipedream.run(
            model,
            Plan.straight(len(model), num_stages),
            data=_data(),
            loss_fn=nn.functional.mse_loss,
            optimizer=_OPTIMIZER,
            seed=seed,
            progress=False,
        )
        losses.append(result.losses)
    return without_run, torch.rand(1).item(), losses[0], losses[1]


def _model_with_dropout() -> nn.Sequential:
    """Returns a model, without drawing from the caller's generators."""
    with torch.random.fork_rng(devices=[]):
        return _model(_linear(), nn.Dropout(0.5), _linear())


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_run_with_a_seed_leaves_the_callers_random_numbers_alone(farm: Farm, num_stages: int) -> None:
    for without, after, first, second in farm.results(
        _numbers_after_runs, num_stages, 7, num_ranks=num_stages
    ):
        assert after == without
        assert first == second


@pytest.mark.parametrize("num_stages", [1, 2])
def test_runs_without_a_seed_differ_from_each_other(farm: Farm, num_stages: int) -> None:
    for _, _, first, second in farm.results(_numbers_after_runs, num_stages, None, num_ranks=num_stages):
        assert first != second


def _nan_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets) * float("nan")


def _parameters_before_and_after_a_failure() -> tuple[bool, bool]:
    model = _plain_model()
    before = list(model.parameters())
    failed = False
    try:
        pipedream.run(
            model,
            Plan.straight(len(model), 1),
            data=_data(),
            loss_fn=_nan_loss,
            optimizer=_OPTIMIZER,
            progress=False,
        )
    except pipedream.NonFiniteLoss:
        failed = True
    return failed, all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_after_a_failure_the_model_has_its_own_parameters(farm: Farm) -> None:
    assert farm.results(_parameters_before_and_after_a_failure, num_ranks=1)[0] == (True, True)


class _KeepsItsInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, value: Tensor) -> Tensor:
        self.kept.append(value.detach())
        return value


def _model_that_keeps_its_inputs() -> nn.Sequential:
    return _model(_linear(), nn.Tanh(), _KeepsItsInputs(), _linear())


def test_a_layer_that_keeps_all_its_inputs_is_named_instead_of_waited_for(farm: Farm) -> None:
    outcomes = farm.run(_run, _model_that_keeps_its_inputs, 2, num_ranks=2, peer_timeout=2.0)
    for outcome in outcomes:
        assert isinstance(outcome.error, ValueError), outcome
        assert "stage 1 at minibatch" in str(outcome.error)
        assert "must keep a clone" in str(outcome.error)


class _GrowsFromCallToCall(nn.Module):
    """A loss that counts its calls in a buffer and in a number."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.number = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        self.number += 1
        return nn.functional.mse_loss(outputs, targets) * (self.calls + self.number)


def test_a_loss_that_counts_begins_at_the_first_minibatch(farm: Farm) -> None:
    # The rehearsal also calls the loss. This call must not count.
    losses, _ = farm.results(_run, _plain_model, 2, num_ranks=2, loss_fn=_GrowsFromCallToCall())[0]
    wanted, _ = _expect(_plain_model, 2, loss_fn=_GrowsFromCallToCall())
    assert losses == pytest.approx(wanted, rel=1e-9)


def _detached_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.detach(), targets)


def test_a_loss_without_a_graph_is_refused(farm: Farm) -> None:
    for outcome in farm.run(_run, _plain_model, 2, num_ranks=2, loss_fn=_detached_loss):
        assert isinstance(outcome.error, ValueError)
        assert "loss_fn must not detach" in str(outcome.error)


_OTHER_PARAMETERS = [nn.Parameter(torch.zeros(1))]


def _optimizer_of_other_parameters(_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(_OTHER_PARAMETERS, lr=0.1)


def test_an_optimizer_of_other_parameters_is_refused(farm: Farm) -> None:
    for outcome in farm.run(_run, _plain_model, 2, num_ranks=2, optimizer=_optimizer_of_other_parameters):
        assert isinstance(outcome.error, ValueError)
        assert "use its argument" in str(outcome.error)


def test_a_parameter_with_a_hook_is_refused() -> None:
    model = _plain_model()
    model[2].weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ValueError, match="parameter 'weight' of layer '2' has a hook"):
        pipedream.run(
            model, Plan.straight(5, 2), data=_data(), loss_fn=nn.functional.mse_loss, optimizer=_OPTIMIZER
        )


class _HooksItself(nn.Module):
    """Registers a hook at its weight in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_hooked = _linear(), False

    def forward(self, value: Tensor) -> Tensor:
        if not self.is_hooked:
            self.linear.weight.register_hook(lambda gradient: gradient * 0.1)
            self.is_hooked = True
        out: Tensor = self.linear(value)
        return out


def _model_that_hooks_itself() -> nn.Sequential:
    return _model(_HooksItself(), _linear())


def test_a_hook_that_a_forward_registers_at_one_version_of_a_parameter_is_refused(farm: Farm) -> None:
    outcome = farm.run(_run, _model_that_hooks_itself, 2, num_ranks=2)[0]
    assert isinstance(outcome.error, ValueError)
    assert "a hook at parameter '0.linear.weight'" in str(outcome.error)


class _Switching(nn.Module):
    """Freezes or thaws a layer in one of its forwards, as gradual unfreezing does."""

    def __init__(self, forward: int, *, thaws: bool) -> None:
        super().__init__()
        self.linear = _linear().requires_grad_(not thaws)
        self._switches_in = forward
        self._num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if self._num_forwards == self._switches_in:
            for parameter in self.linear.parameters():
                parameter.requires_grad_(not parameter.requires_grad)
        self._num_forwards += 1
        out: Tensor = self.linear(x)
        return out


def _freezing() -> nn.Sequential:
    return _model(_linear(), _Switching(2, thaws=False), _linear())


def _thawing() -> nn.Sequential:
    return _model(_linear(), _Switching(2, thaws=True), _linear())


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (_freezing, "parameter '1.linear.(weight|bias)' was frozen during the run"),
        (
            _thawing,
            "parameter '1.linear.(weight|bias)' was frozen when the run began, and has a gradient now",
        ),
    ],
)
def test_requires_grad_that_changes_in_a_run_is_refused_by_name(
    farm: Farm, make_model: Callable[[], nn.Sequential], message: str
) -> None:
    """Without the error the change would have no effect, and the user would not notice."""
    outcomes = farm.run(_run, make_model, 2, num_ranks=2)
    assert any(re.search(message, str(outcome.error)) for outcome in outcomes), outcomes
    with pytest.raises(ValueError, match=message):
        _expect(make_model, 2)


class _Padding(nn.Module):
    """Joins sequences of several lengths, one per sample."""

    def forward(self, sequences: list[Tensor]) -> Tensor:
        return torch.stack([sequence.mean(0) for sequence in sequences])


def _ragged() -> nn.Sequential:
    return _model(_Padding(), _linear(), nn.Tanh(), _linear())


def _ragged_data() -> list[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    """Returns minibatches with sequences in a list and targets in records. The last minibatch is short."""
    inputs = [
        [value.expand(1 + index % 3, _WIDTH) for index, value in enumerate(batch)] for batch, _ in _data()
    ]
    inputs[-1] = inputs[-1][:3]
    return [
        (sequences, [{"wanted": target} for target in targets[: len(sequences)]])
        for sequences, (_, targets) in zip(inputs, _data(), strict=True)
    ]


def _loss_of_records(outputs: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    return nn.functional.mse_loss(outputs, torch.stack([target["wanted"] for target in targets]))


def test_lists_with_an_entry_per_sample_are_cut_into_microbatches(farm: Farm) -> None:
    """A list of targets must be cut too. If it went whole to every microbatch, targets would be paired with
    outputs of other samples.
    """
    options: dict[str, Any] = {"data": _ragged_data(), "loss_fn": _loss_of_records, "schedule": "flush"}
    whole = _expect(_ragged, 1, **options)[0]
    assert _expect(_ragged, 2, microbatches=2, **options)[0] == pytest.approx(whole, rel=1e-9)
    _assert_equals_reference(farm, _ragged, 2, microbatches=2, **options)


class _Averages(nn.InstanceNorm1d):
    """Normalises over the samples, as if they were positions of one image. It counts its forwards in a
    buffer.
    """

    def __init__(self) -> None:
        super().__init__(_WIDTH, track_running_stats=True, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x.T[None])[0].T


def _averaging() -> nn.Sequential:
    return _model(_Averages(), nn.BatchNorm1d(_WIDTH, dtype=torch.float64), _linear())


def test_buffers_move_once_a_microbatch_and_batch_norm_once_a_minibatch(farm: Farm) -> None:
    optimizer = functools.partial(torch.optim.SGD, lr=0.0)
    options: dict[str, Any] = {"microbatches": 2, "schedule": "flush", "optimizer": optimizer}
    _, state = farm.results(_run, _averaging, 1, num_ranks=1, **options)[0]
    norm = _averaging()[0]
    for inputs, _ in _data():
        for piece in inputs.chunk(2):
            norm(piece)
    torch.testing.assert_close(state["0.running_mean"], norm.running_mean)
    assert state["0.count"] == 2 * _NUM_MINIBATCHES
    assert state["1.num_batches_tracked"] == _NUM_MINIBATCHES
