"""Explanation says, as text and as a picture, where a model can be cut, how many bytes would cross there, and
why it cannot be cut elsewhere.

    explain(model, batch, loss_fn)    traces one forward and checks every cut, as profile() does

A list of layers is not traced. The cuts of a model on the meta device are not checked. Owned by the thread
that makes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.common.figure_file import import_figure, save_figure
from pipedream.common.table import format_table, shorten
from pipedream.common.units import format_bytes
from pipedream.model.batches import own_loss, parts_of
from pipedream.model.boundary import device_of, to_device
from pipedream.model.initial_weights import WeightSource
from pipedream.model.layers import Model, check_shapes, layers_of, model_name
from pipedream.model.stand_ins import is_on_meta
from pipedream.splitting.crossing import Crossing
from pipedream.splitting.cut_model import CutModel, cut_model, needs_cutting
from pipedream.splitting.split_check import check_cuts

__all__ = ["ExplainedLayer", "Explanation", "explain"]

_REFUSED_SHOWN_MAX = 20
_SENDERS_SHOWN_MAX = 3


@dataclass(frozen=True)
class ExplainedLayer:
    """A layer, and the cut after it."""

    name: str
    parameter_bytes: int
    """Bytes of trainable parameters."""
    crossing_bytes: int | None
    """Bytes that cross in the traced minibatch; 0 after the last layer. None: they are not known before a
    profile.
    """
    senders: tuple[str, ...] = ()
    """The calls whose outputs cross, each once. They may include "the inputs"."""
    num_tensors: int = 0


@dataclass(frozen=True)
class Explanation:
    """The cuts of a model, and reasons against other places."""

    model: str
    layers: tuple[ExplainedLayer, ...]
    refused: tuple[tuple[str, str], ...]
    """(the call, why the model cannot be cut after it), in the order of the forward."""
    why_none: str = ""
    """The reason why the model has no place that could be a cut; empty if it has such places, offered or
    refused.
    """

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "layers": [vars(layer) | {"senders": list(layer.senders)} for layer in self.layers],
            "refused": [{"name": name, "why_not": why_not} for name, why_not in self.refused],
        }

    def __str__(self) -> str:
        headings = ("layer", "ends with", "parameters", "crosses after it", "tensors", "returned by")
        rows = [self._row(index, layer) for index, layer in enumerate(self.layers)]
        lines = [self._title(), "", format_table(headings, rows, "><>>><")]
        return "\n".join([*lines, *self._refused_lines()])

    def _title(self) -> str:
        return f"{self.model}: layers {len(self.layers)}, places where it cannot be cut {len(self.refused)}"

    def _refused_lines(self) -> list[str]:
        lines = ["", f"it cannot be cut: {self.why_none}"] if self.why_none else []
        if self.refused:
            lines += ["", "not after"]
            lines += [f"  {name}: {why_not}" for name, why_not in self.refused[:_REFUSED_SHOWN_MAX]]
            rest = len(self.refused) - _REFUSED_SHOWN_MAX
            lines += [f"  and {rest} more, which --json lists"] if rest > 0 else []
        return lines

    def _row(self, index: int, layer: ExplainedLayer) -> tuple[str, ...]:
        is_last = index == len(self.layers) - 1
        known = layer.crossing_bytes is not None and not is_last
        senders = list(layer.senders[-_SENDERS_SHOWN_MAX:][::-1])
        more = len(layer.senders) - len(senders)
        return (
            str(index),
            shorten(layer.name, 40),
            format_bytes(layer.parameter_bytes),
            format_bytes(layer.crossing_bytes or 0) if known else "",
            str(layer.num_tensors) if known else "",
            ", ".join(senders) + (f" and {more} more" if more > 0 else ""),
        )

    def describe_refused(self) -> str:
        """Returns the title and the refused places, as text beside a picture of the layers."""
        return "\n".join([self._title(), *self._refused_lines()])

    def good_places(self) -> list[int]:
        """Returns the layers after which fewer bytes cross than after the layers next to them."""
        sizes = [layer.crossing_bytes for layer in self.layers[:-1]]
        return [
            index
            for index, size in enumerate(sizes)
            if size is not None
            and all(
                (other or 0) > size
                for other in (*sizes[max(index - 1, 0) : index], *sizes[index + 1 : index + 2])
            )
        ]

    def save_picture(self, path: str | os.PathLike[str], cuts: Sequence[int] = ()) -> None:
        """Draws the bytes that cross after each layer, and each layer's parameters, as .svg, .png or .pdf.

        cuts: the layers after which a plan cuts; they are marked. Good places have a colour of their own.
        Raises ValueError if matplotlib is missing.
        """
        figure = import_figure(path)(figsize=(10, 1.2 + 0.18 * len(self.layers)), layout="constrained")
        crossing, parameters = figure.subplots(1, 2, sharey=True)
        rows = range(len(self.layers))
        unit, sizes = _in_one_unit([layer.crossing_bytes or 0 for layer in self.layers])
        good = set(self.good_places())
        colours = ["tab:green" if index in good else "tab:blue" for index in rows]
        bars = crossing.barh(rows, sizes, color=colours)
        named = {"fewer bytes than at the places beside it": bars[min(good)]} if good else {}
        for index in cuts:
            named["cut of the plan"] = crossing.axhline(index + 0.5, color="tab:red", linewidth=1)
        if named:
            crossing.legend([*named.values()], [*named], fontsize=6, frameon=False, loc="lower right")
        crossing.set_xlabel(f"{unit} that cross after the layer")
        unit, sizes = _in_one_unit([layer.parameter_bytes for layer in self.layers])
        parameters.barh(rows, sizes, color="tab:gray")
        parameters.set_xlabel(f"{unit} of parameters")
        crossing.set_yticks(rows, [shorten(layer.name, 40) for layer in self.layers], fontsize=6)
        crossing.set_ylim(len(self.layers) - 0.5, -0.5)  # the first layer on top
        for axes in (crossing, parameters):
            axes.locator_params(axis="x", nbins=6)
        figure.suptitle(f"{self.model}: {len(self.layers)} layers")
        save_figure(figure, path)


def _in_one_unit(sizes: Sequence[int]) -> tuple[str, list[float]]:
    """Returns the largest unit in which some size is at least 1, or else bytes, and the sizes in it."""
    units = [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes")]
    unit_bytes, unit = next((pair for pair in units if max(sizes) >= pair[0]), units[-1])
    return unit, [size / unit_bytes for size in sizes]


def explain(
    model: Model,
    batch: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    weights: WeightSource = None,
) -> Explanation:
    """Explains where the model can be cut. The model is unchanged afterwards.

    batch: a minibatch as the data yield it. weights: as in run(). A model on the meta device is traced on the
    host, and its cuts are not checked.

    Raises ValueError or TypeError for a batch that does not fit, and any error that the model raises.
    """
    loss_fn = loss_fn or own_loss
    if not needs_cutting(model):
        return _of_list(layers_of(model), model_name(model))
    assert isinstance(model, nn.Module)
    on_meta = is_on_meta([model])
    device = torch.device("cpu") if on_meta else device_of([model])
    inputs, targets = (to_device(part, device) for part in parts_of(batch, 0))
    cut = cut_model(model, inputs, targets, loss_fn, weights=weights)
    bad = {} if on_meta else check_cuts(cut, [(inputs, targets)], loss_fn)
    return _of_cut(cut.without(bad) if bad else cut)


def _of_list(layers: Sequence[tuple[str, nn.Module]], name: str) -> Explanation:
    explained = []
    for layer_name, layer in layers:
        check_shapes(layer, f"{layer_name}.")
        trainable = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        explained.append(ExplainedLayer(layer_name, sum(p.nbytes for p in trainable), None))
    return Explanation(name, tuple(explained), ())


def _of_cut(cut: CutModel) -> Explanation:
    sizes = cut.parameter_bytes()
    layers = [
        ExplainedLayer(place.name, size, place.num_bytes, *_senders(place.crossing))
        for place, size in zip(cut.offered, sizes, strict=False)
    ]
    layers.append(ExplainedLayer(cut.layer_names[-1], sizes[-1], 0))
    refused = sorted(cut.refused, key=cut.cuts.end_of)
    reasons = tuple((place.name, place.why_not) for place in refused)
    return Explanation(model_name(cut), tuple(layers), reasons, "" if refused else cut.explain())


def _senders(crossing: Crossing | None) -> tuple[tuple[str, ...], int]:
    assert crossing is not None  # an offered place has a crossing
    names = [
        str(call.key) for call in crossing.all_calls if any(leaf.crossing is not None for leaf in call.leaves)
    ]
    return tuple(names), crossing.num_tensors
