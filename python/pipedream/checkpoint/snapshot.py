"""The exact state of one stage's replica at a boundary: all that a run needs to go on from there as if it had
never stopped. Plain values in host memory; any thread.

A boundary N lies before minibatch N: all updates of earlier minibatches are made, and none of later ones.
What is no tensor is JSON, and nothing is pickled: encode() and decode() have the values of optimizers and
schedulers that JSON does not know.
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
    """The state of one stage at one replica, or of the shard of a spare."""

    stage_index: int
    replica_index: int
    """The replica; spares are counted on from the stage's replicas."""
    minibatch: int
    """The boundary."""
    versions: dict[int, dict[str, Tensor]]
    """By version, each parameter that the stage alone trains, by its name in the original model: the newest,
    and those before it that the first microbatches after the boundary read."""
    tied: dict[int, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    """By the stage that owns them, likewise those parameters that several stages use. Versions count the
    owner's rounds."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """By name, those of the stage, as the forward of the boundary's minibatch finds them."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """By "parameter name / key"; of a piece of a parameter, as shards have them, "name[first:end] / key"."""
    optimizer_document: dict[str, Any] = field(default_factory=dict)
    """JSON: the other values of its state, and of its groups."""
    residuals: dict[str, Tensor] = field(default_factory=dict)
    """Residuals of codecs in what the stage sent, by "channel / item / tensor"."""
    document: dict[str, Any] = field(default_factory=dict)
    """JSON: "scheduler", "loss_scaling", "generators" and what else is no tensor."""
    document_tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that the document names."""

    @property
    def newest_version(self) -> int:
        return max(self.versions)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Returns the weights of the newest version, tied ones too."""
        newest = [versions[max(versions)] for versions in (self.versions, *self.tied.values())]
        return {name: tensor for of_version in newest for name, tensor in of_version.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by one name each."""
        kinds: dict[str, Mapping[str, Tensor]] = {kind: getattr(self, kind) for kind in _TENSOR_FIELDS}
        kinds |= {f"version {version}": values for version, values in self.versions.items()}
        for owner, versions in self.tied.items():
            kinds |= {f"tied {owner} {version}": values for version, values in versions.items()}
        return {
            f"{kind}: {name}": tensor for kind, values in kinds.items() for name, tensor in values.items()
        }


_TENSOR_FIELDS = ("buffers", "optimizer", "residuals", "document_tensors")


def on_host(tensor: Tensor) -> Tensor:
    """A copy of its own in host memory, of the same strides where they leave no gaps."""
    return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())


# JSON has no tuples, and only texts as keys.
_KINDS = ("tuple", "map", "tensor", "dtype", "complex", "float")
_SCALARS = (str, bool, int, type(None))


def encode(
    value: Any, name: str, tensors: dict[str, Tensor], to_host: Callable[[Tensor], Tensor] = on_host
) -> Any:
    """The value as JSON. Its tensors go into `tensors`, by names that begin with `name`; the value has these
    names. Raises ValueError for what cannot be kept."""
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
    """Returns the value that encode() was given. device: where tensors lie that were not in host memory; None
    leaves them there. Tensors of host memory are copies, so that `tensors` stay as they are."""
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
