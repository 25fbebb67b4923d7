"""Models of transformers and torchvision, made from configurations: cut at all places at once they compute
what they do whole. Skipped where the libraries are not installed; twins.py has the patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pipedream.model.batches import own_loss, parts_of
from pipedream.model.cut_model import cut_model
from pipedream.model.split_check import check_cuts
from torch import nn
from twins import cross_entropy

_VOCABULARY = 50
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_GROUPED = _SMALL | {"num_key_value_heads": 1}


def _check(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], torch.Tensor]) -> list[str]:
    """The layers."""
    inputs, targets = parts_of(batch, 0)
    cut = cut_model(model.train(), inputs, targets, loss_fn)
    check_cuts(cut, inputs, targets, loss_fn)
    return cut.layer_names


def _text() -> dict[str, torch.Tensor]:
    tokens = torch.randint(_VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    # The published torchvision, which transformers imports where it is, is built for another torch than the
    # CPU's: it asks for operators of its own.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield
    del library


@pytest.mark.parametrize(
    ("kind", "config", "options", "ends"),
    [
        ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2}, "transformer.h.1"),
        ("BertForMaskedLM", "BertConfig", _SMALL, "bert.encoder.layer.0"),
        ("LlamaForCausalLM", "LlamaConfig", _GROUPED, "model.layers.0"),
        ("MixtralForCausalLM", "MixtralConfig", _GROUPED | {"num_local_experts": 2}, "model.layers.0"),
        ("AlbertForMaskedLM", "AlbertConfig", _SMALL | {"embedding_size": 8}, "albert.embeddings"),
    ],
)
def test_language_models(kind: str, config: str, options: dict[str, int], ends: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    settings = getattr(transformers, config)(
        vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=1, **options
    )
    layers = _check(getattr(transformers, kind)(settings), _text(), own_loss)
    assert ends in layers


def test_a_vision_transformer() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    settings = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **_SMALL)
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
    assert len(_check(transformers.ViTForImageClassification(settings), batch, own_loss)) > 10


@pytest.mark.parametrize(
    ("name", "size", "num_layers"),
    [("resnet18", 32, 60), ("mobilenet_v3_small", 32, 156), ("vgg11_bn", 32, 37), ("convnext_tiny", 32, 137)],
)
def test_image_classifiers(name: str, size: int, num_layers: int) -> None:
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(torchvision.models, name)(num_classes=4)
        batch = (torch.randn(2, 3, size, size), torch.tensor([1, 3]))
    assert len(_check(model, batch, cross_entropy)) == num_layers
