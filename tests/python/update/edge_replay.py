"""Replays the programs of several workers in one thread. Queues replace the core's channels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pipedream import _core
from pipedream.stage.edge_transfers import EdgeTransfers
from torch import Tensor

__all__ = ["replay"]


def replay(
    options: _core.ScheduleOptions,
    num_minibatches: int,
    transfers: Sequence[EdgeTransfers],
    compute: Callable[[_core.Instruction], None],
) -> set[str]:
    """Runs all programs. Returns the edges between two workers on which items of EdgeTransfers travelled.

    `transfers` has one entry per rank. `compute` does all instructions but SEND and RECV.
    """
    programs = [
        deque(_core.make_program(options, rank, num_minibatches)) for rank in range(options.num_workers)
    ]
    placement = options.placement
    queues: dict[_core.Edge, deque[list[Tensor]]] = {}
    for edge in _core.edges_of(options):
        if placement.rank_of(edge.from_stage) != placement.rank_of(edge.to_stage):
            queues[edge] = deque()
    travelled = set()
    while any(programs):
        before = sum(map(len, programs))
        for program, own in zip(programs, transfers, strict=True):
            while program:
                instruction, edge = program[0], program[0].edge
                if edge is None:
                    compute(instruction)
                    program.popleft()
                    continue
                queue = queues.get(edge)
                if instruction.opcode == "RECV" and queue is not None and not queue:
                    break
                program.popleft()
                if edge.kind in ("activation", "gradient"):  # empty items, which only keep the order
                    made: list[Tensor] = (
                        [] if instruction.opcode == "SEND" or queue is None else queue.popleft()
                    )
                else:
                    received: list[Tensor] = []
                    if instruction.opcode == "RECV" and queue is not None:
                        # Copies them only when they are received, because the sender must not change them
                        # before.
                        received = [tensor.clone() for tensor in queue.popleft()]
                    made = own.do(_work(instruction, received))
                    travelled.add(str(edge))
                if instruction.opcode == "SEND" and queue is not None:
                    queue.append(made)
        assert sum(map(len, programs)) < before, "deadlock"
    assert not any(queues.values()), "left over"
    return {text for edge in queues if (text := str(edge)) in travelled}


def _work(instruction: _core.Instruction, received: list[Tensor]) -> Any:
    return SimpleNamespace(
        kind=instruction.opcode, edge=instruction.edge, minibatch=instruction.minibatch, tensors=received
    )
