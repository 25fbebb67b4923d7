"""Native optimizers make a step in one pass over memory, from one version's slot to another's.

They are torch optimizers with the same arithmetic and state_dict as in torch.optim, and with the same
arguments, except those that choose torch's implementation (foreach, fused, capturable, differentiable). So
they also work in a plain loop (in place), and with torch's lr schedulers. A pipeline calls
`step_out_of_place`, which reads version v and writes version v + 1 without a copy. It calls `place_state` to
put the optimizer's state into memory that the pipeline owns. On the host or on CUDA; used by one thread at a
time.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.common.compiling import unmarked_until_compiling
from pipedream.optim.master_weights import MASTER, has_master, load_wide_state, loss_of, master_dtype

__all__ = ["Group", "NativeOptimizer", "Past", "Row", "check_numbers", "scalar_tensor"]

_NATIVE_DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
_NATIVE_DEVICES = {"cpu": "host", "cuda": "cuda"}

_add_param_group = unmarked_until_compiling(torch.optim.Optimizer.add_param_group)

Group = dict[str, Any]
# A parameter, as the core's steps take it: number of elements, then addresses of tensors.
Row = tuple[int, ...]
# Numbers from a parameter's earlier steps that its next step needs, such as the count.
Past = tuple[float, ...]


class NativeOptimizer(torch.optim.Optimizer):
    """The base of the optimizers that write the next weight version in one pass.

    Parameters are dense float32, float64 or bfloat16 tensors, in host or CUDA memory, of any memory format.
    The state of a bfloat16 parameter is float32, and includes its master. A master is a float32 copy that the
    first step makes. Steps update the master and round it into the parameter (master_weights.py).
    """

    # Keys of the state tensors that have the parameter's size, in the order of the core's arguments. A group
    # may use only the first of them: Adam without amsgrad uses two of three.
    _STATE_NAMES: tuple[str, ...]
    # Keys of the state whose values are one number per parameter. These numbers stay on the host.
    _SCALAR_NAMES: tuple[str, ...] = ()
    _TAKES_SPARSE = False
    _TORCH_NAME: str  # the alternative for tensors that this class refuses
    _placed: dict[Tensor, dict[str, Tensor]]
    """The tensors of place_state(), by their keys in the parameter's state."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._placed = {}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters in place from their .grad, as torch's optimizers do."""
        loss = loss_of(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            self._step_group(group, parameters, parameters, parameters, gradients, 1.0)
            # The core writes through raw pointers. This tells autograd, which can then refuse an old graph.
            torch.autograd.graph.increment_version(parameters)
        return loss

    @torch.no_grad()
    def step_out_of_place(
        self,
        read: Sequence[Tensor],
        write: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        gradient_scale: float = 1.0,
    ) -> None:
        """Reads version v of the parameters and writes version v + 1.

        The sequences have the order of the optimizer's parameters, over all groups. Each tensor of `write`
        has the strides of its tensor in `read`, and may be the same memory. A parameter without a gradient is
        copied. `gradient_scale` multiplies the gradients first (for unscaling or clipping), but leaves their
        memory unchanged. For a bfloat16 parameter with a master, the step reads the master instead of the
        parameter.
        """
        first = 0
        for group in self.param_groups:
            end = first + len(group["params"])
            with_gradient = [index for index in range(first, end) if gradients[index] is not None]
            self._step_group(
                group,
                [group["params"][index - first] for index in with_gradient],
                [read[index] for index in with_gradient],
                [write[index] for index in with_gradient],
                [gradients[index] for index in with_gradient],
                gradient_scale,
            )
            for index in range(first, end):
                if gradients[index] is None and read[index].data_ptr() != write[index].data_ptr():
                    write[index].copy_(read[index])
            first = end

    @property
    def num_state_tensors(self) -> int:
        """The number of state tensors that each parameter needs, each of the parameter's size. It is 0 or 1
        for SGD, 2 for Adam, and 3 for Adam with amsgrad. If groups differ, it is the largest group's number.
        """
        return max(self._num_state_tensors(group) for group in self.param_groups)

    @torch.no_grad()
    def place_state(self, make: Callable[[int, Tensor], Sequence[Tensor]]) -> None:
        """Keeps the state in the tensors that `make` returns, from now on.

        make(parameter_index, parameter) returns num_state_tensors zeroed tensors with the parameter's shape,
        strides and device. For a bfloat16 parameter the tensors are float32, and one more is needed for its
        master. The index counts the optimizer's parameters over all groups. Existing state is copied into the
        tensors. Raises ValueError for tensors that do not fit.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter_index, parameter in enumerate(parameters):
            tensors = list(make(parameter_index, parameter))
            names = [*self._STATE_NAMES[: self.num_state_tensors], *[MASTER] * has_master(parameter)]
            dtype = master_dtype(parameter.dtype)
            if len(tensors) != len(names) or not all(_fits(t, parameter, dtype) for t in tensors):
                raise ValueError(
                    f"make returned {[(tuple(t.shape), t.stride(), t.dtype) for t in tensors]} for parameter"
                    f" {parameter_index}: it must return {len(names)} tensors with its shape"
                    f" {tuple(parameter.shape)}, strides {parameter.stride()}, device, and dtype {dtype}"
                )
            self._placed[parameter] = dict(zip(names, tensors, strict=True))
        self._own_state()

    @torch.no_grad()
    def displace_state(self) -> None:
        """Copies the state into the optimizer's own memory, and drops the tensors of place_state()."""
        self._placed.clear()
        self._own_state()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this optimizer or of torch's. The state is copied, into the tensors of
        place_state() if there are any.
        """
        super().load_state_dict(state_dict)
        load_wide_state(self, state_dict)
        self._own_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch's optimizers do. Raises ValueError for an option out of range."""
        _add_param_group(self, param_group)
        self._check_group(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_placed", {})  # a copy of this optimizer has its own memory

    @abstractmethod
    def _check_group(self, group: Group) -> None:
        """Raises ValueError for an option out of range."""

    @abstractmethod
    def _num_state_tensors(self, group: Group) -> int:
        """Returns how many of _STATE_NAMES the group uses."""

    @abstractmethod
    def _begin_step(self, group: Group, parameters: list[Tensor]) -> list[Past]:
        """Counts the step. Returns each parameter's past. One call of the core updates all parameters that
        have equal pasts.
        """

    @abstractmethod
    def _run(self, group: Group, past: Past, rows: list[Row], common: dict[str, Any]) -> None:
        """Calls the core's step."""

    def _step_group(
        self,
        group: Group,
        parameters: list[Tensor],
        read: Sequence[Tensor],
        write: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        gradient_scale: float,
    ) -> None:
        """Calls the core once for each combination of device, dtype and past. Most groups have only one."""
        names = self._STATE_NAMES[: self._num_state_tensors(group)]
        absent = (0,) * (len(self._STATE_NAMES) - len(names))
        dense = [self._dense(source, gradient) for source, gradient in zip(read, gradients, strict=True)]
        pasts = self._begin_step(group, parameters)
        batches: dict[tuple[torch.device, torch.dtype, Past], list[Row]] = {}
        for parameter, source, target, gradient, past in zip(
            parameters, read, write, dense, pasts, strict=True
        ):
            dtype = source.dtype
            wide = master_dtype(dtype)
            state = (self._state_tensor(parameter, name, source, wide) for name in names)
            addresses = [tensor.data_ptr() for tensor in (source, target, gradient, *state)]
            master = 0 if wide is dtype else self._state_tensor(parameter, MASTER, source, wide).data_ptr()
            row = (source.numel(), *addresses, *absent, master)
            batches.setdefault((source.device, dtype, past), []).append(row)
        for (device, dtype, past), rows in batches.items():
            on_cuda = device.type == "cuda"
            with torch.cuda.device(device) if on_cuda else contextlib.nullcontext():
                self._run(
                    group,
                    past,
                    rows,
                    {
                        "dtype": _NATIVE_DTYPES[dtype],
                        "device": _NATIVE_DEVICES[device.type],
                        "stream": torch.cuda.current_stream().cuda_stream if on_cuda else 0,
                        "gradient_scale": gradient_scale,
                        "num_threads": _num_threads(),
                    },
                )

    def _dense(self, source: Tensor, gradient: Tensor | None) -> Tensor:
        """Returns the gradient in the layout that the weight has in memory, for example channels_last. Raises
        TypeError for a weight or a gradient that the core does not accept.
        """
        assert gradient is not None
        name = type(self).__name__
        if source.dtype not in _NATIVE_DTYPES or source.device.type not in _NATIVE_DEVICES:
            raise TypeError(
                f"pipedream.optim.{name} got a {source.dtype} parameter on {source.device}: it takes float32,"
                f" float64 and bfloat16 in host or CUDA memory; use {self._TORCH_NAME}"
            )
        if not _is_dense(source):
            raise TypeError(
                f"pipedream.optim.{name} got a parameter of shape {tuple(source.shape)} and strides"
                f" {source.stride()}, with gaps or overlaps: make it contiguous, or use {self._TORCH_NAME}"
            )
        if gradient.is_sparse:
            if not self._TAKES_SPARSE:
                raise TypeError(
                    f"pipedream.optim.{name} got a sparse gradient: use pipedream.optim.SGD, or make the"
                    " layer without sparse=True"
                )
            gradient = gradient.to_dense()
        return gradient if _fits(gradient, source, source.dtype) else torch.empty_like(source).copy_(gradient)

    def _state_tensor(self, parameter: Tensor, name: str, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the parameter's state tensor of this name. If there is none, makes one: a master is a copy
        of the weight, and any other tensor is zeros. If the weight's layout in memory has changed since the
        last step, the tensor is copied into the new layout.
        """
        state = self.state[parameter]
        tensor: Tensor | None = state.get(name)
        if tensor is None or not _fits(tensor, source, dtype):
            fresh = self._placed.get(parameter, {}).get(name)
            if fresh is None:
                fresh = torch.zeros_like(source, dtype=dtype)
            content = source if tensor is None and name == MASTER else tensor
            tensor = state[name] = fresh if content is None else fresh.copy_(content)
        return tensor

    def _own_state(self) -> None:
        """Moves the state of every parameter into the tensors of place_state(), or else into newly allocated
        ones. load_state_dict() may have left tensors that the caller still uses.
        """
        for parameter, state in self.state.items():
            places = self._placed.get(parameter, {})
            for name in (*self._STATE_NAMES, MASTER):
                tensor = state.get(name)
                if tensor is None:
                    continue
                place = places.get(name)
                if place is None:
                    place = torch.empty_like(parameter, dtype=master_dtype(parameter.dtype))
                state[name] = place.copy_(tensor)
            for name in self._SCALAR_NAMES:
                if name in state:
                    state[name] = scalar_tensor(float(state[name]))


@functools.cache
def _share_torch_threads() -> None:
    """Makes the core use torch's thread pool. Two pools in one process would compete for the CPU's cores."""
    _core.share_openmp(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _num_threads() -> int:
    _share_torch_threads()
    return torch.get_num_threads()


def check_numbers(group: Group, *names: str) -> None:
    for name in names:
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} is a tensor of {value.numel()} elements: it must have one")
        if not 0 <= float(value) < math.inf:
            raise ValueError(f"{name} is {float(value)}: it must be a finite number that is not negative")


def scalar_tensor(value: float) -> Tensor:
    """Returns a number for a parameter's state, on the host and in the dtype that torch's optimizers use."""
    return torch.tensor(value, dtype=torch.get_default_dtype(), device="cpu")


def _fits(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> bool:
    """Whether the tensor has this dtype, and the shape, strides and device of `like`."""
    return (
        tensor.stride() == like.stride()
        and tensor.shape == like.shape
        and tensor.dtype == dtype
        and tensor.device == like.device
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of memory, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    num_elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != num_elements:
            return False
        num_elements *= size
    return True
