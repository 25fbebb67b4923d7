"""Joins the optimizer states of a parameter's pieces to the state of the whole parameter, and cuts such a
state into pieces again. Replicas with shards keep states of pieces.

A state of torch's optimizers has two kinds of values. Tensors with one number per element of the parameter
are joined and cut. All other values are the same for all pieces. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipedream.checkpoint.stage_files import piece_in

__all__ = ["cut_out", "joined_states", "whole_name"]


def whole_name(name: str) -> str:
    """Returns "name" for a piece "name[first:end]" of a parameter."""
    return piece_in(name)[0]


class _Elements(NamedTuple):
    """A tensor of a parameter's state that has one number for each element of the parameter, in the order of
    memory."""

    flat: Tensor


def joined_states(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Joins the states of pieces to states of whole parameters, as cut_out() takes them. The tensors with one
    number per element are then flat and of type _Elements. States of whole parameters stay as they are."""
    joined: dict[str, Any] = {}
    pieces: dict[str, list[tuple[int, Any]]] = {}
    for name, state in named:
        whole, first, end = piece_in(name)
        if end > first and isinstance(state, dict):
            pieces.setdefault(whole, []).append((first, _with_elements(state, end - first)))
        else:
            joined[whole] = state
    for name, found in pieces.items():
        of_pieces = [state for _, state in sorted(found, key=lambda row: row[0])]
        joined[name] = of_pieces[0]
        for key, value in of_pieces[0].items():
            if isinstance(value, _Elements):
                joined[name][key] = _Elements(torch.cat([state[key].flat for state in of_pieces]))
    return joined


def _with_elements(state: dict[str, Any], count: int) -> dict[str, Any]:
    """Marks the tensors that have one number for each element of the parameter as _Elements. count: the
    number of elements."""
    return {
        key: _Elements(torch.as_strided(value, (count,), (1,)))
        if isinstance(value, Tensor) and value.dim() > 0 and value.numel() == count
        else value
        for key, value in state.items()
    }


def cut_out(state: Any, name: str, master: Tensor) -> Any:
    """Returns the part of a whole parameter's state that belongs to a master parameter. If the master is a
    piece, its name says which piece."""
    if not isinstance(state, dict):
        return state
    _, first, end = piece_in(name)
    if not any(isinstance(value, _Elements) for value in state.values()):  # it was not joined
        sizes = [value.numel() for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
        # The size of a piece's whole parameter is not known. Adafactor has no tensor with that size: those
        # with a number for each row or column go to the only piece.
        count = max([size for size in sizes if size >= end], default=0) if end > first else master.numel()
        state = _with_elements(state, count)

    def cut(value: Any) -> Any:
        if not isinstance(value, _Elements):
            return value.clone() if isinstance(value, Tensor) else value
        own = torch.empty_like(master, dtype=value.flat.dtype, device=value.flat.device)
        torch.as_strided(own, (own.numel(),), (1,)).copy_(value.flat[first : first + own.numel()])
        return own

    return {key: cut(value) for key, value in state.items()}
