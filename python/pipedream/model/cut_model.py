"""A module that is no list of layers, with the places where it may be cut: its layers are the spans between
two neighbouring cuts of its own forward, named by the call with which each ends.

    cut = cut_model(model, inputs, targets, loss_fn)     one traced minibatch
    cut.layer_names                                      what a plan counts
    split(cut, plan)                                     stages, as of any other model

Owned by the thread that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.model.batches import call_model
from pipedream.model.boundary import check_loss, device_of, map_tensors, to_device, untouched
from pipedream.model.crossing import Fillers
from pipedream.model.cuts import Cut, Cuts
from pipedream.model.loss_placement import call_loss, loss_on, spare_loss
from pipedream.model.precision import autocast_region
from pipedream.model.references import modules_carried_by
from pipedream.model.span import SpanStage
from pipedream.model.splitter import CutForward, Model, check_parameters, is_list_of_layers, model_name
from pipedream.model.trace import record

__all__ = ["CutModel", "cut_model", "needs_cutting"]


def needs_cutting(model: Model) -> bool:
    """Whether the model has layers only after it was traced."""
    return isinstance(model, nn.Module) and not is_list_of_layers(model)


class CutModel(CutForward):
    """What was found; the module itself is the user's."""

    def __init__(self, module: nn.Module, cuts: Cuts) -> None:
        self.module = module
        self.cuts = cuts

    @property
    def offered(self) -> list[Cut]:
        return self.cuts.offered

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
        )

    @property
    def outline(self) -> list[str]:
        crossings = [0 if place.crossing is None else place.crossing.num_tensors for place in self.offered]
        sizes = [0 if place.crossing is None else place.crossing.num_sizes for place in self.offered]
        lines = [f"{tensors} tensors, {rest} sizes" for tensors, rest in zip(crossings, sizes, strict=True)]
        return [f"{name} ({line})" for name, line in zip(self.layer_names, [*lines, "the end"], strict=True)]

    def parameter_bytes(self) -> list[int]:
        """Trainable ones of each layer; one that several use counts at the first."""
        layer_of = self.cuts.first_spans_of_parameters(self.offered)
        sizes = [0] * len(self.layer_names)
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                sizes[layer_of[name]] += parameter.numel() * parameter.element_size()
        return sizes

    def explain(self) -> str:
        """Why there are no more cuts, for the first places that are none; empty where there is nothing to
        say."""
        reasons = [f"not after {cut.name}: {cut.why_not}" for cut in self.cuts.refused[:3]]
        return "; ".join(reasons)


def cut_model(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    autocast: torch.dtype | None = None,
) -> CutModel:
    """Traces the model on one minibatch; it and the generators are afterwards as they were.

    Raises ValueError for parameters that cannot be trained, and whatever the model and the loss raise.
    """
    check_parameters(model)
    device = device_of([model])
    loss_fn = spare_loss(loss_fn)
    # Copies, as a first layer that works in place would change the caller's data; and targets that are the
    # inputs are then read at the last stage, where they are.
    given = map_tensors(lambda tensor: tensor.detach().clone(), to_device(inputs, device))
    wanted = map_tensors(lambda tensor: tensor.detach().clone(), to_device(targets, device))

    def run(value: Any) -> Any:
        with autocast_region(device.type, autocast):
            return call_model(model, value)

    def make_loss(output: Any) -> Tensor:
        with autocast_region(device.type, autocast):
            return check_loss(call_loss(loss_fn, output, wanted), 0)

    kept, placed = untouched([model, *modules_carried_by(loss_fn)]), loss_on(loss_fn, device)
    with kept, placed, torch.enable_grad():
        trace = record(model, given, run, make_loss)
    return CutModel(model, Cuts(trace))
