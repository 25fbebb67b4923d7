"""Tests lists of instructions as text, in which spares are called "spare". A spare owns a shard of a stage
and computes no minibatches.
"""

from __future__ import annotations

import pytest
from pipedream import _core
from pipedream.planning.plan import Plan, Stage
from pipedream.simulate.traced_schedule import parse_programs, print_programs


@pytest.mark.parametrize(("replicas", "spares"), [((2, 1), (1, 0)), ((1, 3), (0, 2)), ((2, 2), (1, 2))])
def test_spares_are_named_in_texts_that_are_read_again(
    replicas: tuple[int, ...], spares: tuple[int, ...]
) -> None:
    plan = Plan.replicated(len(replicas), replicas).with_spare_shards(spares)
    options = _core.ScheduleOptions("pipedream", list(plan.in_flight), 1, plan.placement)
    programs = [_core.make_program(options, rank, 12) for rank in range(options.num_workers)]
    text = print_programs(programs, plan.placement)
    for stage, (num_replicas, num_spares) in enumerate(zip(replicas, spares, strict=True)):
        assert f"stage {stage} replica {num_replicas}" not in text
        for spare in range(num_spares):
            assert f"UPDATE stage {stage} spare {spare} minibatch 0 writes version 1" in text
    assert parse_programs(text) == programs
    # The core's text, which numbers spares as replicas.
    assert parse_programs(_core.print_programs(programs)) == programs


def test_without_spares_the_text_is_the_cores() -> None:
    plan = Plan((Stage(0, 0, 12), Stage(1, 1)))
    options = _core.ScheduleOptions("pipedream", list(plan.in_flight), 1, plan.placement)
    programs = [_core.make_program(options, rank, 14) for rank in range(options.num_workers)]
    assert print_programs(programs, plan.placement) == _core.print_programs(programs)
