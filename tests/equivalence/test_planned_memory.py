"""Compares the memory that partition(memory=...) plans with the memory that the run predicts, for random
models, plans and optimizers.

A plan never has less memory than its run predicts, so every planned run fits. It has only a little more, so
that partition() does not refuse a run that would fit.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from oracle import assert_memory_as_predicted
from pipedream import Plan, RunResult
from torch import nn

_REPLICAS = ((2,), (3,), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (3, 2), (2, 1, 2))
_NUM_MINIBATCHES = 9
_MORE_MAX = 1.12


class _OfWholeTensors(torch.optim.SGD):
    """A subclass of SGD. Its step() might read whole tensors, so its shards are whole tensors."""


# For each name: the optimizer, the copies of the weights in its state, and whether its shards are whole
# tensors.
_OPTIMIZERS: dict[str, tuple[Any, float, bool]] = {
    "sgd": (functools.partial(torch.optim.SGD, lr=1e-4), 0.0, False),
    "momentum": (functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9), 1.0, False),
    "adam": (functools.partial(torch.optim.Adam, lr=1e-4), 2.0, False),
    "native adam": (functools.partial(pipedream.optim.Adam, lr=1e-4), 2.0, False),
    "whole": (functools.partial(_OfWholeTensors, lr=1e-4, momentum=0.9), 1.0, True),
}
_SYNCS: tuple[dict[str, Any], ...] = (
    {"sync": "bsp"},
    {"sync": "ssp", "staleness": 1},
    {"sync": "ssp", "staleness": 4},
    {"sync": "asp"},
    {"sync": "allreduce"},
)
_CUTS: tuple[dict[str, Any], ...] = (
    {"schedule": "pipedream", "microbatches": 2},
    {"schedule": "pipedream", "microbatches": 4},
    {"schedule": "unstashed", "microbatches": 4},
    {"schedule": "flush", "microbatches": 1},
    {"schedule": "flush", "microbatches": 4},
    {"schedule": "2bw", "microbatches": 8},
    {"schedule": "gpipe", "microbatches": 4},
)
"""Schedules with their microbatches, as partition() and run() take both."""
_CODECS: tuple[Any, ...] = ("bf16", {"gradients": "topk:0.1"}, {"activations": "int8"}, "topk:0.2")


class _Job:
    """A model, a plan and options, drawn from a seed. So all ranks draw the same job."""

    ends: tuple[int, ...] = (16, 96, 256, 512)
    inner: tuple[int, ...] = ends

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.replicas = _REPLICAS[number % len(_REPLICAS)]
        self.optimizer = draw.choice([*_OPTIMIZERS])
        self.sync = draw.choice(_SYNCS)
        inner = [self.inner] * (2 * len(self.replicas) + 1)
        widths = [draw.choice(among) for among in (self.ends, *inner, self.ends)]
        linears = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
        self.model = nn.Sequential(*linears)
        self.widths = widths[0], widths[-1]
        self.boundaries = sorted(draw.sample(range(len(linears) - 1), len(self.replicas) - 1))
        self.batch_size = draw.choice((2, 16))
        self.cut: dict[str, Any] = {}
        self.largest_bytes = 4 * max(sum(p.numel() for p in layer.parameters()) for layer in linears)
        self.clips = draw.random() < 0.2 and self.sync["sync"] != "asp"

    def data(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.batch_size, width) for width in self.widths]
        pairs = [[torch.randn(s, generator=generator) for s in shapes] for _ in range(_NUM_MINIBATCHES)]
        return [(inputs, targets) for inputs, targets in pairs]

    def plan(self) -> Plan:
        profile = pipedream.profile(self.model, self.data()[:1], nn.functional.mse_loss, minibatches=1)
        _, copies, whole = _OPTIMIZERS[self.optimizer]
        return pipedream.partition(
            profile,
            sum(self.replicas),
            1e15,
            memory="1GiB",
            boundaries=self.boundaries,
            replicas=self.replicas,
            optimizer_copies=copies,
            recompute=False,
            whole_tensors=whole or self.clips,
            **self.cut,
            **self.sync,
        )


class _CutJob(_Job):
    """A job with microbatches and with sync="bsp"."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.cut, self.sync = _CUTS[number % len(_CUTS)], {"sync": "bsp"}
        self.batch_size = 16


class _EncodedJob(_CutJob):
    """A job with codecs. Its data are small, and its cuts are wide."""

    ends, inner = (8,), (512,)

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.cut = self.cut | {"codec": _CODECS[number % len(_CODECS)]}
        self.batch_size = 128


_JOBS = {"whole": _Job, "cut": _CutJob, "encoded": _EncodedJob}


def train_drawn(kind: str, number: int, plan: Plan) -> RunResult:
    """Trains a drawn job at one rank."""
    torch.manual_seed(number)
    job = _JOBS[kind](number)
    return pipedream.run(
        job.model,
        plan,
        data=job.data(),
        loss_fn=nn.functional.mse_loss,
        optimizer=_OPTIMIZERS[job.optimizer][0],
        max_grad_norm=1.0 if job.clips else None,
        seed=1,
        progress=False,
        **job.cut,
        **job.sync,
    )


def _temporaries_bytes(job: _Job) -> int:
    """Returns the bytes of temporaries that a plan counts for a native optimizer but the run does not need.
    They are for a step of the largest layer; for asynchronous shards a plan counts two steps. Returns 0 for
    other optimizers.
    """
    _, copies, _ = _OPTIMIZERS[job.optimizer]
    num_steps = 2 if job.sync["sync"] == "asp" else 1
    return num_steps * int(copies) * job.largest_bytes if "native" in job.optimizer else 0


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *(("whole", number) for number in range(14)),
        *(("cut", number) for number in range(14)),
        *(("encoded", number) for number in (3, 4, 7, 8)),
    ],
)
def test_a_plan_has_what_its_run_predicts_and_little_more(farm: Farm, kind: str, number: int) -> None:
    job = _JOBS[kind](number)
    plan = job.plan()
    result = farm.results(train_drawn, kind, number, plan, num_ranks=plan.workers_used)[0]
    assert_memory_as_predicted(result)
    workers = iter(result.memory)
    for planned, count in zip(plan.predicted["stage_memory_bytes"], job.replicas, strict=True):
        terms = [next(workers) for _ in range(count)]
        predicted = [sum(figures["predicted"] or 0 for figures in of_one.values()) for of_one in terms]
        assert max(predicted) <= planned, (planned, result.describe_memory())
        if not _OPTIMIZERS[job.optimizer][2] and not job.clips:
            more = _temporaries_bytes(job)
            assert planned <= _MORE_MAX * max(predicted) + more, (planned, result.describe_memory())
