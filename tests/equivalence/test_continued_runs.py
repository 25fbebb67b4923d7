"""Tests that a run that continues from any of its checkpoints ends exactly like an unbroken run."""

from __future__ import annotations

import functools
import math
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pipedream
import pytest
import torch
from covering import Row, covering_rows
from farm import Farm
from pipedream import Checkpoints
from pipedream.budget import offload
from pipedream.checkpoint.checkpoint_folder import checkpoints_in, find_checkpoint
from pipedream.checkpoint.whole_model import read_whole_state
from pipedream.planning.plan import Plan, Stage
from torch import nn
from training import OPTIMIZERS, State, Training, assert_equal_state, is_rank_0, weight_decay_by_name

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


_NUMBERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw": {"optimizer": OPTIMIZERS["adamw"], "lr_scheduler": _falling},
    "masters": {
        "dtype": torch.bfloat16,
        "optimizer": functools.partial(pipedream.optim.MasterWeights, torch.optim.AdamW, lr=0.01),
    },
    "native masters": {
        "dtype": torch.bfloat16,
        "optimizer": functools.partial(pipedream.optim.NAdamW, lr=0.01),
    },
    "float16": {"dtype": torch.float32, "autocast": "float16", "max_grad_norm": 0.5},
}
_REPLICAS: dict[str, dict[str, Any]] = {
    "straight": {},
    "bsp": {"replicas": (2, 1)},
    "ssp": {"replicas": (1, 2), "sync": "ssp", "staleness": 2},
    "allreduce": {"replicas": (1, 2), "sync": "allreduce"},
    "sync_every": {"replicas": (2, 2), "sync_every": 2},
}
_FACTORS: dict[str, list[Any]] = {
    "schedule": ["pipedream", "vertical_sync", "2bw", "flush", "gpipe", "unstashed", "interleaved"],
    "replicas": list(_REPLICAS),
    "numbers": list(_NUMBERS),
    "case_name": ["cnn", "dropout", "transformer", "tied_apart"],
    "memory": ["", "recompute", "offload"],
    "microbatches": [1, 2],
    "shuffled": [False, True],
}


def _is_allowed(row: Row) -> bool:
    schedule, replicas, numbers = (row.get(name) for name in ("schedule", "replicas", "numbers"))
    return not (
        (schedule in ("2bw", "interleaved") and row.get("microbatches") == 1)
        or (schedule == "interleaved" and replicas not in (None, "straight"))
        or (replicas == "ssp" and schedule not in (None, "pipedream"))
        or (
            replicas in ("allreduce", "sync_every") and numbers == "float16"
        )  # float16 needs a norm of all stages
        or (replicas == "sync_every" and numbers in ("masters", "native masters"))
    )


def _training_of(row: Row) -> Training:
    how = {name: row[name] for name in ("schedule", "microbatches", "shuffled")}
    how |= _NUMBERS[row["numbers"]] | _REPLICAS[row["replicas"]]
    return Training(
        row["case_name"],
        4 if row["schedule"] == "interleaved" else 2,
        recompute=True if row["memory"] == "recompute" else None,
        **how,
        num_minibatches=4,
    )


def _train_offloaded(*arguments: Any, offloads: bool) -> tuple[list[float], State, list[float]]:
    if not offloads:
        return _train(*arguments)
    with (
        mock.patch.object(offload, "SMALL_BYTES", 0),
        mock.patch.dict(os.environ, {"PIPEDREAM_OFFLOAD": "activations,versions"}),
    ):
        return _train(*arguments)


def _assert_continues(farm: Farm, folder: Path, training: Training, *, offloads: bool = False) -> None:
    run = functools.partial(
        farm.results, _train_offloaded, training, offloads=offloads, num_ranks=training.num_workers
    )
    whole = run(Checkpoints(folder / "whole", every=1, keep=99))[0]
    third = checkpoints_in(folder / "whole")[2]
    continued = run(Checkpoints(folder / "continued", every=3, resume=third))[0]
    assert continued[0] == whole[0]
    assert continued[2] == whole[2]
    assert_equal_state(continued[1], whole[1])


@pytest.mark.parametrize(
    "row", covering_rows(_FACTORS, _is_allowed), ids=lambda row: "-".join(map(str, row.values()))
)
def test_a_run_that_continues_from_a_checkpoint_ends_as_the_whole(
    farm: Farm, tmp_path: Path, row: Row
) -> None:
    _assert_continues(farm, tmp_path, _training_of(row), offloads=row["memory"] == "offload")


@pytest.mark.parametrize(
    ("case_name", "num_stages", "how"),
    [
        ("cnn", 3, {}),
        ("lstm", 4, {"schedule": "interleaved", "microbatches": 2}),
        ("frozen", 2, {"recompute": True, "in_flight": (4, 2)}),
        ("dropout", 1, {"shuffled": True}),
        ("tied_apart", 3, {"optimizer": OPTIMIZERS["adam"]}),
        ("dropout", 2, {"replicas": (2, 2), "schedule": "unstashed", "shuffled": True}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_other_depths_and_replicas_continue_too(
    farm: Farm, tmp_path: Path, case_name: str, num_stages: int, how: dict[str, Any]
) -> None:
    _assert_continues(farm, tmp_path, Training(case_name, num_stages, num_minibatches=4, **how))


class _Averaged(nn.Module):
    """Has a frozen layer whose weight the forward averages from another weight, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.average = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.average.requires_grad_(False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        mine = self.average.weight
        mine.data = mine.data * 0.5 + self.trained.weight.data * 0.5
        out: torch.Tensor = self.trained(value) + self.average(value)
        return out


class _Centred(nn.Module):
    """A loss that keeps a centre in a buffer, and counts its calls."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros((), dtype=torch.float64))
        self.num_calls = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        loss = (outputs - targets - self.centre).square().mean() * self.num_calls
        self.centre.mul_(0.5).add_(outputs.detach().mean())
        return loss


def _train_averaged(
    checkpoints: Checkpoints, num_stages: int, seed: int
) -> tuple[list[float], State, float, int]:
    torch.manual_seed(seed)
    model, loss_fn = nn.Sequential(_Averaged(), nn.Linear(4, 4).double()), _Centred()
    generator = torch.Generator().manual_seed(0)
    data = list(torch.randn(5, 2, 3, 4, generator=generator, dtype=torch.float64))
    result = pipedream.run(
        model,
        Plan.straight(2, num_stages),
        data=[tuple(batch) for batch in data],
        loss_fn=loss_fn,
        optimizer=OPTIMIZERS["sgd"],
        schedule="flush",
        checkpoints=checkpoints,
        progress=False,
    )
    return result.losses, model.state_dict(), float(loss_fn.centre), loss_fn.num_calls


@pytest.mark.parametrize("num_stages", [1, 2])
def test_frozen_weights_and_the_state_of_the_loss_continue(
    farm: Farm, tmp_path: Path, num_stages: int
) -> None:
    how = Checkpoints(tmp_path / "whole", every=1, keep=99)
    whole = farm.results(_train_averaged, how, 2, 0, num_ranks=2)[0]
    third = checkpoints_in(tmp_path / "whole")[2]
    how = Checkpoints(tmp_path / "continued", every=9, resume=third)
    continued = farm.results(_train_averaged, how, num_stages, 1, num_ranks=num_stages)[0]
    assert continued[0] == whole[0]
    assert_equal_state(continued[1], whole[1])
    assert continued[2:] == whole[2:]


class _Growing(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Eight minibatches. The third and the sixth have 8 samples, the others have 4."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = functools.partial(
            torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(index)
        )
        count = 8 if index % 3 == 2 else 4
        return draw(count, 8), draw(count, 4)


def _train_growing(checkpoints: Checkpoints) -> list[float]:
    training = Training("mlp", 2)
    data: Any = torch.utils.data.DataLoader(_Growing(), batch_size=None)
    how = {**training.options(), "progress": False, "checkpoints": checkpoints, "data": data}
    return pipedream.run(training.model(), training.plan, **how).losses


def test_a_run_that_has_met_larger_minibatches_does_not_drain_for_them_again(
    farm: Farm, tmp_path: Path
) -> None:
    whole = farm.results(_train_growing, Checkpoints(tmp_path / "C", every=1, keep=99), num_ranks=2)[0]
    for checkpoint in checkpoints_in(tmp_path / "C")[0:5:2]:
        checkpoints = Checkpoints(tmp_path / checkpoint.name, resume=checkpoint)
        assert farm.results(_train_growing, checkpoints, num_ranks=2)[0] == whole, checkpoint.name


class _Counting(torch.nn.Linear):
    """A layer whose weight falls by 2^i in the update of minibatch i, because 2^i is that minibatch's input.

    The forward of minibatch 1 waits for a file which says that another replica has begun minibatch 2.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(self.weight)
        self._begun = folder / "minibatch 2 has begun"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.equal(inputs, torch.full_like(inputs, 4.0)):
            self._begun.touch()
        while torch.equal(inputs, torch.full_like(inputs, 2.0)) and not self._begun.exists():
            time.sleep(0.001)
        return super().forward(inputs)


def _sum_of_outputs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def _train_counting(
    folder: Path, replicas: tuple[int, ...], checkpoints: Checkpoints, **how: Any
) -> tuple[list[float], float]:
    counting = _Counting(folder)
    model = torch.nn.Sequential(*(counting if count > 1 else torch.nn.Identity() for count in replicas))
    stages = (Stage(index, index, count) for index, count in enumerate(replicas))
    data = [(torch.full((1, 1), 2.0**i, dtype=torch.float64), torch.zeros(1)) for i in range(12)]
    options: dict[str, Any] = {"data": data, "loss_fn": _sum_of_outputs, "checkpoints": checkpoints}
    options["optimizer"] = functools.partial(torch.optim.SGD, lr=1.0)
    options |= {"schedule": "data_parallel" if len(replicas) == 1 else "pipedream", "sync": "asp"} | how
    result = pipedream.run(model, Plan(tuple(stages)), progress=False, **options)
    return result.losses, counting.weight.item()


@pytest.mark.parametrize(("replicas", "every"), [((2,), 4), ((3,), 6), ((2, 1), 4), ((1, 2), 4)])
def test_asynchronous_replicas_continue_with_each_gradient_in_the_weights_once(
    farm: Farm, tmp_path: Path, replicas: tuple[int, ...], every: int
) -> None:
    run = functools.partial(farm.results, _train_counting, tmp_path, replicas, num_ranks=sum(replicas))
    losses, weight = run(Checkpoints(tmp_path / "whole", every=every, keep=99))[0]
    assert weight == -(2.0**12 - 1)
    checkpoints = checkpoints_in(tmp_path / "whole")
    assert len(checkpoints) == 12 // every
    for checkpoint in checkpoints:
        whole = read_whole_state(checkpoint, find_checkpoint(checkpoint)[1])
        saved_at = find_checkpoint(checkpoint)[1].header.minibatch
        assert [value.item() for value in whole.parameters.values()] == [-(2.0**saved_at - 1)]
    continued = run(Checkpoints(tmp_path / "continued", every=every, resume=checkpoints[0]))[0]
    assert len(continued[0]) == 12
    assert continued[0][:every] == losses[:every]
    assert continued[1] == weight


@pytest.mark.parametrize(
    ("replicas", "others"), [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((1, 2), (2, 2)), ((2, 1), (1, 3))], ids=str
)
def test_a_run_with_asynchronous_shards_continues_with_its_plan_and_with_another(
    farm: Farm, tmp_path: Path, replicas: tuple[int, ...], others: tuple[int, ...]
) -> None:
    how: dict[str, Any] = {"sync": "asp", "num_minibatches": 6, "optimizer": OPTIMIZERS["adam"]}
    training = Training("cnn", 2, replicas=replicas, shuffled=True, **how)
    run = functools.partial(farm.results, _train)
    folder = tmp_path / "whole"
    whole = run(training, Checkpoints(folder, every=2, keep=99), num_ranks=training.num_workers)[0]
    checkpoint = checkpoints_in(folder)[1]
    for plan in {replicas, others}:
        other = Training("cnn", 2, replicas=plan, shuffled=True, **how)
        continued = run(
            other, Checkpoints(tmp_path / str(plan), resume=checkpoint), num_ranks=other.num_workers
        )[0]
        minibatch = find_checkpoint(checkpoint)[1].header.minibatch
        assert continued[0][: minibatch - minibatch % 6] == whole[0][: minibatch - minibatch % 6]
        assert len(continued[0]) == 12
        assert all(map(math.isfinite, continued[0]))
        if plan == replicas == (1, 1):
            assert continued[0] == whole[0]
            assert_equal_state(continued[1], whole[1])


_BY_NAME = {
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.05),
    "rates by name": weight_decay_by_name,
}


def _decayed(step: int) -> float:
    return 1 / (1 + step)


def _continue(training: Training, checkpoints: Checkpoints) -> tuple[list[float], State]:
    losses, state, _ = _train(training, checkpoints)
    return losses, state


@pytest.mark.parametrize(
    ("case_name", "optimizer", "how"),
    [
        ("mlp", "adam", {"num_stages": 2}),
        ("transformer", "adamw", {"num_stages": 4}),
        ("tied_apart", "sgd", {"num_stages": 1}),
        ("mlp", "adafactor", {"num_stages": 2}),
        ("mlp", "rates by name", {"num_stages": 2}),
        ("mlp", "rates by name", {"num_stages": 1}),
        ("mlp", "adam", {"num_stages": 1, "schedule": "data_parallel", "replicas": (2,), "microbatches": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_another_plan_goes_on_from_the_newest_version_of_each_parameter(
    farm: Farm, tmp_path: Path, case_name: str, optimizer: str, how: dict[str, Any]
) -> None:
    """Draining schedules give the numbers of plain training, whatever the plan."""
    make = functools.partial(
        Training,
        case_name,
        num_minibatches=4,
        optimizer=_BY_NAME.get(optimizer) or OPTIMIZERS[optimizer],
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_decayed),
        short_last=False,
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
