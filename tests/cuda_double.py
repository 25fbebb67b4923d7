"""A stand-in for the functions of torch.cuda that pipedream calls, for tests on a torch without CUDA.

A stream records the operations that it is given, and an event the operations that its stream had before. So a
test can ask which operations come before another one in stream order. Tensors stay in host memory, and every
operation is done at once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

__all__ = ["CudaDouble", "Event", "Stream"]


class Stream:
    """A stream that records its operations, and those of other streams that it waits for."""

    _numbers = itertools.count(1)

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.cuda_stream = next(Stream._numbers)
        self.done: set[Any] = set()
        """All operations that come before this stream's next one."""

    def give(self, operation: Any) -> None:
        self.done.add(operation)

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def wait_event(self, event: Event) -> None:
        self.done |= event.done

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        CudaDouble.host |= self.done


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.has_timing = enable_timing
        self.blocking = blocking
        self.done: set[Any] = set()
        self.at_ms = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.done = set((stream or CudaDouble.current()).done)
        self.at_ms = time.monotonic() * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        CudaDouble.host |= self.done
        CudaDouble.num_spins += not self.blocking

    def elapsed_time(self, end: Event) -> float:
        assert self.has_timing and end.has_timing
        return end.at_ms - self.at_ms


class CudaDouble:
    """Stands in for torch.cuda, in one test at a time."""

    host: set[Any] = set()
    """The operations that the host has waited for."""
    num_spins = 0
    """Events for which a thread waited without sleeping."""
    compute = Stream()
    _thread = threading.local()

    @classmethod
    def current(cls, device: Any = None) -> Stream:
        return getattr(cls._thread, "stream", None) or cls.compute

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_devices: int = 2) -> None:
        CudaDouble.host = set()
        CudaDouble.num_spins = 0
        CudaDouble.compute = Stream()
        CudaDouble._thread = threading.local()
        self.calls: list[tuple[Any, ...]] = []
        """The calls of set_device, synchronize, empty_cache and use_mem_pool, in order."""
        self.copies: list[tuple[Stream, set[Any]]] = []
        """For every copy_: its stream, and the operations before it."""
        self.allocated_bytes = self.peak_bytes = 0
        self.free_bytes = 1 << 30
        self.generators = [torch.Generator() for _ in range(num_devices)]
        self._install(monkeypatch, num_devices)

    def _install(self, monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
        index_of = lambda device: (device.index if isinstance(device, torch.device) else device) or 0  # noqa: E731
        plain_copy, plain_empty = torch.Tensor.copy_, torch.empty

        def copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            stream = CudaDouble.current()
            self.copies.append((stream, set(stream.done)))
            stream.give(("copy", len(self.copies) - 1))
            return plain_copy(tensor, source, non_blocking)

        def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return plain_empty(*sizes, **options)

        functions = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: num_devices,
            "current_device": lambda: 0,
            "set_device": lambda device: self.calls.append(("set_device", device)),
            "synchronize": self._synchronize,
            "current_stream": CudaDouble.current,
            "stream": self._in_stream,
            "Stream": Stream,
            "Event": Event,
            "get_rng_state": lambda device: self.generators[index_of(device)].get_state(),
            "get_rng_state_all": lambda: [generator.get_state() for generator in self.generators],
            "set_rng_state": lambda state, device: self.generators[index_of(device)].set_state(state),
            "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in self.generators],
            "default_generators": tuple(self.generators),
            "memory_allocated": lambda device: self.allocated_bytes,
            "max_memory_allocated": lambda device: self.peak_bytes,
            "reset_peak_memory_stats": self._reset_peak,
            "mem_get_info": lambda device: (self.free_bytes, 1 << 34),
            "empty_cache": lambda: self.calls.append(("empty_cache",)),
            "get_device_name": lambda device: "double",
            "get_device_capability": lambda device: (8, 0),
            "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{index_of(device)}"),
            "MemPool": lambda allocator: SimpleNamespace(allocator=allocator),
            "use_mem_pool": self._in_mem_pool,
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(
            torch.cuda.memory,
            "CUDAPluggableAllocator",
            lambda *found: SimpleNamespace(allocator=lambda: found),
        )
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch, "empty", empty)

    def _synchronize(self, device: Any = None) -> None:
        self.calls.append(("synchronize", device))
        CudaDouble.host |= CudaDouble.compute.done

    @contextlib.contextmanager
    def _in_stream(self, stream: Stream) -> Iterator[None]:
        outside = getattr(CudaDouble._thread, "stream", None)
        CudaDouble._thread.stream = stream
        try:
            yield
        finally:
            CudaDouble._thread.stream = outside

    @contextlib.contextmanager
    def _in_mem_pool(self, pool: Any) -> Iterator[None]:
        self.calls.append(("use_mem_pool", pool))
        yield

    def _reset_peak(self, device: Any) -> None:
        self.peak_bytes = self.allocated_bytes
