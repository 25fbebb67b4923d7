"""Saves and restores the state of modules whose forward runs for another reason than training: a trace, a
check, a profile or a rehearsal. Stateless; used on the thread that runs the module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pipedream.common.errors import afterwards
from pipedream.model.contents import Contents, overwriting
from pipedream.model.global_names import GlobalNames
from pipedream.model.references import modules_carried_by
from pipedream.model.seeding import RngState

__all__ = ["Attributes", "untouched"]

# Attributes that every module has. Contents does not look into them.
_OF_ANY_MODULE = frozenset(vars(nn.Module()))
# A module's tables of hooks. Models of transformers install hooks in their first forward, and set an
# attribute so that they do it once. So both the hooks and the attribute must be restored.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)

# Parameters up to this size are saved: scales, shifts and step sizes, which layers may set by their first
# minibatch. Larger parameters are weights. Saving weights would take a second model's memory.
_SMALL_BYTES = 64 * 1024

Hooks = dict[str, dict[int, Any]]


@contextlib.contextmanager
def untouched(modules: Iterable[nn.Module], loss_fn: Any = None) -> Iterator[None]:
    """Layers and the loss may run in the with block. Afterwards their state is as it was before.

    Saved and restored are:
    - all random number generators,
    - buffers, both contents and objects,
    - each parameter's .grad (None in the with block) and requires_grad,
    - the contents of small parameters, which a forward may set by its first minibatch,
    - training flags and all other attributes of modules: a counter, `initialised`, the tensors of a memory
      bank. Otherwise a layer would treat the first minibatch of the training as its second.
    - numbers and tensors in global names in which the modules' code counts.

    The modules include those that the loss can reach.
    """
    roots = [*modules, *modules_carried_by(loss_fn)]
    all_modules = _modules_inside(roots)
    attributes = Attributes(roots, GlobalNames(all_modules, loss_fn))
    parameters = {id(p): p for module in all_modules for p in module.parameters(recurse=False)}
    buffers = {id(b): b for module in all_modules for b in module.buffers(recurse=False)}
    contents = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    rng_state = RngState.capture()
    former = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters.values()]
    for parameter, _, _ in former:
        parameter.grad = None
    set_back = [overwriting(p) for p in parameters.values() if p.nbytes <= _SMALL_BYTES]

    def restore() -> None:
        attributes.restore()
        for parameter, gradient, requires_grad in former:
            parameter.grad = gradient
            parameter.requires_grad_(requires_grad)
        for put_back in set_back:
            put_back()
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)
        rng_state.restore()

    with afterwards(restore):
        yield


class Attributes:
    """The state that modules have now, which restore() sets again. The contents of parameters and buffers are
    left out. The contents of an object that changed in place are restored (contents.py).
    """

    def __init__(self, modules: Iterable[nn.Module], global_names: GlobalNames) -> None:
        """global_names: the names in which the modules' code counts."""
        all_modules = _modules_inside(modules)
        self._of = [
            (module, dict(vars(module)), dict(module._buffers), _hooks_of(module)) for module in all_modules
        ]
        self._contents = Contents(all_modules)
        self._restore_global_names = global_names.kept()
        for _, attributes, _, _ in self._of:
            self._contents.keep(attributes[name] for name in attributes.keys() - _OF_ANY_MODULE)

    def restore(self) -> None:
        self._contents.restore()
        self._restore_global_names()
        for module, attributes, buffers, hooks in self._of:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            _restore_hooks(module, hooks)


def _modules_inside(roots: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for root in roots for module in root.modules()}.values())


def _hooks_of(module: nn.Module) -> Hooks:
    return {name: dict(vars(module)[name]) for name in _HOOKS if name in vars(module)}


def _restore_hooks(module: nn.Module, hooks: Hooks) -> None:
    for name, table in hooks.items():
        now = vars(module)[name]
        if len(now) != len(table) or any(key not in table for key in now):
            now.clear()
            now.update(table)
