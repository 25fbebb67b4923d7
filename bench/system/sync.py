"""The synchronisation of m replicas beside its limit, gloo's all-reduce and DistributedDataParallel.

    sudo .venv/bin/python bench/system/sync.py [--bandwidth 1Gbit/s] [--replicas 2] [--mebibytes 64,256,512]
        [--rounds 3]

As many hosts (network namespaces, shaped with tbf; without --bandwidth as fast as the machine) train a model
of that many MiB of parameters whose compute is small beside them. In turn, round after round: pipedream's
plan with m replicas (bsp), DistributedDataParallel over gloo, one bare gloo all-reduce of as many bytes, and
the model alone without any exchange, on all hosts at once. Medians over the rounds, in ms per update, with
the least and the most; "beyond" is what is more than the model alone takes. The limit is what each direction
of a host's link must carry, 2 (m - 1) / m of the parameters.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pipedream
import torch
import torch.distributed as dist
from links import RUN_OPTIONS, STORE_PORT, Link, run_ranks
from pipedream.planning.plan import Stage
from torch import nn

_WIDTH = 1024  # of layers of 4 MiB
_NUM_UPDATES, _NUM_WARM_UP = 8, 2
_OPTIMIZER = functools.partial(torch.optim.SGD, lr=1e-4)


def _model(mebibytes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(mebibytes // 4)))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, _WIDTH), torch.zeros(4, _WIDTH)


def _loop_ms(step: Callable[[], Any]) -> float:
    """Per step, without the first ones."""
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


def _pipedream_ms(mebibytes: int) -> float:
    model, num_replicas = _model(mebibytes), int(os.environ["WORLD_SIZE"])
    plan = pipedream.Plan((Stage(0, len(model) - 1, num_replicas=num_replicas),))
    result = pipedream.run(
        model,
        plan,
        data=[_batch()] * (num_replicas * (_NUM_WARM_UP + _NUM_UPDATES)),
        loss_fn=nn.functional.mse_loss,
        optimizer=_OPTIMIZER,
        **RUN_OPTIONS,
    )
    if not result.spans:  # which rank 0 has
        return 0.0
    ended_ns = [span.completed_ns for span in result.spans[0] if span.kind == "UPDATE"]
    steady = ended_ns[_NUM_WARM_UP - 1 :]
    return (steady[-1] - steady[0]) / 1e6 / (len(steady) - 1)


def _rank(mebibytes: int, num_rounds: int, path: str) -> None:
    rank, host = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    os.environ["GLOO_SOCKET_IFNAME"] = _interface()
    address = f"tcp://{host}:{STORE_PORT + 1}"
    dist.init_process_group("gloo", address, timedelta(minutes=10), int(os.environ["WORLD_SIZE"]), rank)
    torch.set_num_threads(1)
    flat = torch.zeros(mebibytes << 18)
    figures: dict[str, list[float]] = {"pipedream": [], "ddp": [], "all-reduce": [], "alone": []}
    for _ in range(num_rounds):
        figures["pipedream"].append(_pipedream_ms(mebibytes))
        dist.barrier()
        model = _model(mebibytes)
        figures["ddp"].append(
            _loop_ms(_train(nn.parallel.DistributedDataParallel(model), model.parameters()))
        )
        figures["all-reduce"].append(_loop_ms(lambda: dist.all_reduce(flat)))
        model = _model(mebibytes)
        figures["alone"].append(_loop_ms(_train(model, model.parameters())))
    if rank == 0:
        Path(path).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()


def _interface() -> str:
    """The link's end on this host."""
    return next(name for name in os.listdir("/sys/class/net") if name.startswith("pd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--bandwidth", help="for example 1Gbit/s; as fast as the machine without it")
    parser.add_argument("--replicas", type=int, default=2, help="2 to 8")
    parser.add_argument("--mebibytes", default="64", help="of parameters, one or several: 64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        _rank(*json.loads(options.rank_of))
        return
    for mebibytes in map(int, options.mebibytes.split(",")):
        with Link(options.bandwidth, num_hosts=options.replicas) as link:
            figures = run_ranks(link, sys.argv[0], [mebibytes, options.rounds])
        title = f"{mebibytes} MiB of parameters, {options.replicas} replicas"
        print(f"{title}, {options.bandwidth or 'unshaped'}; ms per update")
        print(_table(figures, _limit_ms(mebibytes, options.replicas, link.bytes_per_s)), flush=True)


def _limit_ms(mebibytes: int, num_replicas: int, bytes_per_s: float | None) -> float | None:
    if bytes_per_s is None:
        return None
    return 2 * (num_replicas - 1) / num_replicas * (mebibytes << 20) / bytes_per_s * 1e3


def _table(figures: dict[str, list[float]], limit_ms: float | None) -> str:
    lines = [] if limit_ms is None else [f"  {'limit':12}{limit_ms:9.1f}"]
    alone_ms = statistics.median(figures["alone"])
    for name, values in figures.items():
        median = statistics.median(values)
        line = f"  {name:12}{median:9.1f}   ({min(values):.1f} to {max(values):.1f})"
        if name in ("pipedream", "ddp"):
            line += f", beyond {median - alone_ms:.1f}"
            if limit_ms is not None:
                line += f", {(median - alone_ms) / limit_ms:.2f} of the limit"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
