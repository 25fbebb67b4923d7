"""What a library keeps of a module's class, filled in by constructors: a module that was sent has run none.

transformers looks up there which outputs of inner modules (the router logits of a mixture of experts) a
model's forward collects; without the entry they are None. Stateless; the thread that rebuilds a model.
"""

from __future__ import annotations

import sys
from typing import Any

from pipedream.model.layers import Model, roots_of

__all__ = ["register_classes"]

_OUTPUTS_MODULES = ("transformers.utils.output_capturing", "transformers.utils.generic")  # the newer first


def register_classes(model: Model) -> None:
    """Does for each module of the model what its constructor did in the process that made it."""
    modules = [module for _, root in roots_of(model) for module in root.modules()]
    for name in _OUTPUTS_MODULES:
        registry: Any = getattr(sys.modules.get(name), "_CAN_RECORD_REGISTRY", None)
        if registry is None:
            continue
        for module in modules:
            if hasattr(module, "_can_record_outputs"):
                # By the class's text in all versions, though newer ones are given the module.
                dict.__setitem__(registry, str(type(module)), module._can_record_outputs)
        return
