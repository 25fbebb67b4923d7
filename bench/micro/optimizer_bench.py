"""Compares pipedream's native optimizer steps with torch's steps, at 1M, 10M and 100M parameters.

    python bench/micro/optimizer_bench.py [--quick] [--rounds 15] [--threads N] [--json]

Each round times four sides in one process, beginning with another side each time:

    native      writes the new weights to a second slot, and changes slots after each step, as a stage with
                several weight versions does (out of place)
    in place    the native step of a stage with one version
    torch       torch's fused step, in place; for NAdam the foreach step
    copy        a copy that reads and writes as many bytes as the step

All arrays lie in huge pages, as in the core's pool. The target is native / torch <= 1.05, of the least times.
Prints per side the least and the median time, and GB/s: the bytes of all arrays that the step reads or
writes, divided by the least time.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from pipedream import optim

# malloc keeps freed memory. Otherwise the times would include the first writes to fresh pages.
_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}

# torch's NAdam has no fused step.
_TORCH_NADAMW = functools.partial(
    torch.optim.NAdam, weight_decay=1e-2, decoupled_weight_decay=True, foreach=True
)

# Each name has: the native optimizer, torch's, their arguments, and how many float32 arrays a step reads and
# writes.
CASES: dict[str, tuple[Any, Any, dict[str, Any], int, int]] = {
    "SGD": (optim.SGD, functools.partial(torch.optim.SGD, fused=True), {"lr": 1e-3}, 2, 1),
    "SGD momentum": (
        optim.SGD,
        functools.partial(torch.optim.SGD, fused=True),
        {"lr": 1e-3, "momentum": 0.9},
        3,
        2,
    ),
    "Adam": (optim.Adam, functools.partial(torch.optim.Adam, fused=True), {"lr": 1e-3}, 4, 3),
    "AdamW": (optim.AdamW, functools.partial(torch.optim.AdamW, fused=True), {"lr": 1e-3}, 4, 3),
    "NAdamW": (optim.NAdamW, _TORCH_NADAMW, {"lr": 1e-3}, 4, 3),
}
SIZES = {"1M": 1_000_000, "10M": 10_000_000, "100M": 100_000_000}
HUGE_PAGE_BYTES = 2 << 20
# Small steps are repeated, so that one timing takes much longer than reading the clock or waking a thread.
NUM_ELEMENTS_PER_TIMING = 20_000_000


def time_ms(step: Callable[[], object], num_repeats: int) -> float:
    """Returns milliseconds per call."""
    began_ns = time.perf_counter_ns()
    for _ in range(num_repeats):
        step()
    return (time.perf_counter_ns() - began_ns) / 1e6 / num_repeats


def in_huge_pages(values: torch.Tensor) -> torch.Tensor:
    """Copies the values into memory with huge pages, as the core's pool has it."""
    num_bytes = values.numel() * values.element_size()
    # The memory is private, because shared memory, which is mmap's default, gets no huge pages.
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -room.data_ptr() % HUGE_PAGE_BYTES
    return room[offset : offset + num_bytes].view(values.dtype).copy_(values)


class Arrays:
    """The arrays that a step reads and writes. All sides use the same arrays, because their place in memory
    changes the time more than the side does."""

    def __init__(self, num_elements: int, num_states: int) -> None:
        self.gradient = in_huge_pages(torch.randn(num_elements) * 1e-3)
        self.slots = [in_huge_pages(torch.randn(num_elements)) for _ in range(2)]
        self.states = [in_huge_pages(torch.zeros(num_elements)) for _ in range(num_states)]


class OfTorch:
    """Makes torch's step in place, in the first of the two slots."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], arrays: Arrays) -> None:
        parameter = arrays.slots[0].detach().requires_grad_()
        parameter.grad = arrays.gradient
        self._optimizer = make([parameter])
        self._optimizer.step()
        places = iter(arrays.states)
        state = self._optimizer.state[parameter]
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = next(places)

    def __call__(self) -> None:
        self._optimizer.step()


class Native:
    """Makes a native optimizer's step. With two slots each step reads the slot that the previous step wrote.
    With one slot it works in place.
    """

    def __init__(
        self, make: Callable[..., optim.NativeOptimizer], arrays: Arrays, slots: list[torch.Tensor]
    ) -> None:
        self._slots = slots
        self._gradient = arrays.gradient
        self._optimizer = make([slots[0].detach()])
        self._optimizer.place_state(lambda *_: arrays.states)

    def __call__(self) -> None:
        read, write = self._slots[0], self._slots[-1]
        self._optimizer.step_out_of_place([read], [write], [self._gradient])
        self._slots.reverse()


def make_sides(case: str, num_elements: int) -> tuple[dict[str, Callable[[], object]], int]:
    """Returns the sides by name, and the number of bytes that a step reads and writes."""
    native, of_torch, arguments, num_read, num_written = CASES[case]
    arrays = Arrays(num_elements, num_states=num_written - 1)
    num_bytes = (num_read + num_written) * 4 * num_elements
    copied = in_huge_pages(torch.randn(num_bytes // 8))
    make_native = functools.partial(native, **arguments)
    sides: dict[str, Callable[[], object]] = {
        "torch": OfTorch(functools.partial(of_torch, **arguments), arrays),
        "native": Native(make_native, arrays, list(arrays.slots)),
        "in place": Native(make_native, arrays, arrays.slots[:1]),
        "copy": functools.partial(in_huge_pages(torch.zeros_like(copied)).copy_, copied),
    }
    return sides, num_bytes


def measure(case: str, size: str, rounds: int) -> dict[str, Any]:
    num_elements = SIZES[size]
    num_repeats = max(1, NUM_ELEMENTS_PER_TIMING // num_elements)
    sides, num_bytes = make_sides(case, num_elements)
    for step in sides.values():
        time_ms(step, max(2, num_repeats // 4))
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for round_index in range(rounds):
        turn = round_index % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(time_ms(sides[name], num_repeats))
    ratios = [native / other for native, other in zip(times["native"], times["torch"], strict=True)]
    row: dict[str, Any] = {"case": case, "size": size, "bytes": num_bytes}
    for name, values in times.items():
        row[name] = {"min_ms": min(values), "median_ms": statistics.median(values), "max_ms": max(values)}
        row[name]["gb_per_s"] = num_bytes / min(values) / 1e6
    row["ratio_of_minima"] = min(times["native"]) / min(times["torch"])
    row["ratio"] = {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}
    return row


def show(row: dict[str, Any]) -> None:
    sides = "  ".join(
        f"{name} {row[name]['min_ms']:.3f} / {row[name]['median_ms']:.3f} ms {row[name]['gb_per_s']:.1f} GB/s"
        for name in ("native", "in place", "torch", "copy")
    )
    ratio = row["ratio"]
    print(
        f"{row['case']:>12} {row['size']:>4} {row['bytes'] / 1e6:6.0f} MB"
        f"  {row['ratio_of_minima']:.3f} of minima, rounds {ratio['median']:.3f}"
        f" ({ratio['min']:.3f} to {ratio['max']:.3f})  {sides}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--quick", action="store_true", help="1M and 10M, 5 rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    rounds, sizes = (5, ["1M", "10M"]) if options.quick else (options.rounds, options.sizes)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.threads} threads,"
        f" torch {torch.__version__}, minimum / median of {rounds} rounds"
    )
    rows = []
    for size in sizes:
        for case in options.cases:
            rows.append(measure(case, size, rounds))
            show(rows[-1])
    if options.json:
        print(
            json.dumps(
                {"torch": torch.__version__, "threads": options.threads, "rounds": rounds, "rows": rows}
            )
        )


if __name__ == "__main__":
    if any(name not in os.environ for name in _MALLOC):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | _MALLOC)
    main()
