"""What short runs say of the runtime's costs: recovered from spans made by known ones, and refusals."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pipedream import Plan, Profile, Stage, calibrate
from pipedream.launch.calibration import Runs, runtime_costs
from pipedream.planning.layer_profile import LayerProfile
from pipedream.report.result import RunResult, WorkSpan
from torch import nn

_OWN_MS = {"FORWARD": 0.25, "BACKWARD": 0.125, "UPDATE": 0.0625}
_PROFILE = Profile(
    (LayerProfile("a", 1.0, 2.0, 4000, 1 << 20), LayerProfile("b", 1.0, 2.0, 0, 1 << 20)), batch_size=8
)
_STRAIGHT = Plan((Stage(0, 0), Stage(1, 1)))


def _spans(stage: int, m: int, forward_ms: float, backward_ms: float, update_ms: float) -> list[WorkSpan]:
    """Of 20 minibatches; each forward waits for 1 ms besides."""
    spans, now_ns = [], 0
    for minibatch in range(20):
        items = [(kind, part) for part in range(m) for kind in ("FORWARD", "BACKWARD")] + [("UPDATE", 0)]
        for kind, part in items:
            compute_ms = {"FORWARD": forward_ms, "BACKWARD": backward_ms, "UPDATE": update_ms}[kind]
            wait_ns = 1_000_000 if kind == "FORWARD" else 0
            compute_ns, own_ns = int(compute_ms * 1e6), int(_OWN_MS[kind] * 1e6)
            ready_ns = now_ns + wait_ns + own_ns // 2
            completed_ns = ready_ns + compute_ns
            spans.append(
                WorkSpan(kind, stage, minibatch, part, now_ns, ready_ns, completed_ns, wait_ns, compute_ns)
            )
            now_ns = completed_ns + own_ns // 2
    return spans


def _result(*spans: list[WorkSpan]) -> RunResult:
    return cast(RunResult, SimpleNamespace(spans=list(spans)))


def test_known_costs_are_recovered_from_spans() -> None:
    # 0.1 ms of a step and 0.2 ms per MiB; a copy is 0.3 ms more; alone everything is twice as fast as the
    # straight run, in which layers take 3 times the profile's; a third of a forward does not shrink with m.
    costs = runtime_costs(
        _PROFILE,
        _STRAIGHT,
        Runs(
            one=_result(_spans(0, 1, 3.0, 6.0, 0.5)),
            straight=_result(_spans(0, 1, 3.0, 6.0, 0.6), _spans(1, 1, 3.0, 6.0, 0.3)),
            cut=_result(*(_spans(stage, 4, 1.5, 1.5, 0.6) for stage in range(2))),
            shared=_result(*(_spans(replica, 1, 3.0, 6.0, 0.5) for replica in range(2))),
            num_microbatches=4,
        ),
    )
    assert (costs.forward_scale, costs.backward_scale) == (pytest.approx(3.0), pytest.approx(3.0))
    assert costs.forward_fixed_share == pytest.approx(1 / 3)
    assert costs.backward_fixed_share == pytest.approx(0.0, abs=1e-9)
    assert costs.update_ms == pytest.approx(0.1)
    assert costs.update_ms_per_byte * (1 << 20) == pytest.approx(0.2)
    assert costs.copy_ms_per_byte * (1 << 20) == pytest.approx(0.3)
    assert costs.alone_speed == pytest.approx(2.0)
    # Half of an update's 0.4 ms are the other replica's; what is left is what they exchange, a MiB each.
    assert costs.sync_ms_per_byte * (1 << 20) == pytest.approx(0.2)
    for position in costs.positions.values():
        assert position.forward.of(1) == pytest.approx(_OWN_MS["FORWARD"])
        assert position.backward.of(4) == pytest.approx(_OWN_MS["BACKWARD"])
        assert position.update_ms == pytest.approx(_OWN_MS["UPDATE"])
    assert costs.cut_bytes == 4000


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
