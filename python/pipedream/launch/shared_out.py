"""A plan of the replicas that each stage is to have, for a model whose layers nobody has counted yet.

On the thread of the command that was given "2-1" in place of a plan's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipedream.data.first_minibatch import PeekedData, first_of, looked_at
from pipedream.launch.target import Job
from pipedream.model.batches import own_loss, parts_of
from pipedream.model.cut_model import cut_model, needs_cutting
from pipedream.model.layers import layers_of
from pipedream.model.precision import autocast_dtype
from pipedream.model.seeding import generators_kept
from pipedream.planning.plan import Plan

__all__ = ["share_out"]


def share_out(job: Job, counts: Sequence[tuple[int, int]], options: Mapping[str, Any]) -> Plan:
    """counts: replicas and spare shards of every stage. options: further arguments of run, as it will be
    given them. A module that is no list of layers runs once with the first minibatch, as in run."""
    plan = Plan.replicated(_num_layers(job, options), [replicas for replicas, _ in counts])
    return plan.with_spare_shards([spares for _, spares in counts])


def _num_layers(job: Job, options: Mapping[str, Any]) -> int:
    if not needs_cutting(job.model):
        return len(layers_of(job.model))
    if isinstance(looked_at(job.data), PeekedData):
        raise ValueError(
            f"data is {_named(job.data)}, which can be read once, and the model's layers are counted with its"
            " first minibatch: give --plan FILE, or let the target return a list or a DataLoader"
        )
    with generators_kept():
        inputs, targets = parts_of(first_of(job.data), 0)
        cut = cut_model(
            job.model,
            inputs,
            targets,
            own_loss if job.loss_fn is None else job.loss_fn,
            autocast=autocast_dtype(options.get("autocast")),
            weights=options.get("weights"),
        )
    return len(cut.layer_names)


def _named(data: Iterable[Any]) -> str:
    return (
        "an iterator" if isinstance(data, Iterator) else f"a {type(data).__name__} that no other process has"
    )
