"""LossState holds the values that a loss keeps from minibatch to minibatch, such as a centre, a queue or a
count of its steps. They change in the worker of the last stage. At the end of a run they are copied back into
the caller's loss.

    included     buffers of the loss's modules; tensors and numbers in attributes of its modules and other
                 objects
    left out     parameters; values of the model, which are copied back with the model; entries of lists and
                 dicts
    replicas     floating-point values become the mean over the last stage's replicas, as the model's buffers
                 do

Tensors of a loss, such as class weights, must be on the device of the last stage. Tensors of modules are
moved there for the time of a run. Other tensors are not moved, because the user's code may use them
elsewhere; an error says what to do. A trial call before the run does not change a loss that counts or
averages.

Owned by the worker's compute thread, and by the caller's.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.common.errors import describe_error
from pipedream.model.boundary import tensors_of
from pipedream.model.references import modules_carried_by, objects_carried_by, tensors_carried_by
from pipedream.model.stage_module import StageModule

__all__ = [
    "LossState",
    "call_loss",
    "check_loss_buffers",
    "joined_loss_states",
    "loss_on",
    "set_loss_state",
    "spare_loss",
]

_BUFFER, _TENSOR, _NUMBER = "buffer", "tensor", "number"  # kinds of values, in the keys of a state


class LossState:
    """The values that a loss has changed since this object was made."""

    def __init__(self, loss_fn: Any, stages: Iterable[StageModule]) -> None:
        """stages: the model's stages. Their tensors and modules are left out."""
        self._loss_fn = loss_fn
        roots = [root for stage in stages for _, root in stage.roots()]
        self._of_model = {id(module) for root in roots for module in root.modules()}
        self._storages = {_storage_of(t) for root in roots for t in (*root.parameters(), *root.buffers())}
        self._before = {key: (value, _version_of(value)) for key, value in self._values()}

    def changed(self) -> dict[str, Tensor]:
        """Returns the values that have changed, and all buffers, by their places."""
        return {
            key: value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value)
            for key, value in self._values()
            # A buffer may be written through .data, which does not increase its version, so a buffer is
            # always included.
            if f":{_BUFFER}:" in key or not _is_as(self._before.get(key), value)
        }

    def _values(self) -> Iterator[tuple[str, Any]]:
        for path, holder in objects_carried_by("loss_fn", self._loss_fn):
            if id(holder) in self._of_model:
                continue
            for kind, table in _tables_of(holder):
                for name, value in table.items():
                    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                        if _storage_of(value) not in self._storages:
                            yield f"{path}:{kind}:{name}", value
                    elif kind == _TENSOR and type(value) in (bool, int, float):
                        yield f"{path}:{_NUMBER}:{name}", value


def set_loss_state(loss_fn: Any, state: Mapping[str, Tensor]) -> None:
    """Copies a state into a loss. state: the result of changed() for a copy of the loss."""
    holders = dict(objects_carried_by("loss_fn", loss_fn)) if state else {}
    for key, value in state.items():
        path, kind, name = key.rsplit(":", 2)
        if path not in holders:  # the worker's loss made this object during the run
            continue
        tables = dict(_tables_of(holders[path]))
        if kind == _NUMBER:
            tables[_TENSOR][name] = value.item()
            continue
        table = tables[kind]
        mine = table.get(name)
        if isinstance(mine, Tensor) and mine.shape == value.shape and mine.dtype == value.dtype:
            with torch.no_grad():
                mine.copy_(value)  # in place: the user may hold the tensor
        else:
            table[name] = value.to(mine.device) if isinstance(mine, Tensor) else value


def joined_loss_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the states of the last stage's replicas. A floating-point value becomes the mean over the
    replicas, if all have it in the same shape. Any other value comes from the first replica.
    """
    if not states:
        return {}
    first, *others = states
    joined = dict(first)
    for key, value in first.items():
        of_others = [state[key] for state in others if key in state and state[key].shape == value.shape]
        if of_others and len(of_others) == len(others) and value.is_floating_point():
            joined[key] = sum(of_others, value) / len(states)
    return joined


def check_loss_buffers(stages: list[StageModule], loss_fn: Any) -> None:
    """Raises ValueError for a loss that holds a buffer of the model that an earlier stage changes."""
    last = stages[-1]
    own = {_storage_of(buffer) for _, buffer in last.stage_buffers()}
    changing = {
        _storage_of(buffer): (name, stage.stage_index)
        for stage in stages[:-1]
        for name, buffer in stage.stage_buffers()
        if _module_of(stage, name).training
    }
    for path, holder in objects_carried_by("loss_fn", loss_fn) if changing else ():
        for _, table in _tables_of(holder):
            for attribute, value in table.items():
                storage = _storage_of(value) if isinstance(value, Tensor) else 0
                if storage in changing and storage not in own:
                    name, stage_index = changing[storage]
                    raise ValueError(
                        f"{path}.{attribute} is the buffer {name!r} of the model, which stage {stage_index}"
                        f" may change as it trains: the loss, at stage {last.stage_index}, would see it as it"
                        " began; let the model return what the loss needs of it, or give the loss a .clone()"
                        " of a buffer that stays as it is"
                    )


def _tables_of(holder: Any) -> list[tuple[str, dict[str, Any]]]:
    """Returns (kind, values by name) for the values that an object holds directly."""
    attributes = getattr(holder, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(holder, type):
        return []
    if isinstance(holder, nn.Module):
        return [(_BUFFER, holder._buffers), (_TENSOR, attributes)]
    return [(_TENSOR, attributes)]


def _module_of(stage: StageModule, name: str) -> nn.Module:
    prefix, root = next((prefix, root) for prefix, root in stage.roots() if name.startswith(prefix))
    return root.get_submodule(name.removeprefix(prefix).rpartition(".")[0])


def _storage_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 if it has none that another tensor could share."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


def _version_of(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _is_as(before: tuple[Any, int] | None, value: Any) -> bool:
    if before is None:
        return False
    then, version = before
    if isinstance(value, Tensor):
        return value is then and value._version == version
    return type(value) is type(then) and value == then


@contextlib.contextmanager
def loss_on(loss_fn: Any, device: torch.device) -> Iterator[None]:
    """In the with block, the modules of the loss are on the device. Afterwards the modules have their former
    parameters and buffers again; contents of buffers that changed in the block are copied back. Modules that
    are on the device already are left alone.
    """
    elsewhere = [
        module
        for module in modules_carried_by(loss_fn)
        if any(tensor.device != device for tensor in (*module.parameters(), *module.buffers()))
    ]
    parameters = [
        (module, name, parameter, parameter.data)
        for module in elsewhere
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    buffers = [
        (module, name, buffer)
        for module in elsewhere
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for module in elsewhere:
        module.to(device)
    moved = [module._buffers[name] for module, name, _ in buffers]
    versions = [None if buffer is None else buffer._version for buffer in moved]
    try:
        yield
    finally:
        for module, name, parameter, content in parameters:
            parameter.data = content  # module.to() changed .data, or replaced the parameter
            module._parameters[name] = parameter
        for (module, name, own), then, version in zip(buffers, moved, versions, strict=True):
            now = module._buffers.get(name)
            if now is then:
                if now is not None and now._version != version:
                    with torch.no_grad():
                        own.copy_(now)
                module._buffers[name] = own
            elif now is not None:  # the loss replaced the buffer
                module._buffers[name] = now.to(own.device)


def spare_loss(loss_fn: Any, model: Iterable[nn.Module] = ()) -> Any:
    """Returns a deep copy of the loss, so that trial calls do not change the caller's loss. The copy shares
    the parameters of the loss's modules, and the model's modules and buffers. Functions are not copied, so a
    trial call may change what they reach by closures and global names. If copying raises, the loss itself is
    returned.
    """
    shared: list[Any] = [p for module in modules_carried_by(loss_fn) for p in module.parameters()]
    for root in model:
        shared += (*root.modules(), *root.buffers())
    memo: dict[Any, Any] = {id(one): one for one in shared}
    # deepcopy finds the storages in this dict and does not copy them, so the copy's views of the model's
    # buffers stay views.
    storages = [one.untyped_storage() for one in shared if isinstance(one, Tensor)]
    memo["torch"] = {storage._cdata: storage for storage in storages}
    try:
        return copy.deepcopy(loss_fn, memo)
    except Exception:  # a user's object may raise anything
        return loss_fn


def call_loss(loss_fn: Callable[[Any, Any], Tensor], outputs: Any, targets: Any) -> Tensor:
    """Calls the loss. If it fails and holds a tensor on another device than the outputs, the error says
    so.
    """
    try:
        return loss_fn(outputs, targets)
    except Exception as error:
        advice = _advice(loss_fn, outputs)
        if not advice:
            raise
        raise RuntimeError(f"{describe_error(error)}; {advice}") from error


def _advice(loss_fn: Any, outputs: Any) -> str:
    """Returns a remedy if the loss holds a tensor on another device than the outputs; else ""."""
    for output in tensors_of(outputs)[:1]:
        for path, tensor in tensors_carried_by("loss_fn", loss_fn):
            if tensor.device != output.device:
                return (
                    f"{path} is on {tensor.device} and the outputs are on {output.device}: make it a buffer"
                    " of an nn.Module (self.register_buffer), which is moved for you, or move it in the loss"
                    " with .to(outputs.device)"
                )
    return ""
