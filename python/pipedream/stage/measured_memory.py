"""Measures the peak of each memory term of a worker, and reports it beside the plan's prediction.

On the host, measuring slows down each operator, so the measurement stops soon after the pipeline has been
full once. A GPU counts memory at no cost. Owned by the worker's compute thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch

from pipedream import _core
from pipedream.budget.footprint import StepMeter, WorkMeter, make_meter
from pipedream.budget.memory import (
    CHECKPOINT_COPY,
    EVALUATION,
    GRADIENTS,
    MODEL,
    SHARD_STEP,
    STASH,
    TORCH_OPTIMIZER_STATE,
    TRANSIENT,
)
from pipedream.budget.torch_pool import TORCH_TENSORS, TorchPool
from pipedream.planning.plan import Plan
from pipedream.stage.position import memory_rows
from pipedream.stage.saving import StageSaver
from pipedream.stage.stage_runner import StageRunner
from pipedream.update.asynchronous_server import AsynchronousServer
from pipedream.update.param_server import ParameterServer
from pipedream.update.shard_client import ShardClient

__all__ = ["MeasuredMemory", "measured_until"]


def measured_until(plan: Plan, schedule: _core.ScheduleOptions, device: torch.device) -> int | None:
    """Returns the last minibatch that is measured on the host. None means that all minibatches are measured.

    With n microbatches in flight at each of r replicas, n r microbatches fill the pipeline, and they are at
    most n r minibatches. Measuring goes on for r minibatches more, so that a backward and an update run while
    the pipeline is full."""
    num_replicas_max = max(stage.num_replicas for stage in plan.stages)
    num_measured = (max(schedule.in_flight) + 1) * num_replicas_max
    return None if device.type == "cuda" else schedule.first_minibatch + num_measured


class MeasuredMemory:
    """Measures the memory of a worker's work items, from construction until stop()."""

    def __init__(
        self,
        predicted: Mapping[str, int],
        runners: Mapping[int, StageRunner],
        servers: Mapping[int, ShardClient],
        device: torch.device,
    ) -> None:
        """predicted: bytes of each memory term. runners: the runner of each stage. servers: the shard client
        of each stage that has replicas."""
        self._predicted = predicted
        self._runners = runners
        self._servers = servers
        gradient_bytes = functools.partial(_gradient_bytes, runners.values())
        self._work = WorkMeter(make_meter(device), gradient_bytes)
        self._step = StepMeter(make_meter(device))
        if predicted.get(STASH) is not None:
            for runner in runners.values():
                runner.meter, runner.step_meter = self._work, self._step

    def stop(self) -> None:
        for runner in self._runners.values():
            runner.meter = runner.step_meter = None

    def rows(
        self,
        core: _core.Worker,
        torch_state_bytes: int,
        torch_pool: TorchPool | None,
        saver: StageSaver | None,
    ) -> dict[str, dict[str, int | None]]:
        """Returns the predicted bytes and the peak of each term; None for a figure that is unknown.
        torch_state_bytes: bytes of the state that torch's optimizers made."""
        predicted, servers = self._predicted, self._servers.values()
        means = [server.mean_peak_bytes for server in servers if isinstance(server, ParameterServer)]
        measured: dict[str, int | None] = {
            STASH: self._work.stash_peak_bytes,
            TRANSIENT: max(self._work.transient_peak_bytes, self._step.peak_bytes + max(means, default=0)),
            GRADIENTS: self._work.gradient_peak_bytes,
            TORCH_OPTIMIZER_STATE: torch_state_bytes,
            MODEL: predicted.get(MODEL, 0),
            **({EVALUATION: None} if EVALUATION in predicted else {}),
            SHARD_STEP: sum(s.step_peak_bytes for s in servers if isinstance(s, AsynchronousServer)),
            CHECKPOINT_COPY: 0 if saver is None else saver.peak_bytes,
        }
        if torch_pool is not None:
            del measured[STASH], measured[GRADIENTS]  # the torch pool contains them
            measured[TRANSIENT] = None
            if SHARD_STEP in predicted:
                measured[SHARD_STEP] = None
        elif STASH not in predicted:
            measured |= {STASH: None, TRANSIENT: None, GRADIENTS: None}
        memory = memory_rows(core, predicted, measured)
        if torch_pool is not None:
            memory[TORCH_TENSORS]["peak"] = torch_pool.peak_bytes
        return memory


def _gradient_bytes(runners: Iterable[StageRunner]) -> int:
    return sum(runner.prepared.gradients.num_bytes(runner.gradient_slot) for runner in runners)
