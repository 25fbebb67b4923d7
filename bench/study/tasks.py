"""Defines the study's tasks: a small model, its data, and a held-out loss that judges the trained model.

A task makes model and data from a seed. So runs with different schedules start from the same weights and see
the same minibatches in the same order.
"""

from __future__ import annotations

import abc
import math
import string
import sysconfig
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batches = list[tuple[Tensor, Tensor]]


class Task(abc.ABC):
    """A small model with its data."""

    name: str
    chance: float
    """The held-out loss of a model that guesses."""
    num_minibatches: int
    """Number of minibatches of a run, unless the run says otherwise."""

    @abc.abstractmethod
    def make_model(self, seed: int) -> nn.Sequential: ...

    @abc.abstractmethod
    def batches(self, seed: int, num_minibatches: int | None = None) -> Batches:
        """Returns the minibatches of one run, in order."""

    @abc.abstractmethod
    def loss(self, scores: Tensor, targets: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def judge(self, model: nn.Module) -> float:
        """Returns the held-out loss, in eval mode."""


class Digits(Task):
    """Seven convolutions with batch norm and a linear layer on scikit-learn's 1,797 real 8x8 digits."""

    name, chance = "digits", math.log(10)
    num_minibatches = 240  # about eight epochs

    _CHANNELS = (16, 16, 16, 32, 32, 32, 32)
    _POOL_AFTER = 3
    _BATCH_SIZE = 48

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # imported here, because the other tasks do not need it

        digits = load_digits()
        self._images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self._labels = torch.tensor(digits.target)
        # The same fifth is held out for every seed.
        order = torch.randperm(len(self._labels), generator=torch.Generator().manual_seed(0))
        self._held_out, self._train = order[: len(order) // 5], order[len(order) // 5 :]

    def make_model(self, seed: int) -> nn.Sequential:
        """Makes a model that maps images (batch, 1, 8, 8) to scores (batch, 10)."""
        torch.manual_seed(seed)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = 1
        for number, wider in enumerate(self._CHANNELS, start=1):
            convolution = nn.Conv2d(channels, wider, 3, padding=1, bias=False)
            block: list[nn.Module] = [convolution, nn.BatchNorm2d(wider), nn.ReLU()]
            if number == self._POOL_AFTER:
                block.append(nn.MaxPool2d(2))
            layers[f"conv{number}"] = nn.Sequential(*block)
            channels = wider
        layers["scores"] = nn.Sequential(nn.Flatten(), nn.Linear(channels * 4 * 4, 10))
        return nn.Sequential(layers)

    def batches(self, seed: int, num_minibatches: int | None = None) -> Batches:
        count = num_minibatches or self.num_minibatches
        generator = torch.Generator().manual_seed(seed)
        batches: Batches = []
        while len(batches) < count:
            order = self._train[torch.randperm(len(self._train), generator=generator)]
            whole = order[: len(order) // self._BATCH_SIZE * self._BATCH_SIZE]
            parts = torch.split(whole, self._BATCH_SIZE)
            batches += [(self._images[part], self._labels[part]) for part in parts]
        return batches[:count]

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets)

    @torch.no_grad()
    def judge(self, model: nn.Module) -> float:
        model.eval()
        return float(self.loss(model(self._images[self._held_out]), self._labels[self._held_out]))


class Characters(Task):
    """A small GPT-like model that predicts the next character of the Python standard library's source."""

    name, chance = "characters", math.log(len(string.printable))
    num_minibatches = 240

    _CONTEXT, _WIDTH, _HEADS, _BLOCKS, _BATCH_SIZE = 16, 32, 4, 6, 16
    _TEXT_LENGTH, _HELD_OUT_LENGTH = 1_000_000, 20_000

    def __init__(self) -> None:
        text = _source_text(self._TEXT_LENGTH)
        self._train = text[: -self._HELD_OUT_LENGTH].unfold(0, self._CONTEXT + 1, 1)
        # These windows share no targets.
        self._held_out = text[-self._HELD_OUT_LENGTH :].unfold(0, self._CONTEXT + 1, self._CONTEXT)

    def make_model(self, seed: int) -> nn.Sequential:
        """Makes a model that maps characters (batch, context) to scores (batch, context, characters)."""
        torch.manual_seed(seed)
        layers: OrderedDict[str, nn.Module] = OrderedDict(embed=_Embed(self._CONTEXT, self._WIDTH))
        for number in range(1, self._BLOCKS + 1):
            layers[f"block{number}"] = _Block(self._WIDTH, self._HEADS)
        layers["head"] = nn.Sequential(
            nn.LayerNorm(self._WIDTH), nn.Linear(self._WIDTH, len(string.printable))
        )
        return nn.Sequential(layers)

    def batches(self, seed: int, num_minibatches: int | None = None) -> Batches:
        count = num_minibatches or self.num_minibatches
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self._train), (count, self._BATCH_SIZE), generator=generator)
        return [(self._train[row, :-1], self._train[row, 1:]) for row in starts]

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def judge(self, model: nn.Module) -> float:
        model.eval()
        return float(self.loss(model(self._held_out[:, :-1]), self._held_out[:, 1:]))


class DeepCharacters(Characters):
    """The task of Characters with more blocks and with minibatches of 64 samples instead of 16."""

    _BATCH_SIZE = 64

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.name = f"characters, {num_layers} layers"
        self._BLOCKS = num_layers - 2


class _Embed(nn.Module):
    """Embeds characters and their positions. Maps (batch, context) to (batch, context, width)."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(len(string.printable), width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, characters: Tensor) -> Tensor:
        vectors: Tensor = self.character(characters)
        return vectors + self.position


class _Block(nn.Module):
    """A block of GPT-2: causal self-attention and an MLP, each with a norm before it and a residual
    connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self._heads, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        # The attention is written out, because torch's fused attention cannot compute a stack of models
        # (vmap).
        scores = (query / math.sqrt(query.shape[-1])) @ key.mT
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        changed: Tensor = self.mlp(self.mlp_norm(x))
        return x + changed


def _source_text(length: int) -> Tensor:
    """Returns the source of the standard library's modules, in order of their names, cut at `length`. Each
    character is given by its position in string.printable. Characters that are not there count as "?".
    """
    code = {character: position for position, character in enumerate(string.printable)}
    codes: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(codes) < length:
            codes += [code.get(character, code["?"]) for character in path.read_text("utf-8", "replace")]
    return torch.tensor(codes[:length])
