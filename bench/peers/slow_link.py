"""Trains large fully connected layers over slow links, to compare pipedream with what PyTorch itself has.

    sudo .venv/bin/python bench/peers/slow_link.py [--workers 2,4] [--bandwidths 1Gbit/s,200Mbit/s]
        [--rounds 2] [--sides NAME,...] [--json FILE] [--picture FILE.png]

Each worker is a host of its own: a network namespace whose link tc shapes in both directions. It has one
torch thread. The model is like VGG: six convolutions, then four fully connected layers, with 51.5 million
parameters. A minibatch of a worker has 32 samples. In each round, the same processes run these sides in turn:

    planned                     pipedream, with the plan that partition finds for these workers, this
                                bandwidth and codec={"pushes": "factors"}
    data parallel               pipedream, with schedule="data_parallel"
    data parallel by factors    the side before, with codec={"pushes": "factors"}
    torch 1F1B                  torch.distributed.pipelining's Schedule1F1B over gloo, with several numbers
                                of microbatches. The cuts are those of the best straight plan for this
                                bandwidth, or for 100 Gbit/s if that plan leaves workers unused
    DDP                         DistributedDataParallel over gloo
    DDP, PowerSGD               the side before, with the hook powerSGD_hook of rank 2; its first two steps
                                are plain, and are not measured

--sides runs only the sides whose names begin with one of the given texts, for example "data parallel,DDP".

Prints for each side the samples per second: the median, least and most over the rounds. Prints also the bytes
per sample, headers included, in the direction of a link that carried the most, and the limit: the samples per
second at which these bytes would fill the bandwidth.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipedream
import torch
import torch.distributed as dist
from pipedream.common.units import parse_bandwidth
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch_pipeline import step_of_1f1b

sys.path.append(str(Path(__file__).resolve().parents[1] / "system"))
from gloo import join_ranks
from links import RUN_OPTIONS, Link, run_ranks

_BATCH = 32
_OPTIMIZER = functools.partial(torch.optim.SGD, lr=1e-4)
_LOSS = nn.functional.cross_entropy
_NUM_MINIBATCHES = 16  # measured minibatches of pipedream's pipelines; torch's have half as many
_NUM_STEPS = 2  # measured steps of data-parallel sides; with PowerSGD or factors four times as many
_NUM_WARM_UP_STEPS = 2  # the first step shows when each gradient is complete and may be sent
_POWER_SGD_START = 2  # the hook's minimum; steps before this one are plain
_SAMPLING_S = 0.02
_FACTORS = {"pushes": "factors"}

Rows = list[tuple[int, int, int]]  # per stage: the first layer, the last layer, and the number of replicas


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 128, 256):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for _ in range(3):
        layers += [nn.Linear(4096, 4096), nn.ReLU()]
    return [*layers, nn.Linear(4096, 10)]


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(_BATCH, 3, 32, 32), torch.randint(10, (_BATCH,))


# ---- In the workers ----


@dataclass(frozen=True)
class Measured:
    """The times and samples of a side's measured part. Only those of rank 0 are used, because
    pipedream_side() has none at other ranks."""

    began_ns: int = 0
    ended_ns: int = 0
    num_samples: int = 0


class LinkBytes:
    """Reads again and again how many bytes this host's link has sent and received."""

    def __init__(self, interface: str) -> None:
        folder = Path("/sys/class/net", interface, "statistics")
        self._files = folder / "tx_bytes", folder / "rx_bytes"
        self._samples: list[tuple[int, int, int]] = []
        threading.Thread(target=self._sample, daemon=True).start()

    def between(self, began_ns: int, ended_ns: int) -> list[int]:
        first, last = (self._before(time_ns) for time_ns in (began_ns, ended_ns))
        return [after - before for before, after in zip(first[1:], last[1:], strict=True)]

    def _before(self, time_ns: int) -> tuple[int, int, int]:
        """Returns the latest sample that was taken before time_ns, or the first sample."""
        return next((s for s in reversed(self._samples) if s[0] <= time_ns), self._samples[0])

    def _sample(self) -> None:
        while True:
            sent, received = (int(file.read_text()) for file in self._files)
            self._samples.append((time.monotonic_ns(), sent, received))
            time.sleep(_SAMPLING_S)


def _steps(step: Callable[[], None], *, num_warm_up: int, num_steps: int, samples_per_step: int) -> Measured:
    for _ in range(num_warm_up):
        step()
    dist.barrier()
    began_ns = time.monotonic_ns()
    for _ in range(num_steps):
        step()
    dist.barrier()
    return Measured(began_ns, time.monotonic_ns(), num_steps * samples_per_step)


def pipedream_side(fields: dict[str, Any], schedule: str, codec: dict[str, str] | None = None) -> Measured:
    """Runs one of pipedream's sides. `fields` is a plan as Plan.to_dict() returns it."""
    plan = pipedream.Plan.from_dict(fields)
    num_last = plan.stages[-1].num_replicas  # minibatches of each update at the last stage
    # The warm-up fills the pipeline. It also gives every stage a first round, which shows when each gradient
    # is complete and may be sent.
    num_warm_up, num_minibatches = max(plan.in_flight) * plan.workers_used + 2, _NUM_MINIBATCHES
    if schedule == "data_parallel":
        num_steps = _NUM_STEPS if codec is None else 4 * _NUM_STEPS
        num_warm_up, num_minibatches = _NUM_WARM_UP_STEPS * num_last, num_steps * num_last
    result = pipedream.run(
        make_layers(),
        plan,
        data=[make_batch()] * (num_warm_up + num_minibatches),
        loss_fn=_LOSS,
        optimizer=_OPTIMIZER,
        schedule=schedule,
        codec=codec,
        **RUN_OPTIONS,
    )
    if not result.spans:  # only rank 0 has spans
        return Measured()
    ended_ns = [span.completed_ns for span in result.spans[-1] if span.kind == "UPDATE"]
    first = num_warm_up // num_last - 1
    num_samples = (len(ended_ns) - 1 - first) * num_last * _BATCH
    return Measured(ended_ns[first], ended_ns[-1], num_samples)


def torch_pipeline_side(rows: Rows, microbatches: int) -> Measured:
    first, last, _ = rows[dist.get_rank()]
    module = nn.Sequential(*make_layers()[first : last + 1])
    step = functools.partial(step_of_1f1b(module, _LOSS, _OPTIMIZER, microbatches), *make_batch())
    return _steps(step, num_warm_up=2, num_steps=_NUM_MINIBATCHES // 2, samples_per_step=_BATCH)


def ddp_side(hook: str) -> Measured:
    # PowerSGD needs a single bucket. With several buckets it starts collectives from callbacks, in an order
    # that differs between ranks, and gloo takes this for an error.
    bucket_mebibytes = 1024 if hook == "powersgd" else None
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*make_layers()), bucket_cap_mb=bucket_mebibytes)
    num_warm_up, num_steps = _NUM_WARM_UP_STEPS, _NUM_STEPS
    if hook == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=_POWER_SGD_START)
        model.register_comm_hook(state, powerSGD_hook)
        num_warm_up, num_steps = _POWER_SGD_START + 1, 4 * _NUM_STEPS
    optimizer = _OPTIMIZER(model.parameters())
    inputs, targets = make_batch()

    def step() -> None:
        optimizer.zero_grad()
        _LOSS(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    samples = _BATCH * dist.get_world_size()
    return _steps(step, num_warm_up=num_warm_up, num_steps=num_steps, samples_per_step=samples)


_SIDES: dict[str, Callable[..., Measured]] = {
    "pipedream": pipedream_side,
    "torch pipeline": torch_pipeline_side,
    "ddp": ddp_side,
}


def _rank(sides: list[tuple[str, str, list[Any]]], rounds: int, path: str) -> None:
    """Runs the sides at this rank in turn. `sides` has the name, function and arguments of each side."""
    link_bytes, rank = LinkBytes(join_ranks()), dist.get_rank()
    torch.set_num_threads(1)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in sides}
    for _ in range(rounds):
        for name, function, arguments in sides:
            dist.barrier()
            measured = [_SIDES[function](*arguments)]
            dist.broadcast_object_list(measured)
            began_ns, ended_ns = measured[0].began_ns, measured[0].ended_ns
            carried = torch.tensor(link_bytes.between(began_ns, ended_ns)).double()
            dist.all_reduce(carried, dist.ReduceOp.MAX)
            num_samples = measured[0].num_samples
            per_s = num_samples / (ended_ns - began_ns) * 1e9
            figures[name].append((per_s, float(carried.max()) / num_samples))
            if rank == 0:
                print(f"  {name}: {per_s:.1f} samples/s", file=sys.stderr, flush=True)
    if rank == 0:
        Path(path).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()


# ---- Measuring ----


def _rows(plan: pipedream.Plan) -> Rows:
    return [(stage.first_layer, stage.last_layer, stage.num_replicas) for stage in plan.stages]


def _straight(profile: pipedream.Profile, num_workers: int, bandwidth: str) -> Rows:
    for tried in (bandwidth, "100Gbit/s"):
        plan = pipedream.partition(profile, num_workers=num_workers, bandwidth=tried, straight=True)
        if plan.num_stages == num_workers:
            return _rows(plan)
    raise SystemExit(f"the model has no straight plan of {num_workers} stages")


def sides_of(
    profile: pipedream.Profile, num_workers: int, bandwidth: str
) -> list[tuple[str, str, list[Any]]]:
    planned = pipedream.partition(profile, num_workers, bandwidth, codec=_FACTORS)
    print(planned, file=sys.stderr)
    straight = _straight(profile, num_workers, bandwidth)
    whole = pipedream.Plan((pipedream.Stage(0, profile.num_layers - 1, num_workers),)).to_dict()
    name = "-".join(str(stage.num_replicas) for stage in planned.stages)
    sides: list[tuple[str, str, list[Any]]] = [
        (f"planned ({name})", "pipedream", [planned.to_dict(), "pipedream"]),
        ("data parallel", "pipedream", [whole, "data_parallel"]),
        ("data parallel by factors", "pipedream", [whole, "data_parallel", _FACTORS]),
    ]
    for microbatches in (2, 4, 8):
        if microbatches >= num_workers:  # 1F1B needs at least one per stage
            sides.append((f"torch 1F1B, m = {microbatches}", "torch pipeline", [straight, microbatches]))
    return [*sides, ("DDP", "ddp", [""]), ("DDP, PowerSGD", "ddp", ["powersgd"])]


def measure(
    profile: pipedream.Profile, num_workers: int, bandwidth: str, rounds: int, wanted: tuple[str, ...]
) -> dict[str, Any]:
    """Measures the sides whose names begin with one of the texts in `wanted`."""
    sides = [side for side in sides_of(profile, num_workers, bandwidth) if side[0].startswith(wanted)]
    with Link(bandwidth, num_hosts=num_workers) as link:
        figures = run_ranks(link, sys.argv[0], [sides, rounds])
    return {"workers": num_workers, "bandwidth": bandwidth, "sides": figures}


def table(case: dict[str, Any]) -> str:
    bytes_per_s = parse_bandwidth(case["bandwidth"])
    lines = [
        f"{case['workers']} workers, {case['bandwidth']}",
        f"  {'':25}{'samples/s':>10}{'least':>9}{'most':>9}{'KB/sample':>12}{'limit':>9}",
    ]
    for name, rounds in case["sides"].items():
        rates = [rate for rate, _ in rounds]
        num_bytes = statistics.median(carried for _, carried in rounds)
        lines.append(
            f"  {name:25}{statistics.median(rates):10.1f}{min(rates):9.1f}{max(rates):9.1f}"
            f"{num_bytes / 1e3:12.1f}{bytes_per_s / num_bytes:9.1f}"
        )
    return "\n".join(lines)


def draw(cases: list[dict[str, Any]], file: str) -> None:
    """Draws bars of samples/s. A line marks the limit that the bytes allow, unless it lies outside the
    picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, len(cases), figsize=(4.5 * len(cases), 4), squeeze=False)
    for axes, case in zip(grid[0], cases, strict=True):
        bytes_per_s = parse_bandwidth(case["bandwidth"])
        names = list(case["sides"])
        rates = [statistics.median(rate for rate, _ in case["sides"][name]) for name in names]
        limits = [
            bytes_per_s / statistics.median(carried for _, carried in case["sides"][name]) for name in names
        ]
        colors = ["#1f77b4" if name.startswith(("planned", "data")) else "#999999" for name in names]
        axes.barh(names, rates, color=colors)
        top = 1.25 * max(rates)
        for position, limit in enumerate(limits):
            if limit <= top:
                axes.plot([limit, limit], [position - 0.4, position + 0.4], color="#d62728")
        axes.set_xlim(0, top)
        axes.invert_yaxis()
        axes.set_xlabel("samples/s (red: what its bytes allow)")
        axes.set_title(f"{case['workers']} workers, {case['bandwidth']}")
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--bandwidths", default="1Gbit/s,200Mbit/s")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sides", default="", help="those alone whose names begin so, one or several")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--picture", metavar="FILE", help="draw them here (.png, .svg, .pdf)")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        _rank(*json.loads(options.rank_of))
        return
    torch.set_num_threads(1)
    layers = make_layers()
    num_parameters = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    print(f"{num_parameters / 1e6:.1f} million parameters, torch {torch.__version__}", flush=True)
    profile = pipedream.profile(layers, [make_batch()] * 4, _LOSS, seconds=20)
    cases = []
    for num_workers in map(int, options.workers.split(",")):
        for bandwidth in options.bandwidths.split(","):
            wanted = tuple(options.sides.split(","))
            cases.append(measure(profile, num_workers, bandwidth, options.rounds, wanted))
            print(table(cases[-1]), flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(cases, indent=1), encoding="utf-8")
            if options.picture:
                draw(cases, options.picture)


if __name__ == "__main__":
    main()
