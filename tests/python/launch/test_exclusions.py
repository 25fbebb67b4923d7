"""Tests options that exclude each other. Each row of the table in csrc/schedule/exclusions.cc is refused
everywhere, and no other pair is. A row has two traits. A trait is an option or a property of a job, by the
name that the table gives it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from launches import Launched, note_launches
from pipedream import Checkpoints, Plan, Program, Stage, Validation, partition, reference
from pipedream.callbacks import EMA
from pipedream.checkpoint.run_state import RunState
from pipedream.links.keys import make_keys
from pipedream.model.stage_module import find_ties, tie_pairs
from pipedream.planning.job import check_together, exclusions
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.link_profile import LinkProfile, MeasuredLink
from pipedream.splitting.splitter import split
from torch import nn

_DATA = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(2)]
_ROWS = exclusions()
_LINKS = LinkProfile(2, (MeasuredLink(0, 1, 1e9, 0.1), MeasuredLink(1, 0, 1e9, 0.1)))
_PROFILE = Profile((LayerProfile("a", 1.0, 2.0, 64, 64), LayerProfile("b", 1.0, 2.0, 0, 64)), "model", 4)
_SGD = functools.partial(torch.optim.SGD, lr=0.01)
_ALWAYS = {
    *("not_ssp", "replicas", "several_stages", "input_replicas", "model_with_values", "paper_costs"),
    *("no_averages", "shards"),
}
"""Traits that every job here has."""
_CONFLICT = "two values of one argument"

Arguments = dict[str, Any]


def _model(device: str = "cpu", *, is_tied: bool = False) -> list[nn.Module]:
    first, second = nn.Linear(4, 4, device=device), nn.Linear(4, 2, device=device)
    if is_tied:
        second.register_parameter("tied", first.bias)
    return [nn.Sequential(first), nn.Sequential(second)]


def _plan(spares: int = 0) -> Plan:
    return Plan((Stage(0, 0, 2, num_spare_shards=spares), Stage(1, 1, 1)))


def _run_state() -> RunState:
    document = {"minibatch": 4, "begun_at": 0, "kinds": [], "settings": {}, "seed": None}
    return RunState(document | {"missing": "", "multiple": 1, "name": "before", "base_seed": 0})


_ASKED_OF_RUN: dict[str, Callable[[Path], Arguments]] = {
    "asp": lambda _: {"sync": "asp"},
    "ssp": lambda _: {"sync": "ssp"},
    "not_ssp": lambda _: {"sync": "bsp"},
    "staleness": lambda _: {"staleness": 1},
    "reduced": lambda _: {"sync": "allreduce"},
    "sync_every": lambda _: {"sync_every": 2},
    "push_codec": lambda _: {"codec": {"pushes": "bf16"}},
    "factors": lambda _: {"codec": {"pushes": "factors"}},
    "spares": lambda _: {"plan": _plan(spares=1)},
    "ties": lambda _: {"model": _model(is_tied=True)},
    "uneven_ties": lambda _: {"model": _model(is_tied=True)},
    "replicas": lambda _: {},
    "several_stages": lambda _: {},
    "program": lambda _: {"schedule": Program.of("pipedream", replicas=[2, 1], in_flight=[2, 1])},
    "common_rounds": lambda _: {"schedule": "flush"},
    "newest_versions": lambda _: {"schedule": "vertical_sync"},
    "one_stage": lambda _: {"schedule": "data_parallel"},
    "one_replica": lambda _: {"schedule": "interleaved"},
    "norms": lambda _: {"max_grad_norm": 1.0},
    "norms_of_stages": lambda _: {"max_grad_norm": 1.0, "schedule": "flush", "microbatches": 2},
    "float16": lambda _: {"autocast": "float16"},
    "topk_gradients": lambda _: {"codec": {"gradients": "topk"}},
    "validation": lambda _: {"validation": Validation(_DATA)},
    "averaged_validation": lambda _: {"validation": Validation(_DATA, ema=True)},
    "averages": lambda _: {"callbacks": [EMA(0.9)]},
    "no_averages": lambda _: {},
    "shards": lambda _: {"callbacks": [EMA(0.9)]},
    "checkpoints": lambda folder: {"checkpoints": Checkpoints(folder)},
    "timed_checkpoints": lambda folder: {"checkpoints": Checkpoints(folder, every="60s"), "sync": "asp"},
    "input_replicas": lambda _: {},
    "state": lambda _: {"state": _run_state()},
    "keys": lambda _: {"keys": make_keys()},
    "ports": lambda _: {"ports": "29600-29620"},
    "read_once": lambda _: {"data": iter(_DATA)},
    "epochs": lambda _: {"epochs": 2},
    "meta_model": lambda folder: {"model": _model("meta"), "save": folder},
    "model_with_values": lambda _: {"model": _model()},
    "gather_all": lambda _: {"gather": "all"},
    "weights": lambda _: {"weights": torch.nn.Module.apply},
}
_ASKED_OF_REFERENCE = [
    *("asp", "ssp", "not_ssp", "staleness", "reduced", "sync_every", "ties", "uneven_ties", "replicas"),
    *("several_stages", "program", "common_rounds", "newest_versions", "one_stage", "one_replica"),
    *("norms", "norms_of_stages", "validation"),
]
_ASKED_OF_PARTITION: dict[str, Arguments] = {
    "asp": {"sync": "asp"},
    "ssp": {"sync": "ssp"},
    "not_ssp": {"sync": "bsp"},
    "staleness": {"staleness": 1},
    "reduced": {"sync": "allreduce"},
    "push_codec": {"codec": {"pushes": "factors"}},
    "factors": {"codec": {"pushes": "factors"}},
    "spares": {"spare_workers": 1},
    "common_rounds": {"schedule": "flush"},
    "newest_versions": {"schedule": "flush"},
    "no_formulas": {"schedule": "flush"},
    "calibrated_costs": {"cost_model": "calibrated"},
    "paper_costs": {"cost_model": "paper"},
    "measured_links": {"bandwidth": _LINKS},
    "speeds": {"speeds": [1.0, 2.0]},
    "workers_per_host": {"workers_per_host": 2},
    "delay_max": {"delay_max": 0.5},
    "nothing_chosen": {"schedule": "pipedream"},
    "chosen_microbatches": {"microbatches": "auto"},
    "fixed_schedule": {"schedule": "gpipe"},
}


def _merged(*parts: Arguments) -> Arguments | None:
    merged: Arguments = {}
    for name, value in itertools.chain.from_iterable(part.items() for part in parts):
        if name == "codec":
            merged[name] = merged.get(name, {}) | value
        elif name in merged and (name in ("model", "data", "schedule") or merged[name] != value):
            return None
        else:
            merged[name] = value
    return merged


def _asked(names: Sequence[str], among: Mapping[str, Arguments]) -> Arguments | None:
    """Merges the arguments that stand for these traits. Returns None if two of them need different values of
    one argument.
    """
    if {*names} == {"asp", "reduced"}:
        return {"sync": "asp", "sync_every": 2}
    # A staleness needs sync="ssp". Otherwise another row of the table is refused first.
    needed = {"sync": "ssp"} if "staleness" in names and "not_ssp" not in names else {}
    return _merged(needed, *(among[name] for name in names))


class _Refusals:
    """The texts with which jobs are refused; None for a job that is accepted."""

    def __init__(self, folder: Path, launched: list[Any]) -> None:
        self._folder = folder
        self._launched = launched

    def of_run(self, *names: str) -> str | None:
        asked = _asked(names, {name: _ASKED_OF_RUN[name](self._folder) for name in names})
        if asked is None:
            return _CONFLICT
        arguments: Arguments = {"model": _model(), "plan": _plan(), "data": _DATA} | asked
        try:
            with contextlib.suppress(Launched):
                pipedream.run(**arguments, optimizer=_SGD, loss_fn=nn.functional.mse_loss, progress=False)
            # Workers find what stages share.
            ties = tie_pairs(find_ties(split(arguments["model"], arguments["plan"])))
            check_together(self._launched[-1].job(ties).traits())
        except ValueError as error:
            return str(error)
        return None

    def of_reference(self, *names: str) -> str | None:
        asked = _asked(names, {name: _ASKED_OF_RUN[name](self._folder) for name in names})
        if asked is None:
            return _CONFLICT
        arguments: Arguments = {"model": _model(), "plan": _plan(), "data": _DATA} | asked
        if arguments.get("sync") == "asp":
            arguments["update_orders"] = [[], []]
        try:
            reference.run(**arguments, optimizer=_SGD, loss_fn=nn.functional.mse_loss)
        except ValueError as error:
            return str(error)
        return None

    def of_partition(self, *names: str) -> str | None:
        asked = _asked(names, _ASKED_OF_PARTITION)
        if asked is None or "sync_every" in asked:
            return _CONFLICT
        try:
            partition(_PROFILE, 2, **{"bandwidth": 1e9, "progress": False} | asked)
        except ValueError as error:
            return str(error)
        return None


@pytest.fixture
def refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Refusals:
    return _Refusals(tmp_path, note_launches(monkeypatch))


def _assert_rows_are_refused(refused: Callable[..., str | None], names: Collection[str]) -> int:
    """Asserts that each row is refused with its own text. Returns how many rows these arguments can
    express.
    """
    texts = [
        (row, text)
        for row in _ROWS
        if {row.first, row.second} <= {*names} and (text := refused(row.first, row.second)) != _CONFLICT
    ]
    assert not [
        (row, text) for row, text in texts if not str(text).endswith(f": {row.because}; {row.remedy}")
    ]
    return len(texts)


def _others_than_rows(refused: Callable[..., str | None], names: Collection[str]) -> list[str]:
    """Returns the errors of pairs of options that no row of the table explains.

    Traits that every job here has are left out, and so are options that are refused even alone.
    """
    known = [f": {row.because}; {row.remedy}" for row in _ROWS]
    alone = [name for name in names if name not in _ALWAYS and refused(name) is None]
    texts = [refused(*pair) or _CONFLICT for pair in itertools.combinations(alone, 2)]
    return [text for text in texts if text != _CONFLICT and not text.endswith(tuple(known))]


def test_run_refuses_each_row(refusals: _Refusals) -> None:
    rows_of_optimizers_and_plans = 10
    asked = _assert_rows_are_refused(refusals.of_run, _ASKED_OF_RUN)
    assert asked == len(_ROWS) - rows_of_optimizers_and_plans


def test_run_refuses_no_other_pair(refusals: _Refusals) -> None:
    assert not _others_than_rows(refusals.of_run, _ASKED_OF_RUN)


def test_the_reference_refuses_each_row(refusals: _Refusals) -> None:
    assert _assert_rows_are_refused(refusals.of_reference, _ASKED_OF_REFERENCE) > 15


def test_the_reference_refuses_no_other_pair(refusals: _Refusals) -> None:
    # "asp" cannot be computed without an order of updates.
    names = [name for name in _ASKED_OF_REFERENCE if name != "asp"]
    assert not _others_than_rows(refusals.of_reference, names)


def test_partition_refuses_each_row(refusals: _Refusals) -> None:
    assert _assert_rows_are_refused(refusals.of_partition, _ASKED_OF_PARTITION) > 15


def test_partition_refuses_no_other_pair(refusals: _Refusals) -> None:
    assert not _others_than_rows(refusals.of_partition, _ASKED_OF_PARTITION)
