"""Predicts the bytes of an optimizer's state, and the bytes that a step allocates and frees. To find out, it
makes steps on small or empty stand-ins for the parameters. Pure; any thread.
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

# The dimensions of the stand-ins: a parameter of two dimensions gets one of shape (2, 3). If a dimension of
# the state is 2, it is taken for the parameter's first dimension, and so on.
_PROBE_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)


def predict_state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Predicts the bytes of a torch optimizer's state, by one step on tiny stand-ins for the parameters."""
    if optimizer is None:
        return 0
    probe, tiny_of = _probe_of(optimizer, _tiny_like)
    try:
        with generators_kept():
            _torch_class_of(optimizer).step(probe)
    except Exception:  # the step needs more than parameters and gradients, so the state is guessed
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


# The number of temporary tensors, each as large as its parameter, that a step is assumed to make if it cannot
# be tried. Rprop makes three, and so does Adam with amsgrad and weight decay.
_NUM_TEMPORARIES_GUESSED = 3


# Some optimizers compute more in later steps: RAdam rectifies from its sixth step on, or later. At this
# number every optimizer does all of its computations.
_LATE_STEP = 10_000


def predict_step_bytes(optimizer: torch.optim.Optimizer | None, device_type: str) -> int:
    """Returns the most bytes that a torch optimizer allocates and frees in a step. To find out, it makes
    steps on "meta" parameters, which have the real shapes but no memory. All parameters take part if a step
    processes all at once (foreach, MasterWeights), otherwise only some."""
    if optimizer is None:
        return 0
    probe, _ = _probe_of(optimizer, _meta_like)
    for group in probe.param_groups:
        if group.get("fused"):  # there is no fused step on meta tensors; it would take less memory
            group |= {"fused": False, "foreach": False}
        elif group.get("foreach", False) is None and device_type == "cuda":
            group["foreach"] = True  # on CUDA torch chooses foreach by itself
        # MasterWeights widens all gradients at once, so it needs all parameters.
        if not group.get("foreach") and not isinstance(optimizer, MasterWeights):
            group["params"] = _each_shape_behind_each(group["params"])
    meter = StepMeter(make_meter(torch.device("meta")))
    try:
        for step_index in range(3):  # the first step makes the state, the third counts as a late step
            if step_index == 2 and not _advance_to(_LATE_STEP, probe):
                break
            with meter.step(), generators_kept():
                _torch_class_of(optimizer).step(probe)
    except Exception:  # for example if the step reads values, which meta tensors do not have
        sizes = _sizes_in_step(optimizer)
        at_once = any(group.get("foreach") for group in probe.param_groups)
        # MasterWeights makes a copy of every gradient in the masters' dtype.
        widened = sum(sizes) if isinstance(optimizer, MasterWeights) else 0
        temporaries = _NUM_TEMPORARIES_GUESSED * (sum(sizes) if at_once else max(sizes, default=0))
        return widened + temporaries + SCALARS_BYTES
    return meter.peak_bytes + SCALARS_BYTES


def _sizes_in_step(optimizer: torch.optim.Optimizer) -> list[int]:
    """Returns the bytes of each parameter, in the dtype that a step computes in."""
    has_masters = isinstance(optimizer, MasterWeights)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [p.numel() * (master_dtype(p.dtype) if has_masters else p.dtype).itemsize for p in parameters]


def _each_shape_behind_each(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Returns some of the parameters. Every pair of neighbouring shapes that occurs among all parameters also
    occurs among the returned ones. Pairs matter, because a step may still hold the previous parameter's
    temporary tensors, as Adam's does."""
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
    """Sets the optimizer's step count to `step`. Returns whether the optimizer counts its steps."""
    numbered = [state for state in optimizer.state.values() if "step" in state]
    for state in numbered:
        if isinstance(state["step"], Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step
    return bool(numbered)


def native_step_bytes(stage: StageModule, num_parameters: int) -> int:
    """Returns the bytes that a step of a native optimizer needs: a step count per parameter, and dense copies
    of sparse gradients."""
    return 8 * num_parameters + sparse_bytes(stage) + SCALARS_BYTES


def sparse_bytes(stage: StageModule) -> int:
    """Returns the bytes of dense copies of the stage's sparse gradients."""
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
    """Returns a copy of the optimizer with stand-ins as parameters and without state. Also returns the
    stand-ins, by the id of the parameter that each one replaces."""
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
    """Returns the optimizer's nearest class that is torch's or pipedream's. The step() of a user's class is
    not tried, because it may have other effects. Raises TypeError for MasterWeights around a user's class."""
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
