"""Cuts networks of transformers and torchvision, with dropout, at all places at once. They must compute the
same as without cuts. The tests are skipped if the libraries are not installed. twins.py has models with
the same difficulties.
"""

from __future__ import annotations

import pytest
from networks import NETWORKS, needed
from pipedream.model.batches import parts_of
from pipedream.splitting.cut_model import CutModel, cut_model
from pipedream.splitting.split_check import check_cuts

# These are places at which a cut must be possible: the ends of blocks, where a user would cut.
_ENDS = {
    "gpt2": "transformer.h.0",
    "llama": "model.layers.0",
    "bert": "bert.encoder.layer.0",
    "albert": "albert.embeddings",
    "mixtral": "model.layers.0",
    "mixtral_routed": "model.layers.1",
    "t5": "decoder.block.0",
    "bart": "model.decoder.layers.0",
    "whisper": "model.decoder.layers.0",
    "clip": "text_model.encoder.layers.0",
    "vit": "vit.layers.0",
    "resnet18": "layer2",
    "densenet": "features.transition1",
    "inception": "Mixed_6a",
    "googlenet": "inception4a",
    "mobilenet": "features.5",
    "convnext": "features.1",
    "swin": "features.1",
    "vision_transformer": "encoder.layers.encoder_layer_0",
    "vgg": "features.4",
    "unet": "down.1",
    "gpt_neox": "gpt_neox.layers.0",
    "mixer": "blocks.0",
    **dict.fromkeys(["lora", "dora", "lora_tied", "lora_saved"], "base_model.model.model.layers.0"),
}


def _cut(name: str) -> CutModel:
    made = needed(name).seeded(draws=True)
    inputs, targets = parts_of(made.batch, 0)
    cut = cut_model(made.model.train(), inputs, targets, made.loss_fn)
    assert check_cuts(cut, [(inputs, targets)], made.loss_fn) == {}
    return cut


@pytest.mark.parametrize("name", NETWORKS)
def test_cut_everywhere_a_network_computes_what_it_does_whole(name: str) -> None:
    cut = _cut(name)
    assert _ENDS[name] in [end for place in cut.offered for end in place.calls]


@pytest.mark.parametrize("name", ["gpt2", "mixtral_routed", "t5", "vit", "unet", "mixer"])
def test_cut_in_any_one_place_a_small_network_computes_what_it_does_whole(name: str) -> None:
    made = needed(name).seeded(draws=True)
    inputs, targets = parts_of(made.batch, 0)
    cut = cut_model(made.model.train(), inputs, targets, made.loss_fn)
    for place in cut.offered:
        assert check_cuts(cut.at([place.name]), [(inputs, targets)], made.loss_fn) == {}, place.name


@pytest.mark.parametrize(("name", "num_layers"), [("resnet18", 60), ("mobilenet", 156), ("vgg", 37)])
def test_it_is_cut_after_every_module(name: str, num_layers: int) -> None:
    assert len(_cut(name).layer_names) == num_layers
