"""Tests that a plain call of run() starts its workers itself, and gives what the ranks of torchrun give."""

from __future__ import annotations

import copy
import functools
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pipedream
import psutil
import pytest
import torch
from oracle import assert_memory_as_predicted
from pipedream import Plan, reference
from pipedream.launch.fork_server import start_server
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import (
    Training,
    assert_close_losses,
    assert_close_state,
    assert_equal_state,
    expected_versions,
    train_by_reference,
    train_in_pipeline,
    train_plainly,
)


def _children() -> set[int]:
    processes = psutil.Process().children(recursive=True)
    return {p.pid for p in processes if "resource_tracker" not in " ".join(p.cmdline())}


def test_local_workers_train_the_callers_model_in_place() -> None:
    training = Training("cnn", 3, epochs=2, short_last=False, shuffled=True)
    start_server()  # the fork server stays for the next run
    before, state_before = _children(), torch.get_rng_state()
    result, state = train_in_pipeline(training, transport="tcp")
    expected, expected_state = train_by_reference(training)
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)
    assert result.versions == expected_versions(training.plan, 14)
    assert len({*result.worker_pids, os.getpid()}) == 4
    assert all("tcp" in name for name in result.transports.values()) and len(result.transports) == 4
    assert result.bytes_sent > 0
    assert [(len(t.sent), len(t.received)) for t in result.transfers] == [(14, 14)] * 4
    assert _children() == before
    assert torch.equal(torch.get_rng_state(), state_before)


class _Stream:
    """Data that give each minibatch only once, although they are no iterator."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches


@pytest.mark.parametrize("given", [iter, _Stream])
def test_a_stream_of_unknown_length_is_iterated_by_the_caller_and_forwarded_whole(
    given: Callable[[Iterator[Any]], Iterable[Any]],
) -> None:
    training = Training("lstm", 2, num_minibatches=5, short_last=True)
    iterated_by: list[int] = []

    def batches() -> Iterator[Any]:
        for batch in training.data():
            iterated_by.append(os.getpid())
            yield batch

    result, state = train_in_pipeline(training, data=given(batches()))
    expected, expected_state = train_by_reference(training)
    assert iterated_by == [os.getpid()] * 5
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)
    assert result.versions == expected.versions


def test_a_generator_is_cut_into_microbatches_for_workers_of_several_stages() -> None:
    # The first worker has stages 0 and 2, and the second has stages 1 and 3. 6 samples in 4 microbatches
    # leave one microbatch empty.
    training = Training("cnn", 4, num_minibatches=5, short_last=False, schedule="interleaved", microbatches=4)
    result, state = train_in_pipeline(training, data=iter(training.data()), recompute=[1])
    expected, expected_state = train_by_reference(training)
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)
    assert result.versions == expected.versions
    assert result.recompute == [False, True, False, False]
    assert len(set(result.worker_pids)) == 2
    assert_memory_as_predicted(result)


def square_of_outputs(outputs: torch.Tensor, targets: float) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def test_forwarded_targets_need_no_samples_and_no_tensors() -> None:
    training = Training("mlp", 2, num_minibatches=4, short_last=False, microbatches=4)
    data = [(inputs[:5], 0.5) for inputs, _ in training.data()]
    data[1] = (data[1][0][:4], 0.5)
    options = {"loss_fn": square_of_outputs}
    result, state = train_in_pipeline(training, data=iter(data), **options)
    model = training.model()
    expected = reference.run(model, training.plan, **training.options() | options | {"data": data})
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, model.state_dict(), 1e-9)
    samples = [len(inputs) for inputs, _ in data]
    mean = sum(loss * count for loss, count in zip(expected.losses, samples, strict=True)) / sum(samples)
    assert abs(result.epoch_losses[0] - mean) <= 1e-9 * mean


class Reusing:
    """Data that fill the same memory for every minibatch, and cannot be sent."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self._hook: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = (tensor.clone() for tensor in self._batches[0])
        for next_inputs, next_targets in self._batches:
            inputs.copy_(next_inputs)
            targets.copy_(next_targets)
            yield inputs, targets


def test_one_local_worker_equals_a_plain_loop_bit_for_bit_also_with_forwarded_data() -> None:
    training = Training("dropout", 1, epochs=2, short_last=False)
    result, state = train_in_pipeline(training, data=Reusing(list(training.data())))
    losses, plain_state = train_plainly(training)
    assert result.losses == losses
    assert_equal_state(state, plain_state)
    assert result.epoch_losses == [sum(losses[:7]) / 7, sum(losses[7:]) / 7]
    assert result.worker_pids != [os.getpid()]


def test_forwarded_data_draw_the_random_numbers_that_a_workers_own_would() -> None:
    training = Training("dropout", 2, num_minibatches=4, epochs=2, short_last=False, seed=None)
    noise = Noise(training.data())
    model = training.model()
    torch.manual_seed(11)
    expected = reference.run(model, training.plan, **(training.options() | {"data": noise}))
    torch.manual_seed(11)
    state_before = random.getstate()
    held = [lambda: None]  # a list with a lambda cannot be sent
    result, state = train_in_pipeline(training, data=Noise(training.data(), held), gather="none")
    assert_close_losses(result.losses, expected.losses, 1e-9)
    # With gather="none" the caller's model does not change.
    assert_equal_state(state, training.model().state_dict())
    # A run without a seed draws one number from torch's generator, so that the next run differs. It changes
    # no other generator.
    state_after = torch.get_rng_state()
    torch.manual_seed(11)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(state_after, torch.get_rng_state())
    assert random.getstate() == state_before


class Collecting(nn.Module):
    """Looks up its class in a registry of transformers. In that library the constructor of a model makes the
    entry.
    """

    _can_record_outputs: ClassVar[dict[str, Any]] = {"router_logits": nn.Linear}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.maker = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.maker != os.getpid():  # stands in for the library, which a real worker has imported
            library = types.SimpleNamespace(_CAN_RECORD_REGISTRY={})
            sys.modules["transformers.utils.output_capturing"] = library  # type: ignore[assignment]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.maker != os.getpid():
            registry: Any = sys.modules["transformers.utils.output_capturing"]
            assert registry._CAN_RECORD_REGISTRY[str(type(self))] == self._can_record_outputs
        result: torch.Tensor = self.second(self.first(inputs))
        return result


def test_a_module_that_is_cut_finds_in_a_worker_what_its_library_keeps_of_its_class() -> None:
    batches = [(torch.randn(2, 4), torch.randint(3, (2,)))] * 2
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    cross_entropy = nn.functional.cross_entropy
    plan = Plan.straight(2, 2)
    result = pipedream.run(
        Collecting(), plan, data=batches, loss_fn=cross_entropy, optimizer=sgd, progress=False
    )
    assert len(result.losses) == 2


def test_lambdas_and_hooks_made_in_functions_train_as_a_plain_loop() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 3))

        def doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output * 2

        # Gradient checkpointing of transformers registers such a hook.
        layers[1].register_forward_hook(doubled)
        return layers

    rate = 0.1
    batches = [(torch.randn(2, 4), torch.randint(3, (2,))) for _ in range(3)]
    trained, plain = model(), model()
    result = pipedream.run(
        trained,
        Plan.straight(3, 2),
        data=batches,
        loss_fn=lambda outputs, targets: 2 * nn.functional.cross_entropy(outputs, targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        weight_fn=lambda targets: 3 * len(targets),
        schedule="flush",
        microbatches=2,
        progress=False,
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=rate)
    losses = []
    for inputs, targets in batches:
        loss = 2 * nn.functional.cross_entropy(plain(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_close_losses(result.losses, losses, 1e-6)
    assert_close_state(trained.state_dict(), plain.state_dict(), 1e-6)


class Noise:
    """Data in a shuffled order, with noise on every minibatch. Both are drawn from the global generators."""

    def __init__(self, batches: Iterable[Any], held: Any = None) -> None:
        self._batches = list(batches)
        self._held = held

    def __iter__(self) -> Iterator[Any]:
        for i in torch.randperm(len(self._batches)):
            inputs, targets = self._batches[i]
            yield inputs + torch.randn_like(inputs), targets * random.random()


class _Residual(nn.Module):
    """A module that is cut along its forward. For the cut, run() looks at minibatch 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = inputs + self.second(self.first(inputs))
        return result


def test_a_loaders_own_generator_goes_on_from_run_to_run_as_in_a_plain_loop() -> None:
    """Workers iterate a copy of the loader. The loader's own generator must go on too. Otherwise each run of
    one epoch would have the minibatches of the first run.
    """
    inputs, targets = torch.randn(12, 3), torch.randn(12, 3)

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(TensorDataset(inputs, targets), 4, shuffle=True, generator=generator)

    data, plain_data, model = loader(), loader(), _Residual()
    plain = copy.deepcopy(model)
    losses, plain_losses = [], []
    profile = pipedream.profile(model, data, nn.functional.mse_loss, minibatches=2)
    plan, loss_fn = Plan.load("1-1", profile=profile), nn.functional.mse_loss
    for _ in range(2):
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        result = pipedream.run(
            model,
            plan,
            data=data,
            loss_fn=nn.functional.mse_loss,
            optimizer=sgd,
            schedule="flush",
            progress=False,
        )
        losses += result.losses
        optimizer = sgd(plain.parameters())
        for batch, wanted in plain_data:
            optimizer.zero_grad()
            loss = loss_fn(plain(batch), wanted)
            loss.backward()
            optimizer.step()
            plain_losses.append(loss.item())
    assert_close_losses(losses, plain_losses, 1e-5)


class _FailingAfterwards(torch.utils.data.SequentialSampler):
    """A sampler that fails in a worker, but only after the training, when the worker reads `generator`."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.caller = os.getpid()

    @property
    def generator(self) -> None:
        if os.getpid() != self.caller:
            raise RuntimeError("at the very end")


def test_a_run_that_fails_when_all_is_trained_leaves_the_weights_in_the_model(tmp_path: Path) -> None:
    """In the last run the weights cannot be saved either. No file may stay half written."""
    (tmp_path / "model-00002-of-00002.safetensors.part").symlink_to("/dev/full")
    inputs, targets = torch.randn(16, 4), torch.randn(16, 2)
    dataset = TensorDataset(inputs, targets)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    ends = (
        ({}, None),
        ({"sampler": _FailingAfterwards(dataset)}, "at the very end; "),
        ({"save": tmp_path}, r"weights of stage 1 could not be saved in .*\(.*No space left on device\); "),
    )
    for model, (how, said) in zip(models, ends, strict=True):
        data = DataLoader(dataset, 4, sampler=how.pop("sampler", None))
        train = functools.partial(
            pipedream.run,
            model,
            Plan.straight(2, 2),
            data=data,
            loss_fn=nn.functional.mse_loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            progress=False,
            **how,
        )
        if said is None:
            train()
            continue
        over = "the training was over, and the model has the trained weights"
        with pytest.raises(RuntimeError, match=said + over) as failed:
            train()
        assert len(failed.value.losses) == 4  # type: ignore[attr-defined]
        for name, value in models[0].state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
    assert not list(tmp_path.iterdir())
