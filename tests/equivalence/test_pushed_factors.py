"""Tests that a run whose gradients are pushed as factors has the oracle's numbers and equal replicas, and
sends fewer bytes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from oracle import assert_equals_reference, assert_memory_as_predicted, assert_same_numbers
from pipedream import reference
from training import (
    OPTIMIZERS,
    Training,
    Unsized,
    assert_equal_state,
    model_of_oracle,
    state_of,
    train_in_pipeline,
)

_FACTORS = {"pushes": "factors"}
_BATCH, _TOKENS = 6, 30
# For each weight that is factored with 2 replicas: outputs, inputs, and how often a minibatch uses it.
_FACTORED = {
    "connected": {"3.weight": (128, 256, 1), "5.weight": (64, 128, 1)},
    "words": {"1.layer.weight": (128, 128, 2), "2.weight": (192, 128, 1)},
}
_DATA_PARALLEL: dict[str, Any] = {"schedule": "data_parallel"}


def _training(case_name: str, replicas: tuple[int, ...], **how: Any) -> Training:
    return Training(case_name, len(replicas), replicas=replicas, **how)


# There are 7 minibatches by default. The last one has half the samples. With 2 or 3 replicas it alone makes
# the last update.
@pytest.mark.parametrize(
    ("case_name", "replicas", "how"),
    [
        ("connected", (2,), _DATA_PARALLEL),
        ("connected", (3,), _DATA_PARALLEL),
        ("words", (2,), _DATA_PARALLEL | {"dtype": torch.float32}),
        ("words", (2,), _DATA_PARALLEL | {"recompute": True}),
        ("connected", (2, 1), {}),
        ("connected", (1, 2), {}),
        ("words", (2, 1), {"sync": "ssp", "staleness": 1, "num_minibatches": 11}),
        ("connected", (2, 1), {"schedule": "2bw", "microbatches": 6, "short_last": False}),
        ("connected", (2, 1), {"schedule": "flush", "microbatches": 3}),
        ("connected", (3, 2), {"schedule": "flush", "num_minibatches": 11}),
        ("connected", (2,), _DATA_PARALLEL | {"max_grad_norm": 0.02}),
        ("connected", (2, 1), {"schedule": "flush", "max_grad_norm": 0.02}),
        ("connected", (2,), _DATA_PARALLEL | {"optimizer": OPTIMIZERS["adam"]}),
        (
            "connected",
            (2,),
            _DATA_PARALLEL | {"optimizer": functools.partial(torch.optim.Adafactor, lr=0.05)},
        ),
    ],
    ids=[
        *("2 replicas", "3 replicas", "tokens", "recompute", "2-1", "1-2", "ssp", "2bw", "microbatches"),
        *("minibatches add up", "clipped", "clipped over stages", "adam", "whole tensors"),
    ],
)
def test_factors_give_the_references_result(
    farm: Farm, case_name: str, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    result, _ = assert_equals_reference(farm, _training(case_name, replicas, **how), codec=_FACTORS)
    names = {term for terms in result.memory for term in terms if "pushed factors" in term}
    num_pairs = sum(count * (count - 1) for count in replicas)
    assert len(names) == num_pairs


def test_native_optimizers_step_factored_weights(farm: Farm) -> None:
    arguments = {"lr": 0.05, "momentum": 0.9}
    training = _training(
        "connected", (2,), optimizer=functools.partial(torch.optim.SGD, **arguments), **_DATA_PARALLEL
    )
    native = functools.partial(pipedream.optim.SGD, **arguments)
    assert_equals_reference(farm, training, native=native, codec=_FACTORS)


@pytest.mark.parametrize(
    ("replicas", "codec"),
    [((3,), _FACTORS), ((2, 1), {"pushes": "factors:bf16"})],
    ids=["3", "2-1, the rest encoded"],
)
def test_all_replicas_end_with_the_same_bits(
    farm: Farm, replicas: tuple[int, ...], codec: dict[str, str]
) -> None:
    how = _DATA_PARALLEL if len(replicas) == 1 else {}
    training = _training("connected", replicas, dtype=torch.float32, **how)
    found = farm.results(
        train_in_pipeline, training, codec=codec, gather="none", num_ranks=training.num_workers
    )
    states = [state for _, state in found[: replicas[0]]]
    own = [f"{layer}." for layer in range(8 if len(replicas) == 1 else 4)]
    for state in states:
        kept = {name: state[name] for name in state if name.startswith(tuple(own))}
        assert_equal_state(kept, {name: states[0][name] for name in kept})
        assert kept


@pytest.mark.parametrize("case_name", ["connected", "words"])
def test_as_many_bytes_are_saved_as_factors_are_smaller(farm: Farm, case_name: str) -> None:
    num_rounds, num_replicas, itemsize = 10, 2, 8
    training = _training(
        case_name, (num_replicas,), num_minibatches=2 * num_rounds, short_last=False, **_DATA_PARALLEL
    )
    dense, _ = farm.results(train_in_pipeline, training, num_ranks=2)[0]
    factored, _ = farm.results(train_in_pipeline, training, codec=_FACTORS, num_ranks=2)[0]
    rows = _TOKENS if case_name == "words" else _BATCH
    num_elements = sum(parameter.numel() for parameter in training.model().parameters())
    # The bytes that all replicas together send for each element of a weight, and for each element of its
    # factors.
    of_weights = 2 * (num_replicas - 1) * itemsize
    of_factors = num_replicas * (num_replicas - 1) * itemsize
    saved = sum(
        of_weights * outputs * inputs - of_factors * rows * uses * (outputs + inputs)
        for outputs, inputs, uses in _FACTORED[case_name].values()
    )
    assert dense.bytes_synced / num_rounds == pytest.approx(of_weights * num_elements, rel=0.02)
    assert (dense.bytes_synced - factored.bytes_synced) / num_rounds == pytest.approx(saved, rel=0.02)
    assert saved > 0.2 * of_weights * num_elements


def _with_a_larger_one(training: Training) -> list[Any]:
    batches = list(training.data())
    return [*batches[:2], tuple(torch.cat([part, part]) for part in batches[2]), *batches[3:]]


def test_factors_are_planned_for_the_largest_minibatch_of_a_list(farm: Farm) -> None:
    training = _training("connected", (2,), **_DATA_PARALLEL)
    assert_equals_reference(farm, training, data=_with_a_larger_one(training), codec=_FACTORS)


@pytest.mark.parametrize(
    ("case_name", "replicas", "how"),
    [
        ("connected", (2,), _DATA_PARALLEL),
        ("connected", (2, 1), {}),
        ("connected", (3, 1), {"schedule": "flush"}),
        ("words", (2, 1), {"microbatches": 2}),
    ],
    ids=str,
)
def test_a_minibatch_with_more_rows_is_planned_for_and_what_was_chosen_stays_factors(
    farm: Farm, case_name: str, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    training = _training(case_name, replicas, **how)
    data = Unsized(_with_a_larger_one(training))
    found = farm.results(
        train_in_pipeline, training, data=data, codec=_FACTORS, num_ranks=training.num_workers
    )
    result, state = found[0]
    drained_at = [2 - 2 % math.lcm(*replicas)]
    assert result.drained_at == drained_at
    model = model_of_oracle(training)
    with torch.random.fork_rng():
        expected = reference.run(
            model, training.plan, **training.options() | {"data": data, "drained_at": drained_at}
        )
    assert_same_numbers(result.losses, state, expected.losses, state_of(model), 1e-9)
    assert_memory_as_predicted(result)
    (size,) = {
        figures["predicted"]
        for terms in result.memory
        for term, figures in terms.items()
        if term.startswith("pushed factors of stage 0 replica 0")
    } or {0}
    assert size > 0


def test_autocast_pushes_no_factors(farm: Farm) -> None:
    training = _training("connected", (2,), dtype=torch.float32, autocast="bfloat16", **_DATA_PARALLEL)
    dense, expected = farm.results(train_in_pipeline, training, num_ranks=2)[0]
    found, state = farm.results(train_in_pipeline, training, codec=_FACTORS, num_ranks=2)[0]
    assert found.losses == dense.losses
    assert_equal_state(state, expected)
    assert found.bytes_synced == pytest.approx(dense.bytes_synced, rel=0.02)
