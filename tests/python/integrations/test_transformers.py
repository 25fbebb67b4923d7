"""Tests integrations/transformers.py: a script gives the same numbers with Trainer and with
PipelineTrainer.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from farm import Farm
from networks import make_torchvision_importable
from pipedream import Plan

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not make_torchvision_importable():
    pytest.skip(
        f"torchvision {version('torchvision')} has no operators for torch {version('torch')}, so workers,"
        " which do not import this file, cannot import transformers: install the one of this torch",
        allow_module_level=True,
    )
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from pipedream.integrations.transformers import PipelineTrainer  # noqa: E402
from small_trainer import assert_same, train  # noqa: E402

pytestmark = pytest.mark.slow  # needs transformers, which make test does not install

_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
_LAYERS = {
    "llama": 26,
    "classifier": 27,
    "masked": 28,
    "answers": 25,
    "images": 20,
}  # one more than the number of places where each model may be cut


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=32, pad_token_id=0, **_SIZES)
        return transformers.LlamaForCausalLM(config)
    if kind == "images":
        config = transformers.ResNetConfig(
            num_channels=1,
            embedding_size=4,
            hidden_sizes=[4, 8],
            depths=[1, 1],
            layer_type="basic",
            num_labels=3,
        )
        return transformers.ResNetForImageClassification(config)
    undropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    num_labels = 2 if kind == "answers" else 3
    config = transformers.BertConfig(vocab_size=50, num_labels=num_labels, **undropped, **_SIZES)
    if kind == "classifier":
        return transformers.BertForSequenceClassification(config)
    if kind == "answers":
        return transformers.BertForQuestionAnswering(config)
    return transformers.BertForMaskedLM(config)


def _samples(kind: str, count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Returns images, or texts of 3 to 11 tokens. If each token has a label, the first two labels of a longer
    text are ignored."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "images":
        images = torch.randn(count, 1, 8, 8, generator=generator)
        return [{"pixel_values": image, "labels": (image.sum() > 0).long()} for image in images]
    samples = []
    for _ in range(count):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        tokens = torch.randint(1, 50, (length,), generator=generator)
        labels = tokens.clone()
        if length > 5:
            labels[:2] = -100
        if kind == "answers":
            places = {"start_positions": torch.tensor(0), "end_positions": tokens[0] % length}
            samples.append({"input_ids": tokens, **places})
            continue
        samples.append({"input_ids": tokens, "labels": tokens.sum() % 3 if kind == "classifier" else labels})
    return samples


def _padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def pad(name: str, value: int) -> torch.Tensor:
        entries = [sample[name] for sample in samples]
        if entries[0].dim() == 0:
            return torch.stack(entries)
        return torch.nn.utils.rnn.pad_sequence(entries, batch_first=True, padding_value=value)

    tokens = pad("input_ids", 0)
    labels = {name: pad(name, -100) for name in samples[0] if name != "input_ids"}
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), **labels}


def _figures(predicted: Any) -> dict[str, float]:
    return {"sum": float(predicted.predictions.argmax(-1).sum()), "labels": float(predicted.label_ids.size)}


def _figures_of_answers(predicted: Any) -> dict[str, float]:
    starts, ends = predicted.label_ids
    return {"starts": float(starts.sum()), "ends": float(ends.sum())}


def _loss_of_answers(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    assert labels is None and num_items_in_batch is None
    return outputs["start_logits"].pow(2).mean() + (outputs["end_logits"].mean() - 1) ** 2


def _trainer(kind: str, folder: Path, plan: Plan | None, given: dict[str, Any], **options: Any) -> Any:
    settings = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "logging_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **settings | options)
    make = transformers.Trainer if plan is None else PipelineTrainer
    return make(
        model=_model(kind),
        args=args,
        train_dataset=_samples(kind, 20, 1),
        eval_dataset=_samples(kind, 9, 2),
        data_collator=transformers.default_data_collator if kind == "images" else _padded,
        **given if plan is None else given | {"plan": plan},
    )


def _log(trainer: Any) -> list[dict[str, float]]:
    """Returns the log without times, and without the summary of the training."""
    timed = ("time", "per_second")
    return [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]


def _assert_same(trainer: Any, expected: Any, relative: float = 1e-9) -> None:
    assert len(_log(trainer)) == len(_log(expected)) > 0
    for entry, wanted in zip(_log(trainer), _log(expected), strict=True):
        assert entry == pytest.approx(wanted, rel=relative, abs=1e-12)
    state, wanted_state = trainer.model.state_dict(), expected.model.state_dict()
    for name, tensor in wanted_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)


def _both(kind: str, plan: Plan, tmp_path: Path, given: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    expected = _trainer(kind, tmp_path / "trainer", None, given, **options)
    found = _trainer(kind, tmp_path / "pipeline", plan, given, **options)
    outcomes = [each.train() for each in (expected, found)]
    assert outcomes[0].global_step == outcomes[1].global_step
    assert outcomes[0].training_loss == pytest.approx(outcomes[1].training_loss, rel=1e-7)
    return found, expected


@pytest.mark.parametrize(("kind", "workers"), [("llama", 2), ("llama", 3), ("classifier", 2), ("masked", 3)])
def test_training_evaluations_and_weights_are_those_of_the_trainer(
    tmp_path: Path, kind: str, workers: int
) -> None:
    found, expected = _both(kind, Plan.straight(_LAYERS[kind], workers), tmp_path, {})
    _assert_same(found, expected)
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-9)
    found.save_model(str(tmp_path / "saved"))
    saved = type(found.model).from_pretrained(tmp_path / "saved", dtype=torch.float64)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], tensor, rtol=1e-9, atol=1e-11)


def _trained_on_two_stages(folder: Path) -> tuple[Any, str]:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        trained = train(folder, {}, is_pipeline=True, plan="1-1")
    return trained, told.getvalue()


def test_a_plan_may_be_the_replicas_of_every_stage(farm: Farm, tmp_path: Path) -> None:
    expected = train(tmp_path / "trainer", {}, is_pipeline=False)
    found, told = farm.results(_trained_on_two_stages, tmp_path / "pipeline", num_ranks=2)[0]
    assert "2 stages on 2 workers" in told
    assert_same(found, expected)


def test_a_training_that_is_resumed_is_one_that_was_never_stopped(tmp_path: Path) -> None:
    _, expected = _both("llama", Plan.straight(_LAYERS["llama"], 2), tmp_path, {}, num_train_epochs=3)
    again = _trainer(
        "llama", tmp_path / "pipeline", Plan.straight(_LAYERS["llama"], 3), {}, num_train_epochs=3
    )
    again.train(resume_from_checkpoint=str(tmp_path / "pipeline" / "checkpoint-4"))
    _assert_same(again, expected)


def test_steps_metrics_and_the_last_checkpoint_are_those_of_the_trainer(tmp_path: Path) -> None:
    by_steps = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    plan = Plan.straight(_LAYERS["llama"], 2)
    found, expected = _both("llama", plan, tmp_path, {"compute_metrics": _figures}, max_steps=7, **by_steps)
    _assert_same(found, expected)
    assert "eval_sum" in _log(found)[-1] or "eval_sum" in _log(found)[-2]
    names = [
        sorted(path.name for path in (tmp_path / side).glob("check*")) for side in ("trainer", "pipeline")
    ]
    assert names[0] == names[1] == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]


def test_the_best_model_and_an_early_stop_are_those_of_the_trainer(tmp_path: Path) -> None:
    options = {"num_train_epochs": 4, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    found, expected = _both(
        "classifier",
        Plan.straight(_LAYERS["classifier"], 2),
        tmp_path,
        {"callbacks": [transformers.EarlyStoppingCallback(1)]},
        save_total_limit=2,
        **options,
    )
    _assert_same(found, expected)
    assert found.state.best_global_step == expected.state.best_global_step
    assert Path(found.state.best_model_checkpoint).name == Path(expected.state.best_model_checkpoint).name


@pytest.mark.parametrize("save_strategy", ["epoch", "best"])
def test_a_last_step_between_two_evaluations_may_be_the_best(tmp_path: Path, save_strategy: str) -> None:
    found, expected = _both(
        "classifier",
        Plan.straight(_LAYERS["classifier"], 2),
        tmp_path,
        {},
        num_train_epochs=1.5,
        save_strategy=save_strategy,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
        learning_rate=1e-3,
    )
    assert expected.state.best_global_step == expected.state.global_step == 6
    assert Path(found.state.best_model_checkpoint).name == "checkpoint-6"
    _assert_same(found, expected)
    saved = transformers.TrainerState.load_from_json(
        str(tmp_path / "pipeline" / "checkpoint-6" / "trainer_state.json")
    )
    assert saved.best_global_step == 6


def test_labels_of_other_names_are_those_of_the_trainer(tmp_path: Path) -> None:
    plan = Plan.straight(_LAYERS["answers"], 2)
    given = {"compute_metrics": _figures_of_answers}
    found, expected = _both("answers", plan, tmp_path, given, save_strategy="no")
    _assert_same(found, expected)


def test_a_loss_function_without_labels_is_added_up_as_by_the_trainer(tmp_path: Path) -> None:
    given = {"compute_loss_func": _loss_of_answers}
    off = {"save_strategy": "no", "eval_strategy": "no"}
    _assert_same(*_both("answers", Plan.straight(_LAYERS["answers"], 2), tmp_path, given, **off))


def test_losses_of_single_batches_for_metrics_are_refused(tmp_path: Path) -> None:
    plan = Plan.straight(_LAYERS["llama"], 2)
    given = {"compute_metrics": _figures}
    trainer = _trainer("llama", tmp_path, plan, given, include_for_metrics=["loss"])
    with pytest.raises(ValueError, match="include_for_metrics has 'loss', and the losses of single batches"):
        trainer.train()


def test_a_scheduler_by_metric_and_smoothed_labels_are_those_of_the_trainer(tmp_path: Path) -> None:
    options = {
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
        "metric_for_best_model": "loss",
        "optim": "sgd",
        "save_strategy": "no",
        "num_train_epochs": 3,
    }
    _assert_same(*_both("llama", Plan.straight(_LAYERS["llama"], 2), tmp_path, {}, **options))


@pytest.mark.parametrize("kind", ["llama", "classifier"])
def test_batches_are_cut_further_for_a_plan_with_more_microbatches(tmp_path: Path, kind: str) -> None:
    plan = replace(Plan.straight(_LAYERS[kind], 2), microbatches=4)
    # Llama's loss is computed in float32, whatever its weights are.
    _assert_same(*_both(kind, plan, tmp_path, {}, save_strategy="no"), relative=1e-6)


def test_batch_norm_is_trained_as_by_the_trainer_on_whole_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The plan would cut each batch into two. But batch norm must update its running statistics once for each
    # whole batch, as under a Trainer.
    plan = replace(Plan.straight(_LAYERS["images"], 2), microbatches=4)
    _assert_same(*_both("images", plan, tmp_path, {}))
    assert "batches are trained on whole: batch norm would normalize each piece" in capsys.readouterr().out


def test_arguments_that_a_pipeline_cannot_honour_are_refused(tmp_path: Path) -> None:
    message = "torch_compile of TrainingArguments is True, which a pipeline refuses"
    with pytest.raises(ValueError, match=message):
        _trainer("llama", tmp_path, Plan.straight(_LAYERS["llama"], 2), {}, torch_compile=True)


def test_a_batch_is_as_large_on_several_gpus(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, use_cpu=True, report_to="none"
    )
    assert args.device == torch.device("cpu")
    args._n_gpu = 4  # imitates four GPUs
    trainer = PipelineTrainer(model=_model("llama"), args=args, workers=2)
    assert trainer._train_batch_size == 3


def test_the_callers_model_stays_until_it_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Any] = []
    monkeypatch.setattr(transformers.Trainer, "_move_model_to_device", lambda *given: moves.append(given))
    trainer = _trainer("llama", tmp_path, Plan.straight(_LAYERS["llama"], 2), {})
    assert not moves
    trainer.evaluate()
    assert len(moves) == 1
    trainer.predict(trainer.eval_dataset)
    assert len(moves) == 2


def test_a_rank_without_arguments_is_a_trainer_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alone: list[Any] = []
    monkeypatch.setattr("pipedream.integrations.transformers._stand_alone", alone.append)
    for module in ("transformers", "asked_plan"):
        monkeypatch.setattr(f"pipedream.integrations.{module}.under_torchrun", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer = PipelineTrainer(_model("llama"), None)
    assert alone == [trainer.args]
    assert trainer.args.output_dir == "tmp_trainer"


@pytest.mark.parametrize(
    ("request_name", "message"),
    [
        ("should_save", "a callback set should_save, and save_strategy is 'no': set save_strategy='steps'"),
        ("should_evaluate", "a callback set should_evaluate, and eval_strategy is 'no'"),
        ("should_epoch_stop", "a callback set should_epoch_stop, and the data of an epoch"),
    ],
)
def test_a_request_of_a_callback_that_cannot_be_met_is_refused(
    tmp_path: Path, request_name: str, message: str
) -> None:
    class Asks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            setattr(control, request_name, state.global_step == 2)

    off = {"save_strategy": "no", "eval_strategy": "no"}
    plan = Plan.straight(_LAYERS["classifier"], 2)
    trainer = _trainer("classifier", tmp_path, plan, {"callbacks": [Asks()]}, **off)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    alone = _trainer("llama", tmp_path, None, {}, max_steps=4, eval_strategy="no")
    alone.train()
    trainer = _trainer("llama", tmp_path, Plan.straight(_LAYERS["llama"], 2), {})
    with pytest.raises(ValueError, match="checkpoint-4 has no folder 'pipedream', the state of a pipeline"):
        trainer.train(resume_from_checkpoint=True)
