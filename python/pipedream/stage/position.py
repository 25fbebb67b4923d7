"""The position of a worker's compute thread in its work, for errors. Owned by that thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from pipedream import _core
from pipedream.common.errors import PipelineError, describe_error
from pipedream.planning.plan import Plan

__all__ = ["Position", "located"]


@dataclass
class Position:
    """The item that is being worked on, for errors."""

    plan: Plan
    rank: int
    stage: int
    minibatch: int = -1

    def __call__(self, what: str) -> str:
        worker = self.plan.describe_worker(self.rank, self.stage)
        return f"{worker} failed at minibatch {self.minibatch} in {what}"


@contextlib.contextmanager
def located(position: Position) -> Iterator[None]:
    """An error of the device comes out of whatever call is the next that waits for it, also of ours."""
    try:
        yield
    except (PipelineError, _core.RunFailure):
        raise  # they say where
    except RuntimeError as error:
        raise PipelineError(f"{position('the work around the model')}: {describe_error(error)}") from error
