"""Trains an image classifier of torchvision or timm as a pipeline of workers. You choose it by its name.

    python examples/image_classifier.py resnet18 --workers 2
    python examples/image_classifier.py convnext_atto --epochs 3
    torchrun --nproc-per-node 2 examples/image_classifier.py mobilenet_v3_small

Nothing is downloaded: the network has random weights, and the images are the 1,797 handwritten digits of
scikit-learn, scaled up. A fifth of them is held out for the accuracy after each epoch. `make examples`
installs the libraries.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pipedream
import torch
import torchvision_import  # noqa: F401  # beside this file; before torchvision, at the workers too
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES = 10


def make_model(name: str) -> nn.Module:
    """Returns the network with random weights. It maps images (batch, 3, size, size) to scores (batch,
    NUM_CLASSES).

    Raises SystemExit with one line of text for an unknown name or a missing library."""
    if importlib.util.find_spec("torchvision") is None:  # timm needs it, too
        sys.exit("torchvision is not installed: make examples brings it")
    import torchvision

    model: nn.Module
    if name in torchvision.models.list_models(torchvision.models):
        model = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES)
    elif importlib.util.find_spec("timm") is None:
        sys.exit(f"{name!r} is no classifier of torchvision, and timm is not installed: pip install timm")
    else:
        import timm

        if name not in timm.list_models():
            sys.exit(f"{name!r} is no classifier of torchvision or timm: mobilenet_v3_small is one")
        model = timm.create_model(name, num_classes=NUM_CLASSES)
    return model


def load_data(size: int, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns (training, held-out) samples: images (3, size, size) scaled to -1..1, and their digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("scikit-learn, whose images this uses, is not installed: make examples brings it")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def count_right(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (scores.argmax(dim=1) == labels).sum(), len(labels)


def make_plan(
    model: nn.Module,
    loader: DataLoader,
    num_workers: int,
    given: str | None,
    schedule: str,
    microbatches: int | None,
    optimizer: Any = None,
) -> pipedream.Plan:
    """Returns the given plan, or makes one from a profile. given: a plan's file, or the replicas of each
    stage ("2-1"). optimizer: if given, short runs with it on this machine (about a minute) make the
    prediction more exact.
    """
    if given is not None and os.path.exists(given):
        return pipedream.Plan.load(given)
    print("profiling", flush=True)
    seconds = 10 if given is None else 1
    profile = pipedream.profile(model, loader, F.cross_entropy, minibatches=30, seconds=seconds)
    if given is not None:
        return pipedream.Plan.load(given, profile=profile)
    how: dict[str, Any] = {}
    if schedule == "auto":
        how = {"schedule": "auto", "microbatches": microbatches or "auto"}
    if optimizer is not None:
        print("calibrating", flush=True)
        profile = pipedream.calibrate(
            profile, model, loader, F.cross_entropy, optimizer=optimizer, workers=num_workers
        )
        how |= {"cost_model": "calibrated", "workers_per_host": num_workers}
    return pipedream.partition(profile, num_workers, "10Gbit/s", straight=True, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains an image classifier as a pipeline of workers.")
    parser.add_argument(
        "model", nargs="?", default="resnet18", help="a name of torchvision.models, or of timm"
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes; torchrun sets its own")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=32, help="of the images; some networks need 224")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument(
        "--schedule",
        default="pipedream",
        help="docs/schedules.md has all; auto: the planner's choice, for networks without batch norm",
    )
    parser.add_argument("--microbatches", type=int, help="of each minibatch; auto chooses them, too")
    parser.add_argument("--plan", help="a plan, or each stage's replicas (2-1), instead of the planner's")
    parser.add_argument(
        "--calibrate", action="store_true", help="predict from short runs on this machine; not with torchrun"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, help="default: results/MODEL")
    options = parser.parse_args()

    folder = options.output_dir or Path("results") / options.model
    folder.mkdir(parents=True, exist_ok=True)  # fails early if the folder cannot be made
    is_main = os.environ.get("RANK", "0") == "0"  # torchrun starts this script once per worker
    num_workers = int(os.environ.get("WORLD_SIZE", options.workers))
    # The workers will share this machine's cores, so the profile must use only one worker's share of them.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_workers))
    torch.manual_seed(options.seed)
    model = make_model(options.model)
    train, held_out = load_data(options.size, options.seed)
    loader = DataLoader(train, batch_size=options.batch_size, shuffle=True, drop_last=True)

    optimizer = functools.partial(torch.optim.SGD, lr=options.learning_rate, momentum=0.9, weight_decay=5e-4)
    if is_main:
        asked = (options.plan, options.schedule, options.microbatches)
        plan = make_plan(model, loader, num_workers, *asked, optimizer if options.calibrate else None)
        print(plan, "\n", flush=True)
        plan.save(folder / "plan.json")
    else:
        plan = pipedream.Plan.straight(num_workers, num_workers)  # a placeholder: all ranks use rank 0's plan

    result = pipedream.run(
        model,
        plan,
        data=loader,
        loss_fn=F.cross_entropy,
        optimizer=optimizer,
        schedule=options.schedule,
        microbatches=options.microbatches or 1,
        epochs=options.epochs,
        seed=options.seed,
        validation=pipedream.Validation(
            DataLoader(held_out, batch_size=options.batch_size), {"accuracy": count_right}
        ),
    )
    if not is_main:
        return

    result.plot(folder / "loss.png")
    print(result.summary())
    print(f"plan and loss plot {folder / 'plan.json'}, {folder / 'loss.png'}")
    print(f"loss by epoch      {' -> '.join(f'{loss:.3f}' for loss in result.epoch_losses)}")
    last = result.validation[-1]
    print(f"held-out accuracy  {last.metrics['accuracy']:.4f} on {last.samples} images")


if __name__ == "__main__":
    main()
