"""Muon trains a stage's matrices. Another optimizer inside it trains the stage's other parameters. Used by
one thread at a time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pipedream.optim.adam import NAdamW
from pipedream.optim.master_weights import loss_of

__all__ = ["Muon"]

# Words in a parameter's name that mark an embedding or a head, which Muon should not train.
_NO_HIDDEN_WORDS = re.compile(
    r"emb|wte|wpe|vocab|(^|[._])(head|heads|lm_head|classifier|score|logits|fc_out)([._]|$)", re.IGNORECASE
)


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and min(parameter.shape) > 1 and not _NO_HIDDEN_WORDS.search(name)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) for hidden matrices, and another optimizer for all other parameters.

        optimizer = functools.partial(pipedream.optim.Muon, lr=0.02, weight_decay=0.1)

    named_parameters: (name, parameter) pairs. `run` passes these to a factory with an argument of this name.
    matrices: (name, parameter) -> bool, whether Muon trains the parameter. The default chooses
        two-dimensional parameters, none of size 1 in a dimension, whose names contain no word for an
        embedding or a head. If the model is a list of layers, names are numbers, so give a function of your
        own.
    rest: (parameters) -> the other optimizer. The default is NAdamW with the same lr and weight_decay.
    adjust_lr_fn: the default "match_rms_adamw" makes updates as large as AdamW's, so that one learning rate
        suits both.
    options: all other options of torch.optim.Muon.

    Replicas of a stage own whole tensors, because Muon needs a whole matrix. Raises ValueError for torch
    older than 2.9, which has no Muon, and if `matrices` chooses a parameter that does not have two
    dimensions.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        matrices: Callable[[str, Tensor], bool] = _is_hidden_matrix,
        rest: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        adjust_lr_fn: str | None = "match_rms_adamw",
        **options: Any,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"torch {torch.__version__} has no torch.optim.Muon: install torch 2.9 or later")
        named = list(named_parameters)
        chosen = {name: parameter for name, parameter in named if matrices(name, parameter)}
        others = {name: parameter for name, parameter in named if name not in chosen}
        make_muon: Callable[[list[Tensor]], torch.optim.Optimizer] = functools.partial(
            torch.optim.Muon, lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn, **options
        )
        make_rest = rest or functools.partial(NAdamW, lr=lr, weight_decay=weight_decay)
        self._parts = {
            part: make(list(parameters.values()))
            for part, make, parameters in (("muon", make_muon, chosen), ("rest", make_rest, others))
            if parameters
        }
        self._names = {"muon": list(chosen), "rest": list(others)}
        groups = [group | {"part": part} for part, made in self._parts.items() for group in made.param_groups]
        super().__init__(groups, {})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_parts": self._parts, "_names": self._names}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters in place from their .grad."""
        loss = loss_of(closure)
        for part, optimizer in self._parts.items():
            # The groups are read at every step, because a scheduler changes their options and a pipeline
            # changes their parameters.
            optimizer.param_groups = [group for group in self.param_groups if group["part"] == part]
            optimizer.state = self.state
            optimizer.step()
        return loss

    def describe(self) -> str:
        """Returns a line that says which parameters each of the two optimizers trains."""
        told = []
        for part, optimizer in self._parts.items():
            names = self._names[part]
            listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            told.append(f"{type(optimizer).__name__} trains {listed}")
        return "; ".join(told)
