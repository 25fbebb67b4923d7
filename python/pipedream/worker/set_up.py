"""The set-up of a worker measures the stages, so that the worker's pool and channels can be planned.

    read      the first minibatch, at workers that read data, before any link is open
    share     rank 0 sends its initial weights to all ranks
    rehearse  each worker runs its stages on the first microbatch, and measures them

The set-up has its own links. The channels of the training depend on the tensors that cross the cuts, and the
pool depends on the optimizers' state. Both are not known before. If a minibatch is larger than planned,
workers rehearse again with that minibatch. OwnPart is the part of the model that the worker has in memory.
Runs on the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pipedream import _core
from pipedream.budget.evaluation_rehearsal import RehearsedEvaluation, rehearse_evaluation
from pipedream.budget.footprint import Footprint
from pipedream.budget.offload import forced_offload
from pipedream.budget.rehearsal import Handover, Rehearsal
from pipedream.checkpoint.state import receive_values, relay_state, send_state, set_state
from pipedream.common.microbatches import Microbatches
from pipedream.common.rank_tree import children_of, parent_of, subtree_of
from pipedream.data.enlarged import enlarged, shaped
from pipedream.data.first_minibatch import first_of
from pipedream.data.stream import DataStream, LargerMinibatch, MinibatchStream, fingerprint
from pipedream.links.channels import channels_of_run, set_up_channels, tree_name
from pipedream.model.batches import first_microbatch, parts_of
from pipedream.model.boundary import Boundary, device_of
from pipedream.model.initial_weights import materialise_some
from pipedream.model.microbatch import check_alike, chunk, lists_samples, samples_of
from pipedream.model.seeding import evaluation_seed, generators_kept, seed_all
from pipedream.model.stand_ins import poisoned
from pipedream.planning.codec_choice import pushes_factors
from pipedream.planning.shapes import (
    Shapes,
    cover,
    describe_shapes,
    largest_of,
    next_kind,
    shapes_of_parts,
)
from pipedream.report.first_figures import FirstFigures
from pipedream.stage.stage_runner import data_mismatch
from pipedream.worker.agreed_run import AgreedRun, wait_for
from pipedream.worker.worker_links import WorkerLinks

__all__ = ["OwnPart", "Rehearsed", "rehearse_again", "set_up"]

_log = logging.getLogger("pipedream")


@dataclass(frozen=True)
class Rehearsed:
    """The facts that this worker knows about its stages before it trains."""

    boundaries: dict[int, Boundary] = field(default_factory=dict)
    """The tensors that cross at both ends of this worker's stages, by the stage upstream of the cut."""
    footprints: dict[int, Footprint] = field(default_factory=dict)
    """The memory that each stage needs, by stage index."""
    input_boundary: Boundary | None = None
    """The tensors of a whole minibatch's inputs. Larger inputs make the run plan its memory again. None if
    this worker reads no data, if a Boundary cannot describe the inputs, or if memory does not depend on their
    sizes."""
    kinds: tuple[Shapes, ...] = ()
    """The shapes of minibatches that were rehearsed, at workers that read data. There is one kind of shapes
    unless the plan has shapes_apart."""
    in_microbatches: bool = False
    """Whether the data yield Microbatches."""
    evaluation: RehearsedEvaluation = field(default_factory=RehearsedEvaluation)
    """The rehearsal of the eval-mode forward."""

    def or_as(self, other: Rehearsed) -> Rehearsed:
        """Returns facts that hold for minibatches of this object's kinds and of other's kinds."""
        boundaries = {cut: known.or_as(other.boundaries[cut]) for cut, known in self.boundaries.items()}
        footprints = {stage: known.or_as(other.footprints[stage]) for stage, known in self.footprints.items()}
        inputs = self.input_boundary
        if inputs is not None and other.input_boundary is not None:
            inputs = inputs.or_as(other.input_boundary)
        kinds = [kind for kind in self.kinds if not cover(other.kinds, kind)]
        return replace(
            self,
            boundaries=boundaries,
            footprints=footprints,
            input_boundary=inputs,
            kinds=(*kinds, *other.kinds),
        )


def set_up(
    run: AgreedRun, links: WorkerLinks, device: torch.device, stream: MinibatchStream, part: OwnPart
) -> Rehearsed:
    """Reads, shares and rehearses. Afterwards this worker's stages have rank 0's weights, the parameters of
    other stages are left out (OwnPart), and the links of the set-up are closed."""
    rendezvous = run.place.rendezvous
    rendezvous.enter("reading the first minibatch")
    kinds = _read_first_microbatches(run, stream)
    held_out = _read_first_validation(run)
    rendezvous.enter("sharing the initial weights")
    core = _open_links(run, links, device)
    with links.explained():
        _share_initial_weights(run, core)
        part.leave_out_others()
        rendezvous.enter("rehearsing")
        each = [_rehearse(run, core, device, first) for first in kinds]
        rehearsed = functools.reduce(Rehearsed.or_as, each)
        if run.options.validation is not None:
            evaluation = _rehearse_evaluation(run, core, device, *held_out)
            rehearsed = replace(rehearsed, evaluation=evaluation)
        if core is not None:
            links.wait_until_sent()
    links.close()
    _tell_of_draws(run, rehearsed)
    return rehearsed


def _tell_of_draws(run: AgreedRun, rehearsed: Rehearsed) -> None:
    for stage, footprint in rehearsed.footprints.items():
        if footprint.foreign_draws and run.plan.workers_used > 1:
            _log.warning(
                "%s draws from %s in its forward, which belongs to the data: all stages draw the same numbers"
                " from it, and not those of a run on one worker; draw from torch, as torch.rand() does",
                run.plan.describe_worker(run.rank, stage),
                " and ".join(footprint.foreign_draws),
            )


def rehearse_again(
    run: AgreedRun,
    links: WorkerLinks,
    device: torch.device,
    before: Rehearsed,
    minibatch: int,
    larger: LargerMinibatch | None,
) -> Rehearsed:
    """Rehearses the partly trained stages for a larger minibatch. Returns facts that hold for this minibatch
    and for all earlier rehearsals. minibatch: its number. larger: its sizes, if this worker reads data."""
    first = _FirstMicrobatch(name=f"minibatch {minibatch}")
    are_apart = bool(run.plan.shapes_apart)
    if larger is not None:
        shapes = next_kind(before.kinds, larger.shapes, are_apart=are_apart)
        first = _first_microbatch(run, larger.inputs, larger.targets, shapes, minibatch)
    core = _open_links(run, links, device)
    with links.explained():
        rehearsed = _rehearse(run, core, device, first)
        if core is not None:
            links.wait_until_sent()
    links.close()
    return before.or_as(rehearsed) if are_apart else replace(rehearsed, evaluation=before.evaluation)


@dataclass(frozen=True)
class _FirstMicrobatch:
    """The first microbatch of a minibatch whose tensors were brought to planned sizes. It is empty at ranks
    that read no data."""

    inputs: Any = None
    targets: Any = None
    input_boundary: Boundary | None = None
    """`input_boundary` and `kinds` are as in Rehearsed."""
    kinds: tuple[Shapes, ...] = ()
    name: str = "the first minibatch"
    in_microbatches: bool = False


def _read_first_microbatches(run: AgreedRun, stream: MinibatchStream) -> list[_FirstMicrobatch]:
    """Returns the first microbatch, followed by one microbatch of each kind in the plan's shapes_apart."""
    # The data are read before any link is open, because a DataLoader starts its processes now. They would
    # inherit open sockets, and a peer that closes such a link would wait for these processes to close it,
    # too.
    kinds = run.plan.shapes_apart
    if not (run.reads_inputs or run.reads_targets):
        return [_FirstMicrobatch()] * (1 + len(kinds))
    first = stream.peek()
    found = fingerprint(*first)
    if isinstance(stream, DataStream):
        _check_alike_at_all(run, found)
    if run.place.folder is not None and run.reads_targets and run.plan.replica_of(run.rank) == 0:
        FirstFigures(run.place.folder).write_fingerprint(found)
    of_kinds = [_first_microbatch(run, *first, shapes, 0, is_kind=True) for shapes in kinds]
    return [_first_microbatch(run, *first, run.plan.max_shapes, 0), *of_kinds]


def _check_alike_at_all(run: AgreedRun, found: int) -> None:
    """Raises DataMismatch if this worker's first minibatch is not rank 0's. Between two stages each minibatch
    is compared, but replicas of a stage receive nothing that tells them what another replica reads."""
    key = "first minibatch"
    if run.rank == 0:
        run.place.rendezvous.publish(key, found)
    elif wait_for(run.place.rendezvous, [key], lambda _: "rank 0 read no minibatch") != [found]:
        raise data_mismatch(0, run.plan.describe_worker(run.rank))


def _read_first_validation(run: AgreedRun) -> tuple[Any, Any]:
    """Returns (inputs, targets) of a validation minibatch, at workers that read data. If the validation data
    are a list, the tensors have the largest sizes in the list."""
    validation = run.options.validation
    if validation is None or not (run.reads_inputs or run.reads_targets):
        return None, None
    with generators_kept():
        seed_all(evaluation_seed(run.base_seed))
        first = parts_of(first_of(validation.data), 0)
    if isinstance(validation.data, (list, tuple)):
        return enlarged(*first, largest_of(validation.data, {}))
    return first


def _rehearse_evaluation(
    run: AgreedRun, core: _core.Worker | None, device: torch.device, inputs: Any, targets: Any
) -> RehearsedEvaluation:
    options = run.options
    assert options.validation is not None
    return rehearse_evaluation(
        _handover(run, core),
        run.own_evaluated_stages(),
        inputs,
        targets,
        device=device,
        loss_fn=options.loss_fn,
        metrics={} if options.validation.outputs else options.validation.metrics,
        autocast=options.autocast,
        describe=functools.partial(run.plan.describe_worker, run.rank),
    )


def _handover(run: AgreedRun, core: _core.Worker | None, *, in_microbatches: bool = False) -> Handover:
    replica = run.plan.replica_of(run.rank) if run.own_stages() else 0
    return Handover(core, run.options.plan.placement, replica, in_microbatches=in_microbatches)


def _first_microbatch(
    run: AgreedRun,
    inputs: Any,
    targets: Any,
    shapes: Mapping[str, tuple[int, ...]],
    minibatch: int,
    *,
    is_kind: bool = False,
) -> _FirstMicrobatch:
    """Makes the first microbatch of the minibatch. It is at least as large as `shapes`, or exactly as large
    if is_kind."""
    m = run.options.microbatches
    own_shapes = shapes_of_parts(inputs, targets)
    inputs, targets = (shaped if is_kind else enlarged)(inputs, targets, shapes)
    made_shapes = shapes_of_parts(inputs, targets)
    at_sizes = ""
    if made_shapes != own_shapes:
        what = "the sizes of one of shapes_apart" if is_kind else "the largest sizes of any"
        largest = "" if is_kind else _largest_of(run.options.largest_in)
        at_sizes = f" at {what} ({describe_shapes(made_shapes)}{largest})"
    which = f"{minibatch}{at_sizes}"
    boundary: Boundary | None = None
    check_alike(inputs, targets, m, minibatch=which)
    in_microbatches = isinstance(inputs, Microbatches)
    if in_microbatches:  # enlarged() or shaped() has given all of them the same sizes
        inputs, targets, m = first_microbatch(inputs), first_microbatch(targets), 1
    count = samples_of(inputs, targets)
    # Inputs that cannot cross a cut are allowed, because they stay here.
    with contextlib.suppress(ValueError):
        # With one stage, the sizes of the inputs matter only to a memory limit and to gradients as factors.
        is_limited = run.options.memory.limit_bytes is not None or bool(_stages_with_factors(run))
        # No boundary describes a list of samples, because each minibatch has other entries.
        if (len(run.stages) > 1 or is_limited) and not lists_samples(inputs, count):
            boundary = Boundary.of(inputs, name="the inputs")
    first_inputs = chunk(inputs, m, name="the inputs", minibatch=which, num_samples=count)[0]
    first_targets = chunk(targets, m, name="the targets", minibatch=which, num_samples=count)[0]
    name = f"minibatch {which}" if minibatch > 0 else f"{_FirstMicrobatch.name}{at_sizes}"
    return _FirstMicrobatch(first_inputs, first_targets, boundary, (made_shapes,), name, in_microbatches)


def _largest_of(largest_in: Mapping[str, int]) -> str:
    """Returns text such as "; minibatch 3 has the largest inputs, targets"."""
    named = {
        place: [name for name in largest_in if largest_in[name] == place] for place in largest_in.values()
    }
    return "".join(
        f"; minibatch {place} has the largest {', '.join(named[place])}" for place in sorted(named)
    )


def _open_links(run: AgreedRun, links: WorkerLinks, device: torch.device) -> _core.Worker | None:
    """Opens the links of the set-up. Returns None if the plan has one worker, or if the plan does not use
    this rank."""
    num_workers = run.plan.workers_used
    if num_workers == 1 or run.rank >= num_workers:
        return None
    core = links.make_core(run.linked, device)
    channels = set_up_channels(run.plan)
    for channel in channels:
        channel.add_to(core, run.rank, run.plan.describe_worker)
    core.seal()
    if run.links.ports is not None:  # too few ports for the training are reported now, not later
        codec = run.links.codec
        of_run = channels_of_run(run.plan, run.schedule(), run.place.world_size, {}, (), None, codec=codec)
        links.check_ports(run.linked, channels, of_run)
    links.connect(run.linked, channels, run.key("endpoints for the set-up"))
    return core


def _share_initial_weights(run: AgreedRun, core: _core.Worker | None) -> None:
    """Gives all ranks rank 0's initial weights. This must happen before the pool is planned, because
    optimizers are constructed from the weights. Local workers need no transfer, because all have read the
    caller's weights. If the model was on the meta device, each worker has made its own weights."""
    if core is None or not run.place.returns_model:
        return
    rank, num_ranks = run.rank, run.plan.workers_used
    above = "" if rank == 0 else tree_name(parent_of(rank), rank)
    for stage in run.held_stages_of(rank) if above else []:
        set_state(stage, receive_values(core, above))
    for child in children_of(rank, num_ranks):
        for other in subtree_of(child, num_ranks):
            for stage in run.held_stages_of(other):
                if above:
                    relay_state(core, above, tree_name(rank, child))
                else:
                    send_state(core, tree_name(rank, child), stage)


def _rehearse(
    run: AgreedRun, core: _core.Worker | None, device: torch.device, first: _FirstMicrobatch
) -> Rehearsed:
    options = run.options
    handover = _handover(run, core, in_microbatches=first.in_microbatches)
    rehearsal = Rehearsal(
        handover,
        device,
        describe=functools.partial(run.plan.describe_worker, run.rank),
        name=first.name,
        loss_fn=options.loss_fn,
        autocast=options.autocast,
        repeats=options.microbatches > 1 or _adds_minibatches(run),
        for_offload=options.memory.limit_bytes is not None or forced_offload().activations,
        for_factors=_stages_with_factors(run),
        for_recompute=_stages_that_may_recompute(run),
    )
    rehearsal.run(run.own_stages(), first.inputs, first.targets)
    return Rehearsed(
        rehearsal.boundaries,
        rehearsal.footprints,
        first.input_boundary,
        first.kinds,
        handover.in_microbatches,
    )


def _stages_with_factors(run: AgreedRun) -> list[int]:
    """Returns the stages whose replicas push gradients as factors where possible (update/factors.py)."""
    stages = range(run.plan.num_stages) if pushes_factors(run.options.links.codec) else ()
    return [stage for stage in stages if run.plan.stages[stage].num_replicas > 1]


def _stages_that_may_recompute(run: AgreedRun) -> list[int]:
    recompute = run.options.memory.recompute
    if recompute is None:
        return list(range(run.plan.num_stages)) if run.options.memory.limit_bytes is not None else []
    return [stage for stage in range(run.plan.num_stages) if recompute[stage]]


def _adds_minibatches(run: AgreedRun) -> bool:
    """Whether a replica has several minibatches in a round at one of this worker's stages. Their gradients
    are then summed."""
    schedule, stages = run.schedule(), run.plan.stages
    own = run.plan.stages_of(run.rank)
    return any(_core.rounds_of(schedule, s).minibatches_per_round > stages[s].num_replicas for s in own)


class OwnPart:
    """The part of the model that a worker has in memory on its device: its own stages. A spare has the stage
    of its shard.

        place()              gives initial values to tensors on the meta device; moves all to the device
        leave_out_others()   replaces parameters of other stages by NaN, because they are never updated here;
                             if code outside of module calls uses them, the loss becomes NaN
        take_back_others()   puts the user's parameters back
        give_back()          moves the model back to the device where the user has it
    """

    def __init__(self, run: AgreedRun, device: torch.device) -> None:
        self._stages = run.held_stages_of(run.rank)
        self._run = run
        self._device = device
        self._returns = run.place.returns_model
        self._given_on = torch.device("cpu")
        self._others = contextlib.ExitStack()

    def place(self) -> None:
        roots = list({id(root): (name, root) for s in self._stages for name, root in s.roots()}.values())
        names = {name for stage in self._stages for name in stage.held_names()}
        materialise_some(roots, names, self._run.options.weights, self._run.base_seed)
        given_on = device_of(self._stages)
        self._given_on = torch.device("cpu") if given_on.type == "meta" else given_on
        for stage in self._stages:
            stage.place(self._device)

    def leave_out_others(self) -> None:
        own = {id(p) for s in self._stages for _, p in (*s.trainable_parameters(), *s.frozen_parameters())}
        others = {id(p): p for stage in self._stages for p in stage.others_parameters() if id(p) not in own}
        strays = [tensor for stage in self._stages for tensor in stage.strays()]
        self._others.enter_context(poisoned(others.values(), self._device, strays))

    def take_back_others(self) -> None:
        self._others.close()

    def give_back(self) -> None:
        self.take_back_others()
        for stage in self._stages if self._returns else ():
            stage.place(self._given_on)
