"""Compares a run with the oracle: losses, weights, the versions that it must read, and predicted memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farm import Farm
from pipedream import RunResult, reference
from pipedream.budget.memory import MODEL, STASH, TRANSIENT
from training import (
    State,
    Training,
    assert_close_losses,
    assert_close_state,
    expected_microbatch_versions,
    expected_versions,
    model_of_oracle,
    state_of,
    tolerance,
    train_by_reference,
    train_in_pipeline,
)

__all__ = ["assert_equals_reference", "assert_memory_as_predicted", "assert_same_numbers"]


def assert_equals_reference(
    farm: Farm,
    training: Training,
    *,
    native: Any = None,
    data: Any = None,
    relative: float | None = None,
    train: Any = train_in_pipeline,
    **options: Any,
) -> tuple[RunResult, State]:
    """Runs the training at as many ranks as its plan has workers. Returns rank 0's result and state.

    - native: the pipeline's optimizer, if it is not the oracle's.
    - data: replaces the training's own data, for both.
    - options: arguments of the pipeline only.
    - relative: the allowed difference. By default it allows another order of additions.
    - train: the function that the ranks call.
    """
    if native is not None:
        options["optimizer"] = native
    if data is not None:
        options["data"] = data
    result, state = farm.results(train, training, num_ranks=training.num_workers, **options)[0]
    losses, expected_state = _expect(training, data)
    assert_same_numbers(result.losses, state, losses, expected_state, relative or tolerance(training.dtype))
    _assert_versions(training, result, len(losses))
    assert_memory_as_predicted(result)
    return result, state


def _expect(training: Training, data: Any) -> tuple[list[float], State]:
    if data is None:
        result, state = train_by_reference(training)
        _assert_versions(training, result, len(result.losses))
        return result.losses, state
    model = model_of_oracle(training)
    losses = reference.run(model, training.plan, **training.options() | {"data": data}).losses
    return losses, state_of(model)


def _assert_versions(training: Training, result: Any, num_minibatches: int) -> None:
    how: dict[str, Any] = {
        name: getattr(training, name) for name in ("schedule", "staleness", "microbatches")
    }
    assert result.versions == expected_versions(training.plan, num_minibatches, **how)
    expected = expected_microbatch_versions(training.plan, num_minibatches, **how)
    assert result.microbatch_versions == expected


def assert_same_numbers(
    losses: list[float], state: State, expected: list[float], expected_state: State, relative: float
) -> None:
    assert_close_losses(losses, expected, relative)
    assert_close_state(state, expected_state, relative)


def assert_memory_as_predicted(result: RunResult, unmeasured: Mapping[int, set[str]] | None = None) -> None:
    """Asserts that no memory term of any worker exceeded its prediction.

    unmeasured: for each rank, all terms that have neither a prediction nor a peak.
    """
    for rank, (name, terms) in enumerate(zip(result.worker_names, result.memory, strict=True)):
        assert {TRANSIENT, MODEL} | (set() if "spare" in name else {STASH}) <= terms.keys(), name
        blank = {term for term, figures in terms.items() if None in figures.values()}
        assert blank == (unmeasured or {}).get(rank, set()), name
        for term, figures in terms.items():
            predicted, peak = figures["predicted"], figures["peak"]
            if term in blank:
                assert predicted is peak is None, f"{name}, {term}: peak {peak}, predicted {predicted}"
            else:
                assert peak <= predicted, f"{name}, {term}: peak {peak}, predicted {predicted}"
