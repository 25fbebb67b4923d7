"""A loss that has tensors of its own, class weights say: they go to the device of the stage that runs it.

Those of modules are moved for as long as a run takes; of what else a loss holds nobody knows whether it may
be, so an error says what to do. A loss that counts or averages goes on as if it had not been tried. Owned by
the thread that runs the loss.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.common.errors import describe_error
from pipedream.model.boundary import tensors_of
from pipedream.model.references import modules_carried_by, tensors_carried_by

__all__ = ["call_loss", "loss_on", "spare_loss"]


@contextlib.contextmanager
def loss_on(loss_fn: Any, device: torch.device) -> Iterator[None]:
    """Inside, the modules that the loss is, or carries, are on the device. Afterwards they have their own
    parameters and buffers again, with the contents that they have got; untouched where they already are.
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
            parameter.data = content  # moving pointed it elsewhere, or put another into its place
            module._parameters[name] = parameter
        for (module, name, own), then, version in zip(buffers, moved, versions, strict=True):
            now = module._buffers.get(name)
            if now is then:
                if now is not None and now._version != version:
                    with torch.no_grad():
                        own.copy_(now)
                module._buffers[name] = own
            elif now is not None:  # another tensor, which the loss made
                module._buffers[name] = now.to(own.device)


def spare_loss(loss_fn: Any, model: Iterable[nn.Module] = ()) -> Any:
    """A copy of the loss, for calls that do not count: what it keeps in its objects stays as it is. Its
    parameters are the same ones, and so are modules and tensors of the model; so is what cannot be copied, as
    the global names and closures of functions."""
    shared: list[Any] = [p for module in modules_carried_by(loss_fn) for p in module.parameters()]
    for root in model:
        shared += (*root.modules(), *root.buffers())
    memo: dict[Any, Any] = {id(one): one for one in shared}
    # Views of the model's buffers stay so: this is where storages look for their copies.
    storages = [one.untyped_storage() for one in shared if isinstance(one, Tensor)]
    memo["torch"] = {storage._cdata: storage for storage in storages}
    try:
        return copy.deepcopy(loss_fn, memo)
    except Exception:  # whatever a user's object raises: then it is tried itself
        return loss_fn


def call_loss(loss_fn: Callable[[Any, Any], Tensor], outputs: Any, targets: Any) -> Tensor:
    """The loss. An error of one that holds tensors on another device than the outputs says so."""
    try:
        return loss_fn(outputs, targets)
    except Exception as error:
        advice = _advice(loss_fn, outputs)
        if not advice:
            raise
        raise RuntimeError(f"{describe_error(error)}; {advice}") from error


def _advice(loss_fn: Any, outputs: Any) -> str:
    """Returns a remedy if the loss has a tensor elsewhere; else empty."""
    for output in tensors_of(outputs)[:1]:
        for path, tensor in tensors_carried_by("loss_fn", loss_fn):
            if tensor.device != output.device:
                return (
                    f"{path} is on {tensor.device} and the outputs are on {output.device}: make it a buffer"
                    " of an nn.Module (self.register_buffer), which is moved for you, or move it in the loss"
                    " with .to(outputs.device)"
                )
    return ""
