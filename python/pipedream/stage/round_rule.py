"""Which minibatches of a run are one replica's in a round. Pure; any thread."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoundRule"]


@dataclass(frozen=True)
class RoundRule:
    """How minibatches fall on rounds, as csrc/schedule/rounds.h has it, of one replica."""

    replica: int
    num_replicas: int
    minibatches_per_round: int
    first_minibatch: int = 0

    def round_of(self, minibatch: int) -> int:
        return minibatch // self.minibatches_per_round

    def first_own(self, round_index: int) -> int:
        """This replica's first minibatch of the round, if there are so many."""
        return round_index * self.minibatches_per_round + self.replica

    def num_own(self, round_index: int, num_minibatches: int | None) -> int:
        """This replica's minibatches in a round whose backwards it has done. num_minibatches: None while it
        does not know them, and so has had all that a round may have."""
        first = self.first_own(round_index)
        end = (round_index + 1) * self.minibatches_per_round
        if num_minibatches is not None:
            end = min(end, num_minibatches)
        return len(range(first, end, self.num_replicas))

    def is_last_own(self, minibatch: int, num_minibatches: int | None) -> bool:
        """Whether this replica, which has it, has none of its round after it. num_minibatches: None while it
        does not know them, and so takes the round for whole."""
        end = (self.round_of(minibatch) + 1) * self.minibatches_per_round
        if num_minibatches is not None:
            end = min(end, num_minibatches)
        return minibatch + self.num_replicas >= end

    def num_pushed(self, num_minibatches: int) -> int:
        """The rounds in which this replica has a minibatch, those before the run's first included."""
        return max(0, -(-(num_minibatches - self.replica) // self.minibatches_per_round))
