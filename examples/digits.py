"""Trains a small convolutional network on handwritten digits as a pipeline of worker processes.

    python examples/digits.py --workers 2
    torchrun --nproc-per-node 2 examples/digits.py

The data are the 1,797 real 8x8 images of scikit-learn. A fifth is held out for the accuracy at the end.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections import OrderedDict
from pathlib import Path

import pipedream
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 48


def make_model() -> nn.Sequential:
    """Returns layers that map images (batch, 1, 8, 8) to scores (batch, 10). A plan may cut after any
    layer."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 1
    for number, wider in enumerate((32, 32, 64, 64), start=1):
        layers[f"conv{number}"] = nn.Conv2d(channels, wider, 3, padding=1, bias=False)
        layers[f"norm{number}"] = nn.BatchNorm2d(wider)
        layers[f"relu{number}"] = nn.ReLU(inplace=True)
        if number == 2:
            layers["pool"] = nn.MaxPool2d(2)
        channels = wider
    layers["flatten"] = nn.Flatten()
    layers["scores"] = nn.Linear(channels * 4 * 4, 10)
    return nn.Sequential(layers)


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns (training, held-out) data: images scaled to 0..1, and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    model.eval()
    right: float = (model(images).argmax(dim=1) == labels).float().mean().item()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a digits classifier as a pipeline of workers.")
    parser.add_argument("--workers", type=int, default=2, help="worker processes; torchrun sets its own")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--plan",
        type=Path,
        help="a plan, or each stage's replicas (2-1), instead of profiling; the last one is saved",
    )
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--output-dir", type=Path, default=Path("results/digits"))
    options = parser.parse_args()

    options.output_dir.mkdir(parents=True, exist_ok=True)  # fails early if the folder cannot be made
    is_main = os.environ.get("RANK", "0") == "0"  # torchrun starts this script once per worker
    num_workers = int(os.environ.get("WORLD_SIZE", options.workers))
    # The workers will share this machine's cores, so the profile must use only one worker's share of them.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
    torch.manual_seed(options.seed)
    model = make_model()
    train, held_out = load_data(options.seed)
    loader = DataLoader(train, batch_size=BATCH_SIZE, shuffle=True)
    loss_fn = nn.functional.cross_entropy

    if options.plan is not None:
        plan = pipedream.Plan.load(options.plan, num_layers=len(model))
    elif is_main:
        profile = pipedream.profile(model, loader, loss_fn, minibatches=60)
        plan = pipedream.partition(profile, num_workers, "10Gbit/s", straight=True)
    else:
        plan = pipedream.Plan.straight(len(model), num_workers)  # a placeholder: all ranks use rank 0's plan
    if is_main:
        print(plan, "\n", flush=True)

    result = pipedream.run(
        model,
        plan,
        data=loader,
        loss_fn=loss_fn,
        optimizer=functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-4),
        epochs=options.epochs,
        seed=options.seed,
        transport=options.transport,
    )
    if not is_main:
        return

    plan.save(options.output_dir / "plan.json")
    result.plot(options.output_dir / "loss.png")
    result.save_trace(options.output_dir / "trace.json")
    print(result.summary())
    print(f"\n{result.describe_memory()}")
    print(f"loss plot          {options.output_dir / 'loss.png'}")
    print(f"trace              {options.output_dir / 'trace.json'} (open it at https://ui.perfetto.dev)")
    print(f"plan               {options.output_dir / 'plan.json'}")
    print(f"held-out accuracy  {accuracy(model, held_out):.4f} on {len(held_out)} images")


if __name__ == "__main__":
    main()
