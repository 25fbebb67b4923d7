"""Predicts the size of the state that optimizers keep, and of the tensors that a step allocates and frees. To
find out, it makes steps on stand-ins for the parameters.

Pure; any thread.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pipedream.budget.footprint import SCALARS_BYTES, StepMeter, make_meter, storage_bytes
from pipedream.model.seeding import generators_kept
from pipedream.model.stage_module import StageModule
from pipedream.optim import MasterWeights
from pipedream.optim.master_weights import master_dtype, unwrapped

__all__ = ["native_step_bytes", "predict_state_bytes", "predict_step_bytes", "sparse_bytes"]

# Sizes of the stand-ins. If a dimension of the state has one of these sizes, it is taken for a dimension of
# the parameter.
_PROBE_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)


def predict_state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Predicts the bytes of a torch optimizer's state, by one step on tiny parameters that replace the real
    ones.
    """
    if optimizer is None:
        return 0
    probe, tiny_of = _probe_of(optimizer, _tiny_like)
    try:
        with generators_kept():
            _torch_class_of(optimizer).step(probe)
    except Exception:  # a step that needs more than parameters and gradients
        num_tensors = 3 if isinstance(optimizer, MasterWeights) else 2
        return num_tensors * sum(_sizes_in_step(optimizer))
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tiny = tiny_of[id(parameter)]
            sizes = dict(zip(_PROBE_SIZES, parameter.shape, strict=False))
            for value in probe.state[tiny].values():
                if isinstance(value, Tensor):
                    dims = [sizes.get(size, size) for size in value.shape]
                    total += math.prod(dims) * value.element_size()
    return total


# Number of temporary tensors, as large as the largest parameter, that is assumed if a step cannot be tried.
# Rprop makes three, and so does Adam with amsgrad and weight decay.
_NUM_TEMPORARIES_GUESSED = 3


# A step number that is high enough for every kind of computation in a step. For example, RAdam rectifies only
# from its sixth step on, or later.
_LATE_STEP = 10_000


def predict_step_bytes(optimizer: torch.optim.Optimizer | None, device_type: str) -> int:
    """Returns the most bytes that a torch optimizer allocates and frees in a step. To find out, it makes
    steps on parameters of the same shapes, but without memory. It uses all parameters if a step processes all
    at once, else a few."""
    if optimizer is None:
        return 0
    probe, _ = _probe_of(optimizer, _meta_like)
    for group in probe.param_groups:
        if group.get("fused"):  # meta has no fused step; a fused one works in place and takes less
            group |= {"fused": False, "foreach": False}
        elif group.get("foreach", False) is None and device_type == "cuda":
            group["foreach"] = True  # what torch chooses there
        if not group.get("foreach") and not isinstance(optimizer, MasterWeights):  # it widens all at once
            group["params"] = _each_shape_behind_each(group["params"])
    meter = StepMeter(make_meter(torch.device("meta")))
    try:
        for step_index in range(3):  # the first makes the state
            if step_index == 2 and not _advance_to(_LATE_STEP, probe):
                break
            with meter.step(), generators_kept():
                _torch_class_of(optimizer).step(probe)
    except Exception:  # also if a step reads values, which meta tensors do not have
        sizes = _sizes_in_step(optimizer)
        at_once = any(group.get("foreach") for group in probe.param_groups)
        widened = sum(sizes) if isinstance(optimizer, MasterWeights) else 0  # widened gradients
        temporaries = _NUM_TEMPORARIES_GUESSED * (sum(sizes) if at_once else max(sizes, default=0))
        return widened + temporaries + SCALARS_BYTES
    return meter.peak_bytes + SCALARS_BYTES


def _sizes_in_step(optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of each parameter in the dtype that a step computes in."""
    has_masters = isinstance(optimizer, MasterWeights)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [p.numel() * (master_dtype(p.dtype) if has_masters else p.dtype).itemsize for p in parameters]


def _each_shape_behind_each(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Returns some of the parameters. Each pair of neighbouring shapes that occurs among all parameters
    occurs among these. Pairs matter, because a step may still hold the previous parameter's temporary
    tensors, as Adam's does."""
    kept: list[nn.Parameter] = []
    shapes = [(p.shape, p.stride(), p.dtype) for p in parameters]
    pairs, last = set(), None
    for position, pair in enumerate(zip([None, *shapes], shapes, strict=False)):
        if pair in pairs:
            continue
        pairs.add(pair)
        if pair[0] != last:
            kept.append(parameters[position - 1])
        kept.append(parameters[position])
        last = pair[1]
    return kept


def _advance_to(step: int, optimizer: torch.optim.Optimizer) -> bool:
    """Sets the number of the optimizer's last step. Returns whether its steps are numbered."""
    numbered = [state for state in optimizer.state.values() if "step" in state]
    for state in numbered:
        if isinstance(state["step"], Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step
    return bool(numbered)


def native_step_bytes(stage: StageModule, num_parameters: int) -> int:
    """Returns the bytes that a step of a native optimizer needs: a step count per parameter, and sparse
    gradients made dense."""
    return 8 * num_parameters + sparse_bytes(stage) + SCALARS_BYTES


def sparse_bytes(stage: StageModule) -> int:
    """Returns the bytes of sparse gradients, made dense."""
    sparse = [
        parameter
        for module in stage.modules()
        if getattr(module, "sparse", False) is True
        for parameter in module.parameters(recurse=False)
    ]
    return storage_bytes(sparse)


def _probe_of(
    optimizer: torch.optim.Optimizer, replace_by: Callable[[Tensor], nn.Parameter]
) -> tuple[torch.optim.Optimizer, dict[int, nn.Parameter]]:
    """Returns a copy of the optimizer with other parameters and no state, and a dict: id of an original
    parameter -> the parameter that replaces it."""
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    replaced: dict[int, nn.Parameter] = {}
    probe.param_groups = []
    for group in optimizer.param_groups:
        probe_group = {name: value for name, value in group.items() if name != "params"}
        probe_group["params"] = [replaced.setdefault(id(p), replace_by(p)) for p in group["params"]]
        probe.param_groups.append(probe_group)
    return probe, replaced


def _meta_like(parameter: Tensor) -> nn.Parameter:
    meta = nn.Parameter(torch.empty_like(parameter, device="meta"))
    meta.grad = torch.empty_like(meta)
    return meta


def _torch_class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Returns the optimizer's class, or its nearest base class from torch or pipedream. The step() of a
    user's class is not tried, because it may have other effects. Raises TypeError for MasterWeights around a
    user's class."""
    ours = ("torch.optim.", "pipedream.optim.")
    if not f"{type(unwrapped(optimizer)).__module__}.".startswith(ours) and isinstance(
        optimizer, MasterWeights
    ):
        raise TypeError(f"{type(unwrapped(optimizer)).__name__} has a step of its own")
    known = [kind for kind in type(optimizer).__mro__ if f"{kind.__module__}.".startswith(ours)]
    kind: type[torch.optim.Optimizer] = known[0]
    return kind


def _tiny_like(parameter: Tensor) -> nn.Parameter:
    shape = _PROBE_SIZES[: parameter.dim()]
    tiny = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    tiny.grad = torch.zeros_like(tiny)
    return tiny
