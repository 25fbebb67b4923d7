"""The exact state of one replica of a stage at a boundary. From it a run continues as if it had never
stopped.

At boundary N, which lies before minibatch N, all updates of earlier minibatches are made, and no later
update. Nothing is pickled: state is tensors and JSON. Optimizers and schedulers also have values that JSON
lacks, such as tuples and dtypes: encode() turns them into JSON, and decode() back. Plain values in host
memory; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["StageSnapshot", "decode", "encode", "on_host"]


@dataclass(frozen=True)
class StageSnapshot:
    """The state of one replica of a stage, or of a spare's shard."""

    stage_index: int
    replica_index: int
    """The index of the replica or the spare. Spares have the indices after the replicas."""
    minibatch: int
    """The boundary: the first minibatch whose update is not in the snapshot."""
    versions: dict[int, dict[str, Tensor]]
    """version -> {parameter name in the original model: values}, for parameters that only this stage trains.
    Contains the newest version, and older versions that the first microbatches after the boundary read."""
    tied: dict[int, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    """owner stage -> {version: {parameter name: values}}, for parameters that several stages use. A version
    is the number of the owner's updates."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """name -> the stage's buffer, with the values that the forward of minibatch `minibatch` finds."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """ "parameter name / key" -> a tensor of the optimizer's state. A piece of a parameter, as shards have
    it, is named "name[first:end] / key"."""
    optimizer_document: dict[str, Any] = field(default_factory=dict)
    """JSON: the rest of the optimizer's state, and its parameter groups."""
    residuals: dict[str, Tensor] = field(default_factory=dict)
    """ "channel / item / tensor" -> the residual of the codec (links/residuals.py) where this stage sends."""
    document: dict[str, Any] = field(default_factory=dict)
    """JSON: "scheduler", "loss_scaling", "generators" and other state that is not in tensors."""
    document_tensors: dict[str, Tensor] = field(default_factory=dict)
    """name -> a tensor to which the document refers by that name."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """Returns the newest version of all weights, including tied weights."""
        newest = [versions[max(versions)] for versions in (self.versions, *self.tied.values())]
        return {name: tensor for of_version in newest for name, tensor in of_version.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors, each by a name that is unique in the snapshot."""
        kinds: dict[str, Mapping[str, Tensor]] = {kind: getattr(self, kind) for kind in _TENSOR_FIELDS}
        kinds |= {f"version {version}": values for version, values in self.versions.items()}
        for owner, versions in self.tied.items():
            kinds |= {f"tied {owner} {version}": values for version, values in versions.items()}
        return {
            f"{kind}: {name}": tensor for kind, values in kinds.items() for name, tensor in values.items()
        }


_TENSOR_FIELDS = ("buffers", "optimizer", "residuals", "document_tensors")


def on_host(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory. It has the tensor's strides if they leave no gaps."""
    return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())


# encode() writes these values as objects with one of these keys: {"tuple": [...]}. A dict is a "map", because
# JSON has only text as keys.
_KINDS = ("tuple", "map", "tensor", "dtype", "complex", "float")
_SCALARS = (str, bool, int, type(None))


def encode(
    value: Any, name: str, tensors: dict[str, Tensor], to_host: Callable[[Tensor], Tensor] = on_host
) -> Any:
    """Returns the value as JSON. Copies its tensors into `tensors`, by names that begin with `name`; the JSON
    refers to them by these names. Raises ValueError for a value of any other type."""
    if isinstance(value, Tensor):
        tensors[name] = to_host(value)
        return {"tensor": name, "device": value.device.type}
    if isinstance(value, _SCALARS) and type(value) in _SCALARS:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) in (list, tuple):
        items = [encode(item, f"{name} / {index}", tensors, to_host) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        return {
            "map": [
                [encode(key, name, tensors, to_host), encode(item, f"{name} / {key}", tensors, to_host)]
                for key, item in value.items()
            ]
        }
    raise ValueError(f"{name} is a {type(value).__name__}, which is neither a tensor nor a value of JSON")


def decode(value: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """Undoes encode(). device: the device for tensors that were not in host memory; None puts these tensors
    in host memory.

    All tensors in the result are copies, so that it does not share memory with `tensors`."""
    if isinstance(value, list):
        return [decode(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(kind for kind in _KINDS if kind in value)
    content = value[kind]
    if kind == "tensor":
        tensor = tensors[content]
        return tensor.clone() if value["device"] == "cpu" or device is None else tensor.to(device, copy=True)
    if kind == "tuple":
        return tuple(decode(item, tensors, device) for item in content)
    if kind == "map":
        return {decode(key, tensors, device): decode(item, tensors, device) for key, item in content}
    if kind == "dtype":
        return getattr(torch, content)
    return float(content) if kind == "float" else complex(*content)
