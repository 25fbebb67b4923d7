"""The split check tests whether a model that is cut at all of its cuts at once computes the same results as
the whole model.

The check runs two minibatches in sequence, with every layer as a stage of its own. Poison replaces what a
stage must not need: tensors that do not cross, and the floating-point parameters and buffers of other stages
that its code reads. Attributes that a stage sets are hidden from other stages, and come back when the stage
runs the second minibatch. Losses, gradients and buffers are compared, in float64 if the model runs in float64
and memory is enough.

The whole model and its stages draw the same random numbers, as in a run (draws.py). The check takes the time
of about four minibatches if no cut is bad. It restores everything that it changes. It runs on the thread that
profiles.
"""

from __future__ import annotations

import contextlib
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.common.errors import describe_error, one_line
from pipedream.model.boundary import boundary_input, check_loss, device_of, map_tensors, tensors_of
from pipedream.model.calls import calls_seen, module_names, uncompiled, visible_modules
from pipedream.model.draws import SeenDraws, keyed_draws
from pipedream.model.global_names import GlobalNames
from pipedream.model.layers import Model, named_layers, roots_of
from pipedream.model.loss_state import call_loss
from pipedream.model.references import modules_carried_by
from pipedream.model.seeding import seed_torch
from pipedream.model.stage_calls import leaves_of
from pipedream.model.stage_module import StageModule
from pipedream.model.structure import taken_apart
from pipedream.model.trace import CallCounter
from pipedream.model.untouched import Attributes, untouched
from pipedream.splitting import crossing, span
from pipedream.splitting.check_precision import (
    NotInFloat64Error,
    PrecisionSeen,
    as_float64,
    fits_in_float64,
    in_float64,
)
from pipedream.splitting.crossing import Fillers
from pipedream.splitting.cut_model import CutModel
from pipedream.splitting.splitter import layer_names_of, stages_of

__all__ = ["NUM_CHECKED", "check_cuts", "check_layers", "without_bad_cuts"]

_log = logging.getLogger("pipedream")

NUM_CHECKED = 2
"""Number of minibatches that a check reads."""

_LossFunction = Callable[[Any, Any], Tensor]
_Minibatches = Sequence[tuple[Any, Any]]

# Largest allowed difference, relative to each tensor's largest element, by the least precise dtype in which
# the model computes. Differences arise because the gradient of a value that three or more layers use is
# summed in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE_OF_OTHERS = 1e-2
# Largest allowed difference for a float64 model with some float32 parts (norms, positions). The difference
# comes from rounding in these parts.
_TOLERANCE_OF_MIXED = {torch.float32: 1e-6}

_LEFT_OUT = "the second minibatch does not make the call that ends there"
_REFUSED = "a stage refuses that: "
_NEGLIGIBLE = 1e-2
"""A gradient below this share of the largest element of all gradients may consist of rounding. The share
times the tolerance is about ten times float32's rounding of that element.
"""


@dataclass
class _Outcome:
    losses: list[float]
    """One loss per minibatch."""
    gradients: dict[str, Tensor]
    """Sums over the minibatches, by name."""
    buffers: dict[str, Tensor]
    """The buffers after the last minibatch, by name."""


def check_cuts(model: Model, minibatches: _Minibatches, loss_fn: _LossFunction) -> dict[int, str]:
    """Returns the cuts that change the results, and those that some minibatch does not reach, by position.
    The text says which result differs, has the error that the forward with the cut raises, or says that the
    cut is not reached.

    model: a list of layers or a CutModel. minibatches: (inputs, targets) on the model's device. The first
    NUM_CHECKED are used; if there are fewer, the last one is used again.

    Raises ValueError if the cuts that are left, each right alone, change the results together. This is tested
    only if some cut is not left.
    """
    if len(layer_names_of(model)) == 1:
        return {}
    roots = roots_of(model)
    modules = [module for _, module in roots]
    taken = [*minibatches[:NUM_CHECKED], *[minibatches[-1]] * NUM_CHECKED][:NUM_CHECKED]
    with untouched(modules, loss_fn), uncompiled(modules):
        if fits_in_float64(roots, device_of(modules)):
            too_wide = contextlib.suppress(NotInFloat64Error, torch.OutOfMemoryError)
            with too_wide, in_float64(roots, loss_fn):
                wide = [(as_float64(inputs), as_float64(targets)) for inputs, targets in taken]
                return _bad_places(_Check(model, wide, loss_fn, is_wide=True))
        return _bad_places(_Check(model, taken, loss_fn, is_wide=False))


def without_bad_cuts(
    cut: CutModel, minibatches: _Minibatches, loss_fn: _LossFunction, *, is_chosen: bool
) -> CutModel:
    """Returns the model without the cuts that change the results, and logs these cuts. If the user chose the
    cuts, it raises ValueError instead.
    """
    bad = check_cuts(cut, minibatches, loss_fn)
    if not bad:
        return cut
    differing = [(position, why) for position, why in bad.items() if why != _LEFT_OUT]
    position, difference = (differing or [*bad.items()])[0]
    text = (
        f"the model cut after {cut.offered[position].name} does not compute what the whole model does:"
        f" {difference}"
    )
    is_refused = difference.startswith(_REFUSED)  # such a text has a remedy of its own
    if differing and not is_refused:
        text += (
            "; what later code, or the next minibatch, reads is kept outside torch's operations (numpy, an"
            " attribute, a list that a hook appends to): return it from a module, or do all that needs it"
            " inside of one"
        )
    opaque = next(
        (type(one).__name__ for one in taken_apart(minibatches[0][0])[0] if not _can_cross(one)), None
    )
    if opaque is not None and not is_refused:
        text += f"; the inputs hold a {opaque}, None behind a cut: give its tensors in a tuple or a dataclass"
    if is_chosen:
        raise ValueError(text)
    others = [cut.offered[other].name for other in bad if other != position]
    also = f"; nor after {', '.join(others[:5])}{' and others' if len(others) > 5 else ''}" if others else ""
    kept = cut.without(bad)
    _log.warning("%s%s; places left to cut it: %d", text, also, len(kept.offered))
    return kept


def _can_cross(value: Any) -> bool:
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str))


def check_layers(model: Model, minibatches: _Minibatches, loss_fn: _LossFunction) -> None:
    """Raises ValueError if the layers of a list compute other results when each layer is a stage. A list with
    only torch's own layers is not run, because such layers share no state.
    """
    named = named_layers(model)
    if all(_is_of_torch(module) for layer in named for module in layer.module.modules()):
        return
    for position, difference in check_cuts(model, minibatches, loss_fn).items():
        raise ValueError(
            f"the model cut after layer {named[position].name} does not compute what the whole model does:"
            f" {difference}; a layer keeps what another one, or the next minibatch, reads outside of what it"
            " returns (in an object that both have, an attribute of the other): return it, or make one entry"
            " of the list of all layers between; for a plan of one stage alone use profile(check=False)"
        )


def _is_of_torch(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    is_patched = "forward" in vars(module)
    return type(module).__module__.startswith("torch.nn.") and not any(hooks) and not is_patched


def _bad_places(check: _Check) -> dict[int, str]:
    reached = [place for place in check.places if place not in check.left_out]
    together = check.difference(reached)
    alone = _bad_of(reached, together, check.difference)
    good = [place for place in reached if place not in alone]
    if alone:
        together = check.difference(good) if good else ""
    if together:
        raise ValueError(
            f"the model cut after {', '.join(check.names[place] for place in good)} at once does not compute"
            f" what the whole model does: {together}; choose cuts=[...] of profile, or give a list of layers"
        )
    return dict.fromkeys(sorted(check.left_out), _LEFT_OUT) | alone


def _bad_of(
    places: Sequence[int], together: str, difference: Callable[[Sequence[int]], str]
) -> dict[int, str]:
    """Returns the places at which a cut alone changes the results. The places are halved repeatedly, so a few
    bad ones among many are found in few checks. together: difference(places).
    """
    if not together:
        return {}
    if len(places) == 1:
        return {places[0]: together}
    middle = len(places) // 2
    halves = [places[:middle], places[middle:]]
    return {
        place: why for half in halves for place, why in _bad_of(half, difference(half), difference).items()
    }


class _Check:
    """Compares a model in stages with the whole model, which computes the minibatches first."""

    def __init__(
        self,
        model: Model,
        minibatches: _Minibatches,
        loss_fn: _LossFunction,
        *,
        is_wide: bool,
    ) -> None:
        """is_wide: whether the check computes in float64. Raises NotInFloat64Error if the model does not run
        in float64.
        """
        self.names = layer_names_of(model)
        self.places = range(len(self.names) - 1)
        """The layers after which the model may be cut."""
        self.left_out: set[int] = set()
        """The places that some minibatch does not reach."""
        self._model = model
        self._minibatches = minibatches
        self._loss_fn = loss_fn
        self._roots = roots_of(model)
        self._modules = [module for _, module in self._roots]
        self._device = device_of(self._modules)
        all_roots = [*self._modules, *modules_carried_by(loss_fn)]
        self._global_names = GlobalNames(module for root in all_roots for module in root.modules())
        stages = self._stages(self.places)
        # All layers are assumed to draw random numbers. That does not affect layers that draw nothing.
        seen = [SeenDraws(frozenset({layer})) for layer in range(len(stages))]
        self._draws = keyed_draws(0, stages, seen, self._device)
        precision = PrecisionSeen()
        with self._all_kept():
            try:
                self._whole = self._run_whole(precision)
            except Exception as error:
                if is_wide:
                    raise NotInFloat64Error from error
                raise
        tolerances = (
            _TOLERANCE_OF_MIXED | {torch.float64: _TOLERANCE[torch.float64]} if is_wide else _TOLERANCE
        )
        self._tolerance = tolerances.get(precision.coarsest, _TOLERANCE_OF_OTHERS)

    def _stages(self, ends: Sequence[int]) -> list[StageModule]:
        """Returns stages that end at these places and at the model's end."""
        spans = zip([0, *(end + 1 for end in ends)], [*ends, len(self.names) - 1], strict=True)
        return stages_of(self._model, spans, Fillers())

    def difference(self, ends: Sequence[int]) -> str:
        """Returns a text that says which result differs in stages that end at these places; "" if none
        does.
        """
        with self._all_kept():
            try:
                staged = self._run_staged(ends)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if _is_refusal(error):
                    return f"{_REFUSED}{one_line(error)}"
                return f"cut there its forward raises {describe_error(error)}"
            return _difference(self._whole, staged, self._tolerance)

    def _run_whole(self, precision: PrecisionSeen) -> _Outcome:
        losses = []
        (whole,) = self._stages([])
        for turn, (inputs, targets) in enumerate(self._minibatches):
            self._seed(turn, None)
            with precision if turn == 0 else contextlib.nullcontext(), self._places_seen():
                output = whole(_copied(inputs))
                loss = self._loss(output, targets)
            losses.append(float(loss.detach()))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            del loss, output
        return _Outcome(losses, self._gradients(), _clones(self._named("named_buffers")))

    @contextlib.contextmanager
    def _places_seen(self) -> Iterator[None]:
        """A context around a forward of the whole model. Adds the places that it does not reach to
        `left_out`.
        """
        if not isinstance(self._model, CutModel):
            yield
            return
        counter = CallCounter(module_names(self._model.module))
        reached = set()

        def call(module: nn.Module, call: Callable[[], Any]) -> Any:
            key = counter.key_of_next(module)
            output = call()
            reached.add(key)
            return output

        crossings = [cut.crossing for cut in self._model.offered]
        keys = {place: crossing.last for place, crossing in enumerate(crossings) if crossing is not None}
        modules = dict(visible_modules(self._model.module))
        with calls_seen({modules[key.module]: None for key in keys.values()}, call):
            yield
        self.left_out |= {place for place, key in keys.items() if key not in reached}

    def _run_staged(self, ends: Sequence[int]) -> _Outcome:
        stages = self._stages(ends)
        # Each stage has, like a separate worker, the attributes that its own forwards have set.
        attributes = [Attributes(self._modules, self._global_names)] * len(stages)
        for stage in stages:
            stage.draws = self._draws
        losses: list[float] = []
        buffers: dict[str, Tensor] = {}
        for turn, (inputs, targets) in enumerate(self._minibatches):
            value: Any = _copied(inputs)
            received: list[Any] = []
            sent: list[Any] = []
            buffers = {}
            for index, stage in enumerate(stages):
                if sent:
                    received.append(leaves_of(sent[-1], copies=True))
                    value = map_tensors(boundary_input, received[-1])
                attributes[index].restore()
                self._seed(turn, stage)
                with _strays_swapped(stage):
                    value = stage(value)
                if turn + 1 < len(self._minibatches):
                    attributes[index] = Attributes(self._modules, self._global_names)
                buffers |= _clones(stage.stage_buffers())
                if stage is not stages[-1]:
                    sent.append(value)
            loss = self._loss(value, targets)
            losses.append(float(loss.detach()))
            _backward(loss, sent, received)
        return _Outcome(losses, self._gradients(), buffers)

    def _seed(self, turn: int, stage: StageModule | None) -> None:
        """Seeds the generators before a stage's forward of a minibatch. stage None: the whole model."""
        if self._draws is not None:
            self._draws.begin(turn, 0, stage)
        elif stage is None or stage.stage_index == 0:
            seed_torch(turn)

    def _loss(self, output: Any, targets: Any) -> Tensor:
        return check_loss(call_loss(self._loss_fn, output, _copied(targets)), 0)

    @contextlib.contextmanager
    def _all_kept(self) -> Iterator[None]:
        drawing = contextlib.nullcontext() if self._draws is None else self._draws.installed()
        with untouched(self._modules, self._loss_fn), drawing:
            yield

    def _gradients(self) -> dict[str, Tensor]:
        gradients = {name: p.grad for name, p in self._named("named_parameters") if p.grad is not None}
        return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in gradients.items()}

    def _named(self, table: str) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's tensors by full name. table: "named_parameters" or "named_buffers"."""
        for prefix, module in self._roots:
            yield from ((prefix + name, tensor) for name, tensor in getattr(module, table)())


def _is_refusal(error: Exception) -> bool:
    """Whether the stage itself raised the error, and not the user's code that it runs."""
    raised = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return raised[-1] in (span.__name__, crossing.__name__)


def _backward(loss: Tensor, sent: list[Any], received: list[Any]) -> None:
    """Runs the backward stage by stage, the last one first. sent, received: the values at each cut."""
    roots = [(loss, torch.ones_like(loss))] if loss.requires_grad else []
    while roots:
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        pairs = zip(tensors_of(sent.pop()), tensors_of(received.pop()), strict=True) if sent else ()
        roots = [(output, leaf.grad) for output, leaf in pairs if leaf.grad is not None]


@contextlib.contextmanager
def _strays_swapped(stage: StageModule) -> Iterator[None]:
    """In the with block, the parameters and buffers of other stages that this stage reads are replaced:
    floating-point tensors by NaN, other tensors by clones.
    """
    contents = [(tensor, tensor.data) for tensor in stage.strays()]
    for tensor, content in contents:
        poisons = content.is_floating_point()
        tensor.data = torch.full_like(content, math.nan) if poisons else content.clone()
    try:
        yield
    finally:
        for tensor, content in contents:
            tensor.data = content


def _copied(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().clone(), value)


def _clones(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named}


def _difference(whole: _Outcome, staged: _Outcome, tolerance: float) -> str:
    """Returns what differs; empty if nothing does."""
    for turn, (wanted, loss) in enumerate(zip(whole.losses, staged.losses, strict=True)):
        if not math.isclose(loss, wanted, rel_tol=0, abs_tol=tolerance * max(abs(wanted), 1.0)):
            which = "its loss" if turn == 0 else "its next loss"
            return f"{which} is {loss:.10g}, not {wanted:.10g}"
    # A gradient that consists of rounding only, such as the gradient of an attention's key bias, differs
    # completely. So small gradients are compared with this scale.
    scale = _NEGLIGIBLE * max([_largest(tensor) for tensor in whole.gradients.values()], default=0.0)
    for name, tensor in whole.gradients.items():
        other = staged.gradients.get(name)
        if other is None:
            return f"{name} has no gradient"
        if not _is_close(tensor, other, scale, tolerance):
            return f"the gradient of {name} differs"
    for name, tensor in whole.buffers.items():
        if not _is_close(tensor, staged.buffers[name], 0.0, tolerance):
            return f"{name} differs"
    return ""


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() > 0 else 0.0


def _is_close(tensor: Tensor, other: Tensor, scale: float, tolerance: float) -> bool:
    """Whether the tensors are equal within the tolerance, which is relative to the tensor's largest element,
    or to `scale` if `scale` is larger.
    """
    if tensor.is_sparse:  # only buffers may be
        tensor, other = tensor.to_dense(), other.to_dense()
    if not tensor.is_floating_point():
        return torch.equal(tensor, other)
    if tensor.numel() == 0 or torch.equal(tensor, other):
        return True
    distance = (tensor - other).abs().max()  # if it is NaN, the comparison below is False
    return bool(distance <= tolerance * max(_largest(tensor), scale))
