"""Tests that a LightningModule trained by `fit` as a pipeline equals the one that Lightning's Trainer
trains.
"""

from __future__ import annotations

import csv
import inspect
import os
import warnings
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
import torch.nn.functional as F
from networks import make_torchvision_importable
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

make_torchvision_importable()
L = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from pipedream.integrations import lightning as front  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

NUM_LAYERS = 5


class Net(L.LightningModule):
    """Has five layers, a parameter of its own, and a scheduler of the named kind."""

    def __init__(self, scheduler: str = "step") -> None:
        super().__init__()
        self.scheduler = scheduler
        self.layers = nn.ModuleList([nn.Linear(16 if index == 0 else 24, 24) for index in range(4)])
        if scheduler == "normalized":
            self.layers[0] = nn.Sequential(self.layers[0], nn.BatchNorm1d(24))
            self.layers[3] = nn.Sequential(nn.BatchNorm1d(24, momentum=None), self.layers[3])
        self.shift = nn.Parameter(torch.zeros(24))
        self.head = nn.Linear(24, 4)
        self.train_accuracy = torchmetrics.MeanMetric()  # a metric that counts in float32
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(4)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 1:
                x = x + self.shift
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        outputs = self(x)
        loss = F.cross_entropy(outputs, y, reduction="sum" if self.scheduler == "sum" else "mean")
        self.log("train_loss", loss, prog_bar=True)
        self.log("num_right", (outputs.argmax(1) == y).double().sum(), reduce_fx="sum")
        self.log("largest", outputs.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log_dict({"correct": (outputs.argmax(1) == y).double().mean()}, on_step=False, on_epoch=True)
        self.train_accuracy(outputs.detach().abs().mean())
        self.log("train_size", self.train_accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        outputs = self(x)
        self.log("val_loss", F.cross_entropy(outputs, y))
        self.val_accuracy(outputs, y)
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
        schedulers = torch.optim.lr_scheduler
        if self.scheduler in ("step", "sum", "normalized"):
            one = schedulers.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one, "interval": "step"}}
        if self.scheduler == "epoch":
            return [optimizer], [schedulers.StepLR(optimizer, 1, 0.5)]
        plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.3, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def loaders(batch_size: int = 8) -> tuple[DataLoader[Any], DataLoader[Any]]:
    torch.manual_seed(5)
    x = torch.randn(64, 16).double()
    y = x[:, :4].argmax(1)
    order = torch.Generator().manual_seed(1)
    train = DataLoader(TensorDataset(x, y), batch_size, shuffle=True, generator=order)
    return train, DataLoader(TensorDataset(x[:20], y[:20]), batch_size)


def net(scheduler: str = "step") -> Net:
    torch.manual_seed(3)
    return Net(scheduler).double()


def arguments(folder: Path, **given: Any) -> dict[str, Any]:
    return {
        "max_epochs": 2,
        "gradient_clip_val": 0.5,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": CSVLogger(folder, version=0),
        "default_root_dir": folder,
        "callbacks": [LearningRateMonitor(), *given.pop("callbacks", [])],
        **given,
    }


def figures(module: Net, trainer: Any, folder: Path) -> dict[str, Any]:
    """Returns all that a user sees of a training."""
    logged: list[dict[str, str]] = []
    if int(os.environ.get("RANK", "0")) == 0:
        trainer.logger.save()
        with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
            logged = list(csv.DictReader(file))
    return {
        "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
        "buffers": {name: value.clone() for name, value in module.layers.named_buffers()},
        "logged": [{name: float(value) for name, value in row.items() if value} for row in logged],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "best": os.path.basename(trainer.checkpoint_callback.best_model_path),
    }


def callbacks_of(kinds: tuple[Any, ...]) -> list[Any]:
    made = {
        "best": lambda: ModelCheckpoint(
            monitor="val_loss", filename="{epoch}-{val_loss:.6f}", save_last=True
        ),
        "steps": lambda: ModelCheckpoint(every_n_train_steps=3, save_top_k=-1),
        "stopping": lambda: EarlyStopping("val_loss", min_delta=0.5, patience=1),
    }
    return [made[kind]() if isinstance(kind, str) else kind for kind in kinds]


def by_trainer(folder: Path, scheduler: str, kinds: tuple[Any, ...], ckpt: Any = None, **given: Any) -> Any:
    module, (train, val) = net(scheduler), loaders()
    trainer = L.Trainer(
        accelerator="cpu",
        num_sanity_val_steps=0,
        **arguments(folder, callbacks=callbacks_of(kinds), **given),
    )
    trainer.fit(module, train, val, ckpt_path=ckpt)
    return figures(module, trainer, folder)


def by_pipeline(
    folder: Path, scheduler: str, kinds: tuple[Any, ...], workers: int, ckpt: Any = None, **given: Any
) -> Any:
    module, (train, val) = net(scheduler), loaders()
    trainer = front.fit(
        module,
        train,
        val,
        plan=pipedream.Plan.straight(NUM_LAYERS + (2 if scheduler == "normalized" else 0), workers),
        ckpt_path=ckpt,
        **arguments(folder, callbacks=callbacks_of(kinds), **given),
    )
    return figures(module, trainer, folder)


def assert_alike(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["weights"].keys() == theirs["weights"].keys()
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(mine["weights"][name], weight, rtol=0.0, atol=1e-9)
    torch.testing.assert_close(mine["buffers"], theirs["buffers"], rtol=0.0, atol=1e-9)
    assert len(mine["logged"]) == len(theirs["logged"])
    for row, expected in zip(mine["logged"], theirs["logged"], strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, abs=1e-6 if "train_size" in name else 1e-9), name
    assert mine["metrics"] == pytest.approx(theirs["metrics"], abs=1e-6)
    assert mine["rates"] == pytest.approx(theirs["rates"], abs=1e-12)
    assert [mine[key] for key in ("step", "epoch", "best")] == [
        theirs[key] for key in ("step", "epoch", "best")
    ]


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "a scheduler of steps, validation each epoch": ("step", ("best",), {}),
    "a scheduler of epochs, validation twice an epoch": ("epoch", ("best",), {"val_check_interval": 0.5}),
    "a monitored scheduler, early stopping": ("plateau", ("best", "stopping"), {"max_epochs": 5}),
    "accumulated gradients, validation every other epoch": (
        "step",
        (),
        {"accumulate_grad_batches": 3, "check_val_every_n_epoch": 2},
    ),
    "accumulated gradients, batch norm": ("normalized", ("best",), {"accumulate_grad_batches": 3}),
    "a loss that is a sum": ("sum", (), {"max_epochs": 1, "limit_val_batches": 1}),
    "a stop that waits for min_steps": ("epoch", ("stopping",), {"max_epochs": 5, "min_steps": 20}),
    "a limit of steps": ("step", ("steps",), {"max_steps": 11, "max_epochs": 3, "limit_val_batches": 1}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", [2, 3])
def test_fit_logs_and_trains_as_the_trainer_does(farm: Any, tmp_path: Path, case: str, workers: int) -> None:
    scheduler, kinds, given = CASES[case]
    theirs = by_trainer(tmp_path / "theirs", scheduler, kinds, **given)
    mine = farm.results(by_pipeline, tmp_path / "mine", scheduler, kinds, workers, num_ranks=workers, **given)
    assert_alike(mine[0], theirs)
    assert all(one["metrics"] == mine[0]["metrics"] for one in mine)


class Ignoring(Net):
    """A module whose loss is a mean over some of the samples only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), torch.where(y == 0, -100, y))
        self.log("train_loss", loss)
        return loss


def count_labels(item: Any) -> Any:
    return (item["batch"][1] > 0).sum()


def weights_of_ignoring(folder: Path, run: dict[str, Any] | None) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module, given = Ignoring().double(), arguments(folder, max_epochs=1)
    if run is None:
        L.Trainer(accelerator="cpu", **given).fit(module, loaders()[0])
    else:
        front.fit(module, loaders()[0], plan=pipedream.Plan.straight(NUM_LAYERS, 2), run=run, **given)
    return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize("run", [{}, {"weight_fn": count_labels}], ids=["whole", "weighed"])
def test_a_loss_that_ignores_samples_trains_as_in_the_trainer(
    farm: Any, tmp_path: Path, run: dict[str, Any]
) -> None:
    theirs = weights_of_ignoring(tmp_path / "theirs", None)
    mine = farm.results(weights_of_ignoring, tmp_path / "mine", run, num_ranks=2)[0]
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=0.0, atol=1e-9)


def test_batches_are_cut_unless_that_changes_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Random(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (0.9 + torch.rand(()) / 5)

    class Numbered(Net):
        """Its training step counts itself in a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("number", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.number += 1
            return super().training_step(batch, batch_idx)

    cut: list[int] = []

    def run(*_: Any, microbatches: int, **__: Any) -> None:
        cut.append(microbatches)
        raise InterruptedError

    monkeypatch.setattr(pipedream, "run", run)
    plan = pipedream.Plan.straight(NUM_LAYERS, 2)
    for module, given in [
        (Net(), {}),
        (Random(), {}),
        (Net("sum"), {}),
        (Net("normalized"), {}),
        (Ignoring(), {}),
        (Ignoring(), {"run": {"weight_fn": count_labels}}),
        (Numbered(), {}),
        (Net("sum"), {"microbatches": 4}),
    ]:
        with pytest.raises(InterruptedError):
            front.fit(module.double(), *loaders(), plan=plan, **arguments(tmp_path), **given)
    assert cut == [8, 8, 1, 1, 1, 8, 1, 4]
    told = capsys.readouterr().out
    assert "batches are trained on whole: the loss of the first is" in told
    assert "trained on whole: batch norm would normalize each piece by itself; microbatches=8 cuts" in told


def test_a_stopped_fit_goes_on_as_the_trainer_does(farm: Any, tmp_path: Path) -> None:
    for side in ("theirs", "mine"):
        first, second = tmp_path / side / "first", tmp_path / side / "second"
        last = first / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
        if side == "theirs":
            by_trainer(first, "step", ("best",), max_epochs=1)
            theirs = by_trainer(second, "step", ("best",), last, max_epochs=3)
        else:
            farm.results(by_pipeline, first, "step", ("best",), 2, num_ranks=2, max_epochs=1)
            mine = farm.results(by_pipeline, second, "step", ("best",), 2, last, num_ranks=2, max_epochs=3)
            # Each trainer continues from the other's checkpoint.
            theirs_from_mine = by_trainer(tmp_path / "third", "step", ("best",), last, max_epochs=3)
    assert_alike(mine[0], theirs)
    assert_alike(theirs_from_mine, theirs)


def test_a_plain_script_trains_as_the_trainer_does(tmp_path: Path) -> None:
    theirs = by_trainer(tmp_path / "theirs", "step", ("best",))
    assert_alike(by_pipeline(tmp_path / "mine", "step", ("best",), 2), theirs)


def test_a_module_of_pytorch_lightning_trains(farm: Any, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    losses = farm.results(train_old_name, tmp_path, num_ranks=2)
    assert losses[0][-1] < losses[0][0]


def train_old_name(folder: Path) -> list[float]:
    import pytorch_lightning as pl

    class Old(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))

        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    plan = pipedream.Plan.straight(3, 2)
    options = {"max_epochs": 3, "default_root_dir": folder, "logger": False}
    trainer = front.fit(Old().double(), loaders()[0], plan=plan, **options)
    return list(trainer.pipeline_result.losses)


def test_every_argument_of_the_trainer_is_honoured_meaningless_or_refused() -> None:
    known = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    tables = [front.HONOURED, front.MEANINGLESS.keys(), front.REFUSED.keys()]
    assert set().union(*tables) == known
    assert sum(map(len, tables)) == len(known)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 2}, "devices is 2, which a pipeline does not honour: give workers=N"),
        ({"devices": [0, 1]}, r"devices is \[0, 1\], which a pipeline does not honour: give workers=N"),
        ({"num_nodes": 2}, "num_nodes is 2, .*: start the script with torchrun on each machine"),
        ({"strategy": "ddp"}, "strategy is 'ddp'"),
        ({"accelerator": "tpu"}, "accelerator is 'tpu': use 'cpu', 'gpu' or 'auto'"),
        ({"accelerator": "mps", "devices": 1}, "accelerator is 'mps': use 'cpu', 'gpu' or 'auto'"),
        ({"precision": "bf16-true"}, "precision is 'bf16-true'"),
        ({"precision": "16-true"}, "precision is '16-true': use one of '32'"),
        ({"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm is 'value': use 'norm'"),
        ({"val_check_interval": "00:00:10:00"}, "val_check_interval is"),
        ({"callbacks": [L.pytorch.callbacks.StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
        ({"run": {"autocast": "bfloat16"}}, "run has 'autocast', which fit gives itself: use precision"),
        ({"run": {"epochs": 2}}, "run has 'epochs', which fit gives itself: use max_epochs"),
        ({"callbacks": Timer("00:00:01:00")}, "Timer stops between batches.*give max_epochs or max_steps"),
        ({"callbacks": [TQDMProgressBar()]}, "TQDMProgressBar shows batches late. Leave it out: pipedream"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        front.fit(net(), *loaders(), **given)


def test_arguments_of_a_script_for_one_device_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def run(*_: Any, **__: Any) -> None:
        seen.append(os.environ.get("PIPEDREAM_DEVICE"))
        raise InterruptedError

    monkeypatch.setattr(pipedream, "run", run)
    monkeypatch.delenv("PIPEDREAM_DEVICE", raising=False)
    plan = pipedream.Plan.straight(NUM_LAYERS, 2)
    usual = {"num_nodes": 1, "strategy": "auto", "plugins": [], "detect_anomaly": False, "max_time": None}
    for accelerator, devices in [("cpu", 1), ("auto", "auto"), ("cpu", [0])]:
        given = {**arguments(tmp_path), **usual, "accelerator": accelerator, "devices": devices}
        with pytest.raises(InterruptedError):
            front.fit(net(), *loaders(), plan=plan, **given)
    assert seen == ["host", None, "host"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="accelerator is 'gpu', and torch finds no GPU here: use 'cpu'"):
        front.fit(net(), *loaders(), plan=plan, accelerator="gpu", devices=1)


def test_manual_optimization_is_refused() -> None:
    class Manual(Net):
        automatic_optimization = False

    with pytest.raises(ValueError, match="automatic_optimization"):
        front.fit(Manual(), *loaders())


def test_a_plan_whose_last_stage_has_replicas_is_refused() -> None:
    plan = pipedream.Plan.from_dict(
        {
            "format": "pipedream.plan/1",
            "stages": [{"first_layer": 0, "last_layer": NUM_LAYERS - 1, "num_replicas": 2}],
        }
    )
    for given in (plan, "1-2"):
        with pytest.raises(ValueError, match="the last stage of plan has replicas"):
            front.fit(net(), *loaders(), plan=given)


def trained_by(folder: Path, plan: str) -> int:
    trainer = front.fit(net(), *loaders(), plan=plan, **arguments(folder, max_epochs=1))
    return len(trainer.pipeline_result.worker_pids)


def test_a_plan_may_be_the_replicas_of_every_stage(farm: Any, tmp_path: Path) -> None:
    assert farm.results(trained_by, tmp_path, "1-1", num_ranks=2) == [2, 2]


class Between(L.Callback):  # type: ignore[misc]
    """Stops the training, or saves, after the second batch."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        if self.path is None:
            trainer.should_stop = True
        else:
            trainer.save_checkpoint(self.path)


def what_happens(folder: Path, *, saves: bool) -> str:
    callback = Between(folder / "early.ckpt" if saves else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            by_pipeline(folder, "step", (callback,), 2, max_epochs=1, limit_train_batches=5)
        except ValueError as error:
            return str(error)
    return " ".join(str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("saves", "message"),
    [
        (True, "at step 2, whose weights are gone: the workers are 3 batches ahead: use ModelCheckpoint("),
        (False, "the weights are those of 3 batches past the stop"),
    ],
)
def test_a_callback_that_acts_between_batches_hears_of_it(
    farm: Any, tmp_path: Path, saves: bool, message: str
) -> None:
    for heard in farm.results(what_happens, tmp_path, saves=saves, num_ranks=2):
        assert message in heard
    assert not (tmp_path / "early.ckpt").exists()
