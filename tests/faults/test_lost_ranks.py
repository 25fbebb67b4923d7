"""Tests that a rank of torchrun that dies or stops ends the run at the others. Their errors name stage and
minibatch. A rank that refuses its arguments ends the run too, and is named to the others.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from farm import Farm
from mishaps import (
    BOUND_S,
    NUM_MINIBATCHES,
    be_killed,
    be_stopped,
    hold_the_gil,
    model_with,
    noted,
    run,
    run_until_killed_at,
    run_until_lost,
    run_until_stopped_at,
    suspend_all_ranks,
)
from pipedream import PeerLost, PipelineError
from pipedream.links.keys import write_key_file
from pipedream.worker import gathering
from safetensors.torch import load_file


def _assert_lost(
    farm: Farm, folder: Path, model: torch.nn.Sequential, stage: int, at: int, **options: Any
) -> None:
    outcomes = farm.run(run_until_lost, model, str(folder), num_ranks=3, **options)
    assert outcomes[stage].exit_code == -signal.SIGKILL
    _, lost_s = noted(folder / "note")
    for rank in {0, 1, 2} - {stage}:
        assert outcomes[rank].error is None, outcomes[rank].trace
        error, ended_s = outcomes[rank].value
        assert type(error) is PeerLost
        # The error names the reporting stage, its minibatch and the lost stage. The two stages are in nearby
        # minibatches.
        said = re.match(r"stage (\d) at minibatch (\d+) \(\w+\): (.*)", str(error))
        assert said, str(error)
        assert f"stage {stage} (rank {stage}) is lost" in said[3]
        assert said[1] != str(stage)
        assert abs(int(said[2]) - at) <= 3
        assert "\n" not in str(error)
        assert ended_s - lost_s < BOUND_S


@pytest.mark.parametrize(("stage", "at"), [(1, 1), (0, 6), (1, 6), (2, 11)])
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


def _run_with_mistakes(options: list[dict[str, Any]]) -> tuple[Exception | None, int]:
    """Returns the error of a run with these options, and how many minibatches a second run trains. The ranks
    must still find each other for it.
    """
    error = None
    try:
        run(model_with(None), **options[int(os.environ["RANK"])])
    except Exception as caught:
        error = caught
    return error, len(run(model_with(None)).losses)


def _mistaken_options(mistake: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns the options of the mistaken rank, those of the others, and words that the error must have."""
    path = folder / "keys.json"
    write_key_file(path)
    if mistake == "no such interface":
        return {"bind": "eth99"}, {}, "'eth99'"
    if mistake == "no file":
        return {"keys": folder / "none.json"}, {"keys": path}, "No such file"
    open_path = folder / "open.json"
    open_path.write_bytes(path.read_bytes())
    open_path.chmod(0o644)
    return {"keys": open_path}, {"keys": path}, "mode 0644"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mistake", ["no file", "open file", "no such interface"])
def test_a_rank_that_refuses_its_arguments_is_named_to_the_others(
    farm: Farm, tmp_path: Path, rank: int, mistake: str
) -> None:
    # Without this error the others would wait ten minutes for a machine that has no key file.
    mistaken, given, said = _mistaken_options(mistake, tmp_path)
    options = [given] * 3
    options[rank] = mistaken
    outcomes = farm.run(_run_with_mistakes, options, num_ranks=3)
    for outcome in outcomes:
        assert outcome.exit_code is None and outcome.error is None, outcome
        error, num_minibatches = outcome.value
        assert said in str(error)
        assert "\n" not in str(error)
        assert num_minibatches == NUM_MINIBATCHES
    errors = [outcome.value[0] for outcome in outcomes]
    assert type(errors.pop(rank)) is ValueError
    for error in errors:
        assert type(error) is PipelineError
        assert str(error).startswith(f"rank {rank} could not start: ValueError: ")


_EXCHANGES = [
    *(("bsp", when) for when in ("push", "take", "apply", "_make_version", "_means_of")),
    *(("asp", when) for when in ("push", "serve", "_step", "apply")),
    *(("ties", when) for when in ("take_gradients_from", "version_for")),
    ("allreduce", "all_reduce"),
]


@pytest.mark.parametrize(("of", "when"), _EXCHANGES)
def test_a_replica_that_is_killed_at_any_of_its_exchanges_ends_the_run(
    farm: Farm, of: str, when: str
) -> None:
    outcomes = farm.run(run_until_killed_at, when, 2, of=of, num_ranks=3)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, PipelineError), outcome
        assert "stage 0 replica 1 (rank 1)" in str(outcome.error)


@pytest.mark.parametrize("when", ["take", "apply", "_make_version", "_means_of"])
def test_a_spare_that_is_killed_at_any_of_its_exchanges_ends_the_run(farm: Farm, when: str) -> None:
    outcomes = farm.run(run_until_killed_at, when, 2, rank=3, num_spares=1, num_ranks=4)
    assert outcomes[3].exit_code == -signal.SIGKILL
    for outcome in outcomes[:3]:
        assert isinstance(outcome.error, PipelineError), outcome
        assert "stage 0 spare 0 (rank 3)" in str(outcome.error)


@pytest.mark.parametrize("when", ["gradients_for", "take_version_from"])
def test_a_user_of_tied_parameters_that_is_killed_at_an_exchange_ends_the_run(farm: Farm, when: str) -> None:
    outcomes = farm.run(run_until_killed_at, when, 2, of="ties", rank=2, num_ranks=3)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, PipelineError), outcome
        assert "stage 1 (rank 2)" in str(outcome.error)


@pytest.mark.parametrize("when", ["take", "all_reduce"])
def test_a_replica_that_is_stopped_in_an_exchange_ends_the_run_in_bounded_time(
    farm: Farm, tmp_path: Path, when: str
) -> None:
    outcomes = farm.run(run_until_stopped_at, when, 2, str(tmp_path), num_ranks=3)
    _, stopped_s = noted(tmp_path / "note")
    for outcome in (outcomes[0], outcomes[2]):
        error, ended_s = outcome.value
        assert isinstance(error, PipelineError), outcome
        assert "stage 0 replica 1 (rank 1)" in str(error)
        assert ended_s - stopped_s < BOUND_S


def test_a_run_that_is_suspended_as_a_whole_goes_on(farm: Farm) -> None:
    # 2.5 s is longer than peer_timeout, the time within which a peer must send a frame and its interpreter
    # must run.
    model = model_with(functools.partial(suspend_all_ranks, 2.5), stages=2, stage=1, at=5)
    results = farm.results(run, model, num_ranks=2, peer_timeout=2.0)
    assert len(results[1].losses) == NUM_MINIBATCHES


def _be_killed_when_all_is_trained(temporary: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Kills rank 2 after the training. Returns the error and the model of this rank."""
    if os.environ["RANK"] == "2":
        gathering._hand_up = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    tempfile.tempdir = temporary
    model = model_with(None)
    try:
        run(model)
    except PipelineError as error:
        return str(error), model.state_dict()
    finally:
        tempfile.tempdir = None
    raise AssertionError("it has gathered")


def test_ranks_that_lose_another_after_the_training_keep_their_own_weights(
    farm: Farm, tmp_path: Path
) -> None:
    outcomes = farm.run(_be_killed_when_all_is_trained, str(tmp_path), num_ranks=3)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for rank in range(2):
        text, state = outcomes[rank].value
        said = re.search(
            rf"the training was over here, and the trained weights of stage {rank}: they are in (.*)", text
        )
        assert said, text
        (path,) = Path(said[1]).iterdir()
        kept = load_file(path)
        assert kept and all(torch.equal(value, state[name]) for name, value in kept.items())
