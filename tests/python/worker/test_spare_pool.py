"""Tests that a spare that does not fit into its memory is refused. A spare owns a shard and computes no
minibatches.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pipedream.planning.plan import Plan, Stage
from pipedream.stage.job import MemoryOptions
from pipedream.worker.spare_pool import _check_fits


def test_a_spare_that_does_not_fit_is_named_with_its_terms_the_largest_first() -> None:
    plan = Plan((Stage(0, 0, 2, num_spare_shards=1), Stage(1, 1)))
    run: Any = SimpleNamespace(plan=plan, rank=3, options=SimpleNamespace(memory=MemoryOptions(4096, None)))
    _check_fits(run, {"weight versions": 4096})
    with pytest.raises(ValueError, match="give more memory, or a plan with more or no num_spare") as refused:
        _check_fits(run, {"optimizer state": 1024, "weight versions": 4096})
    said = "stage 0 spare 0 (rank 3) needs 5.00 KiB, 1.00 KiB more (weight versions 4.00 KiB, optimizer state"
    assert said in str(refused.value)
