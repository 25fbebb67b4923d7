"""Profiles time microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipedream.planning.layer_profile import MicrobatchTimes
from pipedream.profiling.microbatch_timing import microbatch_times
from pipedream.profiling.profiler import profile
from pipedream.profiling.timed_passes import make_clock
from torch import nn


class _Passes:
    """Two layers whose times are a function of the number of samples. The second layer takes twice as long as
    the first, and a backward three times as long as a forward.
    """

    layer_names = ("a", "b")

    def __init__(self, pass_ms: Callable[[int], float]) -> None:
        self._pass_ms = pass_ms

    def run(self, minibatch: int, inputs: Any, targets: Any, clock: Any) -> tuple[list[float], list[float]]:
        ms = self._pass_ms(len(inputs))
        return [ms, 2 * ms], [3 * ms, 6 * ms]


def times_of(
    pass_ms: Callable[[int], float],
    num_samples: int = 8,
    *,
    whole_ms: float | None = None,
    seconds: float | None = None,
) -> list[tuple[MicrobatchTimes, ...]] | None:
    data = torch.zeros(num_samples, 2)
    whole = 12 * pass_ms(num_samples) if whole_ms is None else whole_ms
    clock = make_clock(torch.device("cpu"))
    passes: Any = _Passes(pass_ms)
    return microbatch_times(passes, data, data, clock, whole_ms=whole, rounds=3, seconds=seconds)


def assert_close(found: list[tuple[MicrobatchTimes, ...]] | None, pass_ms: dict[int, float]) -> None:
    assert found is not None
    for times, factor in zip(found, (1, 2), strict=True):
        assert [row.num_microbatches for row in times] == list(pass_ms)
        assert [row.forward_ms for row in times] == pytest.approx([factor * ms for ms in pass_ms.values()])
        assert [row.backward_ms for row in times] == pytest.approx([3 * row.forward_ms for row in times])


def test_a_microbatch_takes_what_all_pieces_take_on_the_average() -> None:
    assert_close(times_of(lambda samples: 1 + samples), {2: 5, 4: 3, 8: 2})
    # Six samples cannot be cut into four pieces. Three pieces have two samples each.
    assert_close(times_of(lambda samples: 1 + samples, 6), {2: 4, 3: 3})


def test_times_are_in_the_measure_of_the_profiles_own_mean() -> None:
    assert_close(times_of(lambda samples: 1 + samples, whole_ms=2 * 12 * 9), {2: 10, 4: 6, 8: 4})


def test_pieces_that_seem_faster_in_sum_share_the_mean_of_their_neighbours() -> None:
    assert_close(times_of(lambda samples: {8: 8, 4: 5, 2: 2, 1: 2}[samples]), {2: 4.5, 4: 2.25, 8: 2})
    # If the whole minibatch is one of these neighbours, its time is divided among the pieces.
    assert_close(times_of(lambda samples: {8: 8, 4: 3, 2: 1.75, 1: 0.875}[samples]), {2: 4, 4: 2, 8: 1})


def test_a_piece_that_the_model_refuses_ends_the_numbers_of_microbatches() -> None:
    def pass_ms(samples: int) -> float:
        if samples == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return 1.0

    assert_close(times_of(pass_ms), {2: 1, 4: 1})


def test_however_short_the_time_is_one_piece_of_each_size_is_timed() -> None:
    sizes: list[int] = []

    def pass_ms(samples: int) -> float:
        sizes.append(samples)
        return 1 + samples

    for seconds in (0.8, 0.4, 0.0):
        assert_close(times_of(pass_ms, seconds=seconds, whole_ms=108.0), {2: 5, 4: 3, 8: 2})
        assert sizes == [4, 2, 1, 8, 4, 2, 1]
        sizes.clear()


def test_a_minibatch_of_one_sample_has_no_microbatches_to_time() -> None:
    assert times_of(lambda samples: 1.0, 1) == [(), ()]


def test_a_profile_has_what_microbatches_of_its_model_take() -> None:
    """The layer Work takes the same time for any number of samples, and batch norm refuses a single
    sample.
    """

    class Work(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sum(range(100_000))
            return x

    model = nn.Sequential(nn.Linear(4, 4), Work(), nn.BatchNorm1d(4))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = [(torch.randn(8, 4), torch.randn(8, 4))] * 2
    found = profile(model, data, nn.functional.mse_loss, minibatches=2)
    assert found.microbatches_timed == 4
    assert found.microbatch_counts() == [1, 2, 4]
    assert found.layers[1].compute_ms_with(4) > 2 * found.layers[1].compute_ms
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
