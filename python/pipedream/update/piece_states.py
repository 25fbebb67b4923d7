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
    """Joins the states of parameters, or of their pieces, to states of whole parameters. The tensors with one
    number per element are flat and of type _Elements, as cut_out() takes them."""
    pieces: dict[str, list[tuple[int, int | None, Any]]] = {}
    for name, state in named:
        whole, first, end = piece_in(name)
        pieces.setdefault(whole, []).append((first, end - first or None, state))
    joined: dict[str, Any] = {}
    for name, found in pieces.items():
        of_pieces = [
            _with_elements(state, count) for _, count, state in sorted(found, key=lambda row: row[0])
        ]
        joined[name] = of_pieces[0]
        for key, value in of_pieces[0].items() if isinstance(of_pieces[0], dict) else ():
            if isinstance(value, _Elements):
                joined[name][key] = _Elements(torch.cat([state[key].flat for state in of_pieces]))
    return joined


def _with_elements(state: Any, count: int | None) -> Any:
    """Marks the tensors that have one number for each element of the parameter as _Elements. count: the
    number of elements. None takes the size of the largest tensor."""
    if not isinstance(state, dict):
        return state
    sizes = [value.numel() for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    size = max(sizes, default=0) if count is None else count
    return {
        key: _Elements(torch.as_strided(value, (size,), (1,)))
        if isinstance(value, Tensor) and value.dim() > 0 and value.numel() == size
        else value
        for key, value in state.items()
    }


def cut_out(state: Any, name: str, master: Tensor) -> Any:
    """Returns the part of a whole parameter's state that belongs to a master parameter. If the master is a
    piece, its name says which piece."""
    if not isinstance(state, dict):
        return state
    _, first, _ = piece_in(name)

    def cut(value: Any) -> Any:
        if not isinstance(value, _Elements):
            return value.clone() if isinstance(value, Tensor) else value
        own = torch.empty_like(master, dtype=value.flat.dtype, device=value.flat.device)
        torch.as_strided(own, (own.numel(),), (1,)).copy_(value.flat[first : first + own.numel()])
        return own

    return {key: cut(value) for key, value in state.items()}
