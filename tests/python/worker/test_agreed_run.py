"""Tests that ranks refuse a run that cannot work before any of them begins it."""

from __future__ import annotations

import pytest
from pipedream.planning.plan import Plan, Stage
from pipedream.worker.agreed_run import _check_world


def test_too_few_ranks_are_told_how_many_are_spares() -> None:
    plan = Plan((Stage(0, 0, 2), Stage(1, 1)))
    _check_world(plan, 3)
    with pytest.raises(
        ValueError, match=r"^the plan needs 3 workers, but only 2 ranks run: start torchrun with"
    ):
        _check_world(plan, 2)
    with pytest.raises(ValueError, match="needs 4 workers, 1 of them spare shards, but only 3 ranks run"):
        _check_world(plan.with_spare_shards([1, 0]), 3)
