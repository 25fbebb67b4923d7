"""The scale of a float16 loss as it goes through the stages: taken at the last stage from what has overflowed
anywhere so far, told upstream with the gradients. Owned by the worker's compute thread.

    overflow   upstream --activations--> downstream, the last stage scales the loss
    scale      upstream <--gradients---- downstream

The minibatches of a round of the last stage have one scale, taken with the first of its activations. Where
rounds drain, an overflow skips the update of all stages, so every replica knows it. Elsewhere each replica of
the last stage has other activations of the round, and what these tell goes to the others with its norms.

Between two segments of a run (worker/segment.py) nothing is under way: what has overflowed before is told
with the activation of the first minibatch after. A run that goes on from another's state tells each overflow
when one run would have: an update stands behind the forwards that are in flight then.
"""

from __future__ import annotations

from typing import Any

from pipedream import _core
from pipedream.model.precision import LossScaler, num_steps_in_flight

__all__ = ["LossScaling"]


class LossScaling:
    """The loss scale of one replica of one stage, for the whole run."""

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
        rounds = _core.rounds_of(schedule, stage_index)
        self._own_per_round = rounds.own_per_round
        """Microbatches; all are counted through the run, as the replica has them."""
        self._next_own = schedule.first_minibatch * schedule.num_microbatches // rounds.num_replicas
        num_delayed = _core.num_gradients_kept(schedule, stage_index) - 1
        in_flight = 1 if drains else schedule.in_flight[stage_index]
        self._delay = in_flight - 1 + num_delayed * self._own_per_round
        self._skipped: list[int] = []
        """Updates that overflowed, each by the microbatch that is the first to be forwarded after it."""
        self._late: list[int] = []
        """The same, of the run before this one: what it has not told of."""
        self._heard_at: list[int] = []
        """Likewise updates that have told of an overflow since the last round began."""
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
        own = self._next_own
        self._next_own += 1
        if self._scaler is None:
            return
        if not self._exchanges:
            self._heard = self._heard or overflowed or told
        round_index = minibatch // self._minibatches_per_scale
        if round_index != self._round:
            self._round = round_index
            heard = self._heard or any(at <= own for at in self._heard_at)
            self._heard, self._heard_at = False, [at for at in self._heard_at if at > own]
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
        """Keeps, at the end of a segment, whether an update was skipped that nobody has been told of."""
        self._kept = self._kept or overflowed or bool(self._late)
        self._heard = self._heard or bool(self._heard_at)
        self._late, self._heard_at = [], []

    def take_kept(self) -> bool:
        """Whether a skipped update is still to be told with the next forward, one of the run before included.
        Forgets it."""
        kept, self._kept = self._kept or any(at <= self._next_own for at in self._late), False
        if self._late:
            self._late = [at for at in self._late if at > self._next_own]
        return kept

    def hear(self, round_index: int, *, overflowed: bool) -> None:
        """Notes, at an update, whether its round overflowed or was told of an overflow at any replica."""
        if self._exchanges and overflowed:
            self._heard_at.append(self._first_after(round_index))

    def note_skipped(self, round_index: int) -> None:
        """An update overflowed here, or at a stage that it is made with."""
        # Those too that a run has not told of which continues from a boundary before what is in flight.
        self._skipped = [at for at in self._skipped if at >= self._next_own - self._delay]
        self._skipped.append(self._first_after(round_index))

    def _first_after(self, round_index: int) -> int:
        """The first microbatch that is forwarded after the update of a round."""
        return (round_index + 1) * self._own_per_round + self._delay

    def state(self, next_own: int) -> dict[str, Any]:
        """Gives it as JSON, for a run that ends before the microbatch."""
        scaler = self._scaler
        return {
            "scaler": None if scaler is None else scaler.state(),
            "round": self._round,
            "scale": self.scale,
            "told": sorted(self._told),
            "heard": self._heard,
            "heard_at": self._heard_at,
            "late": [at for at in (*self._late, *self._skipped) if at >= next_own],
        }

    def go_on(self, state: dict[str, Any]) -> None:
        """Takes over what state() gave."""
        if self._scaler is not None:
            self._scaler.go_on(state["scaler"])
        self._round, self.scale, self._heard = state["round"], state["scale"], state["heard"]
        self._told, self._heard_at = set(state["told"]), state["heard_at"]
        self._late = state["late"]
