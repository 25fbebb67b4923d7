"""EMA makes the stages compute an exponential moving average of their weights."""

from __future__ import annotations

from pipedream.callbacks.callback import Callback

__all__ = ["EMA"]


class EMA(Callback):
    """Keeps exponential moving averages of the weights, one average for each trained parameter.

    After each update, average = decay * average + (1 - decay) * weights. The first average is the weights
    after the first update, as in torch.optim.swa_utils.AveragedModel. With schedule="flush" and one
    microbatch the averages have the same bits as torch's. Validation(ema=True) evaluates the averages,
    RunResult.ema has them at the end, and checkpoints keep them. Raises ValueError for a decay that is not
    between 0 and 1.
    """

    decides = False

    def __init__(self, decay: float = 0.999) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay of EMA is {decay!r}: use a number between 0 and 1")
        self.decay = decay
