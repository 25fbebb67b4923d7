"""Reference: the slow, obvious, single-process oracle of the schedules, in plain PyTorch.

It keeps a full copy of every weight version that may still be read and computes minibatch after
minibatch, so it shows what numbers a schedule must give, not how to get them fast. The fast path is
compared with it. Random numbers: see seeding.py.

    a minibatch   1. a leaf of every parameter, with the content of the version that its stage reads
                  2. forward of each microbatch through all stages, in order, and its loss
                  3. naive only: the leaves get the content of the newest version, in place
                  4. backward of each microbatch, in the same order; gradients add up in the leaves
                  5. one update per stage of the model's own parameters, which are the newest version: after
                     the last minibatch of a round, with the mean of the round's gradients

A round is a minibatch. With replicas, whose numbers are computed one after the other, it is the r minibatches
in a row of a stage's r replicas, and for a schedule that drains as many as the least common multiple of all
stages' replicas, at every stage; the last one may be short. Each replica has buffers of its own, whose mean
the model has in the end.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipedream.common.checks import check_choice, check_count
from pipedream.common.document import check_whole
from pipedream.model.batches import parts_of
from pipedream.model.boundary import check_loss, device_of, map_tensors, tensors_of, to_device
from pipedream.model.loss_placement import call_loss, loss_on
from pipedream.model.microbatch import check_alike, chunk, counts_of, samples_of, weights
from pipedream.model.precision import LossScaler, autocast_dtype, autocast_region, num_steps_in_flight
from pipedream.model.references import check_loss_fn, gradients_noticed, places_of
from pipedream.model.seeding import (
    MinibatchStreams,
    RngState,
    base_seed,
    data_seed,
    generators_kept,
    seed_all,
    stage_seed,
)
from pipedream.model.splitter import Model, PlannedStage, StageModule, Tie, find_ties, split

__all__ = ["ReferenceResult", "run"]

LossFunction = Callable[[Any, Any], Tensor]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]
CutFunction = Callable[[int, int, int, Tensor], Tensor]

# Every minibatch is finished at all stages before the next one starts.
_DRAINING = ("flush", "gpipe", "model_parallel", "data_parallel", "interleaved")
_SCHEDULES = ("pipedream", "vertical_sync", "naive", "2bw", *_DRAINING)


class RunnablePlan(Protocol):
    """What a run needs of a plan; plan.Plan is one."""

    @property
    def stages(self) -> Sequence[PlannedStage]: ...
    @property
    def in_flight(self) -> Sequence[int]: ...
    @property
    def cuts(self) -> Sequence[str] | None: ...


@dataclass
class ReferenceResult:
    losses: list[float]
    """One per minibatch, in order, unrounded."""
    versions: list[list[tuple[int, int]]]
    """versions[stage][minibatch] = (read by the forward, read by the backward)."""


def run(
    model: Model,
    plan: RunnablePlan,
    *,
    data: Iterable[Any],
    loss_fn: LossFunction,
    optimizer: OptimizerFactory,
    epochs: int = 1,
    schedule: str = "pipedream",
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
) -> ReferenceResult:
    """Trains the model in place as the schedule would. Arguments as pipedream.run's, but for across_cut.

    The gradients of round j, taken at the versions that their minibatches read (see _Versions), update each
    stage's newest version j to version j + 1. Buffers are not versioned. sync: bsp, allreduce or ssp, with
    staleness rounds; asp is refused, as its versions depend on who is faster. sync_every: replicas of a stage
    update copies of their own, each by its own gradients and with an optimizer of its own, and after so many
    rounds, and in the end, all copies become their mean. With one worker every schedule
    but 2bw is plain training, with one microbatch bit for bit. recompute, True for all stages or the indices
    of some, changes numbers with naive only, whose recomputed forward reads the newest version. Raises
    ValueError or TypeError for what cannot be run. across_cut(sender, receiver, tensor_index, tensor): what a
    floating-point activation, or coming back a gradient, becomes between two stages; called in the order of
    the microbatches, returns a new tensor. None: they stay as they are. Sources: PipeDream (SOSP'19), section
    3.3; PipeDream-2BW (ICML'21), section 3.1; GPipe (NeurIPS'19), section 2; design.md, section 4.
    """
    num_replicas = [stage.num_replicas for stage in plan.stages]
    _check_replicas(schedule, num_replicas, sync, staleness)
    versions = _Versions(schedule, list(plan.in_flight), num_replicas, staleness)
    _check_microbatches(schedule, microbatches, plan.in_flight, num_replicas)
    recomputed = _recomputed_stages(recompute, len(plan.stages))
    _check_sync_every(sync_every, num_replicas, sync, max_grad_norm, autocast)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm!r}: give a number above 0, or None not to clip")
    check_loss_fn(loss_fn)
    dtype = autocast_dtype(autocast)
    modules = split(model, plan)
    device = device_of(modules)
    ties = find_ties(modules)
    if max(num_replicas) > 1 and sync_every > 1:
        _check_ties(ties)
    own = {name: parameter for module in modules for name, parameter in module.trainable_parameters()}
    num_workers = max(len(modules), sum(num_replicas))
    with (
        _random_streams(len(modules), num_workers, seed) as streams,
        gradients_noticed(own),
        loss_on(loss_fn, device),
    ):
        stages = [
            _Stage(
                module,
                # Elsewhere a recomputed forward is the first one again, number by number.
                recomputes_newest=schedule == "naive" and stage_index in recomputed,
                streams=streams[stage_index],
                autocast=functools.partial(autocast_region, device.type, dtype),
                loss_fn=loss_fn if stage_index == len(modules) - 1 else None,
                statistics=_MinibatchStatistics(module) if microbatches > 1 else None,
                updaters=_make_updaters(
                    _owned_parameters(module, ties),
                    optimizer,
                    lr_scheduler,
                    num_replicas[stage_index] if sync_every > 1 else 1,
                ),
                buffers=_ReplicaBuffers(module, num_replicas[stage_index]),
            )
            for stage_index, module in enumerate(modules)
        ]
        trainer = _Trainer(
            stages,
            versions,
            tied={id(tie.parameter) for tie in ties},
            device=device,
            num_microbatches=microbatches,
            weight_fn=weight_fn,
            across_cut=across_cut,
            max_grad_norm=max_grad_norm,
            scaler=LossScaler(versions.num_scales_in_flight) if dtype == torch.float16 else None,
            sync_every=sync_every,
        )
        losses = [
            trainer.train(minibatch, inputs, targets)
            for minibatch, (inputs, targets) in enumerate(_minibatches(data, epochs))
        ]
        trainer.finish(len(losses))
    return ReferenceResult(losses, trainer.versions_read)


class _Versions:
    """Which versions a schedule reads, and which minibatches make one: the table of design.md, section 4."""

    def __init__(
        self, schedule: str, in_flight: Sequence[int], num_replicas: Sequence[int], staleness: int
    ) -> None:
        check_choice("schedule", schedule, _SCHEDULES)
        self._schedule = schedule
        self._in_flight = in_flight
        self._num_replicas = num_replicas
        self._staleness = staleness

    @property
    def drains(self) -> bool:
        return self._schedule in _DRAINING

    def minibatches_per_round(self, stage_index: int) -> int:
        return math.lcm(*self._num_replicas) if self.drains else self._num_replicas[stage_index]

    def of_forward(self, stage_index: int, minibatch: int) -> int:
        replicas, in_flight = self._num_replicas[stage_index], self._in_flight[stage_index]
        if self.drains:
            return minibatch // self.minibatches_per_round(stage_index)
        if self._schedule == "2bw":
            return max(0, minibatch // replicas - 1)
        if self._schedule == "vertical_sync":
            input_replicas = self._num_replicas[0]
            seen = max(0, minibatch // input_replicas - self._in_flight[0] + 1)
            return seen * input_replicas // replicas
        return max(0, minibatch // replicas - in_flight + 1 - self._staleness)

    def of_backward(self, stage_index: int, minibatch: int) -> int:
        if self._schedule == "naive":
            return minibatch // self._num_replicas[stage_index]
        return self.of_forward(stage_index, minibatch)

    def of_tied(self, owner: int, minibatch: int) -> int:
        """Of a parameter that several stages use: at each of them the same, forward and backward. It counts
        the rounds of its owner, whose update makes it: what vertical sync would read there, the staleness
        older, where stages read different versions, else what the owner reads."""
        if self.drains or self._schedule == "2bw":
            return self.of_forward(owner, minibatch)
        input_replicas = self._num_replicas[0]
        seen = max(0, minibatch // input_replicas - self._in_flight[0] + 1)
        return max(0, seen * input_replicas // self._num_replicas[owner] - self._staleness)

    @property
    def num_scales_in_flight(self) -> int:
        """How many scales of the loss a backoff waits for before the next one."""
        if self.drains:
            return 1
        return num_steps_in_flight(self._in_flight[0], self._num_replicas[0], self._num_replicas[-1])

    @property
    def minibatches_per_scale(self) -> int:
        """Minibatches in a row that have one scale of the loss."""
        return self.minibatches_per_round(len(self._num_replicas) - 1)

    def overflows_known(self, minibatch: int) -> set[tuple[int, int]]:
        """The (stage, round) whose overflow decides on the scale of the minibatch, the first that has it, and
        has decided on none before.

        The activation of a minibatch tells the last stage of the newest round that each stage has updated
        when it forwards the minibatch. Replicas of the last stage, where they have one minibatch of a round
        each, tell each other with their update.
        """
        last = len(self._num_replicas) - 1
        if self.drains:
            return {(stage, minibatch // self.minibatches_per_scale - 1) for stage in range(last + 1)}
        if self.minibatches_per_scale == 1:
            return {(stage, self._newest_updated(stage, minibatch)) for stage in range(last + 1)}
        of_last = self._newest_updated(last, minibatch)
        begin = of_last * self.minibatches_per_scale
        told = range(begin, begin + self.minibatches_per_scale)
        of_others = {(stage, self._newest_updated(stage, i)) for stage in range(last) for i in told}
        return {(last, of_last), *of_others}

    def _newest_updated(self, stage_index: int, minibatch: int) -> int:
        """The newest round that the stage has updated when it forwards the minibatch; none below 0."""
        replicas = self._num_replicas[stage_index]
        delay = self._in_flight[stage_index]
        if self._schedule == "2bw":
            # in_flight counts microbatches here, and the one before the first of a minibatch is the last of
            # the minibatch before: only where none else is in flight has that one been updated.
            delay = 1 if self._in_flight[stage_index] == 1 else 2
        if replicas > 1:  # where updates wait for half of the staleness
            delay += (self._staleness + 1) // 2
        return minibatch // replicas - delay


class _History:
    """The versions of one parameter that may still be read; the parameter itself is the newest."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._newest = 0
        self._copies = {0: parameter.detach().clone()}

    def leaf(self, version: int) -> Tensor:
        """A new leaf with the content of a version. No earlier one is read afterwards."""
        for old in [held for held in self._copies if held < version]:
            del self._copies[old]
        return self._copies[version].clone().requires_grad_()

    def add(self) -> None:
        """The parameter was updated: its content is the next version."""
        self._newest += 1
        self._copies[self._newest] = self.parameter.detach().clone()


class _Cut(torch.autograd.Function):
    """A tensor between two stages, and its gradient on the way back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, sender: int, receiver: int, tensor_index: int, across_cut: CutFunction
    ) -> Tensor:
        ctx.back = (receiver, sender, tensor_index, across_cut)
        return across_cut(sender, receiver, tensor_index, tensor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        receiver, sender, tensor_index, across_cut = ctx.back
        return across_cut(receiver, sender, tensor_index, gradients[0]), None, None, None, None


def _cross(value: Any, sender: int, receiver: int, across_cut: CutFunction) -> Any:
    """The value with what its floating-point tensors become. All tensors count, in the structure's order."""
    indices = itertools.count()

    def cross(tensor: Tensor) -> Tensor:
        tensor_index = next(indices)
        if not tensor.is_floating_point():
            return tensor
        crossed: Tensor = _Cut.apply(tensor, sender, receiver, tensor_index, across_cut)  # type: ignore[no-untyped-call]
        return crossed

    return map_tensors(cross, value)


class _Updater:
    """One stage's optimizer, on the newest version: the model's own parameters."""

    def __init__(
        self,
        owned: Sequence[tuple[str, nn.Parameter]],
        optimizer: OptimizerFactory,
        lr_scheduler: SchedulerFactory | None,
    ) -> None:
        self.parameters = [parameter for _, parameter in owned]
        self.num_added = 0
        """Minibatches, to the gradients of the round."""
        # A stage with nothing to train has no optimizer: torch refuses an empty list.
        self._optimizer = _make_optimizer(optimizer, owned) if owned else None
        self._scheduler = None
        if self._optimizer is not None and lr_scheduler is not None:
            self._scheduler = lr_scheduler(self._optimizer)

    def step(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()


def _make_updaters(
    owned: Sequence[tuple[str, nn.Parameter]],
    optimizer: OptimizerFactory,
    lr_scheduler: SchedulerFactory | None,
    count: int,
) -> list[_Updater]:
    """The first is of the stage's own parameters, the others of copies."""
    copies = [[(name, copy.deepcopy(parameter)) for name, parameter in owned] for _ in range(count - 1)]
    return [_Updater(named, optimizer, lr_scheduler) for named in (owned, *copies)]


@dataclass
class _Stage:
    """One stage's forward, and what it needs around it."""

    module: StageModule
    recomputes_newest: bool
    """Whether its backward runs on a forward that is done again at the newest version."""
    streams: MinibatchStreams | None
    """Of random numbers; None for those of the process."""
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    loss_fn: LossFunction | None
    """Of the last stage, whose output is the loss."""
    statistics: _MinibatchStatistics | None
    """With several microbatches per minibatch."""
    updaters: list[_Updater]
    """One, or one of each replica, with parameters of its own."""
    buffers: _ReplicaBuffers

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's, that the stage updates."""
        return self.updaters[0].parameters

    def updater_of(self, minibatch: int) -> _Updater:
        """Which has the weights that the minibatch reads, and takes its gradients."""
        return self.updaters[minibatch % len(self.updaters)]

    @torch.no_grad()
    def average(self) -> None:
        """All replicas' parameters become their mean."""
        if len(self.updaters) == 1:
            return
        for copies in zip(*(updater.parameters for updater in self.updaters), strict=True):
            mean = torch.stack([parameter.detach() for parameter in copies]).mean(0)
            for parameter in copies:
                parameter.copy_(mean)

    def begin(self, minibatch: int) -> None:
        if self.streams is not None:
            self.streams.begin(minibatch)
        self.buffers.use(minibatch)

    @property
    def stream(self) -> contextlib.AbstractContextManager[Any]:
        region = None if self.streams is None else self.streams.region
        return contextlib.nullcontext() if region is None else region

    def forward(self, value: Any, targets: Any) -> Any:
        with self.stream:
            return self._forward(value, targets, buffers={}, is_first_time=True)

    def forward_again(self, value: Any, targets: Any, buffers: dict[str, Tensor]) -> Any:
        """Draws from the generators as they are, works on these buffers and leaves the stage's own alone."""
        return self._forward(value, targets, buffers, is_first_time=False)

    def _forward(self, value: Any, targets: Any, buffers: dict[str, Tensor], *, is_first_time: bool) -> Any:
        with contextlib.ExitStack() as around:
            if self.statistics is not None:
                around.enter_context(self.statistics.microbatch(collect=is_first_time))
            around.enter_context(self.autocast())
            output = torch.func.functional_call(self.module, buffers, (value,))
        if self.loss_fn is None:
            return output
        with self.autocast():
            return call_loss(self.loss_fn, output, targets)


class _ReplicaBuffers:
    """A stage's buffers, of each of its replicas; the module has those of the replica that was used last."""

    def __init__(self, module: StageModule, num_replicas: int) -> None:
        self._module = module
        self._num_replicas = num_replicas
        self._in_use = 0
        initial = {name: buffer.clone() for name, buffer in module.stage_buffers()}
        self._kept = [initial] * num_replicas

    def use(self, minibatch: int) -> None:
        """The replica's that has the minibatch."""
        if self._num_replicas == 1:
            return
        self._keep()
        self._in_use = minibatch % self._num_replicas
        self._put(self._kept[self._in_use])

    def average(self) -> None:
        """Floating-point ones; the others, such as counts, are the first replica's."""
        if self._num_replicas == 1:
            return
        self._keep()
        averaged = dict(self._kept[0])
        for name, buffer in averaged.items():
            if buffer.is_floating_point():
                averaged[name] = torch.stack([kept[name] for kept in self._kept]).mean(0)
        self._put(averaged)

    def _keep(self) -> None:
        self._kept[self._in_use] = {name: buffer.clone() for name, buffer in self._module.stage_buffers()}

    def _put(self, content: Mapping[str, Tensor]) -> None:
        for name, buffer in self._module.stage_buffers():
            buffer.copy_(content[name])


class _Recomputed:
    """One microbatch's forward of a stage that will be done again at newer weights, just before its backward.

    upstream graph -> inputs -> forward, its graph dropped     outputs (leaves) -> downstream graph -> loss
                            \\-> forward again -> its outputs, given the gradients of the leaves
    """

    def __init__(self, stage: _Stage, inputs: Any, targets: Any) -> None:
        self._stage = stage
        self._inputs = inputs
        self._targets = targets
        self._buffers = {name: buffer.clone() for name, buffer in stage.module.named_buffers()}
        with stage.stream:
            self._generators = RngState.capture()
        # A clone: the first layer may work in place.
        outputs = stage.forward(map_tensors(Tensor.clone, inputs), targets)
        self._outputs = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), outputs)

    def outputs(self) -> Any:
        """What goes downstream."""
        return map_tensors(Tensor.clone, self._outputs)

    def backward(self) -> None:
        """After the backward of everything downstream."""
        with generators_kept():
            self._generators.restore()
            outputs = self._stage.forward_again(self._inputs, self._targets, self._buffers)
        roots = [
            (output, leaf.grad)
            for output, leaf in zip(tensors_of(outputs), tensors_of(self._outputs), strict=True)
            if leaf.grad is not None
        ]
        torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])


class _Trainer:
    """Trains minibatch after minibatch."""

    def __init__(
        self,
        stages: list[_Stage],
        versions: _Versions,
        *,
        tied: set[int],
        device: torch.device,
        num_microbatches: int,
        weight_fn: Callable[[Any], Any] | None,
        across_cut: CutFunction | None,
        max_grad_norm: float | None,
        scaler: LossScaler | None,
        sync_every: int,
    ) -> None:
        """tied: ids of the parameters that several stages use."""
        self.versions_read: list[list[tuple[int, int]]] = [[] for _ in stages]
        self._stages = stages
        self._versions = versions
        self._tied = tied
        self._device = device
        self._num_microbatches = num_microbatches
        self._weight_fn = weight_fn
        self._across_cut = across_cut
        self._max_grad_norm = max_grad_norm
        self._scaler = scaler
        self._overflows: set[tuple[int, int]] = set()  # (stage, round)
        self._scale: float | None = None
        self._sync_every = sync_every
        self._histories = {
            id(p): _History(p) for stage in stages for updater in stage.updaters for p in updater.parameters
        }

    def train(self, minibatch: int, inputs: Any, targets: Any) -> float:
        """One minibatch; its loss."""
        pieces = _cut(inputs, targets, self._num_microbatches, minibatch)
        shares = self._shares(pieces, minibatch)
        for stage in self._stages:
            stage.begin(minibatch)
        leaves = self._read(minibatch)
        scale = self._next_scale(minibatch)
        losses = []
        backwards = []
        with self._bound(leaves):
            for (piece, piece_targets), share in zip(pieces, shares, strict=True):
                loss, recomputed = self._forward(minibatch, piece, piece_targets)
                if share == 0:
                    continue  # its loss may be NaN, a mean over nothing
                # A single microbatch is multiplied by nothing, so that it is plain training to the last bit.
                counted = loss if self._num_microbatches == 1 else loss * share
                backwards.append((counted if scale is None else counted * scale, recomputed))
                losses.append(loss.item() * share)
            for stage in self._stages:
                if stage.statistics is not None:
                    stage.statistics.update()
            self._overwrite(minibatch, leaves)
            for root, recomputed in backwards:
                with self._statistics_kept():
                    root.backward()  # type: ignore[no-untyped-call]
                    for stage_again in reversed(recomputed):
                        stage_again.backward()
        self._add_gradients(minibatch, leaves, scale)
        self._update(
            minibatch, [stage_index for stage_index in self._all if self._ends_round(stage_index, minibatch)]
        )
        return sum(losses)

    def finish(self, num_minibatches: int) -> None:
        """The last round is over, however few minibatches it has."""
        begun = [
            stage_index
            for stage_index, stage in enumerate(self._stages)
            if any(updater.num_added for updater in stage.updaters)
        ]
        self._update(num_minibatches - 1, begun)
        for stage in self._stages:
            stage.average()
            stage.buffers.average()

    def _shares(self, pieces: Sequence[tuple[Any, Any]], minibatch: int) -> list[float]:
        """Of the microbatches in the minibatch."""
        if self._weight_fn is None or self._num_microbatches == 1:
            return weights([samples_of(*piece) or 1 for piece in pieces])
        return weights(counts_of(self._weight_fn, [targets for _, targets in pieces], minibatch))

    @contextlib.contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Around a backward, in which layers that checkpoint themselves run again."""
        with contextlib.ExitStack() as around:
            for stage in self._stages:
                if stage.statistics is not None:
                    around.enter_context(stage.statistics.microbatch(collect=False))
            yield

    @contextlib.contextmanager
    def _bound(self, leaves: dict[int, Tensor]) -> Iterator[None]:
        """The layers read the leaves, wherever they hold parameters; in the backward too, where layers that
        checkpoint themselves run again."""
        self._replace(leaves)
        try:
            yield
        finally:
            parameters = {id(p): p for stage in self._stages for p in stage.parameters}
            self._replace({id(leaf): parameters[key] for key, leaf in leaves.items()})

    def _replace(self, others: Mapping[int, Tensor]) -> None:
        """Puts others in the places of the tensors that have these ids."""
        for place in list(places_of(("", stage.module) for stage in self._stages)):
            if id(place.tensor) in others and place.container is not None:
                place.container[place.key] = place.filled(lambda tensor: others.get(id(tensor), tensor))

    def _read(self, minibatch: int) -> dict[int, Tensor]:
        """The leaf of each parameter, by the parameter's id, at the version that the minibatch reads."""
        leaves = {}
        for stage_index, stage in enumerate(self._stages):
            version = self._versions.of_forward(stage_index, minibatch)
            read = (version, self._versions.of_backward(stage_index, minibatch))
            self.versions_read[stage_index].append(read)
            newest = stage.updater_of(minibatch).parameters
            for parameter, of_replica in zip(stage.parameters, newest, strict=True):
                is_tied = id(parameter) in self._tied
                leaves[id(parameter)] = self._histories[id(of_replica)].leaf(
                    self._versions.of_tied(stage_index, minibatch) if is_tied else version
                )
        return leaves

    def _forward(self, minibatch: int, inputs: Any, targets: Any) -> tuple[Tensor, list[_Recomputed]]:
        """The loss of a microbatch, and what is to be recomputed for its backward."""
        recomputed = []
        value = to_device(inputs, self._device)
        targets = to_device(targets, self._device)
        if len(self._stages) > 1:
            # A first layer that works in place must not change the caller's data, which every worker reads
            # for itself. With one stage a plain loop would change them too.
            value = map_tensors(Tensor.clone, value)
        for stage_index, stage in enumerate(self._stages):
            if stage_index > 0 and self._across_cut is not None:
                value = _cross(value, stage_index - 1, stage_index, self._across_cut)
            if stage.recomputes_newest:
                recomputed.append(_Recomputed(stage, value, targets))
                value = recomputed[-1].outputs()
            else:
                # One graph through all stages: each parameter's gradient is at the version its stage read.
                value = stage.forward(value, targets)
        return check_loss(value, minibatch), recomputed

    def _overwrite(self, minibatch: int, leaves: dict[int, Tensor]) -> None:
        """Without stashing the backward finds the newest version where its forward found an older one."""
        for stage_index, stage in enumerate(self._stages):
            if self._versions.of_backward(stage_index, minibatch) == self.versions_read[stage_index][-1][0]:
                continue
            newest = stage.updater_of(minibatch).parameters
            for parameter, of_replica in zip(stage.parameters, newest, strict=True):
                if id(parameter) not in self._tied:
                    # .data: autograd must not see that what it saved has changed.
                    leaves[id(parameter)].data.copy_(of_replica.detach())

    def _next_scale(self, minibatch: int) -> float | None:
        """What float16 multiplies the minibatch's loss by, as the last stage can know it."""
        if self._scaler is None:
            return None
        if minibatch % self._versions.minibatches_per_scale == 0:
            known = self._versions.overflows_known(minibatch)
            self._scale = self._scaler.next_scale(bool(known & self._overflows))
        return self._scale

    @property
    def _all(self) -> range:
        return range(len(self._stages))

    def _ends_round(self, stage_index: int, minibatch: int) -> bool:
        return (minibatch + 1) % self._versions.minibatches_per_round(stage_index) == 0

    def _add_gradients(self, minibatch: int, leaves: dict[int, Tensor], scale: float | None) -> None:
        """Of a minibatch to those of its round, which are in `grad` of the parameters."""
        for stage in self._stages:
            updater = stage.updater_of(minibatch)
            updater.num_added += 1
            for parameter, of_replica in zip(stage.parameters, updater.parameters, strict=True):
                gradient = leaves[id(parameter)].grad
                if gradient is None:
                    continue
                if scale is not None:
                    gradient = gradient / scale
                of_replica.grad = gradient if of_replica.grad is None else of_replica.grad + gradient

    def _update(self, minibatch: int, stages: Sequence[int]) -> None:
        """Of these stages, whose round ends with the minibatch."""
        for updater in itertools.chain(*(self._stages[stage_index].updaters for stage_index in stages)):
            # A single minibatch is divided by nothing, so that it is plain training to the last bit.
            for parameter in updater.parameters:
                if parameter.grad is not None and updater.num_added > 1:
                    parameter.grad /= updater.num_added
        skipped = self._overflowed_stages(minibatch, stages) if self._scaler is not None else set()
        self._clip(stages)
        for stage_index in stages:
            stage = self._stages[stage_index]
            for updater in stage.updaters:
                if stage_index not in skipped and updater.num_added > 0:
                    updater.step()
                updater.num_added = 0
            num_rounds = minibatch // self._versions.minibatches_per_round(stage_index) + 1
            if num_rounds % self._sync_every == 0:
                stage.average()
            for parameter in itertools.chain(*(updater.parameters for updater in stage.updaters)):
                parameter.grad = None
                self._histories[id(parameter)].add()

    def _overflowed_stages(self, minibatch: int, stages: Sequence[int]) -> set[int]:
        """Those of the stages, whose round ends with the minibatch, that skip their update. Where the
        pipeline drains, one's overflow is everybody's."""
        overflowed = {
            stage_index
            for stage_index in stages
            for p in self._stages[stage_index].parameters
            if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        }
        if overflowed and self._versions.drains:
            overflowed = set(stages)
        self._overflows |= {
            (stage_index, minibatch // self._versions.minibatches_per_round(stage_index))
            for stage_index in overflowed
        }
        return overflowed

    def _clip(self, stages: Sequence[int]) -> None:
        if self._max_grad_norm is None:
            return
        together = [self._stages[stage_index].parameters for stage_index in stages]
        if self._versions.drains:
            together = [list(itertools.chain(*together))]
        for parameters in together:
            torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)


class _MinibatchStatistics:
    """Batch norms of a stage under microbatches: each microbatch is normalised by its own statistics, and the
    running ones take one step per minibatch, by the mean and variance over all its microbatches.

    Source: GPipe (NeurIPS'19), section 2.2.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
        self._inputs: dict[_BatchNorm, list[Tensor]] = {}

    @contextlib.contextmanager
    def microbatch(self, *, collect: bool) -> Iterator[None]:
        """Around a forward; collect: its inputs count."""
        tracking = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        hooks = [norm.register_forward_pre_hook(self._collect) for norm in tracking if collect]
        for norm in tracking:
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm in tracking:
                norm.track_running_stats = True
            for hook in hooks:
                hook.remove()

    def _collect(self, norm: Any, arguments: tuple[Any, ...]) -> None:
        self._inputs.setdefault(norm, []).append(arguments[0].detach().clone())

    def update(self) -> None:
        for norm, inputs in self._inputs.items():
            assert norm.running_mean is not None
            momentum = norm.momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked += 1
                if momentum is None:
                    momentum = 1 / float(norm.num_batches_tracked)
            # (samples, channels): positions of an image count as samples too.
            values = torch.cat([x.transpose(0, 1).flatten(1) for x in inputs], dim=1).t()
            with torch.no_grad():
                F.batch_norm(
                    values.to(norm.running_mean.dtype),
                    norm.running_mean,
                    norm.running_var,
                    training=True,
                    momentum=momentum or 0.0,
                )
        self._inputs.clear()


def _owned_parameters(module: StageModule, ties: Sequence[Tie]) -> list[tuple[str, nn.Parameter]]:
    """(full name, parameter) of what the stage updates: all it uses, but those tied to a stage upstream."""
    owner = {id(tie.parameter): tie.stages[0] for tie in ties}
    stage_index = module.stage_index
    return [
        (name, p) for name, p in module.trainable_parameters() if owner.get(id(p), stage_index) == stage_index
    ]


def _cut(inputs: Any, targets: Any, num_microbatches: int, minibatch: int) -> list[tuple[Any, Any]]:
    """(inputs, targets) of each microbatch. Raises ValueError for what cannot be cut alike."""
    count = samples_of(inputs, targets)
    input_pieces, target_pieces = (
        chunk(value, num_microbatches, name=name, minibatch=minibatch, num_samples=count)
        for name, value in (("the inputs", inputs), ("the targets", targets))
    )
    check_alike(inputs, targets, num_microbatches, minibatch=minibatch)
    return list(zip(input_pieces, target_pieces, strict=True))


def _check_microbatches(
    schedule: str, microbatches: int, in_flight: Sequence[int], num_replicas: Sequence[int]
) -> None:
    check_count("microbatches", microbatches)
    if schedule != "2bw":
        return
    needed = [held * replicas for held, replicas in zip(in_flight, num_replicas, strict=True)]
    most = max(needed)
    if microbatches < most:
        stage = "the first stage" if needed[0] == most else f"stage {needed.index(most)}"
        raise ValueError(
            f"microbatches is {microbatches}, but schedule '2bw' has {most} of them in flight at {stage}: use"
            f" microbatches={most} or more"
        )


def _check_replicas(schedule: str, num_replicas: Sequence[int], sync: str, staleness: int) -> None:
    check_choice("schedule", schedule, _SCHEDULES)
    if sync == "asp":
        raise ValueError("sync is 'asp': what it reads depends on who is faster, which no reference can say")
    check_choice("sync", sync, ("bsp", "ssp", "allreduce"))
    check_whole("staleness", staleness, at_least=0)
    if staleness and (sync != "ssp" or schedule != "pipedream"):
        raise ValueError(
            f"staleness is {staleness} with sync {sync!r} and schedule {schedule!r}: it goes with sync='ssp'"
            " and schedule='pipedream'"
        )
    if schedule == "data_parallel" and len(num_replicas) > 1:
        raise ValueError(f"schedule 'data_parallel' has one stage, and the plan has {len(num_replicas)}")
    if schedule == "interleaved" and max(num_replicas) > 1:
        raise ValueError(
            "schedule 'interleaved' runs one replica of each stage: use partition(..., straight=True)"
        )


def _check_sync_every(
    sync_every: int, num_replicas: Sequence[int], sync: str, max_grad_norm: float | None, autocast: Any
) -> None:
    check_count("sync_every", sync_every)
    if sync_every == 1 or max(num_replicas) == 1:
        return
    if sync == "ssp":
        raise ValueError(f"sync_every is {sync_every} with sync 'ssp': it goes with 'bsp' and 'allreduce'")
    if max_grad_norm is not None or autocast_dtype(autocast) == torch.float16:
        what = "max_grad_norm" if max_grad_norm is not None else "autocast 'float16'"
        raise ValueError(
            f"sync_every is {sync_every} with {what}, but replicas that update alone have no common gradient"
        )


def _check_ties(ties: Sequence[Tie]) -> None:
    """Raises ValueError for what replicas that update alone cannot train."""
    if ties:
        raise ValueError(
            f"stages {ties[0].stages} share a parameter, and replicas that update alone (sync_every above 1)"
            " would each have another: leave sync_every out"
        )


def _recomputed_stages(recompute: bool | Sequence[int] | None, num_stages: int) -> set[int]:
    if recompute is None or isinstance(recompute, bool):
        return set(range(num_stages)) if recompute else set()
    for stage_index in recompute:
        if not 0 <= stage_index < num_stages:
            raise ValueError(
                f"recompute names stage {stage_index}, but the plan has stages 0 to {num_stages - 1}"
            )
    return set(recompute)


def _make_optimizer(
    optimizer: OptimizerFactory, named_parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer of one stage. It is called with a list of its parameters, or with a list of (name,
    parameter) pairs when its first argument is called `named_parameters`.

    Raises TypeError for what does not give a torch.optim.Optimizer.
    """
    if not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}: give a function of the parameters, for example "
            f"functools.partial(torch.optim.SGD, lr=0.05)"
        )
    wants_names = _first_argument(optimizer) == "named_parameters"
    made = optimizer(
        list(named_parameters) if wants_names else [parameter for _, parameter in named_parameters]
    )
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer returned a {type(made).__name__}: return a torch.optim.Optimizer")
    return made


def _first_argument(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):  # a builtin without a signature
        return None


@contextlib.contextmanager
def _random_streams(
    num_stages: int, num_workers: int, seed: int | None
) -> Iterator[Sequence[MinibatchStreams | None]]:
    if num_workers == 1:
        if seed is not None:
            seed_all(seed)
        yield [None]
        return
    base = base_seed(seed)
    caller_state = RngState.capture()
    try:
        seed_all(data_seed(base))
        yield [MinibatchStreams(stage_seed(base, stage_index)) for stage_index in range(num_stages)]
    finally:
        caller_state.restore()


def _minibatches(data: Iterable[Any], epochs: int) -> Iterator[tuple[Any, Any]]:
    minibatch = 0
    for epoch in range(epochs):
        first_of_epoch = minibatch
        for batch in data:
            yield parts_of(batch, minibatch)
            minibatch += 1
        if minibatch == first_of_epoch:
            raise ValueError(
                f"data yielded nothing in epoch {epoch}: give data that can be iterated once per epoch, as a "
                f"DataLoader or a list"
            )
