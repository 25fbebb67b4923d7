"""Tests profiler.py: what it measures and for how long. It leaves the model unchanged."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models import BATCH, CASES, CLASSES, SEQUENCE, WIDTH, Batch, Case, squared_error
from pipedream import Plan, partition
from pipedream.profiling.microbatch_timing import product_ms_per_replica
from pipedream.profiling.profiler import profile
from pipedream.profiling.timed_passes import Clock as HostClock
from pipedream.splitting.cut_model import cut_model
from pipedream.splitting.splitter import split
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from twins import CHANGING, TWINS, cross_entropy


class Record:
    """Records the sizes and the gradients that a layer gets. It is outside the model, because the profiler
    restores all attributes of the model.
    """

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.gradients: list[torch.Tensor] = []


class Recorded(nn.Module):
    """Records its forwards and the gradients that reach it."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self._record = lambda: record

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self._record().batch_sizes.append(value.shape[0])
        output = value * self.weight
        output.register_hook(self._record().gradients.append)
        return output


def _recorded_model() -> tuple[nn.Sequential, Record]:
    record = Record()
    model = nn.Sequential(Recorded(record), nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES).double())
    return model, record


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_layer_of_the_zoo_is_measured(case: Case) -> None:
    model = case.model()
    measured = profile(model, case.data(2), case.loss_fn, minibatches=2)
    assert [layer.name for layer in measured.layers] == [name for name, _ in model.named_children()]
    assert all(layer.forward_ms > 0 and layer.backward_ms >= 0 for layer in measured.layers)
    assert (measured.model, measured.batch_size, measured.minibatches) == ("Sequential", BATCH, 2)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert measured.parameter_bytes == sum(p.numel() * p.element_size() for p in trainable)
    assert measured.layers[-1].activation_bytes == 0


def test_activation_bytes_count_each_tensor_that_crosses_once() -> None:
    case = CASES["lstm"]
    measured = profile(case.model(), case.data(1), case.loss_fn, minibatches=1)
    outputs, state = BATCH * SEQUENCE * WIDTH * 8, BATCH * WIDTH * 8
    assert [layer.activation_bytes for layer in measured.layers] == [
        outputs,
        outputs + 2 * state,
        outputs + 2 * state,  # the packed value has the outputs twice
        state,
        0,
    ]


def test_a_tied_parameter_counts_where_it_is_first_used_and_a_frozen_one_nowhere() -> None:
    case = CASES["tied"]
    model = case.model(torch.float32)
    sizes = [
        layer.parameter_bytes for layer in profile(model, case.data(1), case.loss_fn, minibatches=1).layers
    ]
    assert sizes[0] == model[0].weight.numel() * 4
    assert sizes[2] == 0
    case = CASES["frozen"]
    assert profile(case.model(), case.data(1), case.loss_fn, minibatches=1).layers[0].parameter_bytes == 0


def _num_whole(record: Record) -> int:
    """Returns the number of whole minibatches before the first piece of one."""
    whole = itertools.takewhile(lambda size: size == record.batch_sizes[0], record.batch_sizes)
    return sum(1 for _ in whole)


def test_the_gradients_that_flow_are_those_of_the_unsplit_model() -> None:
    model, record = _recorded_model()
    inputs, targets = CASES["mlp"].data(1)[0]
    squared_error(model(inputs), targets).backward()
    expected = record.gradients.pop()
    record.batch_sizes.clear()
    profile(model, [(inputs, targets)], squared_error, minibatches=2, check=False)
    whole = record.gradients[: _num_whole(record)]
    assert len(whole) == 7  # five of them belong to the warm-up
    assert all(torch.equal(gradient, expected) for gradient in whole)


def test_short_minibatches_are_not_timed_and_batches_start_again_when_they_end() -> None:
    model, record = _recorded_model()
    dataset = TensorDataset(torch.randn(14, WIDTH).double(), torch.randn(14, CLASSES).double())
    measured = profile(
        model, DataLoader(dataset, batch_size=4, shuffle=True), squared_error, minibatches=5, check=False
    )
    assert record.batch_sizes[: _num_whole(record)] == [4] * 10
    assert (measured.minibatches, measured.batch_size) == (5, 4)


class _Bags(nn.Module):
    """Embeds bags of words that are joined in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, 3)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.bags(words, offsets))
        return result


def test_samples_are_counted_as_in_a_run_where_the_inputs_have_other_sizes() -> None:
    # A batch has fewer samples than words. If words counted as samples, the rates would be too high, and
    # minibatches with other numbers of words would not be timed.
    def batch(*lengths: int) -> Batch:
        offsets = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        return (torch.randint(9, (sum(lengths),)), offsets), torch.randint(3, (len(lengths),))

    batches = [batch(4, 2), batch(1, 2), batch(3, 3), batch(2, 5), batch(1, 1), batch(6, 6), batch(3, 1)]
    measured = profile(_Bags(), iter(batches), nn.functional.cross_entropy, check=False)
    assert (measured.batch_size, measured.minibatches) == (2, 2)  # the other five belong to the warm-up


def test_a_generator_that_ends_early_leaves_what_it_gave() -> None:
    data = CASES["mlp"].data(8)
    for num_batches, num_measured in ((8, 3), (6, 1), (3, 1), (1, 1)):
        model, record = _recorded_model()
        measured = profile(model, (batch for batch in data[:num_batches]), squared_error, check=False)
        assert _num_whole(record) == num_batches
        assert measured.minibatches == num_measured


def test_the_time_limit_ends_an_endless_stream_after_at_least_one_of_warm_up() -> None:
    def endless() -> Iterator[Batch]:
        while True:
            yield from CASES["mlp"].data(4)

    model, record = _recorded_model()
    measured = profile(model, endless(), squared_error, minibatches=10**9, seconds=1e-9, check=False)
    pieces = [BATCH // 2, BATCH // 3]  # pieces for the times of microbatches, warmed up once and timed once
    assert record.batch_sizes == [BATCH, BATCH, *pieces, BATCH, *pieces]
    assert measured.minibatches == 1


class Clock:
    """Replaces the machine's clock. Time passes only when the test says so."""

    now_s = 0.0

    def pass_ms(self, duration_ms: float) -> None:
        self.now_s += duration_ms / 1e3


class Costly(nn.Module):
    """A layer whose forward and backward take the given times."""

    def __init__(self, clock: Clock, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock, self.forward_ms, self.backward_ms = clock, forward_ms, backward_ms
        self.num_forwards = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        # The first forwards are slow, as in a warm-up, and must not count.
        self.num_forwards += 1
        self.clock.pass_ms(self.forward_ms if self.num_forwards > 5 else 1000)
        return _Taking.apply(value * self.weight, self.clock, self.backward_ms)


class _Taking(torch.autograd.Function):
    """Passes time on the fake clock in the backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: Clock, backward_ms: float) -> torch.Tensor:
        ctx.clock, ctx.backward_ms = clock, backward_ms
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.clock.pass_ms(ctx.backward_ms)
        return gradients[0], None, None


def test_times_are_means_of_each_layers_own_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("pipedream.profiling.profiler.time.perf_counter", lambda: clock.now_s)
    losses_ms = itertools.chain([0.0] * 5 + [10.0, 20.0, 30.0], itertools.repeat(0.0))

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        clock.pass_ms(next(losses_ms))
        return outputs.sum()

    def batches() -> Iterator[Batch]:
        while True:
            clock.pass_ms(500)  # the time of reading data belongs to no layer
            yield torch.ones(2, 2), torch.ones(2)

    model = nn.Sequential(Costly(clock, 1, 2), Costly(clock, 3, 4))
    first, last = profile(model, batches(), loss_fn, minibatches=3, check=False).layers
    assert (first.forward_ms, first.backward_ms) == pytest.approx((1, 2))
    # The loss belongs to the last layer.
    assert (last.forward_ms, last.backward_ms) == pytest.approx((3 + 20, 4))


def test_profiling_ends_once_the_time_is_known_and_says_how_well(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("pipedream.profiling.profiler.time.perf_counter", lambda: clock.now_s)
    batch = (torch.ones(2, 2), torch.ones(2))
    steady = profile(nn.Sequential(Costly(clock, 1, 2)), [batch], lambda outputs, _: outputs.sum())
    assert (steady.minibatches, steady.time_error) == (50, pytest.approx(0, abs=1e-9))
    times_ms = itertools.cycle([0.0] * 15 + [3.0] * 15)  # the machine is slower for half of the time

    def loss_fn(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        clock.pass_ms(next(times_ms))
        return outputs.sum()

    noisy = profile(nn.Sequential(Costly(clock, 1, 2)), [batch], loss_fn, minibatches=100)
    assert noisy.minibatches == 100
    assert noisy.time_error is not None and noisy.time_error > 0.1
    short = profile(nn.Sequential(Costly(clock, 1, 2)), [batch], loss_fn, minibatches=10)
    assert short.time_error is None
    assert "10 minibatches, too few to say" in str(short)


def test_what_autograd_keeps_is_counted_once_and_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    batch = (torch.ones(16, 4), torch.ones(16, 2))
    saved = [layer.saved_bytes for layer in profile(model, [batch], squared_error, minibatches=1).layers]
    # The first layer saves its input. ReLU saves its output, which the last layer needs too. The loss saves
    # its difference.
    assert saved[:2] == [16 * 4 * 4, 16 * 8 * 4]
    assert saved[2] is not None and 0 < saved[2] <= 2 * 16 * 2 * 4


def test_profiling_leaves_the_state_of_the_loss_as_it_was() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(2))

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.centre.lerp_(outputs.detach().mean(0), 0.5)
            return (outputs - self.centre - targets).square().mean()

    centred = Centred()
    profile(nn.Linear(2, 2), [(torch.ones(3, 2), torch.ones(3, 2))], centred, minibatches=2)
    assert centred.centre.tolist() == [0, 0]


def _trace(model: nn.Module) -> Any:
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        [(p.tolist(), None if p.grad is None else (id(p.grad), p.grad.tolist())) for p in model.parameters()],
        [(id(b), b.tolist()) for b in model.buffers()],
        [m.training for m in model.modules()],
    )


@pytest.mark.parametrize("name", ["cnn", "dropout"])
def test_profiling_leaves_model_data_and_random_numbers_as_they_were(name: str) -> None:
    case = CASES[name]
    # The first layer works in place. It must not change the caller's inputs.
    model = nn.Sequential(nn.ReLU(inplace=True), *case.model())
    model[1].weight.grad = torch.ones_like(model[1].weight)
    model[-1].eval()
    data = case.data(3)
    loader = DataLoader(data, batch_size=None, shuffle=True)
    before = _trace(model)
    profile(model, loader, case.loss_fn, minibatches=4)
    assert _trace(model) == before
    for (inputs, targets), (kept_inputs, kept_targets) in zip(data, case.data(3), strict=True):
        assert torch.equal(inputs, kept_inputs) and torch.equal(targets, kept_targets)


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return outputs.mean() * self.calls


def test_profiling_leaves_a_loss_that_counts_as_it_was() -> None:
    counts = _Counts()

    def in_a_closure(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return counts(outputs, targets)

    for loss_fn in (counts, in_a_closure):
        profile(nn.Linear(2, 2), [(torch.ones(2, 2), torch.ones(2))], loss_fn, minibatches=2)
        assert counts.calls == 0


def test_a_list_of_layers_and_a_single_module_can_be_profiled() -> None:
    case = CASES["mlp"]
    measured = profile(list(case.model()), case.data(1), case.loss_fn, minibatches=1)
    assert (measured.model, measured.num_layers) == ("layers", 5)
    lone = nn.Linear(WIDTH, CLASSES)
    measured = profile(lone, case.data(1, torch.float32), case.loss_fn, minibatches=1)
    assert (measured.model, [layer.name for layer in measured.layers]) == ("Linear", ["Linear"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": []}, "batches is empty"),
        ({"minibatches": 0}, "minibatches is 0"),
        ({"minibatches": 1.5}, "minibatches is 1.5"),
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"seconds": "10"}, "seconds is '10': give a positive number"),
        ({"loss_fn": 3}, "loss_fn is a int: give a function"),
        ({"loss_fn": None}, "the model's output, a Tensor, has no scalar loss, and there is no loss_fn"),
        ({"batches": 3}, "batches is a int: give something that yields"),
        ({"batches": [torch.zeros(2)]}, "minibatch 0 of the data is a Tensor"),
        ({"loss_fn": lambda outputs, targets: 1.0}, "loss_fn returned a float"),
        ({"loss_fn": lambda outputs, targets: outputs - targets}, "loss_fn returned a tensor of shape"),
    ],
)
def test_unusable_arguments_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    case = CASES["mlp"]
    arguments: dict[str, Any] = {"batches": case.data(1), "loss_fn": case.loss_fn} | options
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        profile(case.model(), **arguments)
    assert "\n" not in str(caught.value)


def test_profiling_is_quiet_where_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    case = CASES["mlp"]
    profile(case.model(), case.data(1), case.loss_fn, minibatches=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_on_a_gpu_are_timed_by_its_events() -> None:
    case = CASES["cnn"]
    measured = profile(
        case.model(torch.float32).cuda(), case.data(2, torch.float32), case.loss_fn, minibatches=2
    )
    assert all(layer.forward_ms > 0 for layer in measured.layers)
    assert measured.device == torch.cuda.get_device_name()


def test_any_module_is_measured_between_the_places_where_it_may_be_cut() -> None:
    twin = TWINS["transformer"]
    model, data = twin.model(), twin.data(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measured = profile(model, data, cross_entropy, minibatches=2)
    cut = cut_model(model, *data[0], cross_entropy)
    assert [layer.name for layer in measured.layers] == cut.layer_names
    assert [layer.activation_bytes for layer in measured.layers] == [*(p.num_bytes for p in cut.offered), 0]
    assert measured.parameter_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    # The tied head's weight is the same.
    assert measured.layers[0].parameter_bytes == model.words.weight.numel() * 8
    assert measured.layers[-1].parameter_bytes == 0
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in measured.layers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class _Slow(torch.autograd.Function):
    """Lets time pass on the fake clock: 1 s in the forward, 2 s in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        clock.pass_ms(1000)
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.pass_ms(2000)
        return gradients[0], None


class _SlowBranch(nn.Module):
    """A slow layer whose output is read by the next layer and again by a later one."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.first, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.slow.register_forward_hook(lambda module, args, output: _Slow.apply(output, clock))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.last(self.third(self.slow(x)) + x)
        return out


def test_the_time_of_a_part_of_the_forward_is_its_own_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("pipedream.profiling.timed_passes.time.perf_counter", lambda: clock.now_s)
    data = CASES["mlp"].data(1, torch.float32)
    measured = profile(_SlowBranch(clock), data, squared_error, minibatches=1)
    assert [layer.name for layer in measured.layers] == ["first", "slow", "third", "last"]
    assert [layer.forward_ms for layer in measured.layers] == [0, 1000, 0, 0]
    assert [layer.backward_ms for layer in measured.layers] == [0, 2000, 0, 0]


class _Hidden(nn.Module):
    """Passes a value to later code outside the graph, without an operation of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        scale = float(x.detach().numpy().max())
        out: torch.Tensor = self.last(x.tanh()) * scale
        return out


class _HiddenInModule(_Hidden):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.scale = 1.0
        self.first.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.scale = float(output.detach().numpy().max())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.middle(self.first(x))) * self.scale
        return out


class _Late(_HiddenInModule):
    """Has a possible cut before the place where the value is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(CLASSES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.end(super().forward(self.stem(x)))
        return out


class _Appends(nn.Module):
    """A module whose hook appends an output to a list, which later code reads. Only a stage that runs the
    hooked layer has that output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.end = nn.Linear(WIDTH, CLASSES)
        self.seen: list[torch.Tensor] = []
        self.first.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        x = self.last(self.first(self.stem(x)))
        out: torch.Tensor = self.end(x + self.seen[0])
        return out


def test_a_cut_that_changes_what_is_computed_is_left_out_and_the_log_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = CASES["mlp"].data(1, torch.float32)
    # Here the value that crosses the cut is the value that is read.
    profile(_Hidden(), data, squared_error, minibatches=1)
    assert not caplog.text
    measured = profile(_Late(), data, squared_error, minibatches=1)
    assert measured.cuts == ("stem",)
    assert [layer.name for layer in measured.layers] == ["stem", "end"]
    assert "the model cut after first does not compute what the whole model does" in caplog.text
    assert "nor after middle, last; places left to cut it: 1" in caplog.text
    unchecked = profile(_HiddenInModule(), data, squared_error, minibatches=1, check=False)
    assert [layer.name for layer in unchecked.layers] == ["first", "middle", "last"]


class _Keeps(_HiddenInModule):
    """Keeps a value from one minibatch to the next, behind the last possible cut."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.steps = 0
        self.state = torch.zeros(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def _note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * (1 + self.steps) + self.state + self.mean
        x = self.middle(x).relu()
        if self.kept == "a number":
            self.steps += 1
        elif self.kept == "a tensor":
            self.state = x.detach().mean(0)
        elif self.kept == "a buffer":
            self.mean = 0.9 * self.mean + x.detach().mean(0)
        out: torch.Tensor = self.last(x)
        return out


@pytest.mark.parametrize("kept", ["a number", "a tensor", "a buffer"])
def test_what_a_minibatch_leaves_for_the_next_behind_a_cut_is_found(kept: str) -> None:
    data = CASES["mlp"].data(1, torch.float32)
    profile(_Keeps("nothing"), data, squared_error, minibatches=1)
    with pytest.raises(ValueError, match=r"cut after middle does not compute .* its next loss is"):
        profile(_Keeps(kept), data, squared_error, minibatches=1, cuts=["middle"])


def test_a_cut_at_which_the_forward_fails_is_left_out_with_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    measured = profile(_Appends(), CASES["mlp"].data(1, torch.float32), squared_error, minibatches=1)
    assert measured.cuts == ("stem",)
    assert "cut after first does not compute what the whole model does: cut there its forward" in caplog.text
    assert "raises IndexError: list index out of range" in caplog.text


def test_cuts_are_chosen_by_the_paths_of_modules_and_run_as_they_were_profiled() -> None:
    twin = TWINS["residual"]
    model, data = twin.model(torch.float32), twin.data(1, torch.float32)
    everywhere = profile(model, data, twin.loss_fn, minibatches=1)
    assert everywhere.cuts is None
    names = [layer.name for layer in everywhere.layers]
    measured = profile(model, data, twin.loss_fn, minibatches=1, cuts=[names[3], names[1]])
    assert measured.cuts == (names[1], names[3])
    assert measured.num_layers == 3
    plan = partition(measured, 3, "10Gbit/s", straight=True)
    assert Plan.from_dict(plan.to_dict()).cuts == measured.cuts
    straight = dataclasses.replace(Plan.straight(3, 3), cuts=measured.cuts)
    cut = cut_model(model, *data[0], twin.loss_fn)
    assert [stage.layer_names for stage in split(cut, straight)] == [[names[1]], [names[3]], [names[-1]]]


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (["frist"], "cannot be cut after 'frist', no call .* do you mean 'first'"),
        (["first"], "cannot be cut after first: first runs under activation checkpointing"),
    ],
)
def test_a_cut_that_there_is_not_is_refused_by_its_reason(cuts: list[str], words: str) -> None:
    class Frozen(_Hidden):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=False) if cuts == ["first"] else self.first(x)
            out: torch.Tensor = self.last(x)
            return out

    with pytest.raises(ValueError, match=words):
        profile(Frozen(), CASES["mlp"].data(1, torch.float32), squared_error, minibatches=1, cuts=cuts)


def test_a_list_of_layers_has_no_cuts_to_choose() -> None:
    case = CASES["mlp"]
    with pytest.raises(ValueError, match="the model is a list of layers"):
        profile(case.model(torch.float32), case.data(1, torch.float32), squared_error, cuts=["0"])


class _Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
        self.encoder = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(x))


def test_any_path_of_a_module_names_it_for_a_cut() -> None:
    data = [(torch.randn(2, WIDTH), torch.zeros(2, CLASSES))]
    measured = profile(_Aliased(), data, squared_error, minibatches=1, cuts=["encoder"])
    assert measured.cuts == ("layers.0",)


@pytest.mark.parametrize("cuts", ["first", [1], 5])
def test_cuts_are_a_list_of_paths(cuts: Any) -> None:
    with pytest.raises(TypeError, match=r"cuts is .*: give a list of paths of modules"):
        profile(_Aliased(), [(torch.ones(2, WIDTH), torch.ones(2, CLASSES))], squared_error, cuts=cuts)


def test_a_module_of_torch_jit_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"module '1' is compiled by torch\.jit"):
        profile(model, [(torch.ones(1, 2), torch.ones(1, 2))], squared_error, minibatches=1)


def test_a_buffer_that_counts_forwards_is_no_difference() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.tensor(0))
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            self.steps += 1
            out: torch.Tensor = self.last(x)
            return out

    measured = profile(Counts(), CASES["mlp"].data(1, torch.float32), squared_error, minibatches=1)
    assert len(measured.layers) == 2


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4, sparse=True)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(self.table(words, offsets)))
        return result


def test_a_module_with_sparse_gradients_is_checked_and_cut() -> None:
    batch = ((torch.arange(6), torch.tensor([0, 2])), torch.tensor([0, 2]))
    measured = profile(_Bag(), [batch], cross_entropy, minibatches=1)
    assert [layer.name for layer in measured.layers] == ["table", "first", "second"]


def test_the_check_of_cuts_finds_nothing_in_the_twins() -> None:
    for twin in TWINS.values():
        profile(twin.model(torch.float32), twin.data(1, torch.float32), twin.loss_fn, minibatches=1)


def test_a_module_that_cannot_be_cut_is_one_layer_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(checkpoint(self.first, x, use_reentrant=False))
            return out

    measured = profile(Frozen(), CASES["mlp"].data(1, torch.float32), squared_error, minibatches=1)
    assert [layer.name for layer in measured.layers] == ["Frozen"]
    assert "the model cannot be cut" in caplog.text
    assert "not after first: first runs under activation checkpointing or no_grad" in caplog.text


def test_dict_batches_and_the_models_own_loss_need_no_loss_fn() -> None:
    twin = TWINS["masked_transformer"]
    measured = profile(twin.model(), twin.data(2), minibatches=1)
    assert measured.batch_size == 6
    assert "blocks.1" in [layer.name for layer in measured.layers]


def test_the_factors_of_fully_connected_layers_are_measured() -> None:
    reused = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(reused, nn.Tanh()), reused, nn.LayerNorm(4))
    measured = profile(
        model, [(torch.randn(3, 5, 4), torch.randn(3, 5, 4))] * 3, squared_error, minibatches=2
    )
    factors = [layer.factors for layer in measured.layers]
    sizes = [tuple(weight[:2] for weight in of_layer or ()) for of_layer in factors]
    assert sizes == [((64, 15 * 8 * 4),), ((64, 30 * 8 * 4),), (), ()]
    assert all((weight.product_ms or 0.0) >= 0 for of_layer in factors for weight in of_layer or ())
    assert not any(layer._forward_hooks for layer in model.modules())


class _Checkpointed(nn.Module):
    """Has a layer that runs its forward again in the backward, and a layer whose input has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.side = nn.Linear(4, 4), nn.Linear(0, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out + self.side(x[..., :0])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_rows_count_once_that_a_checkpoint_computes_twice() -> None:
    model = nn.Sequential(_Checkpointed())
    batches = [(torch.randn(3, 4), torch.randn(3, 4))] * 2
    (layer,) = profile(model, batches, squared_error, minibatches=1).layers
    assert [weight[:2] for weight in layer.factors or ()] == [(64, 3 * 8 * 4), (0, 3 * 4 * 4)]


def test_what_each_replica_adds_to_a_product_of_factors_is_measured() -> None:
    class Counted(HostClock):
        def finish_minibatch(self) -> list[float]:
            assert len(super().finish_minibatch()) == 3
            return [next(told), 99.0, 99.0]

    told = iter([20.0, 5.0])  # the times of four replicas' rows and of one's
    assert product_ms_per_replica(torch.ones(2, 3), 4, Counted()) == 5.0
    told = iter([4.0, 5.0])  # the difference is smaller than the noise
    assert product_ms_per_replica(torch.ones(2, 3), 4, Counted()) == 0.0


class _Graph:
    """A batch of graphs, as libraries for graph networks join them."""

    def __init__(self, nodes: torch.Tensor, joined: torch.Tensor) -> None:
        self.nodes, self.joined = nodes, joined


class _GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, graph: _Graph) -> torch.Tensor:
        result: torch.Tensor = self.second(graph.joined @ self.first(graph.joined @ graph.nodes))
        return result


def test_inputs_in_an_object_that_cannot_cross_are_named_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = _Graph(torch.randn(5, 4), torch.rand(5, 5))
    batches = [(graph, torch.randint(3, (5,)))]
    measured = profile(_GraphNet(), batches, nn.functional.cross_entropy, minibatches=1)
    assert measured.num_layers == 1
    assert "the inputs hold a _Graph, None behind a cut: give its tensors in a tuple" in caplog.text


class _Epochs:
    """Counts its epochs in another object."""

    def __init__(self) -> None:
        self.counts = {"epochs": 0}

    def __iter__(self) -> Iterator[Any]:
        self.counts["epochs"] += 1
        yield torch.ones(2, 3), torch.ones(2, 1)


def test_profiled_data_count_no_epoch() -> None:
    data = _Epochs()
    profile(nn.Sequential(nn.Linear(3, 1)), data, nn.functional.mse_loss, minibatches=3)
    assert data.counts == {"epochs": 0}


class _Stream:
    """Gives each minibatch once."""

    def __init__(self) -> None:
        self.batches = (batch for batch in [(torch.ones(2, 3), torch.ones(2, 1))] * 3)
        self.times_asked = 0

    def __iter__(self) -> Iterator[Any]:
        self.times_asked += 1
        return iter(self.batches)


def test_a_stream_is_profiled_as_far_as_it_goes_and_asked_for_no_more() -> None:
    # Asking a stream that waits on a queue for more would block for ever.
    data = _Stream()
    assert profile(nn.Sequential(nn.Linear(3, 1)), data, nn.functional.mse_loss).minibatches == 1
    assert data.times_asked == 1


def test_autocast_is_profiled_as_it_is_run() -> None:
    twin = TWINS["sharing"]
    data = twin.data(2, torch.float32)
    plain, mixed = (
        profile(twin.model(torch.float32), data, cross_entropy, minibatches=1, autocast=autocast)
        for autocast in (None, "bfloat16")
    )
    assert [layer.name for layer in mixed.layers] == [layer.name for layer in plain.layers]
    saved_bytes = plain.layers[0].activation_bytes - mixed.layers[0].activation_bytes
    assert saved_bytes == 6 * WIDTH * 2
    with torch.autocast("cpu", torch.bfloat16):
        around = profile(twin.model(torch.float32), data, cross_entropy, minibatches=1)
    assert around.layers[0].activation_bytes == mixed.layers[0].activation_bytes
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    of_list = profile(layers, data, cross_entropy, minibatches=1, autocast="bfloat16")
    assert of_list.layers[0].activation_bytes == 6 * WIDTH * 2
    with pytest.raises(ValueError, match="autocast is 'int8': use 'bfloat16', 'float16' or None"):
        profile(layers, data, cross_entropy, autocast="int8")


def test_a_place_whose_call_some_minibatches_leave_out_is_no_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Some minibatches leave out a block. A cut inside a block would end the run at the first of them."""
    twin = CHANGING["self_skipping"]
    model, data = twin.model(), twin.data(8)
    everywhere = cut_model(model, *data[0], cross_entropy).layer_names
    assert "blocks.0.linear" in everywhere
    measured = profile(model, data, cross_entropy, minibatches=12)
    # Each block is left out now and then, so no cut is offered inside one. A cut at a block's end is offered.
    assert set(measured.cuts or ()) == {"first", *(f"blocks.{index}" for index in range(6))}
    assert [layer.name for layer in measured.layers] == [*(measured.cuts or ()), "last"]
    assert sum(layer.parameter_bytes for layer in measured.layers) == sum(
        p.nbytes for p in model.parameters()
    )
    assert "the model " in caplog.text and "blocks." in caplog.text
    with pytest.raises(ValueError, match="cut after blocks"):
        profile(model, data, cross_entropy, minibatches=12, cuts=["blocks.0.linear", "blocks.2.norm"])
