# The C++ core (csrc/bindings). Capsules are DLPack capsules; times are on the monotonic clock, in ns.
from collections.abc import Callable, Mapping, Sequence
from typing import Any

class RunFailure(RuntimeError):  # noqa: N818
    """The world's failure: args are (kind, message), kind "PeerLost", "Timeout", "CorruptFrame", ..."""

class Edge:
    """kind: activation, gradient, tied_gradient, tied_version, norm, push or pull."""
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

class Instruction:
    """One step of a worker's program; str() is its text."""
    @property
    def opcode(self) -> str: ...
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
    """Who is where."""
    @staticmethod
    def at_ranks(rank_of_stage: Sequence[int]) -> Placement: ...
    @staticmethod
    def in_order(num_replicas: Sequence[int], num_spares: Sequence[int] = ()) -> Placement: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    def num_replicas(self, stage: int) -> int: ...
    def num_owners(self, stage: int) -> int: ...
    @property
    def num_spares(self) -> int: ...
    def rank_of(self, stage: int, replica: int = 0) -> int: ...
    def ranks_of(self, stage: int) -> list[int]: ...
    def replica_at(self, rank: int) -> int: ...
    def stages_at(self, rank: int) -> list[int]: ...

class Rounds:
    """How microbatches fall on the replicas of a stage and on its updates. num_minibatches: None while it is
    not known, and a round has all that it may have."""
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
    def own_microbatches(self, replica: int, minibatch: int) -> list[int]: ...
    def is_first_of_minibatch(self, microbatch: int) -> bool: ...
    def is_last_of_minibatch(self, microbatch: int) -> bool: ...
    def is_first_of_round(self, minibatch: int, microbatch: int) -> bool: ...
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
    def num_stages(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
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
    def with_recompute(self, recompute: Sequence[bool]) -> ScheduleOptions: ...
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
    """A schedule's row of csrc/schedule/schedule_rules.h."""

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
def find_schedule_rules(schedule: str) -> ScheduleRules | None: ...
def num_microbatches_min(schedule: str, in_flight: Sequence[int], placement: Placement) -> int: ...
def drains_every_minibatch(options: ScheduleOptions) -> bool: ...
def derive_in_flight(num_replicas: Sequence[int]) -> list[int]: ...
def forward_version(options: ScheduleOptions, stage: int, minibatch: int, microbatch: int = 0) -> int: ...
def backward_version(options: ScheduleOptions, stage: int, minibatch: int, microbatch: int = 0) -> int: ...
def tied_version(options: ScheduleOptions, owner: int, minibatch: int, microbatch: int = 0) -> int: ...
def num_versions_kept(options: ScheduleOptions, stage: int) -> int: ...
def stashes_versions(options: ScheduleOptions, stage: int) -> bool: ...
def oldest_version(options: ScheduleOptions, stage: int) -> int: ...
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
) -> list[Instruction]: ...
def phase_of(options: ScheduleOptions, instruction: Instruction, num_minibatches: int | None) -> str: ...
def replay(
    options: ScheduleOptions, num_minibatches: int, programs: Sequence[Sequence[Instruction]] | None = None
) -> dict[str, Any]: ...
def edges_of(options: ScheduleOptions) -> list[Edge]: ...
def items_of(options: ScheduleOptions, edge: Edge) -> tuple[int, int]: ...
def add_transfers(
    options: ScheduleOptions, programs: Sequence[Sequence[Instruction]], num_minibatches: int
) -> list[list[Instruction]]: ...
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
) -> tuple[list[tuple[int, int, int]], float]: ...

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
    num_microbatches: int = 1,
) -> tuple[list[tuple[int, int, int]], float, list[bool], list[float]] | None: ...
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
) -> list[float]: ...

class StageDurations:
    def __init__(
        self,
        *,
        forward_ms: float,
        later_forward_ms: float,
        backward_ms: float,
        later_backward_ms: float,
        recompute_ms: float = 0.0,
        update_ms: float = 0.0,
        push_ms: float = 0.0,
        pull_ms: float = 0.0,
        sync_latency_ms: float = 0.0,
        num_chunks: float = 1.0,
        push_leads_ms: Sequence[tuple[float, float]] = (),
        updates_whole: bool = False,
        wakings_ms: Sequence[tuple[float, float, float]] = (),
        num_replicas: int | None = None,
        spare_push_ms: float = 0.0,
        spare_pull_ms: float = 0.0,
        spare_update_ms: float = 0.0,
    ) -> None: ...

class BoundaryDurations:
    def __init__(self, activation_ms: float, gradient_ms: float, latency_ms: float) -> None: ...

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
]: ...
def summarize(
    programs: Sequence[Sequence[Instruction]], spans_ms: Sequence[Sequence[tuple[float, float]]]
) -> tuple[float, float, float | None, float | None]: ...
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
) -> float: ...
def stage_time_s(
    compute_s: Sequence[float],
    activation_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
    first_layer: int,
    last_layer: int,
    num_replicas: int,
    bandwidth_bytes_per_s: float,
    num_microbatches: int = 1,
) -> float: ...
def bottleneck_s(
    compute_s: Sequence[float],
    activation_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
    stages: Sequence[tuple[int, int, int]],
    bandwidth_bytes_per_s: float,
    num_microbatches: int = 1,
) -> float: ...
def weight_layout(parameters: Sequence[tuple[str, str, int]]) -> tuple[int, list[int]]: ...
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
) -> None: ...
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
) -> None: ...
def deal_shards(
    parameters: Sequence[tuple[str, str, int]],
    num_replicas: int,
    *,
    whole_tensors: bool,
    num_spares: int = 0,
) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]: ...

SHARD_CHUNK_BYTES_MAX: int
SPARE_CHUNK_BYTES_MAX: int
EVALUATED_MINIBATCHES_MAX: int  # validation minibatches of one evaluation
NUM_EVALUATION_SLOTS: int  # validation minibatches that an edge holds
NUM_SPARE_SLOTS: int  # of chunks that one replica pushes to a spare

def shard_shares(num_replicas: int, num_spares: int) -> list[int]: ...
def aggregate(
    parts: Sequence[int],
    num_minibatches: int,
    mean: int,
    num_elements: int,
    *,
    dtype: str,
    num_threads: int = 1,
) -> None: ...

class ShardUpdates:
    def __init__(self, *, num_replicas: int, num_parts: int, first_round: int) -> None: ...
    def apply(self, replica: int, round: int, part: int) -> str | None: ...
    def round(self, replica: int) -> int: ...
    def num_updates(self, part: int) -> int: ...
    @property
    def order(self) -> list[int]: ...

class ShardRounds:
    def __init__(
        self, *, num_replicas: int, num_chunks: int, first_version: int, num_rounds_max: int
    ) -> None: ...
    def arrive(self, replica: int, round: int, chunk: int) -> str | None: ...
    def is_complete(self, chunk: int, members: Sequence[int]) -> bool: ...
    def publish(self, chunk: int, members: Sequence[int]) -> int: ...
    def version(self, chunk: int) -> int: ...

def share_openmp(library_path: str) -> bool: ...
def poisons_released_slots() -> bool: ...
def open_segment_arena(address: int, num_bytes: int, device: str = "host") -> bool: ...
def segment_arena_bytes() -> tuple[int, int]: ...

DTYPES: list[str]  # of the wire, by torch's names
SHARED_MEMORY: str  # how a channel's tensors travel where both ends map the receiver's memory
CUDA_IPC: str  # of memory of a device
STAGING_TERM: str  # before a channel's name, of the pool's terms
RESIDUAL_TERM: str
ENCODED_TERM: str

def slot_stride_bytes(slot_bytes: int) -> int: ...

NUM_TENSORS_MAX: int  # of an item of a channel
NUM_DIMS_MAX: int  # of each of them
COMPUTED_LATER: int

def channel_bytes(tensors: Sequence[tuple[str, int, int]], codec: str) -> tuple[int, int, int, bool]: ...
def codec_name(name: str) -> str: ...
def derived_seed(seed: int, number: int) -> int: ...
def make_curve_keys(libzmq_path: str = "") -> tuple[str, str]: ...
def die_with_parent(parent_pid: int) -> None: ...
def keep_freed_memory() -> None: ...
def cuda_available() -> bool: ...
def why_no_cuda() -> str: ...
def built_with_cuda() -> bool: ...

class WorkItem:
    kind: str
    stage: int
    minibatch: int
    microbatch: int
    read_slot: int
    write_slot: int
    edge: Edge | None
    tensors: list[Any]
    data_fingerprint: int
    gradients_overflowed: bool
    is_empty: bool
    is_end_of_data: bool
    loss_scale: float
    boundary_events: int
    freed_slot: int
    num_minibatches: int

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
    def fingerprint(self, tensors: list[Any], /) -> int | None: ...

class ReceivedItem:
    @property
    def fields(self) -> ItemFields: ...
    @property
    def is_end(self) -> bool: ...
    def take_tensors(self) -> list[Any]: ...

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
        chunk_bytes: int | None = None,
        on_device: bool = True,
        codec: str = "none",
        places_on_device: bool = False,
        num_transfers_kept: int = 0,
        num_residuals: int = 1,
        posted_into: str = "",
        num_posts_max: int = 0,
    ) -> None: ...
    def offer_device_memory(self) -> tuple[str, str]: ...
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
    def hold_slot(self, term: str) -> Any: ...
    def residuals(self, channel: str) -> list[list[Any]]: ...
    def start(
        self,
        *,
        options: ScheduleOptions,
        rank: int,
        edges: Sequence[tuple[Edge, str]],
        tensors: TensorExchange,
        num_spans_max: int = 50000,
    ) -> None: ...
    def next_work(self) -> WorkItem: ...
    def advance(
        self,
        tensors: list[Any],
        fields: ItemFields,
        compute_ns: int,
        while_waiting: Callable[[WorkItem | None], None] | None,
        /,
    ) -> WorkItem: ...
    def add_compute(self, began_ns: int, ended_ns: int) -> None: ...
    def begin_evaluation(self, boundary: int) -> None: ...
    def end_of_data(self, num_minibatches: int, boundary_events: int = 0) -> None: ...
    def end_events(self) -> int: ...
    def num_minibatches(self) -> int | None: ...
    def send_item(
        self, channel: str, tensors: list[Any], fields: ItemFields = ..., timeout_s: float = 1e9
    ) -> bool: ...
    def send_end(self, channel: str) -> None: ...
    def wait_until_sent(self, channel: str, num_left_max: int = 0, timeout_s: float = 1e9) -> bool: ...
    def receive_item(
        self, channel: str, timeout_s: float = 1e9, counts_as_wait: bool = True
    ) -> ReceivedItem | None: ...
    def post_items(self, channel: str, places: Sequence[tuple[int, int]]) -> None: ...
    def receive_any(self, channels: Sequence[str]) -> tuple[int, ReceivedItem] | None: ...
    def stop_serving(self) -> None: ...
    def fail(self, why: str) -> None: ...
    def versions(self, stage: int) -> list[tuple[int, int]]: ...
    def kept_versions(self, stage: int) -> dict[int, int]: ...
    def spans(self) -> list[tuple[str, int, int, int, int, int, int, int, int]]: ...
    def transfers(self) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, list[tuple[int, ...]]]]: ...
    def wait_for_transfers(self, timeout_s: float) -> bool: ...
    def totals(self) -> dict[str, int]: ...
    def memory(self) -> list[tuple[str, int, int]]: ...
    def describe_memory(self) -> str: ...
    def channel_stats(self) -> dict[str, dict[str, int]]: ...
    def channel_transports(self) -> dict[str, str]: ...
    def pulse(self) -> None: ...
    def abort(self, why: str) -> None: ...
    def close(self, linger_s: float = 5.0) -> None: ...
