"""Tests schedulers and callbacks that decide by a metric: they act in a PipelineTrainer as in a Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from farm import Farm
from networks import make_torchvision_importable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
make_torchvision_importable()
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from pipedream.integrations.trainer_parts import Loss  # noqa: E402
from small_trainer import assert_same, make_trainer, samples, train  # noqa: E402

pytestmark = pytest.mark.slow  # needs transformers, which make test does not install

_BY_METRIC: dict[str, dict[str, Any]] = {
    "reduce_lr_on_plateau": {"patience": 0, "threshold": 0.5, "factor": 0.7},
    "greedy": {"patience": 0, "factor": 0.7, "min_lr": 1e-4},
}


@pytest.mark.parametrize("name", _BY_METRIC)
@pytest.mark.parametrize("stop", [2, 3])
def test_a_scheduler_by_metric_goes_on_from_a_checkpoint_as_if_never_stopped(
    farm: Farm, tmp_path: Path, name: str, stop: int
) -> None:
    options = {
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": _BY_METRIC[name],
        "metric_for_best_model": "loss",
    }
    expected = train(tmp_path / "trainer", options, is_pipeline=False)
    whole = farm.results(train, tmp_path / "whole", options, is_pipeline=True, num_ranks=2)[0]
    assert_same(whole, expected)
    rates = [entry["learning_rate"] for entry in whole.log if "learning_rate" in entry]
    assert len(set(rates)) > 4
    resume = tmp_path / "whole" / f"checkpoint-{stop}"
    again = farm.results(train, tmp_path / "whole", options, is_pipeline=True, resume=resume, num_ranks=2)[0]
    assert again.log == whole.log
    for tensor, wanted in zip(again.weights.values(), whole.weights.values(), strict=True):
        assert torch.equal(tensor, wanted)


def test_a_checkpoint_without_the_state_of_such_a_scheduler_is_refused(farm: Farm, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    farm.results(train, tmp_path, options, is_pipeline=True, num_ranks=2)
    options |= {"eval_strategy": "epoch", "metric_for_best_model": "loss"}
    trainer = make_trainer(
        tmp_path, is_pipeline=True, given={}, lr_scheduler_type="reduce_lr_on_plateau", **options
    )
    with pytest.raises(ValueError, match="checkpoint-2 has no state of a ReduceLROnPlateau: it was saved"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


class Asking(transformers.TrainerCallback):  # type: ignore[misc]
    """Asks for an evaluation and a checkpoint after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            control.should_evaluate = control.should_save = True


def test_an_evaluation_that_a_callback_asks_for_is_logged_at_its_step(farm: Farm, tmp_path: Path) -> None:
    options = {
        "max_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "learning_rate": 1e-3,
    }
    found = farm.results(
        train, tmp_path / "pipeline", options, is_pipeline=True, callbacks=[Asking()], num_ranks=2
    )
    expected = train(tmp_path / "trainer", options, is_pipeline=False, callbacks=[Asking()])
    assert next(entry["step"] for entry in expected.log if "eval_loss" in entry) == 2
    assert_same(found[0], expected)
    states = [
        transformers.TrainerState.load_from_json(str(folder / "checkpoint-2" / "trainer_state.json"))
        for folder in (tmp_path / "pipeline", tmp_path / "trainer")
    ]
    assert states[0].best_global_step == states[1].best_global_step
    assert len(states[0].log_history) == len(states[1].log_history)


def test_an_evaluation_that_a_callback_asks_for_cannot_choose_what_is_saved(
    farm: Farm, tmp_path: Path
) -> None:
    options = {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"}
    outcomes = farm.run(train, tmp_path, options, is_pipeline=True, callbacks=[Asking()], num_ranks=2)
    assert "a callback set should_evaluate, and save_strategy is 'best'" in str(outcomes[0].error)


class Meddling(transformers.TrainerCallback):  # type: ignore[misc]
    """Does after the first step what needs the weights of that moment, or changes the optimizer."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.trainer: Any = None

    def on_step_end(self, args: Any, *_: Any, **given: Any) -> None:
        if self.case == "evaluate":
            self.trainer.evaluate(samples(4, 3), metric_key_prefix="train")
        elif self.case == "predict":
            self.trainer.predict(samples(4, 3))
        elif self.case == "save_model":
            self.trainer.save_model(args.output_dir)
        else:
            given["optimizer"].param_groups[0]["weight_decay"] = 0.5


def _meddle(folder: Path, case: str) -> None:
    callback = Meddling(case)
    # A planned evaluation waits to be reported when the callback is called.
    options = {"eval_strategy": "steps", "eval_steps": 1}
    callback.trainer = make_trainer(folder, is_pipeline=True, given={"callbacks": [callback]}, **options)
    callback.trainer.train()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        *((name, f"a callback called {name}() during the training") for name in ("evaluate", "predict")),
        (
            "save_model",
            "a callback called save_model() during the training, when the weights are in the work",
        ),
        ("options", "a callback changed the optimizer's options before step 2, which the workers have made"),
    ],
)
def test_what_a_callback_does_with_old_weights_is_refused(
    farm: Farm, tmp_path: Path, case: str, message: str
) -> None:
    outcomes = farm.run(_meddle, tmp_path, case, num_ranks=2)
    assert message in str(outcomes[0].error)
    assert outcomes[1].exit_code is None  # rank 1 hears of it and ends, too


def test_a_loss_under_autocast_is_computed_in_float32() -> None:
    """accelerate widens what a model returns, and Trainers compute their loss outside the region of
    autocast."""
    seen: list[Any] = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
        seen.extend([outputs["logits"].dtype, torch.is_autocast_enabled("cpu")])
        return outputs["logits"].sum()

    outputs = {"logits": torch.ones(2, dtype=torch.bfloat16)}
    with torch.autocast("cpu", torch.bfloat16):
        Loss(loss, None, shifts=False, is_mixed=True)(outputs, {"labels": None, "scale": 1.0})
    assert seen == [torch.float32, False]


class Freezing(transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        model.classifier.requires_grad_(False)


def test_parameters_that_a_callback_freezes_in_a_plain_script_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, is_pipeline=True, given={"callbacks": [Freezing()]})
    with pytest.raises(
        ValueError, match="a callback froze or thawed parameters before step 2, which the work"
    ):
        trainer.train()


def test_a_plain_script_trains_as_the_trainer_does(tmp_path: Path) -> None:
    # The weights have come back before the last steps are reported.
    expected = train(tmp_path / "trainer", {}, is_pipeline=False)
    assert_same(train(tmp_path / "pipeline", {}, is_pipeline=True), expected)
