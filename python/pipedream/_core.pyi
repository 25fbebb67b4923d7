# The types of the C++ core. Most functions and classes have the name of the one in csrc/ that they bind, and
# the header there describes them. Docstrings here give what differs in Python: the entries of tuples, None,
# and functions that exist only in csrc/bindings. Capsules are DLPack capsules. Times whose names and
# docstrings give no unit are in nanoseconds on the monotonic clock.
from collections.abc import Callable, Mapping, Sequence
from typing import Any

class RunFailure(RuntimeError):  # noqa: N818
    """A failure that the core reports, such as a lost peer. args are (kind, message). kind is the name of a
    FailureKind (base/failure.h), such as "PeerLost", "Timeout" or "CorruptFrame"."""

class Edge:
    """A connection on which a schedule sends items, from a replica of a stage to a replica of this or another
    stage.

    kind: activation, gradient, tied_gradient, tied_version, norm, push, pull or evaluation."""
    def __init__(
        self, kind: str, from_stage: int, to_stage: int, from_replica: int = 0, to_replica: int = 0
    ) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def from_stage(self) -> int: ...
    @property
    def to_stage(self) -> int: ...
    @property
    def from_replica(self) -> int: ...
    @property
    def to_replica(self) -> int: ...

class OpcodeTraits:
    """The facts about an opcode, from csrc/schedule/opcode.h."""
    @property
    def name(self) -> str: ...
    @property
    def meaning(self) -> str:
        """The word for pictures and sentences, such as "evaluation"."""
    @property
    def letter(self) -> str:
        """The letter for pictures and traces."""
    @property
    def travels(self) -> bool: ...
    @property
    def writes_version(self) -> bool: ...
    @property
    def scope(self) -> str:
        """The thing that an instruction's numbers name: "microbatch", "round" or "boundary"."""
    @property
    def stash(self) -> str:
        """The effect on the microbatch's stash: "none", "kept", "restored" or "released"."""
    @property
    def duration(self) -> str:
        """The kind of measured time that is the instruction's duration: "none", "forward", "recompute",
        "backward" or "update"."""

OPCODES: dict[str, OpcodeTraits]

class Instruction:
    """One step of a worker's program. str() gives its text."""
    @property
    def opcode(self) -> str: ...
    @property
    def traits(self) -> OpcodeTraits: ...
    @property
    def stage(self) -> int: ...
    @property
    def replica(self) -> int: ...
    @property
    def minibatch(self) -> int: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def edge(self) -> Edge | None: ...

class Placement:
    """The rank of every replica and spare of every stage."""
    @staticmethod
    def at_ranks(rank_of_stage: Sequence[int]) -> Placement: ...
    @staticmethod
    def in_order(num_replicas: Sequence[int], num_spares: Sequence[int] = ()) -> Placement: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    def num_replicas(self, stage: int) -> int: ...
    @property
    def num_spares(self) -> int: ...
    def rank_of(self, stage: int, replica: int = 0) -> int: ...
    def ranks_of(self, stage: int) -> list[int]:
        """Returns the ranks of the replicas, in the order of the replicas' indices."""
    def replica_at(self, rank: int) -> int:
        """Returns the index of the replica that this rank has of its first stage."""
    def stages_at(self, rank: int) -> list[int]: ...

class Rounds:
    """The rounds of a stage: a round is the minibatches of one update. Tells which microbatches each replica
    has.

    num_minibatches: the length of the run. None: the length is not known yet, so every round counts as full.
    """
    def __init__(
        self,
        *,
        num_replicas: int,
        minibatches_per_round: int,
        first_minibatch: int = 0,
        num_microbatches: int = 1,
    ) -> None: ...
    @property
    def first_minibatch(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def minibatches_per_round(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def own_per_round(self) -> int: ...
    def own_microbatches(self, replica: int, minibatch: int) -> list[int]:
        """Returns the replica's microbatches of the minibatch."""
    def is_first_of_minibatch(self, microbatch: int) -> bool: ...
    def is_last_of_minibatch(self, microbatch: int) -> bool: ...
    def is_first_of_round(self, minibatch: int, microbatch: int) -> bool:
        """Whether the microbatch is its replica's first of the round."""
    @property
    def first_version(self) -> int: ...
    def round_of(self, minibatch: int) -> int: ...
    def num_own_in(self, replica: int, round: int, num_minibatches: int | None) -> int: ...
    def is_over_after(self, replica: int, minibatch: int, num_minibatches: int | None) -> bool: ...
    def num_begun(self, replica: int, num_minibatches: int) -> int: ...

class ListedProgram:
    def __init__(self, text: str) -> None: ...
    @staticmethod
    def of(options: ScheduleOptions) -> ListedProgram: ...
    @property
    def text(self) -> str: ...
    @property
    def note_on_unstashed(self) -> str: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def minibatches_per_body(self) -> int: ...
    @property
    def num_minibatches_listed(self) -> int: ...
    @property
    def versions_kept(self) -> list[int]: ...
    @property
    def in_flight(self) -> list[int]: ...

class ScheduleOptions:
    def __init__(
        self,
        schedule: str = "pipedream",
        in_flight: Sequence[int] = (1,),
        num_microbatches: int = 1,
        placement: Placement | None = None,
        recompute: Sequence[bool] = (),
        ties: Sequence[tuple[int, int]] = (),
        exchanges_norms: bool = False,
        first_minibatch: int = 0,
        oldest_minibatch: int | None = None,
        staleness: int = 0,
        uses_allreduce: bool = False,
        asynchronous: bool = False,
        program: ListedProgram | None = None,
        evaluates: bool = False,
    ) -> None: ...
    def with_recompute(self, recompute: Sequence[bool]) -> ScheduleOptions:
        """Returns these options with another value of recompute."""
    @property
    def schedule(self) -> str: ...
    @property
    def in_flight(self) -> list[int]: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def recompute(self) -> list[bool]: ...
    @property
    def ties(self) -> list[tuple[int, int]]: ...
    @property
    def exchanges_norms(self) -> bool: ...
    @property
    def staleness(self) -> int: ...
    @property
    def uses_allreduce(self) -> bool: ...
    @property
    def asynchronous(self) -> bool: ...
    @property
    def evaluates(self) -> bool: ...
    @property
    def program(self) -> ListedProgram | None: ...
    @property
    def first_minibatch(self) -> int: ...
    @property
    def rules(self) -> ScheduleRules: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_workers(self) -> int: ...

class ScheduleRules:
    """The facts about a schedule, from csrc/schedule/schedule_rules.h."""

    @property
    def name(self) -> str: ...
    @property
    def drains(self) -> bool: ...
    @property
    def is_round_late(self) -> bool: ...
    @property
    def needs_microbatches(self) -> bool: ...
    @property
    def stashes(self) -> bool: ...
    @property
    def has_stage_per_worker(self) -> bool: ...
    @property
    def has_one_stage(self) -> bool: ...
    @property
    def may_be_stale(self) -> bool: ...
    @property
    def may_be_asynchronous(self) -> bool: ...
    @property
    def has_cost_formulas(self) -> bool: ...
    @property
    def has_equal_replicas(self) -> bool: ...
    def works_as(self, other: ScheduleRules) -> bool: ...

def schedule_names() -> list[str]: ...
def find_schedule_rules(schedule: str) -> ScheduleRules | None:
    """Returns the rules of a schedule by its name or a former name. None: no schedule has this name."""

def check_exclusions(traits: Sequence[tuple[str, str | None]]) -> None:
    """Raises ValueError if two of the traits exclude each other. A trait is an option, or a property of a
    plan, a model or data (csrc/schedule/exclusions.h).

    traits: pairs of a trait's key and its text for the error. None: the usual text."""

def exclusions() -> list[tuple[str, str, str, str]]:
    """Returns all rows: the keys of two traits, the reason for which they exclude each other, and the
    remedy."""

def trait_names() -> dict[str, str]:
    """Returns the name of each trait in tables for users, by the trait's key."""

def num_microbatches_min(schedule: str, in_flight: Sequence[int], placement: Placement) -> int: ...
def drains_every_minibatch(options: ScheduleOptions) -> bool: ...
def derive_in_flight(num_replicas: Sequence[int]) -> list[int]: ...
def forward_version(options: ScheduleOptions, stage: int, minibatch: int, microbatch: int = 0) -> int: ...
def backward_version(options: ScheduleOptions, stage: int, minibatch: int, microbatch: int = 0) -> int: ...
def tied_version(options: ScheduleOptions, owner: int, minibatch: int, microbatch: int = 0) -> int: ...
def num_versions_kept(options: ScheduleOptions, stage: int) -> int: ...
def stashes_versions(options: ScheduleOptions, stage: int) -> bool: ...
def oldest_version(options: ScheduleOptions, stage: int) -> int: ...
def oldest_tied_version(options: ScheduleOptions, owner: int, minibatch: int, microbatch: int = 0) -> int:
    """Returns the oldest version of the tied parameters that this microbatch or a later one reads."""

def num_tied_versions_kept(options: ScheduleOptions, owner: int) -> int: ...
def num_tied_versions_ahead(options: ScheduleOptions, owner: int, user: int) -> int: ...
def num_microbatches_in_flight(options: ScheduleOptions, stage: int) -> int: ...
def num_gradients_kept(options: ScheduleOptions, stage: int) -> int: ...
def mean_delay(options: ScheduleOptions, stage: int) -> float: ...
def rounds_of(options: ScheduleOptions, stage: int) -> Rounds: ...
def minibatches_between_drains(options: ScheduleOptions) -> int: ...
def make_program(
    options: ScheduleOptions,
    rank: int,
    num_minibatches: int,
    evaluated: Sequence[tuple[int, int]] = (),
) -> list[Instruction]:
    """Returns the whole list of one worker's instructions.

    evaluated: pairs of a boundary and the number of validation minibatches there."""

def phase_of(options: ScheduleOptions, instruction: Instruction, num_minibatches: int | None) -> str:
    """Returns "warm-up", "steady" or "cool-down". num_minibatches: None while it is unknown."""

def replay(
    options: ScheduleOptions, num_minibatches: int, programs: Sequence[Sequence[Instruction]] | None = None
) -> dict[str, Any]:
    """Replays the programs of all workers. programs: None stands for make_program() of each worker.

    The result has "ok", "error", the largest counts by stage ("versions_live_max", "activations_live_max"),
    and "edges" with pairs of an edge and the most items that can wait there."""

def edges_of(options: ScheduleOptions) -> list[Edge]: ...
def items_of(options: ScheduleOptions, edge: Edge) -> tuple[int, int]:
    """Returns (first, stride): the edge's items have the numbers first, first + stride, and so on. With a
    stride of 0 they have any ascending numbers from first on."""

def add_transfers(
    options: ScheduleOptions, programs: Sequence[Sequence[Instruction]], num_minibatches: int
) -> list[list[Instruction]]:
    """Adds the SENDs and RECVs to programs that have only computing instructions, one for each worker."""

def print_programs(programs: Sequence[Sequence[Instruction]]) -> str: ...
def parse_programs(text: str) -> list[list[Instruction]]: ...
def partition(
    compute_s: Sequence[float],
    activation_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
    num_workers: int,
    bandwidth_bytes_per_s: float,
    straight: bool = False,
    factors: Sequence[Sequence[tuple[float, float, float]]] = (),
    num_microbatches: int = 1,
) -> tuple[list[tuple[int, int, int]], float]:
    """Returns ([(first_layer, last_layer, num_replicas)], bottleneck_s)."""

NUM_GRADIENT_SLOTS: int

def num_unsent_max(in_flight_upstream: int) -> int: ...

class MemoryCosts:
    def __init__(
        self,
        *,
        model_copies: float = 1.0,
        state_copies: float = 0.0,
        step_copies: float = 0.0,
        data_bytes: float = 0.0,
        num_microbatches: int = 1,
        activations: tuple[float, float] = (0.0, 0.0),
        gradients: tuple[float, float] = (0.0, 0.0),
        stages_apart: bool = False,
        asynchronous: bool = False,
        reduces_together: bool = False,
        whole_tensors: bool = False,
        posts_versions: bool = False,
        has_spares: bool = False,
        drains: bool = False,
        staleness: int = 0,
    ) -> None: ...

def partition_within(
    compute_s: Sequence[float],
    activation_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
    num_workers: int,
    bandwidth_bytes_per_s: float,
    *,
    saved_bytes: Sequence[float],
    forward_s: Sequence[float],
    speeds: Sequence[float],
    memory_bytes: Sequence[float],
    costs: MemoryCosts,
    may_recompute: bool,
    last_layers: Sequence[int],
    num_replicas: Sequence[int],
    num_replicas_max: int,
    factors: Sequence[Sequence[tuple[float, float, float]]] = (),
    frozen_bytes: Sequence[float] = (),
) -> tuple[list[tuple[int, int, int]], float, list[bool], list[float]] | None:
    """Returns ([(first_layer, last_layer, num_replicas)], bottleneck_s, recompute, memory_bytes). None: no
    plan fits."""

def memory_of_plan(
    activation_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
    *,
    saved_bytes: Sequence[float],
    stages: Sequence[tuple[int, int, int]],
    in_flight: Sequence[int],
    num_versions: Sequence[int],
    own_per_round: Sequence[int],
    recompute: Sequence[bool],
    costs: MemoryCosts,
    factors: Sequence[Sequence[tuple[float, float, float]]] = (),
    frozen_bytes: Sequence[float] = (),
) -> list[float]:
    """Returns the bytes of one replica of each stage.

    stages: (first_layer, last_layer, num_replicas) of each stage. num_versions: the weight versions that each
    stage keeps, without those that a staleness adds."""

class StageDurations:
    """How long a stage's work takes, in milliseconds. Forward and backward times are per microbatch,
    update_ms is per update.

    recompute_ms: time to repeat a forward; None: forward_ms.
    pull_ms: time in which a replica pulls a shard from one other replica.
    push_ms: time in which a replica pushes a shard's gradients to its owner; None: pull_ms.
    later_forward_ms, later_backward_ms: times of the second and later microbatches of a minibatch. They may
        differ from the first's, which finds a new version and no gradients yet. None: as the first's.
    sync_latency_ms: latency that every push and pull adds.
    num_replicas: number of the stage's replicas. Owners with higher numbers are spares. None: no spares.
    spare_push_ms, spare_update_ms: time of a push to a spare, and of an update by a spare.
    spare_pull_ms: time that a pull from a spare still takes after all pushes have arrived. A spare sends new
        chunks while it receives gradients, so part of the pull is done by then.
    num_chunks: number of equal chunks in which a shard is sent. The owner updates a chunk and sends its new
        version while the next chunks arrive.
    push_leads_ms: two times for each owner, counted back from the end of the last backward: when its first
        chunk is pushed, and its last. Empty: all chunks are pushed after the backward.
    updates_whole: whether an update waits for all chunks, as it must if norms of gradients are computed.
    wakings_ms: additional times of a forward, a backward and an update that come first after a wait. There is
        one entry for each wait's length in waking_after_ms (simulate()).
    """

    def __init__(
        self,
        forward_ms: float,
        backward_ms: float,
        update_ms: float = 0.0,
        recompute_ms: float | None = None,
        pull_ms: float = 0.0,
        later_forward_ms: float | None = None,
        later_backward_ms: float | None = None,
        push_ms: float | None = None,
        sync_latency_ms: float = 0.0,
        num_replicas: int | None = None,
        spare_push_ms: float = 0.0,
        spare_pull_ms: float = 0.0,
        spare_update_ms: float = 0.0,
        num_chunks: float = 1.0,
        push_leads_ms: Sequence[tuple[float, float]] = (),
        updates_whole: bool = False,
        wakings_ms: Sequence[tuple[float, float, float]] = (),
    ) -> None: ...
    @property
    def forward_ms(self) -> float: ...
    @property
    def backward_ms(self) -> float: ...
    @property
    def update_ms(self) -> float: ...
    @property
    def pull_ms(self) -> float: ...

class BoundaryDurations:
    """How long one microbatch's tensors take to cross a boundary, downstream and upstream, in milliseconds.

    latency_ms: time that every crossing adds. Meanwhile the link may already carry the next tensors. Tied
        parameters and norms are assumed to take only this time. Traffic between replicas is in
        StageDurations.
    """

    def __init__(self, activation_ms: float, gradient_ms: float, latency_ms: float = 0.0) -> None: ...
    @property
    def activation_ms(self) -> float: ...
    @property
    def gradient_ms(self) -> float: ...
    @property
    def latency_ms(self) -> float: ...

def steady_ms(
    options: ScheduleOptions,
    num_minibatches: int,
    stages: Sequence[StageDurations],
    boundaries: Sequence[BoundaryDurations],
    *,
    host: tuple[int, Sequence[float]] | None,
    waking_after_ms: Sequence[float],
    one_link: bool,
    factors: Mapping[str, Sequence[float]],
    shuffled: Callable[[int, str], list[float]] | None,
) -> float: ...
def simulate(
    programs: Sequence[Sequence[Instruction]],
    stages: StageDurations | Sequence[StageDurations],
    boundaries: BoundaryDurations | Sequence[BoundaryDurations],
    *,
    host: tuple[int, Sequence[float]] | None,
    waking_after_ms: Sequence[float],
    one_link: bool,
    factors: Mapping[str, Sequence[float]],
    shuffled: Callable[[int, str], list[float]] | None,
    minibatches_per_body: int,
) -> tuple[
    list[tuple[list[float], list[float]]],
    list[tuple[str, int, int, int, int, float, float]],
    tuple[float, float, float | None, float | None],
]:
    """Returns three values: for each worker the begins and the ends of its instructions; the transfers; the
    values of summarize(). All times are in milliseconds.

    host: the number of a machine's workers, and the speed of each while 1, 2, ... of them work. factors: for
    each opcode, the ratios of single instructions' times to the mean time. shuffled: returns all factors of
    an opcode in random order, for a worker to draw one after the other. waking_after_ms, one_link: see Timing
    in planner/durations.h. minibatches_per_body: see planner/timeline.h. A transfer is (kind, from_worker,
    to_worker, minibatch, microbatch, begin_ms, end_ms)."""

def summarize(
    programs: Sequence[Sequence[Instruction]], spans_ms: Sequence[Sequence[tuple[float, float]]]
) -> tuple[float, float, float | None, float | None]:
    """Returns (makespan_ms, bubble_share, steady_bubble_share, ms_per_minibatch). The last two are None if
    there are too few minibatches for a steady state."""

def replica_weight_bytes(
    all_bytes: float,
    largest_bytes: float,
    *,
    num_replicas: int,
    num_versions: int,
    costs: MemoryCosts,
    share: float | None = None,
    factored_bytes: float = 0.0,
    factor_bytes: float = 0.0,
) -> float:
    """Returns the bytes of a replica's weight versions, gradients, optimizer state and slots for exchange.

    share: the share of the weights that the replica owns. None: an equal share."""

def weight_layout(parameters: Sequence[tuple[str, str, int]]) -> tuple[int, list[int]]:
    """Returns the bytes of a slot and the offset of each parameter.

    parameters: (name, dtype, number of elements) of each."""

def sgd_step(
    tensors: Sequence[tuple[int, ...]],
    *,
    dtype: str,
    first_step: bool,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    gradient_scale: float = 1.0,
    device: str = "host",
    stream: int = 0,
    num_threads: int = 1,
) -> None:
    """Makes a step of SGD. tensors: (num_elements, weight_in, weight_out, gradient, momentum_buffer, master)
    of each tensor. All but the first are addresses; master is 0 unless the dtype is bfloat16."""

def adam_step(
    tensors: Sequence[tuple[int, ...]],
    *,
    dtype: str,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    amsgrad: bool,
    maximize: bool,
    nesterov: bool = False,
    momentum_decay: float = 0.0,
    momentum_product: float = 0.0,
    gradient_scale: float = 1.0,
    device: str = "host",
    stream: int = 0,
    num_threads: int = 1,
) -> None:
    """Makes a step of Adam. tensors: (num_elements, weight_in, weight_out, gradient, exp_avg, exp_avg_sq,
    max_exp_avg_sq, master) of each tensor. All but the first are addresses; master is 0 unless the dtype is
    bfloat16."""

def deal_shards(
    parameters: Sequence[tuple[str, str, int]],
    num_replicas: int,
    *,
    whole_tensors: bool,
    num_spares: int = 0,
) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
    """Returns the chunks: (shard, begin_bytes, end_bytes, pieces). A piece is (parameter, first element,
    number of elements). The shards of spares come after those of replicas."""

SHARD_CHUNK_BYTES_MIN: int  # bound of the chunks of small shards, and of all if there are spares
EVALUATED_MINIBATCHES_MAX: int  # the most validation minibatches of one evaluation
NUM_EVALUATION_SLOTS: int  # the most validation minibatches that wait at a receiving stage
NUM_SPARE_SLOTS: int  # slots in which a spare receives one replica's chunks

def shard_chunk_bytes_max(shard_bytes: int) -> int: ...
def shard_shares(num_replicas: int, num_spares: int) -> list[int]: ...
def aggregate(
    parts: Sequence[int],
    num_minibatches: int,
    mean: int,
    num_elements: int,
    *,
    dtype: str,
    num_threads: int = 1,
) -> None:
    """Writes the parts' sum / num_minibatches to mean. parts, mean: addresses in host memory. mean may be one
    of the parts."""

def push_slot_bytes(shards: Sequence[tuple[list[Any], str]], codec: str) -> int:
    """Returns the bytes of a push slot (param_server/shard_pushes.h). shards: the shards of all other owners,
    as in bindings/shard_exchange_type.h."""

class ShardExchange:
    def push_ready(self, parameter: int, gradient: Any, num_summed: int) -> None:
        """Gives the exchange a parameter's gradient as a flat tensor, and sends the chunks whose gradients
        are all given. None: the parameter has no gradient."""
    def push_factors(self, factors: list[Any], num_summed: int) -> None: ...
    def push(self, round: int, gradients: list[Any], num_summed: int) -> None:
        """Gives the exchange the gradients of the round that are not given yet, and sends their chunks. Keeps
        the gradients for the round's update, except with asynchronous shards. gradients: by parameter. None:
        the parameter has no gradient."""
    def begin_update(self, round: int) -> tuple[int, dict[int, list[Any]]]:
        """Returns the number of the round's minibatches, and the factors by replica."""
    def wait_for_readers(self, slot: int) -> None: ...
    def begin_version(self, slot: int) -> None: ...
    def mean_of(self, chunk: int, num_threads: int = 1) -> list[Any]:
        """Returns for each piece its mean gradient, or a pair: the parts of the mean in the order of the
        replicas, and memory in which the mean may lie, or None."""
    def publish(self, chunk: int) -> None: ...
    def end_version(self) -> None: ...
    def wait_for_pushes(self, num_rounds_left: int) -> None:
        """Waits until at most num_rounds_left rounds have pushes that are not sent."""
    def pull_from(self, other: int) -> None: ...
    def note_version(self, slot: int) -> None: ...
    def whole_version(self) -> int: ...
    def whole_slot(self) -> int | None: ...
    def contained(self) -> dict[int, tuple[int, int]]: ...

def share_openmp(library_path: str) -> bool: ...
def poisons_released_slots() -> bool:
    """Whether free slots are filled with NaN ($PIPEDREAM_POISON)."""

def open_segment_arena(address: int, num_bytes: int, device: str = "host") -> bool:
    """Makes this memory the process's arena. device: "host" or "cuda:0". Returns False while segments of an
    earlier arena are in use."""

def segment_arena_bytes() -> tuple[int, int]:
    """Returns the bytes in use, and the most bytes that were in use."""

DTYPES: list[str]  # the dtypes that channels can send, by torch's names
SHARED_MEMORY: str  # the transport of a channel if both ends map the receiver's host memory
CUDA_IPC: str  # the transport of a channel if the sender maps the receiver's device memory
STAGING_TERM: str  # prefixes of the names of a channel's memory terms; the channel's name follows
RESIDUAL_TERM: str
ENCODED_TERM: str

def slot_stride_bytes(slot_bytes: int) -> int: ...

NUM_TENSORS_MAX: int  # the most tensors of one item of a channel
NUM_DIMS_MAX: int  # the most dimensions of a tensor that a channel sends
COMPUTED_LATER: int

def channel_bytes(tensors: Sequence[tuple[str, int, int]], codec: str) -> tuple[int, int, int, bool]:
    """Returns the bytes of a slot on the device, the bytes of a slot on the wire, the bytes that the codec
    keeps between items, and whether the codec encodes anything. tensors: (dtype, number of dimensions,
    largest bytes) of each."""

def codec_name(name: str) -> str:
    """Returns the codec's full name. Raises ValueError naming the choices."""

def derived_seed(seed: int, number: int) -> int: ...
def make_curve_keys(libzmq_path: str = "") -> tuple[str, str]: ...
def die_with_parent(parent_pid: int) -> None: ...
def keep_freed_memory() -> None: ...
def cuda_available() -> bool: ...
def why_no_cuda() -> str: ...
def built_with_cuda() -> bool: ...

class WorkItem:
    """A work item. Which attributes have a meaning depends on the kind."""

    kind: str
    """FORWARD, RECOMPUTE, BACKWARD, UPDATE, EVALUATE, SEND, RECV or DONE."""
    stage: int
    minibatch: int
    microbatch: int
    read_slot: int
    write_slot: int
    edge: Edge | None
    """The edge of a SEND or a RECV; None for other kinds."""
    tensors: list[Any]
    """FORWARD and EVALUATE: activations from upstream, none at the first stage. BACKWARD: gradients from
    downstream, none at the last stage. RECV: the edge's tensors, none if both ends are at this worker."""
    data_fingerprint: int
    gradients_overflowed: bool
    is_empty: bool
    is_end_of_data: bool
    """EVALUATE: there are no more validation minibatches, so there is nothing to compute."""
    loss_scale: float
    boundary_events: int
    """FORWARD: bits of the events due at the last boundary up to the minibatch (stage/boundaries.py). DONE:
    those due at the end."""
    freed_slot: int
    """The slot whose version is no longer read after the previous item; -1 if there is none."""
    num_minibatches: int
    """DONE: the number of minibatches of the run."""

class ItemFields:
    data_fingerprint: int
    loss_scale: float
    gradients_overflowed: bool
    is_empty: bool
    num_minibatches: int
    is_end_of_data: bool
    boundary_events: int
    def __init__(
        self,
        *,
        data_fingerprint: int = 0,
        loss_scale: float = 0.0,
        gradients_overflowed: bool = False,
        is_empty: bool = False,
        num_minibatches: int = 0,
        is_end_of_data: bool = False,
        boundary_events: int = 0,
    ) -> None: ...

class TensorExchange:
    def __init__(
        self,
        tensor_type: type,
        to_capsule: Callable[[Any], Any],
        from_capsule: Callable[[Any], Any],
        to_plain: Callable[[Any], Any],
    ) -> None: ...
    @property
    def by_table(self) -> bool: ...
    def fingerprint(self, tensors: list[Any], /) -> int | None:
        """Returns a 64-bit fingerprint of the tensors with their dtypes and shapes. None: a tensor is not
        contiguous in host memory, its memory does not hold its values, or it cannot be borrowed."""

class ReceivedItem:
    @property
    def fields(self) -> ItemFields: ...
    @property
    def is_end(self) -> bool: ...
    def take_tensors(self) -> list[Any]:
        """Returns one capsule per tensor. A second call returns an empty list."""

class Worker:
    def __init__(
        self,
        *,
        device: str = "host",
        transport: str = "zmq",
        libzmq_path: str = "",
        bind_host: str = "127.0.0.1",
        ports: tuple[int, int] | None = None,
        peer_timeout_s: float = 15.0,
        keys: tuple[str, str, Sequence[str]] | None = None,
        insecure: bool = False,
        beats: bool = False,
        shares_memory: bool = True,
        checksums: bool = False,
        run_id: int = 0,
        incarnation: int = 0,
        plan_hash: int = 0,
        compute_stream: int = 0,
        own_cpus: Sequence[int] = (),
        force_staging: bool = False,
    ) -> None: ...
    def add_channel(
        self,
        *,
        name: str,
        sends: bool,
        peer: str,
        channel_id: int,
        tensors: Sequence[tuple[str, int, int]],
        num_items: int,
        first_microbatch: int = 0,
        microbatch_stride: int = 1,
        num_microbatches: int = 1,
        chunk_bytes: int = 0,
        on_device: bool = True,
        codec: str = "none",
        places_on_device: bool = False,
        num_transfers_kept: int = 0,
        num_residuals: int = 1,
        posted_into: str = "",
        num_posts_max: int = 0,
    ) -> None: ...
    def offer_device_memory(self) -> tuple[str, str]:
        """Returns the offer, and the reason if there is none."""
    def why_out_of_reach(self, offer: str) -> str: ...
    def add_term(
        self,
        name: str,
        slot_bytes: int,
        num_slots: int,
        staging: bool = False,
        is_posted_into: bool = False,
    ) -> None: ...
    def seal(self) -> None: ...
    def listen(self) -> dict[str, str]: ...
    def connect(self, endpoints: dict[str, str]) -> None: ...
    def wait_open(self, timeout_s: float) -> bool: ...
    def channels_not_open(self) -> list[str]: ...
    def hold_slot(self, term: str) -> Any:
        """Returns a flat uint8 tensor over a slot of the term."""
    def residuals(self, channel: str) -> list[list[Any]]:
        """Returns the values that a sending channel's codec has not sent yet, as flat uint8 tensors. Items
        use the lists in turn; a list has one tensor for each tensor of an item. Call it after seal(), before
        the first item or when all items are sent."""
    def start(
        self,
        *,
        options: ScheduleOptions,
        rank: int,
        edges: Sequence[tuple[Edge, str]],
        tensors: TensorExchange,
        num_spans_max: int = 50000,
    ) -> None: ...
    def next_work(self) -> WorkItem:
        """Waits for the first work item, or for the item after end_of_data() or evaluate_first(). Raises
        RunFailure."""
    def advance(
        self,
        tensors: list[Any],
        fields: ItemFields,
        compute_ns: int,
        while_waiting: Callable[[WorkItem | None], None] | None,
        /,
    ) -> WorkItem:
        """Completes the work item, which made these tensors, and waits for the next item. Empties the list of
        tensors.

        while_waiting: called if the next item is not there yet, with the item without its tensors, or with
        None if the item is unknown."""
    def add_compute(self, began_ns: int, ended_ns: int) -> None: ...
    def begin_evaluation(self, boundary: int) -> None: ...
    def evaluate_first(self) -> None: ...
    def end_of_data(self, num_minibatches: int, boundary_events: int = 0) -> None: ...
    def num_minibatches(self) -> int | None: ...
    def send_item(
        self, channel: str, tensors: list[Any], fields: ItemFields = ..., timeout_s: float = 1e9
    ) -> bool: ...
    def send_items(self, items: Sequence[tuple[str, list[Any]]], fields: ItemFields = ...) -> None: ...
    def send_end(self, channel: str) -> None: ...
    def make_exchange(self, **spec: Any) -> ShardExchange: ...  # see shard_exchange_type.h
    def wait_until_sent(self, channel: str, num_left_max: int = 0, timeout_s: float = 1e9) -> bool:
        """Waits until at most num_left_max items are unsent. Returns False at the time-out."""
    def receive_item(
        self, channel: str, timeout_s: float = 1e9, counts_as_wait: bool = True
    ) -> ReceivedItem | None: ...
    def receive_any(self, channels: Sequence[str]) -> tuple[int, ReceivedItem] | None:
        """Returns the index of the first channel that has an item, and the item. None: stop_serving() was
        called."""
    def stop_serving(self) -> None: ...
    def fail(self, why: str) -> None: ...
    def versions(self, stage: int) -> list[tuple[int, int]]: ...
    def kept_versions(self, stage: int, minibatch: int) -> dict[int, int]:
        """Returns the slot of each version that a run needs at the stage if it continues with the
        minibatch."""
    def spans(self) -> list[tuple[str, int, int, int, int, int, int, int, int]]: ...
    def transfers(self) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, list[tuple[int, ...]]]]:
        """Returns, by channel, the rows of items that were sent and of items that were received, oldest
        first."""
    def wait_for_transfers(self, timeout_s: float) -> bool: ...
    def totals(self) -> dict[str, int]: ...
    def memory(self) -> list[tuple[str, int, int]]: ...
    def describe_memory(self) -> str: ...
    def channel_stats(self) -> dict[str, dict[str, int]]: ...
    def channel_transports(self) -> dict[str, str]: ...
    def pulse(self) -> None: ...
    def abort(self, why: str) -> None: ...
    def close(self, linger_s: float = 5.0) -> None: ...
