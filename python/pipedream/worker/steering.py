"""Steering carries questions from the first stage to the callbacks of a run, and answers back. Questions are
asked at boundaries, which lie between groups of minibatches (stage/boundaries.py).

    rank 0         asks: it writes a line into a file of the run's folder
    caller         looks into the file, calls the callbacks, and publishes the answer
    stage 0        waits for the answer at the boundary where the answer is due, if callbacks may decide
    every stage    reads the answer where the learning rate changes

Questions and answers are rare, and minibatches wait for them only at stage 0. The rendezvous carries answers,
each under the boundary at which it is due, and the figures of evaluations. Under torchrun there is no caller:
rank 0 keeps its question, and calls the callbacks at the boundary where the answer is due. Stage 0 then
always waits. LocalSteering and answers_of() run on the thread that called run(), the workers' part on their
compute threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipedream import _core
from pipedream.callbacks.callback import Decision
from pipedream.callbacks.steering import Evaluated, Question, Steering
from pipedream.links.rendezvous import Rendezvous
from pipedream.planning.plan import Plan
from pipedream.report.status import LOOK_S, StatusBoard
from pipedream.stage.boundaries import EVALUATE, RATE, SNAPSHOT, STOP
from pipedream.stage.decisions import (
    AnswerWay,
    Asking,
    RateChanges,
    Steered,
    Stopping,
    answer_lead,
    stop_lead,
)
from pipedream.stage.evaluation import evaluation_name
from pipedream.stage.job import JobOptions
from pipedream.worker.agreed_run import AgreedRun, wait_while_linked
from pipedream.worker.worker_optimizers import WorkerOptimizers

__all__ = ["LocalSteering", "answers_of", "steered"]

_QUESTIONS = "questions"
_ANSWER_S = 0.005
_CHECKPOINTS_S = 0.25  # seconds between two looks for new checkpoints


def steered(run: AgreedRun, optimizers: WorkerOptimizers, steering: Steering | None) -> Steered:
    """Returns the objects that steer this worker through the whole run. steering: None except at rank 0 of
    torchrun."""
    schedule, place, points = run.schedule(), run.place, run.options.call_points
    stopping: Stopping | None = None
    if place.stop_order is not None:
        lead = stop_lead(schedule, sync_every=run.options.replication.sync_every)
        stopping = Stopping(place.stop_order, decides=place.rank == 0, lead=lead)
    if not points.at_epochs:
        return Steered(stopping)
    way: AnswerWay = _WayToRank0(run, steering) if place.folder is None else _WayToCaller(run)
    continues = run.options.continues
    answers = () if continues is None else continues.answers
    asking: Asking | None = None
    if 0 in optimizers.by_stage:
        asking = Asking(
            way,
            points,
            asks=place.rank == 0,
            lead=answer_lead(schedule),
            group_size=_core.minibatches_between_drains(schedule),
            rates=optimizers.by_stage[0].rates,
            first_minibatch=run.options.first_minibatch,
            origin=0 if continues is not None else run.options.first_minibatch,
            answered={due: events for due, events, _ in answers},
            tells_later=continues is not None and continues.tells_later,
        )
    changes = RateChanges(
        way,
        lambda stage, factor: optimizers.by_stage[stage].scale_rates(factor),
        {due: factor for due, events, factor in answers if events & RATE},
    )
    return Steered(stopping, asking, changes)


class _Way:
    """Carries answers to a worker. The subclasses carry questions to the callbacks."""

    def __init__(self, run: AgreedRun) -> None:
        self._rendezvous = run.place.rendezvous
        self._check: Callable[[], None] = lambda: None

    def wait(self, boundary: int, losses: list[float], check: Callable[[], None]) -> int:
        self._check = check
        return int(self._answer(boundary)["events"])

    def rate_factor(self, boundary: int) -> float:
        return float(self._answer(boundary)["rate_factor"])

    def _answer(self, boundary: int) -> dict[str, Any]:
        answer: dict[str, Any]
        (answer,) = self._wait_for([_answer_key(boundary)])
        return answer

    def _wait_for(self, keys: list[str]) -> list[Any]:
        return wait_while_linked(self._rendezvous, keys, self._check)


class _WayToCaller(_Way):
    """Carries questions from a local worker to its caller, which reads them from a file."""

    waits = False  # the caller looks for questions all the time, and knows the losses itself

    def __init__(self, run: AgreedRun) -> None:
        super().__init__(run)
        assert run.place.board is not None and run.place.folder is not None
        self._questions = run.place.folder / _QUESTIONS
        self.note_norm = run.place.board.add_norm

    def ask(self, question: Question) -> None:
        with self._questions.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(question)) + "\n")


class _WayToRank0(_Way):
    """Keeps rank 0's questions under torchrun, and carries the losses of the other replicas of stage 0 to
    rank 0. Rank 0 calls the callbacks when the answer is due, because then the losses have come back to stage
    0 with the gradients."""

    waits = True

    def __init__(self, run: AgreedRun, steering: Steering | None) -> None:
        super().__init__(run)
        self._replica = run.plan.replica_of(run.rank) if run.own_stages() else 0
        self._num_replicas = run.plan.stages[0].num_replicas
        self._steering = steering
        self._norms: list[float] = []
        self.note_norm = self._norms.append
        if steering is not None:
            fix_rates_of_spares(steering, run.plan)
            steering.begin()
            steering.norms = self._norms
        self._open: dict[int, Question] = {}
        """Questions without an answer, by the boundary at which the answer is due."""
        self._losses: list[float] = []

    def ask(self, question: Question) -> None:
        if question.takes_effect is not None:
            self._open[question.takes_effect] = question
        elif self._steering is not None:
            for left in (*self._open.values(), question):  # the run is over, so these questions get no answer
                self._steering.note_last(left)
            self._open.clear()

    def wait(self, boundary: int, losses: list[float], check: Callable[[], None]) -> int:
        self._check = check
        if self._num_replicas > 1:
            self._rendezvous.publish(_losses_key(boundary, self._replica), losses)
        if self._steering is not None:
            if self._num_replicas > 1:
                keys = [_losses_key(boundary, replica) for replica in range(self._num_replicas)]
                losses = [sum(parts) for parts in zip(*self._wait_for(keys), strict=True)]
            self._losses += losses
            question = self._open.pop(boundary)
            found = self._wait_for([*map(evaluation_name, question.evaluations)])
            evaluations = [Evaluated(**each) for each in found]
            decision = self._steering.tell(question, self._losses, evaluations)
            self._rendezvous.publish(_answer_key(boundary), _answer_of(decision))
        return super().wait(boundary, losses, check)


class LocalSteering:
    """Answers the questions of local workers, in the process that called run()."""

    def __init__(
        self,
        steering: Steering,
        options: JobOptions,
        board: StatusBoard,
        folder: Path,
        rendezvous: Rendezvous,
    ) -> None:
        self._steering = steering
        self._plan = options.plan
        self._num_microbatches = options.microbatches
        self._first_minibatch = options.first_minibatch
        self._has_norms = options.measures_gradients
        self._board = board
        self._questions = folder / _QUESTIONS
        self._rendezvous = rendezvous
        fix_rates_of_spares(steering, options.plan)
        self.is_needed = steering.points.at_epochs
        """Whether there are callbacks that look() has to call."""
        # The caller looks more often if the pipeline may wait for its answers.
        self.period_s = _ANSWER_S if steering.points.decides else LOOK_S
        self._num_read = 0  # bytes of the questions' file that have been read
        self._open: list[Question] = []

    def look(self) -> None:
        """Answers the questions whose losses and figures are known. Call it often."""
        if not self.is_needed:
            return
        if self._board.newest() >= 0:
            self._steering.begin()
        self._read_questions()
        while self._open and self._answer(self._open[0]):
            del self._open[0]
        self._steering.tell_of_checkpoints(_CHECKPOINTS_S)
        if self._steering.error is not None:
            self._board.ask_for_stop()  # a callback failed; a run that waits for no answers must stop, too

    def finish(self) -> None:
        """Answers the last questions and reads all norms. Call it after the workers have ended."""
        self.look()
        self._steering.norms = self._board.norms()

    def _answer(self, question: Question) -> bool:
        """Answers the question and returns True. Returns False if losses or figures for the question are not
        known yet."""
        if question.takes_effect is None:
            self._steering.note_last(question)
            return True
        found = self._rendezvous.read([*map(evaluation_name, question.evaluations)])
        if found is None:
            return False
        losses = self._board.losses(self._plan.stages[-1].num_replicas, self._num_microbatches)
        if len(losses) < question.boundary - self._first_minibatch:
            return False
        if self._has_norms:
            self._steering.norms = self._board.norms()
            if len(self._steering.norms) < self._steering.updates_before(question.boundary):
                return False
        decision = self._steering.tell(question, losses, [Evaluated(**each) for each in found])
        self._rendezvous.publish(_answer_key(question.takes_effect), _answer_of(decision))
        return True

    def _read_questions(self) -> None:
        path = self._questions
        if not path.exists() or path.stat().st_size == self._num_read:
            return
        with path.open("rb") as file:
            file.seek(self._num_read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._num_read += len(whole)
        self._open += [Question.from_dict(json.loads(line)) for line in whole.splitlines()]


def fix_rates_of_spares(steering: Steering, plan: Plan) -> None:
    if plan.num_spares:
        steering.why_rates_are_fixed = (
            "the plan has spare shards, which hear of no boundary: use a plan without num_spare_shards"
        )


def _losses_key(boundary: int, replica: int) -> str:
    return f"losses before {boundary}/{replica}"


def _answer_key(boundary: int) -> str:
    return f"answer at {boundary}"


def answers_of(decisions: Sequence[tuple[int, Decision]]) -> list[tuple[int, int, float]]:
    """Returns the answers in the form of Continued.answers. decisions: (minibatch at which the decision takes
    effect, decision)."""
    answers = [(due, _answer_of(decision)) for due, decision in decisions]
    return [(due, answer["events"], answer["rate_factor"]) for due, answer in answers if answer["events"]]


def _answer_of(decision: Decision) -> dict[str, Any]:
    wanted = {
        STOP: decision.stop,
        RATE: decision.rate_factor != 1.0,
        EVALUATE: decision.evaluate,
        SNAPSHOT: decision.checkpoint,
    }
    return {
        "events": sum(event for event, is_wanted in wanted.items() if is_wanted),
        "rate_factor": decision.rate_factor,
    }
