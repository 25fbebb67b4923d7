"""Measures the loss that each schedule reaches in the same number of minibatches, and writes the tables of
docs/statistical_efficiency.md.

    nice python bench/study/statistical_efficiency.py             # everything, some hours on one core
    nice python bench/study/statistical_efficiency.py --go-on     # only the runs that the kept results lack
    python bench/study/statistical_efficiency.py --report         # only tables and figures

All runs are in one process, and read the weight versions that they would read in a pipeline. Nothing is
timed; time_to_loss.py does that. Before it trains, the command compares its simulator with
pipedream.reference. If a sweep was interrupted, the next call continues it from its log. Delete the log
(--log) after a change of the tasks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import report
import torch
from pipedream import _core
from simulator import difference_from_reference
from sweep import OPTIMIZERS, Results, Sweep, digits_settings, make_task, settings

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENT = _ROOT / "docs" / "statistical_efficiency.md"
_IMAGES = _ROOT / "docs" / "images"
KEPT = _ROOT / "bench" / "results" / "statistical_efficiency.json"


def check() -> None:
    """Checks that the simulator gives the losses and weights of pipedream.reference, for the settings of 8
    and 4 stages and those of the task "digits". Each setting is checked with one of the optimizers."""
    cases = [("characters", setting) for setting in settings(8) + settings(4)]
    cases += [("digits", setting) for setting in digits_settings()]
    for index, (name, setting) in enumerate(cases):
        optimizer = OPTIMIZERS[index % len(OPTIMIZERS)]
        task, num_minibatches = make_task(name), 3 + setting.num_stages // setting.microbatches
        batches = task.batches(seed=1, num_minibatches=num_minibatches)
        model = task.make_model(seed=1)
        difference = difference_from_reference(model, batches, task.loss, setting, optimizer)
        # Muon computes matrix products in bfloat16, whose rounding depends on the order of the additions.
        if difference > (1e-4 if optimizer == "Muon" else 1e-7):
            raise SystemExit(f"{name}, {setting}, {optimizer}: off by {difference} from the reference")
    print(f"the simulator equals pipedream.reference in {len(cases)} cases", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with every schedule; writes tables and figures.")
    parser.add_argument("--log", type=Path, default=Path("results/statistical_efficiency.jsonl"))
    parser.add_argument("--report", action="store_true", help="train nothing, use the kept results")
    parser.add_argument("--go-on", action="store_true", help="train what the kept results lack")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the operations are small, so more threads would only wait for each other
    _core.keep_freed_memory()
    if not options.report:
        check()
        results = Results(options.log, Results.load(KEPT) if options.go_on else None)
        Sweep(results).everything()
        results.save(KEPT)
    report.write(Results.load(KEPT), _DOCUMENT, _IMAGES)


if __name__ == "__main__":
    main()
