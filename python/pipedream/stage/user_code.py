"""Runs the user's own code inside a run. The time is measured, and errors are reported with stage and
minibatch. Owned by the worker's compute thread.

After a loss of NaN has failed a run, the last stage's forward runs once more to find where the NaN began.
Every operation whose result has a NaN is examined. If the operation reads a NaN, too, its result has the
origins of the NaN that it reads. Otherwise the operation itself is the origin. A NaN that does not reach the
loss is ignored. The search takes the time of a forward and about 50 us per operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream import _core
from pipedream.common.errors import PipelineError, describe_error
from pipedream.model.boundary import tensors_of
from pipedream.model.calls import calls_seen, visible_modules
from pipedream.model.stage_module import StageModule

__all__ = ["UserCode", "origins_of_nan"]

_Result = TypeVar("_Result")

_now_ns = time.perf_counter_ns


class UserCode:
    """Runs the user's own code, measures its time, and reports its errors with stage and minibatch."""

    def __init__(self, where: Callable[[str], str]) -> None:
        """where: returns a description of the failed code for an error, given the name of the call."""
        self._where = where
        self.elapsed_ns = 0
        """Nanoseconds of user code since the last work item was completed."""

    def take_elapsed_ns(self) -> int:
        """Returns the time of user code in the work item that ends now, and starts again from 0."""
        elapsed_ns, self.elapsed_ns = self.elapsed_ns, 0
        return elapsed_ns

    def drop_elapsed(self) -> None:
        """Forgets the time so far. Call it if the time belongs to no work item."""
        self.elapsed_ns = 0

    def run(self, what: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
        began_ns = _now_ns()
        try:
            return function(*arguments)
        except (PipelineError, _core.RunFailure):
            raise  # this error already names its place, or a link has failed while data were received
        except Exception as error:
            raise PipelineError(f"{self._where(what)}: {describe_error(error)}") from error
        finally:
            self.elapsed_ns += _now_ns() - began_ns


def origins_of_nan(stage: StageModule, received: Iterable[Tensor], run: Callable[[], Tensor]) -> list[str]:
    """Returns a description of each origin of the NaN in the loss; empty if the loss is not NaN. received:
    the tensors that came from upstream. run: runs the forward on these same tensors, and returns the loss."""
    modules = [(name, module) for prefix, root in stage.roots() for name, module in _modules_of(prefix, root)]
    finder = _Finder({id(module): name for name, module in modules})
    for tensor in received:
        finder.know(tensor, f"what came from stage {stage.stage_index - 1}")
    others = {id(parameter) for parameter in stage.others_parameters()}
    for prefix, root in stage.roots():
        for name, parameter in root.named_parameters():
            if id(parameter) in others:
                finder.know(parameter, f"parameter {prefix + name!r}, which another stage trains")
    with calls_seen([module for _, module in modules], finder.call), finder, torch.no_grad():
        return finder.origins(run())


def _modules_of(prefix: str, root: nn.Module) -> list[tuple[str, nn.Module]]:
    inner = [(prefix + name, module) for name, module in visible_modules(root)]
    return [(prefix.removesuffix("."), root), *inner] if prefix else inner


class _Finder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, names: dict[int, str]) -> None:
        """names: the modules' names by their id()."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._stack: list[str] = []
        # The key is the address of the storage. The stored tensor keeps it from being given to another one.
        self._known: dict[int, tuple[Tensor, list[str]]] = {}

    def know(self, tensor: Tensor, origin: str) -> None:
        self._note(tensor, [origin])

    def origins(self, tensor: Tensor) -> list[str]:
        known = self._known.get(_address(tensor))
        return known[1] if known is not None and _has_nan(tensor) else []

    def call(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        self._stack.append(self._names[id(module)])
        try:
            return call()
        finally:
            self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = [tensor for tensor in tensors_of((args, kwargs or {})) if _has_nan(tensor)]
        output = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tensors_of(output) if _has_nan(tensor)]
        if made:
            found: list[str] = []
            for tensor in read:
                found += self._known.get(_address(tensor), (tensor, [self._stand_in(tensor)]))[1]
            name = func._schema.name.replace("::", ".")
            origins = list(dict.fromkeys(found)) or [f"{name} in {self._place()}"]
            for tensor in made:
                self._note(tensor, origins)
        return output

    def _place(self) -> str:
        return self._stack[-1] if self._stack else "code between modules"

    def _stand_in(self, tensor: Tensor) -> str:
        shape = tuple(tensor.shape)
        return f"a stand-in of shape {shape} for what an earlier stage has, read in {self._place()}"

    def _note(self, tensor: Tensor, origins: list[str]) -> None:
        self._known[_address(tensor)] = (tensor, origins)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -id(tensor)


def _has_nan(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.layout == torch.strided and bool(tensor.isnan().any())
