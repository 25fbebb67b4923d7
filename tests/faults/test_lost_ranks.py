"""A rank of torchrun that dies or stops ends the run at the others, naming stage and minibatch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from farm import Farm
from mishaps import BOUND_S, be_killed, be_stopped, hold_the_gil, model_with, noted, run
from pipedream import PeerLost


def _run_until_lost(
    model: torch.nn.Sequential, folder: str, **options: Any
) -> tuple[Exception | None, float]:
    """The error and when it came. The last rank to have one ends the rank that only stopped."""
    error = None
    try:
        run(model, **options)
    except Exception as caught:
        error = caught
    ended_s = time.monotonic()
    (Path(folder) / f"ended-{os.environ['RANK']}").touch()
    if len(list(Path(folder).glob("ended-*"))) == len(model) - 1:
        pid, _ = noted(Path(folder) / "note")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return error, ended_s


def _assert_lost(
    farm: Farm, folder: Path, model: torch.nn.Sequential, stage: int, at: int, **options: Any
) -> None:
    outcomes = farm.run(_run_until_lost, model, str(folder), num_ranks=3, **options)
    assert outcomes[stage].exit_code == -signal.SIGKILL
    _, lost_s = noted(folder / "note")
    for rank in {0, 1, 2} - {stage}:
        assert outcomes[rank].error is None, outcomes[rank].trace
        error, ended_s = outcomes[rank].value
        assert type(error) is PeerLost
        # Who lost whom: the loser says at which minibatch it was, which is near the lost one's.
        said = re.match(r"stage (\d) at minibatch (\d+) \(\w+\): (.*)", str(error))
        assert said, str(error)
        assert f"stage {stage} (rank {stage}) is lost" in said[3]
        assert said[1] != str(stage)
        assert abs(int(said[2]) - at) <= 3
        assert "\n" not in str(error)
        assert ended_s - lost_s < BOUND_S


@pytest.mark.parametrize(("stage", "at"), [(1, 0), (0, 6), (1, 6), (2, 11)])
def test_a_killed_rank_is_lost_to_the_others(farm: Farm, tmp_path: Path, stage: int, at: int) -> None:
    note = str(tmp_path / "note")
    model = model_with(be_killed, stage=stage, at=at, note=note, rank=stage, in_backward=True)
    _assert_lost(farm, tmp_path, model, stage, at)


def test_a_stopped_rank_is_lost_after_the_peer_timeout(farm: Farm, tmp_path: Path) -> None:
    model = model_with(be_stopped, stage=1, at=6, note=str(tmp_path / "note"), in_backward=True)
    _assert_lost(farm, tmp_path, model, 1, 6, peer_timeout=3.0)


def test_a_rank_whose_interpreter_hangs_is_lost_though_its_process_answers(
    farm: Farm, tmp_path: Path
) -> None:
    model = model_with(hold_the_gil, stage=1, at=6, note=str(tmp_path / "note"), in_backward=True)
    _assert_lost(farm, tmp_path, model, 1, 6, peer_timeout=3.0)
