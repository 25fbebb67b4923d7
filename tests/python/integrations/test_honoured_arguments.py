"""Tests that arguments of TrainingArguments have the same effect in a PipelineTrainer as in a Trainer."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from farm import Farm
from networks import make_torchvision_importable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
make_torchvision_importable()
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from pipedream.integrations import trainer_run  # noqa: E402
from pipedream.integrations.trainer_parts import autocast_of, plain_loader  # noqa: E402
from pipedream.integrations.training_arguments import REFUSED  # noqa: E402
from pipedream.integrations.transformers import PipelineTrainer  # noqa: E402
from small_trainer import assert_same, make_trainer, train  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # needs transformers, which make test does not install
    pytest.mark.filterwarnings("ignore"),
]

_Test = TypeVar("_Test", bound=Callable[..., None])
_SHOWN: list[str] = []
"""Arguments whose effect is shown by a test of their own."""


def shows(*names: str) -> Callable[[_Test], _Test]:
    _SHOWN.extend(names)
    return lambda test: test


def _figures(predicted: Any) -> dict[str, float]:
    parts = predicted.predictions if isinstance(predicted.predictions, list) else [predicted.predictions]
    inputs = predicted.inputs if isinstance(predicted.inputs, list) else [predicted.inputs]
    return {
        "negative": -float(sum(part.sum() for part in parts)),
        "parts": float(len(parts)),
        "inputs": float(sum(part.sum() for part in inputs if part is not None)),
    }


_EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1}
_BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_negative",
    "greater_is_better": False,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Each entry has the arguments whose effect is shown, and other arguments that these need.
    "steps": (
        {"max_steps": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "seed": 1},
        {"num_train_epochs": 1},
    ),
    "epochs": (
        {"num_train_epochs": 0.6, "dataloader_drop_last": True},
        {"max_steps": -1, "per_device_train_batch_size": 5},
    ),
    "data": ({"data_seed": 7}, {}),
    "sampling": ({"train_sampling_strategy": "sequential"}, {}),
    "accelerator": ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}, {}),
    "adam": (
        {
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "adam_beta1": 0.5,
            "adam_beta2": 0.8,
            "adam_epsilon": 1e-3,
            "max_grad_norm": 0.1,
            "label_smoothing_factor": 0.1,
        },
        {},
    ),
    "schedule": (
        {"lr_scheduler_type": "cosine", "warmup_steps": 1},
        {"max_steps": 4},
    ),
    "arguments of a schedule": (
        {"lr_scheduler_kwargs": {"power": 2.0}},
        {"lr_scheduler_type": "polynomial"},
    ),
    "optimizer": ({"optim": "sgd", "optim_args": "momentum=0.9"}, {}),
    "logs": ({"logging_steps": 2, "logging_first_step": True}, {"max_steps": 4}),
    "logs of epochs": ({"logging_strategy": "epoch"}, {"max_steps": 7}),
    "evaluations": (
        {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "per_device_eval_batch_size": 2},
        {"max_steps": 4, "eval_do_concat_batches": False},
    ),
    "late evaluations": ({"eval_delay": 2}, _EVERY_STEP),
    "batches of evaluations": (
        {"eval_do_concat_batches": False, "include_for_metrics": ["inputs"]},
        {**_EVERY_STEP, "per_device_eval_batch_size": 2},
    ),
    "losses alone": ({"prediction_loss_only": True}, _EVERY_STEP),
    "saves": ({"save_strategy": "steps", "save_steps": 2}, {"max_steps": 5}),
    "fewer saves": ({"save_total_limit": 1}, {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}),
    "the best": (
        _BEST,
        {**_EVERY_STEP, "learning_rate": 0.1, "max_steps": 4, "save_strategy": "steps", "save_steps": 1},
    ),
}
_DEFAULTS = {"max_steps": 3, "eval_strategy": "no", "metric_for_best_model": "eval_loss"}
"""Used in the place of an argument that is left out, if the other arguments do not work without it."""


@pytest.mark.parametrize("case", CASES)
def test_an_argument_does_what_it_does_in_the_trainer(farm: Farm, tmp_path: Path, case: str) -> None:
    shown, others = CASES[case]
    given = {"compute_metrics": _figures}
    expected = train(tmp_path / "trainer", others | shown, is_pipeline=False, **given)
    found = farm.results(train, tmp_path / "pipeline", others | shown, is_pipeline=True, num_ranks=2, **given)
    assert_same(found[0], expected)
    for name in shown:
        left = {other: value for other, value in shown.items() if other != name}
        if name in _DEFAULTS:
            left[name] = _DEFAULTS[name]
        without = train(tmp_path / name, others | left, is_pipeline=False, **given)
        with pytest.raises(AssertionError):  # without the argument the result must differ
            assert_same(without, expected)


def _without_effect() -> set[str]:
    """Returns the arguments that docs/trainer.md lists as having no effect."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "trainer.md").read_text(encoding="utf-8")
    table = page.partition("| without effect |")[2].partition("\n\n")[0]
    return set(re.findall(r"`(\w+)`", table))


def test_every_argument_is_honoured_and_shown_without_effect_or_refused() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    without_effect = _without_effect()
    shown = {name for arguments, _ in CASES.values() for name in arguments} | {*_SHOWN}
    assert shown == fields - without_effect - REFUSED.keys()
    assert not without_effect & REFUSED.keys()


class _CapturedError(Exception):
    """Carries the arguments of a run, in place of beginning it."""


def _run_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    def run(*_: Any, **given: Any) -> None:
        raise _CapturedError({**given, "device": os.environ.get("PIPEDREAM_DEVICE")})

    monkeypatch.setattr(trainer_run, "run", run)
    with pytest.raises(_CapturedError) as caught:
        make_trainer(folder, is_pipeline=True, given={}, **options).train()
    captured: dict[str, Any] = caught.value.args[0]
    return captured


@shows("bf16", "activation_checkpointing", "gradient_checkpointing", "use_cpu", "logging_nan_inf_filter")
def test_what_workers_do_is_in_the_arguments_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPEDREAM_DEVICE", raising=False)
    plain = _run_of(tmp_path, monkeypatch, use_cpu=False)
    names = ("autocast", "recompute", "device", "on_nonfinite")
    assert [plain[name] for name in names] == [None, None, None, "continue"]
    assert _run_of(tmp_path, monkeypatch, bf16=True)["autocast"] == "bfloat16"
    assert _run_of(tmp_path, monkeypatch, activation_checkpointing=True)["recompute"] is True
    assert _run_of(tmp_path, monkeypatch, gradient_checkpointing=True)["recompute"] is True
    assert _run_of(tmp_path, monkeypatch, use_cpu=True)["device"] == "host"
    assert _run_of(tmp_path, monkeypatch, logging_nan_inf_filter=False)["on_nonfinite"] == "stop"


@shows("fp16", "tf32")
def test_precisions_that_this_host_may_lack_are_taken_over() -> None:
    """tf32 sets torch.backends.fp32_precision of the script. test_job.py tests that workers take it over."""
    assert autocast_of(SimpleNamespace(bf16=False, fp16=True)) == "float16"
    args = transformers.TrainingArguments("unused", tf32=False)
    assert args.tf32 is False


@shows(
    *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    *("dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_pin_memory"),
)
def test_workers_load_data_as_the_arguments_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a GPU there would be no pinned memory.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True, "in_order": False}
    options = {f"dataloader_{name}": value for name, value in given.items()}
    options |= {"dataloader_multiprocessing_context": "spawn", "dataloader_pin_memory": False}
    trainer = make_trainer(tmp_path, is_pipeline=True, given={}, **options)
    loader = plain_loader(trainer.get_train_dataloader())
    assert {name: getattr(loader, name) for name in given} == given
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert not loader.pin_memory
    trainer.args.dataloader_pin_memory = True
    assert plain_loader(trainer.get_train_dataloader()).pin_memory


@shows("remove_unused_columns", "label_names", "use_cache", "log_level", "disable_tqdm", "length_column_name")
def test_the_parts_of_a_trainer_are_made_by_the_arguments(tmp_path: Path) -> None:
    kept = make_trainer(tmp_path, is_pipeline=True, given={}, remove_unused_columns=False)
    batch = next(iter(plain_loader(kept.get_train_dataloader())))
    assert "unknown" in batch and not kept.model.config.use_cache
    options = {"label_names": ["other"], "use_cache": True, "log_level": "error", "disable_tqdm": False}
    before = transformers.logging.get_verbosity()
    trainer = make_trainer(tmp_path, is_pipeline=True, given={}, **options)
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    transformers.logging.set_verbosity(before)
    assert "unknown" not in next(iter(plain_loader(trainer.get_train_dataloader())))
    assert trainer.model.config.use_cache and trainer_run.loss_form(trainer).label_names == ()
    trainer.compute_metrics = _figures
    assert trainer_run.loss_form(trainer).label_names == ("other",)
    shown = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    assert "ProgressCallback" in shown and "PrinterCallback" not in shown
    # A PipelineTrainer uses the Trainer's sampler, which can group samples by their lengths.
    assert PipelineTrainer._get_train_sampler is transformers.Trainer._get_train_sampler


class Telling(transformers.TrainerCallback):  # type: ignore[misc]
    """Imitates a tracker of transformers, which reads its settings when training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        names = ("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
        Path(args.output_dir, "told").write_text(" ".join(str(getattr(args, name)) for name in names))


@shows("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
@shows("report_to", "output_dir", "save_only_model")
def test_trackers_are_told_and_write_into_the_output_folder(farm: Farm, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = {
        "run_name": "r",
        "project": "p",
        "trackio_space_id": "s",
        "trackio_bucket_id": "b",
        "trackio_static_space_id": "t",
        "report_to": "tensorboard",
        "save_strategy": "steps",
        "save_steps": 3,
        "save_only_model": True,
    }
    found = farm.results(train, tmp_path, options, is_pipeline=True, callbacks=[Telling()], num_ranks=2)[0]
    assert (tmp_path / "told").read_text() == "r p s b t"
    assert any("events.out.tfevents" in name for name in found.files)
    assert (tmp_path / "checkpoint-3" / "model.safetensors").exists()
    assert not (tmp_path / "checkpoint-3" / "pipedream").exists()


@shows("hub_model_id", "hub_token", "hub_private_repo", "hub_revision")
def test_push_to_hub_reads_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def note(*positional: Any, **given: Any) -> Any:
        calls.append({"positional": positional, **given})
        return SimpleNamespace(repo_id="me/model")

    hub = SimpleNamespace(create_repo=note, upload_folder=note)
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    options = {"hub_model_id": "me/model", "hub_token": "t", "hub_private_repo": True, "hub_revision": "v"}
    trainer = make_trainer(tmp_path, is_pipeline=True, given={}, **options)
    monkeypatch.setattr(trainer, "create_model_card", lambda **_: None)
    trainer.push_to_hub()
    created, uploaded = calls
    assert created["positional"] == ("me/model",) and created["token"] == "t" and created["private"]
    assert uploaded["revision"] == "v" and uploaded["repo_id"] == "me/model"


@shows("restore_callback_states_from_checkpoint")
def test_states_of_callbacks_are_restored_where_that_is_wanted(farm: Farm, tmp_path: Path) -> None:
    options = {
        **_EVERY_STEP,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    for wanted in (False, True):
        patience = [transformers.EarlyStoppingCallback(3)]
        farm.results(train, tmp_path / "whole", options, is_pipeline=True, callbacks=patience, num_ranks=2)
        trainer = make_trainer(
            tmp_path / "whole",
            is_pipeline=True,
            given={"callbacks": [transformers.EarlyStoppingCallback(2)]},
            restore_callback_states_from_checkpoint=wanted,
            **options,
        )
        trainer._init_training_state(4, 6, 1, str(tmp_path / "whole" / "checkpoint-2"), None)
        (callback,) = [
            each
            for each in trainer.callback_handler.callbacks
            if isinstance(each, transformers.EarlyStoppingCallback)
        ]
        assert callback.early_stopping_patience == (3 if wanted else 2)
