"""Tests that a rank that dies or stops while a run is set up is named to all others. This takes about
peer_timeout at most, and not the long wait for ranks that have not come yet. The rank that hosts the store is
named too, although the store is lost with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from farm import Farm, Outcome
from mishaps import (
    BOUND_S,
    NUM_MINIBATCHES,
    Layer,
    Mishap,
    be_killed,
    be_stopped,
    minibatches,
    model_with,
    noted,
    run,
    run_until_lost,
    wait_for_file,
    wait_until_stopped,
)
from pipedream import PeerLost, PipelineError, WorkerLost
from pipedream.links import rendezvous
from pipedream.links.rendezvous import Rendezvous

_TIMEOUT_S = 3.0
_MISHAPS: list[Mishap] = [be_killed, be_stopped]


class Moving(Layer):
    """Has its mishap when it is moved to its device."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.happen()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _sgd_after(layer: Layer, parameters: Any) -> torch.optim.Optimizer:
    layer.happen()
    return torch.optim.SGD(parameters, lr=0.1)


def _in_rehearsal(mishap: Mishap, note: str) -> tuple[torch.nn.Sequential, dict[str, Any]]:
    return model_with(mishap, stage=0, at=0, note=note), {}


def _when_moved(mishap: Mishap, note: str) -> tuple[torch.nn.Sequential, dict[str, Any]]:
    model = model_with(None)
    model[1] = Moving(mishap, note=note, rank=1)
    return model, {}


def _when_optimizers_are_made(mishap: Mishap, note: str) -> tuple[torch.nn.Sequential, dict[str, Any]]:
    optimizer = functools.partial(_sgd_after, Layer(mishap, note=note, rank=2))
    return model_with(None), {"optimizer": optimizer}


_PHASES = [
    (_when_moved, 1, "agreeing on the plan"),
    (_when_optimizers_are_made, 2, "opening links"),
]


def _assert_told(outcomes: list[Outcome], lost: int, message: str, folder: Path) -> None:
    assert outcomes[lost].exit_code == -signal.SIGKILL
    _, lost_s = noted(folder / "note")
    for rank in {0, 1, 2} - {lost}:
        assert outcomes[rank].error is None, outcomes[rank].trace
        error, ended_s = outcomes[rank].value
        assert type(error) is PeerLost
        assert str(error).startswith(message)
        assert ended_s - lost_s < BOUND_S


@pytest.mark.parametrize("mishap", _MISHAPS)
@pytest.mark.parametrize(("where", "lost", "phase"), _PHASES)
def test_a_rank_that_dies_or_stops_before_links_are_open_is_named_to_all(
    farm: Farm, tmp_path: Path, where: Any, lost: int, phase: str, mishap: Mishap
) -> None:
    model, options = where(mishap, str(tmp_path / "note"))
    outcomes = farm.run(run_until_lost, model, str(tmp_path), num_ranks=3, peer_timeout=_TIMEOUT_S, **options)
    _assert_told(outcomes, lost, f"rank {lost} gave no sign of life for 3 s while {phase}", tmp_path)


@pytest.mark.parametrize(
    ("mishap", "how"),
    [
        (be_killed, "the connection ended without a farewell"),
        (be_stopped, "nothing has come from it for 1.5 s: its process is stopped"),
    ],
)
def test_a_rank_that_dies_or_stops_in_its_rehearsal_is_named_by_its_links(
    farm: Farm, tmp_path: Path, mishap: Mishap, how: str
) -> None:
    model, _ = _in_rehearsal(mishap, str(tmp_path / "note"))
    outcomes = farm.run(run_until_lost, model, str(tmp_path), num_ranks=3, peer_timeout=_TIMEOUT_S)
    _assert_told(outcomes, 0, f"stage 0 (rank 0) is lost: {how}", tmp_path)


class _LargerAt4:
    """The minibatches. Minibatch 4 is larger than planned."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index, batch in enumerate(minibatches()):
            inputs, targets = (torch.cat([part, part]) if index == 4 else part for part in batch)
            yield inputs, targets


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        # Rank 1 waits for rank 0's tensors in the rehearsal, so its link reports the loss.
        (0, "stage 0 (rank 0) is lost: "),
        # Nobody waits for tensors of rank 2, so its missing signs of life report the loss.
        (2, "rank 2 gave no sign of life for 3 s while planning again for minibatch 4"),
    ],
    ids=["first", "last"],
)
@pytest.mark.parametrize("mishap", _MISHAPS)
def test_a_rank_that_dies_or_stops_while_a_larger_minibatch_is_planned_for_is_lost(
    farm: Farm, tmp_path: Path, mishap: Mishap, stage: int, message: str
) -> None:
    # The stage's first forward of minibatch 4 belongs to the rehearsal for the larger size.
    model = model_with(mishap, stage=stage, at=4, note=str(tmp_path / "note"))
    outcomes = farm.run(
        run_until_lost, model, str(tmp_path), num_ranks=3, peer_timeout=_TIMEOUT_S, data=_LargerAt4()
    )
    _assert_told(outcomes, stage, message, tmp_path)


def _run_and_fall_before_joining_again(
    model: torch.nn.Sequential, folder: str, lost: int, mishap: Mishap
) -> tuple[Exception | None, float]:
    joined = []

    def join_or_fall(self: Rendezvous, *args: Any) -> None:
        joined.append(True)
        if len(joined) == 2 and os.environ["RANK"] == str(lost):
            Layer(mishap, note=str(Path(folder) / "note")).happen()
        join(self, *args)

    join = Rendezvous.join
    with mock.patch.object(Rendezvous, "join", join_or_fall):
        return run_until_lost(model, folder, peer_timeout=_TIMEOUT_S, data=_LargerAt4())


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("mishap", _MISHAPS)
def test_a_rank_that_dies_or_stops_before_it_plans_again_is_lost(
    farm: Farm, tmp_path: Path, mishap: Mishap, lost: int
) -> None:
    # The store still has the lost rank's last sign of life, from the time when its links opened.
    outcomes = farm.run(
        _run_and_fall_before_joining_again, model_with(None), str(tmp_path), lost, mishap, num_ranks=3
    )
    _assert_told(outcomes, lost, "", tmp_path)
    for rank in {0, 1, 2} - {lost}:
        assert f"rank {lost}" in str(outcomes[rank].value[0])


def test_a_local_worker_that_dies_while_it_plans_again_is_named_with_that_minibatch(tmp_path: Path) -> None:
    model = model_with(be_killed, stage=1, at=4, note=str(tmp_path / "note"))
    with pytest.raises(WorkerLost, match="was killed by SIGKILL at minibatch 4"):
        run(model, peer_timeout=_TIMEOUT_S, data=_LargerAt4())


def _be_stopped_when_published(model: torch.nn.Sequential, folder: str) -> tuple[Exception | None, float]:
    """Stops rank 2 when it has published its addresses.

    The others read them only after rank 2 has stopped. Otherwise its link could still answer them.
    """
    note = Path(folder) / "note"
    publish, wait_for = Rendezvous.publish, Rendezvous.wait_for

    def publish_and_stop(self: Rendezvous, key: str, value: Any) -> None:
        publish(self, key, value)
        if key == "endpoints/2":
            Layer(be_stopped, note=str(note)).happen()

    def wait_for_stopped(self: Rendezvous, keys: list[str], *args: Any, **kwargs: Any) -> list[Any]:
        values = wait_for(self, keys, *args, **kwargs)
        if "endpoints/2" in keys:
            wait_for_file(note)
            wait_until_stopped(noted(note)[0])
        return values

    with (
        mock.patch.object(Rendezvous, "publish", publish_and_stop),
        mock.patch.object(Rendezvous, "wait_for", wait_for_stopped),
    ):
        return run_until_lost(model, folder, peer_timeout=_TIMEOUT_S)


def test_a_rank_that_stops_when_the_others_connect_to_it_is_named_to_all(farm: Farm, tmp_path: Path) -> None:
    # The neighbour's link also finds after the same time that rank 2 sent no HELLO. But that error tells
    # less, and only the neighbour gets it.
    outcomes = farm.run(_be_stopped_when_published, model_with(None), str(tmp_path), num_ranks=3)
    _assert_told(outcomes, 2, "rank 2 gave no sign of life for 3 s while opening links", tmp_path)


def test_a_rank_that_is_slow_is_waited_for(farm: Farm) -> None:
    # Rank 1 is slow in its rehearsal. A rank that first profiles, or moves a large model, is equally slow.
    model = model_with(functools.partial(time.sleep, 4.0), stage=1, at=0)
    results = farm.results(run, model, num_ranks=3, peer_timeout=1.0)
    assert len(results[0].losses) == NUM_MINIBATCHES


@contextlib.contextmanager
def _calls_noted(name: str, folder: str) -> Iterator[None]:
    """Makes every rank write a file into the folder when it has called this method of its Rendezvous."""
    kept = getattr(Rendezvous, name)

    def noting(self: Rendezvous, *args: Any) -> None:
        kept(self, *args)
        (Path(folder) / f"{name}-{os.environ['RANK']}").touch()

    setattr(Rendezvous, name, noting)
    try:
        yield
    finally:
        setattr(Rendezvous, name, kept)


def _when_others_rehearse(folder: str, mishap: Mishap) -> None:
    for rank in (1, 2):
        wait_for_file(Path(folder) / f"rehearsing-{rank}")
    mishap()


def _note_phases_and_run_until_lost(
    model: torch.nn.Sequential, folder: str
) -> tuple[Exception | None, float]:
    kept = Rendezvous.enter

    def enter(self: Rendezvous, phase: str) -> None:
        kept(self, phase)
        (Path(folder) / f"{phase}-{os.environ['RANK']}").touch()

    Rendezvous.enter = enter  # type: ignore[method-assign]
    try:
        return run_until_lost(model, folder, peer_timeout=_TIMEOUT_S)
    finally:
        Rendezvous.enter = kept  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("mishap", "how"), [(be_killed, "is gone"), (be_stopped, "has not answered for 3 s")]
)
def test_the_host_of_the_store_is_named_though_the_store_goes_with_it(
    farm: Farm, tmp_path: Path, mishap: Mishap, how: str
) -> None:
    model, _ = _in_rehearsal(
        functools.partial(_when_others_rehearse, str(tmp_path), mishap), str(tmp_path / "note")
    )
    outcomes = farm.run(
        _note_phases_and_run_until_lost, model, str(tmp_path), num_ranks=3, rank_0_hosts_store=True
    )
    message = f"rank 0, which hosts the store of the run, {how} while rehearsing"
    # The note is written before the mishap, and the mishap waits for the other ranks. So the note is older
    # than the loss.
    _assert_told(outcomes, 0, message, tmp_path)


def _run_and_leave(folder: str, mistaken: int) -> Exception | None:
    """Makes the mistaken rank end with its error, as a script would. Rank 2 starts when that rank has
    reported its error.
    """
    options: dict[str, Any] = {"bind": "eth99"} if os.environ["RANK"] == str(mistaken) else {}
    if os.environ["RANK"] == "2":
        wait_for_file(Path(folder) / f"fail-{mistaken}")
    # On a loaded machine rank 2 may come later than the time for which the store's host usually stays.
    as_long_as_it_takes = mock.patch.object(rendezvous, "_LINGER_S", 2 * BOUND_S)
    try:
        with _calls_noted("fail", folder), as_long_as_it_takes:
            run(model_with(None), **options)
    except Exception as error:
        if os.environ["RANK"] == "0":
            os._exit(7)
        return error
    return None


@pytest.mark.parametrize("mistaken", [0, 1])
def test_the_host_of_the_store_stays_until_the_others_have_read_why(
    farm: Farm, tmp_path: Path, mistaken: int
) -> None:
    # Rank 0 must not end at once. The store would end with it, and the others would see a broken connection
    # instead of the reason.
    outcomes = farm.run(_run_and_leave, str(tmp_path), mistaken, num_ranks=3, rank_0_hosts_store=True)
    assert outcomes[0].exit_code == 7
    for rank in {1, 2} - {mistaken}:
        error = outcomes[rank].value
        assert type(error) is PipelineError
        assert str(error).startswith(f"rank {mistaken} could not start: ValueError: bind is 'eth99'")


def test_ranks_find_each_other_by_the_store_of_rank_0(farm: Farm) -> None:
    results = farm.results(run, model_with(None), num_ranks=3, rank_0_hosts_store=True)
    assert len(results[0].losses) == NUM_MINIBATCHES


@pytest.mark.parametrize(
    ("mishap", "kind", "message"),
    [
        (be_killed, WorkerLost, "stage 1 (rank 1) was killed by SIGKILL before its first minibatch"),
        (be_stopped, PeerLost, "rank 1 gave no sign of life for 3 s while agreeing on the plan"),
    ],
)
def test_of_a_local_worker_that_is_lost_there_is_one_error(
    tmp_path: Path, mishap: Mishap, kind: type[Exception], message: str
) -> None:
    model, _ = _when_moved(mishap, str(tmp_path / "note"))
    with pytest.raises(PipelineError) as caught:
        run(model, peer_timeout=_TIMEOUT_S)
    _, lost_s = noted(tmp_path / "note")
    assert type(caught.value) is kind
    assert str(caught.value) == message
    assert time.monotonic() - lost_s < BOUND_S
