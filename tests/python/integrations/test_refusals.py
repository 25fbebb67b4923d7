"""Tests that a front end refuses what it cannot honour, with one line and before a worker starts."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pipedream
import pytest
import torch
from networks import make_torchvision_importable
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
make_torchvision_importable()
L = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from pipedream.integrations import lightning as front  # noqa: E402
from pipedream.integrations import trainer_run  # noqa: E402
from pipedream.integrations.trainer_parts import Loss, Predictions  # noqa: E402
from pipedream.integrations.trainer_run import Training  # noqa: E402
from pipedream.integrations.transformers import PipelineTrainer  # noqa: E402
from small_trainer import make_trainer, samples  # noqa: E402
from test_lightning import NUM_LAYERS, Net, arguments, loaders, net  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # needs the libraries, which make test does not install
    pytest.mark.filterwarnings("ignore"),
]


class Logging(Net):
    """A module whose training step logs the value under a name."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = (value,)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("logged", self.value[0])
        return super().training_step(batch, batch_idx)


class Silent(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Listing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.curve = torchmetrics.classification.MulticlassAUROC(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.curve(self(batch[0]).detach(), batch[1])
        self.log("curve", self.curve)
        return super().training_step(batch, batch_idx)


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": plateau, "interval": "step", "monitor": "train_loss"}]


class Unoptimized(Net):
    def configure_optimizers(self) -> None:
        return None


class OfTheHead(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), 0.1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: Logging({"a": 1.0}), r"self\.log\('logged'\) was given a dict: use self\.log_dict"),
        (lambda: Logging(torch.ones(3)), r"a step has logged a tensor of \(3,\): log one number"),
        (lambda: Logging(torchmetrics.MeanMetric()), "was given a metric that is no attribute of the module"),
        (Silent, "training_step of Silent returned NoneType: return the loss, or a dict"),
        (Listing, r"the metric 'curve' \(MulticlassAUROC\) keeps every batch in a list"),
        (Plateau, 'ReduceLROnPlateau with interval "step": use interval "epoch"'),
        (Unoptimized, "configure_optimizers returned None: return an optimizer"),
        (OfTheHead, "the optimizer does not have the parameter 'shift', whose gradient a pipeline counts"),
    ],
    ids=["dict", "tensor", "metric", "nothing", "list", "plateau", "no optimizer", "clipping"],
)
def test_a_module_that_a_pipeline_cannot_train_is_refused(tmp_path: Path, module: Any, message: str) -> None:
    plan = pipedream.Plan.straight(NUM_LAYERS, 2)
    with pytest.raises(ValueError, match=message):
        front.fit(module().double(), *loaders(), plan=plan, **arguments(tmp_path))


class Peeking(L.Callback):  # type: ignore[misc]
    def on_before_optimizer_step(self, *given: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            ModelCheckpoint(train_time_interval=timedelta(minutes=1)),
            "ModelCheckpoint has train_time_interval",
        ),
        (
            Peeking(),
            r"Peeking\.on_before_optimizer_step would not be called in a pipeline: leave the callback",
        ),
    ],
)
def test_a_callback_that_acts_between_steps_is_refused(callback: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        front.fit(net(), *loaders(), callbacks=[callback])


def test_what_is_no_module_or_no_argument_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="module is a Linear: give a LightningModule"):
        front.fit(torch.nn.Linear(2, 2), *loaders())
    with pytest.raises(TypeError, match=r"fit\(\) got 'max_epoch', which is no argument of it or of"):
        front.fit(net(), *loaders(), max_epoch=1)


class Endless:
    """Batches without a length."""

    def __iter__(self) -> Any:
        return iter([*loaders()[0]])


def test_loaders_that_a_pipeline_cannot_plan_for_are_refused(tmp_path: Path) -> None:
    plan = pipedream.Plan.straight(NUM_LAYERS, 2)
    with pytest.raises(ValueError, match="train_dataloaders are 2: give one loader"):
        front.fit(net(), [loaders()[0], loaders()[0]], plan=plan, **arguments(tmp_path))
    with pytest.raises(ValueError, match='interval "step", and train_dataloaders have no length: give'):
        front.fit(net(), Endless(), plan=plan, **arguments(tmp_path))


def test_a_metric_of_an_unknown_reduction_is_refused() -> None:
    metric = SimpleNamespace(_update_count=1, _reductions={"total": sorted}, total=torch.ones(()))
    with pytest.raises(ValueError, match=r"SimpleNamespace\.total cannot be joined across steps \(sorted\)"):
        front._add_to_metric(metric, 1, {"total": torch.ones(())})


def test_a_trainer_without_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PipelineTrainer: give workers=, the number of worker processes"):
        make_trainer(tmp_path, is_pipeline=True, given={"plan": None})


def test_several_datasets_to_evaluate_are_refused_while_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, is_pipeline=True, given={}, eval_strategy="epoch")
    trainer.eval_dataset = {"one": samples(2, 1), "other": samples(2, 2)}
    with pytest.raises(ValueError, match="eval_dataset is a dict, and a training evaluates one dataset"):
        trainer.train()


def test_the_best_checkpoint_by_a_schedule_that_does_not_drain_is_refused(tmp_path: Path) -> None:
    options = {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"}
    trainer = make_trainer(tmp_path, is_pipeline=True, given={"schedule": "pipedream"}, **options)
    with pytest.raises(ValueError, match="save_strategy is 'best', and schedule 'pipedream' saves some"):
        trainer.train()


def test_a_scheduler_that_changes_the_rates_of_groups_unequally_is_refused() -> None:
    training = Training.__new__(Training)
    training._trainer = SimpleNamespace(lr_scheduler=SimpleNamespace())  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"changed the rates of its groups by 0\.5 to 1, and"):
        training._common_factor([0.1, 0.2], [0.05, 0.2])
    assert training._common_factor([0.1, 0.2], [0.05, 0.1]) == 0.5


@pytest.mark.parametrize("name", ["compute_loss", "training_step", "prediction_step", "evaluation_loop"])
def test_a_step_of_a_subclass_is_refused(tmp_path: Path, name: str) -> None:
    own = type("Own", (PipelineTrainer,), {name: lambda *_: None})
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=f"Own has a {name} of its own, which a pipeline does not call"):
        own(model=torch.nn.Linear(2, 2), args=args, workers=2)


class Unsized(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples(4, 1))


@pytest.mark.parametrize("name", ["logging_strategy", "eval_strategy", "save_strategy"])
def test_an_end_of_an_epoch_that_the_caller_does_not_see_is_refused(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tmp_path, is_pipeline=True, given={}, **{name: "epoch"})
    trainer.train_dataset = Unsized()
    with pytest.raises(ValueError, match=f"{name} is 'epoch', and train_dataset has no length, so only the"):
        trainer.train()


def test_an_optimizer_that_has_made_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(trainer_run, "run", run)
    message = "the optimizer has made steps before this train"
    trainer = make_trainer(tmp_path, is_pipeline=True, given={})
    with pytest.raises(InterruptedError):
        trainer.train()
    with pytest.raises(ValueError, match=message):
        trainer.train()
    trainer.optimizer = None
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.step()
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_model_without_a_loss_is_refused() -> None:
    loss = Loss(None, None, shifts=False, is_mixed=False)
    with pytest.raises(ValueError, match="the model returned logits and no loss: give labels in"):
        loss({"logits": torch.ones(2)}, {"labels": None, "scale": 1.0})


def test_metrics_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    given = {"compute_metrics": lambda _: {"right": torch.ones(()), "each": [1, 2]}}
    predictions = Predictions(make_trainer(tmp_path, is_pipeline=True, given=given), None)
    with pytest.raises(ValueError, match=r"compute_metrics returned 'each' as \[1, 2\]: return a number"):
        predictions.measure([(torch.ones(1, 2), torch.ones(1), None)], [])


def test_generation_while_evaluating_is_refused(tmp_path: Path) -> None:
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, use_cpu=True, report_to="none"
    )
    with pytest.raises(ValueError, match="predict_with_generate of TrainingArguments is True, which a pipel"):
        PipelineTrainer(torch.nn.Linear(2, 2), args, workers=2)


def test_prompts_that_peft_reads_from_the_callers_model_are_not_saved_while_training(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = make_trainer(tmp_path, is_pipeline=True, given={}, save_strategy="epoch")
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS")
    trainer.model = peft.get_peft_model(trainer.model, prompts)
    with pytest.raises(
        ValueError, match="save_strategy is 'epoch', and peft saves the prompts of the model in"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (None, ["logits", "cache", "past_key_values"]),
        (SimpleNamespace(), ["logits", "past_key_values"]),
        (SimpleNamespace(keys_to_ignore_at_inference=["past_key_values"]), ["logits", "cache"]),
    ],
)
def test_compute_metrics_gets_the_outputs_that_a_trainer_gives_it(
    tmp_path: Path, config: Any, kept: list[str]
) -> None:
    trainer = make_trainer(tmp_path, is_pipeline=True, given={})
    trainer.model = torch.nn.Linear(2, 2)
    if config is not None:
        trainer.model.config = config
    outputs = {name: name for name in ("loss", "logits", "cache", "past_key_values")}
    assert Predictions(trainer, None).kept(outputs, {"labels": None})[0] == tuple(kept)
