"""Tests that a fit reads the data, draws from the generators and keeps buffers as Lightning does. Changes
that a hook makes after the workers have made their steps are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
import torch.nn.functional as F
from networks import make_torchvision_importable
from torch import Tensor
from torch.utils.data import DataLoader

make_torchvision_importable()
L = pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

from pipedream.integrations import lightning as front  # noqa: E402
from pipedream.integrations.lightning_pipeline import _figures_of  # noqa: E402
from test_lightning import NUM_LAYERS, Net, arguments, loaders, net  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Unsized:
    """A loader's batches, without a length."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class Data(L.LightningDataModule):  # type: ignore[misc]
    """Makes new loaders, with new generators, whenever it is asked."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loaders()[0]

    def val_dataloader(self) -> DataLoader[Any]:
        return loaders()[1]


class Centred(Net):
    """Its training step replaces a buffer."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.register_buffer("centre", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        loss = F.cross_entropy(outputs - self.centre, batch[1])
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        self.log("train_loss", loss)
        return loss


CASES: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    # name: (module, arguments of fit, arguments of Trainer)
    "a step replaces a buffer": (Centred, {}, {}),
    "held-out data without a length": (Net, {"val_dataloaders": Unsized(loaders()[1])}, {}),
    "data without a length, limited": (
        Net,
        {"train_dataloaders": Unsized(DataLoader(loaders()[0].dataset, 8))},
        {"limit_train_batches": 6, "val_check_interval": 3},
    ),
    "loaders of every epoch": (
        Net,
        {"train_dataloaders": None, "val_dataloaders": None, "datamodule": Data()},
        {"reload_dataloaders_every_n_epochs": 1},
    ),
    "batches before the training": (Net, {}, {"num_sanity_val_steps": 2}),
}


def _trained(folder: Path, case: str, *, is_pipeline: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    kind, given, options = CASES[case]
    torch.manual_seed(3)
    module = (kind() if kind is Centred else kind("epoch")).double()
    train, val = loaders()
    data = {"train_dataloaders": train, "val_dataloaders": val} | copy.deepcopy(given)
    if is_pipeline:
        plan = pipedream.Plan.straight(NUM_LAYERS, 2)
        trainer = front.fit(module, plan=plan, **data, **arguments(folder, **options))
    else:
        options = {"num_sanity_val_steps": 0} | options
        trainer = L.Trainer(accelerator="cpu", **arguments(folder, **options))
        trainer.fit(module, **data)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return state, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("case", CASES)
def test_parts_train_as_the_trainer_does(farm: Any, tmp_path: Path, case: str) -> None:
    weights, metrics = _trained(tmp_path / "theirs", case, is_pipeline=False)
    mine = farm.results(_trained, tmp_path / "mine", case, is_pipeline=True, num_ranks=2)[0]
    assert mine[1] == pytest.approx(metrics, abs=1e-6)
    torch.testing.assert_close(mine[0], weights, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda: {"a": loaders()[0]}, {}, "train_dataloaders is a loader in a dict: give the loader itself"),
        (lambda: Unsized(loaders()[0]), {"val_check_interval": 3}, "have no length, and Lightning validates"),
        (lambda: Unsized(loaders()[0]), {}, "yield another first batch when they are iterated again, and"),
        (
            lambda: loaders()[0],
            {"val_check_interval": 4, "accumulate_grad_batches": 3},
            "validates after batch 4 of the epoch, between the batches of one step: choose a val_check",
        ),
    ],
    ids=["dict", "unsized", "shuffled", "accumulated"],
)
def test_data_that_cannot_be_read_in_parts_are_refused(
    tmp_path: Path, data: Any, options: dict[str, Any], message: str
) -> None:
    plan = pipedream.Plan.straight(NUM_LAYERS, 2)
    with pytest.raises(ValueError, match=message):
        front.fit(net("epoch"), data(), loaders()[1], plan=plan, **arguments(tmp_path, **options))


class ByBatch(L.Callback):  # type: ignore[misc]
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 1e-3 * (1 + trainer.global_step)


class Clamping(L.Callback):  # type: ignore[misc]
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.head.weight.data.clamp_(-0.05, 0.05)


class Freezing(L.Callback):  # type: ignore[misc]
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.head.weight.requires_grad_(trainer.current_epoch == 0)


class Swapping(L.Callback):  # type: ignore[misc]
    """Validates with other weights."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        module.head.weight.data.mul_(2)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.head.weight.data.div_(2)


class Counting(Net):
    """Its scheduler follows the trainer's count of steps."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.last_epoch = self.global_step // 2
        scheduler.step()


def _refusal(folder: Path, case: str) -> str:
    module = Counting() if case == "steps" else Net("epoch")
    changes: dict[str, Any] = {
        "rate": ByBatch,
        "weights": Clamping,
        "frozen": Freezing,
        "swapped": Swapping,
    }
    callbacks = [changes[case]()] if case in changes else []
    plan = pipedream.Plan.straight(NUM_LAYERS, 2)
    try:
        front.fit(module.double(), *loaders(), plan=plan, **arguments(folder, callbacks=callbacks))
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("rate", "a callback or lr_scheduler_step changed the optimizer's options before step 1, which"),
        ("steps", "a callback or lr_scheduler_step changed the optimizer's options before step"),
        ("weights", "a hook or callback changed, froze or thawed the parameter 'head.weight' during the"),
        ("frozen", "a hook or callback changed, froze or thawed the parameter 'head.weight' during the"),
        ("swapped", "a hook or callback changed, froze or thawed the parameter 'head.weight' during the"),
    ],
)
def test_changes_that_come_too_late_for_the_workers_are_refused(
    farm: Any, tmp_path: Path, case: str, message: str
) -> None:
    for told in farm.results(_refusal, tmp_path, case, num_ranks=2):
        assert message in told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8])
def test_a_change_of_parameters_of_any_dtype_is_seen(dtype: torch.dtype) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(1000).to(dtype), requires_grad=False)
    before = _figures_of(module)
    assert _figures_of(module) == before
    module.weight[0] += 1
    assert _figures_of(module) != before
