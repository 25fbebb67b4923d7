"""Tests split_check.py: which differences count, and which errors the check finds in models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pipedream
import pytest
import torch
import torch.nn.functional as F
from pipedream.model.global_names import GlobalNames
from pipedream.model.untouched import Attributes
from pipedream.splitting import split_check
from pipedream.splitting.check_precision import fits_in_float64
from pipedream.splitting.cut_model import cut_model
from pipedream.splitting.split_check import _difference, _Outcome, check_cuts, without_bad_cuts
from torch import Tensor, nn
from twins import CLASSES, VOCABULARY, WIDTH, LongOnes, RandomlyDropped, Rotary, Truncated, cross_entropy

_FLOAT32 = 1e-4


def _outcome(largest: float, other: float) -> _Outcome:
    return _Outcome([1.0], {"head": torch.tensor([largest]), "bias": torch.tensor([other, 0.0])}, {})


def test_a_gradient_that_is_nothing_but_rounding_is_no_difference() -> None:
    # The gradient of the bias of a norm in front of another norm is only rounding error. It must forbid no
    # cut.
    assert not _difference(_outcome(0.306, 1.27e-7), _outcome(0.306, 0.88e-7), _FLOAT32)


@pytest.mark.parametrize("other", [0.0, 0.99e-3, -1e-3, float("nan"), float("inf")])
def test_a_small_gradient_that_differs_is_found(other: float) -> None:
    assert _difference(_outcome(0.3, 1e-3), _outcome(0.3, other), _FLOAT32) == "the gradient of bias differs"
    assert not _difference(_outcome(0.3, 1e-3), _outcome(0.3, 1e-3), _FLOAT32)


def _texts(num_minibatches: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(VOCABULARY, (4, 3), generator=generator),
            torch.randint(VOCABULARY, (4, 3), generator=generator),
        )
        for _ in range(num_minibatches)
    ]


def test_a_little_state_that_the_outer_forward_carries_is_found_in_a_float32_model() -> None:
    """A tolerance of 1e-4 for the loss would not find this state. So gradients must be compared, although the
    model has state.
    """
    torch.manual_seed(5)
    model, data = Truncated(), _texts(2)
    cut = cut_model(model, *data[0], cross_entropy)
    assert "lower" in cut.layer_names
    bad = check_cuts(cut, data, cross_entropy)
    assert "lower" in [cut.offered[place].name for place in bad]
    without_state = cross_entropy(model(data[1][0]), data[1][1]).item()
    assert abs(cross_entropy(model(data[1][0]), data[1][1]).item() - without_state) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_float64_that_computes_in_float32_inside_may_be_cut(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    data = _texts(2)
    cut = cut_model(Rotary().to(dtype), *data[0], cross_entropy)
    assert len(cut.offered) > 4
    assert check_cuts(cut, data, cross_entropy) == {}


def test_a_cut_is_checked_on_another_minibatch_than_the_traced_one() -> None:
    data = [(torch.randn(3, length, WIDTH), torch.arange(3)) for length in (2, 3)]
    cut = cut_model(LongOnes(), *data[0], cross_entropy)
    assert check_cuts(cut, data[:1], cross_entropy) == {}
    assert {cut.offered[place].name for place in check_cuts(cut, data, cross_entropy)} == {"second"}


class _Float32Only(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        out: Tensor = self.second(self.first(x))
        return out


def test_a_model_that_does_not_compute_in_float64_is_checked_in_its_own() -> None:
    data = [(torch.randn(3, WIDTH), torch.arange(3))]
    model = _Float32Only()
    cut = cut_model(model, *data[0], cross_entropy)
    assert check_cuts(cut, data, cross_entropy) == {}
    assert model.first.weight.dtype == torch.get_default_dtype() == torch.float32


class _Attention(nn.Module):
    """Imitates an attention of transformers, which draws between its children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(x + F.dropout(self.inner(x)))
        return out


def test_a_model_may_be_cut_inside_a_module_that_draws_between_its_children() -> None:
    data = [(torch.randn(3, WIDTH), torch.arange(3)) for _ in range(2)]
    cut = cut_model(nn.Sequential(_Attention(), _Attention()), *data[0], cross_entropy)
    assert [place.name for place in cut.offered] == ["0.inner", "0", "1.inner"]
    assert check_cuts(cut, data, cross_entropy) == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_drops_layers_at_random_may_be_cut_between_them(seed: int) -> None:
    """A later minibatch may call a layer that was dropped in the traced one. The layer then gets stand-ins of
    another dtype.
    """
    torch.manual_seed(seed)
    data = [(torch.randn(3, WIDTH), torch.arange(3)) for _ in range(2)]
    cut = cut_model(RandomlyDropped(), *data[0], cross_entropy)
    norms = [place.name for place in [*cut.offered, *cut.refused] if "norm" in place.name]
    assert len(norms) == 4
    assert check_cuts(cut.at(norms), data, cross_entropy) == {}


class _Kept:
    """An object that several layers of a list hold."""

    def __init__(self) -> None:
        self.skip: Tensor | None = None
        self.scale = 1.0


class _Down(nn.Module):
    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(WIDTH, WIDTH), kept

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.kept.skip = out
        return out


class _Up(_Down):
    def forward(self, x: Tensor) -> Tensor:
        assert self.kept.skip is not None
        out: Tensor = self.linear(x) + self.kept.skip
        return out


class _Measuring(_Down):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.kept.scale = float(out.detach().abs().max())
        return out


class _Scaling(_Down):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) / self.kept.scale
        return out


def _vectors() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(3, WIDTH), torch.arange(3)) for _ in range(2)]


def _listed(first: type[_Down], last: type[_Down]) -> tuple[nn.Sequential, _Kept]:
    kept = _Kept()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), first(kept), nn.Tanh(), last(kept)), kept


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (_Down, _Up, "cut there its forward raises AssertionError"),
        (_Measuring, _Scaling, "its loss is"),
    ],
)
def test_what_layers_of_a_list_keep_for_each_other_is_refused(
    first: type[_Down], last: type[_Down], words: str
) -> None:
    """Layers may keep values for each other. They must not train on values that the profiler's last forward
    has left.
    """
    layers, kept = _listed(first, last)
    for model in (layers, list(layers)):
        with pytest.raises(ValueError, match=f"the model cut after layer 1 does not compute what .*{words}"):
            pipedream.profile(model, _vectors(), cross_entropy, minibatches=1)
    assert (kept.skip, kept.scale) == (None, 1.0)
    assert len(pipedream.profile(layers, _vectors(), cross_entropy, minibatches=1, check=False).layers) == 4


def test_layers_that_keep_something_within_one_entry_may_be_cut() -> None:
    layers, _ = _listed(_Down, _Up)
    model = nn.Sequential(layers[0], layers[1:], nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), _Scaling(_Kept()))
    assert len(pipedream.profile(model, _vectors(), cross_entropy, minibatches=1).layers) == 5


class _SharingObject(nn.Module):
    """Has a number in an object that two of its parts hold."""

    def __init__(self) -> None:
        super().__init__()
        kept = _Kept()
        self.first, self.second, self.last = _Measuring(kept), nn.Linear(WIDTH, WIDTH), _Scaling(kept)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.second(self.first(x)))
        return out


def test_a_number_in_an_object_that_two_stages_hold_is_found() -> None:
    data = _vectors()
    cut = cut_model(_SharingObject(), *data[0], cross_entropy)
    bad = check_cuts(cut, data, cross_entropy)
    assert {cut.offered[place].name for place in bad} >= {"first", "second"}


_calls, _handed_on = 0, 0.0


class _InGlobals(nn.Module):
    """Counts its calls in a global name. It may also pass a number to later code in a global name."""

    def __init__(self, *, hands_on: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.hands_on = hands_on
        self.first.register_forward_hook(self._hand_on)

    def _hand_on(self, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        global _handed_on
        if self.hands_on:
            _handed_on = float(output.detach().abs().sum())

    def forward(self, x: Tensor) -> Tensor:
        global _calls
        _calls += 1
        out: Tensor = self.second(self.first(x)) * (_calls + _handed_on)
        return out


@pytest.mark.parametrize("hands_on", [False, True])
def test_each_stage_has_global_names_of_its_own(hands_on: bool) -> None:
    """A count of calls changes no loss, and forbids no cut. A number that later code reads does not cross a
    cut, and forbids it.
    """
    data = [(torch.randn(3, WIDTH), torch.arange(3)) for _ in range(2)]
    cut = cut_model(_InGlobals(hands_on=hands_on), *data[0], cross_entropy)
    assert len(check_cuts(cut, data, cross_entropy)) == int(hands_on)
    assert (_calls, _handed_on) == (0, 0.0)


class _Scaled(nn.Module):
    """A model whose scale is a tensor, a text that names a scale, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, scale: Any) -> Tensor:
        factor = {"one": 1.0, "two": 2.0, None: 1.0}[scale] if scale is None or type(scale) is str else scale
        out: Tensor = self.second(self.first(x) * factor)
        return out


@pytest.mark.parametrize(
    ("first", "later", "remedy"),
    [
        ("one", "two", "give it as a tensor, as only tensors and whole numbers may change"),
        (None, torch.ones(1), "put a minibatch first that has it"),
    ],
    ids=["text", "None"],
)
def test_a_value_that_a_stage_refuses_comes_with_its_remedy_alone(
    first: Any, later: Any, remedy: str
) -> None:
    """The error must not advise about values outside torch's operations, because that advice does not apply
    here.
    """
    data = [((torch.randn(3, WIDTH), scale), torch.arange(3)) for scale in (first, later)]
    cut = cut_model(_Scaled(), *data[0], cross_entropy)
    with pytest.raises(ValueError, match=remedy) as refused:
        without_bad_cuts(cut, data, cross_entropy, is_chosen=True)
    assert "outside torch's operations" not in str(refused.value)
    assert "ValueError" not in str(refused.value)


class _NoRoomInFloat64(nn.Module):
    """Runs out of memory in its third forward in float64, which belongs to the check of cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _dtypes.append(x.dtype)
        if x.dtype == torch.float64 and _dtypes.count(torch.float64) > 2:
            raise torch.OutOfMemoryError("no room")
        out: Tensor = self.second(self.first(x))
        return out


_dtypes: list[torch.dtype] = []


def test_a_model_that_has_no_room_in_float64_is_checked_in_its_own() -> None:
    data = [(torch.randn(3, WIDTH), torch.arange(3)) for _ in range(2)]
    cut = cut_model(_NoRoomInFloat64(), *data[0], cross_entropy)
    assert check_cuts(cut, data, cross_entropy) == {}
    assert _dtypes.count(torch.float64) == 3


@pytest.mark.parametrize(("capability", "is_wide"), [((9, 0), True), ((8, 9), False), ((7, 5), False)])
def test_float64_is_for_gpus_that_are_made_for_it(
    capability: tuple[int, int], is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other GPUs take up to 64 times as long in float64 as in float32, so they check a model in its own
    dtype."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    assert fits_in_float64([("", nn.Linear(WIDTH, WIDTH))], torch.device("cuda")) == is_wide


def test_a_check_looks_for_what_modules_keep_no_oftener_than_it_puts_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check must not look for such values at every stage and in both minibatches. That would take most of
    its time.
    """
    made: Counter[str] = Counter()
    for kind in (Attributes, GlobalNames):

        def make(*arguments: Any, kind: Any = kind) -> Any:
            made[kind.__name__] += 1
            return kind(*arguments)

        monkeypatch.setattr(split_check, kind.__name__, make)
    data = _texts(2)
    cut = cut_model(Truncated(), *data[0], cross_entropy).at(["lower"])
    check_cuts(cut, data, cross_entropy)
    num_stages = 2
    assert made == {"GlobalNames": 1, "Attributes": 1 + num_stages}


def test_cuts_that_change_the_results_only_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs_from_two_cuts_on(_: object, ends: Sequence[int]) -> str:
        return "the loss differs" if len(ends) > 1 else ""

    monkeypatch.setattr(split_check._Check, "difference", differs_from_two_cuts_on)
    batch = (torch.randn(4, 2), torch.randn(4, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    cut = cut_model(_Whole(model), *batch, F.mse_loss)
    with pytest.raises(
        ValueError, match="at once does not compute what the whole model does: the loss differs"
    ):
        check_cuts(cut, [batch], F.mse_loss)


class _Whole(nn.Module):
    """Calls the layers in a forward of its own, so that the model is cut by a trace."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
