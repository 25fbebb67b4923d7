"""Tests that a dropout mask depends only on its place in the model and on its microbatch. So every cut,
number of replicas, schedule and recompute trains with the same masks. The random draws of optimizers and
backwards depend on the stage.
"""

from __future__ import annotations

import functools
from typing import Any

import pipedream
import pytest
import torch
import torch.nn.functional as F
from farm import Farm
from pipedream import reference
from pipedream.planning.plan import Plan, Stage
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import State, assert_close_losses, assert_close_state, state_of

_WIDTH, _VOCABULARY = 8, 11
_SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
_RELATIVE = 1e-9


class _Block(nn.Module):
    """Imitates a block of GPT-2: dropout modules, one of them called twice, and dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.drop = nn.Dropout(0.3)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).split(_WIDTH, dim=-1)
        x = x + self.drop(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        x = x + F.dropout(torch.tanh(x), 0.2, training=self.training)
        out: Tensor = x + self.drop(self.mlp(x))
        return out


class Network(nn.Module):
    """Imitates GPT-2 with dropout in every place. `checkpoints` is whether its blocks use activation
    checkpointing.
    """

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.words = nn.Embedding(_VOCABULARY, _WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.words(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        out: Tensor = self.head(F.dropout(x, 0.1, training=self.training))
        return out


class _Coder(nn.Module):
    """Imitates a coder of BART. Its code drops whole layers at random, and applies dropout between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(_WIDTH), "layer": layer})
            for layer in (_Block(), nn.Sequential(_Block(), nn.Dropout(0.2)), _Block(), _Block())
        )

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            assert isinstance(step, nn.ModuleDict)
            kept = x = F.dropout(step["norm"](x), 0.1, training=self.training)
            if self.training and torch.rand([]) < 0.4:
                continue
            x = step["layer"](x) + kept
        return x


class DrawingBetween(nn.Module):
    """Imitates BART with layer drop. The result of the first dropout is used again after the coder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, _WIDTH)
        self.coder = _Coder()
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.words(tokens), 0.2, training=self.training)
        x = self.norm(self.coder(x) + x)
        out: Tensor = self.head(F.dropout(x, 0.1, training=self.training))
        return out


def _train_drawing_between(
    how: Any, cuts: tuple[str, ...], plan: Plan, **options: Any
) -> tuple[list[float], State]:
    torch.manual_seed(1)
    model = DrawingBetween().double()
    options = {"schedule": "flush", "microbatches": 2, "seed": 5} | options
    plan = Plan(plan.stages, cuts=cuts)
    result = how(model, plan, data=_data(), loss_fn=_noisy_loss, optimizer=_SGD, **options)
    return list(result.losses), state_of(model)


def _noisy_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2) + 0.1 * torch.rand_like(outputs).transpose(1, 2), targets)


def _data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(_VOCABULARY, (8, 5), generator=generator) for _ in range(5)]
    return [(tokens, tokens.roll(1, 1)) for tokens in made[:4]]


def _cut(cuts: tuple[str, ...] | None, plan: Plan, *, checkpoints: bool = False) -> tuple[nn.Module, Plan]:
    """Returns the model, or its layers if `cuts` is None, and the plan with the cuts."""
    torch.manual_seed(1)
    model = Network(checkpoints=checkpoints).double()
    if cuts is None:
        return nn.Sequential(model.words, model.drop, *model.blocks, model.head), plan
    return model, Plan(plan.stages, cuts=cuts)


def _train(
    cuts: tuple[str, ...] | None, plan: Plan, *, checkpoints: bool = False, **options: Any
) -> tuple[list[float], State]:
    """Trains the model cut at `cuts`. None trains a list of layers."""
    model, plan = _cut(cuts, plan, checkpoints=checkpoints)
    options = {"schedule": "flush", "microbatches": 2, "seed": 5, "progress": False} | options
    result = pipedream.run(model, plan, data=_data(), loss_fn=_noisy_loss, optimizer=_SGD, **options)
    return list(result.losses), state_of(model)


def _plan(*last_layers: int, replicas: tuple[int, ...] = ()) -> Plan:
    first_layers = [0, *(last + 1 for last in last_layers)]
    counts = replicas or (1,) * len(last_layers)
    return Plan(
        tuple(
            Stage(first, last, num_replicas=count)
            for first, last, count in zip(first_layers, last_layers, counts, strict=False)
        )
    )


def _reference(cuts: tuple[str, ...] | None, plan: Plan, **options: Any) -> tuple[list[float], State]:
    model, plan = _cut(cuts, plan)
    options = {"schedule": "flush", "microbatches": 2, "seed": 5} | options
    result = reference.run(model, plan, data=_data(), loss_fn=_noisy_loss, optimizer=_SGD, **options)
    return result.losses, state_of(model)


_TWO, _THREE = _plan(0, 1), _plan(0, 1, 2)
_IN_BLOCK = ("blocks.1.norm",)
_SAME: list[tuple[tuple[str, ...], Plan, dict[str, Any]]] = [
    (("words",), _TWO, {}),
    (("blocks.0", "blocks.1"), _THREE, {"schedule": "gpipe"}),
    (_IN_BLOCK, _TWO, {}),
    (("blocks.1",), _TWO, {"recompute": True}),
    (("blocks.1",), _TWO, {"schedule": "interleaved"}),
    (("drop",), _TWO, {"checkpoints": True}),
]


@pytest.mark.parametrize(("cuts", "plan", "options"), _SAME, ids=str)
def test_a_modules_masks_are_the_same_wherever_it_is_cut(
    farm: Farm, cuts: tuple[str, ...], plan: Plan, options: dict[str, Any]
) -> None:
    expected = _reference(("blocks.0",), _TWO)
    assert len(set(expected[0])) == len(expected[0])
    if options.get("schedule") == "interleaved":
        cuts = ("words", "blocks.0", "blocks.1")
        plan = Plan(tuple(Stage(layer, layer, worker=layer % 2) for layer in range(4)))
    losses, state = farm.results(_train, cuts, plan, num_ranks=plan.workers_used, **options)[0]
    assert_close_losses(losses, expected[0], _RELATIVE)
    assert_close_state(state, expected[1], _RELATIVE)


@pytest.mark.parametrize("cuts", [("blocks.0",), None], ids=str)
def test_replicas_draw_what_their_microbatches_draw_without_them(farm: Farm, cuts: Any) -> None:
    plan = _plan(0, 1, replicas=(2, 1)) if cuts else _plan(2, 5, replicas=(2, 1))
    losses, state = farm.results(_train, cuts, plan, num_ranks=3)[0]
    expected = _reference(cuts, plan)
    assert_close_losses(losses, expected[0], _RELATIVE)
    assert_close_state(state, expected[1], _RELATIVE)
    alone, _ = _reference(cuts, _plan(0, 1) if cuts else _plan(3, 5))
    assert_close_losses(losses[:1], alone[:1], _RELATIVE)


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_a_list_of_layers_has_the_same_masks_wherever_it_is_cut(farm: Farm, options: dict[str, Any]) -> None:
    expected = _reference(None, _plan(1, 5))
    losses, state = farm.results(_train, None, _plan(2, 4, 5), num_ranks=3, **options)[0]
    assert_close_losses(losses, expected[0], _RELATIVE)
    assert_close_state(state, expected[1], _RELATIVE)


_WITHIN = ("coder.steps.1.norm", "coder.steps.3.norm")
_SHARING = Plan(tuple(Stage(layer, layer, worker=layer % 2) for layer in range(4)))
_BETWEEN: list[tuple[tuple[str, ...], Plan, dict[str, Any]]] = [
    (("coder",), _TWO, {}),
    (_WITHIN[:1], _TWO, {"recompute": True}),
    (_WITHIN, _THREE, {}),
    (_WITHIN, _THREE, {"schedule": "gpipe"}),
    (("words", *_WITHIN), _SHARING, {"schedule": "interleaved"}),
    (_WITHIN[:1], _plan(0, 1, replicas=(1, 2)), {}),
]


@pytest.mark.parametrize(("cuts", "plan", "options"), _BETWEEN, ids=str)
def test_what_code_between_modules_draws_is_the_same_wherever_it_is_cut(
    farm: Farm, cuts: tuple[str, ...], plan: Plan, options: dict[str, Any]
) -> None:
    losses, state = farm.results(
        _train_drawing_between,
        pipedream.run,
        cuts,
        plan,
        num_ranks=plan.workers_used,
        progress=False,
        **options,
    )[0]
    expected = _train_drawing_between(reference.run, cuts, plan, **options)
    assert_close_losses(losses, expected[0], _RELATIVE)
    assert_close_state(state, expected[1], _RELATIVE)
    if max(stage.num_replicas for stage in plan.stages) == 1:  # replicas would train on larger minibatches
        expected = _train_drawing_between(reference.run, ("words",), _TWO)
        assert_close_losses(losses, expected[0], _RELATIVE)
        assert_close_state(state, expected[1], _RELATIVE)


class Langevin(torch.optim.SGD):
    """Adds noise to every step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] + 0.01 * torch.randn_like(gradients[0])


class Noisy(nn.Linear):
    """Its backward draws."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Noise.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return out


def _train_noisily(plan: Plan, how: Any, **options: Any) -> tuple[list[float], State]:
    torch.manual_seed(1)
    layers = [Noisy(4, 4) for _ in range(2)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(4))
            layer.bias.zero_()
    model = nn.Sequential(*layers).double()
    dataset = torch.utils.data.TensorDataset(torch.rand(12, 4).double(), torch.rand(12, 4).double())
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, shuffle=True)
    optimizer = functools.partial(Langevin, lr=0.0)
    result = how(
        model, plan, data=loader, loss_fn=F.mse_loss, optimizer=optimizer, epochs=3, seed=2, **options
    )
    return list(result.losses), state_of(model)


def test_noise_of_optimizers_and_backwards_differs_by_stage_and_leaves_the_shuffle_alone(farm: Farm) -> None:
    """If the stages' draws did not differ, both stages would end with the same weights. If the draws changed
    the shuffle, the second epoch would end in a DataMismatch."""
    plan = _plan(0, 1)
    losses, state = farm.results(_train_noisily, plan, pipedream.run, num_ranks=2, progress=False)[0]
    assert len(losses) == 12
    assert not torch.equal(state["0.weight"], state["1.weight"])
    expected = _train_noisily(plan, reference.run)
    assert_close_losses(losses, expected[0], _RELATIVE)
    assert_close_state(state, expected[1], _RELATIVE)


def test_one_worker_draws_as_a_plain_loop_does(farm: Farm) -> None:
    whole = Plan((Stage(0, 0),))
    losses, state = farm.results(_train, (), whole, num_ranks=1, microbatches=1)[0]
    torch.manual_seed(1)
    model = Network().double()
    optimizer, expected = _SGD(model.parameters()), []
    torch.manual_seed(5)
    for inputs, targets in _data():
        optimizer.zero_grad()
        loss = _noisy_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == expected
    assert_close_state(state, state_of(model), _RELATIVE)
