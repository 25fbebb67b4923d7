"""Tests that the pipeline drains when a minibatch is larger than planned, plans its memory again and goes on.

Its numbers are those of a pipeline that planned for that size from the start and drained at the same place.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import pipedream
import pytest
import torch
from codec_oracle import CodecOracle
from farm import Farm
from models import Batch, Case
from oracle import assert_memory_as_predicted, assert_same_numbers
from pipedream import RunResult, reference
from pipedream.common.errors import DataMismatch
from pipedream.planning import shapes as planning_shapes
from pipedream.stage import stage_loop
from pipedream.update import weights
from torch import nn
from training import (
    OPTIMIZERS,
    CountingSGD,
    Overflowing,
    State,
    Training,
    assert_close_losses,
    assert_close_state,
    model_of_oracle,
    state_of,
    tolerance,
    train_in_pipeline,
    train_plainly,
)

_halving = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


class _Growing:
    """Yields minibatches of these sizes, epoch by epoch. It is not a list, so run() cannot look at all of
    them before the training.
    """

    def __init__(self, case: Case, *epochs: Sequence[int], dtype: torch.dtype = torch.float64) -> None:
        self._case = case
        self._epochs = epochs
        self._dtype = dtype
        self._epoch = 0

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self._epoch)
        sizes = self._epochs[self._epoch]
        self._epoch += 1
        for size in sizes:
            yield self._case.make_batch(generator, self._dtype, size)


def _assert_equals_reference(
    farm: Farm,
    training: Training,
    *epochs: Sequence[int],
    drained_at: Sequence[int],
    num_ranks: int | None = None,
    native: Any = None,
    **options: Any,
) -> RunResult:
    """options: for the pipeline only."""
    data = _Growing(training.case, *epochs, dtype=training.dtype)
    if native is not None:
        options["optimizer"] = native
    ranks = num_ranks or training.num_workers
    result, state = farm.results(train_in_pipeline, training, num_ranks=ranks, data=data, **options)[0]
    assert result.drained_at == drained_at
    expected, expected_state = _train_by_reference(training, data, drained_at)
    assert_same_numbers(result.losses, state, expected.losses, expected_state, tolerance(training.dtype))
    assert result.versions == expected.versions
    assert result.epoch_sizes == [len(sizes) for sizes in epochs]
    assert_memory_as_predicted(result)
    return result


def _train_by_reference(
    training: Training, data: Iterable[Batch], drained_at: Sequence[int], **options: Any
) -> tuple[reference.ReferenceResult, State]:
    model = model_of_oracle(training)
    arguments = training.options() | {"data": data, "drained_at": drained_at} | options
    with torch.random.fork_rng():
        return reference.run(model, training.plan, **arguments), state_of(model)


@pytest.mark.parametrize(
    ("case_name", "num_stages", "how"),
    [
        ("cnn", 3, {}),
        ("cnn", 3, {"schedule": "vertical_sync"}),
        ("transformer", 3, {"schedule": "naive"}),
        ("cnn", 2, {"schedule": "2bw", "microbatches": 2}),
        ("transformer", 3, {"schedule": "flush", "microbatches": 3}),
        ("cnn", 3, {"schedule": "gpipe", "microbatches": 2}),
        ("lstm", 4, {"schedule": "interleaved", "microbatches": 2}),
        ("transformer", 2, {"schedule": "model_parallel"}),
        ("tied_apart", 3, {}),
        ("dropout", 3, {}),
        ("frozen", 2, {}),
        ("lstm", 2, {"microbatches": 3}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_run_equals_one_that_had_planned_for_it_and_drained_there(
    farm: Farm, case_name: str, num_stages: int, how: dict[str, Any]
) -> None:
    training = Training(case_name, num_stages, **how)
    _assert_equals_reference(farm, training, [3, 3, 4, 4, 3, 6, 4, 6, 5], drained_at=[2, 5])


@pytest.mark.parametrize("schedule", ["flush", "gpipe"])
def test_where_rounds_drain_the_numbers_are_those_of_plain_training(farm: Farm, schedule: str) -> None:
    training = Training("transformer", 2, schedule=schedule, microbatches=2)
    data = _Growing(training.case, [4, 4, 6, 4, 4])
    result, state = farm.results(train_in_pipeline, training, num_ranks=2, data=data)[0]
    assert result.drained_at == [2]
    losses, expected = train_plainly(_WithData(training.case_name, 2, microbatches=2, given=data))
    assert_close_losses(result.losses, losses, 1e-9)
    assert_close_state(state, expected, 1e-9)


class _WithData(Training):
    """A training on given data."""

    def __init__(self, *arguments: Any, given: Iterable[Batch], **how: Any) -> None:
        super().__init__(*arguments, **how)
        object.__setattr__(self, "_given", given)

    def data(self) -> Iterable[Batch]:
        return self._given  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("sizes", "drained_at"),
    [([3, 4, 3, 3], [1]), ([3, 3, 3, 4], [3]), ([2, 3, 4, 5], [1, 2, 3])],
    ids=["the second", "the last", "each"],
)
def test_it_may_be_any_minibatch(farm: Farm, sizes: list[int], drained_at: list[int]) -> None:
    _assert_equals_reference(farm, Training("cnn", 3), sizes, drained_at=drained_at)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
def test_optimizers_keep_their_state_and_rates_their_schedule(
    farm: Farm, optimizer: str, is_native: bool
) -> None:
    native = {
        "sgd": functools.partial(pipedream.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
        "adam": functools.partial(pipedream.optim.Adam, lr=0.01),
    }[optimizer]
    training = Training(
        "transformer", 2, optimizer=OPTIMIZERS[optimizer], epochs=3, lr_scheduler=_halving, max_grad_norm=1.0
    )
    # A larger minibatch comes in the middle of epoch 0, and another one at the beginning of epoch 1. Epoch 2
    # has none.
    epochs = [3, 3, 4, 3], [5, 5], [4, 5, 3]
    _assert_equals_reference(farm, training, *epochs, drained_at=[2, 4], native=native if is_native else None)


@pytest.mark.parametrize(
    ("replicas", "how", "drained_at"),
    [
        ((2, 1), {}, [2, 6]),
        ((1, 2), {}, [2, 6]),
        ((2, 2), {"schedule": "vertical_sync"}, [2, 6]),
        ((3, 1), {}, [3, 6]),
        ((2, 1), {"schedule": "flush", "microbatches": 2}, [3, 7]),
        ((1, 2), {"schedule": "2bw", "microbatches": 3}, [2, 6]),
        ((2, 1), {"sync": "ssp", "staleness": 2}, [2, 6]),
        ((1, 2), {"sync": "ssp", "staleness": 1}, [2, 6]),
        ((2, 1), {"sync": "allreduce"}, [2, 6]),
        ((2, 2), {"sync": "allreduce", "schedule": "flush"}, [2, 6]),
        # The pipeline drains between two means of the weights, or right after one.
        ((2, 1), {"sync_every": 2}, [2, 6]),
        ((2, 1), {"sync_every": 3}, [2, 6]),
        ((1, 2, 1), {"sync_every": 3, "schedule": "vertical_sync"}, [2, 6]),
        ((2, 2), {"sync_every": 4, "schedule": "flush", "optimizer": OPTIMIZERS["adam"]}, [2, 6]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_replicas_finish_their_rounds_before(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any], drained_at: list[int]
) -> None:
    training = Training("cnn", len(replicas), replicas=replicas, **how)
    _assert_equals_reference(farm, training, [3, 3, 3, 4, 4, 3, 3, 6, 5], drained_at=drained_at)


@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        ((1, 1), {}),
        ((1, 1, 1), {"schedule": "vertical_sync", "max_grad_norm": 20.0}),
        ((1, 1), {"schedule": "2bw", "microbatches": 2}),
        ((1, 1), {"schedule": "flush", "microbatches": 2}),
        ((2, 1), {}),
        ((1, 2), {}),
        ((3, 2), {"max_grad_norm": 20.0}),
        ((2, 1), {"schedule": "gpipe"}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_the_loss_scale_of_float16_goes_on(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    """The loss scale stays as it was before the drain. Overflows that were not reported before the drain are
    reported after it."""
    how = {"autocast": "float16", "dtype": torch.float32, "replicas": replicas, **how}
    training = Overflowing("mlp", len(replicas), optimizer=functools.partial(CountingSGD, lr=1e-3), **how)
    multiple = math.lcm(*replicas)
    drained_at = [multiple, 2 * multiple, 5 * multiple]
    sizes = [3 + sum(boundary <= i for boundary in drained_at) for i in range(12 * multiple)]
    CountingSGD.num_steps = 0
    data = _Growing(training.case, sizes, dtype=training.dtype)
    _train_by_reference(training, data, drained_at)
    num_rounds = sum(len(sizes) // count for count in replicas)
    assert 0 < CountingSGD.num_steps < num_rounds, "no update was skipped, or all were"
    _assert_equals_reference(farm, training, sizes, drained_at=drained_at)


@pytest.mark.parametrize(
    ("case_name", "num_stages", "codec", "how"),
    [
        ("mlp", 2, "topk:0.25", {}),
        ("cnn", 3, {"activations": "topk:0.5", "gradients": "topk:0.1"}, {"schedule": "vertical_sync"}),
        ("mlp", 2, {"activations": "int8", "gradients": "topk:0.25"}, {"schedule": "flush"}),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_what_topk_has_left_out_is_sent_after(
    farm: Farm, case_name: str, num_stages: int, codec: Any, how: dict[str, Any]
) -> None:
    training = Training(case_name, num_stages, dtype=torch.float32, **how)
    data = _Growing(training.case, [3, 3, 4, 4, 3, 6, 4], dtype=training.dtype)
    result, state = farm.results(train_in_pipeline, training, num_ranks=num_stages, data=data, codec=codec)[0]
    assert result.drained_at == [2, 5]
    oracle = {"across_cut": CodecOracle(codec)}
    expected, expected_state = _train_by_reference(training, data, result.drained_at, **oracle)
    assert_same_numbers(result.losses, state, expected.losses, expected_state, tolerance(training.dtype))
    assert_memory_as_predicted(result)


@pytest.mark.parametrize(
    ("replicas", "optimizer"),
    [((2, 1), "adam"), ((1, 2), "sgd"), ((2, 2), "adam"), ((3, 1), "sgd"), ((1, 2, 1), "adam")],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_asynchronous_shards_have_all_gradients_before(
    farm: Farm, replicas: tuple[int, ...], optimizer: str
) -> None:
    training = Training("cnn", len(replicas), replicas=replicas, sync="asp", optimizer=OPTIMIZERS[optimizer])
    data = _Growing(training.case, [3, 3, 3, 4, 4, 3, 3, 6, 5])
    result, state = farm.results(train_in_pipeline, training, num_ranks=training.num_workers, data=data)[0]
    multiple = math.lcm(*replicas)
    assert result.drained_at == [3 // multiple * multiple, 7 // multiple * multiple]
    orders = {"update_orders": result.update_orders}
    expected, expected_state = _train_by_reference(training, data, result.drained_at, **orders)
    assert_same_numbers(result.losses, state, expected.losses, expected_state, 1e-9)
    assert result.versions == expected.versions
    assert_memory_as_predicted(result)
    for stage, reads in enumerate(result.updates_read):
        assert len(reads) == (len(result.losses) if replicas[stage] > 1 else 0)
        for first in result.drained_at if reads else []:
            assert reads[first : first + replicas[stage]] == [(first, first)] * replicas[stage]


@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
def test_a_spare_keeps_its_shard_and_the_state_of_it(farm: Farm, is_native: bool) -> None:
    native = functools.partial(pipedream.optim.Adam, lr=0.01) if is_native else None
    training = Training("mlp", 2, replicas=(2, 1), spares=(1, 0), optimizer=OPTIMIZERS["adam"])
    _assert_equals_reference(farm, training, [3, 3, 3, 4, 4, 3, 3, 6, 5], drained_at=[2, 6], native=native)


def test_what_replicas_tie_across_stages_goes_on(farm: Farm) -> None:
    training = Training("tied_apart", 2, replicas=(2, 1), optimizer=OPTIMIZERS["adam"])
    _assert_equals_reference(farm, training, [3, 3, 3, 4, 4, 3, 6, 5, 5], drained_at=[2, 6])


def test_one_in_the_first_round_is_planned_for_before_any_is_trained(farm: Farm) -> None:
    training = Training("cnn", 2, replicas=(2, 1))
    _assert_equals_reference(farm, training, [3, 4, 3, 3, 3], drained_at=[0])


def test_a_rank_beyond_the_plan_hears_of_it(farm: Farm) -> None:
    _assert_equals_reference(farm, Training("cnn", 2), [3, 3, 4, 3], drained_at=[2], num_ranks=3)


def test_local_workers_say_so_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    training = Training("transformer", 2)
    data = torch.utils.data.DataLoader(
        training.case.data(2, torch.float64)[:1] + _larger(training.case), batch_size=None
    )
    result, state = train_in_pipeline(training, data=data)
    assert result.drained_at == [1]
    expected, expected_state = _train_by_reference(training, data, [1])
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "planned" in line]
    assert (
        "minibatch 1 is larger than planned (inputs (9, 5), targets (9, 5)): the memory was planned again"
        in line
    )
    assert "plan = plan.fitting(batch)" in line


def _larger(case: Case) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [case.make_batch(generator, torch.float64, size) for size in (9, 4, 9)]


class _OneMemory:
    """Yields all minibatches of one size in the same memory. So each overwrites the previous one of its
    size.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self.cannot_be_sent = threading.Lock()

    def __iter__(self) -> Iterator[Batch]:
        memory: dict[int, Batch] = {}
        for inputs, targets in self._batches:
            held = memory.setdefault(len(inputs), (inputs.clone(), targets.clone()))
            held[0].copy_(inputs)
            held[1].copy_(targets)
            yield held


@pytest.mark.parametrize(
    ("replicas", "once", "how"),
    [
        ((1, 1), True, {}),
        ((1, 1, 1), False, {"epochs": 2, "schedule": "vertical_sync"}),
        ((2, 1), False, {"autocast": "float16", "dtype": torch.float32}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_what_the_caller_forwards_is_planned_for(
    capfd: pytest.CaptureFixture[str], replicas: tuple[int, ...], once: bool, how: dict[str, Any]
) -> None:
    training = Training("mlp", len(replicas), replicas=replicas, **how)
    generator = torch.Generator().manual_seed(7)
    sizes = [3, 3, 3, 5, 4, 5, 3, 8, 3]
    batches = [training.case.make_batch(generator, training.dtype, size) for size in sizes]
    data: Any = iter(batches) if once else _OneMemory(batches)
    result, state = train_in_pipeline(training, data=data)
    assert "forwarded" in result.data_sources[0]
    multiple = math.lcm(*replicas)
    assert result.drained_at == [3 // multiple * multiple, 7 // multiple * multiple]
    expected, expected_state = _train_by_reference(training, batches, result.drained_at)
    relative = tolerance(training.dtype)
    assert_same_numbers(result.losses, state, expected.losses, expected_state, relative)
    assert result.versions == expected.versions
    assert_memory_as_predicted(result)
    lines = [line for line in capfd.readouterr().err.splitlines() if "planned again" in line]
    assert [line.partition(" is larger")[0] for line in lines] == ["minibatch 3", "minibatch 7"]


class _Tokens:
    """Dicts of tokens of shape (size, length)."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        self._shapes = shapes
        self.cannot_be_sent = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        for index, shape in enumerate(self._shapes):
            generator = torch.Generator().manual_seed(index)
            yield torch.randint(13, shape, generator=generator), torch.randint(13, shape, generator=generator)


def test_forwarded_kinds_stay_apart_and_one_that_does_not_fit_is_refused() -> None:
    shapes = [(2, 8), (8, 2), (4, 3), (3, 12), (8, 2), (64, 64)]
    training = Training("transformer", 2)
    plan = training.plan.fitting(*_Tokens(*shapes[:2]), apart=True)

    def run(data: Any, **options: Any) -> RunResult:
        return pipedream.run(training.model(), plan, **training.options() | options | {"data": data})

    fitting = run(_Tokens(*shapes[:-1]))
    assert fitting.drained_at == [3]
    assert_memory_as_predicted(fitting)
    limit = max(_counted_bytes(fitting))
    with pytest.raises(ValueError, match="minibatch 5 is larger than planned") as refused:
        run(_Tokens(*shapes), memory=limit)
    assert "inputs (64, 64)" in str(refused.value)
    assert "there is no plan for it: memory is" in str(refused.value)


class _Lengths:
    """Minibatches of texts that become longer and fewer."""

    def __iter__(self) -> Iterator[Batch]:
        for index, (size, length) in enumerate([(4, 3), (2, 5), (4, 4), (1, 12), (2, 9), (3, 9)]):
            tokens = torch.randint(13, (size, length), generator=torch.Generator().manual_seed(index))
            yield tokens, tokens.flip(1)


def test_fewer_and_longer_texts_are_planned_for_where_they_have_more_tokens(farm: Farm) -> None:
    training = Training("transformer", 2, schedule="flush")
    result, state = farm.results(train_in_pipeline, training, num_ranks=2, data=_Lengths())[0]
    # Memory is planned for (4, 3), then for (4, 5), then for (4, 12). (2, 5) is planned for as (4, 5),
    # although it has fewer tokens.
    assert result.drained_at == [1, 3]
    expected, expected_state = _train_by_reference(training, _Lengths(), [1, 3])
    assert_same_numbers(result.losses, state, expected.losses, expected_state, 1e-9)


class _Attention(nn.Module):
    """Attention, whose saved tensors grow with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class _Budget:
    """Minibatches of these (size, length)."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        self.shapes = shapes

    def __iter__(self) -> Iterator[Batch]:
        for index, shape in enumerate(self.shapes):
            generator = torch.Generator().manual_seed(index)
            yield torch.randn(*shape, 8, generator=generator), torch.randn(*shape, 8, generator=generator)


_LONG, _WIDE = (2, 128), (16, 16)


def train_budget(
    *shapes: tuple[int, int], fitting: str = "", num_replicas: int = 1, **options: Any
) -> RunResult:
    torch.manual_seed(0)
    plan = pipedream.Plan.replicated(4, (num_replicas, 1))
    if fitting:
        plan = plan.fitting(*_Budget(_LONG, _WIDE), apart=fitting == "apart")
    return pipedream.run(
        nn.Sequential(*(_Attention() for _ in range(4))),
        plan,
        data=_Budget(*shapes),
        loss_fn=nn.functional.mse_loss,
        optimizer=OPTIMIZERS["sgd"],
        schedule="flush",
        seed=1,
        progress=False,
        **options,
    )


def _train_with_two_kinds(*shapes: tuple[int, int]) -> RunResult:
    with mock.patch.object(planning_shapes, "NUM_KINDS_MAX", 2):
        return train_budget(*shapes, fitting="apart")


def test_one_kind_too_many_is_planned_for_as_large_as_the_one_that_is_smallest_with_it(farm: Farm) -> None:
    # The plan has two kinds of shapes, (2, 128) and (16, 16), and may not have a third. So (6, 64) is merged
    # into the kind of (2, 128), and later (17, 2) into that of (16, 16).
    shapes = [_WIDE, (6, 64), (6, 128), (17, 2), (17, 16)]
    result = farm.results(_train_with_two_kinds, *shapes, num_ranks=2)[0]
    assert result.drained_at == [1, 3]
    assert_memory_as_predicted(result)


def test_a_kind_with_fewer_samples_than_microbatches_is_planned_for(farm: Farm) -> None:
    farm.results(train_budget, _WIDE, num_ranks=2, fitting="apart", microbatches=4)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_as_many_elements_of_another_shape_are_planned_for(farm: Farm, num_replicas: int) -> None:
    # (2, 128) has as many elements as (16, 16), but needs 8 times the memory. So it must not be taken for
    # equally large.
    shapes = [_WIDE, _WIDE, _LONG, _WIDE]
    ranks = num_replicas + 1
    result = farm.results(train_budget, *shapes, num_ranks=ranks, num_replicas=num_replicas)[0]
    assert result.drained_at == [2]
    assert_memory_as_predicted(result)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_few_long_and_many_short_texts_take_the_memory_of_the_larger(farm: Farm, num_replicas: int) -> None:
    how: dict[str, Any] = {"num_ranks": num_replicas + 1, "num_replicas": num_replicas}
    shapes = [(8, 32), _WIDE, _LONG, (4, 64)]
    apart = farm.results(train_budget, *shapes, fitting="apart", **how)[0]
    together = farm.results(train_budget, *shapes, fitting="together", **how)[0]
    longest = farm.results(train_budget, _LONG, _LONG, **how)[0]
    assert apart.drained_at == together.drained_at == []
    assert_memory_as_predicted(apart)
    stash = [
        [terms["stashed activations"]["predicted"] for terms in r.memory] for r in (apart, together, longest)
    ]
    assert stash[0] == stash[2]
    assert all(one < 0.2 * other for one, other in zip(stash[0], stash[1], strict=True))


# Memory.


def _deep() -> nn.Sequential:
    """Returns a model that is narrow at the cut, and wide inside the stages."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pairs = [(64, 256), (256, 64)] * 4
        return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())))


class _Rows:
    def __init__(self, *counts: int) -> None:
        self._counts = counts

    def __iter__(self) -> Iterator[Batch]:
        for index, count in enumerate(self._counts):
            generator = torch.Generator().manual_seed(index)
            yield torch.randn(count, 64, generator=generator), torch.randn(count, 64, generator=generator)


def _train_rows(*counts: int, **options: Any) -> RunResult:
    return _run_rows(_deep(), *counts, **options)


def _run_rows(model: nn.Sequential, *counts: int, num_stages: int = 2, **options: Any) -> RunResult:
    return pipedream.run(
        model,
        pipedream.Plan.straight(16, num_stages),
        data=_Rows(*counts),
        loss_fn=nn.functional.mse_loss,
        optimizer=OPTIMIZERS["sgd"],
        seed=1,
        progress=False,
        **options,
    )


def _counted_bytes(result: RunResult) -> list[int]:
    """Returns each worker's predicted bytes, summed over the terms of `memory`."""
    return [sum(figures["predicted"] or 0 for figures in terms.values()) for terms in result.memory]


def test_one_that_does_not_fit_is_refused_by_its_shapes_and_every_term(farm: Farm) -> None:
    limit = max(_counted_bytes(farm.results(_train_rows, 512, num_ranks=2)[0]))
    for outcome in farm.run(_train_rows, 512, 512, 8192, 512, num_ranks=2, memory=limit):
        assert isinstance(outcome.error, ValueError), outcome
        said = str(outcome.error)
        assert "\n" not in said
        assert "minibatch 2 is larger than planned (inputs (8192, 64), targets (8192, 64))" in said
        assert "there is no plan for it: memory is" in said
        for term in ("stashed activations", "weight versions", "largest transient", "parameter gradients"):
            assert term in said


def test_one_worker_with_a_limit_plans_again_and_refuses_too(farm: Farm) -> None:
    # A single worker has no cuts. It must still check sizes, to keep to the limit with a larger minibatch.
    large = farm.results(_train_rows, 512, 2048, 512, num_ranks=1, num_stages=1, memory="1GiB")[0]
    assert large.drained_at == [1]
    assert_memory_as_predicted(large)
    assert large.losses == farm.results(_train_rows, 512, 2048, 512, num_ranks=1, num_stages=1)[0].losses
    small = farm.results(_train_rows, 512, num_ranks=1, num_stages=1)[0]
    limit = max(_counted_bytes(small))
    (outcome,) = farm.run(_train_rows, 512, 2048, 512, num_ranks=1, num_stages=1, memory=limit)
    assert isinstance(outcome.error, ValueError), outcome
    assert "minibatch 1 is larger than planned (inputs (2048, 64), targets (2048, 64))" in str(outcome.error)


def test_recompute_is_chosen_again(farm: Farm) -> None:
    small = farm.results(_train_rows, 256, num_ranks=2)[0]
    large = farm.results(_train_rows, 2048, num_ranks=2)[0]
    limit = max(_counted_bytes(large)) - 1
    assert limit > max(_counted_bytes(small))
    free = farm.results(_train_rows, 256, 256, 2048, 256, num_ranks=2)[0]
    limited = farm.results(_train_rows, 256, 256, 2048, 256, num_ranks=2, memory=limit)[0]
    assert (small.recompute, free.recompute) == ([False, False], [False, False])
    assert any(limited.recompute)
    assert free.drained_at == limited.drained_at == [2]
    assert limited.losses == free.losses


def _count_pools() -> list[tuple[int, int]]:
    """Trains. Returns how many loops and how many slots of weight versions are alive in this process, at each
    forward.
    """
    loops: list[weakref.ref[Any]] = []
    slots: list[weakref.ref[Any]] = []
    make_loop, make_versions = stage_loop.WorkerLoop.__init__, weights.WeightVersions.__init__
    counts = []

    def note_loop(self: Any, *args: Any, **kwargs: Any) -> None:
        make_loop(self, *args, **kwargs)
        loops.append(weakref.ref(self))

    def note_versions(self: Any, *args: Any, **kwargs: Any) -> None:
        make_versions(self, *args, **kwargs)
        slots.extend(weakref.ref(slot) for slot in self.slots)

    def count(*_: Any) -> None:
        counts.append(tuple(sum(ref() is not None for ref in refs) for refs in (loops, slots)))

    model = _deep()
    for layer in (model[0], model[-1]):
        layer.register_forward_hook(count)
    gc.collect()
    gc.disable()  # the pool must be freed at once, not when garbage is collected
    try:
        with (
            mock.patch.object(stage_loop.WorkerLoop, "__init__", note_loop),
            mock.patch.object(weights.WeightVersions, "__init__", note_versions),
        ):
            _run_rows(model, 8, 8, 16, 8, 32, 8)
    finally:
        gc.enable()
    return counts


def test_the_pool_of_one_plan_is_gone_before_the_next_is_made(farm: Farm) -> None:
    # Modules that torch imports in the first run would keep its frames.
    farm.results(_count_pools, num_ranks=2)
    for rank, counts in enumerate(farm.results(_count_pools, num_ranks=2)):
        # The rehearsal has no loop. The training has one loop, and as many slots as versions.
        assert set(counts) == {(0, 0), (1, 2 - rank)}


class _UnlikeAtRank1(_Rows):
    """Minibatches of which the third has fewer samples at rank 1 than at rank 0."""

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(super().__iter__()):
            is_cut = index == 2 and os.environ["RANK"] == "1"
            yield tuple(tensor[:8] for tensor in batch) if is_cut else batch


def _train_unlike() -> None:
    pipedream.run(
        _deep(),
        pipedream.Plan.straight(16, 2),
        data=_UnlikeAtRank1(8, 8, 16, 8),
        loss_fn=nn.functional.mse_loss,
        optimizer=OPTIMIZERS["sgd"],
        progress=False,
    )


def test_workers_that_do_not_agree_on_it_have_read_different_data(farm: Farm) -> None:
    for outcome in farm.run(_train_unlike, num_ranks=2):
        assert isinstance(outcome.error, DataMismatch), outcome
        assert "minibatch 2 is not the same data" in str(outcome.error)
