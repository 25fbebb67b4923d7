"""Compares two workers with a plain loop, on a Llama-like model in bfloat16 and this machine's device.

    python bench/system/llama.py [--width 2048] [--layers 8] [--length 512] [--batch 8] [--minibatches 40]

The plain loop and the pipeline train the same weights with the same minibatches, under autocast to bfloat16,
with AdamW. First the plain loop runs in this process. Then a pipeline of two stages runs, cut in the middle,
with `--microbatches` per minibatch. With two GPUs each stage has its own GPU. On a single GPU the pipeline
can at best be as fast as the plain loop. Prints one JSON object: the tokens per second of the loop and the
pipeline, each without its first minibatches, the ratio of the two, and the last losses.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time

import pipedream
import torch
from pipedream.worker.devices import choose_device
from torch import Tensor, nn

VOCABULARY = 8192
_HEAD_WIDTH = 64


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype) * self.scale


def rotated(x: Tensor) -> Tensor:
    """Returns queries or keys, of shape (batch, heads, length, width of a head), rotated by their
    positions."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.num_heads = max(1, width // _HEAD_WIDTH)
        self.norm, self.other_norm = RMSNorm(width), RMSNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            self.queries_keys_values(self.norm(x))
            .unflatten(-1, (3, self.num_heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        queries, keys, values = heads.unbind(0)
        attended = nn.functional.scaled_dot_product_attention(
            rotated(queries), rotated(keys), values, is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.other_norm(x)).chunk(2, -1)
        out: Tensor = x + self.down(nn.functional.silu(gate) * up)
        return out


def make_model(width: int, num_layers: int) -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [Block(width) for _ in range(num_layers)]
    head = nn.Linear(width, VOCABULARY, bias=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, RMSNorm(width), head)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_data(options: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    size = (options.minibatches, options.batch, options.length + 1)
    tokens = torch.randint(VOCABULARY, size, generator=generator)
    return [(text[:, :-1], text[:, 1:]) for text in tokens]


def plain_loop(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], device: torch.device
) -> tuple[float, float]:
    """Returns the seconds per minibatch, and the last loss."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ends = []
    for inputs, targets in data:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model(inputs.to(device)), targets.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        last = loss.item()  # reads every loss, as the pipeline does
        ends.append(time.perf_counter())
    return seconds_of(ends), last


def seconds_of(ends: list[float]) -> float:
    """Returns the seconds per minibatch, without the first quarter of the minibatches. `ends` has the time at
    which each minibatch was over.
    """
    steady = ends[len(ends) // 4 :]
    return statistics.median(b - a for a, b in itertools.pairwise(steady))


def pipeline(options: argparse.Namespace, data: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    model = make_model(options.width, options.layers)
    middle = 1 + options.layers // 2
    layers = [(0, middle - 1), (middle, len(model) - 1)]
    plan = pipedream.Plan(tuple(pipedream.Stage(first, last, 1) for first, last in layers))
    result = pipedream.run(
        model,
        plan,
        data=data,
        loss_fn=loss_of,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
        autocast="bfloat16",
        microbatches=options.microbatches,
        progress=False,
    )
    return result.measured_ms / 1e3, result.losses[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    data = make_data(options)
    device = choose_device(0)
    plain_s, plain_loss = plain_loop(make_model(options.width, options.layers), data, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the workers may share the GPU
    piped_s, piped_loss = pipeline(options, data)
    num_tokens = options.batch * options.length
    print(
        json.dumps(
            {
                "bench": "llama",
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "host",
                "plain_tokens_per_s": num_tokens / plain_s,
                "pipeline_tokens_per_s": num_tokens / piped_s,
                "share": plain_s / piped_s,
                "plain_loss": plain_loss,
                "pipeline_loss": piped_loss,
            }
        )
    )


if __name__ == "__main__":
    main()
