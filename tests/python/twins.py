"""Small imitations (twins) of models that users bring: modules with a forward of their own, not lists of
layers.

Worker processes import this module, so every class is a module-level name. Docstrings name the model that is
imitated, or the habit of users' code that makes a model hard to cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pipedream.model.batches import own_loss
from torch import Tensor, nn

WIDTH = 8
VOCABULARY = 13
CLASSES = 5
CHANNELS = 4

Batch = tuple[Any, Any]


class ResidualBlock(nn.Module):
    """A block of ResNet. It adds its input to its output in place, as torchvision's does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(CHANNELS)
        self.relu = nn.ReLU(inplace=True)  # each forward calls it twice
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        result: Tensor = self.relu(out)
        return result


class Residual(nn.Module):
    """Imitates ResNet: skips inside blocks, batch norm, and functions between modules, one of them in
    place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.Sequential(ResidualBlock(), ResidualBlock())
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        out: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return out


class UNet(nn.Module):
    """Imitates UNet: every level of the way down has a skip to the same level of the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.down2 = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.up2 = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1)
        self.up1 = nn.Conv2d(2 * CHANNELS, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.down1(x))
        second = torch.tanh(self.down2(first))
        lowest = torch.tanh(self.bottom(second))
        middle = torch.tanh(self.up2(torch.cat((lowest, second), 1)))
        wide = F.interpolate(middle, size=first.shape[2:])
        out: Tensor = self.up1(torch.cat((wide, first), 1))
        return out.mean((2, 3))


class Attention(nn.Module):
    """Attention that takes a mask and returns (output, weights), as Hugging Face's does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self.qkv(x).split(WIDTH, dim=-1)
        scores = query @ key.transpose(-1, -2) + mask
        weights = scores.softmax(-1)
        return self.projection(weights @ value), weights


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        attended, weights = self.attention(self.norm1(x), mask)
        x = x + attended
        return x + self.mlp(self.norm2(x)), weights


class Transformer(nn.Module):
    """Imitates GPT-2. The forward makes positions and a mask from the shape of its input. The head is tied to
    the embedding, and blocks return tuples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("causal", torch.full((16, 16), -torch.inf).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        embedded = self.words(tokens)
        x = embedded + self.positions(torch.arange(length, device=tokens.device))
        mask = self.causal[:length, : embedded.shape[1]]
        for block in self.blocks:
            x, _ = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class MaskedTransformer(Transformer):
    """Imitates a Hugging Face model. It is called with keyword arguments, masks padding, and returns an
    object with the loss.
    """

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Output:
        length = input_ids.shape[1]
        embedded = self.words(input_ids)
        x = embedded + self.positions(torch.arange(length, device=input_ids.device))
        mask = self.causal[:length, : embedded.shape[1]][None]
        if attention_mask is not None:
            hidden = (attention_mask == 0)[:, None, :] & ~torch.eye(length, dtype=torch.bool)
            mask = mask.masked_fill(hidden, -torch.inf)
        for block in self.blocks:
            x, _ = block(x, mask)
        logits = self.head(self.norm(x))
        loss = None if labels is None else cross_entropy(logits, labels)
        return Output(logits, loss)


class Pair(nn.Module):
    """A layer that returns a tuple with a dict, which has a tensor, a number and a text."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return self.left(x), {"right": torch.tanh(self.right(x)), "size": x.shape[0], "kind": "pair"}


class Tuples(nn.Module):
    """Has modules that return several values. One value is used much later. Others are a plain number and a
    text, which the forward reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = Pair()
        self.second = Pair()
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        left, more = self.first(x)
        again, other = self.second(left * more["size"])
        assert other["kind"] == "pair"
        assert other["size"] == x.shape[0] == more["size"]
        out: Tensor = self.last(again + more["right"])
        return out


class HandingOn(nn.Module):
    """A model with nn.Identity modules, and with a parameter of its own. Code outside an Identity also reads
    its input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.same = nn.Identity()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x) + self.shift
        x = torch.tanh(self.second(self.same(kept)))
        out: Tensor = self.last(self.same(x) + kept)
        return out


class Noting(nn.Module):
    """A layer that also leaves a value in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.note: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.note = x.mean(-1, keepdim=True)
        return torch.tanh(self.linear(x))


class SideValue(nn.Module):
    """A model whose end reads an attribute that one of its first modules has set."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.noting = Noting()
        self.after = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(self.noting(self.before(x)))
        assert self.noting.note is not None
        out: Tensor = self.last(x + self.noting.note)
        return out


class Gate(nn.Linear):
    """A gate that returns the scores of two experts, which only its own block reads."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = super().forward(x)
        return scores, scores.softmax(-1)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        _, shares = self.gate(x)
        parts = [expert(x) * shares[:, i : i + 1] for i, expert in enumerate(self.experts)]
        return x + torch.tanh(parts[0] + parts[1])


_SCORES: ContextVar[list[Tensor] | None] = ContextVar("scores", default=None)


def _note_scores(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
    scores = _SCORES.get()
    if scores is not None:
        scores.append(output[0])


class Routed(nn.Module):
    """Imitates Mixtral. Hooks, which the first forward installs, take the gates' scores out of the blocks.
    The scores are a part of the output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.has_hooks = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_hooks:
            for block in self.blocks:
                block.gate.register_forward_hook(_note_scores)
            self.has_hooks = True
        scores: list[Tensor] = []
        token = _SCORES.set(scores)
        for block in self.blocks:
            x = block(x)
        _SCORES.reset(token)
        assert len(scores) == len(self.blocks)
        out: Tensor = self.last(x) + torch.cat(scores, -1).logsumexp(-1, keepdim=True).square()
        return out * torch.linspace(0.5, 1.5, CLASSES, dtype=out.dtype)


class Dropping(nn.Module):
    """A model with dropout, as a module and as a function between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.dropout(self.first(x)))
        kept = F.dropout(x, 0.5)
        out: Tensor = self.last(torch.tanh(self.third(kept)) + kept)
        return out


class Deciding(nn.Module):
    """A model for several tasks. Its code asks for the type of a layer, and for Python integers of the
    batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, task = inputs
        for layer in self.layers:
            x = layer(x)
            if type(layer) is nn.Linear:
                x = x * 2
        out: Tensor = self.last(x) * (1 + task.tolist()[0])
        return out


class _Reversed(torch.autograd.Function):
    """Returns its input in the same memory, and reverses the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Features(nn.Module):
    """Returns its features three times: as they are, with a reversed gradient, and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = torch.tanh(self.linear(x))
        return features, _Reversed.apply(features), features.detach()  # type: ignore[no-untyped-call]


class Adversarial(nn.Module):
    """Imitates a domain-adversarial network: gradients come back to one tensor on several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.features = Features()
        self.of_class, self.of_domain, self.of_rest = (nn.Linear(WIDTH, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features, backwards, detached = self.features(x)
        out: Tensor = self.of_class(features) + 2 * self.of_domain(backwards) + 3 * self.of_rest(detached)
        return out


class Skipping(nn.Module):
    """A model that leaves out one layer, in all forwards or in one of them."""

    def __init__(self, left_out: int = -1, in_forward: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.left_out = left_out
        self._in_forward = in_forward
        self._num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        skips = self._in_forward in (None, self._num_forwards)
        self._num_forwards += 1
        for index, layer in enumerate(self.layers):
            if not (skips and index == self.left_out):
                x = layer(x)
        out: Tensor = self.last(x)
        return out


class Viewing(nn.Module):
    """Imitates FNet with learnt filters. Code between modules views the model's own parameters in other
    shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.Parameter(torch.rand(2, WIDTH // 2))
        self.second = nn.Linear(WIDTH, WIDTH)
        self.filters = nn.Parameter(torch.rand(WIDTH // 2 + 1, 2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) * self.scales.view(WIDTH))
        filtered = torch.fft.rfft(self.second(x)) * torch.view_as_complex(self.filters)
        result: Tensor = self.head(torch.fft.irfft(filtered, n=WIDTH))
        return result


class Sharing(nn.Module):
    """Imitates ALBERT, which calls the same layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.shared(torch.tanh(x))
        out: Tensor = self.last(torch.tanh(x))
        return out


class LastChannels(nn.Conv2d):
    """A convolution whose output has the channels last in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous(memory_format=torch.channels_last)


class Strided(nn.Module):
    """A vision model in channels_last, whose result depends on the strides of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = LastChannels(3, CHANNELS, 3, padding=1)
        self.middle = LastChannels(CHANNELS, CHANNELS, 3, padding=1)
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.stem(x)))
        pixels = x.permute(0, 2, 3, 1).view(-1, CHANNELS)
        out: Tensor = self.head(pixels).view(len(x), -1, CLASSES).mean(1) * (1.0 + x.stride(1))
        return out


class Padded(nn.Module):
    """A model that gets a mask with padded minibatches, and None with others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        out: Tensor = self.last(torch.tanh(x if mask is None else x * mask))
        return out


class Truncated(nn.Module):
    """Imitates truncated backpropagation through time: the model itself keeps the hidden states of its
    cells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.lower, self.upper = nn.GRUCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.hidden: tuple[Tensor, Tensor] | None = None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        start = torch.zeros(len(tokens), WIDTH, dtype=self.head.weight.dtype)
        lower, upper = self.hidden or (start, start)
        outputs = []
        for position in range(tokens.shape[1]):
            lower = self.lower(self.words(tokens[:, position]), lower)
            upper = self.upper(lower, upper)
            outputs.append(self.head(upper))
        self.hidden = lower.detach(), upper.detach()
        return torch.stack(outputs, 1)


class Rotary(nn.Module):
    """Imitates Llama: positions and norms are in float32 whatever the dtype is, and one weight is used
    often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        positions = torch.arange(tokens.shape[1], dtype=torch.float32)[:, None]
        for _ in range(6):
            turned = self.shared(x).float() * positions.cos()
            x = (turned * turned.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype) + x
        out: Tensor = self.last(x)
        return out


class RandomlyDropped(nn.Module):
    """A model whose own code drops layers at random, and draws dropout masks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "layer": nn.Linear(WIDTH, WIDTH)}) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            assert isinstance(step, nn.ModuleDict)
            kept = x = F.dropout(step["norm"](x), 0.1, training=self.training)
            if self.training and torch.rand([]) < 0.5:
                continue
            x = step["layer"](x) + kept
        out: Tensor = self.head(x)
        return out


class LongOnes(nn.Module):
    """A model that has a skip only if a text is longer than two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, size) for size in (WIDTH, WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.second(hidden).relu()
        if x.shape[1] > 2:
            out = out + hidden
        result: Tensor = self.head(out.mean(1))
        return result


class SparseExperts(nn.Module):
    """A layer that sends each sample to one of 12 experts. It does not call an expert without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 12)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows) > 0:
                out = out.index_add(0, rows, expert(x[rows]).tanh())
        return x + out * scores.unsqueeze(-1)


class Sparse(nn.Module):
    """Imitates a Switch transformer: the first minibatch does not call every expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SparseExperts() for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


class ResidualLayer(nn.Module):
    """A residual layer with stochastic depth. For some inputs it only returns its input."""

    def __init__(self, skipped_sign: int = 0) -> None:
        """The layer is left out if the sum of its inputs has the sign skipped_sign; 0 means never."""
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.skipped_sign = skipped_sign

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) * self.skipped_sign > 0:
            return x
        return x + self.norm(self.linear(x)).tanh()


class DroppedLayers(nn.Module):
    """The encoder or the decoder of LayerDropped. Its caller says which layers a minibatch leaves out."""

    def __init__(self, is_residual: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(ResidualLayer() for _ in range(4))
        self.is_residual = is_residual

    def forward(self, x: Tensor, kept: list[bool]) -> Tensor:
        x = self.norm(x)
        for layer, is_kept in zip(self.layers, kept, strict=True):
            if is_kept:
                x = x + layer(x) if self.is_residual else layer(x)
        return x


class LayerDropped(nn.Module):
    """Imitates BART with LayerDrop: the first minibatch leaves out some layers, and later ones leave out
    others.
    """

    def __init__(self, is_residual: bool = False) -> None:
        """With is_residual, code outside a layer adds the layer's input to its output."""
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.encoder, self.decoder = DroppedLayers(is_residual), DroppedLayers(is_residual)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, kept = inputs
        encoder, decoder = kept[0].bool().tolist()
        out: Tensor = self.last(self.decoder(self.encoder(self.first(x), encoder), decoder))
        return out


class SelfSkipping(nn.Module):
    """A residual network with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ResidualLayer((-1) ** index) for index in range(6))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _images(generator: torch.Generator, dtype: torch.dtype, size: int) -> Batch:
    images = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images.to(dtype), torch.randint(CLASSES, (size,), generator=generator)


def _texts(generator: torch.Generator, dtype: torch.dtype, size: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (size, 7), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _padded_texts(generator: torch.Generator, dtype: torch.dtype, size: int) -> dict[str, Any]:
    tokens, labels = _texts(generator, dtype, size)
    lengths = torch.randint(2, tokens.shape[1] + 1, (size, 1), generator=generator)
    mask = (torch.arange(tokens.shape[1]) < lengths).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _vectors(generator: torch.Generator, dtype: torch.dtype, size: int) -> Batch:
    vectors = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    return vectors.to(dtype), torch.randint(CLASSES, (size,), generator=generator)


def _vectors_of_tasks(generator: torch.Generator, dtype: torch.dtype, size: int) -> Batch:
    vectors, targets = _vectors(generator, dtype, size)
    return (vectors, torch.randint(3, (1,), generator=generator).repeat(size)), targets


def padded_vectors(padded: Sequence[bool]) -> list[Batch]:
    """Returns one minibatch for each value. Those for True have a mask."""
    generator = torch.Generator().manual_seed(7)
    batches = [_vectors(generator, torch.float64, 4) for _ in padded]
    masks = [
        (vectors > 0).double() if is_padded else None
        for (vectors, _), is_padded in zip(batches, padded, strict=True)
    ]
    return [((x, mask), targets) for (x, targets), mask in zip(batches, masks, strict=True)]


def _vectors_with_layers(generator: torch.Generator, dtype: torch.dtype, size: int) -> Batch:
    vectors, targets = _vectors(generator, dtype, size)
    kept = torch.randint(2, (2, 4), generator=generator)
    kept[:, 2] = 1
    return (vectors, kept.expand(size, 2, 4).contiguous()), targets


@dataclass(frozen=True)
class Twin:
    name: str
    make: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator, torch.dtype, int], Any]
    draws: bool = False
    loss_fn: Callable[[Any, Any], Tensor] = cross_entropy

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Makes the model, with the same weights at every call. Does not change the global generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2024)
            return self.make().to(dtype)

    def data(self, num_minibatches: int, dtype: torch.dtype = torch.float64) -> list[Any]:
        """Returns the same minibatches at every call. The last one has half the size."""
        generator = torch.Generator().manual_seed(7)
        sizes = [6] * (num_minibatches - 1) + [3]
        return [self.make_batch(generator, dtype, size) for size in sizes]


# These twins call other layers for other minibatches.
CHANGING = {
    twin.name: twin
    for twin in (
        Twin("sparse", Sparse, _vectors),
        Twin("layer_dropped", LayerDropped, _vectors_with_layers),
        Twin("self_skipping", SelfSkipping, _vectors),
    )
}

TWINS = {
    twin.name: twin
    for twin in (
        Twin("residual", Residual, _images),
        Twin("unet", UNet, _images),
        Twin("transformer", Transformer, _texts),
        Twin("masked_transformer", MaskedTransformer, _padded_texts, loss_fn=own_loss),
        Twin("sharing", Sharing, _vectors),
        Twin("strided", Strided, _images),
        Twin("tuples", Tuples, _vectors),
        Twin("handing_on", HandingOn, _vectors),
        Twin("routed", Routed, _vectors),
        Twin("side_value", SideValue, _vectors),
        Twin("deciding", Deciding, _vectors_of_tasks),
        Twin("viewing", Viewing, _vectors),
        Twin("adversarial", Adversarial, _vectors),
        Twin("dropping", Dropping, _vectors, draws=True),
    )
}
