"""A caution warns about options of a run that are allowed, but that the user may not have meant. The caller
of local workers, or rank 0 of torchrun, shows each caution once in a run, before the training begins."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pipedream._core import ScheduleOptions
from pipedream.model.layers import Model, layers_of, roots_of
from pipedream.optim import NATIVE_OPTIMIZERS, MasterWeights
from pipedream.optim.master_weights import has_master
from pipedream.planning.codec_choice import pushes_factors
from pipedream.planning.plan import Plan
from pipedream.planning.plan_schedule import mean_delay, schedule_of
from pipedream.splitting.cut_model import CutModel

__all__ = ["cautions_of", "check_data_apart", "warn_if_coarse", "warn_if_late", "warn_the_caller"]

# With class weights or ignore_index, these losses divide by the sum of the samples' weights, and not by the
# number of samples.
_WEIGHTED = (nn.CrossEntropyLoss, nn.NLLLoss, functional.cross_entropy, functional.nll_loss)
_IGNORED_BY_DEFAULT = -100
# A caution names the fewest microbatches with which gradients are at most one update late. The search for
# them ends at this number.
_MICROBATCHES_TRIED_MAX = 64

_BETWEEN = ("pipedream", "contextlib")  # packages whose frames a warning skips to find the user's line


def cautions_of(
    model: Model,
    plan: Plan,
    world_size: int | None,
    loss_fn: Any = None,
    microbatches: int = 1,
    *,
    rates_by_update: bool = False,
    codec: Mapping[str, str] | None = None,
    autocast: Any = None,
    schedule: str | None = None,
    in_microbatches: bool = False,
) -> Iterator[str]:
    """Yields the cautions, one line each.

    world_size: number of ranks that torchrun has started; None without torchrun.
    rates_by_update: whether each stage has its own scheduler, which steps once per update.
    codec: the codec of the links.
    in_microbatches: whether the data are known to yield Microbatches.
    autocast, schedule: as in run().
    """
    layers = [layer for _, layer in layers_of(model)]
    if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        yield (
            "nothing is trained: no parameter of the model requires a gradient; set requires_grad_() on those"
            " that should be"
        )
    modules = [module for layer in layers for module in layer.modules()]
    if modules and not any(module.training for module in modules):
        yield (
            "the model is in eval(): dropout drops nothing and batch norm keeps its statistics; call"
            " model.train() before run, unless that is meant"
        )
    if plan.workers_training < plan.num_workers:
        given = plan.predicted.get("given")
        why = "with more the partitioner finds no higher rate; print(plan) shows what limits it"
        if isinstance(given, list) and given:
            why = f"{' and '.join(map(str, given))} were given to partition(), and the search kept to them"
        used, asked = plan.workers_training, plan.num_workers
        yield f"the plan uses {used} of the {asked} workers it was made for: {why}"
    elif world_size is not None and plan.workers_used < world_size:
        yield (
            f"the plan uses {plan.workers_used} of {world_size} ranks: the others wait until the run is over;"
            f" partition for {world_size} workers, or start {plan.workers_used}"
        )
    if plan.codec and not pushes_factors(dict(codec or {})):
        yield (
            f"the plan was made for codec={plan.codec}, and this run has another, without factors: the plan's"
            " times and memory are not this run's; leave codec out, or partition without"
        )
    elif plan.codec and autocast is not None:
        yield (
            f"the plan was made for codec={plan.codec}, and under autocast nothing goes as factors: the"
            " plan's times and memory are not this run's; partition without codec"
        )
    if schedule is not None:
        yield from _cautions_of_plan(plan, schedule, microbatches)
    counts = model.counts if isinstance(model, CutModel) else ()
    if counts and len(plan.stages_of(0)) > 1:
        yield (
            f"the forward changes {', '.join(counts[:3])}, and workers of this plan have several stages, each"
            " of which changes it once a microbatch: keep what counts forwards in a module of its own, or"
            " give a plan with one stage per worker"
        )
    num_replicas = {stage.num_replicas for stage in plan.stages}
    if rates_by_update and len(num_replicas) > 1:
        most = max(num_replicas)
        yield (
            f"lr_scheduler steps once per update, which a stage of {most} replicas makes once in {most}"
            f" minibatches and one of {min(num_replicas)} once in {min(num_replicas)}: their learning rates"
            " differ; use a fixed rate, a plan of equal replicas, or a schedule that drains"
        )
    if microbatches > 1:
        if any(isinstance(module, _BatchNorm) and module.training for module in modules):
            yield from _cautions_of_batch_norm(plan, microbatches, in_microbatches=in_microbatches)
        yield from _cautions_of_loss(loss_fn, microbatches)


def _cautions_of_batch_norm(plan: Plan, microbatches: int, *, in_microbatches: bool) -> Iterator[str]:
    if not in_microbatches:
        yield (
            f"batch norm takes its statistics from each of a minibatch's {microbatches} microbatches by"
            " itself, so losses differ from those of whole minibatches; microbatches=1 keeps them, data that"
            " yield pipedream.Microbatches train as accumulated batches do, and group norm does not depend on"
            " it"
        )
    elif any(stage.num_replicas > 1 for stage in plan.stages):
        yield (
            "each replica of a stage steps batch norm's running statistics by its own microbatches, and the"
            " model gets the replicas' mean, so evaluations differ from those of accumulated batches; a plan"
            " without replicas, as partition(straight=True) makes it, keeps them"
        )


def _cautions_of_plan(plan: Plan, schedule: str, microbatches: int) -> Iterator[str]:
    """Yields a line if the plan was made for another schedule, or for other microbatches."""
    made_for = (plan.schedule or schedule, plan.microbatches or microbatches)
    if made_for == (schedule, microbatches):
        return
    yield (
        f"the plan was made for schedule {made_for[0]!r} with microbatches={made_for[1]}, and this run has"
        f" {schedule!r} with {microbatches}: the plan's times and memory are not this run's; schedule='auto'"
        " takes the plan's"
    )


def _cautions_of_loss(loss_fn: Any, microbatches: int) -> Iterator[str]:
    """Yields cautions about the loss. The mean of the microbatches' losses equals the loss of the minibatch
    only if the loss is a mean over samples. Attributes of torch's losses show whether it is."""
    if isinstance(loss_fn, functools.partial):
        kind, settings = loss_fn.func, loss_fn.keywords
    else:
        kind, settings = type(loss_fn), getattr(loss_fn, "__dict__", {})
        settings = {**settings, **getattr(loss_fn, "_buffers", {})}
    if settings.get("reduction") == "sum":
        yield (
            f"loss_fn has reduction='sum', and the loss of a minibatch is the mean over its {microbatches}"
            f" microbatches: it and the gradient are 1/{microbatches} of those without microbatches; use"
            " reduction='mean'"
        )
    elif kind in _WEIGHTED and (
        settings.get("weight") is not None
        or settings.get("ignore_index", _IGNORED_BY_DEFAULT) != _IGNORED_BY_DEFAULT
    ):
        yield (
            f"loss_fn has class weights or ignore_index, so its mean is not over samples: with {microbatches}"
            " microbatches, which count by their samples, losses and gradients differ from those of whole"
            " minibatches; give weight_fn, which says what a microbatch counts"
        )


def warn_if_late(plan: Plan, options: ScheduleOptions, optimizers: Iterable[Optimizer]) -> None:
    """Warns the caller if gradients are more than one update late and an optimizer has momentum. Both
    together make training need more minibatches (docs/statistical_efficiency.md). optimizers: the optimizers
    of some stages."""
    delay = mean_delay(options)
    names = [type(made).__name__ for made in optimizers if _has_momentum(made)]
    if delay <= 1 or not names:
        return
    name = options.schedule
    counts = range(1, _MICROBATCHES_TRIED_MAX + 1) if options.program is None else ()
    enough = next((m for m in counts if mean_delay(schedule_of(plan, name, m)) <= 1), None)
    in_time = "'flush' is not late"
    if enough is not None:
        bounded = " and staleness=0" if options.staleness else ""
        in_time = (
            f"schedule={name!r} with microbatches={enough}{bounded} is at most one late, 'flush' not at all"
        )
    warn_the_caller(
        f"gradients are {delay:.3g} updates late in the mean (schedule {name!r} with microbatches="
        f"{options.num_microbatches}), which with the momentum of {names[0]} costs minibatches: {in_time}"
    )


def warn_if_coarse(optimizers: Iterable[Optimizer]) -> None:
    """Warns the caller if an optimizer steps in bfloat16, because small steps are then rounded away.
    optimizers: the optimizers of some stages."""
    for made in optimizers:
        keeps_masters = isinstance(made, MasterWeights) or type(made) in NATIVE_OPTIMIZERS
        if not keeps_masters and any(has_master(p) for group in made.param_groups for p in group["params"]):
            name = type(made).__name__
            native = next((kind for kind in NATIVE_OPTIMIZERS if kind.__name__ == name), None)
            remedies = [f"pipedream.optim.{name}"] if native else []
            remedies.append(f"functools.partial(pipedream.optim.MasterWeights, {name}, ...)")
            warn_the_caller(
                f"parameters are bfloat16 and {name} steps in bfloat16, which rounds small steps away: to"
                f" keep float32 masters use {' or '.join(remedies)}"
            )
            return


def _has_momentum(optimizer: Optimizer) -> bool:
    for group in optimizer.param_groups:
        betas = group.get("betas")
        decays = [group.get("momentum"), *(betas if isinstance(betas, (tuple, list)) else ())]
        if any(decay is not None and float(decay) > 0 for decay in decays):
            return True
    return False


def check_data_apart(data: Iterable[Any], model: Model, plan: Plan) -> Iterator[str]:
    """Yields a line if the data hold a part of the model. A worker that reads data may not have the newest
    weights of that part. Raises ValueError if a sampler holds a part of the model, because a sampler can only
    use it to choose samples."""
    if plan.num_stages == 1 and plan.workers_used == 1:
        return  # a single worker trains the same model that the data hold
    roots = [root for _, root in roots_of(model)]
    own = {id(model), *(id(part) for root in roots for part in (*root.modules(), *root.parameters()))}
    why = (
        "data are read ahead of the updates, and each worker has the weights of its own stages alone, so it"
        " sees other weights than the newest"
    )
    for path, sampler in _samplers_of(data):
        for name, value in getattr(sampler, "__dict__", {}).items():
            if id(value) in own:
                raise ValueError(
                    f"{path}.{name} is a part of the model, by which a sampler chooses: {why}; choose between"
                    " two runs, or train with a plan of one worker"
                )
    for path, value in _held_by(data):
        if id(value) in own:
            yield f"data holds a part of the model ({path}): {why}; let data not depend on the weights"
            return


def _samplers_of(data: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(data, DataLoader):
        for name in ("sampler", "batch_sampler"):
            sampler = getattr(data, name)
            yield f"data.{name}", sampler
            yield f"data.{name}.sampler", getattr(sampler, "sampler", None)


def _held_by(data: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of each attribute of the data or their dataset, or of each local variable of a
    generator. Does not look into these objects, nor into lists and tuples, because data may have a million
    parts."""
    held: Mapping[str, Any] = {}
    path = "data.dataset" if isinstance(data, DataLoader) else "data"
    if isinstance(data, types.GeneratorType):
        held = {} if data.gi_frame is None else data.gi_frame.f_locals
    elif isinstance(data, DataLoader):
        held = getattr(data.dataset, "__dict__", {})
    elif not isinstance(data, (list, tuple)):
        held = getattr(data, "__dict__", {})
    yield from ((f"{path}.{name}", value) for name, value in held.items())


def warn_the_caller(caution: str) -> None:
    """Warns at the line of the user's script that called this library. Any number of decorators may be in
    between."""
    frame: FrameType | None = sys._getframe()
    stack_level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, stack_level = frame.f_back, stack_level + 1
    warnings.warn(caution, stacklevel=stack_level)
