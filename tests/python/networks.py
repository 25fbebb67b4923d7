"""Small networks of transformers, torchvision, timm and peft with random weights, and a UNet.

Worker processes import this module. The libraries are imported only when a network is made.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pipedream.model.batches import own_loss
from torch import Tensor, nn

__all__ = ["NETWORKS", "Made", "Network", "UNet", "bart_with_layer_drop", "needed"]

_VOCABULARY = 50
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_GROUPED = _SMALL | {"num_key_value_heads": 1}
_TOKENS = {"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_CODERS = {
    f"{coder}_{name}": value
    for coder in ("encoder", "decoder")
    for name, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 32}.items()
} | {"d_model": 16, "decoder_start_token_id": 0}


@dataclass(frozen=True)
class Made:
    """A model, a minibatch for it, and its loss."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Network:
    library: str
    """The library that the network needs; empty if none."""
    make: Callable[[bool], Made]
    """Makes the network. Its argument says whether the network has dropout."""

    def seeded(self, *, draws: bool) -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make(draws)


def needed(name: str) -> Network:
    """Returns the network. Skips the test if its library is not installed."""
    network = NETWORKS[name]
    if network.library and importlib.util.find_spec(network.library) is None:
        pytest.skip(f"{network.library} is not installed")
    return network


def make_torchvision_importable() -> bool:
    """Makes sure that libraries can import torchvision, even one that was compiled for another torch.

    Returns whether torchvision can be imported without help. Otherwise workers can import it only if they
    import tests.
    """
    examples = str(Path(__file__).resolve().parents[2] / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    return not importlib.import_module("torchvision_import").DECLARED


def _library(name: str) -> Any:
    make_torchvision_importable()
    return importlib.import_module(name)


# Networks of transformers.


def _without_draws(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name.endswith("_config") and hasattr(value, "to_dict"):
            _without_draws(value)


def _of_transformers(
    kind: str, config: str, make_batch: Callable[[], Any], options: dict[str, Any], draws: bool
) -> Made:
    library = _library("transformers")
    settings = getattr(library, config)(**options)
    if not draws:
        _without_draws(settings)
    return Made(getattr(library, kind)(settings), make_batch(), own_loss)


def _hugging_face(kind: str, config: str, make_batch: Callable[[], Any], **options: Any) -> Network:
    return Network("transformers", functools.partial(_of_transformers, kind, config, make_batch, options))


def _text() -> dict[str, Tensor]:
    tokens = torch.randint(3, _VOCABULARY, (3, 7))
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}


def _pairs() -> dict[str, Any]:
    text = _text()
    del text["labels"]
    return text | {"pixel_values": torch.randn(3, 3, 16, 16), "return_loss": True}


def _sounds() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, _VOCABULARY, (2, 6))}


def _language_model(kind: str, config: str, **options: Any) -> Network:
    return _hugging_face(kind, config, _text, **_TOKENS, **options)


def _adapted(*, tied: bool = False, **how: Any) -> Network:
    """Returns a llama whose only trained parameters are peft's adapters."""
    options = _TOKENS | _GROUPED | {"tie_word_embeddings": tied}

    def make(draws: bool) -> Made:
        made = _of_transformers("LlamaForCausalLM", "LlamaConfig", _text, options, draws)
        peft = _library("peft")
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=2,
            init_lora_weights=False,  # with peft's initial weights half of the gradients would be zero
            lora_dropout=0.1 * draws,
            **{"target_modules": ["q_proj", "v_proj", "down_proj"]} | how,
        )
        return Made(peft.get_peft_model(made.model, config), made.batch, own_loss)

    return Network("peft", make)


def bart_with_layer_drop() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Returns a model with LayerDrop, and minibatches. Each minibatch leaves out the same layers in every
    process, because the forward seeds the generator by its inputs."""
    library = _library("transformers")
    depth = {"encoder_layers": 3, "decoder_layers": 3, "encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3}
    config = library.BartConfig(**_TOKENS | _CODERS | depth)
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        setattr(config, name, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = library.BartForConditionalGeneration(config).double().train()
        data = [_text() for _ in range(8)]
    model.model.encoder.register_forward_pre_hook(_seed_by_inputs, with_kwargs=True)
    model.model.decoder.register_forward_pre_hook(_seed_by_inputs, with_kwargs=True)
    return model, data


def _seed_by_inputs(module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
    torch.manual_seed(int(keywords["input_ids"].sum()))


# Networks of torchvision.


def _cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Returns the loss of the scores. Some models also return auxiliary scores in training, which are
    added.
    """
    if isinstance(outputs, tuple):
        parts = [_cross_entropy(scores, targets) for scores in outputs if scores is not None]
        return parts[0] + 0.4 * sum(parts[1:], torch.zeros(()))
    return nn.functional.cross_entropy(outputs, targets)


def _of_torchvision(make: Callable[[Any], nn.Module], size: int, draws: bool) -> Made:
    model = make(_library("torchvision").models)
    if not draws:
        for module in model.modules():
            if "Dropout" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
                module.p = 0.0
    return Made(model, (torch.randn(2, 3, size, size), torch.tensor([1, 3])), _cross_entropy)


def _vision(make: Callable[[Any], nn.Module], size: int = 32) -> Network:
    return Network("torchvision", functools.partial(_of_torchvision, make, size))


def _named(name: str, size: int = 32, **options: Any) -> Network:
    return _vision(lambda models: models.get_model(name, weights=None, num_classes=4, **options), size)


def _inception(models: Any) -> nn.Module:
    model: Any = models.inception_v3(num_classes=4, aux_logits=True, init_weights=False)
    # Fits images of fewer than 299 pixels.
    model.AuxLogits.conv1 = type(model.AuxLogits.conv1)(128, 768, kernel_size=1)
    made: nn.Module = model
    return made


def _convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    blocks = [block(8, 16, 1), block(16, None, 1)]
    made: nn.Module = models.ConvNeXt(blocks, num_classes=4, stochastic_depth_prob=0.1)
    return made


class UNet(nn.Module):
    """A UNet. The way up reads each level again, so a cut carries all levels that are still to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, 4), _block(4, 8), _block(8, 16)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.merge = nn.ModuleList([_block(16, 8), _block(8, 4)])
        self.scores = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels: list[Tensor] = []
        for block in self.down:
            levels.append(block(nn.functional.max_pool2d(levels[-1], 2) if levels else x))
        x = levels.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), levels.pop()], 1))
        scores: Tensor = self.scores(x)
        return scores


def _block(channels: int, wider: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(inplace=True)
    )


def _mixer(draws: bool) -> Made:
    model = _library("timm.models.mlp_mixer").MlpMixer(
        num_classes=4, img_size=16, patch_size=8, num_blocks=2, embed_dim=16, drop_path_rate=0.2 * draws
    )
    return Made(model, _labelled_images(), _cross_entropy)


def _labelled_images() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3, 16, 16), torch.randint(4, (3,))


def _unet(draws: bool) -> Made:
    return Made(UNet(), (torch.randn(2, 3, 16, 16), torch.randint(4, (2, 16, 16))), _cross_entropy)


NETWORKS: dict[str, Network] = {
    "gpt2": _language_model("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2),
    "llama": _language_model("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "lora": _adapted(),
    "dora": _adapted(use_dora=True),
    "lora_tied": _adapted(tied=True, target_modules=["q_proj", "embed_tokens"]),
    "lora_saved": _adapted(modules_to_save=["lm_head"]),
    "bert": _language_model("BertForMaskedLM", "BertConfig", **_SMALL),
    "albert": _language_model("AlbertForMaskedLM", "AlbertConfig", embedding_size=8, **_SMALL),
    "mixtral": _language_model("MixtralForCausalLM", "MixtralConfig", num_local_experts=2, **_GROUPED),
    "mixtral_routed": _language_model(
        "MixtralForCausalLM",
        "MixtralConfig",
        num_local_experts=2,
        output_router_logits=True,
        router_aux_loss_coef=1.0,
        **_GROUPED,
    ),
    "t5": _hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        _text,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        vocab_size=_VOCABULARY,
        decoder_start_token_id=0,
    ),
    "bart": _language_model(
        "BartForConditionalGeneration", "BartConfig", max_position_embeddings=16, **_CODERS
    ),
    "whisper": _hugging_face(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _sounds,
        **{"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16, **_TOKENS, **_CODERS},
    ),
    "clip": _hugging_face(
        "CLIPModel",
        "CLIPConfig",
        _pairs,
        text_config=_SMALL | _TOKENS | {"max_position_embeddings": 16},
        vision_config=_SMALL | {"image_size": 16, "patch_size": 8},
        projection_dim=8,
    ),
    "vit": _hugging_face(
        "ViTForImageClassification",
        "ViTConfig",
        _pictures,
        **{"image_size": 16, "patch_size": 8, "num_labels": 3, **_SMALL},
    ),
    "resnet18": _named("resnet18"),
    "densenet": _vision(lambda models: models.DenseNet(4, (2, 2, 2), 8, num_classes=4)),
    "inception": _vision(_inception, 128),
    "googlenet": _named("googlenet", 64, aux_logits=True, init_weights=False),
    "mobilenet": _named("mobilenet_v3_small"),
    "convnext": _vision(_convnext),
    "swin": _vision(lambda models: models.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [2, 2], num_classes=4)),
    "vision_transformer": _vision(lambda m: m.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=4), 16),
    "vgg": _named("vgg11_bn"),
    "unet": Network("", _unet),
    # Nobody looked at these networks when cutting was developed.
    "gpt_neox": _language_model("GPTNeoXForCausalLM", "GPTNeoXConfig", max_position_embeddings=16, **_SMALL),
    "mixer": Network("timm", _mixer),
}
