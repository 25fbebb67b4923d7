"""Plans the memory of a spare in its core's pool: the versions of its shard, and the state of its optimizer.
A spare is a worker that owns a shard of a stage's parameters and has no minibatches.

The constructor adds them as terms to the pool (stage_pool.py), so it runs before the core is sealed.
prepare() runs afterwards, and returns the spare's loop. Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pipedream import _core
from pipedream.budget.memory import (
    MASTERS,
    MODEL,
    OPTIMIZER_STATE,
    TORCH_OPTIMIZER_STATE,
    TRANSIENT,
    WEIGHT_VERSIONS,
    PoolTerm,
    StageBytes,
    channel_terms,
    list_terms,
    model_bytes,
    optimizer_terms,
)
from pipedream.common.units import format_bytes
from pipedream.links.channels import RunChannel
from pipedream.links.replica_channels import ReplicaChannels
from pipedream.model.stage_module import StageModule
from pipedream.planning.codec_choice import codec_of_pushes
from pipedream.stage.spare_loop import SpareLoop
from pipedream.update.gradients import updated_parameters
from pipedream.update.param_server import ParameterServer
from pipedream.update.shards import piece_of
from pipedream.update.stage_state import StageStart
from pipedream.update.tied import TiedParameters
from pipedream.update.weights import StageWeights, WeightVersions
from pipedream.worker.agreed_run import AgreedRun
from pipedream.worker.stage_pool import bytes_with_optimizer, hold_slots, stage_term
from pipedream.worker.worker_optimizers import WorkerOptimizers

__all__ = ["SparePool"]


class SparePool:
    """The memory of this spare in the pool of its core."""

    def __init__(
        self,
        run: AgreedRun,
        core: _core.Worker,
        stage: StageModule,
        channels: Sequence[RunChannel],
        optimizers: WorkerOptimizers,
    ) -> None:
        """stage: the stage of which the spare has a shard. Raises ValueError if the shard does not fit into
        the memory limit of `run`."""
        self._run = run
        self._core = core
        self._stage = stage
        index = stage.stage_index
        self._owner = run.plan.replica_of(run.rank)
        self._optimizer = optimizers.by_stage[index]
        self._layout = optimizers.layouts[index]
        self._num_versions = _core.num_versions_kept(run.schedule(), index)
        self._version_bytes = sum(chunk.num_bytes for chunk in self._layout.chunks_of(self._owner))
        figures = bytes_with_optimizer(self._version_bytes, stage, self._optimizer, "cpu")
        pool_terms = [
            PoolTerm(WEIGHT_VERSIONS, self._version_bytes, self._num_versions),
            *optimizer_terms(figures),
        ]
        self.predicted = self._terms(channels, figures, pool_terms)
        _check_fits(run, self.predicted)
        for term in pool_terms:
            core.add_term(stage_term(term.name, index), term.slot_bytes, term.num_slots)

    def _terms(
        self, channels: Sequence[RunChannel], figures: StageBytes, pool_terms: Sequence[PoolTerm]
    ) -> dict[str, int]:
        run = self._run
        terms: dict[str, int] = {}
        for channel in channels:
            terms |= channel_terms(channel, run.rank, "cpu")
        terms |= {term.name: term.num_bytes for term in pool_terms}
        terms |= {
            TORCH_OPTIMIZER_STATE: figures.torch_state,
            # Mean gradients get memory of their own if the optimizer may keep references to them.
            TRANSIENT: figures.step + self._layout.whole_tensors * self._version_bytes,
            MODEL: model_bytes(run.stages_in_memory("cpu")),
        }
        return {name: num_bytes for name, num_bytes in terms.items() if num_bytes > 0}

    def prepare(self) -> SpareLoop:
        """Puts the spare's shard of the initial weights into the pool, and returns the spare's loop."""
        run, core, index = self._run, self._core, self._stage.stage_index
        schedule, optimizer = run.schedule(), self._optimizer
        named = updated_parameters(self._stage, run.ties)
        pieces = [
            (name, nn.Parameter(piece_of(parameter, piece)))
            for piece in self._layout.pieces_of(self._owner)
            for name, parameter in [named[piece.parameter]]
        ]
        holder = nn.ParameterList([parameter for _, parameter in pieces])
        start = StageStart.of(schedule, index, None)  # a spare runs no forward, so it needs no older versions
        slots = hold_slots(core, WEIGHT_VERSIONS, index, self._num_versions)
        versions = WeightVersions(holder, pieces, slots, newest_slot=start.newest_slot)
        optimizer.place_state(
            hold_slots(core, OPTIMIZER_STATE, index, optimizer.num_placed_states),
            hold_slots(core, MASTERS, index, optimizer.num_placed_masters),
        )
        rounds = _core.rounds_of(schedule, index)
        server = ParameterServer(
            StageWeights.of(versions),
            optimizer,
            TiedParameters(schedule, index, [], {}),
            core=core,
            layout=self._layout.alone(self._owner),
            rounds=rounds,
            replica=self._owner,
            channels=ReplicaChannels.of_owner(schedule, index, self._owner),
            push_codec=codec_of_pushes(run.options.links.codec),
            slot_of={rounds.first_version: start.newest_slot},
        )
        return SpareLoop(
            core,
            run.options,
            run.place,
            schedule=schedule,
            server=server,
            optimizer=optimizer,
            predicted=self.predicted,
            newest_slot=start.newest_slot,
        )


def _check_fits(run: AgreedRun, terms: dict[str, int]) -> None:
    limit_bytes, total = run.options.memory.limit_bytes, sum(terms.values())
    if limit_bytes is not None and total > limit_bytes:
        raise ValueError(
            f"memory is {format_bytes(limit_bytes)}, but {run.plan.describe_worker(run.rank)} needs"
            f" {format_bytes(total)}, {format_bytes(total - limit_bytes)} more ({list_terms(terms)}): give"
            " more memory, or a plan with more or no num_spare_shards"
        )
