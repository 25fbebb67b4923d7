"""What the commands share: a common option, how results are printed, what is checked of files. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pipedream.common.checks import check_output_file

__all__ = ["JsonOption", "check_output", "print_result", "to_json", "with_notes"]

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


def to_json(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for both."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value
