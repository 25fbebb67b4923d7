"""Tests tools/gpu_check.py: the steps that it would run, and its report. Steps may fail, hang, or be left out
for lack of time.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

_ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", _ROOT / "tools" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


gpu_check = _load()


def _step(name: str, code: str, *needs: str, limit_s: float = 60.0) -> object:
    return gpu_check.Step(name, (sys.executable, "-c", code), needs, limit_s=limit_s)


@pytest.mark.parametrize("group", gpu_check.GROUPS)
def test_a_group_is_usable_alone_and_names_what_is_in_the_repository(group: str) -> None:
    seen: set[str] = set()
    for step in gpu_check.steps_of(group):
        assert step.name not in seen and set(step.needs) <= seen, step.name
        seen.add(step.name)
        for word in step.command:
            if word.startswith(("tests/", "bench/", "examples/", "tools/")):
                assert (_ROOT / word).exists(), word
            elif Path(word).name.startswith("pd_") and word.endswith("_test"):
                assert (_ROOT / "tests" / "cpp" / Path(word).name[3:-5]).is_dir(), word
            elif Path(word).name.startswith("pd_"):
                assert (_ROOT / "bench" / "micro" / f"{Path(word).name[3:]}.cc").exists(), word


def test_a_failure_stops_only_what_needs_it(tmp_path: Path) -> None:
    group = gpu_check.Group(tmp_path / "log", 60.0)
    group.run(_step("build", "print('no compiler'); raise SystemExit(3)"))
    group.run(_step("tests", "print('must not run')", "build"))
    group.run(_step("bench", "print('{\"us\": 3.5}'); print('[1, 2]'); print('{not json')"))
    assert [outcome.status for outcome in group.outcomes] == ["failed", "not run", "passed"]
    assert group.outcomes[0].tail == "no compiler"
    assert group.outcomes[1].tail == "build did not pass"
    assert group.outcomes[2].figures == [{"us": 3.5}, [1, 2]]
    log = (tmp_path / "log").read_text()
    assert "no compiler" in log and "must not run" not in log


def test_a_step_that_hangs_ends_with_its_children_at_its_limit(tmp_path: Path) -> None:
    group = gpu_check.Group(tmp_path / "log", 60.0)
    # The child keeps the pipe open. A read of the whole output would wait for the child.
    code = (
        "import subprocess, sys; print('began', flush=True);"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    )
    outcome = group.run(_step("hangs", code, limit_s=1.0))
    assert (outcome.status, outcome.tail) == ("timed out", "began")


def test_a_group_without_time_left_says_what_it_did_not_run(tmp_path: Path) -> None:
    group = gpu_check.Group(tmp_path / "log", 0.0)
    outcome = group.run(_step("late", "print('must not run')"))
    assert (outcome.status, outcome.tail) == ("not run", "no time was left")
    assert not (tmp_path / "log").exists()


def test_results_say_device_commit_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "steps_of", lambda group: [_step("one", "print('{\"ms\": 1}')")])
    assert gpu_check.run_group("speed", tmp_path, 60.0)
    found = json.loads((tmp_path / "speed.json").read_text())
    assert found.keys() >= {"group", "commit", "device", "torch", "nvcc", "command", "steps"}
    assert found["command"] == "tools/gpu_check.sh speed --limit 60"
    assert [(step["name"], step["status"], step["figures"]) for step in found["steps"]] == [
        ("one", "passed", [{"ms": 1}])
    ]


def test_an_unknown_group_is_refused() -> None:
    script = str(_ROOT / "tools" / "gpu_check.sh")
    done = subprocess.run([script, "cores"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "group 'cores' is unknown: use core, training, speed, models" in done.stderr
