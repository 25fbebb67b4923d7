"""PipelineTrainer is a transformers.Trainer whose train() runs a pipeline of workers.

    from pipedream.integrations.transformers import PipelineTrainer
    trainer = PipelineTrainer(model=model, args=args, train_dataset=..., workers=2)
    trainer.train()

    in the Trainer                                in the pipeline
    loader, collator, optimizer, scheduler   ->   run(data=Steps, optimizer=StageOptimizers, ...)
    a step's loss and gradient norm          <-   on_minibatches: states, logs, TrainerCallbacks
    evaluate()                               <-   on_evaluation, measured in the pipeline
    checkpoint-N                             <-   on_checkpoint: the model's files, and the pipeline's state

Runs on the thread that calls train(). Under torchrun each rank has a PipelineTrainer, and only that of rank 0
logs and saves.
"""

from __future__ import annotations

import os
from typing import Any

import torch

try:
    import transformers
    from accelerate.state import AcceleratorState
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed: pip install 'pipedream[transformers]' brings it", name=error.name
    ) from None

from pipedream.common.own_rank import is_rank_0, under_torchrun
from pipedream.common.tracebacks import with_short_tracebacks
from pipedream.integrations.asked_plan import AskedPlan
from pipedream.integrations.trainer_run import Training
from pipedream.integrations.training_arguments import check_training_arguments
from pipedream.launch.torchrun import mistakes_told, rendezvous_prefix, shared_by_rank_0
from pipedream.planning.plan import Plan
from pipedream.worker.devices import device_wanted

__all__ = ["PipelineTrainer"]

_NOT_CALLED = ("compute_loss", "training_step", "prediction_step", "get_batch_samples", "evaluation_loop")


class PipelineTrainer(transformers.Trainer):  # type: ignore[misc]  # checked as Any
    """A Trainer that trains with a pipeline of workers.

    It has the arguments of transformers.Trainer, and these:

    plan: a pipedream.Plan, the path of a plan's file, or the replicas of every stage, such as "1-1" for two
        stages. None: the planner chooses the stages. For replicas and None the model is profiled and the plan
        is printed.
    workers: the most workers that the planner may use. Under torchrun the ranks are the workers.
    bandwidth: the bandwidth of the link between two workers, for the planning.
    schedule: the schedule of the run. "flush" gives the numbers of a Trainer on one device, but for example
        dropout draws other masks. "auto" uses the plan's schedule.

    A minibatch has gradient_accumulation_steps batches, each of which is a microbatch. If the plan has more
    microbatches, each batch is cut further. train() evaluates and saves without leaving the pipeline.
    Afterwards the model has the trained weights, and evaluate(), predict() and save_model() are the Trainer's
    own. Raises ValueError for refused arguments, before anything starts (docs/trainer.md).
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | os.PathLike[str] | None = None,
        workers: int | None = None,
        bandwidth: str | float = "10Gbit/s",
        schedule: str = "flush",
        **kwargs: Any,
    ) -> None:
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is None:  # transformers.Trainer has the same default
            given = transformers.TrainingArguments("tmp_trainer")
            if len(args) > 1:
                args = (args[0], given, *args[2:])
            else:
                kwargs["args"] = given
        check_training_arguments(given)
        if under_torchrun():
            _stand_alone(given)
        # Reading `device` counts the GPUs. The Trainer would multiply the batch size by their number.
        _ = given.device
        given._n_gpu = min(1, given._n_gpu)
        self._asked_plan = AskedPlan.of(plan, workers, bandwidth)
        self._schedule = schedule
        self._in_run: Training | None = None
        self._used_optimizer: torch.optim.Optimizer | None = None
        """The optimizer of an earlier train(), whose state has stayed in the workers."""
        super().__init__(*args, **kwargs)
        check_training_arguments(self.args)
        self._check_own_methods()
        if plan is None and self._asked_plan.num_workers is None:
            raise ValueError("PipelineTrainer: give workers=, the number of worker processes, or plan=")

    def _check_own_methods(self) -> None:
        for name in _NOT_CALLED:
            if getattr(type(self), name) is not getattr(transformers.Trainer, name):
                raise ValueError(
                    f"{type(self).__name__} has a {name} of its own, which a pipeline does not call: give"
                    " compute_loss_func, compute_metrics or callbacks"
                )

    # Under torchrun each rank has its own Trainer. Only the Trainer of rank 0 logs and saves.

    def is_world_process_zero(self) -> bool:
        return is_rank_0()

    def is_local_process_zero(self) -> bool:
        return is_rank_0()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._check_not_in_run("save_model")
        if is_rank_0():
            super().save_model(output_dir, _internal_call)

    # The model stays on its device until it is evaluated in this process, so _move_model_to_device() does
    # nothing.

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        pass

    def _place_model(self) -> None:
        if self.place_model_on_device and getattr(self.model, "quantization_method", None) is None:
            super()._move_model_to_device(self.model, self.args.device)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self._check_not_in_run("predict")
        self._place_model()
        return super().predict(*args, **kwargs)

    def _check_not_in_run(self, method: str) -> None:
        """Raises ValueError while workers train, because this process has the weights from before."""
        if self._in_run is not None:
            raise ValueError(
                f"a callback called {method}() during the training, when the weights are in the workers: set"
                " control.should_evaluate or control.should_save, or call it after train()"
            )

    # Training.

    @with_short_tracebacks
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        recomputes = bool(self.args.activation_checkpointing)
        self.args.activation_checkpointing = False  # the model's own checkpointing would hide the cuts
        callbacks = self.callback_handler.callbacks
        if not is_rank_0():
            self.callback_handler.callbacks = []
        try:
            with device_wanted("host" if self.args.use_cpu else None):
                self._recomputes = recomputes
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.activation_checkpointing = recomputes
            self.callback_handler.callbacks = callbacks
            self._in_run = None

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        prefix = rendezvous_prefix() if under_torchrun() else None
        with mistakes_told(prefix):
            training = Training(self, trial, ignore_keys_for_eval, resume_from_checkpoint)
            plan = training.agree_on_plan(prefix)
        best = None if prefix is None else f"{prefix}/best"
        # A callback may fail at rank 0 alone, and after the last step, when the others wait for rank 0 below.
        with mistakes_told(best, text="failed"):
            training.begin()
            self._in_run, self._used_optimizer = training, self.optimizer
            result = training.run(plan)
            self._in_run = None
            training.end(is_interrupted=result.is_interrupted)
        if best is not None:  # only rank 0 has evaluated and saved, and its Ctrl-C counts for all ranks
            of_rank_0 = [self.state.best_model_checkpoint, self.state.best_metric, result.is_interrupted]
            told = shared_by_rank_0(best, lambda: of_rank_0)
            self.state.best_model_checkpoint, self.state.best_metric, result.is_interrupted = told
        if result.is_interrupted:
            interrupt = KeyboardInterrupt()
            interrupt.losses = result.losses  # type: ignore[attr-defined]
            raise interrupt
        return self._finalize_training(trial, training.num_train_samples, training.began_s)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        if self._in_run is None:
            self._place_model()
            evaluated: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return evaluated
        training = self._in_run
        if not training.is_reporting:
            self._check_not_in_run("evaluate")
        metrics = training.take_metrics()
        self.log(metrics)
        training.call("on_evaluate", metrics)
        return metrics


def _stand_alone(args: Any) -> None:
    """Hides the other ranks from this rank's Trainer, because accelerate would deal minibatches to all
    ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        vars(args).pop("_setup_devices", None)
        args.local_rank = -1
        _ = args.device
    finally:
        os.environ.update(kept)
