"""Measures for every schedule whether its results equal the reference's, how many weight versions and how
much memory it needs, and its bubbles. Writes the table in docs/schedules.md between its two marks.

    python bench/system/schedules.py [--stages 4] [--write docs/schedules.md] [--json results.json]

There are two runs of `pipedream.run` per schedule, with local workers:

    numbers   trains a float64 network with convolutions, batch norm, dropout and an embedding tied across
              stages; compares losses, weights and the weight versions that were read with
              `pipedream.reference`, and measures memory
    time      runs layers that sleep instead of computing, so that a machine with two cores can time a
              schedule of four workers; compares bubbles with the simulator's, both by the same definition

Bubbles are those in the steady window that `pipedream.simulator.Simulation` defines: after the run's warm-up
and before its cool-down. For a schedule that drains every minibatch, the window includes the warm-up and
cool-down of each minibatch.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pipedream
import torch
import torch.nn.functional as F
from pipedream import _core, reference
from pipedream.planning.plan import Plan
from pipedream.planning.simulator import TimedInstruction, simulate, summarize
from pipedream.report.result import WorkSpan
from torch import Tensor, nn

SCHEDULES = {
    "pipedream": (0, 2),
    "unstashed": (2,),
    "vertical_sync": (2,),
    "2bw": (2,),
    "flush": (2,),
    "gpipe": (2,),
    "interleaved": (2,),
    "model_parallel": (0,),
}
"""The numbers of microbatches to measure, each as a multiple of the number of stages; 0 stands for one
microbatch."""
FORWARD_S = 0.040  # at one stage for a whole minibatch; long compared with the overhead of a microbatch
BACKWARD_S = 0.080
BEGIN_MARK = "<!-- begin: bench/system/schedules.py -->"
END_MARK = "<!-- end: bench/system/schedules.py -->"
_WORDS, _WIDTH = 32, 16


class TiedHead(nn.Module):
    """A head that computes logits with the weight of an embedding, which it shares."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(value.mean(dim=-1), self.weight)


class Channels(nn.Module):
    """Turns (batch, words, width) into (batch, width, words), as convolutions need it."""

    def forward(self, value: Tensor) -> Tensor:
        return value.transpose(1, 2)


def _block() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(_WIDTH, _WIDTH, 3, padding=1), nn.BatchNorm1d(_WIDTH), nn.ReLU(), nn.Dropout(0.1)
    )


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(_WORDS, _WIDTH)
    blocks = [_block() for _ in range(6)]
    return nn.Sequential(nn.Sequential(embedding, Channels()), *blocks, TiedHead(embedding)).double()


def make_data(num_minibatches: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(_WORDS, (32, 24), generator=generator),
            torch.randint(_WORDS, (32,), generator=generator),
        )
        for _ in range(num_minibatches)
    ]


class _Sleep(torch.autograd.Function):
    """Sleeps as long as a device would compute, and uses no core of this machine."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, share: float) -> Tensor:
        ctx.share = share
        time.sleep(FORWARD_S * share)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD_S * ctx.share)
        return gradients[0].clone(), None


class SleepingLayer(nn.Module):
    """A layer that sleeps. `share` is its share of a stage's time, for a whole minibatch of 16 samples."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(value * self.scale, self.share * len(value) / 16)  # type: ignore[no-untyped-call]
        return slept


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


@dataclass
class Row:
    schedule: str
    num_stages: int
    num_workers: int
    microbatches: int
    loss_error: float
    weight_error: float
    versions_kept: list[int]
    memory_predicted: int
    memory_measured: int
    bubble_predicted: float
    bubble_measured: float
    ms_predicted: float
    ms_measured: float


def plan_of(schedule: str, num_layers: int, num_stages: int) -> Plan:
    num_workers = num_stages // 2 if schedule == "interleaved" else None
    return Plan.straight(num_layers, num_stages, num_workers=num_workers)


def options_of(schedule: str, plan: Plan, microbatches: int) -> _core.ScheduleOptions:
    return _core.ScheduleOptions(
        schedule=schedule,
        in_flight=list(plan.in_flight),
        num_microbatches=microbatches,
        placement=plan.placement,
    )


def measure_numbers(schedule: str, num_stages: int, microbatches: int) -> dict[str, Any]:
    """Measures the differences from the reference, and the memory of the largest worker. Raises RuntimeError
    if the run read other weight versions than the reference."""
    model, expected_model = make_model(), make_model()
    plan = plan_of(schedule, len(model), num_stages)
    arguments: dict[str, Any] = {
        "data": make_data(12),
        "loss_fn": F.cross_entropy,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "schedule": schedule,
        "microbatches": microbatches,
        "seed": 3,
    }
    result = pipedream.run(model, plan, progress=False, **arguments)
    expected = reference.run(expected_model, plan, **arguments)
    if result.versions != expected.versions:
        raise RuntimeError(f"{schedule}: the versions read are not the oracle's")
    sums = [
        {kind: sum(figures[kind] or 0 for figures in terms.values()) for kind in ("predicted", "peak")}
        for terms in ({k: v for k, v in terms.items() if " to rank " not in k} for terms in result.memory)
    ]
    largest = max(sums, key=lambda figures: figures["predicted"])
    return {
        "loss_error": max(
            abs(loss - wanted) / abs(wanted)
            for loss, wanted in zip(result.losses, expected.losses, strict=True)
        ),
        "weight_error": max(
            float((mine - wanted).detach().abs().max() / wanted.detach().abs().max())
            for mine, wanted in zip(model.parameters(), expected_model.parameters(), strict=True)
        ),
        "memory_predicted": largest["predicted"],
        "memory_measured": largest["peak"],
    }


def measure_time(schedule: str, num_stages: int, microbatches: int) -> dict[str, Any]:
    """Returns bubbles and the time per minibatch, as predicted by the simulator and as measured."""
    num_minibatches = 24
    layers_per_stage = 1
    num_workers = num_stages // 2 if schedule == "interleaved" else num_stages
    # A worker's time for a minibatch is the same in all schedules. With interleaving it has two stages, each
    # with half of the time.
    share = num_workers / num_stages
    plan = plan_of(schedule, num_stages * layers_per_stage, num_stages)
    model = nn.Sequential(*[SleepingLayer(share) for _ in range(num_stages)])
    data = [(torch.ones(16, 4), torch.zeros(16, 4)) for _ in range(num_minibatches)]
    result = pipedream.run(
        model,
        plan,
        data=data,
        loss_fn=mean_square,
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
        schedule=schedule,
        microbatches=microbatches,
        progress=False,
    )
    times = _core.StageDurations(
        forward_ms=1e3 * FORWARD_S * share / microbatches, backward_ms=1e3 * BACKWARD_S * share / microbatches
    )
    options = options_of(schedule, plan, microbatches)
    programs = [_core.make_program(options, worker, num_minibatches) for worker in range(options.num_workers)]
    predicted = simulate(programs, times)
    computed = [[step for step in program if step.edge is None] for program in programs]
    measured = summarize([_timeline(computed[w], spans) for w, spans in enumerate(result.spans)])
    return {
        "bubble_predicted": predicted.steady_bubble_share,
        "bubble_measured": measured.steady_bubble_share,
        "ms_predicted": predicted.ms_per_minibatch,
        "ms_measured": measured.ms_per_minibatch,
    }


def _timeline(program: list[_core.Instruction], spans: list[WorkSpan]) -> list[TimedInstruction]:
    """Returns a worker's instructions with their times. Each begins when its input has arrived, and ends when
    it is computed.
    """
    timeline = []
    for instruction, span in zip(program, spans, strict=True):
        done = (span.kind, span.stage, span.minibatch, span.microbatch)
        if done != (instruction.opcode, instruction.stage, instruction.minibatch, instruction.microbatch):
            raise RuntimeError(f"did {done} instead of {instruction}")
        end_ns = span.ready_ns + span.compute_ns
        timeline.append(TimedInstruction(instruction, span.ready_ns / 1e6, end_ns / 1e6))
    return timeline


def measure(schedule: str, num_stages: int, microbatches: int) -> Row:
    plan = plan_of(schedule, len(make_model()), num_stages)
    options = options_of(schedule, plan, microbatches)
    return Row(
        schedule=schedule,
        num_stages=num_stages,
        num_workers=plan.workers_used,
        microbatches=microbatches,
        versions_kept=[_core.num_versions_kept(options, stage) for stage in range(num_stages)],
        **measure_numbers(schedule, num_stages, microbatches),
        **measure_time(schedule, num_stages, microbatches),
    )


def format_rows(rows: list[Row]) -> str:
    """Returns the table in Markdown."""
    lines = [
        "| schedule | workers | microbatches | equality error: losses, weights | versions kept, by stage |"
        " peak memory of the largest worker: predicted, measured | bubble: predicted, measured |"
        " ms per minibatch: predicted, measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        memory = f"{row.memory_predicted / 2**10:.1f} KiB, {row.memory_measured / 2**10:.1f} KiB"
        lines.append(
            f"| `{row.schedule}` | {row.num_workers} | {row.microbatches} |"
            f" {row.loss_error:.0e}, {row.weight_error:.0e} | {' '.join(map(str, row.versions_kept))} |"
            f" {memory} | {row.bubble_predicted:.1%}, {row.bubble_measured:.1%} |"
            f" {row.ms_predicted:.1f}, {row.ms_measured:.1f} |"
        )
    return "\n".join(lines)


def describe_machine() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, check=False, capture_output=True, text=True)
    return (
        f"Commit {commit.stdout.strip() or 'unknown'}, torch {torch.__version__}, Python"
        f" {platform.python_version()}, {torch.get_num_threads()} cores, no GPU."
    )


def write_between_marks(path: Path, text: str) -> None:
    content = path.read_text(encoding="utf-8")
    if BEGIN_MARK not in content or END_MARK not in content:
        raise SystemExit(f"{path} lacks the lines {BEGIN_MARK!r} and {END_MARK!r}")
    before, _, rest = content.partition(BEGIN_MARK)
    _, _, after = rest.partition(END_MARK)
    path.write_text(f"{before}{BEGIN_MARK}\n\n{text}\n\n{END_MARK}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="an even number of at least 4")
    parser.add_argument("--write", type=Path, help="a Markdown file with the two marks")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    rows = []
    for schedule, per_stage in ((name, count) for name, counts in SCHEDULES.items() for count in counts):
        rows.append(measure(schedule, arguments.stages, max(1, per_stage * arguments.stages)))
        print(format_rows(rows[-1:]).splitlines()[-1], flush=True)
    text = f"{describe_machine()}\n\n{format_rows(rows)}"
    if arguments.write is not None:
        write_between_marks(arguments.write, text)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
