"""Trains LoRA adapters of a frozen language model, by transformers and peft, as a pipeline of workers.

    python examples/lora.py --workers 2
    python examples/lora.py --pretrained FOLDER --target-modules q_proj,v_proj --blocks-adapted 2
    torchrun --nproc-per-node 2 examples/lora.py

The model's own weights are frozen: they have no versions, no gradients and no optimizer state. If all
adapters are in the last blocks (--blocks-adapted), no gradient crosses the cuts before them. Nothing is
downloaded: model and text are those of hf_finetune.py in this folder. `make examples` installs the libraries.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import hf_finetune
import torch
from torch import nn

try:
    import peft
    from pipedream.integrations.transformers import PipelineTrainer
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed: make examples brings it")


def add_adapters(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Returns the model with adapters in all of its blocks, or in the last ones. Only the adapters are
    trained."""
    first = options.blocks - (options.blocks_adapted or options.blocks)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=options.target_modules.split(","),
        layers_to_transform=list(range(first, options.blocks)) if first > 0 else None,
        use_dora=options.dora,
    )
    return peft.get_peft_model(model, config)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains adapters of a language model on workers.")
    parser.add_argument("--workers", type=int, default=2, help="worker processes; torchrun sets its own")
    parser.add_argument("--pretrained", type=Path, help="a folder that save_pretrained() made")
    parser.add_argument("--text", type=Path, help="to train on, instead of this repository's own")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--target-modules", default="q_proj,v_proj,up_proj,down_proj")
    parser.add_argument("--blocks-adapted", type=int, help="the last so many; default: all")
    parser.add_argument("--dora", action="store_true", help="adapters with a trained magnitude")
    parser.add_argument("--bfloat16", action="store_true", help="keep the frozen weights in 2 bytes each")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--context", type=int, default=96, help="bytes per example")
    parser.add_argument("--batch-size", type=int, default=4, help="of a microbatch")
    parser.add_argument("--accumulation", type=int, default=4, help="microbatches of an update")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path("results/lora"))
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    torch.manual_seed(options.seed)
    if options.pretrained is not None:
        base = hf_finetune.transformers.AutoModelForCausalLM.from_pretrained(options.pretrained)
        options.blocks = base.config.num_hidden_layers
    else:
        base = hf_finetune.make_model("llama", options.width, options.blocks, options.context)
    # The adapters are float32 even if the model's weights are bfloat16.
    model = add_adapters(base.to(torch.bfloat16) if options.bfloat16 else base, options)

    examples = hf_finetune.cut_into_examples(hf_finetune.read_text(options.text), options.context)
    num_held_out = min(200, max(1, len(examples) // 10))
    order = torch.randperm(len(examples)).tolist()
    trainer = PipelineTrainer(
        model=model,
        args=hf_finetune.transformers.TrainingArguments(
            output_dir=str(options.output_dir),
            max_steps=options.updates,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulation,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            remove_unused_columns=False,  # there are no columns, because examples are lists of tokens
            eval_strategy="steps",
            eval_steps=max(1, options.updates // 4),
            eval_on_start=True,
            save_strategy="no",
            logging_steps=max(1, options.updates // 10),
            report_to="none",
            seed=options.seed,
        ),
        train_dataset=[examples[index] for index in order[num_held_out:]],
        eval_dataset=[examples[index] for index in order[:num_held_out]],
        data_collator=hf_finetune.collate,
        workers=options.workers,
    )
    trainer.train()
    trainer.save_model(str(options.output_dir / "adapters"))
    if trainer.is_world_process_zero():
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"trained            {trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
        print(f"adapters           {options.output_dir}/adapters")
        print(f"held-out loss      {losses[0]:.3f} -> {losses[-1]:.3f} on {num_held_out} examples")


if __name__ == "__main__":
    main()
