"""Split check: whether a model that is cut at all its cuts at once computes what the whole one does.

One minibatch, with every layer as a stage of its own. What a stage must not need is NaN: tensors that do not
cross, and parameters and buffers of other stages; attributes that one stage sets no other finds. Loss,
gradients and buffers are compared. It takes the time of two minibatches and of the code outside calls at
every layer, and leaves everything as it was. Owned by the thread that profiles.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.model.batches import call_model
from pipedream.model.boundary import attributes_kept, boundary_input, check_loss, map_tensors, untouched
from pipedream.model.calls import calls_seen, visible_modules
from pipedream.model.crossing import Fillers
from pipedream.model.cut_model import CutModel
from pipedream.model.loss_placement import call_loss
from pipedream.model.recompute import GeneratorState
from pipedream.model.references import modules_carried_by
from pipedream.model.span import SpanStage
from pipedream.model.trace import CallKey

__all__ = ["check_cuts"]

_LossFunction = Callable[[Any, Any], Tensor]

# Of each tensor's largest element: values that three or more use are summed in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass
class _Outcome:
    loss: float
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Gradients and buffers by name."""


def check_cuts(cut: CutModel, inputs: Any, targets: Any, loss_fn: _LossFunction) -> None:
    """inputs, targets: on the model's device. Raises ValueError naming a cut that changes what is computed,
    and the first tensor that differs."""
    if not cut.offered:
        return
    device = next(cut.module.parameters()).device
    kept = [cut.module, *modules_carried_by(loss_fn)]
    with untouched(kept):
        generators, whole = _whole(cut, inputs, targets, loss_fn, device)
    cuts = range(len(cut.offered))

    def differs(ends: Sequence[int]) -> str:
        with untouched(kept):
            return _difference(whole, _staged(cut, ends, inputs, targets, loss_fn, device, generators))

    if not differs(cuts):
        return
    for end in cuts:
        difference = differs([end])
        if difference:
            raise ValueError(
                f"the model cut after {cut.offered[end].name} does not compute what the whole model does:"
                f" {difference}; a value reaches later code outside torch's operations (numpy, a number"
                " in an attribute): return it from a module, or give a list of layers"
            )


def _whole(
    cut: CutModel, inputs: Any, targets: Any, loss_fn: _LossFunction, device: torch.device
) -> tuple[dict[int, GeneratorState], _Outcome]:
    """(the generators at each cut, what the whole model computes)."""
    modules = dict(visible_modules(cut.module))
    names = {id(module): name for name, module in modules.items()}
    keys = {
        place.crossing.last: index for index, place in enumerate(cut.offered) if place.crossing is not None
    }
    times_called: dict[str, int] = {}
    generators: dict[int, GeneratorState] = {}

    def call(module: nn.Module, call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        name = names[id(module)]
        nth = times_called[name] = times_called.get(name, -1) + 1
        output = call(*arguments, **keywords)
        index = keys.get(CallKey(name, nth))
        if index is not None:
            generators[index] = GeneratorState.capture(device)
        return output

    with calls_seen([modules[key.module] for key in keys], call):
        output = call_model(cut.module, _copied(inputs))
    loss = check_loss(call_loss(loss_fn, output, _copied(targets)), 0)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return generators, _outcome(loss, cut.module)


def _staged(
    cut: CutModel,
    ends: Sequence[int],
    inputs: Any,
    targets: Any,
    loss_fn: _LossFunction,
    device: torch.device,
    generators: dict[int, GeneratorState],
) -> _Outcome:
    """Of stages that end at these layers."""
    fillers = Fillers(poison=True)
    value: Any = _copied(inputs)
    received: list[list[Tensor]] = []
    sent: list[list[Tensor]] = []
    first_layer = 0
    for stage_index, last_layer in enumerate([*ends, len(cut.offered)]):
        on_begin: Callable[[], None] | None = None
        if stage_index > 0:
            on_begin = functools.partial(generators[first_layer - 1].restore, device)
        stage = cut.stage(stage_index, first_layer, last_layer, fillers, on_begin)
        if sent:
            received.append([t.detach().clone().requires_grad_(t.requires_grad) for t in sent[-1]])
            value = [boundary_input(leaf) for leaf in received[-1]]
        # A worker has the attributes that its own forwards have set.
        with _strays_poisoned(stage), attributes_kept(cut.module.modules()):
            value = stage(value)
        if last_layer < len(cut.offered):
            sent.append(list(value))
        first_layer = last_layer + 1
    loss = check_loss(call_loss(loss_fn, value, _copied(targets)), 0)
    roots = [(loss, torch.ones_like(loss))] if loss.requires_grad else []
    while roots:
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        pairs = zip(sent.pop(), received.pop(), strict=True) if sent else ()
        roots = [(output, leaf.grad) for output, leaf in pairs if leaf.grad is not None]
    return _outcome(loss, cut.module)


@contextlib.contextmanager
def _strays_poisoned(stage: SpanStage) -> Iterator[None]:
    contents = [(tensor, tensor.data) for tensor in stage.strays() if tensor.is_floating_point()]
    for tensor, content in contents:
        tensor.data = torch.full_like(content, math.nan)
    try:
        yield
    finally:
        for tensor, content in contents:
            tensor.data = content


def _copied(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().clone(), value)


def _outcome(loss: Tensor, model: nn.Module) -> _Outcome:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return _Outcome(float(loss.detach()), gradients | buffers)


def _difference(whole: _Outcome, staged: _Outcome) -> str:
    """Empty where there is none."""
    scale = max(abs(whole.loss), 1.0)
    if not math.isclose(staged.loss, whole.loss, abs_tol=_TOLERANCE[torch.float32] * scale):
        return f"its loss is {staged.loss:.6g}, not {whole.loss:.6g}"
    for name, tensor in whole.tensors.items():
        other = staged.tensors.get(name)
        if other is None:
            return f"{name} has no gradient"
        if not _is_close(tensor, other):
            return f"{name} differs"
    return ""


def _is_close(tensor: Tensor, other: Tensor) -> bool:
    if tensor.is_sparse:
        tensor, other = tensor.to_dense(), other.to_dense()
    if not tensor.is_floating_point():
        return torch.equal(tensor, other)
    if tensor.numel() == 0 or torch.equal(tensor, other):
        return True
    distance = (tensor - other).abs().max()  # NaN is no distance
    return bool(distance <= _TOLERANCE.get(tensor.dtype, 1e-2) * tensor.abs().max())
