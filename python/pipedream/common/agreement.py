"""Compares options that must be equal at all ranks.

The options are fields of dataclasses. All fields are compared, except those whose metadata are OWN. So a new
option is compared by default. Torch-free; any thread.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

__all__ = ["OWN", "compared", "difference", "given", "settings_of"]

_HOW = "pipedream.compared"

OWN: dict[str, Any] = {_HOW: None}
"""Metadata of a field that is not compared: it may differ between ranks, or JSON cannot show it."""


def compared(name: str = "", said: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Returns metadata of a field that is compared under another name or in another form. name: run()'s name
    for the argument. said: function that converts the field's value to the JSON value that is compared.
    """
    return {_HOW: (name, said)}


def given(value: Any) -> str | None:
    """Returns "given" for any value but None. Use it as `said` if ranks must only agree whether a value is
    given.
    """
    return None if value is None else "given"


def settings_of(options: Any) -> dict[str, Any]:
    """Returns the settings to compare: name of run()'s argument -> value. The values have gone through JSON,
    which makes tuples lists, so that they equal the settings that another rank sends.
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
