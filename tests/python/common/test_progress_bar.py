"""Tests progress bars for work that takes long."""

from __future__ import annotations

from pipedream.common.progress_bar import TimedProgress


def test_a_bar_of_seconds_fills_while_nothing_is_counted() -> None:
    # Minibatches may take longer than the given seconds. The bar of a profile must fill by time, and not show
    # 0/12 seconds until the end.
    now_s = [100.0]
    progress = TimedProgress(get_time=lambda: now_s[0])
    task = progress.add_task("", total=12.0, start=False)

    def completed() -> float:
        list(progress.get_renderables())
        return progress.tasks[task].completed

    assert completed() == 0.0
    now_s[0] += 5.0  # work before the time that counts
    assert completed() == 0.0
    progress.start_task(task)
    now_s[0] += 6.0
    progress.start_task(task)
    assert completed() == 6.0
    now_s[0] += 60.0
    assert completed() == 12.0
