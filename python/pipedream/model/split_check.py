"""Split check: whether a model that is cut at all its cuts at once computes what the whole one does.

One minibatch, twice, with every layer as a stage of its own. What a stage must not need is NaN: tensors that
do not cross, and parameters and buffers of other stages; attributes that one stage sets no other finds, but
itself in the second turn. Losses, gradients and buffers are compared. It takes the time of four minibatches
and of the code outside calls at every layer, and leaves everything as it was. Owned by the thread that
profiles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.common.errors import describe_error
from pipedream.model.batches import call_model
from pipedream.model.boundary import boundary_input, check_loss, map_tensors
from pipedream.model.calls import calls_seen, module_names, visible_modules
from pipedream.model.crossing import Fillers
from pipedream.model.cut_model import CutModel
from pipedream.model.loss_placement import call_loss
from pipedream.model.recompute import GeneratorState
from pipedream.model.references import modules_carried_by
from pipedream.model.span import SpanStage
from pipedream.model.trace import CallCounter
from pipedream.model.untouched import hooks_of, restore_hooks, untouched

__all__ = ["check_cuts"]

_LossFunction = Callable[[Any, Any], Tensor]

# Of each tensor's largest element: values that three or more use are summed in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


_NEGLIGIBLE = 1e-2
"""Of the largest element of all gradients: times the tolerance some ten times float32's rounding of it."""

_NUM_ROUNDS = 2  # the same minibatch twice: the second one finds what the first one left


@dataclass
class _Outcome:
    losses: list[float]
    """Of each round."""
    gradients: dict[str, Tensor]
    """Of the first round, by name."""
    buffers: dict[str, Tensor]
    """After the last round."""


@dataclass
class _Round:
    """The generators of the whole model's forward."""

    begin: GeneratorState
    at_cuts: dict[int, GeneratorState] = field(default_factory=dict)


class _Attributes:
    """All that the modules of a model have, but for the contents of tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._of = [
            (module, dict(vars(module)), dict(module._buffers), hooks_of(module))
            for module in model.modules()
        ]

    def restore(self) -> None:
        for module, attributes, buffers, hooks in self._of:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            restore_hooks(module, hooks)


def check_cuts(cut: CutModel, inputs: Any, targets: Any, loss_fn: _LossFunction) -> dict[int, str]:
    """The offered places, by position, at which cutting changes what is computed, with what differs, or the
    error that the forward then raises. inputs, targets: on the model's device.

    Raises ValueError where single cuts compute what they must and several together do not."""
    if not cut.offered:
        return {}
    device = next(cut.module.parameters()).device
    kept = [cut.module, *modules_carried_by(loss_fn)]
    with _all_kept(kept):
        rounds, whole = _whole(cut, inputs, targets, loss_fn, device)

    def difference(ends: Sequence[int]) -> str:
        with _all_kept(kept):
            try:
                staged = _staged(cut, ends, inputs, targets, loss_fn, device, rounds)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                return f"cut there its forward raises {describe_error(error)}"
            return _difference(whole, staged)

    bad = _bad_of(range(len(cut.offered)), difference)
    good = [end for end in range(len(cut.offered)) if end not in bad]
    left = difference(good) if bad and good else ""
    if left:
        raise ValueError(
            f"the model cut after {', '.join(cut.offered[end].name for end in good)} at once does not compute"
            f" what the whole model does: {left}; choose cuts=[...] of profile, or give a list of layers"
        )
    return bad


def _bad_of(ends: Sequence[int], difference: Callable[[Sequence[int]], str]) -> dict[int, str]:
    """Those of the cuts that differ, found by halves: a few of many take a few checks."""
    found = difference(ends)
    if not found:
        return {}
    if len(ends) == 1:
        return {ends[0]: found}
    middle = len(ends) // 2
    return _bad_of(ends[:middle], difference) | _bad_of(ends[middle:], difference)


@contextlib.contextmanager
def _all_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    with untouched(modules):
        attributes = [_Attributes(module) for module in modules]
        try:
            yield
        finally:
            for of_module in attributes:
                of_module.restore()


def _whole(
    cut: CutModel, inputs: Any, targets: Any, loss_fn: _LossFunction, device: torch.device
) -> tuple[list[_Round], _Outcome]:
    """What the whole model computes."""
    modules = dict(visible_modules(cut.module))
    names = module_names(cut.module)
    keys = {
        place.crossing.last: index for index, place in enumerate(cut.offered) if place.crossing is not None
    }
    counter = CallCounter(names)  # of this round
    rounds: list[_Round] = []

    def call(module: nn.Module, call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        key = counter.key_of_next(module)
        output = call(*arguments, **keywords)
        index = keys.get(key)
        if index is not None:
            rounds[-1].at_cuts[index] = GeneratorState.capture(device)
        return output

    losses = []
    for turn in range(_NUM_ROUNDS):
        rounds.append(_Round(GeneratorState.capture(device)))
        counter = CallCounter(names)
        with calls_seen([modules[key.module] for key in keys], call):
            output = call_model(cut.module, _copied(inputs))
        loss = check_loss(call_loss(loss_fn, output, _copied(targets)), 0)
        losses.append(float(loss.detach()))
        if turn == 0 and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        del loss, output
    return rounds, _Outcome(losses, _gradients(cut.module), _clones(cut.module.named_buffers()))


def _staged(
    cut: CutModel,
    ends: Sequence[int],
    inputs: Any,
    targets: Any,
    loss_fn: _LossFunction,
    device: torch.device,
    rounds: Sequence[_Round],
) -> _Outcome:
    """Of stages that end at these layers."""
    fillers = Fillers()
    generators: dict[int, GeneratorState] = {}  # at the cuts, of this round
    last_layers = [*ends, len(cut.offered)]
    stages = []
    for stage_index, last_layer in enumerate(last_layers):
        first_layer = last_layers[stage_index - 1] + 1 if stage_index > 0 else 0

        def begin(end: int = first_layer - 1) -> None:
            generators[end].restore(device)

        stages.append(
            cut.stage(stage_index, first_layer, last_layer, fillers, begin if stage_index > 0 else None)
        )
    # A worker has the attributes that its own forwards have set.
    attributes = [_Attributes(cut.module)] * len(stages)
    losses: list[float] = []
    buffers: dict[str, Tensor] = {}
    for turn, of_whole in enumerate(rounds):
        generators = of_whole.at_cuts
        of_whole.begin.restore(device)
        value: Any = _copied(inputs)
        received: list[list[Tensor]] = []
        sent: list[list[Tensor]] = []
        for index, stage in enumerate(stages):
            if sent:
                received.append([t.detach().clone().requires_grad_(t.requires_grad) for t in sent[-1]])
                value = [boundary_input(leaf) for leaf in received[-1]]
            attributes[index].restore()
            with _strays_swapped(stage):
                value = stage(value)
            attributes[index] = _Attributes(cut.module)
            if turn == len(rounds) - 1:
                buffers |= _clones(stage.stage_buffers())
            if stage is not stages[-1]:
                sent.append(list(value))
        loss = check_loss(call_loss(loss_fn, value, _copied(targets)), 0)
        losses.append(float(loss.detach()))
        roots = [(loss, torch.ones_like(loss))] if turn == 0 and loss.requires_grad else []
        while roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
            pairs = zip(sent.pop(), received.pop(), strict=True) if sent else ()
            roots = [(output, leaf.grad) for output, leaf in pairs if leaf.grad is not None]
    return _Outcome(losses, _gradients(cut.module), buffers)


@contextlib.contextmanager
def _strays_swapped(stage: SpanStage) -> Iterator[None]:
    """Parameters and buffers of others are not what this stage reads, nor where it writes."""
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


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in gradients.items()}


def _clones(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named}


def _difference(whole: _Outcome, staged: _Outcome) -> str:
    """Empty where there is none."""
    for turn, (wanted, loss) in enumerate(zip(whole.losses, staged.losses, strict=True)):
        scale = max(abs(wanted), 1.0)
        if not math.isclose(loss, wanted, abs_tol=_TOLERANCE[torch.float32] * scale):
            which = "its loss" if turn == 0 else "its next loss"
            return f"{which} is {loss:.6g}, not {wanted:.6g}"
    # A gradient that is nothing but rounding, as that of an attention's key bias, is so in another way.
    scale = _NEGLIGIBLE * max([_largest(tensor) for tensor in whole.gradients.values()], default=0.0)
    for name, tensor in whole.gradients.items():
        other = staged.gradients.get(name)
        if other is None:
            return f"{name} has no gradient"
        if not _is_close(tensor, other, scale):
            return f"the gradient of {name} differs"
    for name, tensor in whole.buffers.items():
        if not _is_close(tensor, staged.buffers[name], 0.0):
            return f"{name} differs"
    return ""


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() > 0 else 0.0


def _is_close(tensor: Tensor, other: Tensor, scale: float) -> bool:
    """scale: what the largest element is taken for at least."""
    if tensor.is_sparse:  # a buffer
        tensor, other = tensor.to_dense(), other.to_dense()
    if not tensor.is_floating_point():
        return torch.equal(tensor, other)
    if tensor.numel() == 0 or torch.equal(tensor, other):
        return True
    distance = (tensor - other).abs().max()  # NaN is no distance
    return bool(distance <= _TOLERANCE.get(tensor.dtype, 1e-2) * max(_largest(tensor), scale))
