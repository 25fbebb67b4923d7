"""Cuts finds the places where any module's forward may be divided between stages, and the values that cross
there.

A cut is the end of a call of a module. The stage upstream runs everything before the end of that call. The
stage downstream runs the same forward again, but does not make calls that have ended at the cut. It returns
their outputs from the values that crossed. The outermost of these calls are the frontier: the inputs, the
call that ends, and at each level around it the calls before it.

    forward(x)              upstream runs     downstream runs
      x = stem(x)           stem              -
      y = x.mean(1)         mean              mean                   code outside calls: on both sides
      x = body(x)           body, then stops  -                      <- the cut
      return head(x + y)                      +, head

A backward slice finds the values that cross: it goes back from the loss through all operations that run
downstream, and ends at values that upstream operations make. Downstream code reads no other values. A hook
inside a frontier call may have stored values elsewhere (a list of router logits). These values cross as well,
and the hook is called again downstream.

A cut is offered only where the result is exactly the same. Every other end of a call, between the first and
the last use of a parameter, has a reason why no cut is offered there. Pure; any thread.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pipedream import _core
from pipedream.model.tensor_spec import order_in_memory
from pipedream.model.trace import INPUTS, ROOT, Call, Leaf, Operation, Trace, Version
from pipedream.splitting.crossing import Crossing, FrontierCall, PackedLeaf
from pipedream.splitting.unused import unused_of

__all__ = ["Cut", "Cuts", "SpanState"]


_BY_CHANCE = (
    "random numbers decide whether it is called, and a minibatch that leaves it out would end the run (where"
    " none does name it in cuts=[...] of profile)"
)


@dataclass(frozen=True)
class Cut:
    """A place to cut, or a place with the reason why it is no cut. A place that has values to cross and also
    a reason is a cut only if the user names it.
    """

    call: int
    name: str
    crossing: Crossing | None = None
    num_bytes: int = 0
    """Bytes that cross in the traced minibatch."""
    why_not: str = ""
    calls: tuple[str, ...] = ()
    """The names of all calls that end at this place, the outermost first."""
    is_checkpointed: bool = False
    """Whether the call runs under activation checkpointing or no_grad, unlike the calls around it."""


@dataclass(frozen=True)
class SpanState:
    """The names of the parameters, buffers and modules that one span uses. A span is the part of the forward
    between two cuts.
    """

    parameters: frozenset[str]
    buffers: frozenset[str]
    read: frozenset[str]
    """Those parameters and buffers that the traced minibatch used."""
    strays: frozenset[str]
    """Parameters and buffers of other spans that code outside calls reads, although the result of that code
    is not needed.
    """
    others_modules: frozenset[str] = frozenset()
    """Modules of other spans that the traced minibatch did not call. Code outside calls may call them in a
    later minibatch.
    """


@dataclass
class _Slice:
    """The operations in a span whose results are needed, and the values that these operations read."""

    needed: list[Operation] = field(default_factory=list)
    reads: set[Version] = field(default_factory=set)
    """Values that the needed operations read and that are made outside the span."""


class Cuts:
    """The places of one trace where a call ends, in the order of the forward: `offered`, and `refused` with
    reasons.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._writer = {version: op for op in trace.operations for version in op.writes}
        self._children: dict[int, list[int]] = {}
        for index, call in enumerate(trace.calls):
            self._children.setdefault(call.parent, []).append(index)
        self._parameter_of = _by_storage(trace.parameters)
        self._buffer_of = _by_storage(trace.buffers)
        self._unused = unused_of(trace)
        self._changing = {
            version.storage
            for op in trace.operations
            for version in op.writes
            if version.storage in self._buffer_of
        }
        self.offered: list[Cut] = []
        self.refused: list[Cut] = []
        for candidates in self._candidates():
            names = tuple(str(trace.calls[index].key) for index in candidates)
            tried = [replace(self._try(index), calls=names) for index in candidates]
            legal = next((cut for cut in tried if cut.crossing is not None), None)
            if legal is None:
                self.refused.append(tried[0])
            elif self._is_left_to_chance(legal.call):
                self.refused.append(replace(legal, why_not=_BY_CHANCE))
            else:
                self.offered.append(legal)

    def state_of(self, first: Cut | None, last: Cut | None) -> SpanState:
        """Returns the parameters, buffers and modules that the span between two cuts uses. first None: from
        the start. last None: to the loss.
        """
        begin = 0 if first is None else self._trace.calls[first.call].end
        end = None if last is None else self._trace.calls[last.call].end
        runs = [op for op in self._trace.operations if self._runs(op, begin, end)]
        touched = _storages(runs)
        own = _storages([op for op in runs if op.tick > begin]) | _storages(self._slice(begin, last).needed)
        until = math.inf if end is None else end
        unused = {name for name, found in self._unused.items() if found.is_in(begin, until)}
        passed = {found for found in self._unused.values() if found.is_passed_in(begin, until)}
        named = self._parameter_of | self._buffer_of
        return SpanState(
            _named(own, self._parameter_of) | unused.intersection(self._trace.parameters),
            _named(own, self._buffer_of) | unused.intersection(self._trace.buffers),
            _named(own, named),
            _named(touched - own, named),
            frozenset(found.module for found in passed if found.module and not found.is_in(begin, until)),
        )

    def first_spans_of_parameters(self, cuts: Sequence[Cut]) -> dict[str, int]:
        """Returns, for each parameter, the first of the spans between these cuts that reads it or would read
        it.
        """
        ends = [self._trace.calls[cut.call].end for cut in cuts]
        spans = {name: sum(end < min(found.ticks) for end in ends) for name, found in self._unused.items()}
        for op in self._trace.operations:
            for version in op.reads:
                for name in self._parameter_of.get(version.storage, ()):
                    spans.setdefault(name, sum(end < op.tick for end in ends))
        return {name: spans.get(name, len(cuts)) for name in self._trace.parameters}

    def end_of(self, cut: Cut) -> int:
        """Returns the time in the trace at which the cut's call ends. Cuts are ordered by this time."""
        return self._trace.calls[cut.call].end

    @property
    def last_call(self) -> str:
        """Returns the name of the call that ends last; empty if the forward calls no module."""
        last = max(self._trace.calls, key=lambda call: call.end)
        return "" if last.key == INPUTS else str(last.key)

    # The ends of calls that may be cuts.

    def _candidates(self) -> Iterable[list[int]]:
        """Yields groups of calls that end between the same two operations, the outermost first. A group
        counts only if parameters are used both before and after it.
        """
        uses = [op.tick for op in self._trace.operations if self._uses_parameters(op)]
        if not uses:
            return
        ticks = [op.tick for op in self._trace.operations if not op.is_copy]
        groups: dict[int, list[int]] = {}
        position = 0
        for index in sorted(range(len(self._trace.calls)), key=lambda index: self._trace.calls[index].end):
            end = self._trace.calls[index].end
            while position < len(ticks) and ticks[position] < end:
                position += 1
            if uses[0] < end < uses[-1]:
                groups.setdefault(position, []).append(index)
        yield from (group[::-1] for group in groups.values())

    def _uses_parameters(self, op: Operation) -> bool:
        return any(version.storage in self._parameter_of for version in op.reads)

    def _try(self, index: int) -> Cut:
        call = self._trace.calls[index]
        name = str(call.key)
        around = self._path(index)
        if not all(self._trace.calls[other].is_plain for other in around):
            outer = next(o for o in reversed(around) if not self._trace.calls[o].is_plain)
            where = self._trace.calls[outer].key
            why_not = f"{where} runs under activation checkpointing or no_grad"
            return Cut(index, name, why_not=why_not, is_checkpointed=outer == index)
        found = self._slice(call.end, None)
        why_not = self._fault(call, found)
        if why_not:
            return Cut(index, name, why_not=why_not)
        frontier = self._frontier(index)
        hooked = self._hooked(frontier, found)
        sources = [*frontier, *(inner for calls in hooked.values() for inner in calls)]
        positions: dict[tuple[object, ...], int] = {}
        sizes: list[int] = []
        for leaf in (leaf for i in sources for leaf in self._leaves(i) if self._crosses(i, leaf, found)):
            if leaf.memory not in positions:
                positions[leaf.memory] = len(positions)
                sizes.append(leaf.num_bytes)
        why_not = self._fault_of_wire(sources, found, positions)
        if why_not:
            return Cut(index, name, why_not=why_not)
        calls = tuple(
            replace(
                self._frontier_call(i, call.end, positions),
                hooked=tuple(self._frontier_call(inner, call.end, positions) for inner in hooked.get(i, ())),
                is_hooked=self._escapes(i, found),
            )
            for i in frontier
        )
        crossing = Crossing(call.key, calls, len(positions))
        return Cut(index, name, crossing, sum(sizes) + 8 * crossing.num_sizes)

    def _crosses(self, index: int, leaf: Leaf, found: _Slice) -> bool:
        """Whether an output of a call crosses. Inputs that are no floating-point numbers always cross. They
        are small, and the trace does not see that Python reads them (tolist(), numpy()). The check would not
        notice such a read either, because a filler of integers cannot be NaN.
        """
        is_input = self._trace.calls[index].key == INPUTS
        always = is_input and leaf.is_dense and not leaf.dtype.is_floating_point
        return always or leaf.version in found.reads

    def _fault(self, call: Call, found: _Slice) -> str:
        """Returns why code that runs on both sides of the cut would compute other values than in the whole
        model; empty if it would not. Random numbers are no reason, because their seeds depend on the place
        (draws.py).
        """
        receiver = _storages(found.needed)
        receiver |= _storages(op for op in self._trace.operations if op.tick > call.end)
        sender = _storages(op for op in self._trace.operations if op.tick < call.end)
        for storage in sorted(self._changing & receiver & sender):
            return f"buffer {self._buffer_of[storage][0]!r} changes and is used on both sides"
        for version in found.reads:
            if version.writes > 0 and version.storage in self._parameter_of:
                return f"parameter {self._parameter_of[version.storage][0]!r} is written in the forward"
        return ""

    def _fault_of_wire(
        self, sources: list[int], found: _Slice, positions: dict[tuple[object, ...], int]
    ) -> str:
        """Returns why the frontier's calls cannot return all values that are needed; empty if they can."""
        leaves = [leaf for index in sources for leaf in self._leaves(index)]
        returned = {leaf.version for leaf in leaves}
        for version in sorted(found.reads - returned):
            writer = self._writer.get(version)
            if writer is not None:
                where = "the model" if writer.call == ROOT else str(self._trace.calls[writer.call].key)
                return (
                    f"{where} passes a tensor ({writer.name}) to later code outside its return value"
                    " (return it)"
                )
        crossing = [leaf for leaf in leaves if leaf.version in found.reads]
        if not positions:
            return "nothing crosses"
        if len(positions) >= _core.NUM_TENSORS_MAX:
            return f"{len(positions)} tensors would cross"
        for leaf in crossing:
            if not leaf.is_dense:
                return "a tensor that is not dense would cross"
            if leaf.has_data_size:
                return "a tensor would cross that is as long as the contents of another say"
            if len(leaf.shape) > _core.NUM_DIMS_MAX:
                return f"a tensor of {len(leaf.shape)} dimensions would cross"
        views = Counter(leaf.version.storage for leaf in {leaf.memory: leaf for leaf in crossing}.values())
        written = {version.storage for op in found.needed for version in op.writes}
        if any(count > 1 and storage in written for storage, count in views.items()):
            return "two views of memory that is written later would cross"
        return ""

    # Calls that happen depending on a random number.

    @property
    def depend_on_chance(self) -> bool:
        """Whether another trace of the same minibatch may have other calls, and thus other cuts."""
        return bool(self._chances)

    def _is_left_to_chance(self, index: int) -> bool:
        """Whether the call was made because of a random number, on which code branched just before this call
        or a call around it.
        """
        return any(self._follows_chance(other) for other in self._path(index))

    def _follows_chance(self, index: int) -> bool:
        call = self._trace.calls[index]
        siblings = (self._trace.calls[other].end for other in self._children[call.parent])
        before = max((end for end in siblings if end < call.begin), default=0)
        return any(before < tick < call.begin for tick in self._chances.get(call.parent, ()))

    @functools.cached_property
    def _chances(self) -> dict[int, list[int]]:
        """For each call, the ticks (times in the trace) at which its own code branched on random numbers
        only, as LayerDrop does. Branching on activations that went through dropout does not count.
        """
        ticks: dict[int, list[int]] = {}
        free: set[Version] = set()  # values that depend on nothing but constants and random numbers
        drawn: set[Version] = set()
        for op in self._trace.operations:
            if not free.issuperset(op.reads):
                continue
            is_drawn = op.draws or not drawn.isdisjoint(op.reads)
            if op.decides and is_drawn and not op.writes:
                ticks.setdefault(op.call, []).append(op.tick)
            free.update(op.writes)
            drawn.update(op.writes if is_drawn else ())
        return ticks

    # The frontier.

    def _path(self, index: int) -> list[int]:
        """Returns the call and the calls around it, the innermost first."""
        path = []
        while index != ROOT:
            path.append(index)
            index = self._trace.calls[index].parent
        return path

    def _frontier(self, index: int) -> list[int]:
        """Returns the outermost calls among all calls that have ended when this call ends."""
        end = self._trace.calls[index].end
        levels = [*self._path(index)[1:], ROOT]
        siblings = [child for level in levels for child in self._children.get(level, ())]
        over = [child for child in siblings if self._trace.calls[child].end <= end]
        return sorted(over, key=lambda child: self._trace.calls[child].end)

    def _leaves(self, index: int) -> list[Leaf]:
        return [leaf for leaf in self._trace.calls[index].leaves if isinstance(leaf, Leaf)]

    def _hooked(self, frontier: list[int], found: _Slice) -> dict[int, list[int]]:
        """Returns, for each frontier call, the calls inside it whose hooks stored needed values elsewhere, in
        the order of their ends.
        """
        returned = {leaf.version for index in frontier for leaf in self._leaves(index)}
        left = found.reads - returned
        hooked: dict[int, list[int]] = {}
        for index in sorted(range(len(self._trace.calls)), key=lambda i: self._trace.calls[i].end):
            needed = left.intersection(leaf.version for leaf in self._leaves(index))
            if not needed or not self._trace.calls[index].is_hooked:
                continue
            around = next((outer for outer in self._path(index)[1:] if outer in frontier), None)
            if around is not None:
                hooked.setdefault(around, []).append(index)
                left -= needed
        return hooked

    def _escapes(self, index: int, found: _Slice) -> bool:
        """Whether a hook stored the call's output where code outside the call around it reads it."""
        parent = self._trace.calls[index].parent
        if parent == ROOT or not self._trace.calls[index].is_hooked:
            return False
        versions = {leaf.version for leaf in self._leaves(index)} & found.reads
        versions -= {leaf.version for leaf in self._leaves(parent)}
        return any(
            parent not in self._path(op.call) and not versions.isdisjoint(op.reads) for op in found.needed
        )

    def _frontier_call(self, index: int, cut: int, positions: dict[tuple[object, ...], int]) -> FrontierCall:
        call = self._trace.calls[index]

        def packed(leaf: object) -> PackedLeaf:
            if not isinstance(leaf, Leaf):
                return PackedLeaf(constant=leaf)
            position = positions.get(leaf.memory)
            # For a tensor that crosses, only writes before the cut count. For a filler, all later writes
            # count.
            until = cut if position is not None else None
            overwritten = self._is_overwritten(leaf.version.storage, call.end, until)
            order = order_in_memory(leaf.shape, leaf.stride)
            return PackedLeaf(position, leaf.dtype, len(leaf.shape), order, overwritten)

        inside = Counter(
            other.key.module for other in self._trace.calls if call.begin < other.begin < call.end
        )
        return FrontierCall(call.key, call.structure, tuple(map(packed, call.leaves)), dict(inside))

    def _is_overwritten(self, storage: int, begin: int, end: int | None) -> bool:
        ticks = self._write_ticks.get(storage, ())
        return any(tick > begin and (end is None or tick < end) for tick in ticks)

    @functools.cached_property
    def _write_ticks(self) -> dict[int, list[int]]:
        ticks: dict[int, list[int]] = {}
        for op in self._trace.operations:
            for version in op.writes:
                ticks.setdefault(version.storage, []).append(op.tick)
        return ticks

    # The data flow.

    def _runs(self, op: Operation, begin: int, end: int | None) -> bool:
        """Whether a stage with this span runs the operation. The stage runs no operation inside a call that
        ended before the span.
        """
        if end is not None and op.tick > end:
            return False
        return op.tick > begin or op.call == ROOT or self._trace.calls[op.call].end > begin

    def _slice(self, begin: int, last: Cut | None) -> _Slice:
        """Returns the slice of a stage. The stage gets the outputs of calls that ended by the tick `begin`,
        and makes the values that cross at `last`, or the loss.
        """
        calls = self._trace.calls
        if last is None:
            end, wanted = None, {self._trace.loss}
        else:
            assert last.crossing is not None
            end = calls[last.call].end
            wanted = self._slice(end, None).reads
        found = _Slice(reads=set(wanted))
        for op in reversed(self._trace.operations):
            if not self._runs(op, begin, end):
                continue
            is_root = op.decides or (op.tick > begin and any(v.storage in self._buffer_of for v in op.writes))
            if is_root or not found.reads.isdisjoint(op.writes):
                found.needed.append(op)
                found.reads.difference_update(op.writes)
                found.reads.update(op.reads)
        return found


def _by_storage(storages: dict[str, int]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, storage in storages.items():
        names.setdefault(storage, []).append(name)
    return names


def _named(storages: set[int], names: dict[int, list[str]]) -> frozenset[str]:
    return frozenset(itertools.chain.from_iterable(names.get(storage, ()) for storage in storages))


def _storages(operations: Iterable[Operation]) -> set[int]:
    return {version.storage for op in operations for version in (*op.reads, *op.writes)}
