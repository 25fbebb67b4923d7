"""The channels of a run: who sends what to whom, how much, and how many at once.

Names are unique in a run, and the position in the list is the channel_id, so that all workers and the
caller number them alike. Plain values; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _core
from .boundary import Boundary, TensorSpec
from .bulk import PIECE_BYTES
from .data import ForwardedData
from .plan import Plan

__all__ = [
    "CALLER",
    "INPUTS",
    "TARGETS",
    "RunChannel",
    "activations_name",
    "channels_of_run",
    "find_libzmq",
    "from_rank_0",
    "gradients_name",
    "to_rank_0",
]

# In place of the gradients of a boundary where no tensor needs one: the word that a backward is done.
_NO_GRADIENT = TensorSpec(torch.uint8, (1,), requires_grad=False)

INPUTS = "inputs from the caller"
TARGETS = "targets from the caller"
CALLER = -1  # as a rank: the process that called run(), when it forwards data


def activations_name(stage_index: int) -> str:
    return f"activations of stage {stage_index} to stage {stage_index + 1}"


def gradients_name(stage_index: int) -> str:
    return f"gradients of stage {stage_index + 1} to stage {stage_index}"


def from_rank_0(rank: int) -> str:
    return f"rank 0 to rank {rank}"


def to_rank_0(rank: int) -> str:
    return f"rank {rank} to rank 0"


@dataclass(frozen=True)
class RunChannel:
    """A directed channel between two ranks. tensors: (dtype name, dimensions, bytes at most)."""

    name: str
    channel_id: int
    sender: int
    receiver: int
    tensors: list[tuple[str, int, int]]
    num_slots: int
    """At the receiver: items that may be received and not yet given back."""
    num_unsent_max: int
    """At the sender: items that may be waiting or on their way."""
    on_device: bool

    def add_to(self, core: _core.Worker, rank: int) -> None:
        """Adds this end of the channel to the worker; nothing when the rank has no end of it."""
        if rank not in (self.sender, self.receiver):
            return
        sends = rank == self.sender
        peer = self.receiver if sends else self.sender
        core.add_channel(
            name=self.name,
            sends=sends,
            peer="the caller" if peer == CALLER else f"stage {peer} (rank {peer})",
            channel_id=self.channel_id,
            tensors=self.tensors,
            num_items=self.num_unsent_max if sends else self.num_slots,
            on_device=self.on_device,
        )


def channels_of_run(
    plan: Plan, world_size: int, boundaries: list[Boundary], forwarded: ForwardedData | None
) -> list[RunChannel]:
    """All channels of a run, the same list at every worker."""
    channels: list[RunChannel] = []

    def add(name: str, sender: int, receiver: int, specs: Iterable[TensorSpec], slots: int, unsent: int,
            on_device: bool) -> None:  # fmt: skip
        tensors = [(str(s.dtype).removeprefix("torch."), len(s.shape), s.num_bytes) for s in specs]
        channels.append(RunChannel(name, len(channels), sender, receiver, tensors, slots, unsent, on_device))

    for stage, boundary in enumerate(boundaries):
        # Downstream keeps n_s activations until their backward, and one more may arrive meanwhile.
        in_flight, in_flight_downstream = plan.in_flight[stage], plan.in_flight[stage + 1]
        unsent = 2 * in_flight + 4  # never more than n_s are in flight; the rest: released a little late
        add(
            activations_name(stage),
            stage,
            stage + 1,
            boundary.tensors,
            in_flight_downstream + 1,
            unsent,
            True,
        )
        gradients = [spec for spec in boundary.tensors if spec.requires_grad] or [_NO_GRADIENT]
        add(gradients_name(stage), stage + 1, stage, gradients, 2, unsent, True)
    piece = [TensorSpec(torch.uint8, (PIECE_BYTES,), requires_grad=False)]
    for rank in range(1, world_size):
        add(from_rank_0(rank), 0, rank, piece, 4, 4, False)
        add(to_rank_0(rank), rank, 0, piece, 4, 4, False)
    if forwarded is not None:
        epoch = TensorSpec(torch.int64, (1,), requires_grad=False)
        last = plan.num_stages - 1
        inputs, targets = [*forwarded.inputs.tensors, epoch], [*forwarded.targets.tensors, epoch]
        add(INPUTS, CALLER, 0, inputs, plan.in_flight[0] + 1, 2, False)
        add(TARGETS, CALLER, last, targets, plan.in_flight[last] + 1, 2, False)
    return channels


def find_libzmq() -> str:
    """The libzmq inside the pyzmq wheel; empty leaves the search to the core."""
    import zmq

    bundled = Path(zmq.__file__).parent.parent / "pyzmq.libs"
    found = sorted(bundled.glob("libzmq*.so*")) if bundled.is_dir() else []
    return str(found[0]) if found else ""
