"""Compares predicted with measured peak memory, per term, for several models, plans and schedules.

    python bench/system/memory.py [--only TEXT] [--terms] [--json FILE] [--slow-gradients BANDWIDTH]

Compares three figures of each worker: the memory that partition() has planned for its stage, the memory that
the run predicts, and the measured peak. Prints the prediction in bytes, by how many percent the planned
memory is above it, and by how many percent it is above the peak. The core's terms (weights, slots, staging)
are listed apart from torch's (activations, gradients, temporary tensors of a step). --terms prints every
term.

With --slow-gradients each worker is a host of its own (a network namespace, which needs root), and the hosts
of the last stage send at the given bandwidth. So as many tensors wait for these links as the schedule allows.
Nothing is timed, so any machine will do.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pipedream
import torch
from links import RUN_OPTIONS, Link, can_make_links, run_ranks
from pipedream import Plan, RunResult, _core
from pipedream.budget.memory import GRADIENTS, MODEL, STASH, TORCH_OPTIMIZER_STATE, TRANSIENT
from pipedream.common.table import format_table
from pipedream.common.units import format_bytes
from torch import nn

Batches = list[tuple[torch.Tensor, torch.Tensor]]
Terms = Mapping[str, Mapping[str, int | None]]

MINIBATCHES = 24
OF_TORCH = (MODEL, STASH, GRADIENTS, TRANSIENT, TORCH_OPTIMIZER_STATE)


def make_wide() -> tuple[nn.Sequential, Batches]:
    """Makes a model with activations of 48 to 768 KiB and weights of 4 or 64 KiB."""
    widths = (16, 64, 256, 64, 16, 64, 256, 64, 16)
    layers = (layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh()))
    return nn.Sequential(*layers), [(torch.randn(768, 16), torch.randn(768, 16)) for _ in range(4)]


def make_heavy() -> tuple[nn.Sequential, Batches]:
    """Makes a model with weights of 1 MiB and activations of 16 KiB."""
    layers = (layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU()))
    return nn.Sequential(*layers), [(torch.randn(8, 512), torch.randn(8, 512)) for _ in range(4)]


def make_cnn() -> tuple[nn.Sequential, Batches]:
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise((1, 32, 32, 64, 64))):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        if number == 1:
            layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers), [(torch.randn(48, 1, 8, 8), torch.randn(48, 10)) for _ in range(4)]


MODELS = {"wide": make_wide, "heavy": make_heavy, "cnn": make_cnn}
OPTIMIZERS = {
    "sgd": (functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9), 1.0),
    "adam": (functools.partial(torch.optim.Adam, lr=1e-3), 2.0),
    "native adam": (functools.partial(pipedream.optim.Adam, lr=1e-3), 2.0),
}


@dataclass(frozen=True)
class Combination:
    model: str
    replicas: tuple[int, ...]
    boundaries: tuple[int, ...]
    """The index of the last layer of each stage, without the last stage."""
    schedule: str = "pipedream"
    microbatches: int = 1
    optimizer: str = "sgd"
    recompute: bool = False

    def __str__(self) -> str:
        cut = ",".join(map(str, self.boundaries))
        name = f"{self.model} {'-'.join(map(str, self.replicas))} at {cut or 'no cut'}, {self.schedule}"
        name += f" m={self.microbatches}" if self.microbatches > 1 else ""
        name += f", {self.optimizer}" if self.optimizer != "sgd" else ""
        return name + (", recompute" if self.recompute else "")


COMBINATIONS = [
    Combination("wide", (1, 1), (7,)),
    Combination("wide", (1, 1, 1), (4, 9)),
    Combination("wide", (1, 1, 1), (4, 9), "vertical_sync"),
    Combination("wide", (1, 1), (8,), "flush", 4),
    Combination("wide", (1, 1), (8,), "gpipe", 4),
    Combination("wide", (1, 1), (8,), "2bw", 4),
    Combination("wide", (1, 1), (7,), recompute=True),
    Combination("wide", (2, 1), (7,)),
    Combination("wide", (2, 1), (8,)),
    Combination("wide", (1, 2), (8,)),
    Combination("wide", (2, 2), (7,)),
    Combination("wide", (3, 1), (9,)),
    Combination("wide", (2, 1), (7,), "flush", 2),
    Combination("heavy", (1, 1), (5,), optimizer="adam"),
    Combination("heavy", (2, 1), (5,)),
    Combination("heavy", (1, 2), (5,), optimizer="native adam"),
    Combination("heavy", (2,), (), "data_parallel", optimizer="adam"),
    Combination("cnn", (1, 1), (6,)),
    Combination("cnn", (2, 1), (6,)),
]


def plan_of(combination: Combination) -> Plan:
    torch.manual_seed(0)
    model, batches = MODELS[combination.model]()
    _, copies = OPTIMIZERS[combination.optimizer]
    profile = pipedream.profile(model, batches, nn.functional.mse_loss, minibatches=1)
    return pipedream.partition(
        profile,
        sum(combination.replicas),
        1e15,
        memory="4GiB",
        boundaries=combination.boundaries,
        replicas=combination.replicas,
        optimizer_copies=copies,
        recompute=False,
    )


def train(combination: Combination, plan: Plan, **options: Any) -> RunResult:
    torch.manual_seed(0)
    model, batches = MODELS[combination.model]()
    optimizer, _ = OPTIMIZERS[combination.optimizer]
    return pipedream.run(
        model,
        plan,
        data=[batches[i % len(batches)] for i in range(MINIBATCHES)],
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer,
        schedule=combination.schedule,
        microbatches=combination.microbatches,
        recompute=combination.recompute,
        **({"progress": False} | options),
    )


def sums(terms: Terms, kind: str, *, of_core: bool) -> int:
    return sum(figures[kind] or 0 for name, figures in terms.items() if (name not in OF_TORCH) == of_core)


def rows_over(combination: Combination, bandwidth: str) -> list[dict[str, Any]]:
    """Returns the rows of a run in which the last stage sends at this bandwidth."""
    plan = plan_of(combination)
    with Link(None, num_hosts=sum(combination.replicas)) as link:
        for host in link.hosts[-combination.replicas[-1] :]:
            link.slow_down(host, bandwidth)
        figures = run_ranks(link, __file__, [COMBINATIONS.index(combination), plan.to_dict()])
    rows: list[dict[str, Any]] = figures["rows"]
    return rows


def rank(arguments: str) -> None:
    index, document, path = json.loads(arguments)
    combination, plan = COMBINATIONS[index], Plan.from_dict(document)
    rows = rows_of(combination, plan, train(combination, plan, **RUN_OPTIONS))
    if os.environ["RANK"] == "0":
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"rows": rows}, file)


def rows_of(combination: Combination, plan: Plan, result: RunResult) -> list[dict[str, Any]]:
    """Returns one row per worker."""
    planned = [
        num_bytes
        for stage, num_bytes in zip(plan.stages, plan.predicted["stage_memory_bytes"], strict=True)
        for _ in range(stage.num_replicas)
    ]
    # A plan's prediction assumes this schedule and no recompute.
    follows = combination.schedule == "pipedream" and not combination.recompute
    return [
        {
            "combination": str(combination),
            "worker": name,
            "planned": planned[rank] if follows else None,
            "terms": terms,
            **{
                f"{kind}_{part}": sums(terms, kind, of_core=part == "core")
                for kind in ("predicted", "peak")
                for part in ("core", "torch")
            },
        }
        for rank, (name, terms) in enumerate(zip(result.worker_names, result.memory, strict=True))
    ]


def percent(more: float, than: float) -> str:
    return f"{100 * (more / than - 1):+.1f} %" if than else ""


def print_rows(rows: list[dict[str, Any]], with_terms: bool) -> None:
    table = []
    for row in rows:
        predicted = row["predicted_core"] + row["predicted_torch"]
        table.append(
            (
                row["worker"],
                "" if row["planned"] is None else percent(row["planned"], predicted),
                format_bytes(predicted),
                percent(predicted, row["peak_core"] + row["peak_torch"]),
                format_bytes(row["predicted_core"]),
                percent(row["predicted_core"], row["peak_core"]),
                format_bytes(row["predicted_torch"]),
                percent(row["predicted_torch"], row["peak_torch"]),
            )
        )
        for name, figures in row["terms"].items() if with_terms else ():
            sizes = (figures["predicted"] or 0, figures["peak"] or 0)
            table.append((f"  {name}", "", *map(format_bytes, sizes), percent(*sizes), "", "", ""))
    headings = ("worker", "planned", "predicted", "over peak", "core", "over peak", "torch", "over peak")
    print(f"\n{rows[0]['combination']}\n{format_table(headings, table, '<>>>>>>>')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", help="combinations whose name has this in it")
    parser.add_argument("--terms", action="store_true", help="print every term")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--slow-gradients", metavar="BANDWIDTH", help="as 20Mbit/s; needs root")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _core.keep_freed_memory()
    if options.rank_of:
        rank(options.rank_of)
        return
    if options.slow_gradients and (missing := can_make_links()):
        parser.error(missing)
    rows: list[dict[str, Any]] = []
    for combination in COMBINATIONS:
        if (options.only or "") in str(combination):
            if options.slow_gradients:
                of_workers = rows_over(combination, options.slow_gradients)
            else:
                plan = plan_of(combination)
                of_workers = rows_of(combination, plan, train(combination, plan))
            print_rows(of_workers, options.terms)
            rows += of_workers
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
