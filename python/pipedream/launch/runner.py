"""run() checks its arguments and then trains. In a plain script it starts local workers. Under torchrun it is
itself the worker of its rank. Runs on the caller's thread."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
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
    EpochFunction,
    EpochReport,
    StartReport,
)
from pipedream.callbacks.steering import Evaluated, History, Steering
from pipedream.checkpoint.checkpoints import Checkpoints
from pipedream.checkpoint.run_state import KeptState, RunState
from pipedream.common.errors import one_line
from pipedream.common.guard import check_main_guard, one_run_at_a_time
from pipedream.common.microbatches import Microbatches
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
    """Trains `model` as the pipeline of `plan`.

    In a plain script it starts local workers, and returns in the caller when the model's weights and buffers
    are updated in place. Under torchrun it is this rank's worker. All ranks use rank 0's plan and initial
    weights; `gather` says which ranks return with the whole trained model.

    model: any module; it is cut along its own forward, which runs once on the first minibatch for that. The
        layers of an nn.Sequential or a list are its items. float32, float64 or bfloat16. See docs/models.md.
    data: any iterable, such as a DataLoader, a list or a generator; it is iterated once per epoch. It yields
        (inputs, targets), or dicts or dataclasses with the model's arguments by name. The workers of the
        first and the last stage each iterate a copy, and start a DataLoader's processes. If the data cannot
        be sent to workers, the caller iterates them and forwards each minibatch. Minibatches may have any
        shapes: memory is planned for the largest that the plan knows (Plan.fitting) or that is in a list, and
        planned again when a larger one comes.
    loss_fn: (outputs, targets) -> scalar tensor, or with dicts (outputs, batch). The last stage calls it.
        None uses the output's `loss`, or the output itself if it is a scalar. The loss function must have no
        trainable parameters. For a penalty on weights use the optimizer's weight_decay.
    optimizer: called once per stage with the stage's parameters, for example
        functools.partial(torch.optim.SGD, lr=0.1). If its first argument is called `named_parameters`, it
        gets (name, parameter) pairs. It may be any optimizer of torch except LBFGS. A plain script tries a
        copy of it before any process starts.
    schedule: "pipedream" (1F1B with weight stashing), "vertical_sync", "2bw", "flush" (PipeDream-Flush),
        "gpipe", "interleaved", "model_parallel", or "unstashed" (alias "naive"); docs/schedules.md helps
        choose. "auto" uses the schedule and the microbatches for which the plan was made, for example by
        partition(..., schedule="auto"). A pipedream.Program runs as you have written it, with its own number
        of microbatches. It needs a plan without replicas, and stages that share no parameter.
    microbatches: the number of pieces into which each minibatch is cut along dimension 0 of its tensors. Loss
        and gradient are means over them, weighted by their samples or by weight_fn.
    weight_fn: (targets) -> the weight of a microbatch, or with dicts (batch). Use it if the loss is a mean
        over something other than samples, such as valid tokens: `(targets != -100).sum()`. A microbatch of
        weight 0 adds nothing to loss and gradient.
    lr_scheduler: called with each stage's optimizer, for example
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1000). Its step() is called after every
        update: once per minibatch, or with replicas once per round of minibatches.
    recompute: True, or a list of stages. These keep only their input, and run their forward again before the
        backward. None lets `memory` decide.
    memory: the most memory of a worker ("8GiB" or bytes), as RunResult.memory counts it. A stage that does
        not fit is recomputed, and on a GPU offloaded to host memory. If it still does not fit, the run is
        refused with a list of the memory terms, also when memory is planned again for a larger minibatch.
    autocast: "bfloat16", or "float16" with loss scaling. Parameters keep their dtype.
    max_grad_norm: scales gradients down to this 2-norm. It is the norm over all stages if the schedule drains
        every minibatch ("flush", "gpipe", "interleaved", "model_parallel"), otherwise over each stage by
        itself.
    transport: "auto" uses CUDA IPC between GPUs of one host, shared memory between its other workers, else
        ZeroMQ over tcp. "tcp" (or "zmq") always uses ZeroMQ. "shm" and "ipc" refuse workers that cannot use
        shared memory or CUDA IPC.
    codec: compresses activations and gradients between stages: "bf16", "fp16", "int8", "topk" or "topk:0.05".
        A mapping gives codecs by "activations", "gradients" or (sender stage, receiver stage). Only its key
        "pushes" compresses the gradients that replicas push to the owners of shards. There "factors", or
        "factors:bf16" and the like, is possible too: it sends gradients of fully connected layers as factors
        if these are smaller (docs/parameter-server.md). Weights always travel exactly. docs/transport.md
        explains each codec. None uses the codec for which the plan was made (Plan.codec); {} uses no codec.
    keys: a file that `pipedream keys` made, or keys.CurveKeys. Encrypts and authenticates every link.
    bind: the address or interface of this machine on which workers listen. None is loopback; under torchrun
        on several machines it is this machine's address on the route to MASTER_ADDR. An address other than
        loopback needs keys, or insecure.
    ports: the ports at which this machine's workers listen, such as "29600-29620", if a firewall admits no
        others. A worker takes one port for every channel on which it receives. None uses PIPEDREAM_PORTS, and
        without it lets the system choose. docs/transport.md lists which other ports must be open.
    insecure: True listens without keys on an address that others can reach, and logs a warning.
    peer_timeout: seconds after which a worker that is silent, or whose interpreter hangs, counts as lost.
        Code that holds the GIL for this time counts as a hang.
    sync: how the replicas of a stage agree on weights. "bsp" waits for all replicas' gradients in every round
        and is deterministic. "ssp" lets a replica use versions up to `staleness` rounds older. "asp" makes
        an update with each gradient of a replica as soon as the gradient arrives. "allreduce" is "bsp" by
        torch.distributed. See docs/parameter-server.md.
    staleness: the number of rounds for sync="ssp".
    sync_every: n lets each replica make n updates of its own; then the replicas take the mean of their
        weights.
    checkpoints: a folder, or a Checkpoints(folder, every=...). The run saves checkpoints there, and continues
        from the newest one if there is one.
    on_epoch_end: called with an EpochReport when the losses of an epoch are known, in this process or under
        torchrun at rank 0. If it returns False, the run ends early with a result: before the next epoch if
        the schedule drains, else a fixed number of minibatches later. See docs/callbacks.md.
    callbacks: objects of pipedream.callbacks: EarlyStopping, ReduceLROnPlateau, EMA, TensorBoard, or your
        own. They are called in the same process as on_epoch_end: at the start, after every n minibatches and
        every epoch, and at the end. They may stop the run or change its learning rates.
    state: `result.state` of another run. This run continues as if the other had not ended: with its
        optimizer, scheduler, loss scale, minibatches in flight, random numbers and shuffles. So one run per
        epoch equals one run over all epochs. Plan, schedule, optimizer and weights must be the same, and the
        other run must have ended after a whole round of updates. See docs/running.md.
    validation: a Validation with held-out data. They are evaluated after each epoch or every n minibatches,
        at the weights that all stages have then. RunResult.validation has the figures.
    seed: the seed of all random numbers. None continues from the caller's generators.
    on_nonfinite: "stop" raises NonFiniteLoss before the minibatch changes a weight; the error names the
        minibatch. "continue" trains on.
    gather: where the trained weights go: "rank0", "all", or "none" (each worker keeps its own stage's
        weights). A model that came on the meta device stays there.
    weights: the initial weights of a model on the meta device; each worker makes only those of its stages. A
        function of a module, a safetensors file, or a folder of such files. None calls each module's own
        reset_parameters() and _init_weights. See docs/models.md.
    save: a folder. Each stage's worker writes its trained weights there as a safetensors file, with an index
        as in Hugging Face's checkpoints. The files get their final names when all are written. Several
        machines must share the folder.
    progress: shows epoch, loss and samples/s on stderr: on a terminal in one line that changes, elsewhere in
        a new line every few seconds.
    trace: a file (.json or .json.gz) for a trace that ui.perfetto.dev opens.

    The caller's random number generators stay as they were. Without a seed, one number is then drawn from
    torch's generator, so that the next run differs.

    Other arguments belong to features that do not exist yet, and are refused.

    Raises ValueError or TypeError for a mistake in the arguments, and errors.PipelineError if the run fails.
    The error has the `losses` of the minibatches that were done, and the `minibatch` at which the run was;
    the model then has the newest weights of the stages whose workers live. If the run fails after the
    training, for example because a disk is full, the error says where the trained weights are. The first
    Ctrl-C ends the run early with a result; a second one ends it at once. Raises RuntimeError inside another
    run, and in a process that may not start workers. Warns, for example, if nothing is trainable, if the
    model is in eval(), or if the plan leaves workers without work.
    """
    if loss_fn is None:
        loss_fn = own_loss
    arguments = {name: value for name, value in locals().items() if name not in ("model", "plan")}
    with autocast_left() as regions:
        if autocast is None and regions:
            arguments["autocast"] = regions.get(choose_device_type())
        return _run(model, plan, arguments)


def _run(model: Model, plan: Plan, arguments: dict[str, Any]) -> RunResult:
    """Does the work of run(). arguments: by name, all arguments of run() except model and plan."""
    data: Iterable[Any] = arguments["data"]
    KeptState.let_go()  # the state from which this run continues stays, because the arguments hold it
    # The prefix is made before the checks, so that all ranks count the same number of calls, even if one
    # rank's arguments have a mistake.
    prefix = rendezvous_prefix() if under_torchrun() else None
    with mistakes_told(prefix):
        steering = _steering_of(arguments)
        options = checked_options(model, plan, arguments, steering)
        if prefix is None:
            check_main_is_a_file()
            start_server()  # a new server imports torch for seconds, while this process goes on
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
            in_microbatches=_in_microbatches(data, first),
        )
        for caution in (*of_data, *cautions):
            warn_the_caller(caution)
    with _told(steering, data, options) as (tell_end, options):
        if prefix is not None:
            first.take()  # frees minibatch 0, which is no longer needed
            result = _run_this_rank(model, data, options, prefix, steering)
        else:
            result = run_locally(model, data, options, first, steering)
        tell_end(result)
    if options.seed is None:
        # The next run without a seed must not repeat this one's shuffles and dropouts.
        torch.empty((), dtype=torch.int64).random_()
    if arguments["trace"] is not None and is_rank_0():
        _save_trace(result, arguments["trace"])
    return result


def _in_microbatches(data: Iterable[Any], first: KeptMinibatch) -> bool:
    """Whether the data are known to yield Microbatches. Reads no further data to find out."""
    if first.parts is not None:
        return isinstance(first.parts[0], Microbatches)
    return isinstance(data, (list, tuple)) and len(data) > 0 and isinstance(data[0], Microbatches)


@contextlib.contextmanager
def _told(
    steering: Steering, data: Iterable[Any], options: JobOptions
) -> Iterator[tuple[Callable[[RunResult], None], JobOptions]]:
    """Tells the callbacks of the start and the end of the run in the with block.

    Yields (a function that tells the callbacks of the result, the options). If the run continues from a
    checkpoint, the options have the callbacks' earlier decisions that still take effect (Continued.answers).
    Raises the error that a callback has raised."""
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
        options.continues.evaluates and not options.continues.tells_later,
        _core.minibatches_between_drains(options.schedule_options()),
        None if options.validation is None else options.validation.every,
    )


def _steering_of(arguments: dict[str, Any]) -> Steering:
    check_arguments(**{name: arguments[name] for name in ("on_epoch_end", "callbacks")})
    on_epoch_end, validation = arguments["on_epoch_end"], arguments["validation"]
    callbacks = [*arguments["callbacks"], *([] if on_epoch_end is None else [EpochFunction(on_epoch_end)])]
    return Steering(callbacks, [LOSS, *validation.metrics] if isinstance(validation, Validation) else ())


def _cut(model: Model, data: Iterable[Any], options: JobOptions, first: KeptMinibatch) -> CutModel:
    """Finds the model's layers by one forward with minibatch 0, and keeps that minibatch in `first`."""
    assert isinstance(model, nn.Module)
    with generators_kept():
        options.seed_data(base_seed(options.seed))
        first.parts = inputs, targets = parts_of(first_of(data, first), 0)
        return cut_model(
            model, inputs, targets, options.loss_fn, autocast=options.autocast, weights=options.weights
        )


def _with_evaluation(model: Model, options: JobOptions) -> JobOptions:
    """Runs the model once in eval mode with the first validation minibatch. Returns the options with the
    places of the plan's cuts in that forward. Returns them unchanged without validation, and for a list of
    layers, which is not traced."""
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
    """Saves the trace. If the disk is full, only logs a warning, because the training is done."""
    try:
        result.save_trace(trace)
    except OSError as error:
        _log.warning(
            "the trace was not saved: %s; save_trace(path) of the result writes it elsewhere", one_line(error)
        )


def _check_process() -> None:
    """Raises RuntimeError in a DataLoader's worker process, which reads the run's data, and in a daemonic
    process, which may not start processes."""
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
        begun = threading.Event()
        around.enter_context(notices_save(noticed, has_begun=begun.is_set))
        place_to_stop = replace(place, stop_order=order)
        result = run_worker(
            place_to_stop,
            options,
            model,
            data,
            steering=steering if place.rank == 0 else None,
            note_begin=begun.set,
        )
        result.is_interrupted = order is not None and order.is_asked
        return result
