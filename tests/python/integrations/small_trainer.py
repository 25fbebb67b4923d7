"""Trains a tiny classifier with a Trainer or a PipelineTrainer, also at a rank of the farm."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import make_torchvision_importable

make_torchvision_importable()  # a farm process imports this file without the tests

import transformers  # noqa: E402
from pipedream import Plan  # noqa: E402
from pipedream.integrations.transformers import PipelineTrainer  # noqa: E402
from torch import Tensor  # noqa: E402

__all__ = ["Trained", "assert_same", "make_trainer", "samples", "train"]

NUM_LAYERS = 17  # one more than the number of places where the model may be cut
_OPTIONS: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "report_to": "none",
}
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_ONE_SIDE = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "pipedream")


@dataclass
class Trained:
    """A training's results, as a user sees them."""

    log: list[dict[str, float]]
    weights: dict[str, Tensor]
    files: set[str]
    """The files in the output folder, without those that only a Trainer or only a pipeline writes."""


def _model() -> Any:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8}
    undropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=50, num_labels=3, max_position_embeddings=16, **sizes, **undropped
    )
    return transformers.BertForSequenceClassification(config)


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(1, 50, (count, 6), generator=generator)
    return [{"input_ids": text, "labels": text.sum() % 3, "unknown": text} for text in texts]


def make_trainer(folder: Path, *, is_pipeline: bool, given: dict[str, Any], **options: Any) -> Any:
    with _without_torchrun():  # under torchrun's variables TrainingArguments would make a process group
        args = transformers.TrainingArguments(str(folder), **copy.deepcopy(_OPTIONS | options))
    make = PipelineTrainer if is_pipeline else transformers.Trainer
    if is_pipeline:
        given = {"plan": Plan.straight(NUM_LAYERS, 2), **given}
    return make(_model(), args, train_dataset=samples(12, 1), eval_dataset=samples(5, 2), **given)


def train(
    folder: Path,
    options: dict[str, Any],
    *,
    is_pipeline: bool,
    resume: Path | None = None,
    **given: Any,
) -> Trained:
    """Trains in float64. `given` has further arguments for the trainer."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        trainer = make_trainer(folder, is_pipeline=is_pipeline, given=given, **options)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    finally:
        torch.set_default_dtype(before)
    timed = ("time", "per_second", "train_loss")
    log = [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    kept = {str(path) for path in files if not set(path.parts) & set(_OF_ONE_SIDE)}
    return Trained(log, weights, kept)


def assert_same(found: Trained, expected: Trained) -> None:
    assert len(found.log) == len(expected.log)
    for entry, wanted in zip(found.log, expected.log, strict=True):
        assert entry == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-9, atol=1e-11)
    assert found.files == expected.files


@contextlib.contextmanager
def _without_torchrun() -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in _OF_TORCHRUN if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
