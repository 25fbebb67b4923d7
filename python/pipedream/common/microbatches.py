"""Microbatches: a minibatch whose microbatches the data have made. Pure; any thread; needs no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["Microbatches"]


class Microbatches(list[Any]):
    """A minibatch that comes in its microbatches: a list of batches, each as `data` may yield it.

    Each batch is taken as one microbatch, uncut, so shapes may differ from batch to batch, as where a
    collator pads each to its own longest text. `run` takes as many as its `microbatches`, or fewer, as
    at the end of an epoch. If `data` yields one minibatch so, it yields all of them so.

        data = [pipedream.Microbatches(batches[i : i + 4]) for i in range(0, len(batches), 4)]
        pipedream.run(model, plan, data=data, microbatches=4, ...)
    """

    # A list and no tuple: a DataLoader with pin_memory keeps the class of lists alone.
