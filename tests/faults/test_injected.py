"""Tests a run that saves checkpoints and has a fault at one of its steps. When it is started again, it ends
as without a fault.

make test      one step for each program and kind of fault
make faults    all steps (PIPEDREAM_FAULTS=all)
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from farm import Farm, Outcome
from injection import KINDS, Ended, Injection, Program, train
from pipedream import PeerLost, WorkerLost
from pipedream.checkpoint.checkpoint_folder import checkpoints_in
from pipedream.checkpoint.manifest import problems_of, read_manifest
from pipedream.checkpoint.run_state import KeptState

_TAKES_ALL = os.environ.get("PIPEDREAM_FAULTS") == "all"
_PROGRAMS = [
    Program(schedule, replicas)
    for schedule in ("pipedream", "flush", "unstashed")
    for replicas in ((1, 1), (2, 1))
]
_PEER_TIMEOUT_S = 1.0


def _id(value: object) -> str:
    if isinstance(value, Program):
        return f"{value.schedule}-{'-'.join(map(str, value.replicas))}"
    return str(value)


def _injection(folder: Path, kind: str = "", step: str = "") -> Injection:
    return Injection(str(folder), str(folder / "C"), kind, step)


@functools.cache
def _whole(farm: Farm, program: Program) -> tuple[Ended, list[str]]:
    """Returns how a run without a fault ended, and its steps."""
    with tempfile.TemporaryDirectory() as name:
        injection = _injection(Path(name))
        ended = farm.results(train, program, injection.checkpoints, injection, num_ranks=program.num_ranks)[0]
        return ended, injection.steps()


def _chosen(program: Program, steps: list[str], kind: str) -> list[str]:
    """Returns the steps at which the fault can make a difference.

    These are instructions, operations on files of the second checkpoint, and operations that remove the first
    one. `make faults` tests all of them. Otherwise one is tested. It differs by program and kind, but is the
    same in every run of the test.
    """
    first, second = (f"checkpoint-{number * max(program.replicas):09}" for number in (1, 2))
    operations = ("mkdir", "open", "fsync") if kind == "full disk" else ("open", "rename", "remove", "rmdir")
    of_files = [
        step
        for step in sorted(steps)
        if step.startswith(operations) and (f" {second}" in step or f"removed-{first}" in step)
    ]
    instructions = sorted(step for step in steps if "instruction" in step)
    if _TAKES_ALL:
        return instructions + of_files
    index = len(KINDS) * _PROGRAMS.index(program) + KINDS.index(kind)
    found = instructions if index % 2 else of_files
    return [found[7 * index % len(found)]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", _PROGRAMS, ids=_id)
def test_a_run_with_a_fault_ends_as_one_without_when_it_is_started_again(
    farm: Farm, tmp_path: Path, program: Program, kind: str
) -> None:
    whole, steps = _whole(farm, program)
    run = functools.partial(farm.run, train, program, num_ranks=program.num_ranks)
    timeout_s = _PEER_TIMEOUT_S if kind == "stop" else 15.0
    for number, step in enumerate(_chosen(program, steps, kind)):
        (tmp_path / str(number)).mkdir()
        injection = _injection(tmp_path / str(number), kind, step)
        outcomes = run(checkpoints=injection.checkpoints, injection=injection, peer_timeout=timeout_s)
        assert injection.has_happened, step
        for outcome in outcomes:
            _check_rank(outcome, kind, step)
        if kind == "full disk":
            assert outcomes[0].value.is_same(whole), step
        (again, *_) = run(checkpoints=injection.checkpoints, injection=None)
        assert again.error is None, (step, again.trace)
        assert again.value.is_same(whole), step
        _check_folder(Path(injection.checkpoints))


def _check_rank(outcome: Outcome, kind: str, step: str) -> None:
    """Asserts that the rank was killed, or tells in one line which rank was lost. A full disk ends no run."""
    assert outcome.error is None, (step, outcome.trace)
    if outcome.exit_code is not None:
        assert kind != "full disk" and outcome.exit_code == -signal.SIGKILL, step
        return
    error = outcome.value.error
    assert error is None or (kind != "full disk" and type(error) is PeerLost), (step, error)
    assert "\n" not in str(error), step
    assert not outcome.value.threads, step


def _check_folder(checkpoints: Path) -> None:
    """Asserts that the folder has only whole checkpoints."""
    present = checkpoints_in(checkpoints)
    assert sorted(checkpoints.iterdir()) == present
    for checkpoint in present:
        assert not problems_of(checkpoint, read_manifest(checkpoint))
        assert not list(checkpoint.glob("*.part"))


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut_off, _empty, _change, Path.unlink], ids=lambda value: value.__name__)
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    farm: Farm, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for program in _PROGRAMS if _TAKES_ALL else _PROGRAMS[1:2]:
        written = tmp_path / _id(program)
        run = functools.partial(farm.results, train, program, num_ranks=program.num_ranks, keep=2)
        whole = run(checkpoints=str(written), injection=None)[0]
        before, newest = checkpoints_in(written)
        names = sorted(path.name for path in newest.iterdir())
        for name in names if _TAKES_ALL else names[len(damage.__name__) :: len(names)]:
            folder = shutil.copytree(written, tmp_path / "C")
            damage(folder / newest.name / name)
            again = run(checkpoints=str(folder), injection=None)[0]
            assert again.is_same(whole), name
            assert again.continued_at == int(before.name[-9:]), name
            for damaged in folder.glob("damaged-*"):
                assert damaged.name.endswith(newest.name)
                shutil.rmtree(damaged)
            _check_folder(folder)
            shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_a_local_worker_leaves_nothing_behind(
    farm: Farm, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _PROGRAMS[KINDS.index(kind)]
    whole, steps = _whole(farm, program)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    steps = [step for step in steps if "SNAPSHOT" in step or "rename" in step]
    for number, step in enumerate(steps if _TAKES_ALL else steps[5:6]):
        (tmp_path / str(number)).mkdir()
        injection = _injection(tmp_path / str(number), kind, step)
        before = _left_of_runs(temporary)
        timeout_s = _PEER_TIMEOUT_S if kind == "stop" else 15.0
        ended = train(program, injection.checkpoints, injection, peer_timeout=timeout_s)
        assert injection.has_happened, step
        assert "\n" not in str(ended.error), step
        if kind == "full disk":
            assert ended.is_same(whole), step
        else:
            assert type(ended.error) is (WorkerLost if kind == "kill" else PeerLost), step
        assert train(program, injection.checkpoints, None).is_same(whole), step
        _check_folder(Path(injection.checkpoints))
        assert _left_of_runs(temporary) == before, step


def _left_of_runs(temporary: Path) -> tuple[set[int], set[str], set[str]]:
    """Returns the processes, shared memory and files that runs have left.

    First it releases the kept state of the last run, whose files would otherwise stay.
    """
    KeptState.let_go()
    processes = {process.pid for process in psutil.Process().children(recursive=True)}
    return processes, set(os.listdir("/dev/shm")), set(os.listdir(temporary))
