"""Measures how many seconds each schedule needs until a loss is reached.

    sudo .venv/bin/python bench/study/time_to_loss.py [--rounds 3]
    python bench/study/time_to_loss.py --report

Writes a table and the picture of docs/statistical_efficiency.md. The program measures the milliseconds per
minibatch of `pipedream.run` and of torch's Schedule1F1B over gloo, with the study's character model and
AdamW. The number of minibatches until the loss comes from the results of statistical_efficiency.py, which
must be run before. Torch's 1F1B has the losses of `flush`.

Each worker is a host of its own: a network namespace whose link is shaped in both directions. All workers
share the cores of one machine, so each layer is paced: it sleeps after its computation until as much time has
passed as an imagined device would take.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import findings
import pipedream
import report
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from pipedream import _core
from simulator import Setting
from sweep import FLUSH, TWO_BW, Results
from tasks import Characters
from torch import Tensor, nn

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("system", "peers")]
from gloo import join_ranks
from links import RUN_OPTIONS, Link, run_ranks
from torch_pipeline import step_of_1f1b

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENT = _ROOT / "docs" / "statistical_efficiency.md"
_PICTURE = _ROOT / "docs" / "images" / "loss_against_time.svg"
_KEPT = _ROOT / "bench" / "results" / "time_to_loss.json"
_STUDY = _ROOT / "bench" / "results" / "statistical_efficiency.json"

_OPTIMIZER = functools.partial(torch.optim.AdamW, lr=0.004)
_FORWARD_S, _BACKWARD_S = 0.256, 0.512
"""Seconds that one imagined device takes for a minibatch of the whole model."""
_NUM_WARM_UP, _NUM_MEASURED = 6, 12  # in minibatches
_CASES = ((4, "100Mbit/s"), (4, "10Mbit/s"), (2, "10Mbit/s"))
"""(number of workers, bandwidth of each worker's link in each direction)."""
Side = tuple[str, int]
"""(schedule or "torch 1F1B", number of microbatches)."""


def sides(num_workers: int) -> list[Side]:
    cut = [num_workers, 2 * num_workers, 4 * num_workers]
    return [
        *((name, m) for name in ("torch 1F1B", "flush") for m in cut),
        *((name, m) for name in ("pipedream", "unstashed") for m in cut[:2]),
        ("2bw", num_workers),
        ("pipedream", 1),
    ]


# ---- In the workers ----


class Pace:
    """Makes a layer take at least as long as on the imagined device."""

    def __init__(self, share: float) -> None:
        """`share` is the layer's time for one sample, divided by the whole model's time for a minibatch."""
        self._share = share
        self._began_s = 0.0

    def note(self) -> None:
        self._began_s = time.perf_counter()

    def wait(self, whole_s: float, num_samples: int) -> None:
        left_s = self._began_s + whole_s * self._share * num_samples - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _Paced(torch.autograd.Function):
    """Stands before and behind a layer, and paces it. `at` says where it stands.

    At "inputs" its forward notes the time, and its backward waits. At "outputs" its forward waits, and its
    backward notes the time. At "both" it stands behind a layer whose inputs have no gradient; its forward
    waits, and its backward notes the time and waits.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, pace: Pace, at: str) -> Tensor:
        ctx.pace, ctx.at, ctx.num_samples = pace, at, len(value)
        if at == "inputs":
            pace.note()
        else:
            pace.wait(_FORWARD_S, len(value))
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.at != "inputs":
            ctx.pace.note()
        if ctx.at != "outputs":
            ctx.pace.wait(_BACKWARD_S, ctx.num_samples)
        return gradients[0], None, None


class PacedLayer(nn.Module):
    def __init__(self, layer: nn.Module, share: float) -> None:
        super().__init__()
        self.layer, self._pace = layer, Pace(share)

    def forward(self, value: Tensor) -> Tensor:
        if value.is_floating_point():
            value, at = _Paced.apply(value, self._pace, "inputs"), "outputs"  # type: ignore[no-untyped-call]
        else:  # characters have no gradient
            self._pace.note()
            at = "both"
        paced: Tensor = _Paced.apply(self.layer(value), self._pace, at)  # type: ignore[no-untyped-call]
        return paced


def _layers(task: Characters, batch_size: int) -> list[nn.Module]:
    layers = list(task.make_model(seed=1))
    return [PacedLayer(layer, 1 / (len(layers) * batch_size)) for layer in layers]


def pipedream_ms(task: Characters, schedule: str, microbatches: int) -> float:
    """Returns milliseconds per minibatch at rank 0, and 0 at other ranks."""
    batches = task.batches(1, _NUM_WARM_UP + _NUM_MEASURED)
    layers = _layers(task, len(batches[0][0]))
    result = pipedream.run(
        layers,
        pipedream.Plan.straight(len(layers), dist.get_world_size()),
        data=batches,
        loss_fn=task.loss,
        optimizer=_OPTIMIZER,
        schedule=schedule,
        microbatches=microbatches,
        **RUN_OPTIONS,
    )
    if not result.spans:
        return 0.0
    done_ns = [span.completed_ns for span in result.spans[-1] if span.kind == "UPDATE"]
    return (done_ns[-1] - done_ns[_NUM_WARM_UP - 1]) / 1e6 / _NUM_MEASURED


def torch_ms(task: Characters, microbatches: int) -> float:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    batches = task.batches(1, _NUM_WARM_UP + _NUM_MEASURED)
    layers = _layers(task, len(batches[0][0]))
    size = len(layers) // num_ranks
    module = nn.Sequential(*layers[rank * size : (rank + 1) * size])
    step = step_of_1f1b(module, task.loss, _OPTIMIZER, microbatches)
    began_s = 0.0
    for index, (inputs, targets) in enumerate(batches):
        if index == _NUM_WARM_UP:
            dist.barrier()
            began_s = time.perf_counter()
        step(inputs, targets)
    dist.barrier()
    return (time.perf_counter() - began_s) * 1e3 / _NUM_MEASURED


def _rank(wanted: list[Side], rounds: int, path: str) -> None:
    join_ranks()
    rank = dist.get_rank()
    torch.set_num_threads(1)
    _core.keep_freed_memory()
    task = Characters()
    figures: dict[str, list[float]] = {_key(side): [] for side in wanted}
    for _ in range(rounds):
        for side in wanted:
            dist.barrier()
            name, m = side
            ms = torch_ms(task, m) if name == "torch 1F1B" else pipedream_ms(task, name, m)
            figures[_key(side)].append(round(ms, 2))
            if rank == 0:
                print(f"  {_key(side)}: {ms:.1f} ms", file=sys.stderr, flush=True)
    if rank == 0:
        Path(path).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()


def _key(side: Side) -> str:
    name, m = side
    return f"{name}, m = {m}"


# ---- Measuring ----


def measure(num_workers: int, bandwidth: str, rounds: int) -> dict[str, Any]:
    with Link(bandwidth, num_hosts=num_workers) as link:
        figures = run_ranks(link, sys.argv[0], [sides(num_workers), rounds])
    return {"workers": num_workers, "bandwidth": bandwidth, "ms_per_minibatch": figures}


# ---- With the study ----


class Combined:
    """Combines a side's measured time per minibatch with the study's losses."""

    def __init__(self, results: Results, num_workers: int, side: Side, ms: list[float]) -> None:
        name, m = side
        setting = Setting(name, num_workers, m)
        if name in ("torch 1F1B", "flush"):
            setting = FLUSH
        elif name == "2bw":
            setting = TWO_BW
        self.side, self.ms = side, ms
        self.median_ms = statistics.median(ms)
        self._found = findings.find_long(results, "AdamW", setting)
        self._plain = findings.find_long(results, "AdamW", FLUSH)

    @property
    def target(self) -> float | None:
        """Returns the training loss to reach: that of plain training after half of its longer run. Returns
        None if the study has no such run."""
        return None if self._plain is None else findings.target_loss(self._plain, 1 / 2)

    @property
    def minibatches(self) -> float | None:
        """Returns the number of minibatches until the target is reached; None if the study lacks a run."""
        if self._found is None or self.target is None:
            return None
        return self._found.minibatches_to(self.target)

    @property
    def seconds(self) -> float | None:
        return None if self.minibatches is None else self.minibatches * self.median_ms / 1e3

    def curve(self) -> tuple[list[float], list[float]]:
        """Returns (seconds, smooth training losses), at the best rate."""
        losses = [] if self._found is None else findings.smooth(self._found.best.losses)
        return [n * self.median_ms / 1e3 for n in findings.minibatches_of(losses)], losses


def combine(results: Results, case: dict[str, Any]) -> list[Combined]:
    """Returns torch's 1F1B and `flush`, each only with its fastest number of microbatches, and then all other
    sides.
    """
    by_side = [(side, case["ms_per_minibatch"][_key(side)]) for side in sides(case["workers"])]
    combined = [Combined(results, case["workers"], side, ms) for side, ms in by_side]
    chosen = []
    for name in ("torch 1F1B", "flush"):
        chosen.append(min((c for c in combined if c.side[0] == name), key=lambda c: c.median_ms))
    return [*chosen, *(c for c in combined if c.side[0] not in ("torch 1F1B", "flush"))]


def table(results: Results, cases: list[dict[str, Any]]) -> str:
    rows = []
    for case in cases:
        combined = combine(results, case)
        of_flush = combined[1].seconds
        for each in combined:
            name, m = each.side
            shown = f"torch's 1F1B, m = {m}" if name == "torch 1F1B" else f"`{name}`, m = {m}"
            minibatches, seconds = each.minibatches, each.seconds
            rows.append(
                [
                    f"{case['workers']}, {case['bandwidth']}",
                    shown + (" (its best)" if name in ("torch 1F1B", "flush") else ""),
                    f"{each.median_ms:.1f} ({min(each.ms):.1f} to {max(each.ms):.1f})",
                    "not run" if minibatches is None else f"{minibatches:.0f}",
                    "not run" if seconds is None else f"{seconds:.1f}",
                    "not run" if seconds is None or of_flush is None else f"{seconds / of_flush:.2f}",
                ]
            )
    heads = ["workers, links", "schedule", "ms per minibatch", "minibatches", "seconds", "over `flush`"]
    return report.table_of(heads, rows)


def draw(results: Results, cases: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(4.6 * len(cases), 3.6), layout="constrained")
    panels = figure.subplots(1, len(cases), squeeze=False, sharey=True)[0]
    for axes, case in zip(panels, cases, strict=True):
        combined = combine(results, case)
        if combined[0].target is not None:
            axes.axhline(combined[0].target, color="#999999", linestyle=":")
        for each in combined:
            name, m = each.side
            if name in ("pipedream", "unstashed") and m != case["workers"]:
                continue
            # The line of unstashed is wide, because the line of pipedream lies on top of it.
            look = {"linewidth": 3.5, "alpha": 0.6} if name == "unstashed" else {"linewidth": 1.3}
            axes.plot(*each.curve(), color=report.COLOURS[name], label=f"{name}, m = {m}", **look)
        axes.set(title=f"{case['workers']} workers, links of {case['bandwidth']}", xlabel="seconds")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    panels[0].set(ylabel="training loss, nats per character")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="measure nothing, use the kept figures")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        _rank(*json.loads(options.rank_of))
        return
    if not options.report:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        cases = [measure(*case, options.rounds) for case in _CASES]
        _KEPT.write_text(json.dumps({"machine": machine, "cases": cases}) + "\n")
    cases = json.loads(_KEPT.read_text())["cases"]
    results = Results.load(_STUDY)
    text = _DOCUMENT.read_text(encoding="utf-8")
    _DOCUMENT.write_text(report.replace(text, "time to loss", table(results, cases)), encoding="utf-8")
    report.use_plain_svg()
    report.save(draw(results, cases), _PICTURE)


if __name__ == "__main__":
    main()
