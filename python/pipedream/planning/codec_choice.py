"""Parses run(codec=...): the choice of codecs for tensors between stages and between replicas.

A choice is a mapping, ready for JSON. Its values are names of codecs (csrc/codec/codec.h). Its keys are:

- "activations", "gradients": tensors sent downstream, and upstream
- "0->1": tensors that stage 0 sends to stage 1. It takes precedence over the keys above.
- "pushes": gradients that a replica sends to other replicas. The value may also be "factors", or
  "factors:" and a codec. With "factors:bf16", gradients that are not pushed as factors are encoded by bf16.

Pure; needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "DIRECTIONS",
    "FACTORS",
    "NO_CODEC",
    "PUSHES",
    "CodecChoice",
    "check_pairs",
    "codec_between",
    "codec_of_pushes",
    "parse_codec",
    "parse_codec_text",
    "pushes_factors",
]

CodecChoice = dict[str, str]

NO_CODEC = "none"
PUSHES = "pushes"
"""The key for gradients that replicas push to the owners of shards. A single name, codec="bf16", leaves it
out.
"""
FACTORS = "factors"
"""The value for pushes that sends the gradients of linear layers as factors where the factors are smaller."""
DIRECTIONS = ("activations", "gradients")
_EXAMPLE = 'for example "bf16", {"activations": "bf16", "gradients": "topk:0.01"} or {(0, 1): "int8"}'


def parse_codec(codec: Any) -> CodecChoice:
    """Returns the choice for a `codec` argument: None, one name for both directions, or a mapping of names.

    Raises ValueError or TypeError, which name the wrong value and the values that are allowed.
    """
    if codec is None:
        return {}
    if isinstance(codec, str):
        name = _codec_name("codec", codec)
        return dict.fromkeys(DIRECTIONS, name)
    if not isinstance(codec, Mapping):
        raise TypeError(f"codec is a {type(codec).__name__}: give {_EXAMPLE}")
    choice: CodecChoice = {}
    for key, value in codec.items():
        where = _where(key)
        if where in choice:
            raise ValueError(f"codec names {where} twice")
        name = NO_CODEC if value is None else value
        choice[where] = _name_of_pushes(name) if where == PUSHES else _codec_name(f"codec of {where}", name)
    return choice


def parse_codec_text(text: str) -> str | dict[str, str]:
    """Splits a `codec` of a command line: "bf16", or "activations=bf16,1->0=topk:0.01" as a mapping."""
    if "=" not in text:
        return text
    choice: dict[str, str] = {}
    for part in text.split(","):
        key, separator, name = part.partition("=")
        if not separator:
            raise ValueError(
                f"codec has the part {part!r}: write WHERE=CODEC, as activations=bf16 or 1->0=int8"
            )
        choice[key.strip()] = name.strip()
    return choice


def check_pairs(choice: CodecChoice, num_stages: int) -> None:
    """Raises ValueError for a pair that is not two neighbouring stages of the plan."""
    for where in choice:
        if where in (*DIRECTIONS, PUSHES):
            continue
        sender, receiver = map(int, where.split("->"))
        if (
            abs(sender - receiver) != 1
            or not 0 <= min(sender, receiver) <= max(sender, receiver) < num_stages
        ):
            raise ValueError(
                f"codec names {where}: tensors travel between neighbours of the plan's stages 0 to"
                f" {num_stages - 1}, as 0->1 (activations) and 1->0 (gradients)"
            )


def codec_between(choice: CodecChoice, sender: int, receiver: int) -> str:
    """Returns the name of the codec for tensors that stage `sender` sends to its neighbour `receiver`."""
    direction = DIRECTIONS[0] if sender < receiver else DIRECTIONS[1]
    return choice.get(f"{sender}->{receiver}", choice.get(direction, NO_CODEC))


def pushes_factors(choice: CodecChoice) -> bool:
    return _split_pushes(choice.get(PUSHES, NO_CODEC))[0]


def codec_of_pushes(choice: CodecChoice) -> str:
    """Returns the codec of pushes that are not factors."""
    return _split_pushes(choice.get(PUSHES, NO_CODEC))[1]


def _split_pushes(name: str) -> tuple[bool, str]:
    """Splits a value for "pushes": "factors:bf16" becomes (True, "bf16"), and "int8" becomes (False,
    "int8").
    """
    head, separator, codec = name.partition(":")
    return (True, codec if separator else NO_CODEC) if head == FACTORS else (False, name)


def _name_of_pushes(name: Any) -> str:
    what = f"codec of {PUSHES}"
    if not isinstance(name, str):
        return _codec_name(what, name)
    has_factors, codec = _split_pushes(name)
    try:
        codec = _codec_name(what, codec)
    except ValueError as error:
        raise ValueError(
            f"{error}; of pushes also factors, alone or with one of these, e.g. factors:bf16"
        ) from None
    if not has_factors:
        return codec
    return FACTORS if codec == NO_CODEC else f"{FACTORS}:{codec}"


def _where(key: Any) -> str:
    """Returns a key of the user's mapping as text: (0, 1) becomes "0->1"."""
    if key in (*DIRECTIONS, PUSHES):
        return str(key)
    pair = key
    if isinstance(key, str):
        sender, arrow, receiver = key.partition("->")
        pair = (_stage_of(sender), _stage_of(receiver)) if arrow else None
    if isinstance(pair, tuple) and len(pair) == 2 and all(type(stage) is int for stage in pair):
        return f"{pair[0]}->{pair[1]}"
    raise ValueError(
        f"codec names {key!r}: use 'activations', 'gradients', 'pushes', or a pair of stages such as (0, 1)"
        " or '0->1'"
    )


def _stage_of(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _codec_name(what: str, name: Any) -> str:
    from pipedream import _core

    if not isinstance(name, str):
        raise TypeError(f"{what} is a {type(name).__name__}: give {_EXAMPLE}")
    try:
        return _core.codec_name(name)
    except ValueError as error:
        raise ValueError(str(error) if what == "codec" else f"{what}: {error}") from None
