"""The scale of a float16 loss as it goes through the stages: taken at the last stage from what has overflowed
anywhere so far, told upstream with the gradients. Owned by the worker's compute thread.

    overflow   upstream --activations--> downstream, the last stage scales the loss
    scale      upstream <--gradients---- downstream

The minibatches of a round of the last stage have one scale, taken with the first of its activations. Where
rounds drain, an overflow skips the update of all stages, so every replica knows it. Elsewhere each replica of
the last stage has other activations of the round, and what these tell goes to the others with its norms.

Between two segments of a run (launch/segment.py) nothing is under way: what has overflowed before is told
with the activation of the first minibatch after.
"""

from __future__ import annotations

from pipedream import _core
from pipedream.model.precision import LossScaler, num_steps_in_flight

__all__ = ["LossScaling"]


class LossScaling:
    """At one replica of one stage, for the whole run."""

    def __init__(self, schedule: _core.ScheduleOptions, stage_index: int) -> None:
        placement, last = schedule.placement, schedule.num_stages - 1
        num_replicas = placement.num_replicas(last)
        drains = _core.drains_every_minibatch(schedule)
        self._drains = drains
        self._scaler: LossScaler | None = None
        if stage_index == last:
            per_scale = _core.rounds_of(schedule, last).minibatches_per_round * schedule.num_microbatches
            num_in_flight = num_steps_in_flight(
                schedule.in_flight[0], placement.num_replicas(0), num_replicas, per_scale
            )
            self._scaler = LossScaler(1 if drains else num_in_flight)
        self._minibatches_per_scale = _core.rounds_of(schedule, last).minibatches_per_round
        self._exchanges = self._scaler is not None and num_replicas > 1 and not drains
        self._round = -1  # whose scale it is
        self._told: set[int] = set()  # rounds in which an activation has told of an overflow
        self._heard = False
        """Whether an overflow has been told of since the last round began: by updates, or else by
        activations."""
        self._kept = False  # an overflow, of the segment before
        self.scale = 1.0
        """It is that of the microbatch that is being forwarded, at the last stage."""

    def begin_forward(self, minibatch: int, *, overflowed: bool, told: bool) -> None:
        """A microbatch is next. overflowed: whether gradients did at this stage since the one before; told:
        whether its activation says so of a stage upstream."""
        if self._scaler is None:
            return
        if not self._exchanges:
            self._heard = self._heard or overflowed or told
        round_index = minibatch // self._minibatches_per_scale
        if round_index != self._round:
            self._round = round_index
            heard, self._heard = self._heard, False
            self.scale = self._scaler.next_scale(heard)
        elif self._drains:  # every worker tells of the round before, of which the first has told
            self._heard = False

    def note_told(self, minibatch: int) -> None:
        """The activation of the minibatch has told of an overflow."""
        if self._exchanges:
            self._told.add(minibatch // self._minibatches_per_scale)

    def take_told(self, minibatch: int) -> bool:
        """Whether one of the minibatch's round has, for the other replicas."""
        round_index = minibatch // self._minibatches_per_scale
        told = round_index in self._told
        self._told.discard(round_index)
        return told

    def keep(self, *, overflowed: bool) -> None:
        """When a segment is over: whether an update was skipped that nobody has been told of."""
        self._kept = self._kept or overflowed

    def take_kept(self) -> bool:
        kept, self._kept = self._kept, False
        return kept

    def hear(self, *, overflowed: bool) -> None:
        """With an update: whether its round overflowed or has been told of an overflow, at any replica."""
        self._heard = self._heard or (self._exchanges and overflowed)
