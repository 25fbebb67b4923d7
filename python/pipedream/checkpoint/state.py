"""The state of a stage, parameters and buffers by name: from rank to rank, and to a file and back.

What comes says itself what it is, because a buffer may be new or have another shape after training (a
cache that a layer makes in its first forward). Owned by the calling thread.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedream import _core
from pipedream.links.state_transfer import (
    receive_document,
    receive_tensors,
    relay_document,
    relay_tensors,
    send_document,
    send_tensors,
)
from pipedream.model.boundary import device_of, exportable
from pipedream.model.splitter import StageModule, dtype_name

__all__ = ["load_state", "receive_state", "relay_state", "save_state", "send_state"]

# safetensors has no complex128, so complex tensors are saved as pairs of reals under a marked name.
_COMPLEX_MARK = "complex:"


def send_state(core: _core.Worker, channel: str, stage: StageModule) -> None:
    state = _state_of(stage)
    send_document(core, channel, [[name, dtype_name(t.dtype), list(t.shape)] for name, t in state.items()])
    send_tensors(core, channel, list(state.values()))


def receive_state(core: _core.Worker, channel: str, stage: StageModule) -> None:
    """Makes what send_state sent the stage's state."""
    for name, dtype, shape in receive_document(core, channel):
        value = torch.empty(shape, dtype=getattr(torch, dtype))
        receive_tensors(core, channel, [value])
        _assign(stage, name, value)


def relay_state(core: _core.Worker, source: str, sink: str) -> None:
    """Passes on what send_state sent, which this rank has no use for."""
    described = relay_document(core, source, sink)
    sizes = (math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in described)
    relay_tensors(core, source, sink, sizes)


def save_state(stages: Sequence[StageModule], path: str | os.PathLike[str]) -> None:
    """Writes a safetensors file."""
    state: dict[str, Tensor] = {}
    for stage in stages:
        for name, tensor in _state_of(stage).items():
            value = exportable(tensor.cpu()).clone()  # safetensors refuses memory that tensors share
            state[_COMPLEX_MARK + name if value.is_complex() else name] = (
                torch.view_as_real(value) if value.is_complex() else value
            )
    save_file(state, path)


def load_state(stages: Sequence[StageModule], path: str | os.PathLike[str]) -> None:
    """Makes what save_state wrote the stages' state."""
    saved = {
        name.removeprefix(_COMPLEX_MARK): torch.view_as_complex(value)
        if name.startswith(_COMPLEX_MARK)
        else value
        for name, value in load_file(path).items()
    }
    known = {name: stage for stage in stages for name in _state_of(stage)}
    for name, value in saved.items():
        _assign(known[name] if name in known else _owner_of(stages, name), name, value)


def _state_of(stage: StageModule) -> dict[str, Tensor]:
    return dict([*stage.trainable_parameters(), *stage.frozen_parameters(), *stage.stage_buffers()])


def _assign(stage: StageModule, name: str, value: Tensor) -> None:
    mine = _state_of(stage).get(name)
    if mine is not None and mine.shape == value.shape and mine.dtype == value.dtype:
        with torch.no_grad():
            mine.copy_(value)  # in place: the user may hold the tensor
    else:
        stage.set_buffer(name, value.to(device_of([stage]) if mine is None else mine.device))


def _owner_of(stages: Sequence[StageModule], name: str) -> StageModule:
    return next(stage for stage in stages if stage.owns(name))
