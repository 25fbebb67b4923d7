"""Fine-tunes a causal language model with transformers' Trainer, as a pipeline of workers.

    python examples/trainer.py --workers 2
    torchrun --nproc-per-node 2 examples/trainer.py

A script for one device would use transformers.Trainer instead of PipelineTrainer, without `workers`. Nothing
is downloaded: the script makes model and data. `make examples` installs the libraries.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torchvision_import  # noqa: F401  # beside this file; before transformers, at the workers too

try:
    from pipedream.integrations.transformers import PipelineTrainer
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed: make examples brings it")

PAD, VOCABULARY = 0, 64


def make_samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Returns sequences of 8 to 40 tokens. Each counts up, in steps of 1, 2 or 3."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length, first, step = torch.randint(2**20, (3,), generator=generator).tolist()
        counted = first + (1 + step % 3) * torch.arange(8 + length % 33)
        samples.append({"input_ids": 1 + counted % (VOCABULARY - 1)})
    return samples


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the samples as a batch, padded to the length of the longest one."""
    tokens = torch.nn.utils.rnn.pad_sequence(
        [sample["input_ids"] for sample in samples], batch_first=True, padding_value=PAD
    )
    is_token = tokens != PAD
    return {
        "input_ids": tokens,
        "attention_mask": is_token.long(),
        "labels": tokens.masked_fill(~is_token, -100),
    }


def accuracy(predicted: Any) -> dict[str, float]:
    guesses, labels = predicted.predictions[:, :-1], predicted.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guesses == labels)[counted].mean())}


def most_likely(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the most likely tokens, which take less memory than all logits."""
    return logits.argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a language model with transformers' Trainer.")
    parser.add_argument("--output-dir", type=Path, default=Path("results/trainer"))
    parser.add_argument("--workers", type=int, default=2, help="worker processes; torchrun sets its own")
    options = parser.parse_args()
    output = options.output_dir
    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=PAD,
    )
    trainer = PipelineTrainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=str(output),
            num_train_epochs=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=4,
            weight_decay=0.01,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            save_total_limit=1,
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=make_samples(1024, seed=1),
        eval_dataset=make_samples(128, seed=2),
        data_collator=collate,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=most_likely,
        workers=options.workers,
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model(str(output / "model"))


if __name__ == "__main__":
    main()
