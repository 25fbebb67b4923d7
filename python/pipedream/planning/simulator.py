"""What a schedule does in time: replays the workers' instruction lists with given durations.

Pure; any thread; needs no torch and no core. The lists are those that the runtime follows, so a picture or
a bubble from here is one of the schedule that runs, not of a drawing of it.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pipedream.common.document import check_number
from pipedream.planning.lanes import Chunks, Lane, Network, Transfer
from pipedream.planning.spread import EVEN, Spread
from pipedream.planning.step_times import SYNC, TRANSFERS, StageTimes, TransferTimes
from pipedream.planning.waking import StageWaking, Waits

__all__ = [
    "TRANSFERS",
    "Replay",
    "Simulation",
    "StageTimes",
    "Step",
    "StepEdge",
    "TimedInstruction",
    "Transfer",
    "TransferTimes",
    "simulate",
    "summarize",
]


class Step(Protocol):
    """What an instruction says; `_core.Instruction` does."""

    @property
    def opcode(self) -> str: ...  # FORWARD, RECOMPUTE, BACKWARD or UPDATE; SEND or RECV
    @property
    def stage(self) -> int: ...
    @property
    def replica(self) -> int: ...
    @property
    def minibatch(self) -> int: ...  # of an UPDATE the first of its round
    @property
    def microbatch(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def edge(self) -> StepEdge | None: ...  # of SEND and RECV


class StepEdge(Protocol):
    """Over which an item travels; `_core.Edge` does. Equal, and of equal hash, at both ends."""

    @property
    def kind(self) -> str: ...  # activation, gradient, tied_gradient, tied_version, norm, push or pull
    @property
    def from_stage(self) -> int: ...
    @property
    def from_replica(self) -> int: ...
    @property
    def to_stage(self) -> int: ...
    @property
    def to_replica(self) -> int: ...


_AFTER_FORWARD = ("RECOMPUTE", "BACKWARD")


class TimedInstruction(NamedTuple):
    """An instruction and when it was done, in milliseconds since the first one began."""

    instruction: Step
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Simulation:
    """When every instruction was done, and what follows from it.

    Shares are of the workers' time, idle / all; compute that is repeated (RECOMPUTE) counts as work.

    The steady figures are None when there are too few minibatches. Let `skipped` be the most minibatches
    that any worker starts before its first update, less one, and N the number of minibatches. Worker w is
    looked at from the end of its update of minibatch `skipped` to the end of its update of minibatch
    N - 1 - `skipped`: a whole number of minibatches, after its warm-up and before its cool-down. For
    schedules that drain every minibatch that is everything after the first one, warm-ups and cool-downs
    included, as they are what such a schedule costs. With replicas minibatches are counted through all of
    them, those that other replicas start before it included, and both ends of the window are moved inwards to
    where all stages begin a round.
    """

    timeline: tuple[tuple[TimedInstruction, ...], ...]
    """Per worker, in order."""
    transfers: tuple[Transfer, ...]
    """In the order of their begin; between stages of one worker items go from hand to hand, at once."""
    makespan_ms: float
    bubble_share: float
    """1 - (sum of all workers' work) / (number of workers * makespan)."""
    steady_bubble_share: float | None
    ms_per_minibatch: float | None
    """In the steady window, from when a minibatch was updated everywhere to when the last one was."""

    @property
    def num_workers(self) -> int:
        return len(self.timeline)

    @property
    def num_minibatches(self) -> int:
        return 1 + max((timed.instruction.minibatch for row in self.timeline for timed in row), default=-1)


def simulate(
    programs: Sequence[Sequence[Step]],
    stage_times: StageTimes | Sequence[StageTimes],
    transfer_ms: float | Sequence[TransferTimes] = 0.0,
    spread: Spread = EVEN,
    waking: StageWaking | None = None,
    *,
    one_link: bool = False,
) -> Simulation:
    """Replays one list per worker; one StageTimes, or one per stage; one time per transfer, or one pair per
    boundary between a stage and the next. spread: of single instructions about these times. waking: what work
    takes besides after waits; None: nothing. one_link: a worker has one link to all others, as a host has one
    network interface.

    A worker does its instructions in order, one at a time: a RECV is done as soon as its item has arrived,
    a SEND at once. What is sent queues for the link to the other worker, which carries one item at a time in
    each direction, whatever the edge; what replicas push and pull queues for the one line that the worker has
    for all of them. With one_link all of that is one line, which what a worker sends at once shares evenly,
    and what other stages send a worker queues there for its line in, which carries one item at a time, first
    sent first. What replicas exchange shares that line evenly, as all of them send each other as much at
    once; an item of another stage that comes meanwhile takes its time of the next that they send. Of an edge
    items arrive in the order in which they are sent. A shard of several chunks (StageTimes) is pushed from
    when its first one is made, and its owner updates and sends on one while others come. What is pushed and
    no list receives is to an asynchronous shard, which updates beside its worker's own work and answers by a
    pull.

    Raises ValueError for lists that wait for each other, naming who waits for what, for an instruction
    that is there twice, a stage that is at two workers or none, and figures of the wrong number.
    """
    with _collector_paused():
        return Replay(programs, stage_times, transfer_ms, spread, waking, one_link=one_link).run()


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """A replay makes millions of tuples in no circle, which the collector would go through time and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class PreparedStep(NamedTuple):
    """An instruction, with all that is known of it before the replay."""

    instruction: Step
    opcode: str
    lane: Lane | None
    """Of SEND and RECV."""
    mean_ms: float


class Replay:
    """Plays the lists once. A worker's times depend only on what it receives, so the order in which the
    workers are visited changes nothing but where senders share a receiver's line: there they send in the
    order of time."""

    def __init__(
        self,
        programs: Sequence[Sequence[Step]],
        stage_times: StageTimes | Sequence[StageTimes],
        transfer_ms: float | Sequence[TransferTimes],
        spread: Spread,
        waking: StageWaking | None = None,
        *,
        one_link: bool = False,
    ) -> None:
        self._one_link = one_link
        self._waits = Waits(waking, len(programs)) if waking else None
        self._draws = [spread.draws(worker) for worker in range(len(programs))]
        self._workers = _find_workers(programs)
        num_stages = 1 + max((stage for stage, _ in self._workers), default=-1)
        self._stage_times = _spread_times(stage_times, num_stages)
        self._transfer_times = _spread_transfers(transfer_ms, num_stages - 1)
        self._lanes: dict[StepEdge, Lane] = {}
        self.steps = [self._prepared(program) for program in programs]
        self._find_answers()
        self.timeline: list[list[TimedInstruction]] = [[] for _ in programs]
        self._network = Network(len(programs))
        self._about_to_send: list[tuple[float, int]] = []
        """A heap of (ms, worker): of those that are next to send, where that is in the order of time."""

    def run(self) -> Simulation:
        ready = deque(range(len(self.steps)))
        while ready or self._about_to_send:
            if ready:
                self._advance(ready.popleft(), ready)
            else:  # all others send later, or wait for what is sent later
                _, worker = heapq.heappop(self._about_to_send)
                self._advance(worker, ready, is_first_to_send=True)
        self.check_all_done()
        return summarize(self.timeline, self._network.transfers)

    def _advance(self, worker: int, ready: deque[int], *, is_first_to_send: bool = False) -> None:
        """Does all that the worker can do now, and adds those that waited for it to the ready ones."""
        steps, done = self.steps[worker], self.timeline[worker]
        now_ms = done[-1].end_ms if done else 0.0
        while len(done) < len(steps):
            instruction, opcode, lane, _ = step = steps[len(done)]
            begin_ms = now_ms
            if lane is None:
                now_ms += self.work_ms(worker, step)
            elif opcode == "SEND":
                if self._one_link and not is_first_to_send:
                    heapq.heappush(self._about_to_send, (now_ms, worker))
                    return
                is_first_to_send = False
                for sent in self.send(worker, now_ms):
                    if sent.is_awaited:
                        sent.is_awaited = False
                        ready.append(sent.ends[1])
                continue
            elif lane.arrivals_ms:
                begin_ms = max(now_ms, lane.arrivals_ms[0])
                self.receive(worker, now_ms)
                self.waited(worker, begin_ms - now_ms)
                now_ms = begin_ms
            else:
                lane.is_awaited = True
                return
            done.append(TimedInstruction(instruction, begin_ms, now_ms))

    def work_ms(self, worker: int, step: PreparedStep) -> float:
        """How long this one takes; to be asked once of each."""
        of_itself_ms = step.mean_ms * self._draws[worker].next(step.opcode) if step.mean_ms else 0.0
        if self._waits is None:
            return of_itself_ms
        return of_itself_ms + self._waits.waking_ms(worker, step.instruction.stage, step.opcode)

    def waited(self, worker: int, for_ms: float) -> None:
        if self._waits is not None:
            self._waits.add(worker, for_ms)

    def receive(self, worker: int, since_ms: float) -> None:
        """Takes what the worker's next step is for, which it has been ready for since then."""
        steps, position = self.steps[worker], len(self.timeline[worker])
        lane = steps[position].lane
        assert lane is not None
        self._network.receive(lane, steps[position - 1].lane if position else None, since_ms)

    def send(self, worker: int, now_ms: float) -> list[Lane]:
        """Does the worker's next step, and with one link those after it that send too. By what is sent."""
        steps, done = self.steps[worker], self.timeline[worker]
        sent: list[Step] = []
        lanes: list[Lane] = []
        for position in range(len(done), len(steps) if self._one_link else len(done) + 1):
            instruction, opcode, lane, _ = steps[position]
            if lane is None or opcode != "SEND":
                break
            sent.append(instruction)
            lanes.append(lane)
        items = [(instruction.minibatch, instruction.microbatch) for instruction in sent]
        arrivals_ms = self._network.send(lanes, items, now_ms)
        for instruction, lane, item, arrives_ms in zip(sent, lanes, items, arrivals_ms, strict=True):
            done.append(TimedInstruction(instruction, now_ms, now_ms))
            if lane.answer is not None:
                # An asynchronous shard updates what has come, and sends it back. What one is answered queues
                # behind what it pushes: each line carries as many answers as pushes, whoever's they are.
                update_ms = self._stage_times[instruction.stage].update_ms
                self._network.send([lane.answer], [item], arrives_ms + update_ms)
        return lanes

    def _find_answers(self) -> None:
        """Pushes that no list receives are to asynchronous shards, which answer beside the lists."""
        received = {step.lane for steps in self.steps for step in steps if step.opcode == "RECV"}
        for edge, lane in self._lanes.items():
            if edge.kind != "push" or lane in received:
                continue
            for other, pull in self._lanes.items():
                ends = (other.from_stage, other.from_replica, other.to_stage, other.to_replica)
                if other.kind == "pull" and ends == (
                    edge.to_stage,
                    edge.to_replica,
                    edge.from_stage,
                    edge.from_replica,
                ):
                    lane.answer, pull.link, pull.queues_in = pull, lane.link, False

    def check_all_done(self) -> None:
        if any(len(done) < len(steps) for done, steps in zip(self.timeline, self.steps, strict=True)):
            raise ValueError(self._describe_deadlock())

    def _prepared(self, program: Sequence[Step]) -> list[PreparedStep]:
        """All instructions of a stage's replica are in one list, so this sees whether one is there twice, or
        a backward before its forward."""
        steps = []
        seen: set[tuple[Any, ...]] = set()
        for instruction in program:
            opcode, microbatch = instruction.opcode, instruction.microbatch
            if opcode in TRANSFERS:  # of an edge, which has one of each minibatch's microbatches
                edge = instruction.edge
                assert edge is not None
                lane, mean_ms = self._lanes.get(edge) or self._lane_of(edge), 0.0
                key: tuple[Any, ...] = (lane, opcode, instruction.minibatch, microbatch)
            else:
                stage, replica = instruction.stage, instruction.replica
                lane, mean_ms = None, self._stage_times[stage].of(opcode, microbatch, replica)
                key = (opcode, stage, replica, instruction.minibatch, microbatch)
                if opcode in _AFTER_FORWARD and ("FORWARD", *key[1:]) not in seen:
                    raise ValueError(f"{_describe(instruction)} comes before its forward")
            if key in seen:
                raise ValueError(f"{_describe(instruction)} is in the lists twice")
            seen.add(key)
            steps.append(PreparedStep(instruction, opcode, lane, mean_ms))
        return steps

    def _lane_of(self, edge: StepEdge) -> Lane:
        lane = self._lanes.get(edge)
        if lane is None:
            chunks = Chunks()
            ends = (
                self._workers[edge.from_stage, edge.from_replica],
                self._workers[edge.to_stage, edge.to_replica],
            )
            if edge.from_stage == edge.to_stage:  # between its replicas
                owner = edge.to_replica if edge.kind == "push" else edge.from_replica
                of_stage = self._stage_times[edge.from_stage]
                times = (of_stage.of_exchange(edge.kind, owner), of_stage.sync_latency_ms)
                if edge.kind in SYNC:
                    _check_leads(of_stage, edge.from_stage, owner)
                    chunks = Chunks.between(edge.kind, owner, of_stage)
            else:
                boundary = self._transfer_times[min(edge.from_stage, edge.to_stage)]
                times = (boundary.of(edge.kind), boundary.latency_ms)
            lane = self._lanes[edge] = Lane(edge, ends, *times, one_link=self._one_link, chunks=chunks)
        return lane

    def _describe_deadlock(self) -> str:
        waits = []
        for worker, steps in enumerate(self.steps):
            position = len(self.timeline[worker])
            if position == len(steps):
                continue
            instruction, _, lane, _ = steps[position]
            assert lane is not None
            waits.append(
                f"worker {worker} at position {position} ({_describe(instruction)}) waits for"
                f" {_name_of(*lane.source)} at worker {lane.ends[0]}"
            )
        return "the lists deadlock: " + "; ".join(waits)


def _check_leads(times: StageTimes, stage: int, owner: int) -> None:
    if times.push_leads_ms and owner >= len(times.push_leads_ms):
        raise ValueError(
            f"stage {stage} has {len(times.push_leads_ms)} push leads and an owner {owner}: give one for each"
        )


def _describe(instruction: Step) -> str:
    if instruction.edge is not None:
        text = f"{instruction.opcode} {instruction.edge} minibatch {instruction.minibatch}"
        return f"{text} microbatch {instruction.microbatch}"
    place = _name_of(instruction.stage, instruction.replica)
    text = f"{instruction.opcode} {place} minibatch {instruction.minibatch}"
    return text if instruction.opcode == "UPDATE" else f"{text} microbatch {instruction.microbatch}"


def _name_of(stage: int, replica: int) -> str:
    return f"stage {stage} replica {replica}" if replica else f"stage {stage}"


def _find_workers(programs: Sequence[Sequence[Step]]) -> dict[tuple[int, int], int]:
    """The worker of every (stage, replica)."""
    workers: dict[tuple[int, int], int] = {}
    for worker, program in enumerate(programs):
        for place in {(instruction.stage, instruction.replica) for instruction in program}:
            known = workers.setdefault(place, worker)
            if known != worker:
                raise ValueError(f"{_name_of(*place)} is at worker {known} and at worker {worker}")
    last = max((stage for stage, _ in workers), default=-1)
    for stage in range(last + 1):
        if (stage, 0) not in workers:
            raise ValueError(f"stage {stage} has no instructions, but stage {last} has")
    return workers


def _spread_times(given: StageTimes | Sequence[StageTimes], num_stages: int) -> list[StageTimes]:
    if isinstance(given, StageTimes):
        return [given] * num_stages
    if len(given) != num_stages:
        raise ValueError(f"stage_times has {len(given)} entries for {num_stages} stages: give one per stage")
    return list(given)


def _spread_transfers(given: float | Sequence[TransferTimes], num_boundaries: int) -> list[TransferTimes]:
    if isinstance(given, (int, float)):
        both_ms = check_number("transfer_ms", given)
        return [TransferTimes(both_ms, both_ms)] * max(0, num_boundaries)
    if len(given) != num_boundaries:
        raise ValueError(
            f"transfer_ms has {len(given)} entries for {num_boundaries} boundaries: give one per boundary"
        )
    return list(given)


def summarize(timeline: list[list[TimedInstruction]], transfers: list[Transfer]) -> Simulation:
    makespan_ms = max((row[-1].end_ms for row in timeline if row), default=0.0)
    busy_ms = sum(_busy_ms(row, 0.0, makespan_ms) for row in timeline)
    steady_bubble_share, ms_per_minibatch = _measure_steady(timeline)
    return Simulation(
        timeline=tuple(tuple(row) for row in timeline),
        transfers=tuple(sorted(transfers, key=lambda transfer: transfer.begin_ms)),
        makespan_ms=makespan_ms,
        bubble_share=_idle_share(busy_ms, len(timeline) * makespan_ms),
        steady_bubble_share=steady_bubble_share,
        ms_per_minibatch=ms_per_minibatch,
    )


def _measure_steady(timeline: list[list[TimedInstruction]]) -> tuple[float | None, float | None]:
    """steady_bubble_share and ms_per_minibatch, as Simulation defines them."""
    update_ends = [_update_ends(row) for row in timeline]
    if not all(update_ends):
        return None, None
    num_minibatches = 1 + max(timed.instruction.minibatch for row in timeline for timed in row)
    skipped = max(_num_started_before_first_update(row) for row in timeline) - 1
    # A round begins at every multiple of its length, which the next update tells.
    together = math.lcm(*(_minibatches_per_update(ends) for ends in update_ends))
    first = -(-skipped // together) * together
    last = (num_minibatches - 1 - skipped) // together * together
    if skipped < 0 or last <= first or not all(first in ends and last in ends for ends in update_ends):
        return None, None
    windows = [(ends[first], ends[last]) for ends in update_ends]
    busy_ms = sum(_busy_ms(row, *window) for row, window in zip(timeline, windows, strict=True))
    all_ms = sum(end_ms - begin_ms for begin_ms, end_ms in windows)
    finished_first, finished_last = (
        max(ends[minibatch] for ends in update_ends) for minibatch in (first, last)
    )
    return _idle_share(busy_ms, all_ms), (finished_last - finished_first) / (last - first)


def _update_ends(row: list[TimedInstruction]) -> dict[int, float]:
    """Per round, by its first minibatch, when the worker's stages were all updated."""
    return {
        timed.instruction.minibatch: timed.end_ms for timed in row if timed.instruction.opcode == "UPDATE"
    }


def _minibatches_per_update(update_ends: dict[int, float]) -> int:
    """1 where there is one update, and so no next one."""
    begins = sorted(update_ends)
    return begins[1] - begins[0] if len(begins) > 1 else 1


def _num_started_before_first_update(row: list[TimedInstruction]) -> int:
    started = 0
    for timed in row:
        if timed.instruction.opcode == "UPDATE":
            break
        if timed.instruction.edge is None:
            started = max(started, 1 + timed.instruction.minibatch)
    return started


def _busy_ms(row: list[TimedInstruction], begin_ms: float, end_ms: float) -> float:
    """Work between two times, each of which is the begin or the end of an instruction."""
    return sum(
        timed.end_ms - timed.begin_ms
        for timed in row
        if timed.begin_ms >= begin_ms and timed.end_ms <= end_ms
    )


def _idle_share(busy_ms: float, all_ms: float) -> float:
    return max(0.0, 1.0 - busy_ms / all_ms) if all_ms > 0 else 0.0
