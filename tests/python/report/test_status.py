"""StatusBoard: what survives a worker."""

from __future__ import annotations

from pathlib import Path

from pipedream.report.status import StatusBoard


def test_the_losses_so_far_are_there_after_the_worker_that_had_them(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "board", 2, create=True)
    assert board.losses() == []
    worker = StatusBoard(tmp_path / "board", 2, create=False)
    for loss in (0.1, float("inf"), 0.3):
        worker.add_loss(loss)
    assert board.losses() == [0.1, float("inf"), 0.3]
    with (tmp_path / "board-losses").open("ab") as file:
        file.write(b"torn")  # what a worker leaves that is killed meanwhile
    assert board.losses() == [0.1, float("inf"), 0.3]
