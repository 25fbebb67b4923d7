"""Training is one call of train() of a PipelineTrainer. It makes the plan, starts the run, and reports the
run's steps to the Trainer and its callbacks. A step of the Trainer is a minibatch of the run. Runs on the
thread that called train().
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import SaveStrategy

from pipedream import _core
from pipedream.callbacks.callback import (
    Callback,
    CheckpointReport,
    Decision,
    EvaluationReport,
    MinibatchReport,
)
from pipedream.checkpoint.checkpoints import Checkpoints
from pipedream.common.own_rank import is_rank_0, under_torchrun
from pipedream.data.stream import num_minibatches_of
from pipedream.integrations.steps import HeldOut, Steps, joined, share_of_loss
from pipedream.integrations.trainer_checkpoints import (
    SchedulerState,
    StepCheckpoints,
    pipeline_state,
    pipeline_state_in,
)
from pipedream.integrations.trainer_parts import (
    Predictions,
    autocast_of,
    divides_by_items,
    in_memory,
    loss_form,
    loss_of_batch,
    plain_loader,
)
from pipedream.integrations.whole_optimizer import StageOptimizers, StageSchedulers, options_of
from pipedream.launch.profiling import profile
from pipedream.launch.runner import run
from pipedream.model.batch_norm import has_batch_norm
from pipedream.model.seeding import generators_kept
from pipedream.model.validation import Validation
from pipedream.planning.partition_arguments import AUTO
from pipedream.planning.plan import Plan
from pipedream.planning.plan_schedule import schedule_of
from pipedream.report.result import RunResult

if TYPE_CHECKING:
    from pipedream.integrations.transformers import PipelineTrainer

__all__ = ["Training"]

_UNFINISHED = ".pipedream"  # the folder in output_dir where the run saves its checkpoints
_PROFILE_MINIBATCHES, _PROFILE_S = 20, 20.0
_BY_METRIC = ("ReduceLROnPlateau", "GreedyLR")


class Training:
    """One call of train()."""

    def __init__(
        self, trainer: PipelineTrainer, trial: Any, ignored_keys: list[str] | None, resumed: str | None
    ) -> None:
        self._trainer = trainer
        self._trial = trial
        self._ignored_keys = ignored_keys
        self._resumed = resumed
        self._output_dir = Path(trainer.args.output_dir)
        prepared = trainer.get_train_dataloader()
        values = trainer.set_initial_training_values(trainer.args, prepared)
        self._num_epochs, self._steps_per_epoch, _, self.num_train_samples = values[:4]
        self._batches_per_epoch, steps = values[5:]
        self._num_steps: int = steps
        self._loader = plain_loader(prepared)
        trainer._init_training_state(steps, self._steps_per_epoch, self._num_epochs, resumed, trial)
        self._form = loss_form(trainer)
        self._prepare_optimizer()
        self._first_step = trainer.state.global_step
        self._stop = False
        self.is_reporting = False
        """Whether the Trainer is asking for the figures of an evaluation that the pipeline has made."""
        self._trained: list[bool] | None = None
        """Whether each parameter is trained, at the first report."""
        self._factor = 1.0
        self._metrics: dict[int, dict[str, float]] = {}
        """By step, the metrics of evaluations that have not been reported to the Trainer."""
        self._asked: set[int] = set()
        """The steps of evaluations that callbacks have asked for and that have not been reported."""
        self._factors: dict[int, float] = {}
        """The factors of the learning rates that the pipeline got so far, by step."""
        self._step_checkpoints = StepCheckpoints(trainer, self._output_dir)
        self._validates = trainer.args.eval_strategy != "no"
        self._saves = trainer.args.save_strategy != "no"
        self.began_s = time.time()
        self._check()
        if self._resumed is not None and self._by_metric:
            self._resume_scheduler(self._resumed)

    def _check(self) -> None:
        args = self._trainer.args
        adapters: dict[str, Any] = getattr(self._trainer.model, "peft_config", {})
        if self._saves and any(getattr(each, "is_prompt_learning", False) for each in adapters.values()):
            raise ValueError(
                f"save_strategy is {args.save_strategy.value!r}, and peft saves the prompts of the model in"
                " this process, which has the weights from before the training: use 'no', and save_model()"
                " after train()"
            )
        if num_minibatches_of(self._loader, 1) is None:
            for name in ("logging_strategy", "eval_strategy", "save_strategy"):
                if getattr(args, name) == "epoch":
                    raise ValueError(
                        f"{name} is 'epoch', and train_dataset has no length, so only the workers know where"
                        " an epoch ends: use 'steps'"
                    )
        if self._validates and isinstance(self._trainer.eval_dataset, dict):
            raise ValueError(
                "eval_dataset is a dict, and a training evaluates one dataset: give one, or"
                " eval_strategy='no' and evaluate() after train()"
            )
        includes_loss = "loss" in self._trainer.args.include_for_metrics
        if self._validates and includes_loss and self._trainer.compute_metrics is not None:
            raise ValueError(
                "include_for_metrics has 'loss', and the losses of single batches are not kept in a pipeline:"
                " leave it out, or use eval_strategy='no' and evaluate() after train()"
            )
        if self._resumed is not None and not pipeline_state_in(self._resumed):
            raise ValueError(
                f"{self._resumed} has no folder 'pipedream', the state of a pipeline: it was saved by"
                " another Trainer, or with save_only_model; load its model and start a new training"
            )

    def _resume_scheduler(self, folder: str) -> None:
        scheduler = self._trainer.lr_scheduler
        state = SchedulerState.load(folder)
        if state is None:
            raise ValueError(
                f"{folder} has no state of a {type(scheduler).__name__}: it was saved with another"
                " lr_scheduler_type; use that one, or load its model and start a new training"
            )
        state.give_to(scheduler)
        self._note_options()
        self._factors, self._factor = state.factors, state.pending

    def _prepare_optimizer(self) -> None:
        trainer = self._trainer
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
        trainer.create_optimizer()
        is_used = trainer.optimizer is trainer._used_optimizer or bool(trainer.optimizer.state)
        if is_used and self._resumed is None:
            raise ValueError(
                "the optimizer has made steps before this train(), and workers begin with new state: set"
                " trainer.optimizer = None for a new optimizer, or give resume_from_checkpoint"
            )
        trainer.create_scheduler(num_training_steps=self._num_steps)
        self._optimizers = StageOptimizers(trainer.optimizer, trainer.model)
        self._by_metric = type(trainer.lr_scheduler).__name__ in _BY_METRIC
        self._schedulers = None if self._by_metric else StageSchedulers(trainer.lr_scheduler)
        # Without this mark torch would warn, because this optimizer makes no step.
        trainer.optimizer._opt_called = True
        for _ in range(0 if self._by_metric else trainer.state.global_step):
            trainer.lr_scheduler.step()
        self._note_options()
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(trainer.callback_handler, name, getattr(trainer, name))
        trainer.callback_handler.train_dataloader = self._loader

    def _note_options(self) -> None:
        self._options = copy.deepcopy(options_of(self._trainer.optimizer))

    # The plan.

    def agree_on_plan(self, prefix: str | None) -> Plan:
        """Returns rank 0's plan, with the microbatches of the run."""
        asked = self._trainer._asked_plan
        plan = asked.agreed(self._make_plan, None if prefix is None else f"{prefix}/plan")
        self._microbatches = self._microbatches_for(plan)
        self._pieces_per_batch = self._microbatches // self._trainer.args.gradient_accumulation_steps
        if self._pieces_per_batch > 1:
            self._form = dataclasses.replace(
                self._form, divides_by_items=divides_by_items(self._trainer, self._form, self._loader)
            )
        if asked.given is None and is_rank_0():
            print(asked.describe(plan), flush=True)
        drains = _core.drains_every_minibatch(schedule_of(plan, self._schedule_of(plan), self._microbatches))
        if self._trainer.args.save_strategy == SaveStrategy.BEST and not drains:
            raise ValueError(
                f"save_strategy is 'best', and schedule {self._schedule_of(plan)!r} saves some minibatches"
                " after the evaluation: use one that drains, or save_strategy 'epoch' or 'steps'"
            )
        if self._microbatches < plan.num_stages and drains and is_rank_0():
            bubble = (plan.num_stages - 1) / (self._microbatches + plan.num_stages - 1)
            print(
                f"{self._microbatches} microbatches on {plan.num_stages} stages: workers wait about"
                f" {100 * bubble:.0f} % of the time; raise gradient_accumulation_steps or the batch size",
                flush=True,
            )
        # The plan's shapes are dropped, because they are the shapes of whole minibatches, not of
        # microbatches.
        return dataclasses.replace(plan, microbatches=self._microbatches, max_shapes={}, shapes_apart=())

    def _make_plan(self) -> Plan:
        trainer, form = self._trainer, dataclasses.replace(self._form, gives_items=False)
        with generators_kept():
            batches = joined(copy.deepcopy(self._loader), trainer.args.gradient_accumulation_steps)
        profiled = profile(
            trainer.model.train(),
            [form.parts(batch, 1.0) for batch in batches],
            loss_of_batch(trainer, form),
            minibatches=_PROFILE_MINIBATCHES,
            seconds=_PROFILE_S,
            autocast=autocast_of(trainer.args),
        )
        asked = trainer._asked_plan
        plan = asked.make(profiled, trainer._schedule, None)
        microbatches = self._microbatches_for(plan)
        if microbatches == plan.microbatches:
            return plan
        return asked.make(profiled, plan.schedule or trainer._schedule, microbatches)

    def _schedule_of(self, plan: Plan) -> str:
        given: str = self._trainer._schedule
        return plan.schedule or "pipedream" if given == AUTO else given

    def _microbatches_for(self, plan: Plan) -> int:
        """Returns the number of microbatches of a run with this plan. It is a multiple of the number of
        batches in a step. If the model has batch norm, batches are not cut, except with schedule="auto"; if
        the plan would cut them, a line says so.
        """
        accumulated: int = self._trainer.args.gradient_accumulation_steps
        pieces = -(-(plan.microbatches or 1) // accumulated)
        if pieces > 1 and self._trainer._schedule != AUTO and has_batch_norm(self._trainer.model):
            pieces = 1
            if is_rank_0():
                print(
                    "batches are trained on whole: batch norm would normalize each piece by itself; a larger"
                    " gradient_accumulation_steps gives more microbatches",
                    flush=True,
                )
        found: int = accumulated * min(pieces, self._trainer._train_batch_size)
        return found

    # The run.

    def run(self, plan: Plan) -> RunResult:
        trainer, args = self._trainer, self._trainer.args
        data = Steps(
            self._loader,
            self._form,
            num_steps=self._num_steps,
            batches_per_step=args.gradient_accumulation_steps,
            pieces_per_batch=self._pieces_per_batch,
        )
        if is_rank_0() and self._saves:
            shutil.rmtree(self._output_dir / _UNFINISHED, ignore_errors=True)
        trainer.model.train()
        result = run(
            trainer.model,
            plan,
            data=data,
            loss_fn=loss_of_batch(trainer, self._form),
            optimizer=self._optimizers,
            lr_scheduler=self._schedulers,
            weight_fn=share_of_loss,
            schedule=self._schedule_of(plan),
            microbatches=self._microbatches,
            recompute=True if trainer._recomputes else None,
            autocast=autocast_of(args),
            max_grad_norm=args.max_grad_norm or None,
            validation=self._validation(),
            checkpoints=self._checkpoints(),
            callbacks=[Reporter(self)],
            seed=args.seed,
            on_nonfinite="continue" if args.logging_nan_inf_filter else "stop",
            gather="all" if under_torchrun() else "rank0",
            progress=False,
        )
        if not is_rank_0():
            trainer.state.global_step = len(result.losses)
        return result

    def _validation(self) -> Validation | None:
        trainer, args = self._trainer, self._trainer.args
        if not self._validates:
            return None
        loader = plain_loader(trainer.get_eval_dataloader())
        every = self._steps_per_epoch if args.eval_strategy == "epoch" else int(trainer.state.eval_steps)
        held_out = in_memory(HeldOut(loader, self._form))
        if trainer.compute_metrics is None or args.prediction_loss_only:
            return Validation(held_out, every=every)
        predictions = Predictions(trainer, self._ignored_keys)
        return Validation(
            held_out, {"compute_metrics": predictions.measure}, every=every, outputs=predictions.kept
        )

    def _checkpoints(self) -> Checkpoints | None:
        """Returns the argument `checkpoints` of the run; None if the Trainer saves nothing. The Trainer
        chooses the steps with a checkpoint, and tell() asks the run for them. The run also saves at its end,
        because all its data are one epoch.
        """
        if not self._saves:
            return None
        resume: bool | str = False
        if self._resumed is not None:
            resume = pipeline_state(self._resumed)
        return Checkpoints(self._output_dir / _UNFINISHED, every="epoch", resume=resume)

    # Reports to the Trainer.

    def begin(self) -> None:
        trainer = self._trainer
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer._initial_global_step = trainer.state.global_step
        trainer._tr_loss = torch.tensor(0.0, dtype=torch.float64)
        trainer._total_loss_scalar = 0.0
        trainer._globalstep_last_logged = trainer.state.global_step
        self.call("on_train_begin")
        if trainer.args.eval_on_start:
            trainer._evaluate(self._trial, self._ignored_keys, skip_scheduler=True)

    def end(self, *, is_interrupted: bool) -> None:
        """Reports the evaluation at the last step if it is still due, unless Ctrl-C ended the training. Then
        makes the folders checkpoint-N that are not made yet. Does nothing at ranks other than 0.
        """
        if not is_rank_0():
            return
        trainer = self._trainer
        step = trainer.state.global_step
        if trainer.control.should_evaluate and not is_interrupted:
            self._evaluate()
            if trainer.control.should_save:  # save_strategy 'best' decides after the evaluation
                self._step_checkpoints.want(step)
                trainer.control.should_save = False
            self._note_state()
            self._step_checkpoints.write_state_again(step)
        self._step_checkpoints.finish(set(), is_over=True)
        shutil.rmtree(self._output_dir / _UNFINISHED, ignore_errors=True)

    def call(self, event: str, *given: Any) -> None:
        """Calls an event of all TrainerCallbacks, such as "on_step_end"."""
        trainer = self._trainer
        handler = getattr(trainer.callback_handler, event)
        trainer.control = handler(trainer.args, trainer.state, trainer.control, *given)

    def note_evaluation(self, report: EvaluationReport) -> None:
        if report.minibatch <= self._first_step:
            return
        figures = dict(report.metrics)
        metrics = {"eval_loss": figures.pop("loss")}
        figures.pop("compute_metrics", None)
        metrics |= {key if key.startswith("eval_") else f"eval_{key}": v for key, v in figures.items()}
        self._metrics[report.minibatch] = metrics

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of the latest evaluation that has not been reported, up to the present step.
        All evaluations up to this step then count as reported.
        """
        self.is_reporting = False
        steps = [step for step in self._metrics if step <= self._trainer.state.global_step]
        found = self._metrics[max(steps)]
        for step in steps:
            del self._metrics[step]
        return found

    def tell(self, report: MinibatchReport) -> Decision:
        """Reports the steps of the report to the Trainer, and returns a decision for the run. If the run
        continues from a checkpoint, steps before the checkpoint are not reported; only their rate factors are
        returned.
        """
        if report.end <= self._first_step:
            return Decision(rate_factor=self._factors.get(report.end, 1.0))
        if self._trained is None:
            self._trained = self._trained_of_model()
        norms = [*report.gradient_norms]
        for index, loss in enumerate(report.losses):
            self._tell_step(loss, norms[index] if index < len(norms) else None)
        control = self._trainer.control
        decision = Decision(stop=self._stop or control.should_training_stop, rate_factor=self._factor)
        if self._factor != 1.0:
            self._factors[report.end] = self._factor
            self._factor = 1.0
        takes_effect = report.takes_effect
        if control.should_evaluate and takes_effect is not None:
            if not self._validates:
                raise ValueError(
                    "a callback set should_evaluate, and eval_strategy is 'no': set eval_strategy='steps',"
                    " with eval_steps as large as you want"
                )
            if self._trainer.args.save_strategy == SaveStrategy.BEST:
                raise ValueError(
                    "a callback set should_evaluate, and save_strategy is 'best': its figures come when the"
                    " weights are gone; set save_strategy='steps', or evaluate by eval_strategy alone"
                )
            self._asked.add(takes_effect)
            decision |= Decision(evaluate=True)
        if control.should_save:
            if not self._saves:
                raise ValueError(
                    "a callback set should_save, and save_strategy is 'no': set save_strategy='steps',"
                    " with save_steps as large as you want"
                )
            step = self._trainer.state.global_step if takes_effect is None else takes_effect
            self._step_checkpoints.want(step)
            decision |= Decision(checkpoint=takes_effect is not None)
            control.should_save = False
        self._note_state()
        self._step_checkpoints.finish(self._asked)
        return decision

    def _tell_step(self, loss: float, norm: float | None) -> None:
        trainer, state, args = self._trainer, self._trainer.state, self._trainer.args
        self._tell_asked_evaluation()
        epoch, step_of_epoch = divmod(state.global_step, self._steps_per_epoch)
        if step_of_epoch == 0:
            self.call("on_epoch_begin")
        accumulated = args.gradient_accumulation_steps
        batches = min((step_of_epoch + 1) * accumulated, self._batches_per_epoch)
        self.call("on_step_begin")
        for _ in range(batches - step_of_epoch * accumulated - 1):
            self.call("on_substep_end")
        is_filtered = args.logging_nan_inf_filter and not abs(loss) < float("inf")
        since = 1 + state.global_step - trainer._globalstep_last_logged
        trainer._tr_loss += trainer._tr_loss / since if is_filtered else loss
        self.call("on_pre_optimizer_step")
        self.call("on_optimizer_step")
        rate = trainer._get_learning_rate()
        self._check_untouched()
        if not self._by_metric:
            trainer.lr_scheduler.step()
            self._note_options()
        state.global_step += 1
        state.epoch = epoch + batches / self._batches_per_epoch
        self.call("on_step_end")
        is_end_of_epoch = (step_of_epoch + 1) % self._steps_per_epoch == 0
        if trainer.control.should_epoch_stop and not is_end_of_epoch:
            raise ValueError(
                "a callback set should_epoch_stop, and the data of an epoch are on their way: set"
                " should_training_stop, or shorten the dataset"
            )
        self._log_and_evaluate(norm, rate)
        if is_end_of_epoch or state.global_step == self._num_steps:
            self.call("on_epoch_end")
            self._log_and_evaluate(norm, rate)
        self._stop |= trainer.control.should_training_stop
        self._note_state()

    def _check_untouched(self) -> None:
        """Raises ValueError if a callback has changed what the workers have their own copies of."""
        trainer, step = self._trainer, self._trainer.state.global_step + 1
        if options_of(trainer.optimizer) != self._options:
            raise ValueError(
                f"a callback changed the optimizer's options before step {step}, which the workers have made"
                " without the change: use an lr_scheduler"
            )
        if self._trained != self._trained_of_model():
            raise ValueError(
                f"a callback froze or thawed parameters before step {step}, which the workers have made"
                " without the change: freeze or thaw them before train()"
            )

    def _trained_of_model(self) -> list[bool]:
        if under_torchrun():  # this process is a worker, which notices the change itself
            return []
        return [parameter.requires_grad for parameter in self._trainer.model.parameters()]

    def _tell_asked_evaluation(self) -> None:
        """Reports an evaluation that a callback asked for. Its figures come one step after the step at which
        the evaluation takes place."""
        step = self._trainer.state.global_step
        if step in self._asked and self._has_metrics():
            self._asked.discard(step)
            self._evaluate()
            self._note_state()

    def _log_and_evaluate(self, norm: float | None, rate: float) -> None:
        trainer, state, control = self._trainer, self._trainer.state, self._trainer.control
        num_steps = state.global_step - trainer._globalstep_last_logged
        if control.should_log and num_steps > 0:
            loss = trainer._tr_loss.item()
            trainer._tr_loss.zero_()
            logs = {"loss": loss / num_steps}
            if norm is not None:
                logs["grad_norm"] = norm
            trainer._total_loss_scalar += loss
            trainer._globalstep_last_logged = state.global_step
            trainer.log(logs | {"learning_rate": rate}, self.began_s)
        if control.should_evaluate and self._has_metrics():
            self._evaluate()

    def _has_metrics(self) -> bool:
        return any(step <= self._trainer.state.global_step for step in self._metrics)

    def _evaluate(self) -> None:
        trainer = self._trainer
        before = [group["lr"] for group in trainer.optimizer.param_groups]
        self.is_reporting = True
        metrics = trainer._evaluate(self._trial, self._ignored_keys)
        trainer.control.should_evaluate = False
        after = [group["lr"] for group in trainer.optimizer.param_groups]
        if self._by_metric:
            self._factor *= self._common_factor(before, after)
            self._note_options()
        is_best = trainer._determine_best_metric(metrics=metrics, trial=self._trial)
        if trainer.args.save_strategy == SaveStrategy.BEST:
            trainer.control.should_save = is_best

    def _common_factor(self, before: list[float], after: list[float]) -> float:
        """Returns the factor by which the scheduler multiplied all rates. Raises ValueError if the groups
        have different factors."""
        factors = [new / old for old, new in zip(before, after, strict=True) if old]
        if factors and max(factors) > min(factors) * (1 + 1e-9):
            raise ValueError(
                f"the {type(self._trainer.lr_scheduler).__name__} changed the rates of its groups by"
                f" {min(factors):g} to {max(factors):g}, and a pipeline multiplies all by one factor: give"
                " lr_scheduler_kwargs limits that all groups reach alike"
            )
        return factors[0] if factors else 1.0

    # Checkpoints.

    def _note_state(self) -> None:
        scheduler = self._trainer.lr_scheduler
        self._step_checkpoints.note_state(
            SchedulerState.of(scheduler, self._factors, self._factor) if self._by_metric else None
        )

    def note_checkpoint(self, report: CheckpointReport) -> None:
        self._step_checkpoints.note_complete(report.minibatch, report.path)
        self._step_checkpoints.finish(self._asked)


class Reporter(Callback):
    """Passes the reports of a run to its Training."""

    every = 1
    wants_gradient_norms = True

    def __init__(self, training: Training) -> None:
        self._training = training

    def on_evaluation(self, report: EvaluationReport) -> None:
        self._training.note_evaluation(report)

    def on_minibatches(self, report: MinibatchReport) -> Decision:
        return self._training.tell(report)

    def on_checkpoint(self, report: CheckpointReport) -> None:
        self._training.note_checkpoint(report)
