"""Helpers for all commands: the --json option, printing of results, checks of files. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pipedream.common.checks import check_output_file
from pipedream.planning.link_profile import LinkProfile

__all__ = [
    "JsonOption",
    "check_output",
    "describe_usage_error",
    "links_or_bandwidth",
    "print_result",
    "to_json",
    "with_notes",
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")
]


def with_notes(shown: object, notes: list[str]) -> str:
    return "\n".join([str(shown), *([""] if notes else []), *notes])


def check_output(path: Path | None) -> None:
    if path is not None:
        check_output_file(path)


def print_result(shown: object, fields: Mapping[str, Any], as_json: bool) -> None:
    typer.echo(json.dumps(to_json(fields), allow_nan=False) if as_json else str(shown))


def links_or_bandwidth(links: Path | None, bandwidth: str | None) -> LinkProfile | str:
    """Returns what partition() takes: the links of the file --links, or the value of --bandwidth. Raises
    ValueError unless exactly one of the options is given."""
    if links is not None and bandwidth is None:
        return LinkProfile.load(links)
    if bandwidth is not None and links is None:
        return bandwidth
    raise ValueError("give --bandwidth, for example 10Gbit/s, or --links FILE: one of them")


# Typer reads values with pydantic. The keys are the first words of pydantic's error types, such as
# "int_parsing".
_WANTED = {"int": "a whole number", "float": "a number"}


def describe_usage_error(error: Any) -> str:
    """Returns the message for an exception that typer raises for wrong options, such as "--workers is 'x':
    give a whole number". If typer suggests nothing, the message names the command that lists the options.
    """
    cause = error.__cause__ or error.__context__
    option = getattr(error, "param", None)
    if option is not None and hasattr(cause, "errors"):
        first = cause.errors()[0]
        wanted = _WANTED.get(first["type"].split("_")[0])
        if wanted is not None:
            return f"{option.opts[0]} is {first['input']!r}: give {wanted}"
    text = str(error.format_message())
    context = getattr(error, "ctx", None)
    if context is None or "Did you mean" in text or "Possible options" in text:
        return text
    return f"{text.removesuffix('.')}: `{context.command_path} --help` shows what it takes"


def to_json(value: Any) -> Any:
    """Returns the value for JSON, with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value
