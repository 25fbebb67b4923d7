"""Tests that local workers get the caller's switches and start method."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest
import torch
from farm import Farm
from pipedream.stage.job import CallerSettings


def _start_methods(settings: CallerSettings) -> tuple[str, str]:
    """Applies these settings at a rank, and returns its start and sharing methods. Then restores the rank's
    own settings.
    """
    own = CallerSettings.capture()
    settings.apply()
    found = multiprocessing.get_start_method(), torch.multiprocessing.get_sharing_strategy()
    own.apply()
    return found


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_workers_processes_start_as_the_callers_would(farm: Farm, method: str) -> None:
    settings = replace(CallerSettings.capture(), start_method=method, sharing_strategy="file_system")
    assert farm.results(_start_methods, settings, num_ranks=1) == [(method, "file_system")]


def _switched(settings: CallerSettings) -> CallerSettings:
    """Applies these settings at a rank, and returns the settings that it then has. Then restores the rank's
    own.
    """
    own = CallerSettings.capture()
    settings.apply()
    found = CallerSettings.capture()
    own.apply()
    return found


def test_a_worker_has_the_callers_switches(farm: Farm) -> None:
    own = CallerSettings.capture()
    turned = {name: not is_on for name, is_on in own.switches.items()}
    settings = replace(own, switches=turned, anomalies=(True, False))
    (found,) = farm.results(_switched, settings, num_ranks=1)
    assert found.switches == turned and len(turned) == 9
    assert found.anomalies == (True, False)


def test_looking_does_not_settle_the_callers_start_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: None)
    assert CallerSettings.capture().start_method == multiprocessing.get_all_start_methods()[0]


def test_a_worker_has_the_callers_precision_of_float32(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sets torch.backends.fp32_precision for `tf32`. torch's older function does not report a
    precision that was set in this way.
    """
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    settings = CallerSettings.capture()
    assert settings.matmul_precision is None
    (found,) = farm.results(_switched, settings, num_ranks=1)
    assert found.fp32_precisions == settings.fp32_precisions
    assert {found.fp32_precisions[name] for name in ("", "cuda.matmul", "mkldnn.conv")} == {"tf32"}
