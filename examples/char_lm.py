"""Trains a small GPT-like character model on the Python standard library's own source text.

    python examples/char_lm.py --workers 2
    python examples/char_lm.py --workers 3 --schedule flush --microbatches 8
    python examples/char_lm.py --workers 3 --checkpoint-dir results/char_lm/checkpoints
    torchrun --nproc-per-node 2 examples/char_lm.py

If the third command is killed and started again, it continues from its newest checkpoint.

The planner chooses the schedule, unless you give a schedule or a plan. A plan depends on measured times and
may differ from run to run. So the script keeps the first plan in the output folder and uses it again. The
same seed, plan, schedule and microbatches give the same losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import string
import sysconfig
from collections import OrderedDict
from pathlib import Path

import pipedream
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

CHARACTERS = string.printable  # any other character of the text becomes "?"
CONTEXT, WIDTH, HEADS, BLOCKS, BATCH_SIZE = 64, 128, 4, 4, 32
# The planner may choose a schedule whose gradients are up to this many updates late, on average. With AdamW
# late gradients cost more than additional microbatches.
DELAY_MAX = 0.25
TEXT_LENGTH, HELD_OUT_LENGTH = 1_000_000, 50_000


class Embed(nn.Module):
    """Embeds characters (batch, context) and their positions as vectors (batch, context, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(len(CHARACTERS), WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        return self.character(characters) + self.position


class Block(nn.Module):
    """Causal self-attention and an MLP, both with layer norm before and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


def make_model() -> nn.Sequential:
    """Returns layers that map characters (batch, context) to scores (batch, context, len(CHARACTERS))."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=Embed())
    for number in range(1, BLOCKS + 1):
        layers[f"block{number}"] = Block()
    layers["head"] = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS)))
    return nn.Sequential(layers)


def loss_fn(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss in nats per character."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (training, held-out) text as character numbers. The text is that of the standard library's
    modules, in the order of their names, up to TEXT_LENGTH characters."""
    code = {character: index for index, character in enumerate(CHARACTERS)}
    codes: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(codes) < TEXT_LENGTH:
            codes += [code.get(character, code["?"]) for character in path.read_text("utf-8", "replace")]
    text = torch.tensor(codes[:TEXT_LENGTH])
    return text[:-HELD_OUT_LENGTH], text[-HELD_OUT_LENGTH:]


def make_loader(text: torch.Tensor, num_minibatches: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Returns a loader of random windows of the text, as (characters, the next characters)."""
    windows = text.unfold(0, CONTEXT + 1, 1)
    dataset = TensorDataset(windows[:, :-1], windows[:, 1:])
    sampler = RandomSampler(dataset, num_samples=num_minibatches * BATCH_SIZE)
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)


def make_validation(text: torch.Tensor, every: int) -> pipedream.Validation:
    """Returns an evaluation on the text, which is cut into windows that share no targets."""
    windows = text.unfold(0, CONTEXT + 1, CONTEXT)
    return pipedream.Validation(
        [(part[:, :-1], part[:, 1:]) for part in windows.split(BATCH_SIZE)], every=every
    )


def make_plan(
    model: nn.Sequential, loader: DataLoader, num_workers: int, path: Path, microbatches: int | None
) -> pipedream.Plan:
    """Returns the plan in the file `path` if it suits: it is for this model, number of workers and number of
    microbatches, and names a schedule. Otherwise makes a plan from a profile, and saves it there.
    microbatches: None accepts any number, and lets the planner choose it."""
    name = f"char_lm {BLOCKS}x{WIDTH}"
    if path.exists():
        plan = pipedream.Plan.load(path)
        is_asked = microbatches in (None, plan.microbatches) and plan.schedule is not None
        if is_asked and (plan.model, plan.num_workers) == (name, num_workers):
            print(f"plan from {path} (delete it to profile again)")
            return plan
    profile = pipedream.profile(model, loader, loss_fn, minibatches=30)
    plan = pipedream.partition(
        profile,
        num_workers,
        "10Gbit/s",
        straight=True,
        schedule="auto",
        microbatches=microbatches or "auto",
        delay_max=DELAY_MAX,
    )
    plan = dataclasses.replace(plan, model=name)
    plan.save(path)
    return plan


def report(result: pipedream.RunResult, folder: Path) -> None:
    result.plot(folder / "loss.png")
    result.save_trace(folder / "trace.json")
    (folder / "losses.json").write_text(json.dumps(result.losses))
    print(result.summary())
    print(f"\n{result.describe_memory()}")
    print(f"losses             {folder / 'losses.json'}, plot in {folder / 'loss.png'}")
    print(f"trace              {folder / 'trace.json'} (open it at https://ui.perfetto.dev)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a character model as a pipeline of workers.")
    parser.add_argument("--workers", type=int, default=2, help="worker processes; torchrun sets its own")
    parser.add_argument("--minibatches", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--plan", type=Path, help="a plan, or each stage's replicas (2-1), instead of the one in output-dir"
    )
    parser.add_argument(
        "--schedule", help="docs/schedules.md has all; default: auto, the planner's choice, but with --plan"
    )
    parser.add_argument("--microbatches", type=int, help="of each minibatch; auto chooses them, too")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--checkpoint-dir", type=Path, help="save the run there, and continue from it")
    parser.add_argument(
        "--checkpoint-every", default="50", help="minibatches, a time such as 10min, or epoch"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("results/char_lm"))
    options = parser.parse_args()

    options.output_dir.mkdir(parents=True, exist_ok=True)  # fails early if the folder cannot be made
    is_main = os.environ.get("RANK", "0") == "0"  # torchrun starts this script once per worker
    num_workers = int(os.environ.get("WORLD_SIZE", options.workers))
    # The workers will share this machine's cores, so the profile must use only one worker's share of them.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
    torch.manual_seed(options.seed)
    model = make_model()
    train, held_out = load_text()
    loader = make_loader(train, options.minibatches)

    if options.plan is not None:
        plan = pipedream.Plan.load(options.plan, num_layers=len(model))
    elif is_main:
        path = options.output_dir / "plan.json"
        plan = make_plan(model, loader, num_workers, path, options.microbatches)
    else:
        plan = pipedream.Plan.straight(len(model), num_workers)  # a placeholder: all ranks use rank 0's plan
    if is_main:
        print(plan, "\n", flush=True)

    checkpoints = None
    if options.checkpoint_dir is not None:
        every = options.checkpoint_every
        every = int(every) if every.isdigit() else every
        checkpoints = pipedream.Checkpoints(options.checkpoint_dir, every=every)
    result = pipedream.run(
        model,
        plan,
        data=loader,
        loss_fn=loss_fn,
        optimizer=functools.partial(torch.optim.AdamW, lr=2e-3),
        schedule=options.schedule or ("auto" if options.plan is None else "pipedream"),
        microbatches=options.microbatches or 1,
        seed=options.seed,
        transport=options.transport,
        validation=make_validation(held_out, every=max(1, options.minibatches // 10)),
        checkpoints=checkpoints,
    )
    if is_main:
        report(result, options.output_dir)
        save_file(model.state_dict(), options.output_dir / "model.safetensors")
        if result.validation:  # it is empty if a run that had ended was started again
            first, last = result.validation[0].loss, result.validation[-1].loss
            bits = last / math.log(2)
            print(f"held-out loss      {first:.3f} -> {last:.3f} nats ({bits:.3f} bits) per character")


if __name__ == "__main__":
    main()
