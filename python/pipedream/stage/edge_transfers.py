"""Does the transfers that are work items of their own, not part of a forward or backward: gradients and
versions of tied parameters, norms, and the pushes of replicas.

The engine decides when each transfer happens, and carries tensors to other workers. If both stages belong to
this worker, this module passes the tensors from one stage to the other. Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from torch import Tensor

from pipedream import _core
from pipedream.update.gradients import NormExchange
from pipedream.update.shard_client import ShardClient
from pipedream.update.tied import TiedParameters

__all__ = ["EdgeTransfers"]


class EdgeTransfers:
    """Does the SEND and RECV items of one worker."""

    def __init__(
        self,
        schedule: _core.ScheduleOptions,
        tied: Mapping[int, TiedParameters],
        norms: NormExchange | None,
        servers: Mapping[int, ShardClient] | None = None,
    ) -> None:
        """tied: this worker's tied parameters, by stage.
        norms: None if the schedule exchanges no norms.
        servers: by stage, the shard clients of the stages with replicas.
        """
        self._tied = tied
        self._norms = norms
        self._servers = servers or {}
        placement = schedule.placement
        self._in_hand: dict[_core.Edge, deque[list[Tensor]]] = {
            edge: deque()
            for edge in _core.edges_of(schedule)
            if placement.rank_of(edge.from_stage, edge.from_replica)
            == placement.rank_of(edge.to_stage, edge.to_replica)
        }

    def do(self, work: _core.WorkItem, gradient_slot: int = 0) -> list[Tensor]:
        """Does the work item, and returns the tensors to send to another worker. gradient_slot: the slot of
        the version that the stage's last backward read."""
        edge = work.edge
        assert edge is not None
        if edge.kind == "push":  # the core itself does the other transfers between replicas
            self._servers[work.stage].push(work.minibatch, gradient_slot)
            return []
        in_hand = self._in_hand.get(edge)
        if work.kind == "SEND":
            made = self._made_for(edge, work.minibatch)
            if in_hand is None:
                return made
            in_hand.append(made)
        else:
            received = list(work.tensors) if in_hand is None else in_hand.popleft()
            work.tensors.clear()
            self._take(edge, work.minibatch, received)
        return []

    def _made_for(self, edge: _core.Edge, minibatch: int) -> list[Tensor]:
        if edge.kind == "norm":
            assert self._norms is not None
            return [self._norms.send(edge, minibatch)]
        tied = self._tied[edge.from_stage]
        if edge.kind == "tied_gradient":
            return tied.gradients_for(edge.to_stage)
        return tied.version_for(edge.to_stage)

    def _take(self, edge: _core.Edge, minibatch: int, tensors: list[Tensor]) -> None:
        if edge.kind == "norm":
            assert self._norms is not None
            self._norms.receive(edge, minibatch, *tensors)
            return
        tied = self._tied[edge.to_stage]
        if edge.kind == "tied_gradient":
            tied.take_gradients_from(edge.from_stage, tensors)
        else:
            tied.take_version_from(edge.from_stage, edge.from_replica, tensors)
