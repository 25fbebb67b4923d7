"""Tests cut_model.py and the code below it. A forward that is cut must compute the same as the whole forward.
Everything that a cut does not give to a stage is NaN in these tests. So equal numbers prove that the stage
needs nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pipedream
import pytest
import torch
import torch.nn.functional as F
from pipedream.model.batches import call_model, own_loss, parts_of
from pipedream.model.boundary import boundary_input
from pipedream.model.stage_module import StageModule, find_ties
from pipedream.model.stand_ins import parameters_on_meta
from pipedream.splitting.crossing import Fillers
from pipedream.splitting.cut_model import CutModel, cut_model
from pipedream.splitting.span import SpanStage
from pipedream.splitting.split_check import check_cuts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import (
    CLASSES,
    TWINS,
    WIDTH,
    LayerDropped,
    LongOnes,
    Output,
    Residual,
    SideValue,
    Skipping,
    cross_entropy,
)

State = dict[str, Tensor]


def _cut(name: str) -> tuple[CutModel, list[Any]]:
    twin = TWINS[name]
    data = [parts_of(batch, minibatch) for minibatch, batch in enumerate(twin.data(2))]
    return cut_model(twin.model(), *data[0], twin.loss_fn), data


def _names(cut: CutModel) -> list[str]:
    return [place.name for place in cut.offered]


def _gradients_and_buffers(model: nn.Module) -> State:
    state = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return state | {name: buffer.clone() for name, buffer in model.named_buffers()}


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, content in kept:
        buffer.copy_(content)
    for parameter in model.parameters():
        parameter.grad = None


def _loss(outputs: Any, targets: Any) -> Tensor:
    return own_loss(outputs, targets) if isinstance(outputs, Output) else cross_entropy(outputs, targets)


def _whole(model: nn.Module, inputs: Any, targets: Any) -> tuple[Tensor, State]:
    """Returns loss, gradients and buffers without cuts."""
    with _buffers_kept(model):
        loss = _loss(call_model(model, inputs), targets)
        loss.backward()
        return loss.detach(), _gradients_and_buffers(model)


@contextlib.contextmanager
def _only_own(stage: StageModule, model: nn.Module) -> Iterator[None]:
    """Fills everything that the stage does not own with NaN."""
    own = {
        name
        for name, _ in (*stage.trainable_parameters(), *stage.frozen_parameters(), *stage.stage_buffers())
    }
    others = [t for name, t in (*model.named_parameters(), *model.named_buffers()) if name not in own]
    contents = [tensor.data for tensor in others]
    for tensor in others:
        if tensor.is_floating_point():
            tensor.data = torch.full_like(tensor, torch.nan)
    yield
    for tensor, content in zip(others, contents, strict=True):
        tensor.data = content


def _in_stages(cut: CutModel, ends: Sequence[int], inputs: Any, targets: Any) -> tuple[Tensor, State]:
    """Returns loss, gradients and buffers of stages that end at these layers."""
    starts = [0, *(end + 1 for end in ends)]
    layers = zip(starts, [*ends, len(cut.layer_names) - 1], strict=True)
    stages = [cut.stage(index, *ends, Fillers()) for index, ends in enumerate(layers)]
    model = cut.module
    with _buffers_kept(model):
        value = inputs
        sent: list[list[Tensor]] = []
        received: list[list[Tensor]] = []
        for stage in stages:
            if sent:
                received.append([t.detach().clone().requires_grad_(t.requires_grad) for t in sent[-1]])
                value = [boundary_input(leaf) for leaf in received[-1]]
            with _only_own(stage, model):
                value = stage(value)
            sent.append(list(value) if isinstance(value, tuple) else [value])
        loss = _loss(value, targets)
        roots, seeds = [loss], [torch.ones_like(loss)]
        for leaves, outputs in zip(reversed([[], *received]), reversed([[], *sent[:-1]]), strict=True):
            torch.autograd.backward(roots, seeds)
            roots = [output for output in outputs if output.requires_grad]
            seeds = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves if t.requires_grad]
        return loss.detach(), _gradients_and_buffers(model)


def _assert_same(one: tuple[Tensor, State], other: tuple[Tensor, State]) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        # A value with three or more uses in several stages gets its gradients added in another order.
        torch.testing.assert_close(tensor, other[1][name], rtol=1e-12, atol=1e-14, msg=name)


_WITHOUT_DRAWS = [name for name, twin in TWINS.items() if not twin.draws]


@pytest.mark.parametrize("name", _WITHOUT_DRAWS)
def test_at_every_cut_two_stages_compute_what_the_whole_model_does(name: str) -> None:
    cut, data = _cut(name)
    assert len(cut.offered) > 1
    for inputs, targets in data:  # the second minibatch has fewer samples than the traced one
        whole = _whole(cut.module, inputs, targets)
        for end in range(len(cut.offered)):
            _assert_same(_in_stages(cut, [end], inputs, targets), whole)


@pytest.mark.parametrize("name", _WITHOUT_DRAWS)
def test_between_any_two_cuts_a_third_stage_takes_and_passes_on_what_it_must(name: str) -> None:
    cut, data = _cut(name)
    inputs, targets = data[1]
    whole = _whole(cut.module, inputs, targets)
    pairs = list(itertools.combinations(range(len(cut.offered)), 2))
    for ends in pairs[:: max(1, len(pairs) // 40)]:
        _assert_same(_in_stages(cut, ends, inputs, targets), whole)


@pytest.mark.parametrize("name", _WITHOUT_DRAWS)
def test_every_layer_may_be_a_stage(name: str) -> None:
    cut, data = _cut(name)
    inputs, targets = data[0]
    _assert_same(
        _in_stages(cut, range(len(cut.offered)), inputs, targets), _whole(cut.module, inputs, targets)
    )


def test_one_stage_of_all_layers_is_the_model() -> None:
    cut, data = _cut("residual")
    inputs, targets = data[0]
    _assert_same(_in_stages(cut, [], inputs, targets), _whole(cut.module, inputs, targets))


def test_layers_are_named_by_the_call_that_ends_them() -> None:
    assert _cut("unet")[0].layer_names == ["down1", "down2", "bottom", "up2", "up1"]
    # A block calls its relu twice. The second call ends the block too, and in the last block it also ends the
    # list of blocks.
    assert _cut("residual")[0].layer_names == [
        "stem",
        *(
            "blocks.0.conv1",
            "blocks.0.norm1",
            "blocks.0.relu",
            "blocks.0.conv2",
            "blocks.0.norm2",
            "blocks.0",
        ),
        *("blocks.1.conv1", "blocks.1.norm1", "blocks.1.relu", "blocks.1.conv2", "blocks.1.norm2", "blocks"),
        "head",
    ]


def test_only_what_is_still_read_crosses() -> None:
    cut, data = _cut("unet")
    image, _ = data[0]
    wide, small = 6 * 4 * 8 * 8 * 8, 6 * 4 * 4 * 4 * 8  # bytes in float64
    tensors = [place.crossing.num_tensors for place in cut.offered if place.crossing]
    # These are down1's output; an output and level 1; an output and both levels; an output and level 1.
    assert tensors == [1, 2, 3, 2]
    sizes = 8 * image.dim()  # sizes of the image, which itself does not cross
    assert cut.offered[0].num_bytes == wide + sizes
    assert cut.offered[1].num_bytes == wide + small + sizes


def test_stages_own_what_they_use_and_a_tied_parameter_is_of_both() -> None:
    cut, _ = _cut("transformer")
    middle = _names(cut).index("blocks.1")
    stages = [cut.stage(0, 0, middle), cut.stage(1, middle + 1, len(cut.layer_names) - 1)]
    first, last = ({name for name, _ in stage.trainable_parameters()} for stage in stages)
    assert first & last == {"words.weight"}
    assert first | last == {name for name, _ in cut.module.named_parameters()}
    (tie,) = find_ties(stages)
    assert (tie.stages, tie.names) == ((0, 1), ("words.weight", "words.weight"))
    # Each stage computes the mask again, from a buffer that never changes.
    assert all([name for name, _ in stage.stage_buffers()] == ["causal"] for stage in stages)


def test_what_the_first_minibatch_does_not_use_belongs_to_the_stage_whose_module_has_it() -> None:
    model = LayerDropped()
    stages, _ = _stages_of_dropped(model, after="encoder.layers.2")
    for name, owner in {"encoder.layers.1": 0, "decoder.layers.0": 1}.items():
        for own in ("linear.weight", "norm.bias", "norm.running_mean"):
            assert [stage.owns(f"{name}.{own}") for stage in stages] == [owner == 0, owner == 1]
    assert cut_model(model, *_dropped_batch(), cross_entropy).at(["encoder"]).parameter_bytes() == [
        sum(p.nbytes for name, p in model.named_parameters() if name.startswith(("first", "encoder"))),
        sum(p.nbytes for name, p in model.named_parameters() if name.startswith(("decoder", "last"))),
    ]


def test_what_the_forward_does_not_use_belongs_to_the_last_stage() -> None:
    model = Residual()
    model.spare = nn.BatchNorm1d(3)
    inputs, targets = TWINS["residual"].data(2, torch.float32)[0]
    cut = cut_model(model, inputs, targets, cross_entropy)
    stages = [cut.stage(0, 0, 2), cut.stage(1, 3, len(cut.layer_names) - 1)]
    assert [stage.owns("spare.weight") for stage in stages] == [False, True]
    assert [stage.owns("spare.running_mean") for stage in stages] == [False, True]


def test_a_value_left_in_an_attribute_forbids_the_cuts_between_and_says_so() -> None:
    cut, _ = _cut("side_value")
    assert _names(cut) == ["before", "noting.linear"]
    refused = {place.name: place.why_not for place in cut.cuts.refused}
    assert refused == dict.fromkeys(
        ("noting", "after"),
        "noting passes a tensor (aten.mean) to later code outside its return value (return it)",
    )
    assert cut.explain() == "; ".join(f"not after {name}: {why}" for name, why in refused.items())


def test_random_numbers_between_modules_forbid_no_cut() -> None:
    cut, _ = _cut("dropping")
    assert _names(cut) == ["first", "dropout", "second", "third"]
    assert not cut.cuts.refused


class _LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x))
        if x.isnan().any():  # no random number decides this
            raise ValueError("NaN")
        for block in self.blocks:
            x = self.norm(x)
            if torch.rand([]) < 1e-9:
                continue
            x = block(x)
        out: Tensor = self.last(x)
        return out


def test_a_cut_at_a_call_that_random_numbers_decide_on_is_for_those_who_name_it() -> None:
    inputs, targets = torch.randn(3, WIDTH), torch.arange(3)
    cut = cut_model(_LayerDrop(), inputs, targets, cross_entropy)
    assert _names(cut) == ["first", "norm", "norm (call 2)"]
    dropped = ["blocks.0.0", "blocks.0", "blocks.1.0", "blocks.1"]
    assert [place.name for place in cut.refused] == dropped
    assert all(place.why_not.startswith("random numbers decide whether") for place in cut.refused)
    assert cut.chosen == ("first", "norm", "norm (call 2)")  # a plan stores these names
    chosen = cut.at(["blocks.0", "norm"])
    assert _names(chosen) == ["norm", "blocks.0"]
    assert check_cuts(chosen, [(inputs, targets)], cross_entropy) == {}


class _Masking(nn.Module):
    """A module whose own code reads a parameter in some minibatches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.mask = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.second(x + self.mask if len(x) > 3 else x)
        return out


def test_an_unused_parameter_of_a_module_that_is_cut_inside_belongs_to_the_last_of_its_stages() -> None:
    cut = cut_model(_Masking(), torch.randn(3, WIDTH), torch.arange(3), cross_entropy).at(["first"])
    assert [cut.stage(index, index, index).owns("mask") for index in range(2)] == [False, True]


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=self._reentrant)
        out: Tensor = self.last(self.blocks[2](x))
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_there_is_no_cut_inside_what_is_checkpointed(reentrant: bool) -> None:
    inputs, targets = TWINS["tuples"].data(2, torch.float32)[0]
    cut = cut_model(_Checkpointed(reentrant=reentrant), inputs, targets, cross_entropy)
    assert _names(cut) == ["blocks.0.0", "blocks.0", "blocks.2.0", "blocks.2"]
    assert {place.why_not for place in cut.cuts.refused} == {
        "blocks.1 runs under activation checkpointing or no_grad"
    }
    assert not cut.explain_checkpointed()  # there are cuts before and behind the checkpoint
    whole = _whole(cut.module, inputs, targets)
    for end in range(len(cut.offered)):
        _assert_same(_in_stages(cut, [end], inputs, targets), whole)


class _AllCheckpointed(_Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self._reentrant)
        out: Tensor = self.last(x)
        return out


def test_where_one_checkpoint_follows_the_other_it_is_said_what_leaves_no_cuts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _AllCheckpointed(reentrant=False))
    model.register_forward_hook(lambda *_: None)  # with a hook the model is no mere list of layers
    batches = [TWINS["tuples"].data(2, torch.float32)[0]]
    profile = pipedream.profile(model, batches, cross_entropy, minibatches=1, check=False)
    assert [layer.name for layer in profile.layers] == ["0", "1"]
    assert "it cannot be cut after 1.blocks.0 and 2 others, which run under activation" in caplog.text
    assert "recompute=True" in caplog.text


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_module_is_cut_before_and_behind_it(in_place: bool) -> None:
    inputs, targets = TWINS["residual"].data(2)[0]
    model = TWINS["residual"].model()
    assert isinstance(model, Residual)
    if in_place:
        model.blocks[0].compile(backend="eager")
    else:
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    cut = cut_model(model, inputs, targets, cross_entropy)
    assert _names(cut)[:3] == ["stem", "blocks.0", "blocks.1.conv1"]
    for end in (0, 1):
        _assert_same(_in_stages(cut, [end], inputs, targets), _whole(model, inputs, targets))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_compiled_as_a_whole_is_one_layer_and_says_so(in_place: bool) -> None:
    inputs, targets = TWINS["residual"].data(2)[0]
    model = TWINS["residual"].model()
    if in_place:
        model.compile(backend="eager")
    whole = model if in_place else torch.compile(model, backend="eager")
    cut = cut_model(whole, inputs, targets, cross_entropy)
    assert _names(cut) == []
    assert cut.explain().startswith("it is compiled as a whole, which is one call: give the module")


def test_a_forward_that_leaves_out_a_call_at_a_cut_is_noticed_on_both_sides() -> None:
    inputs, targets = TWINS["tuples"].data(2, torch.float32)[0]
    model = Skipping()
    cut = cut_model(model, inputs, targets, cross_entropy)
    stages = [cut.stage(0, 0, 1), cut.stage(1, 2, 3)]
    sent = stages[0](inputs)
    model.left_out = 1
    for stage, value in zip(stages, (inputs, sent), strict=True):
        with pytest.raises(ValueError, match=r"the forward ended without calling layers\.1, as it did"):
            stage(value)


def _layers(encoder: str, decoder: str) -> Tensor:
    """Returns the input that says which layers a minibatch of LayerDropped has."""
    return torch.tensor([[int(kept) for kept in half] for half in (encoder, decoder)]).expand(3, 2, 4)


def _stages_of_dropped(model: LayerDropped, *, after: str) -> tuple[list[SpanStage], Tensor]:
    inputs, targets = _dropped_batch()
    cut = cut_model(model, inputs, targets, cross_entropy).at([after])
    return [cut.stage(0, 0, 0, Fillers()), cut.stage(1, 1, 1, Fillers())], inputs[0]


def _dropped_batch() -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(3, WIDTH), _layers("1011", "0111")), torch.arange(3)


def test_a_call_left_out_before_a_cut_is_left_out_behind_it() -> None:
    model = LayerDropped()
    stages, x = _stages_of_dropped(model, after="encoder.layers.2")
    inputs = (x, _layers("0010", "0011"))
    assert torch.equal(stages[1](stages[0](inputs)), model(inputs))
    sent = stages[0](inputs)
    with pytest.raises(
        ValueError, match=r"encoder\.layers\.0 is called in the forward of a stage, and was not"
    ):
        stages[1]([_layers("1011", "0011") if t.shape == (3, 2, 4) else t for t in sent])


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("0011", r"the forward ended without calling encoder\.layers\.0, as it did in the first minibatch"),
        ("1001", r"the forward ended without calling encoder\.layers\.2, as it did in the first minibatch"),
    ],
)
def test_a_call_of_which_something_crosses_may_not_be_left_out(kept: str, words: str) -> None:
    stages, x = _stages_of_dropped(LayerDropped(is_residual=True), after="encoder.layers.2")
    with pytest.raises(ValueError, match=words):
        stages[0]((x, _layers(kept, "0111")))


def test_a_new_call_of_which_something_crosses_is_refused_by_name() -> None:
    model = LayerDropped(is_residual=True)
    stages, x = _stages_of_dropped(model, after="encoder.layers.2")
    inputs = (x, _layers("1111", "0111"))
    sent = stages[0](inputs)
    with (
        _only_own(stages[1], model),
        pytest.raises(ValueError, match=r"encoder\.layers\.1 was not called in"),
    ):
        stages[1](sent)


def test_another_structure_of_what_a_module_returns_is_refused() -> None:
    cut, data = _cut("tuples")
    stage = cut.stage(0, 0, _names(cut).index("second.left"))
    cut.module.first.forward = lambda x: (x, {"right": x, "size": 1})
    with pytest.raises(ValueError, match="first returned tuple"):
        stage(data[0][0])


def test_a_cut_model_can_be_sent_to_other_processes() -> None:
    cut, data = _cut("transformer")
    sent: CutModel = pickle.loads(pickle.dumps(cut))
    assert sent.layer_names == cut.layer_names
    inputs, targets = data[0]
    _assert_same(_in_stages(sent, [4], inputs, targets), _whole(cut.module, inputs, targets))


def test_tracing_and_staged_forwards_leave_the_model_as_it_was() -> None:
    model = TWINS["residual"].model()
    inputs, targets = TWINS["residual"].data(2)[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generators = torch.get_rng_state()
    kinds = [type(module) for module in model.modules()]
    cut = cut_model(model, inputs, targets, cross_entropy)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators)
    cut.stage(0, 0, 3)(inputs)
    assert [type(module) for module in model.modules()] == kinds
    assert not any("_pipedream" in name for module in model.modules() for name in vars(module))


def test_parameters_that_cannot_be_trained_are_named_before_anything_runs() -> None:
    inputs, targets = TWINS["tuples"].data(2, torch.float32)[0]
    lazy, half = SideValue(), SideValue().half()
    lazy.after = nn.LazyLinear(WIDTH)
    for model, message in (
        (lazy, "'after.weight' has no shape yet"),
        (half, "'before.weight' has dtype float16"),
    ):
        with pytest.raises(ValueError, match=message):
            cut_model(model, inputs, targets, cross_entropy)


@pytest.mark.parametrize("name", TWINS)
def test_a_model_on_the_meta_device_is_cut_as_one_with_values_is(name: str) -> None:
    twin = TWINS[name]
    with parameters_on_meta():
        model = twin.model()
    inputs, targets = parts_of(twin.data(1)[0], 0)
    on_meta = cut_model(model, inputs, targets, twin.loss_fn)
    assert on_meta.outline == cut_model(twin.model(), inputs, targets, twin.loss_fn).outline
    assert all(parameter.is_meta for parameter in model.parameters())


def test_hooks_of_the_users_run_where_the_call_is_made_and_nowhere_else() -> None:
    cut, data = _cut("transformer")
    called: list[str] = []
    for name, block in cut.module.blocks.named_children():
        block.register_forward_hook(lambda module, args, output, name=name: called.append(name))
    _in_stages(cut, [_names(cut).index("blocks.0"), _names(cut).index("blocks.1.norm2")], *data[0])
    assert called == ["0", "1", "2"]


def test_a_model_that_fails_in_the_middle_is_left_as_it_was() -> None:
    model = SideValue()
    model.after = nn.Linear(WIDTH + 1, WIDTH)
    kinds = [type(module) for module in model.modules()]
    inputs, targets = TWINS["tuples"].data(2, torch.float32)[0]
    with pytest.raises(RuntimeError):
        cut_model(model, inputs, targets, cross_entropy)
    assert [type(module) for module in model.modules()] == kinds


class _Shortened(nn.Module):
    """Returns its whole output, and the first two positions of it. The two are the same for a text of two
    tokens.
    """

    def __init__(self, *, slices: bool) -> None:
        """`slices`: the first two positions of a text of two tokens are a slice, and not the tensor
        itself.
        """
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self._slices = slices

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = self.inner(x)
        return whole, whole[:, :2] if self._slices or x.shape[1] > 2 else whole


class _Lengthwise(nn.Module):
    def __init__(self, *, slices: bool) -> None:
        super().__init__()
        self.first = _Shortened(slices=slices)
        self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        whole, begin = self.first(x)
        return self.head(self.second(whole).mean(1) + begin.mean(1))


def _texts(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(3, length, WIDTH), torch.arange(3) % CLASSES


def test_tensors_that_are_one_in_the_first_minibatch_alone_are_not_taken_for_one() -> None:
    """The two tensors must not both get the values of the first one behind a cut."""
    cut = cut_model(_Lengthwise(slices=False), *_texts(2), cross_entropy)
    assert _names(cut) == ["first", "second"]
    for texts in (_texts(2), _texts(1)):
        loss = _loss(cut.module(texts[0]), texts[1])
        torch.testing.assert_close(_in_stages(cut, [0], *texts)[0], loss.detach())
    with pytest.raises(ValueError, match="first returned a tensor that was also another one in the first"):
        _in_stages(cut, [0], *_texts(3))


def test_views_of_one_memory_whose_gradients_part_cross_apart() -> None:
    cut = cut_model(_Lengthwise(slices=True), *_texts(2), cross_entropy)
    for texts in (_texts(2), _texts(1), _texts(3)):
        loss = _loss(cut.module(texts[0]), texts[1])
        torch.testing.assert_close(_in_stages(cut, [0], *texts)[0], loss.detach())
    adversarial = TWINS["adversarial"]
    cut = cut_model(adversarial.model(), *adversarial.data(1)[0], cross_entropy)
    crossing = next(place.crossing for place in cut.offered if place.name == "features")
    assert crossing is not None
    assert crossing.num_tensors == 3


def test_what_only_a_later_minibatch_reads_is_nan_and_not_zero() -> None:
    """Values that do not cross a cut are NaN behind it. If they were zeros, a stage could read them, and the
    training would go on with wrong numbers.
    """
    cut = cut_model(LongOnes(), *_texts(2), cross_entropy)
    assert _names(cut) == ["first", "second"]
    assert bool(_in_stages(cut, [0], *_texts(3))[0].isfinite())
    assert bool(_in_stages(cut, [1], *_texts(3))[0].isnan())


class _Giving(nn.Module):
    """Returns another value besides its output, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.beside: Any = None

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.linear(x), self.beside


class _Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.giving = _Giving()
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, beside = self.giving(x)
        out: Tensor = self.last(x)
        return out if beside is None else out * 2


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        (None, torch.ones(2), "giving returned a tensor of 1 dimensions at [1], and None in the first"),
        (None, object(), "giving returned a object at [1], and None in the first minibatch"),
        (object(), torch.ones(2), "a tensor of 1 dimensions at [1], and an object that cannot cross a cut"),
        (3, None, "giving returned None at [1], and 3 in the first minibatch"),
        (3, 2.5, "giving returned 2.5 at [1], and 3 in the first minibatch"),
        (True, 1, "giving returned 1 at [1], and True in the first minibatch"),
        (torch.tensor(1.0), None, "giving returned None at [1], and a tensor of 0 dimensions"),
    ],
)
def test_what_becomes_another_kind_of_value_at_a_cut_is_refused_by_name(
    first: Any, later: Any, message: str
) -> None:
    """A value may be None in the first minibatch only. Behind the cut it must not stay None."""
    model, x = _Asking(), torch.randn(2, WIDTH)
    model.giving.beside = first
    stage = cut_model(model, x, torch.zeros(2, dtype=torch.long), cross_entropy).at(["giving"]).stage(0, 0, 0)
    stage(x)
    model.giving.beside = later
    with pytest.raises(ValueError, match=re.escape(message)):
        stage(x)


def test_none_crosses_a_cut_for_a_tensor_and_for_a_stand_in() -> None:
    model, x = _Asking(), torch.randn(2, WIDTH)
    model.giving.beside = torch.ones(2)
    cut = cut_model(model, x, torch.zeros(2, dtype=torch.long), cross_entropy).at(["giving"])
    stages = cut.stage(0, 0, 0), cut.stage(1, 1, 1)
    model.giving.beside = None
    assert torch.equal(stages[1](stages[0](x)), model(x))


class _Codes(nn.Module):
    """Returns its input, an integer made from it, and whether that integer is odd."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes = x.detach().abs().sum(-1).long() % 4
        return x, codes, codes % 2 == 1


class _Coded(nn.Module):
    """Reads the integers or the booleans of its first part, but only if a text is longer than two."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, size) for size in (WIDTH, WIDTH, CLASSES))
        self.coder = _Codes()
        self.table = nn.Parameter(torch.rand(4, WIDTH))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        out, codes, is_odd = self.coder(self.first(x))
        out = self.second(out) * self.table.sum()
        if x.shape[1] > 2:
            out = out + (self.table[codes] if self.reads == "codes" else is_odd[..., None])
        return self.head(out.mean(1))


def test_whole_numbers_that_only_a_later_minibatch_reads_are_no_index() -> None:
    """Integers that do not cross a cut must not be 0 behind it. Otherwise the training would go on with the
    table's first row.
    """
    cut = cut_model(_Coded("codes"), *_texts(2), cross_entropy)
    assert "second" in _names(cut)
    with pytest.raises(IndexError):
        _in_stages(cut, [_names(cut).index("second")], *_texts(3))


def test_truths_that_only_a_later_minibatch_reads_show_in_its_loss() -> None:
    """Booleans that do not cross a cut must not be false behind it, which would be a valid value."""
    model = _Coded("truths")
    cut = cut_model(model, *_texts(2), cross_entropy)
    with torch.no_grad():
        model.first.weight.zero_()  # all codes become 0, which is not odd
        model.first.bias.zero_()
    texts = _texts(3)
    staged, _ = _in_stages(cut, [_names(cut).index("second")], *texts)
    assert not torch.isclose(staged, _loss(model(texts[0]), texts[1]))


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.norm(self.first(value)))  # type: ignore[no-any-return]


class _ReadsMean:
    def __init__(self, mean: Tensor) -> None:
        self.mean = mean

    def __call__(self, outputs: Tensor, _: Tensor) -> Tensor:
        return (outputs - self.mean).square().mean()


@pytest.mark.parametrize("is_view", [False, True])
def test_no_cut_parts_a_loss_from_a_buffer_that_it_reads_of_the_model(is_view: bool) -> None:
    # Behind a cut the loss would read a copy of the buffer, which never changes.
    model = _Normed()
    assert isinstance(model.norm.running_mean, Tensor)
    mean = model.norm.running_mean[:] if is_view else model.norm.running_mean
    cut = cut_model(model, torch.randn(4, 3), torch.randn(4, 3), _ReadsMean(mean))
    assert [one.name for one in cut.offered] == ["first"]
    assert not mean.any()


class _OwnRegion(nn.Module):
    """Uses autocast in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TWINS["sharing"].model(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


@pytest.mark.parametrize("has_own_region", [False, True])
def test_a_weight_that_is_used_twice_forbids_no_cut_under_autocast(has_own_region: bool) -> None:
    """autocast keeps its cast of the weight for the second use. This cast must not count as a value that
    crosses the cut by other means than return values.
    """
    twin = TWINS["sharing"]
    model = _OwnRegion() if has_own_region else twin.model(torch.float32)
    cut = cut_model(
        model,
        *twin.data(1, torch.float32)[0],
        cross_entropy,
        autocast=None if has_own_region else torch.bfloat16,
    )
    names = ["first", "shared", "shared (call 2)", "shared (call 3)"]
    assert _names(cut) == [f"inner.{name}" if has_own_region else name for name in names]
    assert not cut.refused
    assert torch.is_autocast_cache_enabled()
