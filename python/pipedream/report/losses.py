"""Records the losses of the last stage, one per minibatch, in order. A loss that is not finite may stop the
run.

On the host a loss is read at once. On a GPU the read would wait until the forward is done, and the GPU would
idle until the backward is launched. So the loss is copied after the forward, and read when the stage's next
forward, backward or update has been launched:

    host    launch F | launch B |  read F's loss  | send B's gradients, update
    device      | F     copy | B                   | ...

A loss is read before the gradients of its backward are sent or used in an update. So if on_nonfinite="stop"
stops the run, neither that loss's minibatch nor a later one has changed any weight. The exception is
sync="asp": another replica may be ahead and may have updated weights. The worker's compute thread owns the
record.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from pipedream.common.errors import NonFiniteLoss

__all__ = ["LateLossRecord", "LossCopier", "LossRecord", "make_loss_record"]


class LossRecord:
    """The part of each minibatch's loss that this replica computes. A microbatch adds its loss times its
    share of the minibatch. The parts of all replicas add up to the minibatch's mean loss."""

    reads_late = False
    """Whether losses are read late. If so, read_pending() must be called after each add(): before the next
    add(), and before the gradients of the microbatch's backward are used."""

    def __init__(self, on_nonfinite: str, on_minibatch: Callable[[int, float, float], None]) -> None:
        self.values: list[float] = []
        self.parts: deque[float] | None = None
        """The weighted losses of the microbatches whose backwards have not run, oldest first. None if nobody
        needs them."""
        self._on_nonfinite = on_nonfinite
        self._on_minibatch = on_minibatch
        self._sum = 0.0
        self._share = 0.0

    def add(self, minibatch: int, loss: Tensor, weight: float) -> None:
        """Adds the loss of a microbatch whose forward has just run."""
        self._add(minibatch, loss.item(), weight)

    def close(self, minibatch: int) -> None:
        """Ends a minibatch. Call it when the losses of all its microbatches have been added."""
        value, share, self._sum, self._share = self._sum, self._share, 0.0, 0.0
        self.values.append(value)
        self._on_minibatch(minibatch, value, share)

    def read_pending(self) -> None:
        """Reads the loss that was added last, if losses are read late. Call it when the next forward,
        backward or update has been launched."""

    def _add(self, minibatch: int, value: float, weight: float) -> None:
        if not math.isfinite(value) and self._on_nonfinite == "stop":
            raise NonFiniteLoss(
                f"the loss of minibatch {minibatch} is {value}: lower the learning rate or check the data"
                " (and, of a module that is cut, whether its forward reads something there that it did not"
                ' read in the first minibatch), or go on with on_nonfinite="continue"'
            )
        part = value if weight == 1.0 else value * weight
        self._sum += part
        self._share += weight
        if self.parts is not None:
            self.parts.append(part)


class LossCopier:
    """Copies one loss at a time from the device to pinned memory. An event on the current stream shows when
    the copy is done."""

    def __init__(self) -> None:
        self._landed: dict[torch.dtype, Tensor] = {}
        # With blocking=True the waiting thread sleeps, so the transport's thread gets the CPU core.
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._newest = torch.empty(0)

    def begin(self, loss: Tensor) -> None:
        """Begins a copy of the loss. The copy runs after all work that the current stream has so far."""
        if loss.dtype not in self._landed:
            self._landed[loss.dtype] = torch.empty((), dtype=loss.dtype, pin_memory=True)
        self._newest = self._landed[loss.dtype]
        self._newest.copy_(loss.detach(), non_blocking=True)
        self._copied.record()

    def finish(self) -> float:
        """Waits for the copy, and returns the loss."""
        self._copied.synchronize()
        return self._newest.item()


class LateLossRecord(LossRecord):
    """The record for losses on a GPU, which are read after the next work has been launched."""

    reads_late = True

    def __init__(
        self, on_nonfinite: str, on_minibatch: Callable[[int, float, float], None], copier: LossCopier
    ) -> None:
        super().__init__(on_nonfinite, on_minibatch)
        self._copier = copier
        self._under_way: tuple[int, float] | None = None  # minibatch and weight of the loss that is copied
        self._closing: int | None = None  # the minibatch that ends when this loss has been read

    def add(self, minibatch: int, loss: Tensor, weight: float) -> None:
        assert self._under_way is None
        self._copier.begin(loss)
        self._under_way = (minibatch, weight)

    def close(self, minibatch: int) -> None:
        if self._under_way is None:
            super().close(minibatch)
        else:
            self._closing = minibatch

    def read_pending(self) -> None:
        if self._under_way is None:
            return
        minibatch, weight = self._under_way
        self._under_way = None
        self._add(minibatch, self._copier.finish(), weight)
        closing, self._closing = self._closing, None
        if closing is not None:
            super().close(closing)


def make_loss_record(
    on_nonfinite: str, on_minibatch: Callable[[int, float, float], None], device: torch.device
) -> LossRecord:
    """Makes the record for the device. on_nonfinite: as in run(). on_minibatch: called for each minibatch in
    order, as on_minibatch(minibatch, loss, share). share: this replica's share of the minibatch.
    """
    if device.type == "cpu":
        return LossRecord(on_nonfinite, on_minibatch)
    return LateLossRecord(on_nonfinite, on_minibatch, LossCopier())
