"""run() trains as pipedream.run() would, but in this process. Evaluations are plain loops over the validation
data with the newest weights."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from pipedream.common.checks import check_choice
from pipedream.model.batches import call_model, own_loss, parts_of
from pipedream.model.boundary import device_of, to_device
from pipedream.model.data_copies import generators_of_loader_kept
from pipedream.model.draws import SeenDraws, keyed_draws
from pipedream.model.factories import with_delay
from pipedream.model.layers import Model
from pipedream.model.loss_state import loss_on, spare_loss
from pipedream.model.microbatch import samples_of
from pipedream.model.precision import LossScaler, autocast_dtype, autocast_region
from pipedream.model.references import check_loss_fn, gradients_noticed
from pipedream.model.seeding import (
    RngStream,
    backward_seed,
    base_seed,
    data_seed,
    draws_seed,
    generators_kept,
    seed_all,
    seed_data,
    update_seed,
)
from pipedream.model.stage_module import StageModule, Tie, find_ties, tie_pairs
from pipedream.model.validation import Validation
from pipedream.planning.job import Replication, check_together
from pipedream.planning.plan import Plan
from pipedream.planning.program import Program
from pipedream.reference.asynchronous import AsynchronousTrainer, AsynchronousWeights, UpdateOrder
from pipedream.reference.refusals import (
    check_drained_at,
    check_has_orders,
    check_max_grad_norm,
    check_microbatches,
    check_program,
    check_replication,
    job_of,
    of_plan,
)
from pipedream.reference.stages import CutFunction, LossFunction, MinibatchStatistics, ReplicaBuffers, Stage
from pipedream.reference.trainer import Trainer
from pipedream.reference.updates import OptimizerFactory, SchedulerFactory, Updater, make_updaters
from pipedream.reference.versions import SCHEDULES, Versions, WrittenVersions
from pipedream.splitting.cut_model import CutModel, cut_model, needs_cutting
from pipedream.splitting.splitter import split

__all__ = ["ReferenceResult", "run"]


@dataclass
class ReferenceResult:
    losses: list[float]
    """The loss of each minibatch, in order."""
    microbatch_versions: list[list[list[tuple[int, int]]]]
    """microbatch_versions[stage][minibatch][microbatch] = (weight version that the forward read, weight
    version that the backward read)."""

    validation: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(minibatch, figures) of each evaluation, in order. The evaluation took place before this minibatch."""

    @property
    def versions(self) -> list[list[tuple[int, int]]]:
        """versions[stage][minibatch] = (weight version that the first microbatch's forward read, weight
        version that the last microbatch's backward read).
        """
        return [[(read[0][0], read[-1][1]) for read in of_stage] for of_stage in self.microbatch_versions]


def run(
    model: Model,
    plan: Plan,
    *,
    data: Iterable[Any],
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory,
    epochs: int = 1,
    schedule: str | Program = "pipedream",
    microbatches: int = 1,
    weight_fn: Callable[[Any], Any] | None = None,
    lr_scheduler: SchedulerFactory | None = None,
    recompute: bool | Sequence[int] | None = None,
    autocast: str | torch.dtype | None = None,
    max_grad_norm: float | None = None,
    sync: str = "bsp",
    staleness: int = 0,
    sync_every: int = 1,
    seed: int | None = None,
    across_cut: CutFunction | None = None,
    update_orders: Sequence[Sequence[UpdateOrder]] | None = None,
    drained_at: Sequence[int] = (),
    validation: Validation | None = None,
) -> ReferenceResult:
    """Trains the model in place as a schedule would, for any schedule that pipedream.run() accepts. All
    arguments but across_cut, update_orders and drained_at are those of pipedream.run().

    The gradients of round j are taken at the versions that its microbatches read (see Versions). They update
    each stage's newest version j to version j + 1. Buffers have no versions. With one worker every schedule
    except 2bw is plain training. If it has one microbatch, it equals plain training bit for bit.

    sync_every: if above 1, each replica updates its own copy of the stage, by its own gradients and with its
        own optimizer. After this number of rounds, and at the end, all copies become their mean.
    recompute: True for all stages, or the indices of some stages. It changes numbers only at stages that do
        not stash, where the repeated forward reads the newest version.
    across_cut: a function that changes tensors between stages, such as a codec would. It is called as
        across_cut(sender, receiver, tensor_index, tensor) for each floating-point activation and its
        gradient, in the order of the microbatches. It returns the new tensor. None changes no tensor.
    update_orders: by stage and shard, the order in which gradients were applied, as in RunResult. sync="asp"
        needs it, because the order depends on which replica was faster.
    drained_at: minibatches before which the pipeline had drained, as RunResult.drained_at. Later minibatches
        read no version older than the newest version at that point.

    Raises ValueError or TypeError for arguments that cannot run. Sources: PipeDream (SOSP'19), section 3.3;
    PipeDream-2BW (ICML'21), section 3.1; GPipe (NeurIPS'19), section 2; docs/schedules.md.
    """
    num_replicas = [stage.num_replicas for stage in plan.stages]
    check_replication(replication := Replication(sync, staleness, sync_every))
    versions = _versions_of(plan, schedule, microbatches, staleness, drained_at)
    microbatches = versions.num_microbatches
    check_drained_at(drained_at, num_replicas, microbatches)
    recomputed = _recomputed_stages(recompute, len(plan.stages))
    check_max_grad_norm(max_grad_norm)
    job = job_of(versions, num_replicas, replication, max_grad_norm, autocast)
    check_together(job.traits() | ({} if validation is None else {"validation": None}))
    is_asynchronous = sync == "asp" and job.has_replicas
    if is_asynchronous:
        check_has_orders(update_orders)
    check_loss_fn(loss_fn)
    loss_fn, dtype = loss_fn or own_loss, autocast_dtype(autocast)
    modules = split(layered := _with_layers(model, plan, data, loss_fn, dtype, seed), plan)
    device = device_of(modules)
    ties = find_ties(modules)
    check_together(replace(job, ties=tie_pairs(ties)).traits())
    own = {name: p for m in modules for name, p in (*m.trainable_parameters(), *m.frozen_parameters())}
    with (
        _draws(modules, max(len(num_replicas), sum(num_replicas)), seed, device) as (base, generators),
        gradients_noticed(own),
        loss_on(loss_fn, device),
    ):
        stages = [
            Stage(
                module,
                # At stages that stash, no forward is repeated, because it would give the same numbers.
                recomputes_newest=stage_index in recomputed and not versions.stashes(stage_index),
                backward_seed=None if base is None else backward_seed(base, stage_index),
                autocast=functools.partial(autocast_region, device.type, dtype),
                loss_fn=loss_fn if stage_index == len(modules) - 1 else None,
                statistics_of=_statistics_of(module, num_replicas[stage_index], microbatches),
                updaters=make_updaters(
                    _owned_parameters(module, ties),
                    with_delay(optimizer, versions.mean_delay(stage_index)),
                    lr_scheduler,
                    num_replicas[stage_index] if sync_every > 1 else 1,
                    _update_seed(base, module, ties),
                ),
                buffers=ReplicaBuffers(module, num_replicas[stage_index]),
            )
            for stage_index, module in enumerate(modules)
        ]
        trainer = (AsynchronousTrainer if is_asynchronous else Trainer)(
            stages,
            versions,
            tied={id(tie.parameter) for tie in ties},
            device=device,
            weight_fn=weight_fn,
            across_cut=across_cut,
            max_grad_norm=max_grad_norm,
            scaler=LossScaler(versions.num_scales_in_flight) if dtype == torch.float16 else None,
            sync_every=sync_every,
        )
        evaluated = _EvaluatedTraining(layered, modules, validation, loss_fn, weight_fn, device, dtype)
        batches = _read_from(generators, _minibatches(data, epochs, evaluated.epochs))
        if isinstance(trainer, AsynchronousTrainer):
            make_updater = functools.partial(Updater, optimizer=optimizer, lr_scheduler=lr_scheduler)
            owned = [_owned_parameters(module, ties) for module in modules]
            losses = _train_asynchronously(
                trainer, list(batches), owned, make_updater, versions, update_orders or ()
            )
        else:
            losses = evaluated.train(trainer, batches)
            trainer.finish(len(losses))
    return ReferenceResult(losses, trainer.microbatch_versions, evaluated.results)


class _EvaluatedTraining:
    """Trains one minibatch after another, and evaluates in between."""

    def __init__(
        self,
        model: Model,
        modules: Sequence[StageModule],
        validation: Validation | None,
        loss_fn: LossFunction,
        weight_fn: Callable[[Any], Any] | None,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self.results: list[tuple[int, dict[str, float]]] = []
        self.epochs: list[int] = []
        """The epoch of each minibatch that was read."""
        self._model = model
        self._modules = modules
        self._validation = validation
        self._loss_fn = loss_fn
        self._weight_fn = weight_fn
        self._device = device
        self._dtype = dtype

    def train(self, trainer: Trainer, batches: Iterable[tuple[Any, Any]]) -> list[float]:
        """Trains on the batches. Returns the losses."""
        group = trainer.minibatches_between_drains
        validation, losses = self._validation, []
        if validation is None:
            return [trainer.train(minibatch, *batch) for minibatch, batch in enumerate(batches)]
        boundaries: set[int] | None = None
        if group > 1:  # the last group may be incomplete, so the end of the data must be known
            batches = list(batches)
            boundaries = _evaluated_boundaries(validation.every, self.epochs, group)
        for minibatch, batch in enumerate(batches):
            is_due_now = minibatch > 0 and (
                _is_due(validation.every, self.epochs, minibatch - 1, minibatch)
                if boundaries is None
                else minibatch in boundaries
            )
            if is_due_now:
                self._evaluate(trainer, minibatch)
            losses.append(trainer.train(minibatch, *batch))
        end = len(losses)
        if end in _evaluated_boundaries(validation.every, self.epochs, group):
            trainer.end_round(end)
            self._evaluate(trainer, end)
        return losses

    def _evaluate(self, trainer: Trainer, boundary: int) -> None:
        assert self._validation is not None
        trainer.use_first_replicas()
        draws = [module.draws for module in self._modules]
        for module in self._modules:
            module.draws = None
        with autocast_region(self._device.type, self._dtype):
            figures = self._figures(self._validation)
        for module, draw in zip(self._modules, draws, strict=True):
            module.draws = draw
        self.results.append((boundary, figures))

    def _figures(self, validation: Validation) -> dict[str, float]:
        """Returns the figures of the newest weights on the validation data."""
        roots = [root for module in self._modules for _, root in module.roots()]
        modules = [module for root in roots for module in root.modules()]
        loss_fn = spare_loss(self._loss_fn, roots)
        losses: list[tuple[float, float]] = []
        sums: dict[str, list[tuple[float, float]]] = {name: [] for name in validation.metrics}
        with generators_kept(), torch.no_grad(), contextlib.ExitStack() as after:
            for module in modules:
                after.callback(setattr, module, "training", module.training)
                after.callback(module._buffers.update, dict(module._buffers))
                module.training = False
            frozen = (
                p for module in modules for p in module.parameters(recurse=False) if not p.requires_grad
            )
            buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
            before = [(tensor, tensor.clone()) for tensor in (*buffers, *frozen)]
            for index, batch in enumerate(validation.data):
                inputs, targets = (
                    to_device(part, self._device, copy=True) for part in parts_of(batch, index)
                )
                output = self._run(validation, inputs)
                count = samples_of(inputs, targets) or 1
                weight = float(count if self._weight_fn is None else self._weight_fn(targets))
                if weight:
                    losses.append((loss_fn(output, targets).item(), weight))
                for name, metric in validation.metrics.items():
                    value, number = metric(output, targets)
                    sums[name].append((float(value), float(number)))
            for tensor, content in before:
                tensor.copy_(content)
        return {"loss": _mean([(loss * weight, weight) for loss, weight in losses])} | {
            name: _mean(pairs) for name, pairs in sums.items()
        }

    def _run(self, validation: Validation, inputs: Any) -> Any:
        """Runs the whole model, by its own code or layer by layer."""
        if isinstance(self._model, CutModel):
            return (validation.forward or call_model)(self._model.module, inputs)
        if validation.forward is not None:
            return validation.forward(self._model, inputs)
        for module in self._modules:
            inputs = module(inputs)
        return inputs


def _versions_of(
    plan: Plan,
    schedule: str | Program,
    microbatches: int,
    staleness: int,
    drained_at: Sequence[int],
) -> Versions:
    """Returns the Versions of the schedule. For "auto" the plan gives the schedule and the microbatches."""
    num_replicas = [stage.num_replicas for stage in plan.stages]
    if isinstance(schedule, Program):
        check_program(schedule, num_replicas, microbatches)
        return WrittenVersions(str(schedule), num_replicas, drained_at)
    if schedule == "auto":
        schedule, microbatches = of_plan(plan.schedule, plan.microbatches, microbatches)
    check_choice("schedule", schedule, SCHEDULES)
    check_microbatches(schedule, microbatches, plan.in_flight, num_replicas)
    return Versions(schedule, list(plan.in_flight), num_replicas, staleness, microbatches, drained_at)


def _statistics_of(module: StageModule, num_replicas: int, microbatches: int) -> list[MinibatchStatistics]:
    """Returns Stage.statistics_of. It is empty if a minibatch has one microbatch, because batch norms then
    update their statistics themselves.
    """
    return [MinibatchStatistics(module) for _ in range(num_replicas if microbatches > 1 else 0)]


def _with_layers(
    model: Model,
    plan: Plan,
    data: Iterable[Any],
    loss_fn: LossFunction,
    dtype: torch.dtype | None,
    seed: int | None,
) -> Model:
    """Returns the model as layers. If it is not a list of layers, it is cut by tracing a forward of minibatch
    0, as pipedream.run() does. With a plan of one layer it stays as it is."""
    if plan.stages[-1].last_layer == 0 or not needs_cutting(model):
        return model
    assert isinstance(model, nn.Module)
    if isinstance(data, Iterator):
        raise ValueError(
            "data is an iterator, and the model is cut by a forward with its first minibatch: give data that"
            " can be iterated again, as a list, or a list of layers"
        )
    # A copy of the data is read, because some data count how often they are iterated.
    with generators_kept(), generators_of_loader_kept(data):
        seed_data(base_seed(seed), seed, sum(stage.num_replicas for stage in plan.stages))
        for batch in copy.copy(data):
            return cut_model(model, *parts_of(batch, 0), loss_fn, autocast=dtype)
    raise ValueError("data yields no minibatch: check the dataset, batch_size and drop_last")


def _train_asynchronously(
    trainer: AsynchronousTrainer,
    batches: list[tuple[Any, Any]],
    owned: Sequence[list[tuple[str, nn.Parameter]]],
    make_updater: Callable[..., Updater],
    versions: Versions,
    orders: Sequence[Sequence[UpdateOrder]],
) -> list[float]:
    """Trains with asynchronous shards. owned: the parameters that each stage updates."""
    weights = [
        AsynchronousWeights(parameters, make_updater, versions, stage_index, order, len(batches))
        for stage_index, (parameters, order) in enumerate(zip(owned, orders, strict=True))
    ]
    return trainer.train_all(batches, weights)


def _owned_parameters(module: StageModule, ties: Sequence[Tie]) -> list[tuple[str, nn.Parameter]]:
    """Returns (full name, parameter) of each parameter that the stage updates. These are the parameters that
    it uses and that no earlier stage owns.
    """
    owner = {id(tie.parameter): tie.stages[0] for tie in ties}
    stage_index = module.stage_index
    return [
        (name, p) for name, p in module.trainable_parameters() if owner.get(id(p), stage_index) == stage_index
    ]


def _update_seed(base: int | None, module: StageModule, ties: Sequence[Tie]) -> int | None:
    names = [name for name, _ in _owned_parameters(module, ties)]
    return None if base is None else update_seed(base, module.stage_index, names)


def _recomputed_stages(recompute: bool | Sequence[int] | None, num_stages: int) -> set[int]:
    if recompute is None or isinstance(recompute, bool):
        return set(range(num_stages)) if recompute else set()
    for stage_index in recompute:
        if not 0 <= stage_index < num_stages:
            raise ValueError(
                f"recompute names stage {stage_index}, but the plan has stages 0 to {num_stages - 1}"
            )
    return set(recompute)


@contextlib.contextmanager
def _draws(
    modules: Sequence[StageModule], num_workers: int, seed: int | None, device: torch.device
) -> Iterator[tuple[int | None, RngStream | None]]:
    """Makes random numbers come out as in pipedream.run(), within the with block. Yields (base seed, random
    generators of the data). Both are None with one worker, which draws like a plain loop.
    """
    if num_workers == 1:
        if seed is not None:
            seed_all(seed)
        yield None, None
        return
    base = base_seed(seed)
    with generators_kept(), contextlib.ExitStack() as around:
        seed_all(data_seed(base))
        # All layers and the loss are treated as if they drew random numbers. For a layer that draws none this
        # has no effect.
        seen = [
            SeenDraws(
                frozenset(range(module.first_layer, module.last_layer + 1)), in_loss=module is modules[-1]
            )
            for module in modules
        ]
        draws = keyed_draws(draws_seed(base), modules, seen, device)
        if draws is not None:
            around.enter_context(draws.installed())
        for module in modules:
            module.draws = draws
        try:
            yield base, RngStream(data_seed(base))
        finally:
            for module in modules:
                module.draws = None


def _read_from(generators: RngStream | None, batches: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yields the batches. While a batch is read, the random generators are the data's own."""
    while True:
        with generators or contextlib.nullcontext():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _minibatches(data: Iterable[Any], epochs: int, seen: list[int]) -> Iterator[tuple[Any, Any]]:
    """Yields the minibatches of all epochs. Appends the epoch of each minibatch to `seen`."""
    minibatch = 0
    parts: list[Any] = [
        data,
        *(getattr(data, name, None) for name in ("sampler", "batch_sampler", "dataset")),
    ]
    told = [part for part in parts if hasattr(part, "set_epoch")]
    for epoch in range(epochs):
        for part in told if epoch > 0 else ():
            part.set_epoch(getattr(part, "epoch", epoch - 1) + 1)
        first_of_epoch = minibatch
        for batch in data:
            seen.append(epoch)
            yield parts_of(batch, minibatch)
            minibatch += 1
        if minibatch == first_of_epoch:
            raise ValueError(
                f"data yielded nothing in epoch {epoch}: give data that can be iterated once per epoch, as a "
                f"DataLoader or a list"
            )
    for part in told:
        part.set_epoch(getattr(part, "epoch", epochs - 1) - (epochs - 1))


def _is_due(every: str | int, epochs: Sequence[int], begin: int, end: int, *, is_end: bool = False) -> bool:
    """Whether Validation(every=every) wants an evaluation after minibatch `begin` has begun and before
    minibatch `end` begins. epochs: the epoch of each minibatch. is_end: whether the run ends before minibatch
    `end`.
    """
    if every == "epoch":
        return is_end or any(epochs[i - 1] != epochs[i] for i in range(begin + 1, end + 1))
    return begin // int(every) != end // int(every)


def _evaluated_boundaries(every: str | int, epochs: Sequence[int], group: int) -> set[int]:
    """Returns the minibatches before which a run evaluates. epochs: the epoch of each minibatch of the run.

    group: a run evaluates only before multiples of this number, and at its end. An evaluation that is due in
    an incomplete last group is made at the end.
    """
    num_minibatches = len(epochs)
    last = (num_minibatches - 1) // group * group
    found = {begin for begin in range(group, last + 1, group) if _is_due(every, epochs, begin - group, begin)}
    is_at_end = _is_due(every, epochs, last, num_minibatches, is_end=True)
    if num_minibatches < last + group:
        is_at_end |= last in found
        found.discard(last)
    return found | ({num_minibatches} if is_at_end else set())


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the sum of the first numbers over the sum of the second numbers."""
    return sum(value for value, _ in pairs) / sum(number for _, number in pairs)
