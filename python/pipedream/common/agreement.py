"""Compares options that must be equal at all ranks. These are all fields of the dataclasses that hold
options, except fields that are declared otherwise (OWN, compared()). So a new option is compared by default.

Torch-free; any thread.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

__all__ = ["OWN", "compared", "difference", "given", "settings_of"]

_HOW = "pipedream.compared"

OWN: dict[str, Any] = {_HOW: None}
"""Metadata of a field that may differ between ranks, or that cannot be shown in JSON, such as a function."""


def compared(name: str = "", said: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Returns metadata of a field that is compared under another name or in another form. name: run()'s name
    for the argument. said: function that converts the value to the JSON value that is compared and shown.
    """
    return {_HOW: (name, said)}


def given(value: Any) -> str | None:
    """Returns "given" for a value that cannot be shown or may differ, and None for None."""
    return None if value is None else "given"


def settings_of(options: Any) -> dict[str, Any]:
    """Returns the settings to compare, by run()'s names of the arguments. The values have gone through JSON,
    so that tuples are lists as in another rank's settings.
    """
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        how = field.metadata.get(_HOW, ("", None))
        if how is None:
            continue
        name, said = how
        if said is None and dataclasses.is_dataclass(value):
            settings |= settings_of(value)
        else:
            settings[name or field.name] = json.loads(json.dumps(value if said is None else said(value)))
    return settings


def difference(mine: dict[str, Any], rank: int, of_rank_0: dict[str, Any]) -> str | None:
    """Returns a line about the first difference between two ranks' settings_of(); None if there is none."""
    for name in [*mine, *(name for name in of_rank_0 if name not in mine)]:
        if name not in mine or name not in of_rank_0:
            return f"{name} is known to one of rank {rank} and rank 0 alone: install one version everywhere"
        if mine[name] != of_rank_0[name]:
            return (
                f"{name} is {mine[name]!r} at rank {rank}, but {of_rank_0[name]!r} at rank 0:"
                " give all ranks the same arguments"
            )
    return None
