"""Lists the channels of a run. A channel carries items from one rank to another.

- An item is the group of tensors that one send carries, such as the activations of one microbatch.
- An edge (csrc/schedule/edge.h) is a pair of workers and the kind of items that the schedule sends from one
  to the other. Each edge between two ranks has a channel.
- A round (csrc/schedule/rounds.h) is the minibatches whose gradients make one update of a stage.
- The caller is the process that called run(). It forwards data if the workers cannot read the data
  themselves.

Every channel has a name and a channel_id. Both are unique among the channels of the set-up, and again among
those of the training, which open later. Workers and the caller compute the ids separately and must get the
same ids. In the training the channels from the caller have the first ids, from 0 on. These ids are reserved
even if the caller forwards no data, because not every worker knows whether it does. Plain values; any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipedream import _core
from pipedream.common.rank_tree import NUM_PIECES, PIECE_BYTES, parent_of
from pipedream.data.stream import ForwardedData
from pipedream.model.boundary import Boundary
from pipedream.model.layers import dtype_name
from pipedream.model.tensor_spec import TensorSpec
from pipedream.planning.codec_choice import (
    NO_CODEC,
    CodecChoice,
    codec_between,
    codec_of_pushes,
    pushes_factors,
)
from pipedream.planning.plan import Plan

__all__ = [
    "BETWEEN_REPLICAS",
    "CALLER",
    "INPUTS",
    "NUM_TRANSFERS_KEPT",
    "TARGETS",
    "RunChannel",
    "ShardSpec",
    "TieSpec",
    "channels_of_run",
    "data_channels",
    "edge_name",
    "factors_name",
    "forwarded_name",
    "num_of_edge_in_flight",
    "rehearsal_name",
    "set_up_channels",
    "tree_name",
]

# The gradient item of a cut where no activation needs a gradient. Its arrival tells the stage upstream that
# the backward is done.
_NO_GRADIENT = TensorSpec(torch.uint8, (1,), requires_grad=False)

# A replica that has no piece of a tied weight to send sends this tensor instead.
_NO_PIECE = TensorSpec(torch.uint8, (1,), requires_grad=False)

INPUTS = "inputs from the caller"
TARGETS = "targets from the caller"
# Each end of a channel stores the times of the 16,384 newest items for the trace, in at most 1 MiB.
NUM_TRANSFERS_KEPT = 1 << 14
# A channel of the set-up has two slots of 1 MiB: one is filled while the other is read. More slots would make
# the set-up of small models slower, because the pages of every slot are touched.
_NUM_SET_UP_SLOTS = 2
# The first words of a channel's name, by the kind of its edge.
_CARRIED = {
    "activation": "activations",
    "gradient": "gradients",
    "tied_gradient": "tied gradients",
    "tied_version": "tied weights",
    "norm": "gradient norm",
    "push": "pushed gradients",
    "pull": "pulled weights",
    "evaluation": "validation activations",
}
BETWEEN_REPLICAS = ("push", "pull")
"""The kinds of edges that carry shards between replicas. Each item is one chunk of a shard, so one SEND of
the program is several items."""
CALLER = -1  # the sender's "rank" of a channel from the caller


@dataclass(frozen=True)
class TieSpec:
    """The facts that channels need about a tied parameter, which several stages share. stages[0] owns it: it
    updates the parameter and sends the new versions to the other stages."""

    stages: tuple[int, ...]
    spec: TensorSpec
    pieces: tuple[tuple[TensorSpec, ...], ...] = ()
    """The pieces of the parameter that each replica of the owner sends, by replica. If it is empty, every
    replica sends the whole parameter."""


@dataclass(frozen=True)
class ShardSpec:
    """The facts about one shard that the channels between replicas need."""

    num_chunks: int
    chunk_bytes_max: int
    num_pieces_max: int
    """The largest number of pieces in one chunk."""
    dtype: torch.dtype = torch.uint8
    """The dtype of the shard's elements; uint8 if they have several dtypes."""
    whole_bytes: int = 0
    """Bytes of all chunks together, if each chunk is a whole tensor; otherwise 0."""
    factors: tuple[TensorSpec, ...] = ()
    """The factors that the replicas of the stage send each other instead of some weights' gradients. Each of
    these weights has two: the gradients of its layer's outputs, then the layer's inputs."""


def factors_name(push: _core.Edge, placement: _core.Placement) -> str:
    """Returns the name of the channel that carries factors between two replicas. `push` is the edge that
    carries these replicas' gradients."""
    return edge_name(push, placement).replace(_CARRIED["push"], "pushed factors", 1)


def edge_name(edge: _core.Edge, placement: _core.Placement) -> str:
    """Returns the name of the edge's channel, such as "activations of stage 0 to stage 1". If stage 0 has
    replicas, it is for example "activations of stage 0 replica 1 to stage 1"."""
    ends = [(edge.from_stage, edge.from_replica), (edge.to_stage, edge.to_replica)]
    named = [_name_of_end(stage, replica, placement.num_replicas(stage)) for stage, replica in ends]
    return f"{_CARRIED[edge.kind]} of {named[0]} to {named[1]}"


def _name_of_end(stage: int, replica: int, num_replicas: int) -> str:
    if replica >= num_replicas:
        return f"stage {stage} spare {replica - num_replicas}"
    return f"stage {stage} replica {replica}" if num_replicas > 1 else f"stage {stage}"


def tree_name(sender: int, receiver: int) -> str:
    return f"weights and result, rank {sender} to rank {receiver}"


def rehearsal_name(stage_index: int, replica: int = 0) -> str:
    """Returns the name of the channel on which a stage sends its outputs downstream in the rehearsal
    (budget/rehearsal.py). replica: the receiver's index in its stage."""
    return f"rehearsal of stage {stage_index} for stage {stage_index + 1}" + _replica_suffix(replica)


@dataclass(frozen=True)
class RunChannel:
    """A directed channel between two ranks."""

    name: str
    channel_id: int
    """The channel's number; -1 until _numbered() sets it."""
    sender: int
    receiver: int
    tensors: list[tuple[str, int, int]]
    """The tensors of one item: (dtype name, number of dimensions, the most bytes). It is empty at a worker
    that has neither end of the channel and does not know the tensors."""
    num_slots: int
    """Slots at the receiver. Each holds one received item until the receiver has used the item."""
    num_unsent_max: int
    """The most items that may wait at the sender or be on the way to the receiver."""
    num_microbatches: int = 1
    """Microbatches per minibatch; 1 if minibatches are not cut."""
    on_device: bool = True
    codec: str = NO_CODEC
    """The codec of the item's float tensors."""
    edge: _core.Edge | None = None
    """The edge whose items the channel carries; None if the schedule does not know the channel."""
    first_microbatch: int = 0
    """The microbatch of the first item, counted through the run. A channel without an edge numbers its items
    0, 1, 2, ..."""
    microbatch_stride: int = 1
    """The difference between the microbatch numbers of two consecutive items."""
    num_transfers_kept: int = 0
    """Each end stores the times of this number of newest items. If the number is 0, the core's
    wait_for_transfers() does not wait for this channel."""
    num_residuals: int = 1
    """The number of sets of residuals (residuals.py) of the codec. Consecutive items use the sets in turn."""
    posted_into: str = ""
    """The name of the receiver's memory term (budget/memory.py) into which items are received directly; "" if
    they are received into slots."""
    places_on_device: bool = False
    """Whether the sender writes into the receiver's device memory. device_memory.py tests that it can."""

    @property
    def stages(self) -> tuple[int, int] | None:
        """The stages of sender and receiver if the channel carries activations or gradients; otherwise
        None."""
        if self.edge is None or self.edge.kind not in ("activation", "gradient"):
            return None
        return self.edge.from_stage, self.edge.to_stage

    @property
    def codec_used(self) -> str:
        """The codec if some tensor of the channel is sent encoded, otherwise "none"."""
        return self.codec if self.is_encoded else NO_CODEC

    @property
    def is_encoded(self) -> bool:
        return bool(_core.channel_bytes(self.tensors, self.codec)[3])

    def add_to(self, core: _core.Worker, rank: int, describe_worker: Callable[[int], str]) -> None:
        """Adds the rank's end of the channel to the rank's core. Does nothing if the rank has neither end.

        describe_worker: returns the name of a rank for errors."""
        if rank not in (self.sender, self.receiver):
            return
        sends = rank == self.sender
        peer = self.receiver if sends else self.sender
        core.add_channel(
            name=self.name,
            sends=sends,
            peer="the caller" if peer == CALLER else describe_worker(peer),
            channel_id=self.channel_id,
            tensors=self.tensors,
            num_items=self.num_unsent_max if sends else self.num_slots,
            first_microbatch=self.first_microbatch,
            microbatch_stride=self.microbatch_stride,
            num_microbatches=self.num_microbatches,
            on_device=self.on_device,
            codec=self.codec,
            places_on_device=self.places_on_device,
            num_transfers_kept=self.num_transfers_kept,
            num_residuals=self.num_residuals,
            posted_into="" if sends else self.posted_into,
            num_posts_max=self.num_unsent_max if self.posted_into and not sends else 0,
        )


def _channel(
    name: str, ends: tuple[int, int], specs: Iterable[TensorSpec], *, slots: int, unsent: int, **fields: Any
) -> RunChannel:
    """Makes a channel without a number. ends: the ranks of sender and receiver. specs: the tensors of one
    item. fields: further fields of RunChannel."""
    tensors = [(dtype_name(s.dtype), len(s.shape), s.num_bytes) for s in specs]
    return RunChannel(name, -1, *ends, tensors, slots, unsent, **fields)


def _bulk_channel(name: str, ends: tuple[int, int], slots: int, **fields: Any) -> RunChannel:
    """Makes a channel on which state_transfer.py sends tensors and documents in pieces."""
    piece = [TensorSpec(torch.uint8, (PIECE_BYTES,), requires_grad=False)]
    return _channel(name, ends, piece, slots=slots, unsent=slots, on_device=False, **fields)


def _numbered(channels: Iterable[RunChannel], first_id: int = 0) -> list[RunChannel]:
    """Returns the channels with consecutive ids. The first channel has first_id."""
    return [replace(channel, channel_id=index) for index, channel in enumerate(channels, first_id)]


def channels_of_run(
    plan: Plan,
    schedule: _core.ScheduleOptions,
    world_size: int,
    boundaries: Mapping[int, Boundary],
    ties: Sequence[TieSpec],
    forwarded: ForwardedData | None,
    *,
    codec: CodecChoice,
    shards: Mapping[tuple[int, int], ShardSpec] | None = None,
    evaluated: Mapping[int, Boundary] | None = None,
) -> list[RunChannel]:
    """Returns all channels of a run: the channels of the edges, the channels for data, and the channels of
    the tree of ranks for final weights and results.

    Every worker's list has the same channels with the same ids, but a worker that reads no data has no
    channels from the caller. A worker knows a channel's tensors only where they concern its own stages.

    boundaries: the tensors of the cuts at this worker's stages, by the stage upstream of the cut.
    forwarded: None if the caller forwards nothing, or if this worker reads no data.
    codec: applied to activations, gradients and pushes. Weights and the gradients of tied weights travel
        exactly.
    shards: the shards of this worker's stage if it has replicas, by (stage, replica).
    evaluated: the tensors of the same cuts in an evaluation, where the model is in eval mode."""
    found: list[RunChannel] = []
    for edge in sorted(_core.edges_of(schedule), key=_place_in_list):
        sender, receiver = _ranks_of_ends(schedule, edge)
        if sender != receiver:
            if edge.kind in BETWEEN_REPLICAS:
                found += _between_replicas(schedule, edge, shards or {}, codec)
            elif edge.kind == "evaluation":
                found.append(_evaluation(schedule, edge, (evaluated or {}).get(edge.from_stage)))
            else:
                found.append(_of_edge(schedule, edge, boundaries, ties, codec))
    for rank in range(1, world_size):
        for ends in ((parent_of(rank), rank), (rank, parent_of(rank))):
            found.append(_bulk_channel(tree_name(*ends), ends, NUM_PIECES))
    from_caller = [] if forwarded is None else data_channels(plan, forwarded, schedule)
    return from_caller + _numbered(found, first_id=len(_data_ends(plan)))


def _place_in_list(edge: _core.Edge) -> tuple[int, ...]:
    """Returns the sort key of an edge. Activations and gradients come first, cut after cut. Then come pushes,
    pulls, tied parameters, and all other kinds."""
    group = {"activation": 0, "gradient": 0, "push": 1, "pull": 2, "tied_version": 3, "tied_gradient": 3}
    first, last = sorted(((edge.from_stage, edge.from_replica), (edge.to_stage, edge.to_replica)))
    is_upstream = (edge.from_stage, edge.from_replica) > (edge.to_stage, edge.to_replica)
    stages = sorted((edge.from_stage, edge.to_stage))
    return group.get(edge.kind, 4), *stages, *first, *last, is_upstream


def _between_replicas(
    schedule: _core.ScheduleOptions,
    edge: _core.Edge,
    shards: Mapping[tuple[int, int], ShardSpec],
    codec: CodecChoice,
) -> Iterator[RunChannel]:
    """Yields the channels of an edge between replicas. A push sends gradients to the owner of a shard. A pull
    sends the owner's weight versions to another replica."""
    is_push = edge.kind == "push"
    owner = edge.to_replica if is_push else edge.from_replica
    spec = shards.get((edge.from_stage, owner), ShardSpec(0, 1, 1))
    dtype = spec.dtype if is_push else torch.uint8  # versions are sent as plain bytes
    content = TensorSpec(dtype, (spec.chunk_bytes_max // dtype.itemsize,), requires_grad=False)
    flags = TensorSpec(torch.uint8, (spec.num_pieces_max,), requires_grad=False)
    num_rounds = schedule.in_flight[edge.from_stage] + schedule.staleness + 2
    # A version waits at the owner until the replica has read the previous version. Under vertical sync
    # replicas read old versions, so a whole set of kept versions may wait. One more version may come in the
    # last round, and one more may be released late.
    num_versions = max(num_rounds, _core.num_versions_kept(schedule, edge.from_stage) + 2)
    # The receiver has a slot for every chunk of a round, so that no chunk waits in its sender's memory.
    slots = max(spec.num_chunks, 1)
    if is_push and spec.whole_bytes and not schedule.asynchronous:
        # Each chunk is a whole tensor, and each slot is as large as the largest one. So fewer slots than
        # chunks have room for the bytes of a round.
        slots = -(-spec.whole_bytes // spec.chunk_bytes_max)
    if is_push and owner >= schedule.placement.num_replicas(edge.from_stage):
        # A spare uses a chunk only when all replicas have pushed theirs. With few slots a replica that is
        # ahead waits, and the replicas that are behind get the link's bandwidth.
        slots = min(slots, _core.NUM_SPARE_SLOTS)
    yield _channel(
        edge_name(edge, schedule.placement),
        _ranks_of_ends(schedule, edge),
        [flags, content] if is_push else [content],
        slots=slots,
        unsent=max(spec.num_chunks, 1) * (num_rounds if is_push else num_versions),
        codec=codec_of_pushes(codec) if is_push else NO_CODEC,
        edge=edge,
        num_transfers_kept=NUM_TRANSFERS_KEPT,
        num_residuals=max(spec.num_chunks, 1),
    )
    if is_push and pushes_factors(codec):
        # A stage without factors has this channel, too, so that all workers compute the same ids.
        has_factors = TensorSpec(torch.uint8, (max(len(spec.factors) // 2, 1),), requires_grad=False)
        yield _channel(
            factors_name(edge, schedule.placement),
            _ranks_of_ends(schedule, edge),
            [has_factors, *spec.factors],
            slots=1,
            unsent=num_rounds,
            num_transfers_kept=NUM_TRANSFERS_KEPT,
        )


def _evaluation(schedule: _core.ScheduleOptions, edge: _core.Edge, boundary: Boundary | None) -> RunChannel:
    """Returns the channel that carries activations of an evaluation. It has no codec, so that the evaluation
    gives the same figures as a plain loop over the whole model."""
    first, stride = _core.items_of(schedule, edge)
    return _channel(
        edge_name(edge, schedule.placement),
        _ranks_of_ends(schedule, edge),
        () if boundary is None else boundary.tensors,
        slots=_core.NUM_EVALUATION_SLOTS,
        unsent=_core.NUM_EVALUATION_SLOTS,
        edge=edge,
        num_microbatches=_core.EVALUATED_MINIBATCHES_MAX + 1,
        first_microbatch=first,
        microbatch_stride=stride,
    )


def _of_edge(
    schedule: _core.ScheduleOptions,
    edge: _core.Edge,
    boundaries: Mapping[int, Boundary],
    ties: Sequence[TieSpec],
    codec: CodecChoice,
) -> RunChannel:
    sender, receiver = edge.from_stage, edge.to_stage
    first_microbatch, microbatch_stride = _core.items_of(schedule, edge)
    channel = functools.partial(
        _channel,
        edge_name(edge, schedule.placement),
        _ranks_of_ends(schedule, edge),
        edge=edge,
        first_microbatch=first_microbatch,
        microbatch_stride=microbatch_stride,
    )
    if edge.kind == "norm":
        figures = [TensorSpec(torch.float64, (3,), requires_grad=False)]
        return channel(figures, slots=2, unsent=4, on_device=False)
    if edge.kind == "tied_version":
        # The owner may be several versions ahead of the receiver. The receiver has a slot for each of them,
        # so that no send waits.
        ahead = _core.num_tied_versions_ahead(schedule, sender, receiver)
        return channel(_tied_version(ties, edge), slots=ahead, unsent=ahead + 2)
    if edge.kind == "tied_gradient":
        # The channel carries one item per minibatch that the owner has in flight.
        in_flight = _core.num_microbatches_in_flight(schedule, receiver)
        unsent = max(schedule.in_flight[0], in_flight, 2) + 3
        return channel(_tied_gradients(ties, receiver, sender), slots=2, unsent=unsent)
    upstream = min(sender, receiver)
    activations, gradients = _crossing(boundaries.get(upstream))
    goes_downstream = edge.kind == "activation"
    # The stage downstream keeps the slot of each microbatch until its backward. One more slot receives the
    # next microbatch.
    in_flight_downstream = num_of_edge_in_flight(schedule, upstream + 1, microbatch_stride)
    in_flight = _core.num_microbatches_in_flight(schedule, upstream)
    return channel(
        activations if goes_downstream else gradients,
        slots=in_flight_downstream + 1 if goes_downstream else _core.NUM_GRADIENT_SLOTS,
        unsent=_core.num_unsent_max(in_flight),
        num_microbatches=schedule.num_microbatches,
        codec=codec_between(codec, sender, receiver),
        num_transfers_kept=NUM_TRANSFERS_KEPT,
    )


def num_of_edge_in_flight(schedule: _core.ScheduleOptions, stage: int, microbatch_stride: int) -> int:
    """Returns the most microbatches that a replica of the stage has in flight and that use one given edge.

    A replica exchanges microbatches with the replicas of the neighbouring stage in turn. With 8 microbatches
    in flight and 2 such neighbours, at most 4 use the same edge."""
    in_flight = _core.num_microbatches_in_flight(schedule, stage)
    num_neighbours = microbatch_stride // schedule.placement.num_replicas(stage)
    of_edge = -(-in_flight // num_neighbours)
    if _core.drains_every_minibatch(schedule):  # then all microbatches in flight are of the same round
        per_round = _core.rounds_of(schedule, stage).minibatches_per_round * schedule.num_microbatches
        of_edge = min(of_edge, -(-per_round // microbatch_stride))
    return of_edge


def _ranks_of_ends(schedule: _core.ScheduleOptions, edge: _core.Edge) -> tuple[int, int]:
    placement = schedule.placement
    return (
        placement.rank_of(edge.from_stage, edge.from_replica),
        placement.rank_of(edge.to_stage, edge.to_replica),
    )


def _crossing(boundary: Boundary | None) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
    """Returns the tensors that cross a cut: (activations, gradients)."""
    if boundary is None:
        return (), ()
    return boundary.tensors, [spec for spec in boundary.tensors if spec.requires_grad] or [_NO_GRADIENT]


def set_up_channels(plan: Plan) -> list[RunChannel]:
    """Returns the channels of the set-up, which carry rank 0's initial weights and the rehearsal's outputs.

    They open first. The sizes of all other channels depend on the optimizers and on the tensors that the
    rehearsal finds at the cuts."""
    found = [
        _bulk_channel(tree_name(parent_of(rank), rank), (parent_of(rank), rank), _NUM_SET_UP_SLOTS)
        for rank in range(1, plan.workers_used)
    ]
    placement = plan.placement
    for stage in range(plan.num_stages - 1):
        for replica in range(placement.num_replicas(stage + 1)):
            sender = placement.rank_of(stage, replica % placement.num_replicas(stage))
            ends = (sender, placement.rank_of(stage + 1, replica))
            if ends[0] != ends[1]:
                name = rehearsal_name(stage, replica)
                found.append(_bulk_channel(name, ends, _NUM_SET_UP_SLOTS, num_transfers_kept=1))
    return _numbered(found)


def data_channels(plan: Plan, forwarded: ForwardedData, schedule: _core.ScheduleOptions) -> list[RunChannel]:
    """Returns the channels from the caller. Their ids begin at 0, because the caller does not know the other
    channels."""
    found = []
    counts = TensorSpec(torch.int64, (3,), requires_grad=False)  # the result of forwarded_counts()
    boundaries = {INPUTS: forwarded.inputs, TARGETS: forwarded.targets}
    # A worker receives a whole group of minibatches before it begins the group (data/minibatch_source.py).
    group_size = _core.minibatches_between_drains(schedule)
    for channel, stage, replica in _data_ends(plan):
        # A minibatch keeps its slot until its last microbatch is computed.
        in_flight, replicas = schedule.in_flight[stage], plan.stages[stage].num_replicas
        minibatches = min(in_flight, 1 + -(-(in_flight - 1) * replicas // schedule.num_microbatches))
        rank, slots = plan.placement.rank_of(stage, replica), minibatches + group_size
        specs = [*boundaries[channel].tensors, counts]
        name = forwarded_name(channel, replica)
        found.append(_channel(name, (CALLER, rank), specs, slots=slots, unsent=2, on_device=False))
    return _numbered(found)


def _data_ends(plan: Plan) -> list[tuple[str, int, int]]:
    """Returns (INPUTS or TARGETS, stage, replica) for every worker that reads data."""
    stages = ((INPUTS, 0), (TARGETS, plan.num_stages - 1))
    return [
        (channel, stage, replica)
        for channel, stage in stages
        for replica in range(plan.stages[stage].num_replicas)
    ]


def forwarded_name(channel: str, replica: int) -> str:
    """Returns the name of a channel from the caller. channel: INPUTS or TARGETS. replica: the receiver's
    index in its stage."""
    return channel + _replica_suffix(replica)


def _replica_suffix(replica: int) -> str:
    return f" replica {replica}" if replica > 0 else ""


def _tied_gradients(ties: Sequence[TieSpec], owner: int, user: int) -> list[TensorSpec]:
    """Returns the tensors of an item of tied gradients: a mask that says which gradients exist, then the
    gradients of all parameters that the two stages share."""
    shared = [tie.spec for tie in ties if tie.stages[0] == owner and user in tie.stages[1:]]
    return [TensorSpec(torch.uint8, (len(shared),), requires_grad=False), *shared]


def _tied_version(ties: Sequence[TieSpec], edge: _core.Edge) -> list[TensorSpec]:
    """Returns the tensors of one version of the tied weights, as one replica of the owner sends them to a
    replica of the user."""
    owner, user = edge.from_stage, edge.to_stage
    shared = [tie for tie in ties if tie.stages[0] == owner and user in tie.stages[1:]]
    specs = [spec for tie in shared for spec in (tie.pieces[edge.from_replica] if tie.pieces else [tie.spec])]
    return specs or [_NO_PIECE]
