"""Tests that the channels of a run have the same names and numbers at all its processes."""

from __future__ import annotations

import pytest
import torch
from pipedream import _core
from pipedream.data.stream import ForwardedData
from pipedream.links.channels import ShardSpec, channels_of_run, data_channels
from pipedream.model.boundary import Boundary
from pipedream.planning.plan import Plan


@pytest.mark.parametrize(
    "counts", ["1", "3", "1-1", "2-2", "1-1-1", "1-2-1", "2-1-2", "3+2", "2+1-1", "1-2+2"]
)
def test_a_worker_that_reads_no_data_numbers_its_channels_as_the_others_do(counts: str) -> None:
    plan = Plan.load(counts, num_layers=counts.count("-") + 1)
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

    of_caller = {channel.name: channel.channel_id for channel in data_channels(plan, forwarded, schedule)}
    at_readers = numbered(forwarded)
    assert at_readers == of_caller | numbered(None)
    assert sorted(at_readers.values()) == list(range(len(at_readers)))


def test_a_replica_has_a_window_of_chunks_at_a_spare_and_room_for_a_round_at_a_replica() -> None:
    plan = Plan.load("3+1-1", num_layers=2)
    schedule = _core.ScheduleOptions(in_flight=list(plan.in_flight), placement=plan.placement)
    spec = ShardSpec(num_chunks=5, chunk_bytes_max=64, num_pieces_max=1)
    shards = {(0, owner): spec for owner in range(4)}
    found = channels_of_run(plan, schedule, plan.workers_used, {}, [], None, codec={}, shards=shards)
    slots = {channel.name: channel.num_slots for channel in found}
    assert slots["pushed gradients of stage 0 replica 1 to stage 0 spare 0"] == _core.NUM_SPARE_SLOTS
    assert slots["pushed gradients of stage 0 replica 1 to stage 0 replica 0"] == 5
    assert slots["pulled weights of stage 0 spare 0 to stage 0 replica 1"] == 5


@pytest.mark.parametrize(("is_asynchronous", "num_slots"), [(False, 2), (True, 21)])
def test_slots_for_whole_tensors_hold_a_round_and_not_the_largest_for_each(
    is_asynchronous: bool, num_slots: int
) -> None:
    plan = Plan.load("3-1", num_layers=2)
    schedule = _core.ScheduleOptions(
        in_flight=list(plan.in_flight), placement=plan.placement, asynchronous=is_asynchronous
    )
    # The shard has one tensor of 4096 bytes and twenty of 64.
    spec = ShardSpec(num_chunks=21, chunk_bytes_max=4096, num_pieces_max=1, whole_bytes=4096 + 20 * 64)
    shards = {(0, owner): spec for owner in range(3)}
    found = channels_of_run(plan, schedule, plan.workers_used, {}, [], None, codec={}, shards=shards)
    slots = {channel.name: channel.num_slots for channel in found}
    assert slots["pushed gradients of stage 0 replica 1 to stage 0 replica 0"] == num_slots
