"""CheckedModel runs a model whole, and also as stages that end at some of the places where it may be cut. The
check of cuts compares the two results. Owned by the thread that profiles.

The check computes in float64 where it can. In float32 a sum in another order may differ by rounding as much
as a slightly stale value does. In float64 rounding is ten orders of magnitude smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.model.batches import call_model
from pipedream.model.boundary import map_tensors, tensors_of
from pipedream.model.calls import calls_seen, module_names, visible_modules
from pipedream.model.draws import DrawSites
from pipedream.model.initial_weights import free_host_bytes
from pipedream.model.layers import Model, named_layers, roots_of
from pipedream.model.references import places_of, tensors_carried_by
from pipedream.model.stage_module import StageModule
from pipedream.model.trace import CallCounter
from pipedream.splitting.crossing import Fillers
from pipedream.splitting.cut_model import CutModel

__all__ = [
    "CheckedModel",
    "NotInFloat64Error",
    "PrecisionSeen",
    "as_float64",
    "checked_model",
    "fits_in_float64",
    "in_float64",
]


class CheckedModel(Protocol):
    roots: list[tuple[str, nn.Module]]
    """(prefix of full names, module) for the model's modules."""
    place_names: list[str]
    """Names of the layers after which the model may be cut."""
    draws: DrawSites
    """The places at which the model draws random numbers. Empty for a list of layers, which draws from the
    generators as they are.
    """

    def run(self, inputs: Any, at_place: Callable[[int], None]) -> Any:
        """Returns the whole model's output. at_place: called at the end of each layer but the last one."""

    def stages(self, ends: Sequence[int], on_begin: Callable[[int], None]) -> list[StageModule]:
        """Returns stages that end at these places and at the model's end. on_begin: called with a place, when
        a stage has reached the cut at which its own part of the forward begins.
        """


def checked_model(model: Model) -> CheckedModel:
    return _Module(model) if isinstance(model, CutModel) else _List(model)


class _Module:
    """A module that is cut along its own forward."""

    def __init__(self, cut: CutModel) -> None:
        self._cut = cut
        self.roots = roots_of(cut)
        self.draws = cut.draws
        self.place_names = [place.name for place in cut.offered]
        self._modules = dict(visible_modules(cut.module))
        self._names = module_names(cut.module)
        self._places = {
            place.crossing.last: index
            for index, place in enumerate(cut.offered)
            if place.crossing is not None
        }

    def run(self, inputs: Any, at_place: Callable[[int], None]) -> Any:
        counter = CallCounter(self._names)

        def call(module: nn.Module, call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
            place = self._places.get(counter.key_of_next(module))
            output = call(*arguments, **keywords)
            if place is not None:
                at_place(place)
            return output

        with calls_seen([self._modules[key.module] for key in self._places], call):
            return call_model(self._cut.module, inputs)

    def stages(self, ends: Sequence[int], on_begin: Callable[[int], None]) -> list[StageModule]:
        fillers = Fillers()
        stages: list[StageModule] = []
        first = 0
        for index, last in enumerate([*ends, len(self.place_names)]):
            begin = _calling(on_begin, first - 1) if first > 0 else None
            stages.append(self._cut.stage(index, first, last, fillers, begin))
            first = last + 1
        return stages


class _List:
    """A list of layers."""

    def __init__(self, model: Model) -> None:
        self._layers = named_layers(model)
        self.roots = roots_of(model)
        self.draws = DrawSites()
        self.place_names = [layer.name for layer in self._layers[:-1]]

    def run(self, inputs: Any, at_place: Callable[[int], None]) -> Any:
        value = call_model(self._layers[0].module, inputs)
        for place, layer in enumerate(self._layers[1:]):
            at_place(place)
            value = layer.module(value)
        return value

    def stages(self, ends: Sequence[int], on_begin: Callable[[int], None]) -> list[StageModule]:
        stages: list[StageModule] = []
        first = 0
        for index, last in enumerate([*ends, len(self.place_names)]):
            layers = [(layer.name, layer.prefix, layer.module) for layer in self._layers[first : last + 1]]
            begin = _calling(on_begin, first - 1) if first > 0 else None
            stages.append(_ListStage(index, first, layers, begin))
            first = last + 1
        return stages


class _ListStage(StageModule):
    def __init__(
        self,
        stage_index: int,
        first_layer: int,
        layers: Sequence[tuple[str, str, nn.Module]],
        on_begin: Callable[[], None] | None,
    ) -> None:
        super().__init__(stage_index, first_layer, layers)
        self._on_begin = on_begin

    def forward(self, value: Any) -> Any:
        if self._on_begin is not None:
            self._on_begin()
        return super().forward(value)


def _calling(on_begin: Callable[[int], None], place: int) -> Callable[[], None]:
    return lambda: on_begin(place)


# The check needs the memory of this many copies of the parameters: values, gradients of the whole model and
# of the cut model, gradients that are being computed, and activations.
_NUM_COPIES = 8
# Compute capabilities of GPUs whose float64 is half as fast as their float32: P100, V100, A100, H100, B200.
# On other GPUs float64 is 32 or 64 times slower.
_WITH_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
_WIDER = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_WIDER_COMPLEX = {torch.complex64: torch.complex128}


class NotInFloat64Error(Exception):
    """The model does not compute in float64."""


class PrecisionSeen(TorchDispatchMode):
    """Records the coarsest floating-point dtype that is computed inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarsest = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_of(output):
            if tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > torch.finfo(self.coarsest).eps:
                self.coarsest = tensor.dtype
        return output


def fits_in_float64(roots: Sequence[tuple[str, nn.Module]], device: torch.device) -> bool:
    """Whether the device has the memory for a check in float64, and is not many times slower in float64."""
    tensors = {id(t): t for _, root in roots for t in (*root.parameters(), *root.buffers())}
    needed_bytes = _NUM_COPIES * 8 * sum(tensor.numel() for tensor in tensors.values())
    if device.type == "cpu":
        return needed_bytes <= free_host_bytes()
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) in _WITH_FLOAT64
        and needed_bytes <= torch.cuda.mem_get_info(device)[0]
    )


def as_float64(value: Any) -> Any:
    """Returns the value with its floating-point tensors in float64 and its complex tensors in complex128."""
    return map_tensors(lambda tensor: tensor.to(_wide(tensor)), value)


@contextlib.contextmanager
def in_float64(roots: Iterable[tuple[str, nn.Module]], loss_fn: Any) -> Iterator[None]:
    """In the with block, all floating-point tensors of the modules and the loss are float64, and so is the
    default dtype. Raises NotInFloat64Error if they cannot be converted.
    """
    held = [place.tensor for place in places_of(roots)]
    held += [tensor for _, tensor in tensors_carried_by("loss_fn", loss_fn)]
    narrow = [t for t in {id(t): t for t in held}.values() if t.dtype != _wide(t)]
    default = torch.get_default_dtype()
    before: list[tuple[Tensor, Tensor]] = []
    try:
        try:
            for tensor in narrow:
                content = tensor.data
                tensor.data = content.to(_wide(tensor))
                before.append((tensor, content))
        except Exception as error:  # a tensor of an unusual class, or too little memory
            raise NotInFloat64Error from error
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        for tensor, content in before:
            tensor.data = content


def _wide(tensor: Tensor) -> torch.dtype:
    table = _WIDER_COMPLEX if tensor.is_complex() else _WIDER
    return table.get(tensor.dtype, tensor.dtype)
