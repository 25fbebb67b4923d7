"""Measures what the runtime adds to a work item, by comparing it with a hand-written loop.

    python bench/system/bare_loop.py [--rounds 3] [--minibatches 700] [--model small] [--json FILE]

The models are those of two_stages.py. The loop runs in two processes and does only what every pipeline in
Python needs: it reads the next pair of the data, copies the boundary's tensor into shared memory once, wakes
the other side by a byte through a pipe, and calls torch. It has no weight versions, checks or measurements,
cannot change the shape of tensors, and does not notice if the other process dies.

Each round runs the loop and then `pipedream`. Both are timed alike: an item's overhead is the time in which
its worker neither runs user code nor waits for data. So the loop's overhead is the least that this machine
allows, and the difference is what the runtime costs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import two_stages
from pipedream import _core
from torch import nn

NUM_IN_FLIGHT = 2
NUM_SLOTS = NUM_IN_FLIGHT + 1
TIMEOUT_S = 600

Row = tuple[int, str, float]  # has the stage, the kind of item, and its microseconds


class Item:
    """Times one work item. Its overhead is its time minus other_ns, the time of user code and waiting."""

    def __init__(self, stage: int, kind: str, rows: list[Row]) -> None:
        self._name = (stage, kind)
        self._rows = rows
        self._began_ns = time.perf_counter_ns()
        self.other_ns = 0

    def done(self) -> None:
        taken_ns = time.perf_counter_ns() - self._began_ns
        self._rows.append((*self._name, (taken_ns - self.other_ns) / 1e3))


class Side:
    """Runs one stage: one half of the model. The two stages share memory, and wake each other through two
    pipes."""

    def __init__(self, stage: int, model: nn.Module, shared: torch.Tensor, pipes: list[Any]) -> None:
        self._stage = stage
        self._model = model
        self._parameters = tuple(model.parameters())
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._activations, self._gradients = shared
        self._read_fd = pipes[stage][0].fileno()
        self._write_fd = pipes[1 - stage][1].fileno()
        self._rows: list[Row] = []

    def _item(self, kind: str) -> Item:
        return Item(self._stage, kind, self._rows)

    def _wait(self, item: Item) -> None:
        began_ns = time.perf_counter_ns()
        os.read(self._read_fd, 1)
        item.other_ns += time.perf_counter_ns() - began_ns

    def _update(self) -> None:
        item = self._item("UPDATE")
        began_ns = time.perf_counter_ns()
        # The backward in flight reads the new weights, as with schedule="naive". Autograd would refuse that.
        with torch.autograd._unsafe_preserve_version_counter(self._parameters):
            self._optimizer.step()
        item.other_ns += time.perf_counter_ns() - began_ns
        self._optimizer.zero_grad()
        item.done()

    def first(self, data: Iterator[tuple[torch.Tensor, torch.Tensor]], num_minibatches: int) -> list[Row]:
        outputs: dict[int, torch.Tensor] = {}

        def forward(minibatch: int) -> None:
            item = self._item("FORWARD")
            inputs, _ = next(data)
            began_ns = time.perf_counter_ns()
            output = self._model(inputs)
            item.other_ns += time.perf_counter_ns() - began_ns
            self._activations[minibatch % NUM_SLOTS].copy_(output.detach())
            os.write(self._write_fd, b"1")
            outputs[minibatch] = output
            item.done()

        def backward(minibatch: int) -> None:
            item = self._item("BACKWARD")
            self._wait(item)
            gradient = self._gradients[minibatch % NUM_SLOTS]
            output = outputs.pop(minibatch)
            began_ns = time.perf_counter_ns()
            output.backward(gradient)
            item.other_ns += time.perf_counter_ns() - began_ns
            item.done()

        forward(0)
        for minibatch in range(1, num_minibatches):
            forward(minibatch)
            backward(minibatch - 1)
            self._update()
        backward(num_minibatches - 1)
        return self._rows

    def last(self, data: Iterator[tuple[torch.Tensor, torch.Tensor]], num_minibatches: int) -> list[Row]:
        for minibatch in range(num_minibatches):
            item = self._item("FORWARD")
            self._wait(item)
            _, targets = next(data)
            inputs = self._activations[minibatch % NUM_SLOTS].detach().requires_grad_()
            began_ns = time.perf_counter_ns()
            loss = nn.functional.mse_loss(self._model(inputs), targets)
            item.other_ns += time.perf_counter_ns() - began_ns
            item.done()

            item = self._item("BACKWARD")
            began_ns = time.perf_counter_ns()
            loss.backward()
            item.other_ns += time.perf_counter_ns() - began_ns
            assert inputs.grad is not None
            self._gradients[minibatch % NUM_SLOTS].copy_(inputs.grad)
            os.write(self._write_fd, b"1")
            loss.item()
            item.done()
            self._update()
        return self._rows


def run_side(
    stage: int, name: str, num_minibatches: int, shared: torch.Tensor, pipes: Any, rows: Any
) -> None:
    _core.keep_freed_memory()
    torch.set_num_threads(1)
    width, batch = two_stages.MODELS[name]
    layers = two_stages.make_model(width)
    half = len(layers) // 2
    side = Side(stage, layers[:half] if stage == 0 else layers[half:], shared, pipes)
    data = iter(two_stages.make_data(width, batch, num_minibatches))
    rows.put((side.first if stage == 0 else side.last)(data, num_minibatches))


def bare(name: str, num_minibatches: int) -> list[Row]:
    """Runs the loop. Returns the rows of both stages, without the first tenth."""
    width, batch = two_stages.MODELS[name]
    context = multiprocessing.get_context("spawn")
    shared = torch.zeros(2, NUM_SLOTS, batch, width).share_memory_()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    rows = context.Queue()
    common = (name, num_minibatches, shared, pipes, rows)
    sides = [context.Process(target=run_side, args=(stage, *common), daemon=True) for stage in range(2)]
    for side in sides:
        side.start()
    measured = [rows.get(timeout=TIMEOUT_S) for _ in sides]
    for side in sides:
        side.join()
    return [row for of_stage in measured for row in of_stage[len(of_stage) // 10 :]]


def managed(name: str, num_minibatches: int) -> list[Row]:
    result = two_stages.pipeline(*two_stages.MODELS[name], num_minibatches)
    return [
        (stage, kind, sum(parts))
        for stage, spans in enumerate(result.spans)
        for kind, *parts in two_stages.overheads_us(spans[len(spans) // 10 :])
    ]


def medians(rows: list[Row]) -> dict[tuple[int, str], float]:
    items: dict[tuple[int, str], list[float]] = {}
    for stage, kind, overhead_us in rows:
        items.setdefault((stage, kind), []).append(overhead_us)
    return {name: statistics.median(values) for name, values in items.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minibatches", type=int, default=700)
    parser.add_argument("--model", choices=sorted(two_stages.MODELS), default="small")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    _core.keep_freed_memory()
    ways = {"bare loop": bare, "pipedream": managed}
    rounds: dict[str, list[dict[tuple[int, str], float]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, measure in ways.items():
            rounds[way].append(medians(measure(arguments.model, arguments.minibatches)))
    print(f"{arguments.model} model: overhead per work item in us, median of rounds (lowest, highest)")
    print(f"{'stage':>5} {'kind':9} {'bare loop':>24} {'pipedream':>24}")
    report = []
    for stage, kind in sorted(rounds["bare loop"][0]):
        values = {way: [figures[stage, kind] for figures in rounds[way]] for way in ways}
        cells = [f"{statistics.median(v):8.1f} ({min(v):.1f}, {max(v):.1f})" for v in values.values()]
        print(f"{stage:5} {kind:9} {cells[0]:>24} {cells[1]:>24}")
        report.append({"stage": stage, "kind": kind, "overhead_us": values})
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
