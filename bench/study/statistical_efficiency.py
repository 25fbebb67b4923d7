"""How far each schedule trains in the same number of minibatches: docs/statistical_efficiency.md's figures.

    nice python bench/study/statistical_efficiency.py             # everything, most of an hour on one core
    python bench/study/statistical_efficiency.py --report         # tables and figures from the kept results

Nothing here is a timing: every schedule runs in one process, with the exact weight versions that it reads in
a pipeline (pipedream.reference). An interrupted sweep goes on where it was; delete its log after a change of
the tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import report
import sweep
import torch
from sweep import Results, Run, Setting
from tasks import Task

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENT = _ROOT / "docs" / "statistical_efficiency.md"
_IMAGES = _ROOT / "docs" / "images"
_KEPT = _ROOT / "bench" / "results" / "statistical_efficiency.json"
_NUM_CHECKED = 12  # minibatches


def check(tasks: dict[str, Task]) -> None:
    """That the settings which stand for a whole depth do so: their losses are the whole pipeline's."""
    depth = max(sweep.DEPTHS)
    for task in tasks.values():
        pairs = [(Setting(name, depth, depth), Setting(name, 1, depth)) for name in ("flush", "2bw")]
        if task.cuts_alike:
            pairs += [(Setting(name, depth, depth), Setting(name, 1)) for name in ("flush", "2bw")]
        for whole, stand_in in pairs:
            losses, losses_too = _first_losses(task, whole), _first_losses(task, stand_in)
            if not torch.allclose(torch.tensor(losses), torch.tensor(losses_too), rtol=1e-3):
                raise SystemExit(f"{task.name}: {whole} gives {losses}, {stand_in} gives {losses_too}")


def _first_losses(task: Task, setting: Setting) -> list[float]:
    run = Run(task.name, "SGD", setting, rate=0.01, seed=1)
    batches = task.batches(run.seed)[:_NUM_CHECKED]
    return sweep.reference_run(task, task.make_model(run.seed), run, batches, task.loss)


def train_all(tasks: dict[str, Task], results: Results) -> None:
    runs = list(sweep.plan_runs(tasks))
    for index, run in enumerate(runs):
        if run in results:
            continue
        outcome = sweep.train(tasks[run.task], run)
        results.add(run, outcome)
        print(f"{index + 1}/{len(runs)} {dataclasses.astuple(run)} -> {outcome.held_out}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with every schedule; writes tables and figures.")
    parser.add_argument("--log", type=Path, default=Path("results/statistical_efficiency.jsonl"))
    parser.add_argument("--report", action="store_true", help="train nothing, use the kept results")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the operations are small; more threads only wait for each other
    tasks = sweep.make_tasks()
    if not options.report:
        check(tasks)
        results = Results(options.log)
        train_all(tasks, results)
        results.save(_KEPT, sweep.plan_runs(tasks))
    report.write(tasks.values(), Results.load(_KEPT), _DOCUMENT, _IMAGES)


if __name__ == "__main__":
    main()
