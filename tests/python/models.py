"""Small deterministic models with data and loss, for tests that compare two ways of training.

All of them are lists of layers; twins.py has modules with a forward of their own. Worker processes import
this module, so every class and loss is a module-level name. Each case says where its model is cut into 1 to 4
stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pipedream.planning.plan import Plan, Stage
from torch import nn

WIDTH = 8
VOCABULARY = 13
SEQUENCE = 5
CLASSES = 4
BATCH = 6

Batch = tuple[Any, Any]


class Block(nn.Module):
    """Pre-norm attention and MLP. Input and output have the shape (batch, sequence, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        x = x + self.projection(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        mlp: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return mlp


class TiedHead(nn.Module):
    """An output layer that shares its weight with an embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class TokenConv(nn.Module):
    """A convolution along the sequence. Input and output have the shape (batch, sequence, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        convolved: torch.Tensor = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return convolved


class Pack(nn.Module):
    """Packs an LSTM's (outputs, (h, c)) into a nested dict, which has one tensor twice and a number."""

    def forward(self, value: Any) -> dict[str, Any]:
        outputs, (hidden, cell) = value
        return {"outputs": outputs, "state": (hidden, cell), "skip": [outputs], "scale": 0.5}


class PackedLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        outputs, _ = self.lstm(value["outputs"], value["state"])
        total: torch.Tensor = outputs + value["scale"] * value["skip"][0]
        return total[:, -1]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * WIDTH * WIDTH, CLASSES),
    )


def _wide() -> nn.Sequential:
    return nn.Sequential(
        nn.Upsample(scale_factor=4),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16 * 16 * WIDTH * WIDTH, CLASSES),
    )


def _connected() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * WIDTH * WIDTH, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, 64),
        nn.Tanh(),
        nn.Linear(64, CLASSES),
    )


class UsedTwice(nn.Module):
    """Calls one fully connected layer twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(self.layer(x).tanh())
        return output


def _words() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 128),
        UsedTwice(128),
        nn.Linear(128, 192),
        nn.Tanh(),
        nn.Linear(192, VOCABULARY),
    )


def _transformer() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        Block(),
        Block(),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
    )


def _tied() -> nn.Sequential:
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    return nn.Sequential(
        embedding,
        nn.LayerNorm(WIDTH),
        TiedHead(embedding),
        nn.Linear(VOCABULARY, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, VOCABULARY),
    )


def _tied_apart() -> nn.Sequential:
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    return nn.Sequential(
        embedding, TokenConv(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), TiedHead(embedding)
    )


def _lstm() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.LSTM(WIDTH, WIDTH, batch_first=True),
        Pack(),
        PackedLstm(),
        nn.Linear(WIDTH, VOCABULARY),
    )


def _dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.Dropout(0.3),
        nn.ReLU(inplace=True),
        nn.Linear(16, 16),
        nn.Dropout(0.3, inplace=True),
        nn.Linear(16, CLASSES),
    )


def _frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, CLASSES))
    model[0].requires_grad_(False)
    return model


def _vectors(generator: torch.Generator, dtype: torch.dtype, batch_size: int) -> Batch:
    return _normal(generator, dtype, batch_size, WIDTH), _normal(generator, dtype, batch_size, CLASSES)


def _images(generator: torch.Generator, dtype: torch.dtype, batch_size: int) -> Batch:
    targets = torch.randint(CLASSES, (batch_size,), generator=generator)
    return _normal(generator, dtype, batch_size, 1, WIDTH, WIDTH), targets


def _texts(generator: torch.Generator, dtype: torch.dtype, batch_size: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (batch_size, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _next_words(generator: torch.Generator, dtype: torch.dtype, batch_size: int) -> Batch:
    inputs, targets = _texts(generator, dtype, batch_size)
    return inputs, targets[:, -1].contiguous()


def _normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Case:
    """One model with its data and loss. `cuts[S]` lists the first layers of all stages but stage 0 if there
    are S stages.
    """

    name: str
    make_model: Callable[[], nn.Sequential]
    make_batch: Callable[[torch.Generator, torch.dtype, int], Batch]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    cuts: dict[int, tuple[int, ...]]
    draws: bool = False
    """Whether the forward draws random numbers."""

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Sequential:
        """Makes the model, with the same weights at every call. Does not change the global generator."""
        with torch.random.fork_rng(devices=[]):
            # Does what torch.manual_seed does on the CPU. torch.manual_seed also looks for devices, which
            # takes longer than making the model.
            torch.default_generator.manual_seed(2024)
            return self.make_model().to(dtype)

    def data(
        self, num_minibatches: int, dtype: torch.dtype = torch.float64, *, short_last: bool = False
    ) -> list[Batch]:
        """Returns the same minibatches at every call. With short_last the last one has half the size."""
        generator = torch.Generator().manual_seed(7)
        sizes = [BATCH] * num_minibatches
        if short_last:
            sizes[-1] = BATCH // 2
        return [self.make_batch(generator, dtype, size) for size in sizes]

    def plan(self, num_stages: int) -> Plan:
        return straight_plan(self.num_layers, self.cuts[num_stages])

    @functools.cached_property
    def num_layers(self) -> int:
        return len(self.model())


def straight_plan(num_layers: int, cuts: tuple[int, ...]) -> Plan:
    """Returns a plan without replicas. Its stages start at layer 0 and at the cuts."""
    starts = (0, *cuts)
    ends = (*cuts, num_layers)
    stages = tuple(Stage(start, end - 1) for start, end in zip(starts, ends, strict=True))
    return Plan(stages, in_flight=tuple(range(len(stages), 0, -1)))


CASES = {
    case.name: case
    for case in (
        Case("mlp", _mlp, _vectors, squared_error, {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 4)}),
        # After each cut but one the stage begins with an in-place ReLU.
        Case("cnn", _cnn, _images, cross_entropy, {1: (), 2: (5,), 3: (2, 5), 4: (2, 3, 5)}),
        Case("transformer", _transformer, _texts, cross_entropy, {1: (), 2: (2,), 3: (1, 2), 4: (1, 2, 3)}),
        # The embedding and its head are always in one stage.
        Case("tied", _tied, _texts, cross_entropy, {1: (), 2: (3,), 3: (3, 4), 4: (3, 4, 5)}),
        # The embedding is in the first stage and its head in the last one. With 4 stages the last stage has
        # only the head.
        Case("tied_apart", _tied_apart, _texts, cross_entropy, {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 4)}),
        Case("lstm", _lstm, _next_words, cross_entropy, {1: (), 2: (3,), 3: (2, 3), 4: (1, 2, 3)}),
        Case("dropout", _dropout, _vectors, squared_error, {1: (), 2: (3,), 3: (2, 4), 4: (1, 2, 4)}, True),
        # The first stage has nothing to train, and no gradient crosses the first cut.
        Case("frozen", _frozen, _vectors, squared_error, {1: (), 2: (1,), 3: (1, 2), 4: (1, 2, 3)}),
    )
}

LARGE_CASES = {
    case.name: case
    for case in (
        # Few parameters and large activations: 98,304 elements, enough to use shared memory with every codec.
        Case("wide", _wide, _images, cross_entropy, {1: (), 2: (4,), 3: (2, 4)}),
        # Has large fully connected layers. The factors of the last layer are larger than its gradient.
        Case("connected", _connected, _images, cross_entropy, {1: (), 2: (4,)}),
        Case("words", _words, _texts, cross_entropy, {1: (), 2: (2,)}),
    )
}
