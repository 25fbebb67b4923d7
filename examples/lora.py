"""Trains LoRA adapters of a frozen language model, by transformers and peft, as a pipeline of workers.

    python examples/lora.py --workers 2
    python examples/lora.py --pretrained FOLDER --target-modules q_proj,v_proj --blocks-adapted 2
    torchrun --nproc-per-node 2 examples/lora.py

The weights of the model are frozen: they have no versions, no gradients and no optimizer state, and where
nothing upstream of a cut is trained, no gradient crosses it. Nothing is downloaded: model and text are those
of hf_finetune.py, beside this file. make examples brings the libraries.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from pathlib import Path

import hf_finetune
import pipedream
import torch
from torch import nn
from torch.utils.data import DataLoader

try:
    import peft
except ModuleNotFoundError:
    sys.exit("peft is not installed: make examples brings it")


def add_adapters(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """The model with adapters, which alone are trained, in its last blocks or in all."""
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
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--context", type=int, default=96, help="bytes per example")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--minibatches", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--schedule", default="flush", help="docs/schedules.md has all")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path("results/lora"))
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    is_main = os.environ.get("RANK", "0") == "0"  # torchrun starts this script once per worker
    num_workers = int(os.environ.get("WORLD_SIZE", options.workers))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
    torch.manual_seed(options.seed)
    if options.pretrained is not None:
        base = hf_finetune.transformers.AutoModelForCausalLM.from_pretrained(options.pretrained).train()
        options.blocks = base.config.num_hidden_layers
    else:
        base = hf_finetune.make_model("llama", options.width, options.blocks, options.context)
    # peft makes the adapters float32 beside bfloat16 weights.
    model = add_adapters(base.to(torch.bfloat16) if options.bfloat16 else base, options)

    text = hf_finetune.read_text(options.text)
    examples = hf_finetune.cut_into_examples(text, options.context)
    num_held_out = min(200, max(1, len(examples) // 10))
    order = torch.randperm(len(examples)).tolist()
    train = [examples[i] for i in order[num_held_out:]][: options.minibatches * options.batch_size]
    held_out = [examples[i] for i in order[:num_held_out]]
    make_loader = functools.partial(DataLoader, batch_size=options.batch_size, collate_fn=hf_finetune.collate)
    loader, held_out_loader = make_loader(train, shuffle=True), make_loader(held_out)

    if is_main:
        profile = pipedream.profile(model, loader, minibatches=20, seconds=10)
        plan = pipedream.partition(profile, num_workers, "10Gbit/s", straight=True)
        plan = plan.fitting(hf_finetune.collate([max(train, key=len)] * options.batch_size))
        print(plan, "\n", flush=True)
        untrained = hf_finetune.evaluate(model, held_out_loader)
    else:
        plan = pipedream.Plan.straight(num_workers, num_workers)  # rank 0's plan is used everywhere

    result = pipedream.run(
        model,
        plan,
        data=loader,
        optimizer=functools.partial(pipedream.optim.AdamW, lr=options.learning_rate),
        weight_fn=hf_finetune.num_tokens,
        schedule=options.schedule,
        microbatches=options.microbatches,
        epochs=math.ceil(options.minibatches / len(loader)),
        seed=options.seed,
    )
    if not is_main:
        return

    model.save_pretrained(options.output_dir / "adapters")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(result.summary())
    print(result.describe_memory())
    print(f"trained            {trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"adapters           {options.output_dir}/adapters")
    after = hf_finetune.evaluate(model, held_out_loader)
    print(f"held-out loss      {untrained:.3f} -> {after:.3f} nats per byte on {num_held_out} examples")


if __name__ == "__main__":
    main()
