"""Microbatches is a minibatch that the data have already cut. Pure; any thread; needs no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["Microbatches"]


class Microbatches(list[Any]):
    """A minibatch that comes as its microbatches: a list of batches, each in a form that `data` may yield.

    Each batch is one microbatch and is not cut. Shapes may differ between batches, for example if a collator
    pads each batch to its own longest text. `run` accepts as many batches as its `microbatches`, or fewer, as
    at the end of an epoch. Each batch updates the running statistics of batch norm, as in a loop that
    accumulates gradients. If `data` yields one minibatch in this form, it must yield all minibatches in this
    form.

        data = [pipedream.Microbatches(batches[i : i + 4]) for i in range(0, len(batches), 4)]
        pipedream.run(model, plan, data=data, microbatches=4, ...)
    """

    # The base class is list and not tuple, because a DataLoader with pin_memory keeps the class of lists
    # only.
