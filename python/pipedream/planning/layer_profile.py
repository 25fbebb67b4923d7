"""Profile has the measured costs of each layer of a model on one device. Its file has the form
pipedream.profile/1.

The profiler makes a Profile and the partitioner reads it, perhaps on another machine. Its values never change
once built; any thread; needs no torch.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pipedream.common.document import (
    check_figures,
    check_format,
    check_list,
    check_number,
    check_object,
    check_text,
    check_whole,
    read_document,
    read_value,
    require,
    set_field,
    write_document,
    write_value,
)
from pipedream.common.errors import FileFormatError
from pipedream.common.table import format_table, html_of, shorten
from pipedream.common.units import format_bytes
from pipedream.planning.item_cost import COUNTED_MAX, ItemCost, microbatch_counts
from pipedream.planning.shapes import Shapes, checked_shapes, describe_shapes

__all__ = ["LayerProfile", "MicrobatchTimes", "Profile", "WeightFactors", "checked_cuts", "pass_costs"]

_KIND = "profile"
_VERSION = 1
_FORMAT = f"pipedream.{_KIND}/{_VERSION}"
_KNOWN_FIELDS = ("model", "batch_size", "device", "minibatches")  # a file always has these
_HEADER_FIELDS = (*_KNOWN_FIELDS, "time_error", "runtime", "cuts", "max_shapes")
_ROWS_MAX = 40  # layers that have a row each when a profile is printed
_TIME_MS_MAX = 1e12  # 31 years: a longer time is a mistake
_LAYER_FIELDS = ("name", "forward_ms", "backward_ms", "activation_bytes", "parameter_bytes")
_MEASURED_FIELDS = ("saved_bytes", "frozen_bytes", "factors", "microbatch_ms")


class WeightFactors(NamedTuple):
    """Sizes, in bytes, of a weight whose gradient replicas may push as factors (docs/parameter-server.md)."""

    weight_bytes: int
    factor_bytes: int
    """Bytes of the weight's factors for one minibatch of one replica."""
    product_ms: float | None = None
    """Milliseconds to compute the gradient from the factors of one replica; None if not measured."""


class MicrobatchTimes(NamedTuple):
    """Milliseconds of one microbatch of a minibatch that is cut into num_microbatches."""

    num_microbatches: int
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class LayerProfile:
    """One layer's cost per minibatch. Raises ValueError naming a field whose value is impossible."""

    name: str
    forward_ms: float
    backward_ms: float
    activation_bytes: int
    """Bytes of all tensors that cross the cut after this layer, each counted once; 0 after the last layer."""
    parameter_bytes: int
    saved_bytes: int | None = None
    """Bytes that autograd keeps for this layer's backward of one minibatch, without parameters; None if not
    measured.
    """
    factors: tuple[WeightFactors, ...] | None = None
    """The weights of the linear layers in this layer; None if not measured."""
    microbatch_ms: tuple[MicrobatchTimes, ...] | None = None
    """Times of a microbatch, by ascending number of microbatches. Empty: a minibatch cannot be cut. None: not
    measured. Planning then assumes 1/m of the minibatch's time.
    """
    frozen_bytes: int = 0
    """Bytes of parameters that are not trained. The first layer that uses a parameter counts it."""
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the file that this version does not know. Saving writes them back unchanged."""

    def __post_init__(self) -> None:
        check_text("name", self.name)
        set_field(self, "forward_ms", _checked_ms("forward_ms", self.forward_ms))
        set_field(self, "backward_ms", _checked_ms("backward_ms", self.backward_ms))
        set_field(self, "activation_bytes", check_whole("activation_bytes", self.activation_bytes))
        set_field(self, "parameter_bytes", check_whole("parameter_bytes", self.parameter_bytes))
        set_field(self, "frozen_bytes", check_whole("frozen_bytes", self.frozen_bytes))
        if self.saved_bytes is not None:
            set_field(self, "saved_bytes", check_whole("saved_bytes", self.saved_bytes))
        if self.factors is not None:
            set_field(self, "factors", tuple(self.factors))
        if self.microbatch_ms is not None:
            set_field(self, "microbatch_ms", tuple(self.microbatch_ms))

    @property
    def compute_ms(self) -> float:
        """Milliseconds of the layer's forward and backward for one minibatch: T_l of the paper."""
        return self.forward_ms + self.backward_ms

    def compute_ms_with(self, num_microbatches: int) -> float:
        """Milliseconds of the forward and backward of a whole minibatch that is cut into num_microbatches."""
        if not self.microbatch_ms or num_microbatches == 1:
            return self.compute_ms
        return num_microbatches * sum(cost.later(num_microbatches) for cost in pass_costs([self]))

    def to_dict(self) -> dict[str, Any]:
        measured = {name: write_value(getattr(self, name)) for name in _MEASURED_FIELDS}
        given = {name: value for name, value in measured.items() if value is not None}
        if self.frozen_bytes == 0:
            del given["frozen_bytes"]
        return {name: getattr(self, name) for name in _LAYER_FIELDS} | given | self.extra

    def joined_with(self, other: LayerProfile) -> LayerProfile:
        """Returns this layer and the following one (`other`) as one layer, with the name of `other`."""
        saved, factors = (self.saved_bytes, other.saved_bytes), (self.factors, other.factors)
        return replace(
            other,
            forward_ms=self.forward_ms + other.forward_ms,
            backward_ms=self.backward_ms + other.backward_ms,
            parameter_bytes=self.parameter_bytes + other.parameter_bytes,
            frozen_bytes=self.frozen_bytes + other.frozen_bytes,
            saved_bytes=None if None in saved else sum(one or 0 for one in saved),
            factors=None if None in factors else tuple(weight for one in factors for weight in one or ()),
            microbatch_ms=_times_of_both(self.microbatch_ms, other.microbatch_ms),
        )

    def at_speed(self, speed: float) -> LayerProfile:
        """Returns the layer's costs on a worker that is `speed` times as fast."""

        def slower(weight: WeightFactors) -> WeightFactors:
            return (
                weight if weight.product_ms is None else weight._replace(product_ms=weight.product_ms / speed)
            )

        return replace(
            self,
            forward_ms=self.forward_ms / speed,
            backward_ms=self.backward_ms / speed,
            factors=None if self.factors is None else tuple(map(slower, self.factors)),
            microbatch_ms=None
            if self.microbatch_ms is None
            else tuple(MicrobatchTimes(m, f / speed, b / speed) for m, f, b in self.microbatch_ms),
        )


def pass_costs(layers: Sequence[LayerProfile]) -> tuple[ItemCost, ItemCost]:
    """Returns the costs of a microbatch's forward and backward through these layers. Unless all layers were
    measured with the same numbers of microbatches, a microbatch is assumed to take 1/m of the minibatch's
    time.
    """
    whole_ms = [sum(layer.forward_ms for layer in layers), sum(layer.backward_ms for layer in layers)]
    times = functools.reduce(_times_of_both, (layer.microbatch_ms for layer in layers))
    if not times:
        return ItemCost(minibatch_ms=whole_ms[0]), ItemCost(minibatch_ms=whole_ms[1])
    forward = ItemCost.of_pieces(whole_ms[0], {m: (ms, ms) for m, ms, _ in times})
    return forward, ItemCost.of_pieces(whole_ms[1], {m: (ms, ms) for m, _, ms in times})


@dataclass(frozen=True)
class Profile:
    """The layers of a model in order, and the conditions under which they were measured.

    Raises ValueError for no layers and for a batch size or number of minibatches below 1.
    """

    layers: tuple[LayerProfile, ...]
    model: str | None = None
    batch_size: int | None = None
    """Samples per minibatch; None where a sample is not a row, as in some translation models."""
    device: str | None = None
    minibatches: int | None = None
    """Number of minibatches whose mean the figures are; None if unknown."""
    time_error: float | None = None
    """Half the width of the 95 % confidence interval of a minibatch's mean time, as a share of that mean;
    None if unknown.
    """
    runtime: dict[str, Any] | None = field(default=None, hash=False)
    """Costs that a run adds to the layers (runtime_costs.py); None if not calibrated."""
    max_shapes: Shapes | None = field(default=None, hash=False)
    """The largest sizes of each entry of the minibatches that the profiler read; None if unknown."""
    cuts: tuple[str, ...] | None = None
    """The module calls after which layers end. None: layers end at every possible cut of the model."""
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        set_field(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("layers is empty: a model has at least one layer")
        for name in ("model", "device"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        if self.time_error is not None:
            set_field(self, "time_error", check_number("time_error", self.time_error))
        if self.runtime is not None:
            check_figures("runtime", check_object("runtime", self.runtime))
        if self.cuts is not None:
            set_field(self, "cuts", checked_cuts(self.cuts, len(self.layers)))
        if self.max_shapes is not None:
            set_field(self, "max_shapes", checked_shapes("max_shapes", self.max_shapes))
        for name in ("batch_size", "minibatches"):
            if getattr(self, name) is not None:
                set_field(self, name, check_whole(name, getattr(self, name), at_least=1))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_of_host(self) -> bool:
        """Whether the layers were measured on a CPU, so that the model lies in host memory. profile() names
        such a device with its threads, as in "AMD EPYC, 4 threads". Only CPUs have threads in their name.
        """
        return self.device is not None and re.search(r", \d+ threads?$", self.device) is not None

    @property
    def compute_ms(self) -> float:
        """Milliseconds of the forward and backward of one minibatch through all layers, on one device."""
        return sum(layer.compute_ms for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def frozen_bytes(self) -> int:
        return sum(layer.frozen_bytes for layer in self.layers)

    @property
    def microbatches_timed(self) -> int | None:
        """The largest number of microbatches with which every layer was timed. 1: a minibatch cannot be cut.
        None: some layer was not timed.
        """
        times = [layer.microbatch_ms for layer in self.layers]
        if any(of_layer is None for of_layer in times):
            return None
        return min(of_layer[-1].num_microbatches if of_layer else 1 for of_layer in times)

    def microbatch_counts(self, most: int = COUNTED_MAX) -> list[int]:
        """Returns the numbers of microbatches to choose among. They go up to `most`, and at least up to
        COUNTED_MAX. But if the model failed with one of these numbers when it was timed, they end below it.
        """
        counts, timed = microbatch_counts(self.batch_size), self.microbatches_timed
        if timed is not None and timed < counts[-1]:
            return [m for m in counts if m <= timed]  # the model fails with more microbatches
        return microbatch_counts(self.batch_size, max(COUNTED_MAX, most))

    def without_factors(self) -> Profile:
        """Returns the profile without factors, for a run whose replicas push all gradients whole."""
        return replace(self, layers=tuple(replace(layer, factors=None) for layer in self.layers))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a pipedream.profile/1 file; raises FileFormatError naming file and field."""
        return cls.from_dict(read_document(path, _KIND, _VERSION), source=os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        write_document(path, self.to_dict())

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, source: str = "profile") -> Profile:
        """Makes a profile from the fields of a file. Errors name `source`. Unknown fields are kept."""
        check_format(fields, _KIND, _VERSION, source)
        try:
            require(fields, ["layers"], "")
            layers = check_list("layers", fields["layers"])
            header = {name: fields.get(name) for name in _HEADER_FIELDS}
            extra = {name: fields[name] for name in fields if name not in {"format", "layers", *header}}
            return cls(
                tuple(_layer_from_dict(i, layer) for i, layer in enumerate(layers)), **header, extra=extra
            )
        except ValueError as error:
            raise FileFormatError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the file, with the long list of layers last."""
        header = {"format": _FORMAT} | {
            name: write_value(getattr(self, name))
            for name in _HEADER_FIELDS
            if name in _KNOWN_FIELDS or getattr(self, name) not in (None, {})
        }
        return header | self.extra | {"layers": [layer.to_dict() for layer in self.layers]}

    def __str__(self) -> str:
        """Returns a table of the layers. If there are more than 40, the layers of one block share a row;
        describe_layers() gives each layer a row.
        """
        return self._describe(_blocks_of(self.layers) if self.num_layers > _ROWS_MAX else None)

    def describe_layers(self) -> str:
        """Returns the profile as text, with a row for each layer."""
        return self._describe(None)

    def _repr_html_(self) -> str:
        return html_of(str(self))

    def _describe(self, blocks: Sequence[range] | None) -> str:
        headings = ("layer", "name", "forward ms", "backward ms", "activation", "parameters", "saved")
        rows = [self._row(block) for block in blocks or [range(i, i + 1) for i in range(self.num_layers)]]
        title = f"profile of {self.model or 'a model'}: {self.num_layers} layers"
        if self.batch_size is not None:
            title += f", minibatches of {self.batch_size}"
        if self.device is not None:
            title += f", on {self.device}"
        if self.max_shapes:
            title += f"\nminibatches of up to {describe_shapes(self.max_shapes)}"
        parameters = format_bytes(self.parameter_bytes)
        sums = f"together {self.compute_ms:.3f} ms per minibatch, {parameters} of parameters"
        if self.frozen_bytes:
            sums += f" and {format_bytes(self.frozen_bytes)} that are not trained"
        if self.time_error is not None:
            sums += f"; the time is known to {100 * self.time_error:.1f} %"
        elif self.minibatches is not None:
            num = f"{self.minibatches} minibatch{'es' * (self.minibatches != 1)}"
            sums += f"; of {num}, too few to say how well the time is known"
        if blocks is not None and len(blocks) < self.num_layers:
            sums += "\nlayers of one block share a row; describe_layers() has a row for each"
        return f"{title}\n\n{format_table(headings, rows, '><>>>>>')}\n\n{sums}"

    def _row(self, block: range) -> tuple[str, ...]:
        layers = self.layers[block.start : block.stop]
        saved = [layer.saved_bytes for layer in layers if layer.saved_bytes is not None]
        name = layers[0].name if len(layers) == 1 else f"{_block_of(layers[0].name)}, {len(layers)} layers"
        return (
            str(block.start) if len(layers) == 1 else f"{block.start}-{block.stop - 1}",
            shorten(name, 40),
            f"{sum(layer.forward_ms for layer in layers):.3f}",
            f"{sum(layer.backward_ms for layer in layers):.3f}",
            format_bytes(layers[-1].activation_bytes),
            format_bytes(sum(layer.parameter_bytes for layer in layers)),
            format_bytes(sum(saved)) if len(saved) == len(layers) else "",
        )


def _block_of(name: str) -> str:
    """Returns a layer's name up to its first number: "model.layers.3" for "model.layers.3.mlp.up_proj"."""
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: numbered + 1])


def _blocks_of(layers: Sequence[LayerProfile]) -> list[range]:
    """Returns ranges of consecutive layers that belong to one block."""
    blocks: list[range] = []
    for index, layer in enumerate(layers):
        if blocks and _block_of(layers[blocks[-1].start].name) == _block_of(layer.name):
            blocks[-1] = range(blocks[-1].start, index + 1)
        else:
            blocks.append(range(index, index + 1))
    return blocks


def checked_cuts(value: object, num_layers: int) -> tuple[str, ...]:
    """Returns the names of the module calls after which layers end. Raises ValueError unless every layer but
    the last has a name.
    """
    cuts = tuple(check_text("cuts", name) for name in check_list("cuts", value))
    if len(cuts) != num_layers - 1:
        raise ValueError(
            f"cuts has {len(cuts)} names, but {num_layers} layers have {num_layers - 1} cuts between"
        )
    return cuts


def _layer_from_dict(layer_index: int, value: object) -> LayerProfile:
    where = f"layers[{layer_index}]"
    fields = check_object(where, value)
    require(fields, _LAYER_FIELDS, where + ".")
    known = {*_LAYER_FIELDS, *_MEASURED_FIELDS}
    try:
        return LayerProfile(
            **{name: fields[name] for name in _LAYER_FIELDS},
            saved_bytes=fields.get("saved_bytes"),
            frozen_bytes=fields.get("frozen_bytes", 0),
            factors=_factors_from(fields.get("factors"), fields["parameter_bytes"]),
            microbatch_ms=_microbatch_times_from(fields.get("microbatch_ms")),
            extra={name: fields[name] for name in fields if name not in known},
        )
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def _factors_from(value: object, parameter_bytes: object) -> tuple[WeightFactors, ...] | None:
    """Reads a layer's factors in a file. parameter_bytes: bytes of all parameters of the layer."""
    if value is None:
        return None
    weights: tuple[WeightFactors, ...] = read_value("factors", value, tuple[WeightFactors, ...])
    weights_bytes = sum(weight.weight_bytes for weight in weights)
    if weights_bytes > check_whole("parameter_bytes", parameter_bytes):
        raise ValueError(
            f"factors have {weights_bytes} bytes of weights, and the layer has {parameter_bytes} of all its"
            " parameters: give weight_bytes of its own weights, each once, or leave factors out"
        )
    return weights


def _microbatch_times_from(value: object) -> tuple[MicrobatchTimes, ...] | None:
    if value is None:
        return None
    rows: tuple[MicrobatchTimes, ...] = read_value("microbatch_ms", value, tuple[MicrobatchTimes, ...])
    before = 1
    for index, (count, forward_ms, backward_ms) in enumerate(rows):
        if count <= before:
            raise ValueError(
                f"microbatch_ms[{index}].num_microbatches is {count}, not above {before}: list them in order,"
                " from 2 on"
            )
        _checked_ms(f"microbatch_ms[{index}]", max(forward_ms, backward_ms))
        before = count
    return rows


def _times_of_both(
    one: tuple[MicrobatchTimes, ...] | None, other: tuple[MicrobatchTimes, ...] | None
) -> tuple[MicrobatchTimes, ...] | None:
    """Returns the sum of two layers' times. Returns None if they were not measured with the same numbers of
    microbatches.
    """
    if one is None or other is None or [row[0] for row in one] != [row[0] for row in other]:
        return None
    return tuple(
        MicrobatchTimes(mine[0], mine[1] + theirs[1], mine[2] + theirs[2])
        for mine, theirs in zip(one, other, strict=True)
    )


def _checked_ms(name: str, value: object) -> float:
    time_ms = check_number(name, value)
    if time_ms > _TIME_MS_MAX:
        raise ValueError(f"{name} is {value}: it must be at most {_TIME_MS_MAX:g}, in milliseconds")
    return time_ms
