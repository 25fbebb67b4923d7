"""Defines the values of run(autocast=...), contexts for autocast, and the loss scale that float16 needs.

The last stage's compute thread owns the LossScaler. The functions need no owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = [
    "LossScaler",
    "autocast_dtype",
    "autocast_left",
    "autocast_region",
    "casts_not_kept",
    "num_steps_in_flight",
]

_DEVICES = ("cpu", "cuda")

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}


def autocast_dtype(autocast: Any) -> torch.dtype | None:
    """Returns the dtype that `run(autocast=...)` names; None for no autocast. Raises ValueError for other
    values.
    """
    if autocast is None:
        return None
    try:
        return _DTYPES[autocast]
    except (KeyError, TypeError):
        raise ValueError(f"autocast is {autocast!r}: use 'bfloat16', 'float16' or None") from None


def autocast_region(device_type: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for one forward. Each forward needs its own region. Within one region torch caches
    casts of parameters, so a second forward would use the casts of another weight version.
    """
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype)


@contextlib.contextmanager
def casts_not_kept() -> Iterator[None]:
    """In the with block, every use of a parameter casts it again, also in autocast regions that the model
    itself opens. If casts were kept, a later call could use an earlier call's cast. A trace would then show
    the cast as a tensor that crosses the cut between the two calls, although each stage makes its own casts.
    """
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps)


@contextlib.contextmanager
def autocast_left() -> Iterator[dict[str, torch.dtype]]:
    """Suspends the caller's autocast regions in the with block, including regions that turn autocast off. A
    region caches casts of parameters until it ends, so a stage opens a new region for each forward instead.
    Yields the dtypes of the caller's regions that were on, by device type.
    """
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in _DEVICES if torch.is_autocast_enabled(kind)}
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    for kind in dtypes:
        torch.set_autocast_enabled(kind, False)
    try:
        yield dtypes
    finally:
        for kind in dtypes:
            torch.set_autocast_enabled(kind, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def num_steps_in_flight(
    in_flight: int, num_replicas_first: int, num_replicas_last: int, microbatches_per_step: int
) -> int:
    """Returns the number of loss scales that may be in use at once, because microbatches with older scales
    may still be in flight. This holds for schedules that do not drain the pipeline before an update.

    in_flight: microbatches in flight at each replica of the first stage. microbatches_per_step: number of
    consecutive microbatches with the same scale.
    """
    others = in_flight * num_replicas_first - num_replicas_last
    steps = 1 + max(0, -(-others // microbatches_per_step))
    # Replicas of the last stage learn about each other's overflows one update later, so one more scale may be
    # in use.
    return steps if num_replicas_last == 1 else steps + 1


class LossScaler:
    """The factor by which each minibatch's loss is scaled in float16. It is halved after an overflow, and
    doubled after a long time without overflow. With replicas, all minibatches between two updates of the
    last stage have one scale.

    Source: Micikevicius et al., Mixed Precision Training (ICLR'18), section 3.2, with the figures of
    torch.amp.GradScaler.
    """

    INITIAL_SCALE = 65536.0
    GROWTH_INTERVAL = 2000
    _SCALE_MIN = 2.0**-14

    def __init__(self, num_steps_between_backoffs: int) -> None:
        """num_steps_between_backoffs: the least number of calls of next_scale() between two halvings.
        Minibatches that were in flight with the old scale may overflow as well, and must not halve the new
        scale.
        """
        self._distance = num_steps_between_backoffs
        self._scale = self.INITIAL_SCALE
        self._since_backoff = num_steps_between_backoffs
        self._since_change = -1  # the first call opens minibatch 0, which nothing preceded

    def state(self) -> list[float]:
        """Returns the state as numbers, for go_on()."""
        return [self._scale, self._since_backoff, self._since_change]

    def go_on(self, state: Sequence[float]) -> None:
        self._scale, since_backoff, since_change = state
        self._since_backoff, self._since_change = int(since_backoff), int(since_change)

    def next_scale(self, overflowed: bool) -> float:
        """Returns the scale of the minibatches up to the next update. overflowed: whether some stage
        reported a gradient that is not finite since the last call.
        """
        self._since_backoff += 1
        self._since_change += 1
        if overflowed and self._since_backoff >= self._distance:
            self._scale = max(self._scale / 2, self._SCALE_MIN)
            self._since_backoff = self._since_change = 0
        elif self._since_change >= self.GROWTH_INTERVAL:
            self._scale *= 2
            self._since_change = 0
        return self._scale
