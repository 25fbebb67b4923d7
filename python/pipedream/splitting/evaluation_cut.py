"""Cuts a model's forward in eval mode, for validation data. The cuts are at the same calls as in training.

A list of layers is cut between layers in both modes. Any other module is traced again in eval mode, with the
first validation minibatch. In eval mode other values may cross than in training, for example if an auxiliary
head is left out. Stateless.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.model.batches import call_model
from pipedream.model.initial_weights import WeightSource
from pipedream.model.layers import Model
from pipedream.model.stage_module import StageModule
from pipedream.planning.plan import Plan
from pipedream.splitting.cut_model import CutModel, cut_model
from pipedream.splitting.cuts import Cuts
from pipedream.splitting.span import SpanStage

__all__ = ["EvaluationCut", "cut_for_evaluation", "evaluation_stages", "in_eval_mode"]

Forward = Callable[[Any, Any], Any]
"""(model, inputs) -> outputs."""


@dataclass(frozen=True)
class EvaluationCut:
    """The cuts of an eval-mode forward. The module is not in it, because it is sent separately."""

    cuts: Cuts
    names: tuple[str, ...]
    """The calls after which the forward is cut."""

    def of(self, module: nn.Module, forward: Forward | None) -> CutModel:
        return CutModel(module, self.cuts, call=forward or call_model).at(self.names)


@contextlib.contextmanager
def in_eval_mode(roots: Iterable[nn.Module]) -> Iterator[None]:
    """In the with block, all modules are in eval mode. Afterwards each has its former mode. Torch's fused
    kernel for encoder layers is off, because it does not call the layer's inner modules, at which the forward
    may be cut.
    """
    takes_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    modules = [module for root in roots for module in root.modules()]
    were_training = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(takes_fused)
        for module, was_training in zip(modules, were_training, strict=True):
            module.training = was_training


def cut_for_evaluation(
    model: CutModel,
    plan: Plan,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    forward: Forward | None,
    *,
    autocast: torch.dtype | None = None,
    weights: WeightSource = None,
) -> EvaluationCut:
    """Traces the model in eval mode and cuts it at the calls at which its training is cut.

    model: the model, already cut for training. inputs, targets: the first validation minibatch. Raises
    ValueError if the eval-mode forward cannot be cut at one of these calls, or if a stage would read
    parameters that another stage trains.
    """
    trained = model if plan.cuts is None else model.at(plan.cuts)
    names = tuple(trained.offered[stage.last_layer].name for stage in plan.stages[:-1])
    with in_eval_mode([model.module]):
        found = cut_model(
            model.module,
            inputs,
            targets,
            loss_fn,
            autocast=autocast,
            weights=weights,
            call=forward or call_model,
            needs_outputs=True,
        )
    try:
        evaluated = found.at(names)
    except ValueError as error:
        raise ValueError(f"validation: in eval mode {error}; choose other cuts") from None
    for index, stage in enumerate(plan.stages):
        of_training = trained.stage(index, stage.first_layer, stage.last_layer)
        _check_reads(evaluated.stage(index, index, index), of_training)
    return EvaluationCut(found.cuts, names)


def _check_reads(evaluated: SpanStage, trained: SpanStage) -> None:
    foreign = sorted(evaluated.state.read - trained.held_names())
    if foreign:
        raise ValueError(
            f"validation: in eval mode stage {trained.stage_index} reads {foreign[0]!r}, which another stage"
            " trains: choose other cuts"
        )


def evaluation_stages(
    model: Model, trained: Sequence[StageModule], cut: EvaluationCut | None, forward: Forward | None
) -> list[StageModule]:
    """Returns the stages that run on validation data, in the order of the trained stages. cut: None for a
    list of layers, and for a single stage.
    """
    if cut is None:
        if forward is None:
            return list(trained)
        return [_WholeModel(stage, forward) for stage in trained]
    assert isinstance(model, CutModel)
    cut_in_eval = cut.of(model.module, forward)
    return [cut_in_eval.stage(index, index, index) for index in range(len(trained))]


class _WholeModel(StageModule):
    """A model's only stage, which runs a forward that the user gave."""

    def __init__(self, stage: StageModule, forward: Forward) -> None:
        (root,) = stage.roots()
        super().__init__(stage.stage_index, stage.first_layer, [(stage.layer_names[0], *root)])
        self._forward = forward

    def forward(self, value: Any) -> Any:
        return self._forward(self.layers[0], value)
