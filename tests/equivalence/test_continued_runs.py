"""A run that continues from any of its checkpoints ends as one without a break, to the last bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream import Checkpoints
from pipedream.checkpoint.checkpoint_folder import checkpoints_in
from training import OPTIMIZERS, State, Training, assert_equal_state, is_rank_0

_falling = functools.partial(
    torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=60, cycle_momentum=False
)


def _train(
    training: Training, checkpoints: Checkpoints, epochs: int = 2
) -> tuple[list[float], State, list[float]]:
    model = training.model()
    if not is_rank_0():
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
    arguments = {**training.options(), "progress": False, "epochs": epochs, "checkpoints": checkpoints}
    result = pipedream.run(model, training.plan, **arguments)
    return result.losses, model.state_dict(), result.epoch_losses


@pytest.mark.parametrize(
    ("case_name", "num_stages", "how"),
    [
        ("cnn", 3, {}),
        ("cnn", 2, {"schedule": "2bw", "microbatches": 2}),
        ("transformer", 3, {"schedule": "flush", "microbatches": 3, "optimizer": OPTIMIZERS["adamw"]}),
        ("lstm", 4, {"schedule": "interleaved", "microbatches": 2}),
        ("cnn", 2, {"microbatches": 4, "shuffled": True, "optimizer": OPTIMIZERS["adamw"]}),
        ("transformer", 2, {"schedule": "vertical_sync", "lr_scheduler": _falling}),
        ("frozen", 2, {"recompute": True, "in_flight": (4, 2)}),
        ("dropout", 1, {"shuffled": True}),
        ("cnn", 3, {"schedule": "unstashed"}),
        ("tied_apart", 3, {"optimizer": OPTIMIZERS["adam"]}),
        ("transformer", 3, {"dtype": torch.float32, "autocast": "float16", "max_grad_norm": 0.5}),
        ("cnn", 2, {"replicas": (1, 2), "schedule": "vertical_sync", "optimizer": OPTIMIZERS["adam"]}),
        ("dropout", 2, {"replicas": (2, 2), "schedule": "unstashed", "shuffled": True}),
        ("transformer", 2, {"replicas": (2, 1), "schedule": "flush", "microbatches": 2}),
        ("cnn", 2, {"replicas": (2, 1), "sync": "allreduce"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_run_that_continues_from_any_checkpoint_ends_as_the_whole(
    farm: Farm, tmp_path: Path, case_name: str, num_stages: int, how: dict[str, Any]
) -> None:
    training = Training(case_name, num_stages, num_minibatches=4, **how)
    run = functools.partial(farm.results, _train, training, num_ranks=training.num_workers)
    whole = run(Checkpoints(tmp_path / "whole", every=1, keep=99))[0]
    written = checkpoints_in(tmp_path / "whole")
    assert len(written) == (4 if "replicas" in how and "microbatches" not in how else 8)
    for checkpoint in (written[1], written[-1]):
        continued = run(Checkpoints(tmp_path / checkpoint.name, every=3, resume=checkpoint))[0]
        assert continued[0] == whole[0], checkpoint.name
        assert continued[2] == whole[2]
        assert_equal_state(continued[1], whole[1])


def _continue(training: Training, checkpoints: Checkpoints) -> tuple[list[float], State]:
    losses, state, _ = _train(training, checkpoints)
    return losses, state


@pytest.mark.parametrize(
    ("case_name", "optimizer", "how"),
    [
        ("mlp", "adam", {"num_stages": 2}),
        ("transformer", "adamw", {"num_stages": 4}),
        ("tied_apart", "sgd", {"num_stages": 1}),
        ("mlp", "adam", {"num_stages": 1, "schedule": "data_parallel", "replicas": (2,), "microbatches": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_another_plan_goes_on_from_the_newest_version_of_each_parameter(
    farm: Farm, tmp_path: Path, case_name: str, optimizer: str, how: dict[str, Any]
) -> None:
    """Draining schedules give the numbers of plain training, whatever the plan."""
    make = functools.partial(
        Training, case_name, num_minibatches=4, optimizer=OPTIMIZERS[optimizer], short_last=False
    )
    first = make(num_stages=3, schedule="flush", microbatches=1)
    folder = tmp_path / "whole"
    whole = farm.results(_train, first, Checkpoints(folder, every=1, keep=99), num_ranks=3)[0]
    other = make(**{"schedule": "flush", "microbatches": 1} | how)
    checkpoint = checkpoints_in(folder)[2]
    checkpoints = Checkpoints(tmp_path / "other", resume=checkpoint)
    losses, state = farm.results(_continue, other, checkpoints, num_ranks=other.num_workers)[0]
    assert losses[:3] == whole[0][:3]
    assert losses == pytest.approx(whole[0], rel=1e-9)
    for name, value in whole[1].items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9)
