"""Tests that calibration recovers known costs of the runtime from the spans of short runs. It refuses runs
that tell nothing.
"""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pipedream import Plan, Profile, Stage, calibrate
from pipedream.launch.calibration import calibration_runs
from pipedream.launch.measured_costs import Runs, runtime_costs
from pipedream.planning.item_cost import ItemCost
from pipedream.planning.layer_profile import LayerProfile
from pipedream.report.result import RunResult, WorkSpan
from torch import nn

_OWN_MS = {"FORWARD": 0.25, "BACKWARD": 0.125, "UPDATE": 0.0625}
_PROFILE = Profile(
    (LayerProfile("a", 1.0, 2.0, 4000, 1 << 20), LayerProfile("b", 1.0, 2.0, 0, 1 << 20)), batch_size=8
)
_STRAIGHT = Plan((Stage(0, 0), Stage(1, 1)))


def _spans(
    stage: int,
    m: int,
    forward_ms: float,
    backward_ms: float,
    update_ms: float,
    *,
    later_forward_ms: float | None = None,
    speed: float = 1.0,
    begin_ns: int = 0,
    wait_ms: float = 1.0,
) -> list[WorkSpan]:
    """Returns spans of 20 minibatches. The first forward of each minibatch comes after a wait."""
    spans, now_ns = [], begin_ns
    for minibatch in range(20):
        items = [(kind, part) for part in range(m) for kind in ("FORWARD", "BACKWARD")] + [("UPDATE", 0)]
        for kind, part in items:
            compute_ms = {"FORWARD": forward_ms, "BACKWARD": backward_ms, "UPDATE": update_ms}[kind]
            if kind == "FORWARD" and part and later_forward_ms is not None:
                compute_ms = later_forward_ms
            wait_ns = int(wait_ms * 1e6) if kind == "FORWARD" and not part else 0
            compute_ns, own_ns = (int(ms / speed * 1e6) for ms in (compute_ms, _OWN_MS[kind]))
            ready_ns = now_ns + wait_ns + own_ns // 2
            completed_ns = ready_ns + compute_ns
            spans.append(
                WorkSpan(kind, stage, minibatch, part, now_ns, ready_ns, completed_ns, wait_ns, compute_ns)
            )
            now_ns = completed_ns + own_ns // 2
    return spans


def _results(*spans: list[WorkSpan]) -> list[RunResult]:
    return [cast(RunResult, SimpleNamespace(spans=list(spans)))]


def _known_runs(**changes: Any) -> Runs:
    """Returns runs with known costs. A step costs 0.1 ms, and 0.2 ms per MiB. A copy costs 0.3 ms more per
    MiB. Layers take three times as long as in the profile.
    """
    runs = Runs(
        one=_results(_spans(0, 1, 3.0, 6.0, 0.5)),
        straight=_results(_spans(0, 1, 3.0, 6.0, 0.6), _spans(1, 1, 3.0, 6.0, 0.3)),
        in_turn=[],
        cut={4: _results(*(_spans(stage, 4, 1.75, 1.5, 0.3, later_forward_ms=1.5) for stage in range(2)))},
        shared=_results(*(_spans(replica, 1, 3.0, 6.0, 0.5) for replica in range(2))),
    )
    return runs._replace(**changes)


def test_known_costs_are_recovered_from_spans() -> None:
    costs = runtime_costs(_PROFILE, _STRAIGHT, _known_runs(), num_cores=2)
    assert costs.alone_speed == 1.0
    for name in ("first", "middle", "last"):
        assert costs.positions[name].forward_scale == pytest.approx(3.0, rel=1e-3)
        assert costs.positions[name].backward_scale == pytest.approx(3.0, rel=1e-3)
    # One worker has both layers and takes 3 ms.
    assert costs.positions["only"].forward_scale == pytest.approx(1.5, rel=1e-3)
    # A whole forward takes 3 ms. The first of four microbatches takes 1.75 ms, and each later one 1.5 ms. So
    # 5/3 ms of the 3 ms scale with the size of a microbatch, and the rest does not.
    assert costs.forward_share.first_ms == pytest.approx(4 / 9, rel=1e-3)
    assert costs.forward_share.later_ms == pytest.approx((1.5 - 5 / 12) / 3, rel=1e-3)
    assert costs.forward_share.minibatch_ms == pytest.approx(5 / 9, rel=1e-3)
    assert costs.backward_share.minibatch_ms == pytest.approx(1.0, rel=1e-3)
    assert costs.backward_share.later_ms == pytest.approx(0.0, abs=1e-3)
    assert costs.update_ms == pytest.approx(0.1, rel=1e-2)
    assert costs.update_ms_per_byte * (1 << 20) == pytest.approx(0.2, rel=1e-2)
    assert costs.copy_ms_per_byte * (1 << 20) == pytest.approx(0.3, rel=1e-2)
    # Half of the update's 0.4 ms belongs to the other replica. The rest is for the MiB that each of them
    # exchanges.
    assert costs.sync["UPDATE"].of(1 << 20) == pytest.approx(0.2, rel=1e-2)
    assert costs.sync["FORWARD"].of(1 << 20) == costs.sync["BACKWARD"].of(1 << 20) == 0.0
    for position in costs.positions.values():
        assert position.forward.first(1) == pytest.approx(_OWN_MS["FORWARD"], rel=1e-3)
        assert position.backward.later(4) == pytest.approx(_OWN_MS["BACKWARD"], rel=1e-3)
        assert position.update_ms == pytest.approx(_OWN_MS["UPDATE"], rel=1e-3)
    assert costs.cut_bytes == 4000
    assert all(factors == pytest.approx([1.0] * 20, abs=1e-3) for factors in costs.spread.values())


def test_what_leaves_during_a_backward_is_a_cost_of_the_backward() -> None:
    shared = _results(*(_spans(replica, 1, 3.25, 7.0, 0.5) for replica in range(2)))
    costs = runtime_costs(_PROFILE, _STRAIGHT, _known_runs(shared=shared), num_cores=2)
    assert costs.sync["FORWARD"].of(1 << 20) == pytest.approx(0.25, rel=1e-2)
    assert costs.sync["BACKWARD"].of(1 << 20) == pytest.approx(1.0, rel=1e-2)


def test_items_that_were_done_alone_count_as_beside_the_others() -> None:
    changes = {
        "one": _results(_spans(0, 1, 3.0, 6.0, 0.6, speed=2)),
        "straight": _results(*(_spans(stage, 1, 3.0, 6.0, 0.6) for stage in range(2))),
        "in_turn": _results(
            *(_spans(stage, 1, 3.0, 6.0, 0.6, speed=2, begin_ns=stage * 10**12) for stage in range(2))
        ),
    }
    costs = runtime_costs(_PROFILE, _STRAIGHT, _known_runs(**changes), num_cores=2)
    assert costs.alone_speed == pytest.approx(2.0, rel=1e-3)
    assert costs.positions["only"].forward_scale == pytest.approx(1.5, rel=1e-3)
    assert costs.positions["only"].forward.first(1) == pytest.approx(_OWN_MS["FORWARD"], rel=1e-3)
    # If no worker ran alone, it is not known how much two busy cores slow each other down.
    without = runtime_costs(_PROFILE, _STRAIGHT, _known_runs(**changes | {"in_turn": []}), num_cores=2)
    assert without.alone_speed == 1.0


def test_what_waiting_costs_is_told_apart_from_what_items_take() -> None:
    # After a wait, an item takes longer by half of a whole minibatch's time.
    waits = {"wait_ms": 2.0}
    changes = {
        "straight": _results(*(_spans(stage, 1, 3.0, 6.0, 0.5, wait_ms=0.0) for stage in range(2))),
        "in_turn": _results(
            *(
                _spans(stage, 1, 3.0, 6.0, 0.5, speed=2 / 3, begin_ns=stage * 10**12, **waits)
                for stage in range(2)
            )
        ),
        "cut": {
            4: _results(
                *(
                    _spans(stage, 4, 1.0 + 1.5, 2.0 + 3.0, 0.75, later_forward_ms=1.0, **waits)
                    for stage in range(2)
                )
            )
        },
    }
    costs = runtime_costs(_PROFILE, _STRAIGHT, _known_runs(**changes), num_cores=2)
    assert costs.alone_speed == 1.0
    [waking] = costs.waking
    assert waking.after_ms == pytest.approx(2.0)
    assert waking.shares == {kind: pytest.approx(0.5) for kind in ("FORWARD", "BACKWARD", "UPDATE")}
    assert costs.positions["first"].forward_scale == pytest.approx(3.0, rel=1e-3)
    # Only the first microbatch's forward comes after a wait.
    own_ms = _OWN_MS["FORWARD"]
    awake = 1 - 0.5 * (3.0 + own_ms) / (2.5 + own_ms)
    assert costs.forward_share.first(4) * 3.0 == pytest.approx(2.5 * awake, rel=1e-3)
    assert costs.forward_share.later(4) * 3.0 == pytest.approx(1.0, rel=1e-3)


def test_what_long_waits_cost_is_seen_after_a_pause() -> None:
    # Each worker is twice as fast if it computes alone. After a wait of 10 ms items take 50 % longer, and
    # after a wait of 2 ms 10 % longer.
    def in_turn(wait_ms: float, longer: float) -> list[RunResult]:
        return _results(
            *(
                _spans(stage, 1, 3.0, 6.0, 0.6, speed=2 / longer, begin_ns=stage * 10**12, wait_ms=wait_ms)
                for stage in range(2)
            )
        )

    changes = {
        "straight": _results(*(_spans(stage, 1, 3.0, 6.0, 0.6, wait_ms=0.0) for stage in range(2))),
        "in_turn": in_turn(2.0, 1.1),
        "rested": in_turn(10.0, 1.5),
    }
    costs = runtime_costs(_PROFILE, _STRAIGHT, _known_runs(**changes), num_cores=2)
    assert costs.alone_speed == pytest.approx(2.0, rel=1e-3)
    [waking] = costs.waking
    assert waking.after_ms == pytest.approx(10.0)
    assert waking.shares == {kind: pytest.approx(0.5, rel=1e-2) for kind in ("FORWARD", "BACKWARD", "UPDATE")}


def test_each_number_of_microbatches_that_was_measured_counts_as_it_was() -> None:
    # Half of a minibatch takes as long as a whole one, as if the library had no fast kernel for its shape.
    cut = {
        m: _results(*(_spans(stage, m, forward_ms, 1.5, 0.3) for stage in range(2)))
        for m, forward_ms in ((2, 3.0), (4, 1.0))
    }
    costs = runtime_costs(_PROFILE, _STRAIGHT, _known_runs(cut=cut), num_cores=2)
    assert [costs.forward_share.first(m) * 3.0 for m in (1, 2, 4)] == pytest.approx([3.0, 3.0, 1.0], rel=1e-3)


def test_what_cannot_be_cut_is_taken_to_take_its_share() -> None:
    costs = runtime_costs(_PROFILE, _STRAIGHT, _known_runs(cut={}), num_cores=2)
    assert costs.forward_share == costs.backward_share == ItemCost(minibatch_ms=1.0)
    assert costs.positions["first"].forward.later(4) == pytest.approx(_OWN_MS["FORWARD"], rel=1e-3)


def test_latency_is_of_items_that_were_waited_for_alone() -> None:
    sender, receiver = [], []
    for minibatch in range(10):
        begin_ns = 100_000_000 * minibatch
        forward = WorkSpan("FORWARD", 0, minibatch, 0, begin_ns, begin_ns, begin_ns + 50_000, 0, 50_000)
        sent_ns = begin_ns + 60_000  # the sender asks for its next item
        sender += [forward, WorkSpan("UPDATE", 0, minibatch, 0, sent_ns, sent_ns, sent_ns + 1, 0, 1)]
        # The activations of every other minibatch arrived long before the receiver asked for them.
        asked_ns = begin_ns + (0 if minibatch % 2 else 9_000_000)
        wait_ns = 100_000 if minibatch % 2 else 1_000
        ready_ns = asked_ns + wait_ns
        receiver += [WorkSpan("FORWARD", 1, minibatch, 0, asked_ns, ready_ns, ready_ns + 1, wait_ns, 1)]
        receiver += [WorkSpan("UPDATE", 1, minibatch, 0, ready_ns + 2, ready_ns + 2, ready_ns + 3, 0, 1)]
    costs = runtime_costs(_PROFILE, _STRAIGHT, _known_runs(in_turn=_results(sender, receiver)), num_cores=2)
    assert costs.latency_ms == pytest.approx(0.04)


def _first_data(monkeypatch: pytest.MonkeyPatch, profile: Profile, data: list[Any]) -> list[Any]:
    """Returns the data that calibrate() gives to its first run."""

    class StoppedError(Exception):
        pass

    def stop(*arguments: Any, data: list[Any], **options: Any) -> RunResult:
        given.extend(data)
        raise StoppedError

    given: list[Any] = []
    monkeypatch.setattr("pipedream.launch.calibration.run", stop)
    with pytest.raises(StoppedError):
        calibrate(profile, nn.Linear(1, 1), data, optimizer=torch.optim.SGD)
    return given


def test_batches_of_another_size_than_the_profile_s_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short last batch may have fewer samples than the calibration has microbatches. The calibration must
    leave it out.
    """
    whole, short = ((torch.ones(count, 1), torch.ones(count, 1)) for count in (8, 1))
    for data, size in (([whole, whole, short], 8), ([short], 1)):
        given = _first_data(monkeypatch, _PROFILE, data)
        assert {inputs.shape[0] for inputs, _ in given} == {size}


def test_a_calibration_without_a_number_of_minibatches_takes_half_a_second_of_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []
    for layer_ms in (100.0, 1.0, 0.001):
        layers = (LayerProfile("a", layer_ms, layer_ms, 64, 64), LayerProfile("b", 0.0, 0.0, 0, 64))
        counts.append(len(_first_data(monkeypatch, Profile(layers), [(1, 1)])))
    assert counts == [30, 250, 2000]


def test_runs_that_were_slow_or_fast_by_chance_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with pauses use a loss that returns late."""
    numbers = itertools.count()
    losses: list[Any] = []

    def run_of_some_time(model: nn.Module, plan: Plan, **options: Any) -> RunResult:
        losses.append((options["loss_fn"], len(options["data"])))
        return cast(RunResult, SimpleNamespace(measured_ms=float(next(numbers))))

    monkeypatch.setattr("pipedream.launch.calibration.run", run_of_some_time)

    def runs_with(loss_fn: Any) -> Runs:
        return calibration_runs(
            _PROFILE,
            nn.Sequential(nn.Identity(), nn.Identity()),
            [(torch.ones(8, 1), torch.ones(8, 1))],
            loss_fn,
            optimizer=torch.optim.SGD,
            workers=2,
            minibatches=400,
            transport="auto",
            progress=False,
        )[1]

    runs = runs_with(nn.functional.mse_loss)
    of_a_round = [results[0] for results in (runs.one, runs.straight, runs.in_turn, runs.rested)]
    # Each result is that of the second round.
    assert [result.measured_ms for result in of_a_round] == [7.0, 8.0, 9.0, 10.0]
    assert {len(results) for results in (runs.one, *runs.cut.values(), runs.shared, runs.rested)} == {2}
    paused = [row for row in losses if row[0] is not nn.functional.mse_loss]
    assert [count for _, count in paused] == [150] * 4
    slept_s: list[float] = []
    monkeypatch.setattr("time.sleep", slept_s.append)
    assert paused[0][0](torch.zeros(2), torch.ones(2)) == 1.0
    assert slept_s == [0.004]
    losses.clear()
    runs_with(None)
    late = next(loss for loss, _ in losses if loss is not None)
    assert late(torch.tensor(3.0), None) == 3.0  # the late loss returns the model's own value


@pytest.mark.slow
def test_calibrating_leaves_model_and_layers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    data = [(torch.ones(8, 4), torch.zeros(8, 2))] * 4
    profile = Profile(
        tuple(
            LayerProfile(name, 0.05, 0.1, bytes_, 64) for name, bytes_ in (("0", 256), ("1", 256), ("2", 0))
        ),
        batch_size=8,
    )
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    calibrated = calibrate(profile, model, data, nn.functional.mse_loss, optimizer=optimizer, minibatches=20)
    assert calibrated.runtime is not None
    assert all(torch.equal(mine, kept) for mine, kept in zip(model.parameters(), before, strict=True))
    assert calibrated.layers == profile.layers


def test_a_rank_of_torchrun_is_refused_which_would_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="calibrate starts workers of its own, and this is a rank"):
        calibrate(_PROFILE, nn.Linear(1, 1), [], optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 1}, "workers is 1: it takes 2"),
        ({"minibatches": 5}, "minibatches is 5: give at least 20"),
    ],
)
def test_unusable_arguments_are_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(_PROFILE, nn.Linear(1, 1), [], optimizer=torch.optim.SGD, **options)
