"""Trains the batches of a Lightning fit as a pipeline, in parts. Stores a row for each step: the values that
the step has logged.

A part is one call of pipedream.run(). It ends at the next point at which Lightning reads the module: a
validation, a checkpoint, or the end of the epoch. The next part continues from its state. Imports no
Lightning. Runs on the thread that called fit().
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipedream
from pipedream.checkpoint.run_state import RunState, WorkerState
from pipedream.common.own_rank import is_rank_0, under_torchrun
from pipedream.integrations.asked_plan import AskedPlan
from pipedream.integrations.lightning_optimizers import (
    Rates,
    changing_options,
    planned_options,
    state_by_name,
)
from pipedream.integrations.lightning_steps import Batches, Recorder, Row, StandInTrainer, Steps
from pipedream.integrations.step_attributes import no_attribute_changed
from pipedream.integrations.whole_optimizer import Options, StageOptimizers
from pipedream.launch.torchrun import rendezvous_prefix, shared_by_rank_0
from pipedream.model.batch_norm import has_batch_norm
from pipedream.model.boundary import tensors_of
from pipedream.model.data_copies import generator_states, set_generators
from pipedream.model.microbatch import chunk, counts_of
from pipedream.model.seeding import generators_kept
from pipedream.splitting.evaluation_cut import in_eval_mode
from pipedream.update.piece_states import cut_out

__all__ = ["Pipeline", "shared"]

# A batch may be cut if the mean loss over its pieces is close to the loss of the whole batch. The difference
# may be _LOSS_TOLERANCE times the loss. If the loss is random, two losses of the whole batch differ, and the
# difference may be _NOISE_FACTOR times as large as theirs.
_LOSS_TOLERANCE = 1e-3
_NOISE_FACTOR = 20


def shared(value: Any) -> Any:
    """Returns rank 0's value at all ranks. The value must be JSON. Without torchrun it returns `value`."""
    if not under_torchrun():
        return value
    return shared_by_rank_0(rendezvous_prefix(), lambda: value)


@dataclass(frozen=True)
class Part:
    """Consecutive batches of an epoch that one run trains on."""

    first: int
    end: int | None
    """The batch after the part's last batch; None if the part ends with the data and their length is
    unknown."""
    evaluates: bool

    def steps(self, accumulated: int) -> int | None:
        return None if self.end is None else -(-(self.end - self.first) // accumulated)


class Pipeline:
    """Makes the runs of one fit."""

    def __init__(
        self,
        asked_plan: AskedPlan,
        microbatches: int | None,
        run_arguments: Mapping[str, Any],
        check_callbacks: Callable[[Any], None],
    ) -> None:
        """microbatches: the user's number; None lets the pipeline choose. run_arguments: arguments of
        pipedream.run; "schedule" and "autocast" must be among them. check_callbacks: raises ValueError for
        callbacks that a pipeline refuses."""
        self._asked_plan = asked_plan
        self._asked_microbatches = microbatches
        self._run_arguments = run_arguments
        self._check_callbacks = check_callbacks
        self.train_loader: Any = None
        self.val_loader: Any = None
        self.plan: pipedream.Plan | None = None
        self.steps: Steps | None = None
        self.result: pipedream.RunResult | None = None
        """The result of the latest run."""
        self.num_batches: int | None = None
        """The number of batches of this epoch, if the loader or Ctrl-C has ended the latest part; otherwise
        None."""
        self.is_interrupted = False
        """Whether Ctrl-C has asked the latest run to end."""
        self._recorder = Recorder()
        self._state: RunState | None = None
        self._optimizer: StageOptimizers | None = None
        self._optimizer_is_newest = True
        """Whether the caller's optimizer has the stages' newest state."""
        self._first_step = 0
        """The number of the latest part's first step."""
        self._options: list[Options] = []
        """The optimizer's options before each step of the latest part."""
        self._parameters: dict[str, tuple[Any, ...]] = {}
        """Figures of the parameters as the latest run left them, by name."""
        self._train_rows: deque[Row] = deque()
        self._val_rows: deque[Row] = deque()
        self.num_val_batches = 0
        """The number of batches of the latest validation."""
        self._microbatches = 0
        self._num_workers = 0
        self._epoch = -1
        self._epoch_seed = 0
        self._loader_of_epoch: Any = None
        self._generators: list[Tensor] = []

    # The strategy calls these methods for Lightning.

    def train_row(self, trainer: Any, batch: int) -> Row:
        self.ensure_rows(trainer, batch)
        options = self._options[min(trainer.global_step - self._first_step, len(self._options) - 1)]
        if changing_options(trainer.optimizers[0]) != options:
            raise ValueError(
                f"a callback or lr_scheduler_step changed the optimizer's options before step"
                f" {trainer.global_step}, which the workers had made by then: use an lr_scheduler with"
                ' interval "step", and read no number of the trainer in lr_scheduler_step'
            )
        return self._train_rows.popleft()

    def ensure_rows(self, trainer: Any, batch: int) -> None:
        """Trains the next part if Lightning has taken all rows of the last part. Raises KeyboardInterrupt if
        Ctrl-C has ended the last part.
        """
        if not self._train_rows:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self._run(trainer, self._next_part(trainer, batch))

    @property
    def num_batches_ahead(self) -> int:
        """The number of batches that the workers have trained on, but Lightning's loop has not reached."""
        return len(self._train_rows)

    def val_row(self) -> Row | None:
        """Returns the figures of the next validation batch; None if the pipeline evaluated nothing."""
        if not self._val_rows:
            return None
        if len(self._val_rows) == self.num_val_batches:
            self._check_parameters()
        return self._val_rows.popleft()

    def _check_parameters(self) -> None:
        """Raises ValueError if a hook has changed parameters since the latest run."""
        assert self.steps is not None
        now = _figures_of(self.steps)
        for name, before in self._parameters.items():
            if now.get(name) != before:
                raise ValueError(
                    f"a hook or callback changed, froze or thawed the parameter {name!r} during the training,"
                    " and the workers train and validate the one that they have: change it before fit"
                )

    def fill(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Copies the stages' optimizer state into the optimizer of this process. Call it at all ranks; only
        rank 0 needs the state. folder: a folder that all ranks share.
        """
        if self._optimizer_is_newest or self._state is None or self.steps is None:
            return
        states = state_by_name(self._snapshots(folder))
        named = dict(self.steps.named_parameters(remove_duplicate=False))
        for name, state in states.items():
            optimizer.state[named[name]] = cut_out(state, name, named[name])
        self._optimizer_is_newest = True

    def _snapshots(self, folder: Path) -> Iterable[Any]:
        assert self._state is not None
        ranks = range(self._num_workers)
        if not under_torchrun():
            return [one for rank in ranks for one in self._state.of_rank(rank).snapshots]
        folder = folder / "pipedream-state"
        rank = int(os.environ["RANK"])
        if rank in ranks:
            folder.mkdir(parents=True, exist_ok=True)
            self._state.of_rank(rank).save(folder, rank)
        shared(True)  # waits for all ranks
        if rank != 0:
            return []
        found = [one for each in ranks for one in WorkerState.load(folder, each).snapshots]
        shutil.rmtree(folder)
        return found

    # These methods divide an epoch into parts.

    def _next_part(self, trainer: Any, first: int) -> Part:
        num_batches, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
        has_length = num_batches != math.inf
        ends = [int(num_batches)] if has_length else []
        step = trainer.global_step
        everys = [getattr(one, "_every_n_train_steps", 0) for one in trainer.checkpoint_callbacks]
        counts = [every - step % every for every in everys if every]
        if trainer.max_steps > 0:
            counts.append(trainer.max_steps - step)
        ends += [first + count * accumulated for count in counts]
        stop = None
        if trainer.should_stop and (trainer.min_steps or 0) > step:  # then Lightning validates at min_steps
            stop = first + (trainer.min_steps - step) * accumulated
            ends.append(stop)
        loop = trainer.fit_loop.epoch_loop
        evaluates_in_epoch = loop._should_check_val_epoch()
        if evaluates_in_epoch and self.val_loader is None:
            trainer.validating = True
            loop.val_loop.setup_data()
            trainer.training = True
        every = trainer.val_check_batch
        evaluated_at: int | None = None
        if evaluates_in_epoch and every not in (None, math.inf):
            done = loop.total_batch_idx - loop.batch_idx if trainer.check_val_every_n_epoch is None else 0
            evaluated_at = first + every - (done + first) % every
            if evaluated_at < num_batches and evaluated_at % accumulated:
                raise ValueError(
                    f"Lightning validates after batch {evaluated_at} of the epoch, between the batches of one"
                    " step: choose a val_check_interval that is a multiple of"
                    f" accumulate_grad_batches={accumulated}"
                )
            ends.append(evaluated_at)
        if not has_length and (evaluated_at is not None or any(everys)):
            raise ValueError(
                "train_dataloaders have no length, and Lightning validates or saves between their batches:"
                " give limit_train_batches=N"
            )
        end = min(ends, default=None)
        at_end = evaluated_at == end if evaluated_at is not None else end is None or not has_length
        return Part(first, end, evaluates=evaluates_in_epoch and (at_end or end == stop))

    def _run(self, trainer: Any, part: Part) -> None:
        module, accumulated = trainer.lightning_module, trainer.accumulate_grad_batches
        optimizer = trainer.optimizers[0]
        if self._parameters:
            self._check_parameters()
        self._begin_epoch(trainer)
        facts = {
            "current_epoch": trainer.current_epoch,
            "max_epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps,
            "num_training_batches": trainer.num_training_batches,
            "accumulate_grad_batches": accumulated,
            "world_size": 1,
            "global_rank": 0,
            "is_global_zero": True,
            "training": True,
            "sanity_checking": False,
            "logger": None,
            "loggers": [],
        }
        stand_in = StandInTrainer(part.first, trainer.global_step, **facts)
        if self.steps is None:
            self._check(trainer)
            self.steps = Steps(module, stand_in)
            self._optimizer = StageOptimizers(optimizer, self.steps, keeps_class=True)
        steps = self.steps
        steps.trainer = stand_in
        assert self._optimizer is not None
        with _left_by_trainer(module):
            data, validation = self._data(trainer, part, accumulated)
            self._learn(data, validation)
            if self.plan is None:
                key = rendezvous_prefix() if under_torchrun() else None
                self.plan = self._asked_plan.agreed(lambda: self._make_plan(data), key)
            if not self._num_workers:
                self._num_workers = shared(self.plan.workers_used)  # the run takes rank 0's plan
            self._recorder.begin()
            rows = self._rates(trainer, part, optimizer, accumulated)
            self._first_step, self._options = trainer.global_step, rows
            self.result = pipedream.run(
                steps,
                self.plan,
                data=data,
                loss_fn=self._recorder,
                optimizer=self._optimizer,
                lr_scheduler=functools.partial(Rates, rows),
                microbatches=self._microbatches,
                validation=validation,
                state=self._state,
                **{"weight_fn": _count_one if accumulated > 1 else None, **self._run_arguments},
            )
        self._state = self.result.state
        self._parameters = _figures_of(steps)
        self._optimizer.state = {}
        self._optimizer_is_newest = False
        self._take_rows(part)

    def _check(self, trainer: Any) -> None:
        """Raises ValueError for callbacks, optimizers, schedulers and loaders that a pipeline refuses."""
        self._check_callbacks(trainer.callbacks)
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(trainer.optimizers)} optimizers: a pipeline has one"
            )
        (optimizer,) = trainer.optimizers
        if not optimizer.param_groups:  # Lightning's stand-in for a missing optimizer
            raise ValueError("configure_optimizers returned None: return an optimizer")
        if self._run_arguments["max_grad_norm"] is not None:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in trainer.lightning_module.named_parameters():
                if parameter.requires_grad and id(parameter) not in own:
                    raise ValueError(
                        f"the optimizer does not have the parameter {name!r}, whose gradient a pipeline"
                        " counts for gradient_clip_val and Lightning does not: call"
                        " requires_grad_(False) on it"
                    )
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.interval == "step":
                raise ValueError(
                    'the lr_scheduler is a ReduceLROnPlateau with interval "step": use interval "epoch"'
                )
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        for name, loop in (("train_dataloaders", trainer.fit_loop), ("val_dataloaders", val_loop)):
            combined = loop._combined_loader
            if combined is not None and len(combined.flattened) > 1:
                raise ValueError(f"{name} are {len(combined.flattened)}: give one loader")
            if loop is trainer.fit_loop and combined.iterables is not combined.flattened[0]:
                kind = type(combined.iterables).__name__
                raise ValueError(f"{name} is a loader in a {kind}: give the loader itself")

    def _begin_epoch(self, trainer: Any) -> None:
        """Sets the loader's random generators to the states that Lightning's own loop would find at the start
        of the epoch. So all parts of an epoch read the batches in the same order.
        """
        loader, epoch = self.train_loader, trainer.current_epoch
        if loader is self._loader_of_epoch:
            set_generators(loader, self._generators)
            if epoch == self._epoch:
                return
            _draw_as_an_epoch(loader, trainer.num_training_batches)
        if self._epoch >= 0 and trainer.fit_loop._last_train_dl_reload_epoch == epoch:
            _draw_as_an_epoch(loader, 0)  # Lightning makes two iterators of a loader that it has reloaded
        self._epoch, self._loader_of_epoch = epoch, loader
        self._generators = generator_states(self.train_loader)
        self._epoch_seed = shared(int(torch.randint(2**31, ())))

    def _data(self, trainer: Any, part: Part, accumulated: int) -> tuple[Batches, Any]:
        scales: dict[int, float] = {}
        if part.end is not None and (left := (part.end - part.first) % accumulated):
            scales = dict.fromkeys(range(part.end - left, part.end), left / accumulated)
        convert = _double if trainer.precision == "64-true" else None
        data = Batches(
            self.train_loader,
            part.first,
            part.end,
            seed=self._epoch_seed,
            scales=scales,
            accumulated=accumulated,
            convert=convert,
        )
        if not part.evaluates:
            return data, None
        limits = trainer.num_val_batches[0]
        held_out = Batches(
            self.val_loader,
            0,
            None if limits == math.inf else int(limits),
            seed=0,
            scales={},
            convert=convert,
        )
        return data, pipedream.Validation(held_out)

    def _learn(self, data: Batches, validation: Any) -> None:
        """Runs a training step and a validation step on their first batches, to learn which values they log.
        Also chooses the number of microbatches."""
        assert self.steps is not None
        for is_training, batches in ((True, data), (False, validation and validation.data)):
            layout = self.steps.layouts[is_training]
            if batches is None or layout.is_known:
                continue
            with (
                generators_kept(),
                _buffers_kept(self.steps) as changed_buffers,
                torch.no_grad(),
                contextlib.ExitStack() as around,
            ):
                attributes = vars(vars(self.steps)["lightning_module"])
                around.callback(attributes.update, dict(attributes))  # undoes what the step sets
                kept = generator_states(batches.loader)
                around.callback(set_generators, batches.loader, kept)
                first = next(iter(batches.one_by_one()))
                if is_training:
                    set_generators(batches.loader, kept)
                    _check_same(first, next(iter(batches.one_by_one())))
                self.steps.list_batches[is_training] = batches.has_lists
                if not is_training:
                    around.enter_context(in_eval_mode([self.steps]))
                with no_attribute_changed(attributes, is_training=is_training):
                    self.steps.learns = True
                    around.callback(setattr, self.steps, "learns", False)
                    self.steps(**first)
                self.steps.learns = False
                if self.steps.trainer.asked_for_step:
                    self.steps.reads_number[is_training] = True
                if is_training:
                    counted = next(changed_buffers, None)
                    self._microbatches = shared(self._choose_microbatches(data, first, counted))
            layout.is_known = True

    def _choose_microbatches(self, data: Batches, first: Mapping[str, Any], buffer: str | None) -> int:
        """buffer: the name of a buffer that training_step changes; None if it changes none."""
        if data.accumulated > 1:
            return data.accumulated
        if self._run_arguments["schedule"] == "auto":
            return 1  # not used: the planner chooses the number
        if self._asked_microbatches is not None:
            return self._asked_microbatches
        stages = self._asked_plan.num_stages_max
        size = int(first["total"])
        wanted = 1 if stages == 1 else 4 * stages
        chosen = max(m for m in range(1, min(wanted, size) + 1) if size % m == 0)
        why = self._why_not_cut(first, chosen, buffer) if chosen > 1 else None
        if why is None:
            return chosen
        if is_rank_0():
            print(f"batches are trained on whole: {why}; microbatches={chosen} cuts them", flush=True)
        return 1

    def _why_not_cut(self, first: Mapping[str, Any], num_pieces: int, buffer: str | None) -> str | None:
        """Returns the reason not to cut batches: batch norm, a buffer that training_step changes, a step that
        fails with a piece of a batch, or a first batch whose loss is not the mean over its pieces. Returns
        None if batches may be cut.
        """
        assert self.steps is not None
        if has_batch_norm(self.steps):
            return "batch norm would normalize each piece by itself"
        if buffer is not None:
            return f"training_step would change the buffer {buffer!r} once for each piece"
        weight_fn = self._run_arguments.get("weight_fn", _count_one)
        try:
            with self.steps.in_eval_mode():
                pieces = chunk(first, num_pieces, name="a batch", minibatch=0)
                counts = counts_of(weight_fn, pieces, 0)
                counted = [(one, count) for one, count in zip(pieces, counts, strict=True) if count]
                total = sum(counts)
                cut = sum(float(self.steps(**one)["loss"]) * count / total for one, count in counted)
                whole = float(self.steps(**first)["loss"])
                if abs(cut - whole) <= _LOSS_TOLERANCE * abs(whole):
                    return None
                noise = abs(float(self.steps(**first)["loss"]) - whole)  # above 0 if the loss is random
        except Exception as error:  # some steps fail with a piece of a batch, or in eval mode
            return f"their pieces cannot be tried ({type(error).__name__}: {error})"
        if abs(cut - whole) < _NOISE_FACTOR * noise:
            return None
        return (
            f"the loss of the first is {whole:.4g} whole and {cut:.4g} as the mean of {num_pieces} pieces,"
            ' which run={"weight_fn": ...} can weigh'
        )

    def _make_plan(self, data: Batches) -> pipedream.Plan:
        assert self.steps is not None
        with contextlib.ExitStack() as around:
            around.callback(set_generators, self.train_loader, generator_states(self.train_loader))
            profile = pipedream.profile(
                self.steps,
                data.one_by_one(),
                self._recorder,
                minibatches=20,
                seconds=10,
                autocast=self._run_arguments["autocast"],
            )
        profile = replace(profile, model=type(vars(self.steps)["lightning_module"]).__name__)
        asked, schedule = self._asked_plan, self._run_arguments["schedule"]
        # With accumulated gradients the profile is of one batch. A minibatch takes longer by the same factor
        # in every layer, so the best cut is the same.
        plan = asked.make(profile, schedule, "auto" if schedule == "auto" else self._microbatches)
        print(asked.describe(plan), flush=True)
        return plan

    def _rates(self, trainer: Any, part: Part, optimizer: torch.optim.Optimizer, accumulated: int) -> Any:
        configs = [
            config
            for config in trainer.lr_scheduler_configs
            if config.interval == "step" and not config.reduce_on_plateau
        ]
        num_steps = part.steps(accumulated)
        if configs and num_steps is None:
            raise ValueError(
                'the lr_scheduler has interval "step", and train_dataloaders have no length: give'
                " limit_train_batches=N"
            )

        def step(index: int) -> None:
            assert part.end is not None
            after = min(part.first + (index + 1) * accumulated, part.end)
            for config in configs:
                if after % config.frequency == 0:
                    trainer.lightning_module.lr_scheduler_step(config.scheduler, None)

        # Without this mark torch would warn, because the stages make the optimizer's steps.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return planned_options(optimizer, [config.scheduler for config in configs], num_steps or 0, step)

    def _take_rows(self, part: Part) -> None:
        recorder, steps = self._recorder, self.steps
        assert steps is not None
        assert self.result is not None
        train, val, self.is_interrupted = shared(
            [
                recorder.trained(),
                recorder.held_out() if part.evaluates else [],
                self.result.is_interrupted,
            ]
        )
        for pieces in train:
            rows = [Row.of(steps.layouts[True], row) for _, row in pieces]
            samples = [count for count, _ in pieces]
            self._train_rows.append(Row.joined(rows, samples, steps.layouts[True]))
        end = part.first + len(train)
        self.num_batches = end if part.end is None or end < part.end else None
        self._val_rows = deque(Row.of(steps.layouts[False], row) for row in val)
        self.num_val_batches = len(self._val_rows)


def _check_same(first: Any, again: Any) -> None:
    """Raises ValueError if the first batch of an epoch differs when the data are iterated again."""
    if not all(map(_equal, tensors_of(first), tensors_of(again))):
        raise ValueError(
            "train_dataloaders yield another first batch when they are iterated again, and each part of a fit"
            " iterates them: draw random numbers from the loader's generator, or from the global generators"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _count_one(batch: Any) -> float:
    """Gives every accumulated batch the same weight, as Lightning does."""
    return 1.0


def _figures_of(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Returns figures of each parameter. They change if the parameter is frozen or thawed, and almost always
    if its values change."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, parameter in module.named_parameters():
        values = parameter.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        values = values if values.is_floating_point() else values.double()
        amounts = (values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64))
        found[name] = (parameter.requires_grad, *(str(float(amount)) for amount in amounts))
    return found


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _left_by_trainer(module: Any) -> Iterator[None]:
    """Takes the trainer out of the module in the with block, because a trainer cannot be sent to workers."""
    attributes = vars(module)
    kept = attributes["_trainer"]
    attributes["_trainer"] = None
    try:
        yield
    finally:
        attributes["_trainer"] = kept


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[Iterator[str]]:
    """In the with block, yields the names of the buffers that were changed or replaced. Restores them at the
    end."""
    kept = [
        (f"{prefix}.{name}".lstrip("."), owner._buffers, name, buffer, buffer.clone())
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield (
            full_name for full_name, table, name, _, before in kept if not torch.equal(table[name], before)
        )
    finally:
        with torch.no_grad():
            for _, table, name, buffer, before in kept:
                table[name] = buffer
                buffer.copy_(before)


def _draw_as_an_epoch(loader: Any, num_batches: float) -> None:
    """Advances the loader's random generators as one epoch of Lightning's loop does. It draws what the loader
    draws for num_batches batches and for those that its workers read ahead.
    """
    generator, sampler = getattr(loader, "generator", None), getattr(loader, "batch_sampler", None)
    if generator is None:
        return
    read_ahead = loader.num_workers * (loader.prefetch_factor or 0)
    with generators_kept():
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        num_drawn = None if num_batches == math.inf else int(num_batches) + read_ahead
        deque(itertools.islice(sampler or (), num_drawn), maxlen=0)
