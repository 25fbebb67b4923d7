"""Compares the synchronisation of m replicas with its limit, gloo's all-reduce and DistributedDataParallel.

    sudo .venv/bin/python bench/system/sync.py [--bandwidth 1Gbit/s] [--replicas 2] [--spares 0]
        [--mebibytes 64,256,512] [--rounds 3]

m hosts train a model of --mebibytes of parameters, whose computing takes little time. The hosts are network
namespaces, shaped with tbf; without --bandwidth they are as fast as the machine. Each round
measures, in turn:

    pipedream     a plan with m replicas (bsp)
    ddp           DistributedDataParallel over gloo
    all-reduce    one bare gloo all-reduce of as many bytes
    alone         the model without any exchange, on all hosts at once

Prints ms per update: the median over the rounds, the least and the most. "beyond" is this time minus that of
the model alone. In each direction the link of a host carries 2 (m - 1) / m times the parameters' bytes; the
limit is the time that it needs for these bytes.

With k spares there are k more hosts. Pipedream's plan is measured without and with them, each compared with
its own limit (planning/synced_bytes.py). In all other measurements these hosts wait.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipedream
import torch
import torch.distributed as dist
from gloo import join_ranks
from links import RUN_OPTIONS, Link, run_ranks
from pipedream.planning.plan import Stage
from pipedream.planning.synced_bytes import round_ms
from torch import nn

_WIDTH = 1024  # a layer has 4 MiB
_NUM_UPDATES, _NUM_WARM_UP = 8, 2
_OPTIMIZER = functools.partial(torch.optim.SGD, lr=1e-4)
_WITH_SPARES = "with spares"
_OTHERS = ("ddp", "all-reduce", "alone")


def _model(mebibytes: int) -> nn.Sequential:
    """Makes a model whose layers keep the scale of the activations. With torch's own initial weights each
    layer would shrink them by sqrt(3). With 512 MiB of layers the activations would become denormal numbers,
    with which a processor computes several times as slowly."""
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(mebibytes // 4)]
    for layer in layers:
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")
    return nn.Sequential(*layers)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, _WIDTH), torch.zeros(4, _WIDTH)


def _loop_ms(step: Callable[[], Any]) -> float:
    """Returns milliseconds per step, without the first steps."""
    for _ in range(_NUM_WARM_UP):
        step()
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(_NUM_UPDATES):
        step()
    dist.barrier()
    return (time.perf_counter() - began_s) * 1e3 / _NUM_UPDATES


def _train(model: nn.Module, parameters: Any) -> Callable[[], None]:
    optimizer, (inputs, targets) = _OPTIMIZER(parameters), _batch()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _pipedream_ms(mebibytes: int, num_replicas: int, num_spares: int) -> float:
    model = _model(mebibytes)
    stage = Stage(0, len(model) - 1, num_replicas=num_replicas, num_spare_shards=num_spares)
    plan = pipedream.Plan((stage,))
    result = pipedream.run(
        model,
        plan,
        data=[_batch()] * (num_replicas * (_NUM_WARM_UP + _NUM_UPDATES)),
        loss_fn=nn.functional.mse_loss,
        optimizer=_OPTIMIZER,
        **RUN_OPTIONS,
    )
    if not result.spans:  # only rank 0 has spans
        return 0.0
    ended_ns = [span.completed_ns for span in result.spans[0] if span.kind == "UPDATE"]
    steady = ended_ns[_NUM_WARM_UP - 1 :]
    return (steady[-1] - steady[0]) / 1e6 / (len(steady) - 1)


def _rank(mebibytes: int, num_rounds: int, num_spares: int, path: str) -> None:
    join_ranks()
    rank, num_replicas = dist.get_rank(), dist.get_world_size() - num_spares
    trains = rank < num_replicas
    torch.set_num_threads(1)
    flat = torch.zeros(mebibytes << 18)
    group = dist.new_group(list(range(num_replicas)))
    figures: dict[str, list[float]] = {
        name: [] for name in ("pipedream", *([_WITH_SPARES] if num_spares else []), *_OTHERS)
    }
    for _ in range(num_rounds):
        figures["pipedream"].append(_pipedream_ms(mebibytes, num_replicas, 0))
        dist.barrier()
        if num_spares:
            figures[_WITH_SPARES].append(_pipedream_ms(mebibytes, num_replicas, num_spares))
            dist.barrier()
        for name in _OTHERS:
            step = _step_of(name, mebibytes, flat, group) if trains else lambda: None
            figures[name].append(_loop_ms(step))
    if rank == 0:
        Path(path).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()


def _step_of(name: str, mebibytes: int, flat: torch.Tensor, group: Any) -> Callable[[], Any]:
    """Returns the function that does one step of the side `name`. `group` is the process group of the ranks
    that train.
    """
    if name == "all-reduce":
        return lambda: dist.all_reduce(flat, group=group)
    model = _model(mebibytes)
    if name == "alone":
        return _train(model, model.parameters())
    return _train(nn.parallel.DistributedDataParallel(model, process_group=group), model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--bandwidth", help="for example 1Gbit/s; as fast as the machine without it")
    parser.add_argument("--replicas", type=int, default=2, help="2 to 8")
    parser.add_argument("--spares", type=int, default=0, help="hosts beside the replicas, in all up to 8")
    parser.add_argument("--mebibytes", default="64", help="of parameters, one or several: 64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        _rank(*json.loads(options.rank_of))
        return
    for mebibytes in map(int, options.mebibytes.split(",")):
        with Link(options.bandwidth, num_hosts=options.replicas + options.spares) as link:
            figures = run_ranks(link, sys.argv[0], [mebibytes, options.rounds, options.spares])
        title = f"{mebibytes} MiB of parameters, {options.replicas} replicas, {options.spares} spares"
        print(f"{title}, {options.bandwidth or 'unshaped'}; ms per update")
        limits = {
            name: _limit_ms(mebibytes, options.replicas, num_spares, link.bytes_per_s)
            for name, num_spares in (("pipedream", 0), ("ddp", 0), (_WITH_SPARES, options.spares))
            if link.bytes_per_s is not None
        }
        print(_table(figures, limits), flush=True)


def _limit_ms(mebibytes: int, num_replicas: int, num_spares: int, bytes_per_s: float) -> float:
    return round_ms(mebibytes << 20, num_replicas, num_spares, bytes_per_s)


def _table(figures: dict[str, list[float]], limits: dict[str, float]) -> str:
    lines = [f"  {'limit':12}{limits['pipedream']:9.1f}"] if limits else []
    if limits and _WITH_SPARES in figures:
        lines.append(f"  {'with spares':12}{limits[_WITH_SPARES]:9.1f}   the limit of that")
    alone_ms = statistics.median(figures["alone"])
    for name, values in figures.items():
        median = statistics.median(values)
        line = f"  {name:12}{median:9.1f}   ({min(values):.1f} to {max(values):.1f})"
        if name in ("pipedream", "ddp", _WITH_SPARES):
            line += f", beyond {median - alone_ms:.1f}"
            if name in limits:
                line += f", {(median - alone_ms) / limits[name]:.2f} of the limit"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
