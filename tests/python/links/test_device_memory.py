"""Tests that both ends agree on which workers write into whose device memory, for every kind of device."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from pipedream.links.channels import RunChannel
from pipedream.links.device_memory import ON_HOST, Reach, agree_on_device_memory, place_on_devices

_DEADLINE_S = 60  # This bound ends a test that is deadlocked. It does not judge speed.


class _Board:
    """A rendezvous whose values travel as JSON."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def publish(self, key: str, value: Any) -> None:
        with self._changed:
            self._values[key] = json.dumps(value)
            self._changed.notify_all()

    def wait_for(self, keys: list[str]) -> list[Any]:
        with self._changed:
            there = self._changed.wait_for(lambda: all(key in self._values for key in keys), _DEADLINE_S)
            assert there, keys
            return [json.loads(self._values[key]) for key in keys]


@dataclass
class _Device:
    """Stands in for _core.Worker."""

    name: str
    on_host: bool = False
    why_none: str = ""
    out_of_reach: dict[str, str] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)

    def offer_device_memory(self) -> tuple[str, str]:
        assert not self.on_host
        return ("", self.why_none) if self.why_none else (self.name, "")

    def why_out_of_reach(self, offer: str) -> str:
        assert not self.on_host and offer
        self.tried.append(offer)
        return self.out_of_reach.get(offer, "")


def _channel(sender: int, receiver: int, *, on_device: bool = True, codec: str = "none") -> RunChannel:
    name = f"{sender}->{receiver}"
    return RunChannel(name, 0, sender, receiver, [("float32", 1, 4096)], 2, 4, 1, on_device, codec)


def _agree(devices: list[_Device], channels: list[RunChannel]) -> list[Reach]:
    board = _Board()
    with ThreadPoolExecutor(len(devices)) as pool:
        asked = [
            pool.submit(
                agree_on_device_memory,
                device,
                rank,
                channels,
                on_host=device.on_host,
                publish=board.publish,
                wait_for=board.wait_for,
            )
            for rank, device in enumerate(devices)
        ]
        return [future.result(_DEADLINE_S) for future in asked]


_LINE = [_channel(0, 1), _channel(1, 0), _channel(1, 2), _channel(2, 1)]


def test_neighbours_on_devices_that_reach_each_other_agree_on_it() -> None:
    devices = [_Device(f"gpu {rank}") for rank in range(3)]
    reach = _agree(devices, _LINE)
    assert reach == [
        {(0, 1): "", (1, 0): ""},
        {(0, 1): "", (1, 0): "", (1, 2): "", (2, 1): ""},
        {(1, 2): "", (2, 1): ""},
    ]
    assert [device.tried for device in devices] == [["gpu 1"], ["gpu 0", "gpu 2"], ["gpu 1"]]


def test_a_direction_that_does_not_work_leaves_the_other_as_it_is() -> None:
    no_peer = "cuda:0 has no peer access to cuda:1"
    devices = [_Device("gpu 0", out_of_reach={"gpu 1": no_peer}), _Device("gpu 1")]
    both = _agree(devices, _LINE[:2])
    assert both == [{(0, 1): no_peer, (1, 0): ""}] * 2


def test_a_device_without_memory_to_share_says_why_and_is_not_tried() -> None:
    devices = [_Device("gpu 0"), _Device("gpu 1", why_none="cuda:1 does not support CUDA IPC")]
    both = _agree(devices, _LINE[:2])
    assert both == [{(0, 1): "cuda:1 does not support CUDA IPC", (1, 0): ""}] * 2
    assert devices[0].tried == []


def test_workers_on_the_host_have_none_and_keep_nobody_waiting() -> None:
    devices = [_Device("gpu 0"), _Device("host", on_host=True), _Device("gpu 2")]
    reach = _agree(devices, _LINE)
    assert [set(of_rank.values()) for of_rank in reach] == [{ON_HOST}] * 3
    assert set(reach[1]) == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_a_worker_on_the_host_waits_for_nobody() -> None:
    def wait_for(keys: list[str]) -> list[Any]:
        pytest.fail(f"waited for {keys}")

    device = _Device("host", on_host=True)
    reach = agree_on_device_memory(
        device, 1, _LINE, on_host=True, publish=lambda key, value: None, wait_for=wait_for
    )
    assert set(reach.values()) == {ON_HOST}


def test_tensors_of_host_memory_need_no_agreement() -> None:
    devices = [_Device("gpu 0"), _Device("gpu 1")]
    assert _agree(devices, [_channel(0, 1, on_device=False)]) == [{}, {}]


def test_channels_that_are_placed_are_those_in_reach_on_a_device_and_not_encoded() -> None:
    channels = [
        _channel(0, 1),
        _channel(1, 0),
        _channel(0, 1, codec="bf16"),
        _channel(0, 1, on_device=False),
        _channel(2, 3),
    ]
    placed = place_on_devices(channels, {(0, 1): "", (1, 0): "no peer access"})
    assert [channel.places_on_device for channel in placed] == [True, False, False, False, False]
    assert [channel.name for channel in placed] == [channel.name for channel in channels]
