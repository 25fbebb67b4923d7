"""StepCheckpoints makes the folder checkpoint-N, which the Trainer would make, from two sources.

    the pipeline   checkpoint after step N: weights, optimizer, data     complete some time after the step
    the Trainer    its state at step N, its scheduler                    known when the step is reported
    checkpoint-N   the model's files, trainer_state.json, pipedream/     written when both are there

Runs on the thread that called train(); under torchrun, on that of rank 0.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer_utils import rotate_checkpoints

from pipedream.checkpoint.checkpoint_folder import checkpoints_in, find_checkpoint
from pipedream.checkpoint.whole_model import read_whole_state

if TYPE_CHECKING:
    from pipedream.integrations.transformers import PipelineTrainer

__all__ = ["SchedulerState", "StepCheckpoints", "pipeline_state", "pipeline_state_in"]

_STATE_FOLDER = "pipedream"  # a folder in checkpoint-N
_SCHEDULER = "scheduler.pt"  # a file in that folder


def pipeline_state_in(folder: str) -> bool:
    """Whether the folder checkpoint-N contains a checkpoint of a pipeline."""
    return (Path(folder) / _STATE_FOLDER).is_dir()


def pipeline_state(folder: str) -> str:
    """Returns the path of the pipeline's checkpoint in the folder checkpoint-N."""
    return str(checkpoints_in(Path(folder) / _STATE_FOLDER)[-1])


@dataclass
class SchedulerState:
    """The state of a scheduler that follows a metric, such as ReduceLROnPlateau. Its changes reach the
    pipeline as factors of the learning rates."""

    scheduler: dict[str, Any]
    factors: dict[int, float]
    """The factors that the pipeline got so far, by step."""
    pending: float
    """The factor that the pipeline gets at the next report."""

    @classmethod
    def of(cls, scheduler: Any, factors: dict[int, float], pending: float) -> SchedulerState:
        return cls(copy.deepcopy(scheduler.state_dict()), dict(factors), pending)

    @classmethod
    def load(cls, folder: str) -> SchedulerState | None:
        """Reads the state from the folder checkpoint-N; returns None if the folder has none."""
        path = Path(folder) / _STATE_FOLDER / _SCHEDULER
        return cls(**torch.load(path, weights_only=True)) if path.exists() else None

    def save(self, folder: Path) -> None:
        torch.save(vars(self), folder / _STATE_FOLDER / _SCHEDULER)

    def give_to(self, scheduler: Any) -> None:
        """Sets the state of a new scheduler, and the rates of its optimizer."""
        scheduler.load_state_dict(self.scheduler)
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


class StepCheckpoints:
    """The checkpoints of one call of train()."""

    def __init__(self, trainer: PipelineTrainer, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder
        self._states: dict[int, tuple[Any, SchedulerState | None] | None] = {}
        """The states of Trainer and scheduler for each step that gets a checkpoint; None until the step has
        been reported."""
        self._complete: dict[int, Path] = {}
        """By step, the pipeline's complete checkpoints that have not become a checkpoint-N yet."""

    def want(self, step: int) -> None:
        """Says that the step gets a checkpoint."""
        self._states.setdefault(step, None)

    def of_step(self, step: int) -> Path:
        return self._folder / f"checkpoint-{step}"

    def note_state(self, scheduler: SchedulerState | None) -> None:
        """Stores the Trainer's present state if want() was called for its step."""
        trainer, step = self._trainer, self._trainer.state.global_step
        if step not in self._states:
            return
        if trainer.state.best_global_step == step:
            trainer.state.best_model_checkpoint = str(self.of_step(step))
        stateful = [*trainer.callback_handler.callbacks, trainer.control]
        for each in stateful:
            if isinstance(each, transformers.trainer_callback.ExportableState):
                trainer.state.stateful_callbacks[type(each).__name__] = each.state()
        self._states[step] = copy.deepcopy(trainer.state), scheduler

    def note_complete(self, step: int, path: Path) -> None:
        self._complete[step] = path

    def write_state_again(self, step: int) -> None:
        """Updates the state in the step's checkpoint-N if the folder has been written already."""
        states = self._states.get(step)
        if states is not None and self.of_step(step).is_dir():
            self._save_states(step, states)

    def finish(self, waiting: set[int], *, is_over: bool = False) -> None:
        """Makes checkpoint-N for each step whose pipeline's checkpoint and Trainer's state are there.

        waiting: steps that must wait, because their evaluations have not been reported. is_over: whether the
        training has ended, so that no step waits any longer.
        """
        for step, path in sorted(self._complete.items()):
            if step in waiting and not is_over:
                continue
            states = self._states.get(step)
            if states is not None:
                self._write(step, path, states)
            elif not is_over and step >= self._trainer.state.global_step:
                continue
            self._complete.pop(step)
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, step: int, path: Path, states: tuple[Any, SchedulerState | None]) -> None:
        trainer, args, folder = self._trainer, self._trainer.args, self.of_step(step)
        whole = read_whole_state(*find_checkpoint(path)[:2], persistent=True)
        trainer._save(str(folder), state_dict=whole.parameters | whole.buffers)
        if not args.save_only_model:
            shutil.rmtree(folder / _STATE_FOLDER, ignore_errors=True)
            (folder / _STATE_FOLDER).mkdir(parents=True)
            shutil.move(path, folder / _STATE_FOLDER / path.name)
        self._save_states(step, states)
        rotate_checkpoints(
            output_dir=str(self._folder),
            save_total_limit=args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )
        trainer.control = trainer.callback_handler.on_save(args, trainer.state, trainer.control)

    def _save_states(self, step: int, states: tuple[Any, SchedulerState | None]) -> None:
        folder, (state, scheduler) = self.of_step(step), states
        if scheduler is not None and (folder / _STATE_FOLDER).is_dir():
            scheduler.save(folder)
        state.save_to_json(str(folder / "trainer_state.json"))
