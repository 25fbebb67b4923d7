"""Tests losses.py: losses are read at once on the host, and one item later on a device. They are reported in
order, and early enough to stop a run.
"""

from __future__ import annotations

import math

import pytest
import torch
from pipedream import NonFiniteLoss
from pipedream.report.losses import LateLossRecord, LossRecord, make_loss_record


class _Copier:
    """Stands in for a device and its pinned memory. The loss may change after it was copied, but not
    before."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._copied: torch.Tensor | None = None

    def begin(self, loss: torch.Tensor) -> None:
        assert self._copied is None, "one at a time"
        self._copied = loss.detach().clone()
        self.log.append("begin")

    def finish(self) -> float:
        assert self._copied is not None
        value, self._copied = self._copied.item(), None
        self.log.append("finish")
        return value


def _late(on_nonfinite: str = "stop") -> tuple[LateLossRecord, _Copier, list[tuple[int, float]]]:
    copier = _Copier()
    reported: list[tuple[int, float]] = []
    record = LateLossRecord(
        on_nonfinite, lambda minibatch, loss, share: reported.append((minibatch, loss)), copier
    )
    return record, copier, reported


def _loss(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def test_on_the_host_a_loss_is_read_where_it_is_added() -> None:
    reported: list[tuple[int, float]] = []
    record = make_loss_record(
        "stop", lambda minibatch, loss, share: reported.append((minibatch, loss)), torch.device("cpu")
    )
    assert type(record) is LossRecord and not record.reads_late
    record.add(0, _loss(3.0), 0.25)
    record.add(0, _loss(1.0), 0.75)
    record.close(0)
    assert reported == [(0, 1.5)]
    with pytest.raises(NonFiniteLoss, match="the loss of minibatch 1 is nan"):
        record.add(1, _loss(math.nan), 1.0)


def test_a_late_record_reads_nothing_before_it_is_asked() -> None:
    record, copier, reported = _late()
    assert record.reads_late
    record.add(0, _loss(3.0), 1.0)
    record.close(0)
    assert (copier.log, record.values, reported) == (["begin"], [], [])
    record.read_pending()
    assert (copier.log, record.values, reported) == (["begin", "finish"], [3.0], [(0, 3.0)])
    record.read_pending()
    assert copier.log == ["begin", "finish"]


def test_late_losses_are_reported_in_order_with_the_means_of_their_own_minibatches() -> None:
    # The order is that of gpipe: first all forwards of a minibatch, then its backwards. The second minibatch
    # ends with an empty microbatch.
    record, _, reported = _late()
    for value, weight in ((1.0, 0.5), (2.0, 0.25), (4.0, 0.25)):
        record.read_pending()
        record.add(0, _loss(value), weight)
    record.close(0)
    record.read_pending()
    assert reported == [(0, 2.0)]
    record.add(1, _loss(7.0), 1.0)
    record.read_pending()
    record.close(1)
    assert record.values == [2.0, 7.0]
    assert reported == [(0, 2.0), (1, 7.0)]


def test_a_late_loss_that_is_not_finite_names_its_own_minibatch() -> None:
    record, _, reported = _late()
    record.add(4, _loss(math.inf), 1.0)
    record.close(4)
    with pytest.raises(NonFiniteLoss, match="the loss of minibatch 4 is inf"):
        record.read_pending()
    assert reported == []
    record, _, reported = _late("continue")
    record.add(4, _loss(math.inf), 1.0)
    record.close(4)
    record.read_pending()
    assert reported == [(4, math.inf)]
