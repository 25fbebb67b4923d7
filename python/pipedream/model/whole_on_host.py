"""A model on the meta device with values in host memory for as long as its cuts are checked, where it fits.

On the thread that calls profile().
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from torch import nn

from pipedream.common.units import format_bytes
from pipedream.model.initial_weights import WeightSource, materialised
from pipedream.model.layers import roots_of
from pipedream.model.seeding import generators_kept

__all__ = ["free_host_bytes", "whole_for_a_check"]

_log = logging.getLogger("pipedream")

# Of parameters and buffers: the values, gradients of the whole model and of the cut one, what both are
# compared by, and as much again for activations.
_NUM_COPIES = 8
_SEED = 0


@contextlib.contextmanager
def whole_for_a_check(model: nn.Module, weights: WeightSource) -> Iterator[bool]:
    """Whether the model has values inside; else the log says why not."""
    roots = roots_of(model)
    tensors = dict(_named_tensors(model))
    needed_bytes = _NUM_COPIES * sum({id(t): t.nbytes for t in tensors.values()}.values())
    free_bytes = free_host_bytes()
    if needed_bytes > free_bytes:
        _log.warning(
            "the cuts of the model are not checked: it is on the meta device, and whole it would take some"
            " %s, of which %s are free; check a smaller one of the same kind",
            format_bytes(needed_bytes),
            format_bytes(free_bytes),
        )
        yield False
        return
    with generators_kept(), materialised(roots, list(tensors), weights, _SEED):
        yield True


def free_host_bytes() -> int:
    """With what the system keeps of files, as far as it says so."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from model.named_parameters()
    yield from model.named_buffers()  # type: ignore[misc]
