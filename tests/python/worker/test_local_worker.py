"""Tests local_worker.py: a model that was sent has what its constructor registered."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from typing import Any, ClassVar

import pytest
import torch
from networks import needed
from pipedream.model.batches import call_model, parts_of
from pipedream.model.layers import Model
from pipedream.splitting.cut_model import cut_model
from pipedream.worker.local_worker import register_classes
from torch import nn
from torch.nn import functional as F


class _Routed(nn.Module):
    _can_record_outputs: ClassVar[dict[str, Any]] = {"router_logits": nn.Linear}

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.router(inputs))
        return result


def _models() -> dict[str, Model]:
    inputs = torch.randn(3, 2)
    return {
        "in a module": nn.Sequential(nn.Linear(2, 2), _Routed()),
        "in a list of layers": [nn.Linear(2, 2), _Routed()],
        "cut": cut_model(_Routed(), inputs, inputs, F.mse_loss),
    }


class _ByModule(dict[str, Any]):
    """Imitates the registry of transformers 5, whose keys are modules."""

    def __setitem__(self, module: Any, outputs: Any) -> None:
        super().__setitem__(str(module.__class__), outputs)


@pytest.mark.parametrize("module_name", ["output_capturing", "generic"])
@pytest.mark.parametrize("kind", [dict, _ByModule], ids=["by text", "by module"])
@pytest.mark.parametrize("model", _models())
def test_what_constructors_register_of_each_inner_model_is_registered(
    monkeypatch: pytest.MonkeyPatch, module_name: str, kind: type[dict[str, Any]], model: str
) -> None:
    registry = kind()
    for name in ("output_capturing", "generic"):
        library = types.SimpleNamespace(_CAN_RECORD_REGISTRY=registry) if name == module_name else None
        monkeypatch.setitem(sys.modules, f"transformers.utils.{name}", library)
    register_classes(_models()[model])
    assert registry == {str(_Routed): {"router_logits": nn.Linear}}


def test_a_network_that_was_sent_collects_the_outputs_that_it_did() -> None:
    made = needed("mixtral_routed").seeded(draws=False)
    inputs, targets = parts_of(made.batch, 0)
    sent = pickle.dumps(made.model)
    loss = made.loss_fn(call_model(copy.deepcopy(made.model), inputs), targets)

    registry = sys.modules["transformers.utils.output_capturing"]._CAN_RECORD_REGISTRY
    registered = dict(registry)
    registry.clear()
    try:
        received = pickle.loads(sent)
        register_classes(received)
        assert torch.equal(made.loss_fn(call_model(received, inputs), targets), loss)
    finally:
        registry.update(registered)
