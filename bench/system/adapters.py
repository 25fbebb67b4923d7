"""Shows how much memory and traffic adapters save at the first of two stages.

    python bench/system/adapters.py

Prints the table of docs/models.md, from `RunResult.memory` and `RunResult.channels`. There are three cases:
all weights are trained; all blocks have adapters; only the blocks of the second stage have adapters. The
adapters are LoRA's (Hu et al., ICLR'22). Takes half a minute.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pipedream
import torch
from pipedream.common.units import format_bytes
from torch import Tensor, nn

WIDTH, NUM_BLOCKS, RANK, NUM_MINIBATCHES = 64, 4, 4, 8
TERMS = ("weight versions", "optimizer state", "parameter gradients", "stashed activations")


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter: the output of two small trained layers is added to its
    output."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, first_adapted: int | None) -> None:
        """`first_adapted` is the index of the first block with adapters. With None no block has adapters, and
        all weights are trained.
        """
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(NUM_BLOCKS)
        )
        if first_adapted is None:
            return
        self.requires_grad_(False)
        for block in list(self.blocks)[first_adapted:]:
            block.linear1, block.linear2 = Adapted(block.linear1), Adapted(block.linear2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(first_adapted: int | None) -> list[int]:
    """Returns the bytes at stage 0 of each of TERMS, and then the bytes of gradients that it receives per
    minibatch.
    """
    torch.manual_seed(0)
    data = [(torch.randn(8, 16, WIDTH), torch.randn(8, 16, WIDTH)) for _ in range(NUM_MINIBATCHES)]
    result = pipedream.run(
        Model(first_adapted),
        replace(pipedream.Plan.straight(2, 2), cuts=("blocks.1",)),
        data=data,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(pipedream.optim.AdamW, lr=1e-3),
        progress=False,
    )
    terms = result.memory[0]
    found = [
        sum(figures["predicted"] or 0 for name, figures in terms.items() if wanted in name)
        for wanted in TERMS
    ]
    sent = [one.placed_bytes for one in result.channels if one.name == "gradients of stage 1 to stage 0"]
    return [*found, max(sent) // NUM_MINIBATCHES]


def main() -> None:
    columns = [train(None), train(0), train(NUM_BLOCKS // 2)]
    print("| stage 0 | all weights | adapters in all blocks | adapters in stage 1 alone |")
    print("| --- | --- | --- | --- |")
    for name, *row in zip((*TERMS, "gradients sent to it, per minibatch"), *columns, strict=True):
        print(f"| {name} | {' | '.join(map(format_bytes, row))} |")


if __name__ == "__main__":
    main()
