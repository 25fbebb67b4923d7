"""The scale of a float16 loss as it goes through the stages: taken at the last stage from what has overflowed
anywhere so far, told upstream with the gradients. Owned by the worker's compute thread.

    overflow   upstream --activations--> downstream, the last stage scales the loss
    scale      upstream <--gradients---- downstream
"""

from __future__ import annotations

from pipedream.model.precision import LossScaler

__all__ = ["LossScaling"]


class LossScaling:
    """At one stage."""

    def __init__(self, scaler: LossScaler | None) -> None:
        """scaler: at the last stage."""
        self._scaler = scaler
        self.scale = 1.0
        """Of the minibatch that is being forwarded; at the last stage."""

    def begin_minibatch(self, *, overflowed: bool) -> None:
        """overflowed: at this stage or upstream, since the minibatch before."""
        if self._scaler is not None:
            self.scale = self._scaler.next_scale(overflowed)
