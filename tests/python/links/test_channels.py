"""The channels of a run have the same names and numbers at all its processes."""

from __future__ import annotations

import pytest
import torch
from pipedream import _core
from pipedream.data.stream import ForwardedData
from pipedream.links.channels import channels_of_run, data_channels
from pipedream.model.boundary import Boundary
from pipedream.planning.plan import Plan


@pytest.mark.parametrize("replicas", [(1,), (3,), (1, 1), (2, 2), (1, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_a_worker_that_reads_no_data_numbers_its_channels_as_the_others_do(replicas: tuple[int, ...]) -> None:
    plan = Plan.replicated(len(replicas), replicas)
    inputs, targets = torch.zeros(4, 2), torch.zeros(4)
    forwarded = ForwardedData(
        (inputs, targets),
        Boundary.of(inputs, name="the inputs"),
        Boundary.of(targets, name="the targets"),
        None,
        "generator",
    )
    schedule = _core.ScheduleOptions(
        schedule="pipedream", in_flight=list(plan.in_flight), num_microbatches=1, placement=plan.placement
    )

    def numbered(forwarded: ForwardedData | None) -> dict[str, int]:
        found = channels_of_run(plan, schedule, plan.workers_used, {}, [], forwarded, codec={})
        return {channel.name: channel.channel_id for channel in found}

    of_caller = {channel.name: channel.channel_id for channel in data_channels(plan, forwarded)}
    at_readers = numbered(forwarded)
    assert at_readers == of_caller | numbered(None)
    assert sorted(at_readers.values()) == list(range(len(at_readers)))
