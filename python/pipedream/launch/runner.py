"""run(): checks the arguments, then trains with local workers, or as this rank's worker under torchrun."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pipedream import _core
from pipedream.callbacks.callback import (
    Answer,
    Callback,
    EndReport,
    EpochReport,
    StartReport,
    callback_of,
)
from pipedream.callbacks.steering import Evaluated, History, Steering
from pipedream.checkpoint.checkpoints import Checkpoints
from pipedream.checkpoint.run_state import KeptState, RunState
from pipedream.common.errors import one_line
from pipedream.common.guard import check_main_guard, one_run_at_a_time
from pipedream.common.own_rank import is_rank_0, under_torchrun
from pipedream.common.tracebacks import with_short_tracebacks
from pipedream.data.first_minibatch import KeptMinibatch, first_of, looked_at
from pipedream.data.stream import num_minibatches_of
from pipedream.launch.checked_options import checked_options
from pipedream.launch.fork_server import start_server
from pipedream.launch.launcher import check_main_is_a_file, run_locally
from pipedream.launch.run_options import check_arguments
from pipedream.launch.torchrun import mistakes_told, rendezvous_prefix, this_rank
from pipedream.links.descriptors import descriptor_limit_raised
from pipedream.model.batches import own_loss, parts_of
from pipedream.model.initial_weights import WeightSource
from pipedream.model.layers import Model
from pipedream.model.precision import autocast_left
from pipedream.model.seeding import base_seed, evaluation_seed, generators_kept, seed_all
from pipedream.model.validation import LOSS, Validation
from pipedream.planning.plan import Plan
from pipedream.planning.program import Program
from pipedream.report.result import RunResult
from pipedream.splitting.cut_model import CutModel, cut_model, needs_cutting
from pipedream.splitting.evaluation_cut import cut_for_evaluation
from pipedream.stage.decisions import answer_lead
from pipedream.stage.job import JobOptions
from pipedream.stage.saving import EVALUATED
from pipedream.worker.cautions import cautions_of, check_data_apart, warn_the_caller
from pipedream.worker.continuing import read_record
from pipedream.worker.devices import choose_device_type
from pipedream.worker.interrupts import stop_order
from pipedream.worker.notices import noticed_checkpoints, notices_save
from pipedream.worker.steering import answers_of
from pipedream.worker.worker import run_worker

__all__ = ["run"]

_log = logging.getLogger("pipedream")


@contextlib.contextmanager
def _place_checked() -> Iterator[None]:
    check_main_guard()
    _check_process()
    with one_run_at_a_time(), descriptor_limit_raised():
        yield


@with_short_tracebacks
@_place_checked()
def run(
    model: Model,
    plan: Plan,
    *,
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer],
    epochs: int = 1,
    schedule: str | Program = "pipedream",
    microbatches: int = 1,
    weight_fn: Callable[[Any], Any] | None = None,
    lr_scheduler: Any = None,
    recompute: Any = None,
    memory: Any = None,
    autocast: Any = None,
    max_grad_norm: float | None = None,
    transport: str = "auto",
    codec: Any = None,
    keys: Any = None,
    bind: Any = None,
    ports: str | None = None,
    insecure: bool = False,
    peer_timeout: float = 15.0,
    sync: str = "bsp",
    staleness: int = 0,
    sync_every: int = 1,
    validation: Validation | None = None,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    recovery: Any = None,
    on_epoch_end: Callable[[EpochReport], Answer] | None = None,
    callbacks: Sequence[Callback] = (),
    state: RunState | None = None,
    seed: int | None = None,
    on_nonfinite: str = "stop",
    gather: str = "rank0",
    weights: WeightSource = None,
    save: str | os.PathLike[str] | None = None,
    progress: bool = True,
    trace: str | os.PathLike[str] | None = None,
) -> RunResult:
    """Trains `model` as the pipeline of `plan`, by the schedule that is named.

    In a plain script it starts the local workers and returns only in the caller, with the model's weights
    and buffers updated in place. Under torchrun it is this rank's worker: rank 0 returns with the whole
    trained model, the others as `gather` says; rank 0's plan and initial weights are used everywhere.

    model: any module, cut along its own forward, which runs once on the first minibatch for that; an
        nn.Sequential or a list is taken as its layers. float32, float64 or bfloat16. docs/models.md has more.
    data: yields (inputs, targets), or dicts (or dataclasses) of what the model takes by name, once per
        epoch; a DataLoader, a list, a generator. The workers of the
        first and the last stage iterate it, each its own copy; a DataLoader's processes start there, as they
        would here. What cannot be sent to the workers is iterated here and forwarded to them. Minibatches may
        have any shapes up to the largest that the plan knows (Plan.fitting), or that is in a list; for a
        larger one memory is planned again when it comes.
    loss_fn: (outputs, targets) -> scalar tensor, run by the last stage; with dicts (outputs, batch). None
        takes the model's own: its output's `loss`, or the output where it is a scalar. It carries nothing
        to train: a penalty on weights is the optimizer's weight_decay, which every stage applies to its own.
    optimizer: called once per stage with its parameters, or with (name, parameter) pairs when its first
        argument is called `named_parameters`. For example functools.partial(torch.optim.SGD, lr=0.1). Any of
        torch's but LBFGS. In a plain script a copy of it is tried before any process starts.
    schedule: "pipedream" (1F1B with weight stashing), "vertical_sync", "2bw", "flush" (PipeDream-Flush),
        "gpipe", "interleaved", "model_parallel", or "unstashed" (alias "naive"); docs/schedules.md helps
        choose. "auto" takes the schedule and the microbatches that the plan was made for, as
        partition(..., schedule="auto") chooses them. A pipedream.Program, which you have written or changed,
        is run as it stands, with its microbatches, on a plan without replicas and a model whose stages share
        no parameter.
    microbatches: each minibatch is cut into so many along dimension 0 of its tensors; the loss and gradient
        are the means over them, weighted by their samples, or by weight_fn.
    weight_fn: (targets) -> what a microbatch counts, with dicts (batch); for a loss that is a mean over
        something else than samples, such as valid tokens: `(targets != -100).sum()`. A microbatch that
        counts 0 has no part in loss and gradient.
    lr_scheduler: called with each stage's optimizer; its step() follows every update, once a minibatch. For
        example functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1000).
    recompute: True, or the stages that keep only their input and run their forward again before the
        backward; None leaves it to `memory`.
    memory: what a worker may use ("8GiB" or bytes), counted in the terms of RunResult.memory; where that
        is needed recompute is turned on, and on a GPU offloading to host memory. A worker that does not fit
        is refused, term by term, also where a larger minibatch is planned for later.
    autocast: "bfloat16", or "float16" with loss scaling; parameters stay float32.
    max_grad_norm: gradients are scaled down to this 2-norm, over all stages where the schedule drains every
        minibatch ("flush", "gpipe", "interleaved", "model_parallel"), else per stage.
    transport: "auto" is CUDA IPC between GPUs of one host, shared memory between its other workers, else
        ZeroMQ over tcp; "tcp" (or "zmq") always takes the wire; "shm" and "ipc" refuse workers that cannot.
    codec: what activations and gradients become between stages: "bf16", "fp16", "int8", "topk" or
        "topk:0.05" for all, or a mapping from "activations", "gradients" or pairs (sender stage, receiver
        stage) to these; and what replicas push to the owners of shards, by the key "pushes" alone, which may
        also be "factors" or "factors:bf16": gradients of fully connected layers as their factors, where these
        are smaller (docs/parameter-server.md). Weights always travel exactly. docs/transport.md says what
        each does. None is what the plan was made for (Plan.codec), most often nothing; {} is nothing.
    keys: a file that `pipedream keys` made, or keys.CurveKeys: encrypts and authenticates every link.
    bind: the address or interface of this machine that workers listen on; None is loopback, and under
        torchrun on several machines this machine's address on the route to MASTER_ADDR. Elsewhere than on
        loopback keys are needed, or insecure.
    ports: the ports of this machine that workers listen at, such as "29600-29620", for firewalls that admit
        no others; the range is shared by the workers of a machine, each of which takes one port for every
        channel that it receives by. None is PIPEDREAM_PORTS, else the system chooses. docs/transport.md says
        what else has to be open.
    insecure: True listens without keys where others can reach it, and logs that.
    peer_timeout: seconds after which a worker that is silent, or whose interpreter hangs, is given up. Code
        that holds the GIL for so long without a break counts as a hang.
    sync: how the replicas of a stage are kept alike, which the plan may give some: "bsp" is deterministic and
        waits for every round, "ssp" lets versions be `staleness` rounds older, "asp" makes an update of every
        replica's gradient by itself, when it comes, "allreduce" is "bsp" by torch.distributed.
        docs/parameter-server.md.
    staleness: with sync="ssp".
    sync_every: n lets replicas make n updates of their own before they take the mean of their weights.
    on_epoch_end: called in this process, under torchrun at rank 0, with an EpochReport when the losses of an
        epoch are known; returning False ends the run, with a result: where the schedule drains before the
        next epoch begins, else a fixed number of minibatches later. docs/callbacks.md has more.
    callbacks: objects of pipedream.callbacks, called there at the start, every so many minibatches, after
        every epoch and at the end, which may stop the run or change its learning rates: EarlyStopping,
        ReduceLROnPlateau, EMA, TensorBoard, or your own.
    state: `result.state` of another run, from which this one goes on as if that had not ended: optimizer,
        scheduler, loss scale, what is in flight, random numbers and shuffles. So a run per epoch equals one
        of all epochs. It wants the same plan, schedule and optimizer, the weights as they were left, and a
        number of minibatches so far after which a round of updates is over. docs/running.md.
    validation: a Validation: held-out data that are evaluated after each epoch, or so many minibatches, at
        the weights that all stages have then. RunResult.validation has the figures.
    seed: of all random numbers; None continues from the caller's generators.
    on_nonfinite: "stop" raises NonFiniteLoss naming the minibatch, before it has changed a weight; "continue"
        trains on.
    gather: where the trained weights go: "rank0", "all", or "none" (each worker keeps its own stage's). A
        model that came on the meta device stays there.
    weights: of a model on the meta device, of which each worker makes its own stages' alone: None, by each
        module's own reset_parameters() and _init_weights; a function of a module; or a checkpoint, a
        safetensors file or a folder of them. docs/models.md.
    save: a folder, in which each stage's worker writes its trained weights as a safetensors file, with an
        index of all as Hugging Face's checkpoints have it. The files get their names when all are written. On
        several machines a folder that all of them share.
    progress: show epoch, loss and samples/s on stderr while training: on a terminal a line that changes,
        elsewhere a line every few seconds.
    trace: a file (.json or .json.gz) for a trace that ui.perfetto.dev opens.

    The random number generators of the calling process are afterwards as they were, but for one draw from
    torch's when there is no seed, so that the next run differs.

    The other arguments belong to features that are not built yet, and are refused. Raises ValueError or
    TypeError for a mistake in the arguments, errors.PipelineError for a run that fails; its `losses` are
    those of the minibatches that were done, its `minibatch` says where it was, and the model has the newest
    weights of the stages whose workers live. One that fails when all is trained, as on a full disk, says
    where the trained weights are. The first Ctrl-C ends the run early, with a result, the second one at once.
    Warns where nothing is trainable, the model is in eval(), or
    the plan leaves workers without work.
    """
    if loss_fn is None:
        loss_fn = own_loss
    arguments = {name: value for name, value in locals().items() if name not in ("model", "plan")}
    with autocast_left() as regions:
        if autocast is None and regions:
            arguments["autocast"] = regions.get(choose_device_type())
        return _run(model, plan, arguments)


def _run(model: Model, plan: Plan, arguments: dict[str, Any]) -> RunResult:
    """run() with its other arguments by name."""
    data: Iterable[Any] = arguments["data"]
    KeptState.let_go()  # the arguments hold the one that this run goes on from
    # Counted once a call, so that all ranks count alike, those with a mistake too.
    prefix = rendezvous_prefix() if under_torchrun() else None
    with mistakes_told(prefix):
        steering = _steering_of(arguments)
        options = checked_options(model, plan, arguments, steering)
        if prefix is None:
            check_main_is_a_file()
            start_server()  # which imports torch, the first time, while this process goes on
        of_data = list(check_data_apart(data, model, plan))
        cuts = plan.num_layers > 1 and needs_cutting(model)
        first = KeptMinibatch()
        if cuts or prefix is None:
            data = looked_at(data, first if cuts else None)
        if cuts:
            model = _cut(model, data, options, first)
        options = _with_evaluation(model, options)
    if is_rank_0():
        world_size = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
        rates_by_update = not _core.drains_every_minibatch(options.schedule_options())
        cautions = cautions_of(
            model,
            plan,
            world_size,
            None if options.weight_fn else options.loss_fn,
            options.microbatches,
            codec=options.links.codec,
            autocast=options.autocast,
            schedule=options.schedule_name,
            rates_by_update=options.lr_scheduler is not None and rates_by_update,
        )
        for caution in (*of_data, *cautions):
            warn_the_caller(caution)
    with _told(steering, data, options) as (tell_end, options):
        if prefix is not None:
            first.take()  # which nobody needs again
            result = _run_this_rank(model, data, options, prefix, steering)
        else:
            result = run_locally(model, data, options, first, steering)
        tell_end(result)
    if options.seed is None:
        # The next run without a seed is another one: its shuffles and dropouts must not repeat this one's.
        torch.empty((), dtype=torch.int64).random_()
    if arguments["trace"] is not None and is_rank_0():
        _save_trace(result, arguments["trace"])
    return result


@contextlib.contextmanager
def _told(
    steering: Steering, data: Iterable[Any], options: JobOptions
) -> Iterator[tuple[Callable[[RunResult], None], JobOptions]]:
    """Around a run, whose callbacks hear of its start and of its end. Gives the options with what they have
    decided before the checkpoint from which it continues. Raises what one of them has raised."""
    if not is_rank_0():
        yield lambda result: None, options
        return
    later = steering.start(
        StartReport(
            num_minibatches_of(data, options.epochs),
            options.epochs,
            options.plan.workers_used,
            options.schedule_name,
            answer_lead(options.schedule_options()),
            _core.rounds_of(options.schedule_options(), 0).minibatches_per_round,
        ),
        first_minibatch=options.first_minibatch,
        checkpoints=None if options.checkpoints is None else options.checkpoints.folder,
        before=_history_of(options),
    )
    if options.continues is not None:
        options = replace(options, continues=replace(options.continues, answers=answers_of(later)))
    try:
        yield steering.end_with, options
    except BaseException as error:
        if steering.error is None:
            steering.end(EndReport(None, error))
        raise
    if steering.error is not None:
        raise steering.error


def _history_of(options: JobOptions) -> History | None:
    if options.continues is None or not options.call_points.at_epochs:
        return None
    record = read_record(options.continues)
    return History(
        record["losses"],
        record["samples"],
        [*record["epochs"], options.continues.epoch],
        [Evaluated(*each) for each in record[EVALUATED]],
        options.continues.evaluates,
        _core.minibatches_between_drains(options.schedule_options()),
    )


def _steering_of(arguments: dict[str, Any]) -> Steering:
    check_arguments(**{name: arguments[name] for name in ("on_epoch_end", "callbacks")})
    on_epoch_end, validation = arguments["on_epoch_end"], arguments["validation"]
    callbacks = [*arguments["callbacks"], *([] if on_epoch_end is None else [callback_of(on_epoch_end)])]
    return Steering(callbacks, [LOSS, *validation.metrics] if isinstance(validation, Validation) else ())


def _cut(model: Model, data: Iterable[Any], options: JobOptions, first: KeptMinibatch) -> CutModel:
    """The model with its layers, found by one forward with minibatch 0, which `first` then has."""
    assert isinstance(model, nn.Module)
    with generators_kept():
        options.seed_data(base_seed(options.seed))
        first.parts = inputs, targets = parts_of(first_of(data, first), 0)
        return cut_model(
            model, inputs, targets, options.loss_fn, autocast=options.autocast, weights=options.weights
        )


def _with_evaluation(model: Model, options: JobOptions) -> JobOptions:
    """The options with the places of the eval-mode forward, which one forward with the first validation
    minibatch finds."""
    validation = options.validation
    if validation is None:
        return options
    if not isinstance(model, CutModel):
        if validation.forward is not None and options.plan.num_layers > 1:
            raise ValueError(
                "validation: forward is given, and the model is a list of layers, which run one after the"
                " other: leave it out, or give a module with a forward of its own"
            )
        return options
    with generators_kept():
        seed_all(evaluation_seed(base_seed(options.seed)))
        inputs, targets = parts_of(first_of(validation.data), 0)
        cut = cut_for_evaluation(
            model,
            options.plan,
            inputs,
            targets,
            options.loss_fn,
            validation.forward,
            autocast=options.autocast,
            weights=options.weights,
        )
    return replace(options, evaluation_cut=cut)


def _save_trace(result: RunResult, trace: str | os.PathLike[str]) -> None:
    """Saves the trace. A full disk only warns, because the training is done."""
    try:
        result.save_trace(trace)
    except OSError as error:
        _log.warning(
            "the trace was not saved: %s; save_trace(path) of the result writes it elsewhere", one_line(error)
        )


def _check_process() -> None:
    """A run is its script's own process's, which may start others."""
    if torch.utils.data.get_worker_info() is not None:
        raise RuntimeError(
            "run() was called in a worker process of a DataLoader: call it in the process of the script, not"
            " in what reads the data"
        )
    if multiprocessing.current_process().daemon and not under_torchrun():
        raise RuntimeError(
            "run() was called in a daemonic process, which may start no workers: make that process with"
            " daemon=False"
        )


def _run_this_rank(
    model: Model, data: Iterable[Any], options: JobOptions, prefix: str, steering: Steering
) -> RunResult:
    with this_rank(prefix) as place, generators_kept(), contextlib.ExitStack() as around:
        order = stop_order(options, place.rendezvous, place.rank)
        noticed = noticed_checkpoints(options)
        around.enter_context(notices_save(noticed, has_begun=lambda: True))
        place_to_stop = replace(place, stop_order=order)
        return run_worker(place_to_stop, options, model, data, steering=steering if place.rank == 0 else None)
