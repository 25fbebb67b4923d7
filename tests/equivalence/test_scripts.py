"""A user's script: the same lines train in local workers and under torchrun, with the same result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = '''
import functools, json, os, sys, torch, pipedream

with open(sys.argv[1] + ".imports", "a") as file:
    print(os.getpid(), file=file)

class Scale(torch.nn.Module):
    """A layer of the script's own."""
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
    def forward(self, value):
        return self.weight * value

def loss_fn(outputs, targets):
    return ((outputs - targets) ** 2).mean()

if __name__ == "__main__":
    torch.manual_seed(3)
    model = torch.nn.Sequential(Scale(), torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))
    dataset = torch.utils.data.TensorDataset(torch.randn(30, 4), torch.randn(30, 4))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1)
    result = pipedream.run(
        model, pipedream.Plan.straight(4, 2), data=loader, loss_fn=loss_fn, epochs=2, progress=False,
        optimizer=functools.partial(pipedream.optim.SGD, lr=0.1, momentum=0.9),
    )
    if os.environ.get("RANK", "0") == "0":
        state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        with open(sys.argv[1], "w") as file:
            json.dump({"losses": result.losses, "state": state}, file)
'''

_UNGUARDED = """
import torch, pipedream
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
pipedream.run(
    model, pipedream.Plan.straight(2, 2), data=[(torch.ones(2, 2), torch.ones(2, 2))],
    loss_fn=torch.nn.functional.mse_loss, optimizer=torch.optim.Adagrad,
)
"""

_DEADLINE_S = 120


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
def test_a_guarded_script_gives_the_same_result_plainly_and_under_torchrun(tmp_path: Path) -> None:
    script, plain, ranks = (tmp_path / name for name in ("train.py", "plain.json", "ranks.json"))
    script.write_text(_SCRIPT, encoding="utf-8")
    done = _run([str(script), str(plain)])
    assert done.returncode == 0, done.stderr
    # The caller and two workers; the processes of their DataLoaders are forked, as the caller's would be.
    imports = plain.with_suffix(".json.imports").read_text(encoding="utf-8").split()
    assert len(imports) == 3
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = _run([*torchrun, str(script), str(ranks)])
    assert done.returncode == 0, done.stderr
    result = json.loads(plain.read_text(encoding="utf-8"))
    assert len(result["losses"]) == 16
    assert result == json.loads(ranks.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_script_without_the_guard_is_told_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_UNGUARDED, encoding="utf-8")
    done = _run([str(script)])
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "__main__" in line]
    assert len(said) == 1
    assert 'put what calls pipedream under `if __name__ == "__main__":`' in said[0]
