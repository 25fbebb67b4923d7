"""Precision: what `autocast` may be, and the loss scale that float16 needs.

Pure values and one small rule; the last stage's compute thread owns the scaler.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["LossScaler", "autocast_dtype", "autocast_region"]

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}


def autocast_dtype(autocast: Any) -> torch.dtype | None:
    """The dtype that `run(autocast=...)` names; None for no autocast. Raises ValueError for another."""
    if autocast is None:
        return None
    try:
        return _DTYPES[autocast]
    except (KeyError, TypeError):
        raise ValueError(f"autocast is {autocast!r}: use 'bfloat16', 'float16' or None") from None


def autocast_region(device_type: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Around one forward. Each is a region of its own: inside one, torch caches the casts of parameters, and
    would take those of another weight version for these (facts: the autocast weight cache)."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype)


class LossScaler:
    """The scale of each minibatch's loss in float16: halved after an overflow, doubled after a long time
    without one. Source: Micikevicius et al., Mixed Precision Training (ICLR'18), section 3.2, with the
    figures of torch.amp.GradScaler."""

    INITIAL_SCALE = 65536.0
    GROWTH_INTERVAL = 2000
    _SCALE_MIN = 2.0**-14

    def __init__(self, num_minibatches_between_backoffs: int) -> None:
        """num_minibatches_between_backoffs: at least so many lie between two; overflows of minibatches that
        were under way with the scale that was too large say nothing new."""
        self._distance = num_minibatches_between_backoffs
        self._scale = self.INITIAL_SCALE
        self._since_backoff = num_minibatches_between_backoffs
        self._since_change = -1  # the first call opens minibatch 0, which nothing preceded

    def next_scale(self, overflowed: bool) -> float:
        """The scale of the next minibatch. overflowed: whether a gradient since the last call was not
        finite, at any stage that could tell so far."""
        self._since_backoff += 1
        self._since_change += 1
        if overflowed and self._since_backoff >= self._distance:
            self._scale = max(self._scale / 2, self._SCALE_MIN)
            self._since_backoff = self._since_change = 0
        elif self._since_change >= self.GROWTH_INTERVAL:
            self._scale *= 2
            self._since_change = 0
        return self._scale
