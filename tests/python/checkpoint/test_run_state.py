"""Tests run_state.py: which run may continue from a state, how long it is kept, and how local workers write
it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pipedream.checkpoint.run_state import KeptState, RunState, WorkerState
from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.checkpoint.stage_files import state_of
from pipedream.model.seeding import RngStream, generators_kept


def _state(**changed: Any) -> RunState:
    document = {
        "name": "run",
        "minibatch": 12,
        "begun_at": 0,
        "base_seed": 7,
        "seed": 3,
        "multiple": 4,
        "missing": "",
        "is_gathered": True,
        "settings": {"schedule": "pipedream", "microbatches": 2},
        "kinds": [],
        "data_generators": None,
    }
    return RunState(document | changed)


_SETTINGS = {"schedule": "pipedream", "microbatches": 2, "epochs": 5}


def test_a_run_of_the_same_settings_goes_on() -> None:
    _state().check(_SETTINGS, None)
    _state().check(_SETTINGS, 3)


@pytest.mark.parametrize(
    ("state", "settings", "seed", "message"),
    [
        (
            _state(minibatch=10),
            _SETTINGS,
            None,
            "state is of a run that ended after 10 minibatches, in the midst of a round of updates: a run"
            " goes on after a multiple of 4 minibatches alone, so give each run so many",
        ),
        (
            _state(),
            _SETTINGS | {"schedule": "flush"},
            None,
            "schedule is 'flush', and state is of a run with 'pipedream': go on with the same, or leave state"
            " out",
        ),
        (
            _state(),
            _SETTINGS,
            4,
            "seed is 4, and state, whose random numbers go on, is of a run with 3: leave seed out, or give"
            " the same",
        ),
        (_state(missing="no room"), _SETTINGS, None, "state cannot be gone on from: no room"),
    ],
    ids=["multiple", "schedule", "seed", "missing"],
)
def test_another_run_is_refused_in_a_line(
    state: RunState, settings: dict[str, Any], seed: int | None, message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        state.check(settings, seed)
    assert str(refused.value) == message


def test_a_state_is_kept_until_another_run_begins_unless_somebody_has_it() -> None:
    kept = KeptState(_state())
    assert kept.get().minibatch == 12
    KeptState.let_go()
    with pytest.raises(ValueError, match="take it before, as in state = result"):
        kept.get()
    other = KeptState(_state(minibatch=16))
    mine = other.get()
    KeptState.let_go()
    assert other.get() is mine


def test_a_workers_part_comes_back_from_files(tmp_path: Path) -> None:
    snapshot = StageSnapshot(
        1,
        0,
        12,
        {11: {"0.weight": torch.ones(2, 3).t()}, 12: {"0.weight": torch.zeros(3, 2)}},
        tied={0: {12: {"words": torch.arange(3)}}},
        buffers={"phase": torch.tensor([1 + 2j])},
        optimizer={"0.weight / step": torch.tensor(4.0)},
        optimizer_document={"lr": 0.1},
        residuals={"channel / 10": torch.ones(1)},
        document={"loss_scaling": {"scale": 2.0}},
    )
    empty = StageSnapshot(2, 0, 12, {12: {}})
    with generators_kept():
        stream = RngStream(5)
        with stream:
            torch.rand(1)
        WorkerState.of([snapshot, empty], stream).save(tmp_path / "state", 3)
        with stream:
            wanted = torch.rand(()).item(), torch.rand(()).item()
        process = torch.rand(()).item(), random.random()
        state = RunState(_state().document, folder=tmp_path / "state")
        other = RngStream(0)
        state.restore_generators(3, other)
        assert (torch.rand(()).item(), random.random()) == process
        with other:
            assert (torch.rand(()).item(), torch.rand(()).item()) == wanted
    found, nothing = state.of_rank(3).snapshots
    assert nothing == empty
    assert state_of(found) == state_of(snapshot)
    tensors, expected = found.tensors(), snapshot.tensors()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert max(found.versions) == 12
    assert set(found.weights) == {"0.weight", "words"}
    assert found.num_bytes == sum(tensor.nbytes for tensor in expected.values())
