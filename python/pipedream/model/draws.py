"""Seeds the random numbers of a model's forward by the place that draws them and by the microbatch. Dropout
masks are then the same for every cut, number of replicas, schedule and recompute.

    seed = position << 32 | hash(base seed, minibatch, microbatch, position)
           where in the forward      which numbers are drawn there

A position numbers a place where the generators are seeded:

- In a list of layers, it is the begin of a layer that draws.
- In a traced model, it is the begin of a module's call that drew random numbers in the trace. The end of such
  a call is a position, too, if the code around the call draws next.

A stage after a cut makes none of the earlier calls. It still draws the numbers of a run without cuts, because
it seeds at the same positions. A generator remembers its seed. So code that restores a generator's state also
restores the position, which the seed contains.

    forward         begin() seeds at the stage's first position, each call that draws at its own position
    recompute       calls begin() again, so it draws the same numbers
    checkpoint()    repeats a forward in the backward; go_back_to() sets the backward's microbatch
    between calls   code and hooks continue from the last position; all stages that run them draw the same
    eval()          draws nothing, so nothing is seeded
    other calls     a module that only a later minibatch calls draws by its name

Generators are global to a process: use them on the thread that runs the stages, and on autograd's.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipedream import _core
from pipedream.model.calls import calls_seen, visible_modules
from pipedream.model.seeding import generators_of_torch_kept
from pipedream.model.trace import INPUTS, ROOT, CallKey, Trace

if TYPE_CHECKING:
    from pipedream.model.stage_module import StageModule

__all__ = ["DrawSites", "KeyedDraws", "SeenDraws", "drawing_alike", "keyed_draws", "sites_of_trace"]

_LOW_BITS = 32
_LOW = (1 << _LOW_BITS) - 1
_NEXT_BITS = 10
"""Number of low bits of a position that are 0 in a traced position. They number further calls of a module
after its last traced call.
"""
_NOT_ONLY = (-1, None)
_mixed = _core.derived_seed
_seed_host = torch.default_generator.manual_seed
_seed_of_host = torch.default_generator.initial_seed


@dataclass(frozen=True)
class DrawSites:
    """The places at which a forward draws random numbers."""

    begins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Module -> positions of its calls that drew in the trace, ascending. Empty for a module that drew
    nothing but has the type of one that did.
    """
    ends: Mapping[int, int] = field(default_factory=dict)
    """Position of a call's begin -> position of its end, for each call after which its caller draws."""
    skips: Mapping[CallKey, int] = field(default_factory=dict)
    """Call -> the last position inside the call, for calls after which draws may depend on this position. A
    stage that skips such a call seeds the generators at this position instead.
    """
    quiet: frozenset[str] = frozenset()
    """Modules that drew nothing in the trace, and whose caller drew after their call. A stage after a cut
    skips their calls. So if such a module draws in a later minibatch, its draws must not change the caller's
    numbers.
    """
    draws_between: bool = False
    """Whether code outside all module calls draws."""
    of_loss: int = 0
    """Position of the loss. 0: the loss is not seeded and continues from the last position."""

    def __bool__(self) -> bool:
        return bool(self.begins) or self.draws_between or self.of_loss > 0

    def __add__(self, other: DrawSites) -> DrawSites:
        return DrawSites({**self.begins, **other.begins}, of_loss=max(self.of_loss, other.of_loss))


def sites_of_trace(trace: Trace, model: nn.Module) -> DrawSites:
    """Returns the places at which a traced model draws."""
    calls = trace.calls
    draws = [op for op in trace.operations if op.draws]
    ticks = [op.tick for op in draws]
    drawing = sorted({op.call for op in draws} - {ROOT})
    events = sorted(tick for index in drawing for tick in (calls[index].begin, calls[index].end))
    position_of = {tick: number << _NEXT_BITS for number, tick in enumerate(events, 1)}

    def goes_on(end: int) -> bool:
        """Whether the next draw after this tick (a time in the trace) belongs to a call that began
        before it.
        """
        after = bisect.bisect(ticks, end)
        return after < len(draws) and (draws[after].call == ROOT or calls[draws[after].call].begin < end)

    begins: dict[str, list[int]] = {}
    ends: dict[int, int] = {}
    for call in (calls[index] for index in drawing):
        begins.setdefault(call.key.module, []).append(position_of[call.begin])
        if goes_on(call.end):
            ends[position_of[call.begin]] = position_of[call.end]
    several = any(len(positions) > 1 for positions in begins.values())
    skips: dict[CallKey, int] = {}
    for call in calls:
        last = bisect.bisect(events, call.end) - 1
        if call.key != INPUTS and last >= 0 and events[last] >= call.begin and (several or goes_on(call.end)):
            skips[call.key] = position_of[events[last]]
    for name in _alike(model, begins):
        begins.setdefault(name, [])
    last_draws = {op.call: op.tick for op in draws}
    before_draws = {call.key.module for call in calls if call.end < last_draws.get(call.parent, 0)}
    around_draws = {
        call.key.module for call in calls if bisect.bisect(ticks, call.begin) < bisect.bisect(ticks, call.end)
    }
    quiet = before_draws - around_draws - begins.keys()
    found = {name: tuple(sorted(positions)) for name, positions in begins.items()}
    draws_between = len(drawing) < len({op.call for op in draws})
    return DrawSites(found, ends, skips, frozenset(quiet), draws_between=draws_between)


def _alike(model: nn.Module, drawing: Iterable[str]) -> list[str]:
    """Returns the names of modules that may draw, because they have the type of a module that drew in the
    trace. An example is a layer that LayerDrop skipped in the trace.
    """
    modules = visible_modules(model)
    kinds = {type(module) for name, module in modules if name in set(drawing)}
    return [
        name for name, module in modules if type(module) in kinds and module.training and _may_draw(module)
    ]


def _may_draw(module: nn.Module) -> bool:
    return not (isinstance(module, nn.modules.dropout._DropoutNd) and module.p == 0.0)


@dataclass(frozen=True)
class SeenDraws:
    """The parts of a stage that drew random numbers when the stage ran once."""

    layers: frozenset[int] = frozenset()
    """Indices in the model of the layers that drew, for a list of layers."""
    in_loss: bool = False
    in_backward: bool = False

    def __or__(self, other: SeenDraws) -> SeenDraws:
        return SeenDraws(
            self.layers | other.layers, self.in_loss or other.in_loss, self.in_backward or other.in_backward
        )


def _start_of_layer(layer_index: int) -> int:
    """Returns the position at which a forward from this layer on begins: 0 for the first layer, and for any
    other layer the position of the layer before it. Layer i itself draws at the position (i + 1) <<
    _NEXT_BITS.
    """
    return layer_index << _NEXT_BITS


def _sites_of_layers(stage: StageModule, seen: SeenDraws) -> DrawSites:
    """Returns the places where layers drew. Layers with dropout are included, because they may draw in a
    later minibatch.
    """
    begins = {
        str(index): (_start_of_layer(index + 1),)
        for index, layer in enumerate(stage.layers, stage.first_layer)
        if index in seen.layers or any(map(_drops, layer.modules()))
    }
    return DrawSites(begins, of_loss=_start_of_layer(stage.last_layer + 2) if seen.in_loss else 0)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and _may_draw(module)


def keyed_draws(
    base: int, stages: Sequence[StageModule], seen: Sequence[SeenDraws], device: torch.device
) -> KeyedDraws | None:
    """Returns the KeyedDraws of a worker's stages; None if the stages draw nothing. base: draws_seed() of the
    run. seen: for each stage, the parts that drew when the stage was run once, before the training,
    to measure its memory.
    """
    traced = stages[0].traced_draws
    if traced is not None:
        at_cuts = frozenset().union(*(stage.modules_at_cuts for stage in stages))
        sites = replace(traced, quiet=traced.quiet & at_cuts)
        return KeyedDraws(base, sites, visible_modules(stages[0].layers[0]), device) if traced else None
    sites = functools.reduce(DrawSites.__add__, map(_sites_of_layers, stages, seen))
    layers = [
        (str(index), layer) for stage in stages for index, layer in enumerate(stage.layers, stage.first_layer)
    ]
    return KeyedDraws(base, sites, layers, device) if sites else None


@contextlib.contextmanager
def drawing_alike(stage: StageModule, device: torch.device) -> Iterator[None]:
    """A context in which a stage of a traced model draws the same numbers in every process. So if the model's
    code branches on a drawn number, all processes take the same branch. A list of layers draws from the
    generators as usual.
    """
    traced = stage.traced_draws is not None
    draws = keyed_draws(0, [stage], [SeenDraws()], device) if traced else None
    stage.draws = draws
    try:
        with contextlib.nullcontext() if draws is None else draws.installed():
            yield
    finally:
        stage.draws = None


class KeyedDraws:
    """Seeds the generators during a worker's forwards, at the positions that the head of this file
    explains.
    """

    def __init__(
        self,
        base: int,
        sites: DrawSites,
        modules: Iterable[tuple[str, nn.Module]],
        device: torch.device,
    ) -> None:
        """base: the value of seeding.draws_seed(). modules: pairs of a module's name in `sites` and the
        module. Modules without an entry in `sites` are assumed to draw nothing.
        """
        self._base = base
        self._sites = sites
        self._positions: dict[int, tuple[int, ...]] = {}  # by the module's id
        self._only_call: dict[int, tuple[int, int | None]] = {}  # (position, end), by id, of a single call
        self._quiet: set[int] = set()  # ids of modules
        self._names: dict[int, int] = {}  # hashes of the modules' names, by id
        self._modules: dict[nn.Module, None] = {}
        for name, module in modules:
            if name in sites.begins:
                known = self._positions.get(id(module), ())
                self._positions[id(module)] = tuple(sorted({*known, *sites.begins[name]}))
                self._names[id(module)] = zlib.crc32(name.encode())
                self._modules[module] = None
            elif name in sites.quiet:
                self._quiet.add(id(module))
                self._modules[module] = None
        for key, positions in self._positions.items():
            if len(positions) == 1:
                self._only_call[key] = (positions[0], sites.ends.get(positions[0]))
        self._context = 0
        self._seed_device: Callable[[int], Any] | None = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._seed_device = torch.cuda.default_generators[index].manual_seed

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which calls of the modules draw by their positions, also when a backward repeats
        them.
        """
        with calls_seen(self._modules, self._call):
            yield

    def begin(self, minibatch: int, microbatch: int, stage: StageModule | None) -> None:
        """Seeds the generators before a stage's forward of the microbatch. stage None: a whole traced
        model.
        """
        self.go_back_to(minibatch, microbatch)
        if stage is None or stage.traced_draws is not None:
            self._seed(0)
        else:
            self._seed(_start_of_layer(stage.first_layer))

    def go_back_to(self, minibatch: int, microbatch: int) -> None:
        """Makes later calls draw the numbers of this microbatch. Call it before the microbatch's backward,
        which may repeat calls of the forward.
        """
        self._context = _mixed(_mixed(self._base, minibatch), microbatch)

    def begin_loss(self) -> None:
        if self._sites.of_loss:
            self._seed(self._sites.of_loss)

    def skip(self, key: CallKey) -> None:
        """Seeds the generators as they are after a call that an earlier stage has made and this stage
        skips.
        """
        position = self._sites.skips.get(key)
        if position is not None:
            self._seed(position)

    def _seed(self, position: int) -> None:
        self._draw_from(position, _mixed(self._context, position))

    def _draw_from(self, position: int, mixed: int) -> None:
        seed = position << _LOW_BITS | mixed & _LOW
        _seed_host(seed)
        if self._seed_device is not None:
            self._seed_device(seed)

    def _call(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        position, end = self._only_call.get(id(module), _NOT_ONLY)
        if position < 0:
            if id(module) in self._quiet:
                with generators_of_torch_kept():
                    return call()
            found = self._next_call(module)
            if found is None:
                return self._call_by_name(module, call)
            position, end = found, self._sites.ends.get(found)
        seed = (
            position << _LOW_BITS | _mixed(self._context, position) & _LOW
        )  # inlined _seed(), which saves a microsecond
        _seed_host(seed)
        if self._seed_device is not None:
            self._seed_device(seed)
        output = call()
        if end is not None:
            self._seed(end)
        return output

    def _call_by_name(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Calls a module that the traced forward did not call. The call leaves later draws unchanged, because
        other stages may not make it.
        """
        with generators_of_torch_kept():
            position = _seed_of_host() >> _LOW_BITS
            self._draw_from(position, _mixed(self._context ^ self._names[id(module)], 0))
            return call()

    def _next_call(self, module: nn.Module) -> int | None:
        """Returns the first position of the module that comes after the present position. A module that is
        called more often than in the trace gets the present position plus 1. None for a module without
        positions.
        """
        before = _seed_of_host() >> _LOW_BITS
        positions = self._positions[id(module)]
        if not positions:
            return None
        return next((known for known in positions if known > before), before + 1)
