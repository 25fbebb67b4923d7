"""The exact state of one replica of a stage at a boundary. A run continues from it as if it had never
stopped.

Boundary N lies before minibatch N. There the updates of all earlier minibatches are made, and no others.
State is tensors and JSON, so nothing is pickled. Optimizers and schedulers have values that JSON lacks, such
as tuples and dtypes. encode() turns such values into JSON, and decode() turns them back. Plain values in host
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
    It has the newest version, and the older versions that microbatches after the boundary read."""
    tied: dict[int, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    """owner stage -> {version: {parameter name: values}}, for parameters that several stages use. A version
    is the number of the owner's updates."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """name -> the stage's buffer at the boundary."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """ "parameter name / key" -> a tensor of the optimizer's state. A shard may have only a piece of a
    parameter, whose state is named "name[first:end] / key"."""
    optimizer_document: dict[str, Any] = field(default_factory=dict)
    """JSON with the optimizer's parameter groups, and with the state that is not in tensors."""
    residuals: dict[str, Tensor] = field(default_factory=dict)
    """The codec's residuals at the channels on which this replica sends, as links/residuals.py names them."""
    document: dict[str, Any] = field(default_factory=dict)
    """JSON with "scheduler", "loss_scaling", "generators" and other state that is not in tensors."""
    document_tensors: dict[str, Tensor] = field(default_factory=dict)
    """name -> a tensor to which `document` refers by that name."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """Returns the newest version of all weights, including tied weights."""
        newest = [versions[max(versions)] for versions in (self.versions, *self.tied.values())]
        return {name: tensor for of_version in newest for name, tensor in of_version.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by names that are unique in the snapshot."""
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


# encode() writes values that JSON lacks as objects with one of these keys, such as {"tuple": [...]}. A dict
# becomes a "map", because JSON has only text as keys.
_KINDS = ("tuple", "map", "tensor", "dtype", "complex", "float")
_SCALARS = (str, bool, int, type(None))


def encode(
    value: Any, name: str, tensors: dict[str, Tensor], to_host: Callable[[Tensor], Tensor] = on_host
) -> Any:
    """Returns the value as JSON. Its tensors are copied into `tensors`, by names that begin with `name`. The
    JSON refers to them by these names. Raises ValueError for a value of a type that this function does not
    know."""
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
    """Turns JSON of encode() back into the value. All tensors in the value are copies.

    device: the device for tensors that were not in host memory; None puts them in host memory."""
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
