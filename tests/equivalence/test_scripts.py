"""Tests that a user's script gives the same result in local workers and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_UNGUARDED = """
import torch, pipedream
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
pipedream.run(
    model, pipedream.Plan.straight(2, 2), data=[(torch.ones(2, 2), torch.ones(2, 2))],
    loss_fn=torch.nn.functional.mse_loss, optimizer=torch.optim.Adagrad,
)
"""

_ODD_SCRIPT = str(Path(__file__).with_name("odd_script.py"))
_OF_LATER_LOSSES = {"class_of_parameters", "lambdas_of_the_update", "mean_over_something_else"}

_DEADLINE_S = 300


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=_DEADLINE_S,
    )


@pytest.mark.slow
def test_scripts_give_the_same_losses_plainly_and_under_torchrun_whatever_they_set_and_patch(
    tmp_path: Path,
) -> None:
    plain, ranks = tmp_path / "plain.json", tmp_path / "ranks.json"
    done = _run([_ODD_SCRIPT, str(plain)])
    assert done.returncode == 0, done.stderr
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = _run([*torchrun, _ODD_SCRIPT, str(ranks)])
    assert done.returncode == 0, done.stderr
    found, expected = (json.loads(path.read_text(encoding="utf-8")) for path in (plain, ranks))
    assert list(found) == list(expected) and sum(len(group["without"]) for group in found.values()) > 25
    for name, group in found.items():
        assert group["losses"] == expected[name]["losses"], name
        assert group["state"] == expected[name]["state"], name
        assert group["validation"] == expected[name]["validation"] != [], name
        if name != "nothing":  # that script has dropout, and its data are shuffled
            assert group["losses"][0] == pytest.approx(
                group["first"], rel=1e-2 if name == "autocast" else 1e-6
            )
        without = [odd for odd, loss in group["without"].items() if loss == group["first"]]
        assert set(without) <= _OF_LATER_LOSSES, f"{without} of {name} change nothing"
    # The caller imports the script, and so do two workers of each run. Processes of a worker's DataLoader are
    # forked, as in the caller, so they do not import it.
    imports = (tmp_path / "plain.json.imports").read_text(encoding="utf-8").split()
    assert len(imports) == 1 + 2 * len(found)


@pytest.mark.slow
def test_a_script_without_the_guard_is_told_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_UNGUARDED, encoding="utf-8")
    done = _run([str(script)])
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "__main__" in line]
    assert len(said) == 1
    assert 'put what calls pipedream under `if __name__ == "__main__":`' in said[0]
