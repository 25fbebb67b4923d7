"""CutModel holds a module that is no list of layers, with the places where it may be cut. The layers are the
spans of the module's own forward between neighbouring cuts. A layer has the name of the call with which it
ends.

    cut = cut_model(model, inputs, targets, loss_fn)     traces one minibatch
    cut.layer_names                                      the layers that a plan counts
    split(cut, plan)                                     stages, as for any other model

Owned by the thread that makes it.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.model.batches import call_model, first_microbatch
from pipedream.model.boundary import check_loss, device_of, map_tensors, tensors_of, to_device
from pipedream.model.calls import is_compiled, module_names
from pipedream.model.draws import DrawSites, sites_of_trace
from pipedream.model.initial_weights import WeightSource, traceable
from pipedream.model.layers import CutForward, Model, check_parameters, is_list_of_layers, model_name
from pipedream.model.loss_state import call_loss, loss_on, spare_loss
from pipedream.model.precision import autocast_region, casts_not_kept
from pipedream.model.seeding import RngState
from pipedream.model.trace import record
from pipedream.model.untouched import untouched
from pipedream.splitting.crossing import Fillers
from pipedream.splitting.cuts import Cut, Cuts
from pipedream.splitting.span import SpanStage

__all__ = ["CutModel", "cut_model", "needs_cutting"]


def needs_cutting(model: Model) -> bool:
    """Whether the model must be traced before it has layers."""
    return isinstance(model, nn.Module) and not is_list_of_layers(model)


class CutModel(CutForward):
    """A user's module with the cuts that were found."""

    def __init__(
        self,
        module: nn.Module,
        cuts: Cuts,
        counts: Sequence[str] = (),
        loss: float | None = None,
        draws: DrawSites | None = None,
        call: Callable[[nn.Module, Any], Any] = call_model,
    ) -> None:
        """call: a function that runs the module, by its own forward or by another function."""
        self.module = module
        self.call = call
        self.counts = tuple(counts)
        """Numbers that the forward changes, by path. They are attributes of modules that contain modules."""
        self.loss = loss
        """Loss of the traced minibatch. None if the forward drew random numbers."""
        self.draws = draws or DrawSites()
        """The places at which the forward drew random numbers."""
        self.cuts = cuts
        self.offered = cuts.offered
        """The places where the model may be cut, in the order of the forward: all of them, or those that the
        user chose.
        """
        self.refused = cuts.refused
        """Places where it may not be cut, with reasons."""
        names = tuple(cut.name for cut in cuts.offered)
        self.chosen = names if names and cuts.depend_on_chance else None
        """The names of the offered places, if some were left out or another trace may find other places; else
        None.
        """

    def at(self, names: Sequence[str]) -> CutModel:
        """Returns the same model, which may then be cut only after the calls with these names. A plan has
        such names. Raises ValueError for a call after which the model cannot be cut.
        """
        places = {self._place_of(name): None for name in names}
        known = [cut for cut in [*self.offered, *self.refused] if cut.crossing is not None]
        chosen = sorted((cut for cut in known if cut.call in places), key=self.cuts.end_of)
        return self._with(chosen, [cut for cut in self.refused if cut.call not in places])

    def without(self, reasons: Mapping[int, str]) -> CutModel:
        """Returns the model without some of the offered places. reasons: the reason for each place that is
        left out, by the place's position in `offered`.
        """
        kept = [cut for position, cut in enumerate(self.offered) if position not in reasons]
        dropped = [
            replace(self.offered[position], crossing=None, why_not=why) for position, why in reasons.items()
        ]
        return self._with(kept, [*self.refused, *dropped])

    def _with(self, offered: list[Cut], refused: list[Cut]) -> CutModel:
        other = copy.copy(self)
        other.offered, other.refused = offered, refused
        other.chosen = tuple(cut.name for cut in offered)
        return other

    def _place_of(self, name: str) -> int:
        name = self._name_of_calls(name)
        for cut in [*self.offered, *self.refused]:
            if name == cut.name or name in cut.calls:
                if cut.crossing is None:
                    raise ValueError(f"the model cannot be cut after {name}: {cut.why_not}")
                return cut.call
        known = [name for cut in self.offered for name in cut.calls]
        close = difflib.get_close_matches(name, known, n=1)
        some = f"do you mean {close[0]!r}?" if close else f"it can be after {', '.join(known[:5]) or 'none'}"
        raise ValueError(
            f"the model cannot be cut after {name!r}, no call of a module between its first and its last"
            f" parameters; {some}"
        )

    def _name_of_calls(self, path: str) -> str:
        """Returns the name that calls have for the module with this path; the path itself if there is no
        module.
        """
        try:
            module = self.module.get_submodule(path)
        except AttributeError:  # "block (call 2)"
            return path
        return module_names(self.module).get(id(module), path)

    @property
    def layer_names(self) -> list[str]:
        return [*(cut.name for cut in self.offered), self.cuts.last_call or model_name(self.module)]

    def stage(
        self,
        stage_index: int,
        first_layer: int,
        last_layer: int,
        fillers: Fillers | None = None,
        on_begin: Callable[[], None] | None = None,
    ) -> SpanStage:
        before = self.offered[first_layer - 1] if first_layer > 0 else None
        after = self.offered[last_layer] if last_layer < len(self.offered) else None
        return SpanStage(
            stage_index,
            first_layer,
            self.layer_names[first_layer : last_layer + 1],
            self.module,
            state=self.cuts.state_of(before, after),
            crossing_in=None if before is None else before.crossing,
            crossing_out=None if after is None else after.crossing,
            fillers=fillers,
            on_begin=on_begin,
            draws=self.draws,
            call=self.call,
        )

    @property
    def outline(self) -> list[str]:
        crossings = [0 if place.crossing is None else place.crossing.num_tensors for place in self.offered]
        sizes = [0 if place.crossing is None else place.crossing.num_sizes for place in self.offered]
        lines = [f"{tensors} tensors, {rest} sizes" for tensors, rest in zip(crossings, sizes, strict=True)]
        return [f"{name} ({line})" for name, line in zip(self.layer_names, [*lines, "the end"], strict=True)]

    def parameter_bytes(self, *, trained: bool = True) -> list[int]:
        """Returns the bytes of each layer's parameters. trained: True counts parameters that are trained,
        False counts the other parameters. A parameter counts for the first layer that uses it.
        """
        layer_of = self.cuts.first_spans_of_parameters(self.offered)
        sizes = [0] * len(self.layer_names)
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad == trained:
                sizes[layer_of[name]] += parameter.numel() * parameter.element_size()
        return sizes

    def explain_checkpointed(self) -> str:
        """Returns why the model has few cuts if it calls checkpoint() for one block after another; empty for
        any other model.
        """
        names = [cut.name for cut in self.refused if cut.is_checkpointed]
        if len(names) < 2:
            return ""
        others = f"{len(names) - 1} other{'s' * (len(names) > 2)}"
        return (
            f"it cannot be cut after {names[0]} and {others}, which run under activation checkpointing or"
            " no_grad: leave checkpoint() out of the forward, and give run recompute=True, which does that"
            " stage by stage"
        )

    def explain(self) -> str:
        """Returns why the model cannot be cut at the first refused places, or why it has no place to cut at
        all; "" if there are only offered places.
        """
        if is_compiled(self.module):
            return (
                "it is compiled as a whole, which is one call: give the module that it was made of, and"
                " compile its parts (for block in model.blocks: block.compile())"
            )
        if not self.offered and not self.refused:
            return "no call of a module ends between its first and its last use of a parameter"
        reasons = [f"not after {cut.name}: {cut.why_not}" for cut in self.refused[:3]]
        return "; ".join(reasons)


def cut_model(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    autocast: torch.dtype | None = None,
    weights: WeightSource = None,
    call: Callable[[nn.Module, Any], Any] = call_model,
    needs_outputs: bool = False,
) -> CutModel:
    """Traces the model on one minibatch. Afterwards the model and the generators are as before. If the inputs
    are Microbatches, the first batch is used. A model on the meta device is traced on the host, without
    values of parameters.

    weights: the source of the buffers of a model on meta. call: a function that runs the model.
    needs_outputs: whether the last stage needs all outputs, not only those that the loss reads.

    Raises ValueError for parameters that cannot be trained, and any error that the model or the loss raises.
    """
    check_parameters(model)
    made: list[Tensor] = []  # the loss

    def run(value: Any) -> Any:
        with autocast_region(device.type, autocast):
            return call(model, value)

    def make_loss(output: Any) -> Tensor:
        with autocast_region(device.type, autocast):
            loss = check_loss(call_loss(loss_fn, output, wanted), 0)
        made.append(loss.detach())
        if needs_outputs:  # the loss must depend on all outputs
            for tensor in tensors_of(output):
                loss = loss + 0.0 * tensor.sum()
        return loss

    with traceable(model, weights):
        device = device_of([model])
        loss_fn = spare_loss(loss_fn, [model])
        # The inputs are cloned, because a first layer that works in place would change the caller's data. The
        # targets are cloned separately, even if they are the same objects as the inputs. Otherwise the loss
        # would seem to read inputs, which would have to cross the cuts. The last stage has the targets
        # anyway.
        given, wanted = (
            map_tensors(lambda tensor: tensor.detach().clone(), to_device(first_microbatch(part), device))
            for part in (inputs, targets)
        )
        kept, placed = untouched([model], loss_fn), loss_on(loss_fn, device)
        with kept, placed, casts_not_kept(), torch.enable_grad():
            before, generators = _numbers_kept(model), RngState.capture()
            trace = record(model, given, run, make_loss)
            after = _numbers_kept(model)
            loss = made[0].item() if RngState.capture().equals(generators) else None
    counts = [name for name, value in before.items() if after.get(name) != value]
    return CutModel(model, Cuts(trace), counts, loss, sites_of_trace(trace, model), call)


def _numbers_kept(model: nn.Module) -> dict[str, float]:
    """Returns the numbers in attributes of modules that contain other modules, by path, because such a module
    may run at several stages.
    """
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        if module._modules
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }
