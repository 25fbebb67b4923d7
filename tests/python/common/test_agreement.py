"""Tests that ranks compare all options of a run that must agree, and tell no secret."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from pipedream import Plan
from pipedream.callbacks.steering import CallPoints
from pipedream.common.agreement import OWN, compared, difference, given, settings_of
from pipedream.links.keys import CurveKeys
from pipedream.links.options import LinkOptions
from pipedream.planning.job import Replication
from pipedream.stage.job import JobOptions, MemoryOptions, OutputOptions


@dataclasses.dataclass(frozen=True)
class Inner:
    name: str
    secret: str | None = dataclasses.field(metadata=compared(said=given))


@dataclasses.dataclass(frozen=True)
class Options:
    new: Any
    inner: Inner
    folder: str = dataclasses.field(default="", metadata=OWN)
    size_bytes: int = dataclasses.field(default=0, metadata=compared("size"))


_OPTIONS = Options((1, 2), Inner("a", None))


def _differs(**changed: Any) -> str | None:
    return difference(settings_of(dataclasses.replace(_OPTIONS, **changed)), 3, settings_of(_OPTIONS))


def test_a_field_is_compared_unless_it_is_declared_otherwise() -> None:
    assert _differs() is None
    assert _differs(folder="elsewhere") is None
    remedy = "give all ranks the same arguments"
    assert _differs(new=(1, 3)) == f"new is [1, 3] at rank 3, but [1, 2] at rank 0: {remedy}"
    assert _differs(inner=Inner("b", None)) == f"name is 'b' at rank 3, but 'a' at rank 0: {remedy}"
    assert _differs(size_bytes=1) == f"size is 1 at rank 3, but 0 at rank 0: {remedy}"
    assert _differs(inner=Inner("a", "x")) == f"secret is 'given' at rank 3, but None at rank 0: {remedy}"


def test_a_secret_is_said_nowhere() -> None:
    keys = CurveKeys("p" * 40, "s" * 40, ("p" * 40,))
    assert "s" * 40 not in str(settings_of(keys))
    assert settings_of(LinkOptions(keys=keys))["keys"] == "given"


def test_a_setting_that_one_rank_does_not_know_is_named() -> None:
    known, unknown = {"new": 1, "both": 2}, {"both": 2}
    for mine, of_rank_0 in ((known, unknown), (unknown, known)):
        assert difference(mine, 1, of_rank_0) == (
            "new is known to one of rank 1 and rank 0 alone: install one version everywhere"
        )


def test_all_options_of_a_run_are_compared_but_those_of_one_rank() -> None:
    options = JobOptions(
        plan=Plan.straight(2, 2),
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        lr_scheduler=torch.optim.lr_scheduler.StepLR,
        schedule="2bw",
        replication=Replication("ssp", 2, 3),
        microbatches=2,
        weight_fn=torch.numel,
        memory=MemoryOptions(1 << 30, (True, False)),
        autocast=torch.bfloat16,
        max_grad_norm=1.0,
        epochs=2,
        seed=7,
        links=LinkOptions(),
        on_nonfinite="stop",
        output=OutputOptions("rank0", "saved", True),
        weights="weights",
        num_threads=1,
    )
    assert settings_of(options) == {
        "lr_scheduler": "given",
        "validation": None,
        "checkpoints": None,
        "state": None,
        "callbacks": repr(CallPoints()),
        "schedule": "2bw",
        "sync": "ssp",
        "staleness": 2,
        "sync_every": 3,
        "microbatches": 2,
        "weight_fn": "given",
        "recompute": [True, False],
        "memory": "given",
        "autocast": "torch.bfloat16",
        "max_grad_norm": 1.0,
        "epochs": 2,
        "seed": 7,
        "transport": "auto",
        "codec": None,
        "peer_timeout": 15.0,
        "keys": None,
        "on_nonfinite": "stop",
        "gather": "rank0",
        "weights": "given",
        "save": "saved",
    }
