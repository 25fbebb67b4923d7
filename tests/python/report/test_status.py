"""Tests StatusBoard: what it still says after a worker has died."""

from __future__ import annotations

import struct
from pathlib import Path

from pipedream.report.status import StatusBoard


def test_the_losses_so_far_are_there_after_the_worker_that_had_them(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "board", 2, create=True)
    assert board.losses() == []
    worker = StatusBoard(tmp_path / "board", 2, create=False)
    for loss in (0.1, float("inf"), 0.3):
        worker.add_loss(loss)
    assert board.losses() == [0.1, float("inf"), 0.3]
    with (tmp_path / "board-losses-0").open("r+b") as file:
        file.seek(8 * 4)
        file.write(struct.pack("<d", 0.4))  # as a worker does that is killed before it counts the loss
    assert board.losses() == [0.1, float("inf"), 0.3]


def test_there_is_room_for_every_loss(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "board", 1, create=True)
    losses = [float(minibatch) for minibatch in range(10_000)]
    for loss in losses:
        board.add_loss(loss)
    assert board.losses() == losses


def test_losses_that_were_never_filled_in_are_none(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "board", 1, create=True)
    (tmp_path / "board-losses-0").touch()
    assert board.losses() == []


def test_the_losses_of_replicas_are_in_the_order_of_minibatches_up_to_the_first_that_is_missing(
    tmp_path: Path,
) -> None:
    board = StatusBoard(tmp_path / "board", 3, create=True)
    for replica, losses in enumerate(([0.0, 3.0, 6.0], [1.0, 4.0], [2.0])):
        worker = StatusBoard(tmp_path / "board", 3, create=False)
        for loss in losses:
            worker.add_loss(loss, replica)
    assert board.losses(3) == [0.0, 1.0, 2.0, 3.0, 4.0]
