"""Chooses the scale of a float16 loss. The last stage multiplies the loss by the scale, and chooses the scale
by the overflows that stages have reported. Owned by the worker's compute thread.

    reports of overflows   upstream --activations--> downstream
    scale                  upstream <--gradients---- downstream

The minibatches of a round of the last stage share one scale. The last stage chooses it with the first
activation of the round. If the schedule drains, an overflow skips the update of all stages, so every replica
knows of it. Otherwise each replica of the last stage receives different activations, and so different
reports. The replicas exchange these reports with their norms.

Nothing is in flight between two segments of a run (worker/segment.py). If a segment ends before an overflow
was reported, the first activation of the next segment reports it. A run that continues from the state of an
earlier run reports each overflow with the same activation as an unbroken run: the first activation that is
forwarded after the skipped update.
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
        self._schedule = schedule
        self._num_replicas = rounds.num_replicas
        self._own_per_round = rounds.own_per_round
        """The number of this replica's microbatches in a round. This class numbers the microbatches of this
        replica alone, through the whole run."""
        self._next_own = self._own_before(schedule.first_minibatch)
        num_delayed = _core.num_gradients_kept(schedule, stage_index) - 1
        in_flight = 1 if drains else schedule.in_flight[stage_index]
        self._delay = in_flight - 1 + num_delayed * self._own_per_round
        self._skipped: list[int] = []
        """Updates that overflowed. An update is given as the number of the first microbatch that is forwarded
        after it."""
        self._late: list[int] = []
        """Updates that overflowed in the earlier run that this run continues, and that no activation has
        reported. Numbers as in `_skipped`."""
        self._heard_at: list[int] = []
        """Updates whose exchange of norms reported an overflow (hear()). Numbers as in `_skipped`. The first
        scale that is chosen at that microbatch or later takes the report into account."""
        self._minibatches_per_scale = _core.rounds_of(schedule, last).minibatches_per_round
        self._exchanges = self._scaler is not None and num_replicas > 1 and not drains
        self._round = -1  # the round that `scale` belongs to
        self._told: set[int] = set()  # rounds in which an activation has reported an overflow
        self._heard = False
        """Whether an overflow was reported since the last scale was chosen. Activations and this stage's own
        updates bring the reports. If replicas exchange reports, _heard_at has them instead, except those from
        an earlier segment."""
        self._kept = False  # whether the previous segment left an overflow that no activation has reported
        self.scale = 1.0
        """At the last stage, the scale of the microbatch that is being forwarded."""

    def begin_forward(self, minibatch: int, *, overflowed: bool, told: bool) -> None:
        """Begins the next microbatch. overflowed: whether gradients of this stage have overflowed since the
        previous microbatch. told: whether the microbatch's activation reports an overflow upstream."""
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
        elif self._drains:
            # Later activations of the round repeat the report of the first, which already counts.
            self._heard = False

    def note_told(self, minibatch: int) -> None:
        if self._exchanges:
            self._told.add(minibatch // self._minibatches_per_scale)

    def take_told(self, minibatch: int) -> bool:
        """Returns whether an activation of the minibatch's round has reported an overflow, and clears the
        note. The caller tells the other replicas."""
        round_index = minibatch // self._minibatches_per_scale
        told = round_index in self._told
        self._told.discard(round_index)
        return told

    def keep(self, *, overflowed: bool) -> None:
        """Notes at the end of a segment whether an update was skipped that no activation has reported yet.
        The next segment then reports it."""
        self._kept = self._kept or overflowed or bool(self._late)
        self._heard = self._heard or bool(self._heard_at)
        self._late, self._heard_at = [], []

    def take_kept(self) -> bool:
        """Returns whether the next forward must report a skipped update, and clears the note. The update may
        belong to the earlier run that this run continues."""
        kept, self._kept = self._kept or any(at <= self._next_own for at in self._late), False
        if self._late:
            self._late = [at for at in self._late if at > self._next_own]
        return kept

    def hear(self, round_index: int, *, overflowed: bool) -> None:
        """Notes the report of an update. overflowed: whether any replica found an overflow in the round, or
        received a report of one."""
        if self._exchanges and overflowed:
            self._heard_at.append(self._first_after(round_index))

    def note_skipped(self, round_index: int) -> None:
        """Notes that an update overflowed at this stage, or at a stage that skips its updates with it."""
        # A later run may continue at a boundary before the microbatches now in flight. It must report the
        # updates skipped since that boundary again, so they are kept.
        self._skipped = [at for at in self._skipped if at >= self._next_own - self._delay]
        self._skipped.append(self._first_after(round_index))

    def _first_after(self, round_index: int) -> int:
        """Returns the number of the first microbatch that is forwarded after the round's update."""
        return (round_index + 1) * self._own_per_round + self._delay

    def _own_before(self, minibatch: int) -> int:
        """Returns the number of this replica's microbatches before the minibatch, which begins a round."""
        return minibatch * self._schedule.num_microbatches // self._num_replicas

    def state(self, minibatch: int) -> dict[str, Any]:
        """Returns the state as a value for JSON, for a run that ends before this minibatch."""
        scaler, next_own = self._scaler, self._own_before(minibatch)
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
        """Takes over the result of state()."""
        if self._scaler is not None:
            self._scaler.go_on(state["scaler"])
        self._round, self.scale, self._heard = state["round"], state["scale"], state["heard"]
        self._told, self._heard_at = set(state["told"]), state["heard_at"]
        self._late = state["late"]
