"""The weight versions of one stage, bound to its modules without a copy, and the optimizer that makes them.

The core keeps K flat slots, one per live version. Each (slot, unique parameter) is one autograd leaf that
views its slot. A forward binds the modules' `_parameters` to the leaves of its version (design.md,
section 4). Owned by the worker's compute thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import _core, optim
from .splitter import StageModule

__all__ = ["StageOptimizer", "StageWeights", "build_optimizer", "weight_layout"]

_Container = dict[str, Any] | list[Any]


def weight_layout(stage: StageModule) -> tuple[int, list[int]]:
    """(bytes of one version, offset of each unique trainable parameter) in a flat slot."""
    return _core.weight_layout(
        [(name, str(p.dtype).removeprefix("torch."), p.numel()) for name, p in stage.trainable_parameters()]
    )


class StageWeights:
    """`slots` are flat uint8 tensors, one per version kept; version 0 is copied into slot 0."""

    def __init__(self, stage: StageModule, slots: list[Tensor], offsets: list[int]) -> None:
        named = stage.trainable_parameters()
        self.names = [name for name, _ in named]
        self._originals = [parameter for _, parameter in named]
        self._slots = slots
        self._sites = _find_sites(stage, self._originals)
        self._leaves = [
            [_make_leaf(slot, offset, p) for offset, p in zip(offsets, self._originals, strict=True)]
            for slot in slots
        ]
        # What binding writes, flat, so that it is one short loop: (container, key, leaf).
        self._bindings = [
            [(container, key, leaves[parameter]) for parameter, container, key in self._sites]
            for leaves in self._leaves
        ]
        self._bound_slot = -1
        with torch.no_grad():
            for leaf, original in zip(self._leaves[0], self._originals, strict=True):
                leaf.copy_(original)

    def bind(self, slot: int) -> None:
        """Makes the modules read the version in the slot."""
        if slot == self._bound_slot:
            return
        for container, key, leaf in self._bindings[slot]:
            container[key] = leaf
        self._bound_slot = slot

    def leaves(self, slot: int) -> list[nn.Parameter]:
        return self._leaves[slot]

    def copy_version(self, read_slot: int, write_slot: int) -> None:
        self._slots[write_slot].copy_(self._slots[read_slot])

    def restore(self, slot: int) -> None:
        """Gives the modules their own parameters back, with the values of the version in the slot."""
        with torch.no_grad():
            for leaf, original in zip(self._leaves[slot], self._originals, strict=True):
                original.copy_(leaf)
        for parameter, container, key in self._sites:
            container[key] = self._originals[parameter]
        self._bound_slot = -1


def _make_leaf(slot: Tensor, offset: int, original: nn.Parameter) -> nn.Parameter:
    num_bytes = original.numel() * original.element_size()
    flat = slot[offset : offset + num_bytes].view(original.dtype)
    # The strides of the original too: kernels choose by them (channels_last), and so do their roundings.
    view = (
        flat.as_strided(original.shape, original.stride())
        if _is_dense(original)
        else flat.view(original.shape)
    )
    # .data: a leaf with a version counter of its own. Plain views share their base's, and writing one
    # slot would make the backward of another fail falsely.
    leaf = nn.Parameter(view.data)
    leaf.__dict__.update(original.__dict__)  # marks such as `no_weight_decay`
    return leaf


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory from first to last without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _find_sites(stage: StageModule, originals: list[nn.Parameter]) -> list[tuple[int, _Container, Any]]:
    """Every place that holds a trainable parameter: (its index, container, key). Tied ones have several."""
    index_of = {id(parameter): index for index, parameter in enumerate(originals)}
    sites: list[tuple[int, _Container, Any]] = []
    for module in stage.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in index_of:
                sites.append((index_of[id(parameter)], module._parameters, key))
        # Recurrent layers read their weights from a list beside _parameters.
        flat_weights = getattr(module, "_flat_weights", None)
        if isinstance(flat_weights, list):
            for position, parameter in enumerate(flat_weights):
                if id(parameter) in index_of:
                    sites.append((index_of[id(parameter)], flat_weights, position))
    return sites


def build_optimizer(
    factory: Callable[..., torch.optim.Optimizer], names: list[str], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Calls the user's factory with the parameters, or with (name, parameter) pairs if it asks for them."""
    optimizer = factory(list(zip(names, parameters, strict=True)) if _wants_names(factory) else parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer returned {type(optimizer).__name__}: it must return a torch.optim.Optimizer, as"
            " functools.partial(torch.optim.SGD, lr=0.1) does"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer LBFGS needs a closure, which a pipeline cannot give; use another")
    return optimizer


def _wants_names(factory: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # no signature to be had: a builtin
        return False
    return bool(parameters) and parameters[0] == "named_parameters"


def _make_master(leaf: nn.Parameter) -> nn.Parameter:
    master = nn.Parameter(leaf.data)
    master.__dict__.update(leaf.__dict__)
    return master


class StageOptimizer:
    """Makes version v + 1 from version v and a minibatch's gradients.

    A native optimizer writes it in one pass. Any torch optimizer works on master parameters that are
    pointed at a copy of v in the new slot.
    """

    def __init__(self, factory: Callable[..., torch.optim.Optimizer], weights: StageWeights) -> None:
        self._weights = weights
        self._masters = [_make_master(leaf) for leaf in weights.leaves(0)]
        # A stage without parameters has nothing to optimize, and torch refuses an empty list.
        self.optimizer: torch.optim.Optimizer | None = None
        if self._masters:
            self.optimizer = build_optimizer(factory, weights.names, self._masters)
            self._check_parameters(self.optimizer)
        # Exactly: a subclass may have a step of its own.
        self._native = type(self.optimizer) is optim.SGD and self._keeps_order(self.optimizer)

    def _check_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        given = {id(master) for master in self._masters}
        if any(id(p) not in given for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "optimizer was made of other parameters than those it was called with: use its argument, as"
                " in lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            )

    def _keeps_order(self, optimizer: torch.optim.Optimizer) -> bool:
        # A factory may sort parameters into groups; the native step takes them in the given order. Hooks
        # belong to step().
        listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        return listed == [id(p) for p in self._masters] and not hooked

    def step(self, gradient_slot: int, read_slot: int, write_slot: int) -> None:
        """gradient_slot: of the version whose leaves hold the gradients. They are given up here."""
        source = self._weights.leaves(gradient_slot)
        gradients = [leaf.grad for leaf in source]
        for leaf in source:
            leaf.grad = None
        if self.optimizer is None:
            return
        if self._native:
            assert isinstance(self.optimizer, optim.SGD)  # for the type checker
            self.optimizer.step_out_of_place(
                self._weights.leaves(read_slot), self._weights.leaves(write_slot), gradients
            )
            return
        if write_slot != read_slot:
            self._weights.copy_version(read_slot, write_slot)
        written = self._weights.leaves(write_slot)
        for master, leaf, gradient in zip(self._masters, written, gradients, strict=True):
            master.data = leaf.data
            master.grad = gradient
        self.optimizer.step()
        for master, leaf in zip(self._masters, written, strict=True):
            master.grad = None
            if master.data_ptr() != leaf.data_ptr():  # the optimizer replaced .data instead of writing it
                with torch.no_grad():
                    leaf.copy_(master)
