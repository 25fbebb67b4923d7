"""Tests that each hook of a LightningModule is honoured, has no meaning, or is refused. Tests the same for
the values that its steps return.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from networks import make_torchvision_importable
from torch import Tensor

make_torchvision_importable()
L = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

from pipedream.integrations import lightning as front  # noqa: E402
from pipedream.integrations import lightning_checks as checks  # noqa: E402
from test_lightning import NUM_LAYERS, Net, Timer, arguments, loaders  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_CALLED_BY_SCRIPTS = {
    *(
        "all_gather",
        "clip_gradients",
        "freeze",
        "unfreeze",
        "load_from_checkpoint",
        "log",
        "log_dict",
        "print",
    ),
    *("lr_schedulers", "optimizers", "manual_backward", "toggle_optimizer", "untoggle_optimizer"),
    *("toggled_optimizer", "to_onnx", "to_tensorrt", "to_torchscript"),
}
"""Methods that the code of users calls, and Lightning does not."""

_HONOURED_HOOKS = {
    *("configure_callbacks", "configure_model", "configure_optimizers", "configure_sharded_model", "forward"),
    *("lr_scheduler_step", "training_step", "validation_step"),
    *("prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader"),
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_validation_start", "on_validation_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_save_checkpoint", "on_load_checkpoint"),
}
"""Hooks of a module that are called where Lightning calls them."""

_MEANINGLESS_HOOKS = {
    *("test_step", "test_dataloader", "predict_step", "predict_dataloader"),
    *(f"on_{kind}_{when}" for kind in ("test", "predict") for when in ("start", "end")),
    *(f"on_{kind}_epoch_{when}" for kind in ("test", "predict") for when in ("start", "end")),
    *(f"on_{kind}_batch_{when}" for kind in ("test", "predict") for when in ("start", "end")),
    *("on_test_model_eval", "on_test_model_train", "on_predict_model_eval"),
}
"""Hooks that Lightning calls only for tests and predictions, which fit() does not run."""


def test_every_hook_of_a_module_is_honoured_meaningless_or_refused() -> None:
    nn_module = vars(torch.nn.Module).keys() - {"forward"}
    hooks = {
        name
        for kind in L.LightningModule.__mro__
        if kind.__module__.startswith(("lightning.pytorch.core.module", "lightning.pytorch.core.hooks"))
        for name, value in vars(kind).items()
        if not name.startswith("_") and (inspect.isfunction(value) or hasattr(value, "__func__"))
    }
    tables = [_HONOURED_HOOKS, _MEANINGLESS_HOOKS, checks.REFUSED_HOOKS.keys()]
    assert set().union(*tables) == hooks - _CALLED_BY_SCRIPTS - nn_module
    assert sum(map(len, tables)) == len(set().union(*tables))


@pytest.mark.parametrize("hook", sorted(checks.REFUSED_HOOKS))
def test_a_refused_hook_is_named_before_anything_starts(hook: str) -> None:
    own = type("Own", (Net,), {hook: lambda *_: None})
    with pytest.raises(ValueError, match=rf"Own\.{hook} would not be called in a pipeline: "):
        front.fit(own(), *loaders())


class Hooked(Net):
    """Records which of its hooks are called. It has a metric that no step logs."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.unlogged = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.unlogged.update(batch[0].abs().mean())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.called.append("on_train_epoch_end")
        self.log("unlogged", self.unlogged.compute())
        self.unlogged.reset()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()


def _noting(hook: str) -> Any:
    def call(self: Any, *given: Any, **named: Any) -> Any:
        self.called.append(hook)
        return getattr(Net, hook)(self, *given, **named)

    return call


_NOTED = {name for name in _HONOURED_HOOKS if name.startswith(("on_", "configure_"))}
_OTHERWISE = {"on_train_epoch_end", "on_load_checkpoint", "configure_sharded_model"}
for _hook in {*_NOTED, "setup", "teardown", "prepare_data"} - _OTHERWISE:
    setattr(Hooked, _hook, _noting(_hook))


def _hooked(folder: Path, *, is_pipeline: bool) -> tuple[list[str], dict[str, float], dict[str, Tensor]]:
    torch.manual_seed(3)
    module, given = Hooked().double(), arguments(folder)
    if is_pipeline:
        trainer = front.fit(module, *loaders(), plan=pipedream.Plan.straight(NUM_LAYERS, 2), **given)
    else:
        trainer = L.Trainer(accelerator="cpu", num_sanity_val_steps=0, **given)
        trainer.fit(module, *loaders())
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.called, figures, {name: p.detach().clone() for name, p in module.named_parameters()}


def test_honoured_hooks_are_called_as_by_the_trainer(farm: Any, tmp_path: Path) -> None:
    called, figures, weights = _hooked(tmp_path / "theirs", is_pipeline=False)
    mine = farm.results(_hooked, tmp_path / "mine", is_pipeline=True, num_ranks=2)[0]
    assert mine[0] == called
    assert {*called} >= {"on_train_epoch_end", "on_validation_epoch_end", "on_save_checkpoint"}
    assert mine[1] == pytest.approx(figures, abs=1e-6) and "unlogged" in figures
    for name, weight in weights.items():
        torch.testing.assert_close(mine[2][name], weight, rtol=0.0, atol=1e-9)


def test_callbacks_of_the_module_are_checked(tmp_path: Path) -> None:
    class Own(Net):
        def configure_callbacks(self) -> Any:
            return [Timer("00:00:10:00")]

    with pytest.raises(ValueError, match="the callback Timer stops between batches"):
        front.fit(Own().double(), *loaders(), **arguments(tmp_path))


class Counting(Net):
    """A module one of whose steps adds to the named attribute."""

    def __init__(self, kind: str, step: str) -> None:
        super().__init__()
        self.step = step
        self.total: Any = {
            "number": 0.0,
            "tensor": torch.zeros(()),
            "dict": {"sum": 0.0},
            "lists": {"kept": []},
            "last": None,
        }[kind]
        self.kind = kind

    def _count(self, step: str, value: Tensor) -> None:
        if step != self.step:
            return
        if self.kind == "dict":
            self.total["sum"] += float(value)
        elif self.kind == "lists":
            self.total["kept"].append(value)
        elif self.kind == "last":
            self.total = value
        else:
            self.total = self.total + (float(value) if self.kind == "number" else value)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._count("training_step", loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self._count("validation_step", batch[0].mean())


class Late(Net):
    """A module that reads the number of the step only from its second epoch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, 0)
        return loss * self.global_step if self.current_epoch else loss


def _train_late(folder: Path) -> None:
    front.fit(Late().double(), *loaders(), plan=pipedream.Plan.straight(NUM_LAYERS, 2), **arguments(folder))


def test_a_step_that_reads_the_number_of_the_step_in_later_epochs_is_refused(
    farm: Any, tmp_path: Path
) -> None:
    # The stages do not get the number of the step. They would read the same number in all steps of an epoch.
    outcomes = farm.run(_train_late, tmp_path, num_ranks=2)
    assert any("reads self.global_step, which the first one did not" in str(one.error) for one in outcomes)


@pytest.mark.parametrize("kind", ["number", "tensor", "dict", "lists"])
@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_step_that_counts_what_stays_in_the_workers_is_refused(
    tmp_path: Path, kind: str, step: str
) -> None:
    plan = pipedream.Plan.straight(NUM_LAYERS, 2)
    with pytest.raises(
        ValueError, match=rf"{step} changes self\.total, which stays in the workers: use self"
    ):
        front.fit(Counting(kind, step).double(), *loaders(), plan=plan, **arguments(tmp_path))


def test_a_line_tells_of_an_attribute_that_a_step_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(pipedream, "run", run)
    plan = pipedream.Plan.straight(NUM_LAYERS, 2)
    for kind in ("last", "number"):  # with "number" no step adds to the attribute
        module = Counting(kind, "training_step" if kind == "last" else "none").double()
        with pytest.raises(InterruptedError):
            front.fit(module, *loaders(), plan=plan, **arguments(tmp_path))
        told = "training_step sets self.total, which stays in the workers" in capsys.readouterr().out
        assert told == (kind == "last")


def _logged_to_tensorboard(folder: Path) -> set[str]:
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(3)
    given = arguments(folder, max_epochs=1) | {"logger": TensorBoardLogger(folder, version=0)}
    front.fit(Net().double(), *loaders(), plan=pipedream.Plan.straight(NUM_LAYERS, 2), **given)
    read = EventAccumulator(str(folder / "lightning_logs" / "version_0"))
    read.Reload()
    return set(read.Tags()["scalars"])


def test_a_tensorboard_logger_writes_what_steps_log(farm: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tags = farm.results(_logged_to_tensorboard, tmp_path, num_ranks=2)[0]
    assert tags >= {"train_loss", "val_loss", "val_accuracy", "epoch"}
