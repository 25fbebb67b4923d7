"""Tests that Ctrl-C ends a training with PipelineTrainer or fit() in the same way as with the library's own
trainer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from networks import make_torchvision_importable
from torch.utils.data import DataLoader

os.environ.setdefault("HF_HUB_OFFLINE", "1")
make_torchvision_importable()

pytestmark = [
    pytest.mark.slow,  # needs the libraries, which make test does not install
    pytest.mark.filterwarnings("ignore"),
]


class _Interrupting:
    """Data that send Ctrl-C to rank 0 when it reads the twelfth batch."""

    def __init__(self, batches: list[Any], *, has_length: bool) -> None:
        self._batches = batches
        self._has_length = has_length

    def __len__(self) -> int:
        if not self._has_length:
            raise TypeError
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self._batches):
            if index == 12 and os.environ.get("RANK") == "0":
                os.kill(os.getpid(), signal.SIGINT)
            yield batch


def _trained_by_lightning(folder: Path, *, has_length: bool) -> dict[str, Any]:
    import lightning as L
    from lightning.pytorch.callbacks import OnExceptionCheckpoint
    from pipedream.integrations import lightning as front
    from test_lightning import NUM_LAYERS, arguments, loaders, net

    module, train = net("epoch"), _Interrupting([*loaders(2)[0]], has_length=has_length)
    given = arguments(folder, max_epochs=3, callbacks=[OnExceptionCheckpoint(folder)])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as exited:
            front.fit(module, train, plan=pipedream.Plan.straight(NUM_LAYERS, 2), **given)
    finally:
        signal.signal(signal.SIGINT, before)
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    num_steps, is_told = module.trainer.global_step, module.trainer.interrupted
    assert (exited.value.code, is_told) == (1, True)
    if os.environ["RANK"] == "0":
        alone, batches = net("epoch"), DataLoader([*loaders(2)[0]], batch_size=None)  # type: ignore[arg-type]
        L.Trainer(**arguments(folder / "alone", max_steps=num_steps)).fit(alone, batches)
        for name, value in alone.named_parameters():
            torch.testing.assert_close(weights[name], value, rtol=0.0, atol=1e-9)
    return {"steps": num_steps, "saved": [*folder.glob("on_exception*.ckpt")]}


@pytest.mark.parametrize("has_length", [True, False])
def test_an_interrupted_fit_ends_as_one_of_lightning(farm: Farm, tmp_path: Path, has_length: bool) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("torchmetrics")
    ended = farm.results(_trained_by_lightning, tmp_path, has_length=has_length, num_ranks=2)
    assert ended[0]["steps"] == ended[1]["steps"] < 32  # one epoch has 32 batches
    (saved,) = ended[0]["saved"]
    assert torch.load(saved, weights_only=False)["global_step"] == ended[0]["steps"] >= 1


class _Interrupts:
    """A collator that sends Ctrl-C to rank 0 when it makes the twelfth batch."""

    def __init__(self) -> None:
        self._made = 0

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        self._made += 1
        if self._made == 12 and os.environ.get("RANK") == "0":
            os.kill(os.getpid(), signal.SIGINT)
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}


def _trained_by_transformers(folder: Path) -> int:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _train_by_transformers(folder)
    finally:
        torch.set_default_dtype(before)


def _train_by_transformers(folder: Path) -> int:
    from small_trainer import make_trainer

    options = {"max_steps": 60, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    collator = {"data_collator": _Interrupts()}
    trainer = make_trainer(folder / "pipeline", is_pipeline=True, given=collator, **options)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as interrupt:
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)
    num_steps: int = trainer.state.global_step
    assert len(interrupt.value.losses) == num_steps  # type: ignore[attr-defined]
    if os.environ["RANK"] == "0":
        options |= {"max_steps": num_steps, "save_strategy": "no"}
        alone = make_trainer(folder / "alone", is_pipeline=False, given={}, **options)
        alone.train()
        for name, tensor in alone.model.state_dict().items():
            torch.testing.assert_close(trainer.model.state_dict()[name], tensor, rtol=1e-9, atol=1e-11)
    return num_steps


def test_an_interrupted_training_raises_after_its_checkpoints_are_there(farm: Farm, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    steps = farm.results(_trained_by_transformers, tmp_path, num_ranks=2)
    assert steps[0] == steps[1] < 60
    saved = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "pipeline").glob("checkpoint-*"))
    assert saved == [*range(2, steps[0] + 1, 2)]
    assert not (tmp_path / "pipeline" / ".pipedream").exists()
