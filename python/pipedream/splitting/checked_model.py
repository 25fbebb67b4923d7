"""CheckedModel runs a model whole, and in stages that end at some of its places, for the check of cuts. Owned
by the thread that profiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from pipedream.model.batches import call_model
from pipedream.model.calls import calls_seen, module_names, visible_modules
from pipedream.model.draws import DrawSites
from pipedream.model.layers import Model, named_layers, roots_of
from pipedream.model.stage_module import StageModule
from pipedream.model.trace import CallCounter
from pipedream.splitting.crossing import Fillers
from pipedream.splitting.cut_model import CutModel

__all__ = ["CheckedModel", "checked_model"]


class CheckedModel(Protocol):
    roots: list[tuple[str, nn.Module]]
    """(prefix of full names, module)."""
    place_names: list[str]
    """Names of the layers after which it may be cut."""
    draws: DrawSites
    """Places at which it draws; none for a list of layers, which draws from the generators as they are."""

    def run(self, inputs: Any, at_place: Callable[[int], None]) -> Any:
        """The whole model's output. at_place: called where a layer before the last one has ended."""

    def stages(self, ends: Sequence[int], on_begin: Callable[[int], None]) -> list[StageModule]:
        """Stages that end at these places, and at the model's end. on_begin: called with the place where a
        stage's own part begins."""


def checked_model(model: Model) -> CheckedModel:
    return _Module(model) if isinstance(model, CutModel) else _List(model)


class _Module:
    """Cut along its own forward."""

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
