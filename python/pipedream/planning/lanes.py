"""What carries a simulation's items from worker to worker: a lane for each edge, by the links of both ends.

Pure; any thread; needs no torch. The core has the same (csrc/planner/lanes.h).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipedream.planning.step_times import SYNC, StageTimes

if TYPE_CHECKING:
    from pipedream.planning.simulator import StepEdge

__all__ = ["Chunks", "Lane", "LineIn", "LineOut", "Network", "Transfer"]


class Chunks(NamedTuple):
    """Of what an edge carries between replicas: equal ones, each of which leaves as soon as it is made."""

    number: int = 1
    first_lead_ms: float = 0.0
    """Of a push: so long before all are made the first one is."""
    last_lead_ms: float = 0.0
    """And the last one."""
    update_ms: float = 0.0
    """Of one, which hides behind the next; 0 where none does."""

    @classmethod
    def between(cls, kind: str, owner: int, times: StageTimes) -> Chunks:
        """kind: push or pull."""
        if times.num_chunks == 1 and not times.push_leads_ms:
            return _WHOLE
        if kind == "pull" and times.updates_whole:
            return _WHOLE
        leads_ms = times.push_leads_ms[owner] if kind == "push" and times.push_leads_ms else (0.0, 0.0)
        update_ms = 0.0 if times.updates_whole else times.update_ms / times.num_chunks
        return cls(times.num_chunks, *leads_ms, update_ms=update_ms)


_WHOLE = Chunks()


class Transfer(NamedTuple):
    """What one link carried: an item of an edge."""

    what: str
    """The edge's kind: activation, gradient, tied_gradient, tied_version, norm, push or pull."""
    from_worker: int
    to_worker: int
    minibatch: int
    microbatch: int
    begin_ms: float
    end_ms: float


class Lane:
    """What travels over one edge."""

    def __init__(
        self,
        edge: StepEdge,
        ends: tuple[int, int],
        transfer_ms: float,
        latency_ms: float,
        *,
        one_link: bool,
        chunks: Chunks = _WHOLE,
    ) -> None:
        self.kind = edge.kind
        self.ends = ends
        """The workers."""
        self.source = (edge.from_stage, edge.from_replica)
        # Only ends[0] uses this direction of the link, and does its instructions in order: so first sent is
        # first carried.
        is_shared = one_link or edge.kind in SYNC
        self.link = None if ends[0] == ends[1] else (ends[0], None if is_shared else ends[1])
        self.queues_in = one_link and ends[0] != ends[1]
        """At the receiver, with what others send."""
        self.transfer_ms = transfer_ms
        self.latency_ms = latency_ms
        self.chunks = chunks
        self.arrivals_ms: deque[float] = deque()
        """Of what has been sent and is not received: when the receiver may go on."""
        self.firsts_ms: deque[float] = deque()
        """Of pushes among that: when the first chunk arrives."""
        self.is_awaited = False
        """The receiver can do nothing else."""
        self.answer: Lane | None = None
        """Of a push to an asynchronous shard: by which it is answered."""


class _Span(NamedTuple):
    """From when to when."""

    begin_ms: float
    end_ms: float


class Made(NamedTuple):
    """What is sent now, chunk by chunk."""

    first_ms: float
    """When the first chunk was there."""
    last_ms: float
    """And the last one."""
    transfer_ms: float
    """Of all, with the line to itself."""
    of_chunk_ms: float


class LineOut:
    """By which a worker sends: what is sent at once shares it evenly, what is sent later waits."""

    def __init__(self) -> None:
        self._free_ms = 0.0

    def carry_one(self, now_ms: float, transfer_ms: float) -> float:
        """As carry(), of one item that is made now, as most are: when it begins to leave."""
        begin_ms = max(now_ms, self._free_ms)
        if transfer_ms > 0:
            self._free_ms = begin_ms + transfer_ms
        return begin_ms

    def carry(self, now_ms: float, sent: Sequence[Made]) -> list[_Span]:
        """When each of what is sent now leaves. Its chunks from before have left if nothing else did then."""
        begin_ms = max(now_ms, self._free_ms)
        begins_ms, left_ms = [begin_ms] * len(sent), [made.transfer_ms for made in sent]
        for index, made in enumerate(sent):
            early_ms = max(made.first_ms, self._free_ms)
            not_there_ms = max(0.0, made.last_ms + made.of_chunk_ms - begin_ms)
            taken_ms = min(begin_ms - early_ms, made.transfer_ms - not_there_ms)
            if taken_ms > 0:
                begins_ms[index], left_ms[index] = early_ms, made.transfer_ms - taken_ms
                self._free_ms = early_ms + taken_ms
        ends_ms, carried_ms, sharing = [*begins_ms], 0.0, len(left_ms)
        for index in sorted(range(len(left_ms)), key=left_ms.__getitem__):
            if left_ms[index] > 0:
                ends_ms[index] = begin_ms + (carried_ms + sharing * left_ms[index])
            else:
                ends_ms[index] += sent[index].transfer_ms
            carried_ms += left_ms[index]
            sharing -= 1
        if carried_ms > 0:
            self._free_ms = begin_ms + carried_ms
        return [_Span(*span) for span in zip(begins_ms, ends_ms, strict=True)]


class LineIn:
    """By which a worker gets what others send it."""

    def __init__(self) -> None:
        self._free_ms = 0.0  # for what other stages send
        self._exchanges_until_ms = 0.0
        self._taken_ms = 0.0  # of what replicas exchange, by what has come meanwhile

    def begin(self, kind: str, ready_ms: float, transfer_ms: float) -> float:
        """When an item begins to come that could at that time."""
        if kind in SYNC:
            begin_ms = max(ready_ms, min(ready_ms, self._exchanges_until_ms) + self._taken_ms)
            self._taken_ms = 0.0
            self._exchanges_until_ms = max(self._exchanges_until_ms, begin_ms + transfer_ms)
            return begin_ms
        begin_ms = max(ready_ms, self._free_ms)
        self._free_ms = begin_ms + transfer_ms
        self._taken_ms += max(0.0, min(self._free_ms, self._exchanges_until_ms) - begin_ms)
        return begin_ms


class Network:
    """All lines of a simulation, and what they have carried."""

    def __init__(self, num_workers: int) -> None:
        self.transfers: list[Transfer] = []
        self._lines_out: defaultdict[tuple[int, int | None], LineOut] = defaultdict(LineOut)
        self._lines_in = [LineIn() for _ in range(num_workers)]
        self._gathered_ms = [math.inf] * num_workers
        """By worker, since when it has the first chunk of all gradients of its shard."""

    def send(self, lanes: Sequence[Lane], items: Sequence[tuple[int, int]], now_ms: float) -> list[float]:
        """What one worker sends at once, by the same line. When all of each arrives. items: minibatch and
        microbatch."""
        if len(lanes) == 1 and lanes[0].kind not in SYNC:
            return [self._send_one(lanes[0], items[0], now_ms)]
        sent = [self._made(lane, now_ms) for lane in lanes]
        arrivals = [_Span(made.last_ms, made.last_ms) for made in sent]
        carried = [index for index, lane in enumerate(lanes) if lane.link is not None]
        link = lanes[carried[0]].link if carried else None
        if link is not None:
            leaving = self._lines_out[link].carry(now_ms, [sent[index] for index in carried])
            for index, leaves in zip(carried, leaving, strict=True):
                lane = lanes[index]
                arrivals[index] = self._arrivals(lane, sent[index], leaves)
                ends_ms = (leaves.begin_ms, arrivals[index].end_ms)
                self.transfers.append(Transfer(lane.kind, *lane.ends, *items[index], *ends_ms))
        for lane, (first_ms, all_ms) in zip(lanes, arrivals, strict=True):
            goes_on_ms = all_ms
            if lane.kind == "push":
                lane.firsts_ms.append(first_ms)
                # All chunks but one are updated while others come.
                goes_on_ms = max(first_ms, all_ms - (lane.chunks.number - 1) * lane.chunks.update_ms)
            lane.arrivals_ms.append(max(goes_on_ms, now_ms))  # nobody goes on before what has been sent
        return [all_ms for _, all_ms in arrivals]

    def _send_one(self, lane: Lane, item: tuple[int, int], now_ms: float) -> float:
        """Of another stage."""
        arrives_ms = now_ms
        if lane.link is not None:
            transfer_ms = lane.transfer_ms
            begin_ms = comes_ms = self._lines_out[lane.link].carry_one(now_ms, transfer_ms)
            if lane.queues_in:
                comes_ms = self._lines_in[lane.ends[1]].begin(lane.kind, begin_ms, transfer_ms)
            arrives_ms = comes_ms + transfer_ms + lane.latency_ms
            self.transfers.append(Transfer(lane.kind, *lane.ends, *item, begin_ms, arrives_ms))
        lane.arrivals_ms.append(arrives_ms)
        return arrives_ms

    def _made(self, lane: Lane, now_ms: float) -> Made:
        chunks = lane.chunks
        first_ms = last_ms = now_ms
        if lane.kind == "push":
            self._gathered_ms[lane.ends[0]] = math.inf
            first_ms, last_ms = now_ms - chunks.first_lead_ms, now_ms - chunks.last_lead_ms
        elif lane.kind == "pull" and chunks.number > 1:
            first_ms = min(now_ms, self._gathered_ms[lane.ends[0]] + chunks.update_ms)
        return Made(first_ms, last_ms, lane.transfer_ms, lane.transfer_ms / chunks.number)

    def _arrivals(self, lane: Lane, made: Made, leaves: _Span) -> _Span:
        """Of the first chunk, and of all."""
        begin_ms, end_ms = leaves
        is_alone = end_ms == begin_ms + made.transfer_ms
        comes_ms, late_ms = begin_ms if is_alone else end_ms - made.transfer_ms, 0.0
        if lane.queues_in:
            ready_ms = comes_ms
            comes_ms = self._lines_in[lane.ends[1]].begin(lane.kind, ready_ms, made.transfer_ms)
            late_ms = comes_ms - ready_ms
        all_ms = max(comes_ms + made.transfer_ms, made.last_ms + made.of_chunk_ms) + lane.latency_ms
        first_ms = begin_ms + late_ms + (end_ms - begin_ms) / lane.chunks.number + lane.latency_ms
        return _Span(min(first_ms, all_ms), all_ms)

    def receive(self, lane: Lane, before: Lane | None, since_ms: float) -> None:
        """What its receiver has been ready for since then. before: of the list's step before, if it is of
        one."""
        lane.arrivals_ms.popleft()
        if lane.kind == "push":
            worker = lane.ends[1]
            if before is not None and before.kind == "push" and before.ends[1] == worker:  # of the round, too
                since_ms = self._gathered_ms[worker]
            self._gathered_ms[worker] = max(since_ms, lane.firsts_ms.popleft())
