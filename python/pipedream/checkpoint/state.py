"""Sends a stage's parameters and buffers from rank to rank, writes them into safetensors files, and reads
them.

Name, dtype and shape are sent with each tensor. The receiver cannot know them, because layers may make or
resize buffers in their first forward. Any thread, but one at a time for each stage and core.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from safetensors import safe_open
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
from pipedream.model.initial_weights import COMPLEX_MARK
from pipedream.model.layers import dtype_name
from pipedream.model.stage_module import StageModule

# The dtypes' names in safetensors files.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
    _DTYPES[torch.float8_e8m0fnu] = "F8_E8M0"

__all__ = [
    "average_buffers",
    "mean_buffers",
    "receive_values",
    "relay_state",
    "save_state",
    "saved_names",
    "saved_values",
    "send_state",
    "send_values",
    "set_state",
    "state_bytes",
    "write_tensors",
]


class Writable(Protocol):
    """The part of a file that write_tensors needs."""

    def write(self, data: Any, /) -> Any: ...


def send_state(core: _core.Worker, channel: str, stage: StageModule, *, only_buffers: bool = False) -> None:
    """Sends the stage's parameters and buffers, or only its buffers. Skips tensors on the meta device, which
    have no values."""
    state = _state_of(stage, only_buffers)
    send_values(core, channel, {name: tensor for name, tensor in state.items() if not tensor.is_meta})


def send_values(core: _core.Worker, channel: str, values: Mapping[str, Tensor]) -> None:
    described = [[name, dtype_name(value.dtype), list(value.shape)] for name, value in values.items()]
    send_document(core, channel, described)
    send_tensors(core, channel, list(values.values()))
    # The core reads the tensors in place, so they must be sent before the next forward changes buffers.
    core.wait_until_sent(channel)


def receive_values(core: _core.Worker, channel: str) -> dict[str, Tensor]:
    """Receives the tensors that send_state() or send_values() sent. Returns new tensors."""
    values: dict[str, Tensor] = {}
    for name, dtype, shape in receive_document(core, channel):
        values[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        receive_tensors(core, channel, [values[name]])
    return values


def average_buffers(stage: StageModule, of_others: Sequence[Mapping[str, Tensor]]) -> None:
    """Replaces the stage's floating-point buffers by their means over the stage's replicas.

    A buffer stays as it is if all replicas have equal values, if a replica lacks it, or if shapes or dtypes
    differ. of_others: the other replicas' buffers by name."""
    set_state(stage, mean_buffers(dict(stage.stage_buffers()), of_others))


def mean_buffers(mine: Mapping[str, Tensor], of_others: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the means that average_buffers() sets, by name. mine: this replica's buffers."""
    means: dict[str, Tensor] = {}
    for name, buffer in mine.items():
        others = [values[name] for values in of_others if name in values]
        is_common = len(others) == len(of_others) and all(
            other.shape == buffer.shape and other.dtype == buffer.dtype for other in others
        )
        own = buffer.cpu()
        if is_common and buffer.is_floating_point() and not all(torch.equal(own, o) for o in others):
            means[name] = _mean([own, *others])
    return means


def _mean(values: Sequence[Tensor]) -> Tensor:
    dtype = values[0].dtype
    if dtype.itemsize == 1:  # torch cannot add 8-bit floats
        values = [value.float() for value in values]
    return (sum(values[1:], values[0]) / len(values)).to(dtype)


def relay_state(core: _core.Worker, source: str, sink: str) -> None:
    """Receives the tensors that send_state() sent, and sends them on to another rank."""
    described = relay_document(core, source, sink)
    sizes = (math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in described)
    relay_tensors(core, source, sink, sizes)


def save_state(
    stage: StageModule,
    path: str | os.PathLike[str],
    *,
    names: Collection[str] | None = None,
    only_buffers: bool = False,
) -> None:
    """Writes the stage into a safetensors file. An existing file is overwritten, so that disk space reserved
    for it stays reserved.

    names: the tensors to save; None saves all. After a failure no file is left."""
    of_stage = _state_of(stage, only_buffers)
    state = {name: value for name, value in of_stage.items() if names is None or name in names}
    try:
        with open(path, "r+b" if os.path.exists(path) else "wb") as file:
            write_tensors(state, file)
            file.truncate()
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def state_bytes(stage: StageModule, *, only_buffers: bool = False) -> int:
    """Returns the most bytes that save_state() writes, unless a tensor grows."""
    state = _state_of(stage, only_buffers)
    # 256 bytes are enough for a tensor's other fields in the header.
    return 1024 + sum(len(name.encode()) * 2 + 256 + tensor.nbytes for name, tensor in state.items())


def write_tensors(tensors: Mapping[str, Tensor], file: Writable) -> None:
    """Writes a safetensors file. Only one tensor at a time is copied to the host. safetensors' own function
    is not used, because it would first free the disk space that was reserved for the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Tensors with the widest elements come first, so that each begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (-_width_of(item[1]), item[0]))
    size = 0
    for name, tensor in ordered:
        offsets = [size, size + tensor.nbytes]
        header[COMPLEX_MARK + name if tensor.is_complex() else name] = {
            "dtype": _DTYPES[tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype],
            "shape": [*tensor.shape, *([2] if tensor.is_complex() else [])],
            "data_offsets": offsets,
        }
        size = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        if tensor.nbytes:
            value = exportable(tensor.cpu())
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)


def _width_of(tensor: Tensor) -> int:
    """Returns the bytes of one number in the file. A complex number is stored as two numbers."""
    return tensor.element_size() // (2 if tensor.is_complex() else 1)


def saved_names(path: str | os.PathLike[str]) -> list[str]:
    with safe_open(path, framework="pt") as opened:
        return list(opened.keys())


def saved_values(path: str | os.PathLike[str], names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Returns the tensors of a file that write_tensors() wrote. names: None returns all."""
    values: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as opened:
        for name_there in opened.keys():  # noqa: SIM118 - it is no mapping
            name = name_there.removeprefix(COMPLEX_MARK)
            if names is None or name in names:
                value = opened.get_tensor(name_there)
                values[name] = value if name == name_there else torch.view_as_complex(value)
    return values


def set_state(stage: StageModule, values: Mapping[str, Tensor]) -> None:
    """Sets the parameters and buffers of the stage that `values` names."""
    known = _state_of(stage)
    for name, value in values.items():
        mine = known.get(name)
        if mine is not None and mine.shape == value.shape and mine.dtype == value.dtype:
            with torch.no_grad():
                mine.copy_(value)  # in place, because the user may hold the tensor
        else:
            stage.set_buffer(name, value.to(device_of([stage]) if mine is None else mine.device))


def _state_of(stage: StageModule, only_buffers: bool = False) -> dict[str, Tensor]:
    if only_buffers:
        return dict(stage.stage_buffers())
    return dict([*stage.trainable_parameters(), *stage.frozen_parameters(), *stage.stage_buffers()])
