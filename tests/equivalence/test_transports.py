"""Tests the same training over every transport, with keys, as if on several machines, and with codecs that
round.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_oracle import CodecOracle, encoded_bytes
from farm import Farm
from oracle import assert_memory_as_predicted, assert_same_numbers
from pipedream import RunResult, reference
from pipedream.links.addresses import is_loopback, resolve_bind
from pipedream.links.keys import write_key_file, write_key_folder
from pipedream.links.rendezvous import Rendezvous
from pipedream.planning.codec_choice import codec_between, parse_codec
from pipedream.splitting.splitter import split
from ports import free_ports
from rehearsing import boundaries_of
from training import (
    Overflowing,
    State,
    Training,
    assert_equal_state,
    is_on_cuda,
    tolerance,
    train_by_reference,
    train_in_pipeline,
)

# The losses fall at this rate. If they exploded, the smallest difference would grow with them.
_SGD = functools.partial(torch.optim.SGD, lr=0.002, momentum=0.5)
_TRAINING = Training("wide", 3, torch.float32, _SGD, short_last=True)
_SHARED, _TCP, _CURVE, _IPC = "shared memory", "zmq/tcp", "zmq/tcp curve", "cuda ipc"


_ON_ONE_HOST = _IPC if is_on_cuda() else _SHARED  # the transport that "auto" chooses


def _train(farm: Farm, training: Training, num_ranks: int = 0, **options: Any) -> tuple[RunResult, State]:
    num_ranks = num_ranks or training.num_workers
    return farm.results(train_in_pipeline, training, num_ranks=num_ranks, **options)[0]


@pytest.fixture(scope="module")
def exact(farm: Farm) -> tuple[RunResult, State]:
    return _train(farm, _TRAINING, transport="tcp")


# The transports.


def test_the_wire_is_reported_with_what_it_carried(exact: tuple[RunResult, State]) -> None:
    result, _ = exact
    assert set(result.transports.values()) == {_TCP}
    assert set(result.transports) == {"0->1", "1->0", "1->2", "2->1"}
    assert [channel.name for channel in result.channels] == [
        "activations of stage 0 to stage 1",
        "gradients of stage 1 to stage 0",
        "activations of stage 1 to stage 2",
        "gradients of stage 2 to stage 1",
    ]
    boundaries = _boundaries(_TRAINING)
    for channel in result.channels:
        (spec,) = boundaries[min(channel.sender, channel.receiver)].tensors
        assert channel.items == 7
        # The last minibatch has half the samples.
        assert channel.tensor_bytes == spec.num_bytes * 6 + spec.num_bytes // 2
        assert channel.placed_bytes == 0
        assert channel.tensor_bytes < channel.wire_bytes
        assert channel.chunks >= channel.items
        assert channel.transfer_ms > 0
        assert 0 <= channel.credit_wait_ms <= channel.transfer_ms
        assert channel.overlap_share is not None and 0 <= channel.overlap_share <= 1
    assert result.bytes_sent == sum(channel.wire_bytes for channel in result.channels)
    assert result.describe_channels().count(_TCP) == 4


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(
    "training",
    [
        _TRAINING,
        Training("wide", 3, num_minibatches=4, short_last=False, schedule="gpipe", microbatches=2),
        Training("cnn", 4, num_minibatches=4, short_last=False, schedule="interleaved", microbatches=4),
    ],
    ids=["minibatches", "microbatches", "stages_that_share_a_worker"],
)
def test_every_item_is_known_once_at_both_ends_of_its_channel_and_arrives_after_it_was_sent(
    farm: Farm, tmp_path: Path, training: Training, transport: str
) -> None:
    result, _ = _train(farm, training, transport=transport)
    every = list(itertools.product(range(len(result.losses)), range(training.microbatches)))
    assert [transfers.channel for transfers in result.transfers] == [c.name for c in result.channels]
    for channel, transfers in zip(result.channels, result.transfers, strict=True):
        assert [(item.minibatch, item.microbatch) for item in transfers.sent] == every
        assert [(item.minibatch, item.microbatch) for item in transfers.received] == every
        for sent, received in zip(transfers.sent, transfers.received, strict=True):
            assert sent.queued_ns <= sent.started_ns <= sent.framed_ns <= sent.released_ns
            assert sent.framed_ns <= received.arrived_ns <= received.complete_ns
            assert sent.wire_bytes == received.wire_bytes
            is_placed = transport == "shm"
            if not is_on_cuda():
                assert (sent.copied_ns is not None) == is_placed
            if sent.copied_ns is not None:
                assert sent.started_ns <= sent.copied_ns <= received.complete_ns
        assert sum(item.wire_bytes for item in transfers.sent) == channel.tensor_bytes
    result.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    _assert_spans_of_a_track_follow_each_other(events)
    for phase in "sf":
        assert len([e for e in events if e["ph"] == phase]) == len(every) * len(result.channels)


def _assert_spans_of_a_track_follow_each_other(events: list[dict[str, Any]]) -> None:
    """Asserts that no span of a track begins before the previous one has ended. The trace format also allows
    nested spans, but pipedream writes none.
    """
    ends: dict[tuple[int, int], float] = {}
    for event in events:
        if event["ph"] == "X":
            track = (event["pid"], event["tid"])
            # Times are in microseconds, rounded to nanoseconds.
            assert ends.get(track, 0.0) <= event["ts"] + 1e-3
            ends[track] = event["ts"] + event["dur"]


def _boundaries(training: Training) -> Any:
    (inputs, _), *_ = training.data()
    return boundaries_of(split(training.model(), training.plan), inputs)


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_shared_memory_gives_the_same_bits_and_keeps_the_tensors_off_the_wire(
    farm: Farm, exact: tuple[RunResult, State], transport: str
) -> None:
    result, state = _train(farm, _TRAINING, transport=transport)
    assert result.losses == exact[0].losses
    assert_equal_state(state, exact[1])
    assert result.versions == exact[0].versions
    assert set(result.transports.values()) == {_SHARED if transport == "shm" else _ON_ONE_HOST}
    for channel, by_wire in zip(result.channels, exact[0].channels, strict=True):
        assert channel.tensor_bytes == channel.placed_bytes == by_wire.tensor_bytes
        assert channel.wire_bytes < by_wire.wire_bytes
    assert_memory_as_predicted(result)


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_small_tensors_stay_off_the_wire_too(farm: Farm, transport: str) -> None:
    training = Training("mlp", 3)
    result, state = _train(farm, training, transport=transport)
    expected, expected_state = train_by_reference(training)
    assert_same_numbers(result.losses, state, expected.losses, expected_state, tolerance(training.dtype))
    assert set(result.transports.values()) == {_SHARED if transport == "shm" else _ON_ONE_HOST}
    assert all(channel.placed_bytes == channel.tensor_bytes > 0 for channel in result.channels)


@pytest.mark.skipif(not is_on_cuda(), reason="no GPU")
@pytest.mark.parametrize("training", [_TRAINING, Training("mlp", 3), Training("tied_apart", 3)], ids=str)
def test_gpus_of_one_host_write_into_each_others_memory_and_stage_nothing(
    farm: Farm, training: Training
) -> None:
    by_wire, wire_state = _train(farm, training, transport="tcp")
    result, state = _train(farm, training, transport="ipc")
    assert result.losses == by_wire.losses
    assert_equal_state(state, wire_state)
    assert set(result.transports.values()) == {_IPC}
    for channel in result.channels:
        assert channel.placed_bytes == channel.tensor_bytes
    terms = {term for worker in result.memory for term in worker}
    assert not {term for term in terms if term.startswith("staging, activations")}
    assert_memory_as_predicted(result)


@pytest.mark.parametrize(("transport", "name"), [("tcp", _CURVE), ("auto", _ON_ONE_HOST)])
def test_keys_change_no_bit(
    farm: Farm, exact: tuple[RunResult, State], tmp_path: Path, transport: str, name: str
) -> None:
    write_key_file(tmp_path / "keys.json")
    result, state = _train(farm, _TRAINING, transport=transport, keys=tmp_path / "keys.json", bind="lo")
    assert result.losses == exact[0].losses
    assert_equal_state(state, exact[1])
    assert set(result.transports.values()) == {name}


def _train_with_own_keys(training: Training, folder: Path, **options: Any) -> tuple[RunResult, State]:
    return train_in_pipeline(training, keys=folder / f"machine-{os.environ['RANK']}.json", **options)


def test_machines_with_pairs_of_their_own_talk_to_each_other(
    farm: Farm, exact: tuple[RunResult, State], tmp_path: Path
) -> None:
    write_key_folder(tmp_path / "keys", 3)
    results = farm.results(
        *(_train_with_own_keys, _TRAINING, tmp_path / "keys"),
        num_ranks=3,
        ranks_per_machine=1,
        bind="127.0.0.1",
        transport="tcp",
    )
    result, state = results[0]
    assert result.losses == exact[0].losses
    assert_equal_state(state, exact[1])
    assert set(result.transports.values()) == {_CURVE}


def _own_address() -> str:
    """Returns an address of this machine that is not loopback."""
    for _, name in socket.if_nameindex():
        try:
            address = resolve_bind(name)
        except ValueError:
            continue
        if not is_loopback(address):
            return address
    pytest.skip("this machine has loopback alone")


@pytest.mark.parametrize("how", ["keys", "insecure"])
def test_workers_meet_at_an_address_that_other_machines_reach(
    farm: Farm, exact: tuple[RunResult, State], tmp_path: Path, how: str
) -> None:
    address = _own_address()
    options: dict[str, Any] = {"insecure": True}
    if how == "keys":
        write_key_file(tmp_path / "keys.json")
        options = {"keys": tmp_path / "keys.json"}
    result, state = _train(farm, _TRAINING, ranks_per_machine=1, bind=address, transport="tcp", **options)
    assert result.losses == exact[0].losses
    assert_equal_state(state, exact[1])
    assert set(result.transports.values()) == {_CURVE if how == "keys" else _TCP}


def test_local_workers_and_the_caller_that_forwards_data_share_the_keys(tmp_path: Path) -> None:
    write_key_file(tmp_path / "keys.json")
    training = Training("mlp", 2)

    def batches() -> Iterator[Any]:
        yield from training.data()

    result, state = train_in_pipeline(
        training, data=batches(), keys=tmp_path / "keys.json", transport="tcp", codec={"gradients": "none"}
    )
    expected, expected_state = train_by_reference(training)
    assert_same_numbers(result.losses, state, expected.losses, expected_state, tolerance(training.dtype))
    assert set(result.transports.values()) == {_CURVE}


# The ports.


def _train_and_note_ports(training: Training, **options: Any) -> tuple[list[float], set[int]]:
    noted: set[int] = set()
    publish = Rendezvous.publish

    def noting(self: Rendezvous, key: str, value: Any) -> None:
        noted.update(map(int, re.findall(r"tcp://127\.0\.0\.1:(\d+)", str(value))))
        publish(self, key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rendezvous, "publish", noting)
        result, _ = train_in_pipeline(training, **options)
    return ([] if result is None else result.losses), noted


def test_workers_listen_at_the_ports_of_their_range_alone(farm: Farm, exact: tuple[RunResult, State]) -> None:
    """Rehearsal and training need ports at the same time, because the training's links open while the
    rehearsal's links close.
    """
    ports = free_ports(8)
    first, last = map(int, ports.split("-"))
    ranks = farm.results(_train_and_note_ports, _TRAINING, num_ranks=3, ports=ports, transport="tcp")
    assert ranks[0][0] == exact[0].losses
    assert set().union(*(noted for _, noted in ranks)) <= set(range(first, last + 1))
    assert all(noted for _, noted in ranks)


# The codecs.


def _train_by_codec_oracle(training: Training, codec: Any) -> tuple[list[float], State]:
    model = training.model()
    with torch.random.fork_rng(devices=[]):
        result = reference.run(model, training.plan, **training.options(), across_cut=CodecOracle(codec))
    return result.losses, model.state_dict()


def _assert_equals_codec_oracle(farm: Farm, training: Training, codec: Any, **options: Any) -> RunResult:
    result, state = _train(farm, training, codec=codec, **options)
    losses, expected_state = _train_by_codec_oracle(training, codec)
    assert_same_numbers(result.losses, state, losses, expected_state, tolerance(training.dtype))
    # Rounding must make a difference. Otherwise a codec that is ignored would pass.
    assert result.losses != train_by_reference(training)[0].losses
    assert_memory_as_predicted(result)
    return result


_CODECS: list[Any] = ["bf16", "fp16", "int8", "topk:0.25", {"activations": "bf16", "gradients": "topk:0.1"}]


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("codec", _CODECS, ids=str)
def test_a_codec_gives_the_numbers_of_the_same_rounding_in_one_process(
    farm: Farm, codec: Any, transport: str
) -> None:
    result = _assert_equals_codec_oracle(
        farm, replace(_TRAINING, dtype=torch.float64), codec, transport=transport
    )
    assert set(result.transports.values()) == {_TCP if transport == "tcp" else _SHARED}


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk:0.25"])
@pytest.mark.parametrize(
    "training",
    [
        Training("mlp", 4, torch.float32, schedule="flush", microbatches=3, short_last=False),
        Training("mlp", 3, schedule="2bw", microbatches=3, recompute=True, short_last=False),
        Training("cnn", 4, schedule="interleaved", microbatches=2),
        # The first of these models has nested tensors, and a tensor that crosses twice. In the second a stage
        # returns no gradient. The third has tied parameters, which are sent without a codec.
        Training("lstm", 3),
        Training("frozen", 3),
        Training("tied_apart", 3),
    ],
    ids=lambda training: f"{training.case_name}-{training.schedule}",
)
def test_a_codec_works_with_every_schedule_and_what_crosses(
    farm: Farm, training: Training, codec: str
) -> None:
    _assert_equals_codec_oracle(farm, training, codec)


def test_pairs_of_stages_have_codecs_of_their_own(farm: Farm) -> None:
    codec = {"activations": "bf16", (1, 2): "none", "2->1": "int8"}
    result = _assert_equals_codec_oracle(farm, Training("cnn", 3), codec)
    assert {f"{c.sender}->{c.receiver}": c.codec for c in result.channels} == {
        "0->1": "bf16",
        "1->0": "none",
        "1->2": "none",
        "2->1": "int8",
    }


def _encoded_bytes_of_run(codec: str, whole: int, short: int, dtype: torch.dtype) -> int:
    """Returns the encoded bytes of 7 minibatches. The first six have `whole` elements, and the last has
    `short`.
    """
    return 6 * encoded_bytes(codec, whole, dtype) + encoded_bytes(codec, short, dtype)


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "topk:0.1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_encoded_tensors_are_as_small_as_their_codec_says(farm: Farm, codec: str, dtype: torch.dtype) -> None:
    training = replace(_TRAINING, dtype=dtype)
    result, _ = _train(farm, training, codec=codec, transport="shm")
    boundaries = _boundaries(training)
    for channel in result.channels:
        (spec,) = boundaries[min(channel.sender, channel.receiver)].tensors
        whole, short = math.prod(spec.shape), math.prod(spec.shape) // 2
        assert channel.placed_bytes == _encoded_bytes_of_run(codec, whole, short, dtype)
        assert channel.tensor_bytes == (6 * whole + short) * dtype.itemsize


@pytest.mark.parametrize(
    ("autocast", "codec"),
    [
        ("bfloat16", "int8"),
        ("bfloat16", "topk:0.25"),
        ("float16", "int8"),
        ("float16", {"activations": "topk:0.25", "gradients": "int8"}),
    ],
    ids=str,
)
def test_a_codec_takes_effect_on_the_16_bits_of_autocast(farm: Farm, autocast: str, codec: Any) -> None:
    training = replace(_TRAINING, autocast=autocast)
    result = _assert_equals_codec_oracle(farm, training, codec, transport="shm")
    dtype: torch.dtype = getattr(torch, autocast)
    boundaries = _boundaries(_TRAINING)
    for channel in result.channels:
        (spec,) = boundaries[min(channel.sender, channel.receiver)].tensors
        whole, short = math.prod(spec.shape), math.prod(spec.shape) // 2
        assert channel.tensor_bytes == (6 * whole + short) * dtype.itemsize
        assert channel.codec == codec_between(parse_codec(codec), channel.sender, channel.receiver)
        assert channel.placed_bytes == _encoded_bytes_of_run(channel.codec, whole, short, dtype)


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_16_bits_are_not_rounded_to_16_bits(farm: Farm, autocast: str, codec: str) -> None:
    training = replace(_TRAINING, autocast=autocast)
    result, _ = _train(farm, training, codec=codec)
    assert {channel.codec for channel in result.channels} == {"none"}
    exact, _ = _train(farm, training)
    assert result.losses == exact.losses


_HUGE = 64.0


class _OverflowOracle(CodecOracle):
    """A codec oracle that records whether each received gradient was finite."""

    def __init__(self, codec: Any) -> None:
        super().__init__(codec)
        self.were_finite: list[bool] = []

    def __call__(self, sender: int, receiver: int, tensor_index: int, tensor: torch.Tensor) -> torch.Tensor:
        arrived = super().__call__(sender, receiver, tensor_index, tensor)
        if sender > receiver:
            assert arrived.isfinite().all() == tensor.isfinite().all()
            self.were_finite.append(bool(arrived.isfinite().all()))
        return arrived


def test_a_gradient_that_overflowed_before_int8_is_found_and_skipped_behind_it(farm: Farm) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.05 / _HUGE)
    training = Overflowing(
        "mlp", 2, torch.float32, sgd, num_minibatches=12, autocast="float16", loss_factor=_HUGE
    )
    result, state = _train(farm, training, codec={"gradients": "int8"})
    oracle = _OverflowOracle({"gradients": "int8"})
    model = training.model()
    with torch.random.fork_rng(devices=[]):
        expected = reference.run(model, training.plan, **training.options(), across_cut=oracle)
    assert set(oracle.were_finite) == {False, True}, "no gradient overflowed, or all did"
    assert_same_numbers(result.losses, state, expected.losses, model.state_dict(), tolerance(torch.float32))
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert {f"{c.sender}->{c.receiver}": c.codec for c in result.channels} == {"0->1": "none", "1->0": "int8"}


@pytest.mark.parametrize(
    ("codec", "relative"),
    [
        # There are 28 roundings: 7 minibatches, 2 cuts and 2 directions. Each errs by at most half a unit of
        # the last place: 2^-9 of the value with bf16, 2^-12 with fp16, and 2^-8 of a block's largest value
        # with int8. A relative error of a tensor changes this loss by about the same relative error. A codec
        # that scrambled tensors would be off by the loss itself.
        ("bf16", 28 * 2**-9),
        ("fp16", 28 * 2**-12),
        ("int8", 28 * 2**-8),
    ],
)
def test_a_codec_that_rounds_stays_close_to_the_exact_run(
    farm: Farm, exact: tuple[RunResult, State], codec: str, relative: float
) -> None:
    result, _ = _train(farm, _TRAINING, codec=codec)
    for loss, wanted in zip(result.losses, exact[0].losses, strict=True):
        assert math.isfinite(loss)
        assert abs(loss - wanted) <= relative * abs(wanted)


def test_codecs_of_gradients_leave_the_first_two_minibatches_as_they_were(
    farm: Farm, exact: tuple[RunResult, State]
) -> None:
    result, _ = _train(farm, _TRAINING, codec={"gradients": "topk:0.1"})
    # Encoded gradients change the weights from the first update on. The second of three stages reads such
    # weights from minibatch 2 on, and the first stage from minibatch 3 on. So the first two losses are exact.
    assert result.losses[:2] == exact[0].losses[:2]
    assert result.losses[2:] != exact[0].losses[2:]
    assert all(math.isfinite(loss) for loss in result.losses)
