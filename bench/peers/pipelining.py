"""Compares torch.distributed.pipelining's 1F1B with pipedream's schedules, on the same models and cuts.

    python bench/peers/pipelining.py [--rounds 3] [--models gpt,vgg,tiny] [--json FILE]

Two processes with one torch thread each run every side in turn, in every round, so that a change of the
machine's speed affects all sides alike. The sides are torch's Schedule1F1B over gloo and pipedream's flush,
2bw, pipedream and unstashed, each with several numbers of microbatches, and the plain loop in both processes
at once. The *limit* is half of the plain loop's time per minibatch: the time that two cores need if nothing
waits and nothing is sent. All pipelines have the cut that pipedream's planner chooses from a profile.

Prints the milliseconds per minibatch of each side: median, minimum and maximum over the rounds, without the
first tenth of each run. For pipelines it also prints the limit divided by the median, and for pipedream's
sides their median divided by the smallest median of torch's sides.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pipedream
import torch
import torch.distributed as dist
from pipedream import _core
from pipedream.links.rendezvous import host_store
from torch import nn
from torch_pipeline import step_of_1f1b

sys.path.append(str(Path(__file__).resolve().parents[1] / "system"))
from two_stages import steady_ms

_MICROBATCHES = (2, 4, 8)
_OPTIMIZER = functools.partial(torch.optim.SGD, lr=1e-3)
_VOCABULARY, _SEQUENCE, _WIDTH, _HEADS = 1024, 64, 256, 4


class Embedding(nn.Module):
    """Embeds tokens and their positions. Maps (batch, sequence) to (batch, sequence, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.positions = nn.Parameter(torch.zeros(_SEQUENCE, _WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tokens(tokens) + self.positions
        return embedded


class Block(nn.Module):
    """A block of GPT-2: attention and an MLP, each with a norm before it and a residual connection around
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.projection = nn.Linear(_WIDTH, _WIDTH)
        self.mlp_norm = nn.LayerNorm(_WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(-2))
        mixed: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


def _next_token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _gpt() -> list[nn.Module]:
    head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False))
    return [Embedding(), *(Block() for _ in range(8)), head]


def _vgg() -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(128 * 4 * 4, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return [*layers, nn.Linear(1024, 10)]


def _tiny() -> list[nn.Module]:
    return [nn.Linear(64, 64), nn.Linear(64, 64)]


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(_VOCABULARY, (32, _SEQUENCE + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class Case:
    make_layers: Callable[[], list[nn.Module]]
    make_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    num_minibatches: int

    def layers(self) -> list[nn.Module]:
        torch.manual_seed(0)
        return self.make_layers()


CASES = {
    "gpt": Case(_gpt, _tokens, _next_token_loss, 20),
    "vgg": Case(
        _vgg,
        lambda: (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))),
        nn.functional.cross_entropy,
        30,
    ),
    "tiny": Case(_tiny, lambda: (torch.randn(64, 64), torch.randn(64, 64)), nn.functional.mse_loss, 400),
}


# ---- In the two processes ----


class _Steady:
    """Measures milliseconds per minibatch, without the first tenth of the minibatches, but at least three."""

    def __init__(self, num_minibatches: int) -> None:
        self._first = max(3, num_minibatches // 10)
        self._left = num_minibatches - self._first

    def run(self, step: Callable[[], None]) -> float:
        for _ in range(self._first):
            step()
        began_s = time.perf_counter()
        for _ in range(self._left):
            step()
        return (time.perf_counter() - began_s) * 1e3 / self._left


def plain_ms(name: str, cut: int) -> float:
    """Returns milliseconds per minibatch of a plain training loop over the whole model. `cut` is not used."""
    case = CASES[name]
    model = nn.Sequential(*case.layers())
    optimizer = _OPTIMIZER(model.parameters())
    inputs, targets = case.make_batch()

    def step() -> None:
        loss = case.loss_fn(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return _Steady(case.num_minibatches).run(step)


def torch_ms(name: str, cut: int, microbatches: int) -> float:
    """Returns milliseconds per minibatch of torch's Schedule1F1B over gloo."""
    case, rank = CASES[name], dist.get_rank()
    layers = case.layers()
    module = nn.Sequential(*(layers[:cut] if rank == 0 else layers[cut:]))
    step = functools.partial(step_of_1f1b(module, case.loss_fn, _OPTIMIZER, microbatches), *case.make_batch())
    return _Steady(case.num_minibatches).run(step)


def pipedream_ms(name: str, cut: int, schedule: str, microbatches: int) -> float:
    case = CASES[name]
    layers = case.layers()
    stages = (pipedream.Stage(0, cut - 1), pipedream.Stage(cut, len(layers) - 1))
    result = pipedream.run(
        layers,
        pipedream.Plan(stages),
        data=[case.make_batch()] * case.num_minibatches,
        loss_fn=case.loss_fn,
        optimizer=_OPTIMIZER,
        schedule=schedule,
        microbatches=microbatches,
        progress=False,
    )
    return steady_ms(result) if dist.get_rank() == 0 else 0.0


def _serve(rank: int, connection: Connection, port: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    _core.keep_freed_memory()  # all sides get the same setting
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)
    while (call := connection.recv()) is not None:
        function, arguments = call
        connection.send(function(*arguments))
    dist.destroy_process_group()


class Ranks:
    """Two processes that call the same function at the same time, each as its rank."""

    def __init__(self) -> None:
        self._store, port = host_store()
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            self._ends.append(ours)
            arguments = (rank, theirs, port, self._folder.name)
            context.Process(target=_serve, args=arguments, daemon=True).start()

    def call(self, function: Callable[..., float], *arguments: Any) -> list[float]:
        for end in self._ends:
            end.send((function, arguments))
        return [end.recv() for end in self._ends]

    def close(self) -> None:
        for end in self._ends:
            end.send(None)


# ---- Measuring ----


def best_cut(name: str) -> int:
    """Returns the index of the second stage's first layer."""
    case = CASES[name]
    layers = case.layers()
    if len(layers) == 2:
        return 1
    profile = pipedream.profile(layers, [case.make_batch()] * 20, case.loss_fn, seconds=10)
    plan = pipedream.partition(profile, num_workers=2, bandwidth="100Gbit/s", straight=True)
    return plan.stages[-1].first_layer


def sides(name: str) -> dict[str, tuple[Callable[..., float], tuple[Any, ...]]]:
    """Returns the measured sides by name. Each has the function that both ranks call, and its arguments after
    model and cut.
    """
    found: dict[str, tuple[Callable[..., float], tuple[Any, ...]]] = {"plain, twice at once": (plain_ms, ())}
    for m in _MICROBATCHES:
        found[f"torch 1F1B, m = {m}"] = (torch_ms, (m,))
        for schedule in ("flush", "2bw", "pipedream", "unstashed"):
            found[f"{schedule}, m = {m}"] = (pipedream_ms, (schedule, m))
    found["pipedream, m = 1"] = (pipedream_ms, ("pipedream", 1))
    return found


def measure(ranks: Ranks, name: str, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    cut = best_cut(name)
    times: dict[str, list[float]] = {side: [] for side in sides(name)}
    for round_index in range(rounds):
        for side, (function, arguments) in sides(name).items():
            times[side].append(max(ranks.call(function, name, cut, *arguments)))
        print(f"{name}, round {round_index + 1} of {rounds} done", flush=True)
    limit = statistics.median(times["plain, twice at once"]) / 2
    return {"model": name, "cut": cut, "limit_ms": limit, "times_ms": times}


def report(found: dict[str, Any]) -> str:
    limit = found["limit_ms"]
    lines = [f"\n{found['model']}, cut before layer {found['cut']}; the limit is {limit:.2f} ms a minibatch"]
    lines.append(f"{'':24} {'median':>9} {'min':>9} {'max':>9} {'of limit':>9}")
    for side, values in found["times_ms"].items():
        median = statistics.median(values)
        share = "" if side.startswith("plain") else f"{limit / median:9.3f}"
        lines.append(f"{side:24} {median:9.2f} {min(values):9.2f} {max(values):9.2f} {share}")
    best = min(statistics.median(v) for side, v in found["times_ms"].items() if side.startswith("torch"))
    for side, values in found["times_ms"].items():
        if not side.startswith(("torch", "plain")):
            lines.append(f"{side} / the best of torch: {statistics.median(values) / best:.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default=",".join(CASES), help="of gpt, vgg and tiny")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    names = options.models.split(",")
    for name in names:
        if name not in CASES:
            parser.error(f"model {name!r} is unknown: use {', '.join(CASES)}")
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print(f"machine: {machine}", flush=True)
    ranks = Ranks()
    found = [measure(ranks, name, options.rounds) for name in names]
    ranks.close()
    for each in found:
        print(report(each))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "results": found}, file, indent=1)


if __name__ == "__main__":
    main()
