"""Makes the optimizers of one worker's stages. If a stage has replicas, this module decides which pieces of
the parameters each replica updates. For tied parameters it decides which pieces each replica sends. Runs on
the worker's compute thread, before the pool is sealed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pipedream.budget.footprint import Footprint
from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.common.units import format_bytes
from pipedream.links.channels import ShardSpec, TieSpec
from pipedream.model.factories import NamedParameters, with_delay
from pipedream.model.stage_module import Tie
from pipedream.model.tensor_spec import TensorSpec
from pipedream.optim import Muon
from pipedream.optim.master_weights import unwrapped
from pipedream.planning.codec_choice import NO_CODEC, codec_of_pushes
from pipedream.planning.job import check_together
from pipedream.planning.plan_schedule import mean_delays
from pipedream.update.averages import Averages
from pipedream.update.factors import FactorLayer
from pipedream.update.gradients import updated_parameters
from pipedream.update.loss_scale import LossScaling
from pipedream.update.shards import Piece, ShardLayout, works_by_element
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.tied import ties_by_owner
from pipedream.update.weights import split_tied
from pipedream.worker.agreed_run import AgreedRun, wait_for
from pipedream.worker.factor_choice import FactorChoice

__all__ = ["WorkerOptimizers"]

_log = logging.getLogger("pipedream")


class WorkerOptimizers:
    """The optimizers of this worker's stages, by stage. A spare has the optimizer of the one stage whose
    shard it owns. For a stage with replicas, a layout says which parameters each owner of a shard updates.

    Construct it when the stages have rank 0's initial weights."""

    def __init__(self, run: AgreedRun, choice: FactorChoice) -> None:
        """choice: the layers whose gradients are pushed as factors."""
        self.by_stage: dict[int, StageOptimizer] = {}
        self.layouts: dict[int, ShardLayout] = {}
        """Layouts of the shards, by stage. There are layouts for this worker's stages with shards, and for
        stages with shards that own a tied parameter which this worker's stages use."""
        self.factored: dict[int, list[FactorLayer]] = {}
        """By stage, the layers whose gradients are pushed as factors. It has the same stages as `layouts`."""
        self.loss_scaling: dict[int, LossScaling] = {}
        """By stage, the loss scaling. Empty unless autocast is float16."""
        self._run = run
        self._choice = choice
        delays = mean_delays(run.schedule())
        for stage in run.held_stages_of(run.rank):
            index = stage.stage_index
            named = updated_parameters(stage, run.ties)
            factory = with_delay(run.options.optimizer, delays[index])
            optimizer = StageOptimizer(factory, named, run.options.lr_scheduler, f"stage {index}")
            self.by_stage[index] = optimizer
            kind = None if optimizer.optimizer is None else unwrapped(optimizer.optimizer)
            if isinstance(kind, Muon) and run.options.output.progress:
                print(f"{run.plan.describe_worker(run.rank)}: {kind.describe()}", file=sys.stderr)
            _check_sparse(run, index, optimizer)
            _check_local_steps(run, index, optimizer)
            if run.options.has_shards_at(index):
                whole = not works_by_element(optimizer.optimizer)
                if ties_by_owner(index, run.ties).get(index):
                    run.place.rendezvous.publish(_whole_key(index), whole)
                layout = self.layouts[index] = self._layout_of(index, whole_tensors=whole)
                optimizer.keep(layout.pieces_of(run.plan.replica_of(run.rank)))
                told = _describe(layout, optimizer, codec_of_pushes(run.options.links.codec))
                told += choice.describe(index, self.factored[index])
                if optimizer.optimizer is not None:  # otherwise nothing is trained here
                    _log.info("%s: %s", run.plan.describe_worker(run.rank), told)
            # draw_by_name() makes each step seed the process's generators. Asynchronous shards step on a
            # second thread, which must not seed them, because data and forwards draw from them on the compute
            # thread.
            if run.plan.workers_used > 1 and not run.options.is_asynchronous_at(index):
                optimizer.draw_by_name(run.base_seed, index)
            decay = run.options.call_points.ema_decay
            if decay is not None:
                optimizer.averages = Averages(decay, optimizer.named, self._used_parameters(index))
        if run.options.autocast is torch.float16:
            schedule, stages = run.schedule(), run.plan.stages_of(run.rank)
            self.loss_scaling = {stage: LossScaling(schedule, stage) for stage in stages}
        self._learn_layouts_of_owners()

    def _used_parameters(self, stage: int) -> dict[int, NamedParameters]:
        return {
            owner: split_tied(self._run.stages[stage], [tie.parameter for tie in ties])[1]
            for owner, ties in ties_by_owner(stage, self._run.ties).items()
            if owner != stage
        }

    def averages(self) -> dict[str, Tensor]:
        """Returns by name the averages of the weights that this worker updates. The caller joins the averages
        of all workers. Replicas that use an all-reduce have equal averages, so only replica 0 returns
        them."""
        if (
            self._run.options.reduces_together
            and self.by_stage
            and self._run.plan.replica_of(self._run.rank) > 0
        ):
            return {}
        return {
            name: value
            for optimizer in self.by_stage.values()
            if optimizer.averages is not None
            for name, value in optimizer.averages.named_values(only_updated=True).items()
        }

    def go_on_with_averages(self, whole: Mapping[str, Tensor], count: int) -> None:
        """Loads averages of the whole model, by name. count: the number of versions in the averages."""
        for stage, optimizer in self.by_stage.items():
            if optimizer.averages is not None:
                laid_out = {
                    name: torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)
                    for name, parameter in self._run.stages[stage].trainable_parameters()
                    if (value := whole.get(name)) is not None
                }
                optimizer.averages.go_on(laid_out, count)

    def _layout_of(self, stage: int, *, whole_tensors: bool) -> ShardLayout:
        named = updated_parameters(self._run.stages[stage], self._run.ties)
        num_tied = len(ties_by_owner(stage, self._run.ties).get(stage, []))
        planned = self._run.plan.stages[stage]
        self.factored[stage] = self._choice.of_stage(stage)
        layout = ShardLayout(
            named,
            planned.num_replicas,
            whole_tensors=whole_tensors,
            num_tied=num_tied,
            shared=[layer.parameter for layer in self.factored[stage]],
            num_spares=planned.num_spare_shards,
        )
        _check_spares(stage, layout, planned.num_spare_shards)
        return layout

    def _learn_layouts_of_owners(self) -> None:
        """Makes the layouts of stages of other workers that own tied parameters of this worker's stages. Only
        those workers know whether their optimizers need whole tensors, so they publish it."""
        used = {owner for stage in self.by_stage for owner in ties_by_owner(stage, self._run.ties)}
        owners = [
            owner for owner in sorted(used - self.by_stage.keys()) if self._run.options.has_shards_at(owner)
        ]
        keys = [_whole_key(owner) for owner in owners]
        known = wait_for(self._run.place.rendezvous, keys, _no_optimizer) if keys else []
        for owner, whole in zip(owners, known, strict=True):
            self.layouts[owner] = self._layout_of(owner, whole_tensors=whole)

    def plan_again(self, run: AgreedRun, device: torch.device, footprints: Mapping[int, Footprint]) -> None:
        """Plans again for larger minibatches. footprints: the new rehearsal's measurements. The layers whose
        gradients are pushed as factors stay the same, and get more rows."""
        for stage, layers in self.factored.items():
            if stage in self.by_stage:
                self.factored[stage] = self._choice.enlarged(run, device, footprints, stage, layers)

    def go_on(self, stage: int, snapshot: StageSnapshot) -> None:
        """Loads the optimizer's state from a snapshot of the stage. Call it before the state gets slots in a
        pool. Raises ValueError if the snapshot has the state of another optimizer."""
        tensors = {**snapshot.optimizer, **snapshot.document_tensors}
        self.by_stage[stage].go_on(tensors, snapshot.optimizer_document)
        if stage in self.loss_scaling:
            self.loss_scaling[stage].go_on(snapshot.document["loss_scaling"])

    def leave_slots(self) -> None:
        """Moves the optimizers' state out of the pool. Call it before the pool is freed. StagePool moves the
        state into the next pool."""
        for optimizer in self.by_stage.values():
            optimizer.leave_slots()
            if optimizer.averages is not None:
                optimizer.averages.leave_slot()

    def tied_pieces(self, stage: int) -> dict[int, list[list[Piece]]]:
        """Returns the pieces of the stage's tied parameters by owner stage, and then by shard.
        Piece.parameter is an index into the parameters that the stage shares with that owner."""
        found = {}
        for owner, of_stage in ties_by_owner(stage, self._run.ties).items():
            layout = self.layouts.get(owner)
            if layout is None:
                continue
            position = {self._index_at_owner(tie): index for index, tie in enumerate(of_stage)}
            found[owner] = [
                [
                    replace(piece, parameter=position[piece.parameter])
                    for piece in layout.tied_pieces_of(shard)
                    if piece.parameter in position
                ]
                for shard in range(layout.num_shards)
            ]
        return found

    def _index_at_owner(self, tie: Tie) -> int:
        owned = ties_by_owner(tie.stages[0], self._run.ties)[tie.stages[0]]
        return next(index for index, other in enumerate(owned) if other is tie)

    def tie_specs(self) -> list[TieSpec]:
        """Returns a spec for each tie of the run. The spec has pieces only if this worker has the layout of
        the tie's owner."""
        specs = []
        for tie in self._run.ties:
            owner = tie.stages[0]
            index = self._index_at_owner(tie)
            layout = self.layouts.get(owner)
            shards = range(0 if layout is None else layout.num_shards)
            pieces = tuple(
                tuple(
                    _spec_of(tie.parameter, piece)
                    for piece in layout.tied_pieces_of(shard)
                    if piece.parameter == index
                )
                for shard in shards
                if layout is not None
            )
            specs.append(TieSpec(tie.stages, _spec_of(tie.parameter), pieces))
        return specs

    def shards(self) -> dict[tuple[int, int], ShardSpec]:
        """Returns the specs of the shards of this worker's stages, by (stage, shard)."""
        return {
            (stage, shard): ShardSpec(
                len(chunks),
                max((chunk.num_bytes for chunk in chunks), default=1),
                max((len(chunk.pieces) for chunk in chunks), default=1),
                layout.dtype_of(shard),
                sum(chunk.num_bytes for chunk in chunks) if layout.whole_tensors else 0,
                tuple(spec for layer in self.factored[stage] for spec in _factor_specs(layer)),
            )
            for stage, layout in self.layouts.items()
            if stage in self.by_stage
            for shard in range(layout.num_shards)
            for chunks in [layout.chunks_of(shard)]
        }


def _check_spares(stage: int, layout: ShardLayout, num_spares: int) -> None:
    """Raises ValueError if a spare would own no part of the stage, because it would have nothing to do."""
    shards = range(layout.num_shards - num_spares, layout.num_shards)
    num_with_chunks = sum(bool(layout.chunks_of(shard)) for shard in shards)
    if num_with_chunks < num_spares:
        why = "whose optimizer needs whole tensors" if layout.whole_tensors else "which are too few"
        raise ValueError(
            f"stage {stage} has {num_spares} spare shards, and its parameters, {why}, give only"
            f" {num_with_chunks} of them a part: use a plan with no more num_spare_shards than that"
        )


def _check_sparse(run: AgreedRun, stage: int, optimizer: StageOptimizer) -> None:
    """Raises ValueError if the optimizer needs sparse gradients, because replicas exchange dense
    gradients."""
    num_replicas = run.plan.stages[stage].num_replicas
    if (
        num_replicas > 1
        and run.options.replication.sync_every == 1
        and optimizer.optimizer is not None
        and isinstance(unwrapped(optimizer.optimizer), torch.optim.SparseAdam)
    ):
        check_together({"sparse_adam": None, "replicas": f"stage {stage} has {num_replicas} replicas"})


def _check_local_steps(run: AgreedRun, stage: int, optimizer: StageOptimizer) -> None:
    """Raises ValueError if replicas that take the mean of their weights keep float32 masters. The mean is
    taken of the weights only, so each replica would continue with its own masters."""
    if optimizer.keeps_masters and run.plan.stages[stage].num_replicas > 1:
        said = f"stage {stage} has bfloat16 parameters whose optimizer keeps float32 masters"
        check_together(replace(run.options.job(), float32_masters=said).traits())


def _whole_key(stage: int) -> str:
    return f"shards of whole tensors/{stage}"


def _no_optimizer(keys: list[str]) -> str:
    return "no word of the optimizers of stages " + ", ".join(key.rpartition("/")[2] for key in keys)


def _spec_of(parameter: Tensor, piece: Piece | None = None) -> TensorSpec:
    shape = tuple(parameter.shape) if piece is None or piece.is_whole else (piece.count,)
    return TensorSpec(parameter.dtype, shape, requires_grad=piece is None)


def _factor_specs(layer: FactorLayer) -> list[TensorSpec]:
    widths = (layer.num_outputs, layer.num_inputs)
    return [TensorSpec(layer.dtype, (layer.num_rows_max, width), requires_grad=False) for width in widths]


def _describe(layout: ShardLayout, optimizer: StageOptimizer, codec: str) -> str:
    sizes = [sum(c.num_bytes for c in layout.chunks_of(shard)) for shard in range(layout.num_shards)]
    name = type(optimizer.optimizer).__name__
    why = "whole tensors, as not known to work element by element" if layout.whole_tensors else "equal parts"
    pushed = ""
    if codec != NO_CODEC:
        exact = [shard for shard in range(layout.num_shards) if layout.dtype_of(shard) == torch.uint8]
        pushed = f"; gradients are pushed as {codec}"
        if exact:
            pushed += f", but those of shards {exact}, which have several dtypes, as they are"
    return f"{name} has shards of {why}: {', '.join(map(format_bytes, sizes))}{pushed}"
