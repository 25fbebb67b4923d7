"""The time of the product of factors that replicas push (docs/parameter-server.md), for the profile. On the
caller's thread.

A replica makes one product of all replicas' rows, so writes the weight's gradient once: what each more of
them takes is the slope between few rows and many.
"""

from __future__ import annotations

import torch

from pipedream.model.clock import Clock

__all__ = ["product_ms_per_replica"]

_MANY = 4  # times the rows of one replica
_NUM_TRIES = 3  # of which the least counts


def product_ms_per_replica(weight: torch.Tensor, num_rows: int, clock: Clock) -> float:
    """Milliseconds, of each replica's num_rows besides the first one's."""
    num_outputs, num_inputs = weight.shape

    def least_ms(times: int) -> float:
        gradients = weight.new_ones(times * num_rows, num_outputs)
        inputs = weight.new_ones(times * num_rows, num_inputs)
        clock.start_minibatch()
        for _ in range(_NUM_TRIES):
            clock.start()
            torch.mm(gradients.t(), inputs)
            clock.stop()
        return min(clock.finish_minibatch())

    with torch.no_grad():
        return max(0.0, least_ms(_MANY) - least_ms(1)) / (_MANY - 1)
