"""Trains an unchanged causal language model of Hugging Face on local text, as a pipeline of workers.

    python examples/hf_finetune.py --workers 2
    python examples/hf_finetune.py --architecture gpt2 --text my_notes.txt --schedule flush --microbatches 4
    python examples/hf_finetune.py --checkpoint-dir results/hf_finetune/checkpoints
    torchrun --nproc-per-node 2 examples/hf_finetune.py

If the third command is stopped or killed and started again, it continues with the same plan. The planner
chooses the schedule, unless you give a schedule or a plan.

Nothing is downloaded. The model is made from a configuration, or --pretrained FOLDER uses weights that you
have. The text is that of this repository, and a token is a byte. Batches are dicts of input_ids,
attention_mask and labels. The loss is the model's own. `make examples` installs the libraries.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pipedream
import torch
import torchvision_import  # noqa: F401  # beside this file; before transformers, at the workers too
from torch import nn
from torch.utils.data import DataLoader

try:
    import transformers
except ModuleNotFoundError:
    sys.exit("transformers is not installed: make examples brings it")

Batch = dict[str, torch.Tensor]

PAD, END, VOCABULARY = 256, 257, 258  # tokens 0 to 255 are the bytes
# The planner may choose a schedule whose gradients are up to this many updates late, on average. With AdamW
# late gradients cost more than additional microbatches.
DELAY_MAX = 0.25
IGNORED = -100  # the label of a position at which no token is predicted
ARCHITECTURES = ("gpt2", "llama")


def make_model(architecture: str, width: int, blocks: int, context: int) -> nn.Module:
    """Returns a small model with random weights. Its forward takes a batch's entries and returns a loss."""
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": END, "eos_token_id": END, "pad_token_id": PAD}
    heads = max(1, width // 32)
    if architecture == "gpt2":
        config = transformers.GPT2Config(
            n_embd=width, n_layer=blocks, n_head=heads, n_positions=context, **tokens
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        max_position_embeddings=context,
        **tokens,
    )
    return transformers.LlamaForCausalLM(config)


def read_text(given: Path | None) -> bytes:
    """Returns the text of the file, or of this repository's documents and programs."""
    if given is not None:
        return given.read_bytes()
    repository = Path(__file__).resolve().parents[1]
    files = [*repository.glob("*.md"), *repository.glob("docs/*.md"), *repository.glob("python/**/*.py")]
    return b"\n".join(path.read_bytes() for path in sorted(files))


def cut_into_examples(text: bytes, context: int) -> list[list[int]]:
    """Cuts the text into examples. Each example has as many whole lines as fit into the context, and ends
    with END. Longer lines are cut off."""
    examples: list[list[int]] = []
    current: list[int] = []
    for line in text.splitlines(keepends=True):
        if current and len(current) + len(line) >= context:
            examples.append([*current, END])
            current = []
        current = (current + list(line))[: context - 1]
    return [*examples, [*current, END]]


def collate(examples: Sequence[Sequence[int]]) -> Batch:
    """Returns the batch as transformers' models take it. Examples are padded to the length of the longest
    one."""
    input_ids = torch.full((len(examples), max(map(len, examples))), PAD)
    attention_mask = torch.zeros_like(input_ids)
    for row, example in enumerate(examples):
        input_ids[row, : len(example)] = torch.tensor(example)
        attention_mask[row, : len(example)] = 1
    labels = input_ids.masked_fill(attention_mask == 0, IGNORED)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def num_tokens(batch: Batch) -> torch.Tensor:
    """Returns the number of tokens over which the loss is a mean. The first token of an example is not
    predicted, so it does not count."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Returns the mean loss in nats per token."""
    model.eval()
    nats, count = 0.0, 0
    for batch in loader:
        tokens = int(num_tokens(batch))
        nats += model(**batch).loss.item() * tokens
        count += tokens
    model.train()
    return nats / count


def make_plan(
    model: nn.Module,
    loader: DataLoader,
    num_workers: int,
    given: str | Path | None,
    microbatches: int | None,
    optimizer: Any = None,
) -> pipedream.Plan:
    """Returns the given plan, or makes one from a profile. given: a plan's file, or the replicas of each
    stage ("2-1"). microbatches: None lets the planner choose the number. optimizer: if given, short runs with
    it on this machine (about a minute) make the prediction more exact.
    """
    if given is not None and os.path.exists(given):
        return pipedream.Plan.load(given)
    print("profiling", flush=True)
    profile = pipedream.profile(model, loader, minibatches=30, seconds=10 if given is None else 1)
    if given is not None:
        return pipedream.Plan.load(given, profile=profile)
    how: dict[str, Any] = {"schedule": "auto", "microbatches": microbatches or "auto", "delay_max": DELAY_MAX}
    if optimizer is not None:
        print("calibrating", flush=True)
        profile = pipedream.calibrate(profile, model, loader, optimizer=optimizer, workers=num_workers)
        how |= {"cost_model": "calibrated", "workers_per_host": num_workers}
    return pipedream.partition(profile, num_workers, "10Gbit/s", straight=True, **how)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a language model of transformers on workers.")
    parser.add_argument("--workers", type=int, default=2, help="worker processes; torchrun sets its own")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama")
    parser.add_argument("--pretrained", type=Path, help="a folder that save_pretrained() made")
    parser.add_argument("--text", type=Path, help="to train on, instead of this repository's own")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--context", type=int, default=96, help="bytes per example")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--minibatches", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument(
        "--schedule", help="docs/schedules.md has all; default: auto, the planner's choice, but with --plan"
    )
    parser.add_argument("--microbatches", type=int, help="of each minibatch; auto chooses them, too")
    parser.add_argument("--plan", help="a plan, or each stage's replicas (2-1), instead of the planner's")
    parser.add_argument(
        "--calibrate", action="store_true", help="predict from short runs on this machine; not with torchrun"
    )
    parser.add_argument("--checkpoint-dir", type=Path, help="save the run there, and continue from it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path("results/hf_finetune"))
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    options.output_dir.mkdir(parents=True, exist_ok=True)  # fails early if the folder cannot be made
    is_main = os.environ.get("RANK", "0") == "0"  # torchrun starts this script once per worker
    num_workers = int(os.environ.get("WORLD_SIZE", options.workers))
    # The workers will share this machine's cores, so the profile must use only one worker's share of them.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
    torch.manual_seed(options.seed)
    if options.pretrained is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.pretrained).train()
    else:
        model = make_model(options.architecture, options.width, options.blocks, options.context)

    examples = cut_into_examples(read_text(options.text), options.context)
    num_held_out = min(200, max(1, len(examples) // 10))
    order = torch.randperm(len(examples)).tolist()
    train = [examples[i] for i in order[num_held_out:]][: options.minibatches * options.batch_size]
    held_out = [examples[i] for i in order[:num_held_out]]
    make_loader = functools.partial(DataLoader, batch_size=options.batch_size, collate_fn=collate)
    loader, held_out_loader = make_loader(train, shuffle=True), make_loader(held_out)
    epochs = math.ceil(options.minibatches / len(loader))

    optimizer = functools.partial(torch.optim.AdamW, lr=options.learning_rate, weight_decay=0.01)
    if is_main:
        calibrated_with = optimizer if options.calibrate else None
        given = options.plan
        if options.checkpoint_dir is not None and options.checkpoint_dir.exists():
            given = options.output_dir / "plan.json"  # the plan with which the run began
        plan = make_plan(model, loader, num_workers, given, options.microbatches, calibrated_with)
        # A batch is as long as its longest example, so memory is planned for the longest example of all.
        plan = plan.fitting(collate([max(train, key=len)] * options.batch_size))
        print(plan, "\n", flush=True)
        plan.save(options.output_dir / "plan.json")
        untrained = evaluate(model, held_out_loader)
    else:
        plan = pipedream.Plan.straight(num_workers, num_workers)  # a placeholder: all ranks use rank 0's plan

    num_updates = epochs * len(loader)
    result = pipedream.run(
        model,
        plan,
        data=loader,
        optimizer=optimizer,
        lr_scheduler=functools.partial(
            transformers.get_cosine_schedule_with_warmup,
            num_warmup_steps=num_updates // 10,
            num_training_steps=num_updates,
        ),
        weight_fn=num_tokens,  # weighs microbatches by their tokens, so that the loss is the minibatch's mean
        schedule=options.schedule or ("auto" if options.plan is None else "pipedream"),
        microbatches=options.microbatches or 1,
        epochs=epochs,
        seed=options.seed,
        checkpoints=options.checkpoint_dir,
    )
    if not is_main:
        return
    if result.stopped_at is not None:
        print(f"stopped after {result.stopped_at} of {num_updates} minibatches")

    result.plot(options.output_dir / "loss.png")
    model.save_pretrained(options.output_dir / "model")
    print(result.summary())
    print(f"plan, plot, model  {options.output_dir}/plan.json, loss.png, model")
    trained = evaluate(model, held_out_loader)
    print(f"held-out loss      {untrained:.3f} -> {trained:.3f} nats per byte on {num_held_out} examples")


if __name__ == "__main__":
    main()
