"""Tests that a run has the same numbers if its losses are read late and a device times its items. A stand-in
plays the device.

On the host, the work is done when a call returns. The stand-in reports the end only later, as a GPU would.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream import NonFiniteLoss, RunResult
from pipedream.report.losses import LateLossRecord
from pipedream.stage.device_clock import DeviceClock
from training import State, Training, assert_equal_state, train_in_pipeline


class _Copier:
    def begin(self, loss: torch.Tensor) -> None:
        self._copied = loss.detach().clone()

    def finish(self) -> float:
        return self._copied.item()


class _Event:
    """An event that counts as passed when it is asked for the third time."""

    def record(self) -> None:
        self._passed_ns, self._num_queries = time.monotonic_ns(), 0

    def query(self) -> bool:
        self._num_queries += 1
        return self._num_queries > 2

    def synchronize(self) -> None:
        self._num_queries = 2

    def elapsed_time(self, end_event: _Event) -> float:
        return (end_event._passed_ns - self._passed_ns) / 1e6


def _on_a_late_device(train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pipedream.stage.stage_loop.make_loss_record",
            lambda on_nonfinite, on_minibatch, _: LateLossRecord(on_nonfinite, on_minibatch, _Copier()),
        )
        patch.setattr(
            "pipedream.stage.stage_loop.make_device_clock", lambda _, tell: DeviceClock(_Event, tell)
        )
        return train(*args, **kwargs)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"schedule": "gpipe", "microbatches": 4},
        {"schedule": "2bw", "microbatches": 4, "recompute": True},
        {"in_flight": (3, 2)},
    ],
    ids=lambda how: "-".join(map(str, how.values())) or "pipedream",
)
def test_a_run_on_a_late_device_has_the_same_numbers_and_times_that_add_up(
    farm: Farm, how: dict[str, Any]
) -> None:
    training = Training("mlp", 2, num_minibatches=5, epochs=2, short_last=False, **how)
    expected, expected_state = farm.results(train_in_pipeline, training, num_ranks=2)[0]
    result: RunResult
    state: State
    result, state = farm.results(_on_a_late_device, train_in_pipeline, training, num_ranks=2)[0]
    assert result.losses == expected.losses
    assert result.epoch_losses == expected.epoch_losses
    assert_equal_state(state, expected_state)
    assert 0 < result.bubble_share < 1
    assert all(overhead_us >= 0 for overhead_us in result.overhead_us)
    for spans, wanted in zip(result.spans, expected.spans, strict=True):
        assert [span[:4] for span in spans] == [span[:4] for span in wanted]
        ended_ns = 0
        for span in spans:
            assert ended_ns <= span.asked_ns <= span.ready_ns <= span.completed_ns
            assert span.compute_ns == span.completed_ns - span.ready_ns
            assert 0 <= span.wait_ns <= span.ready_ns - span.asked_ns
            ended_ns = span.completed_ns
        assert sum(span.compute_ns for span in spans) > 0


def _until_infinite(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = (outputs - targets).square().mean()
    return loss * math.inf if targets.flatten()[0] == 3 else loss


def _train_to_a_stop(schedule: str) -> tuple[list[float], list[float], bool]:
    """Trains until a loss is infinite. Returns the losses so far, the weights, and whether all weights are
    finite.

    By then the schedule has made the updates of some earlier minibatches.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    data = [(torch.ones(4, 2), torch.full((4, 2), float(i))) for i in range(6)]
    with pytest.raises(NonFiniteLoss, match="the loss of minibatch 3 is inf") as caught:
        pipedream.run(
            model,
            pipedream.Plan.straight(2, 2),
            data=data,
            loss_fn=_until_infinite,
            optimizer=functools.partial(torch.optim.SGD, lr=0.01),
            schedule=schedule,
            microbatches=2 if schedule == "gpipe" else 1,
            progress=False,
        )
    weights = [w for parameter in model.parameters() for w in parameter.detach().flatten().tolist()]
    return list(getattr(caught.value, "losses", [])), weights, all(map(math.isfinite, weights))


@pytest.mark.parametrize("schedule", ["pipedream", "gpipe"])
def test_a_loss_that_is_read_late_stops_the_run_before_it_changes_a_weight(farm: Farm, schedule: str) -> None:
    expected = farm.results(_train_to_a_stop, schedule, num_ranks=2)
    late = farm.results(_on_a_late_device, _train_to_a_stop, schedule, num_ranks=2)
    last_stage, last_stage_late = expected[1], late[1]
    assert last_stage_late == last_stage
    assert all(is_finite for _, _, is_finite in late)
