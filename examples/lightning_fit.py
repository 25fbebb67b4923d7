"""Trains a LightningModule as a pipeline of workers. In your script only the call of Trainer(...).fit(...)
changes.

    python examples/lightning_fit.py --workers 2
    python examples/lightning_fit.py --resume
    torchrun --nproc-per-node 2 examples/lightning_fit.py

A small language model learns the bytes of this repository's own documents. Nothing is downloaded. `make
examples` installs Lightning.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision_import  # noqa: F401  # beside this file; before Lightning, at the workers too
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning as L
except ModuleNotFoundError:
    sys.exit("lightning is not installed: make examples brings it")
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pipedream.integrations.lightning import fit

NUM_BYTES = 256
DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"


class ByteModel(L.LightningModule):
    """A small decoder, written as for any Trainer. It has no code for pipelines."""

    def __init__(self, width: int, num_blocks: int, context: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.randn(context, width) / 10)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position[: text.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(text.size(1), device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def _loss(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        (text,) = batch
        outputs = self(text[:, :-1])
        targets = text[:, 1:]
        right = (outputs.argmax(-1) == targets).float().mean()
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten()), right

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss, right = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_right", right, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss, right = self._loss(batch)
        self.log_dict({"val_loss": loss, "val_right": right}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Documents(L.LightningDataModule):
    """The bytes of this repository's documents, cut into examples."""

    def __init__(self, context: int, batch_size: int, num_examples: int) -> None:
        super().__init__()
        self.context, self.batch_size, self.num_examples = context, batch_size, num_examples

    def setup(self, stage: str) -> None:
        text = b"".join(path.read_bytes() for path in sorted(DOCUMENTS.glob("*.md")))
        length = self.context + 1
        examples = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        examples = examples[: len(examples) // length * length].view(-1, length)[: self.num_examples]
        num_held_out = len(examples) // 10
        self.held_out, self.train = (
            TensorDataset(examples[:num_held_out]),
            TensorDataset(examples[num_held_out:]),
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a LightningModule on workers.")
    parser.add_argument("--workers", type=int, default=2, help="worker processes; torchrun sets its own")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes per example")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output-dir", type=Path, default=Path("results/lightning"))
    options = parser.parse_args()

    L.seed_everything(1)
    module = ByteModel(options.width, options.blocks, options.context, options.learning_rate)
    best = ModelCheckpoint(options.output_dir, monitor="val_loss", save_last=True)
    # A script for one device would call L.Trainer(max_epochs=3, ...).fit(module, datamodule=Documents(...)).
    trainer = fit(
        module,
        datamodule=Documents(options.context, options.batch_size, options.examples),
        workers=options.workers,
        ckpt_path="last" if options.resume else None,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        callbacks=[best, EarlyStopping("val_loss", patience=2), LearningRateMonitor()],
        logger=CSVLogger(options.output_dir),
        log_every_n_steps=10,
    )
    if trainer.is_global_zero:
        print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})
        print(f"best checkpoint    {best.best_model_path}")


if __name__ == "__main__":
    main()
