"""run(): checks the arguments, then trains with local workers, or as this rank's worker under torchrun."""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .guard import check_main_guard
from .job import JobOptions, WorkerPlace
from .launcher import PeekedIterator, run_locally
from .plan import Plan
from .rendezvous import Rendezvous, torchrun_store
from .result import RunResult
from .seeding import base_seed, generators_kept
from .splitter import Model, layers_of
from .trace import check_trace_path
from .worker import run_worker

__all__ = ["run"]

_SCHEDULES = ("pipedream",)
_SCHEDULES_TO_COME = (
    "vertical_sync",
    "2bw",
    "flush",
    "gpipe",
    "naive",
    "model_parallel",
    "data_parallel",
    "interleaved",
)
_TRANSPORTS = ("auto", "tcp", "zmq")


def run(
    model: Model,
    plan: Plan,
    *,
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    epochs: int = 1,
    schedule: str = "pipedream",
    microbatches: int = 1,
    lr_scheduler: Any = None,
    recompute: Any = None,
    memory: Any = None,
    autocast: Any = None,
    max_grad_norm: float | None = None,
    transport: str = "auto",
    codec: Any = None,
    keys: Any = None,
    bind: Any = None,
    insecure: bool = False,
    peer_timeout: float = 15.0,
    sync: str = "bsp",
    staleness: int = 0,
    sync_every: int = 1,
    checkpoint_dir: Any = None,
    resume: bool = False,
    on_epoch_end: Any = None,
    seed: int | None = None,
    on_nonfinite: str = "stop",
    gather: str = "rank0",
    progress: bool = True,
    trace: str | os.PathLike[str] | None = None,
) -> RunResult:
    """Trains `model` as the pipeline of `plan`, with 1F1B and weight stashing.

    In a plain script it starts the local workers and returns only in the caller, with the model's weights
    and buffers updated in place. Under torchrun it is this rank's worker: rank 0 returns with the whole
    trained model, the others as `gather` says; rank 0's plan and initial weights are used everywhere.

    model: an nn.Sequential or list of layers; any other module is one layer. float32 or float64.
    data: yields (inputs, targets), once per epoch; a DataLoader, a list, a generator. What cannot be sent to
        the workers is iterated here and forwarded to them.
    loss_fn: (outputs, targets) -> scalar tensor, run by the last stage.
    optimizer: called once per stage with its parameters, or with (name, parameter) pairs when its first
        argument is called `named_parameters`. For example functools.partial(torch.optim.SGD, lr=0.1).
    transport: "auto" chooses; "tcp" (or "zmq") is ZeroMQ over tcp.
    peer_timeout: seconds after which a silent worker is given up.
    seed: of all random numbers; None continues from the caller's generators.
    on_nonfinite: "stop" raises NonFiniteLoss naming the minibatch; "continue" trains on.
    gather: where the trained weights go: "rank0", "all", or "none" (each worker keeps its own stage's).
    progress: show loss, samples/s and weight versions while training, on a terminal.
    trace: a file (.json or .json.gz) for a trace that ui.perfetto.dev opens.

    The random number generators of the calling process are afterwards as they were, but for one draw from
    torch's when there is no seed, so that the next run differs.

    The other arguments belong to features that are not built yet, and are refused. Raises ValueError or
    TypeError for a mistake in the arguments, errors.PipelineError for a run that fails.
    """
    check_main_guard()
    _refuse_unbuilt(
        microbatches=(microbatches, 1),
        lr_scheduler=(lr_scheduler, None),
        recompute=(recompute, None),
        memory=(memory, None),
        autocast=(autocast, None),
        max_grad_norm=(max_grad_norm, None),
        codec=(codec, None),
        keys=(keys, None),
        bind=(bind, None),
        insecure=(insecure, False),
        sync=(sync, "bsp"),
        staleness=(staleness, 0),
        sync_every=(sync_every, 1),
        checkpoint_dir=(checkpoint_dir, None),
        resume=(resume, False),
        on_epoch_end=(on_epoch_end, None),
    )
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}: use pipedream.partition(...) or Plan.load(file)")
    if schedule in _SCHEDULES_TO_COME:
        raise ValueError(f"schedule is {schedule!r}, which is not built yet: use 'pipedream'")
    _check_choice("schedule", schedule, _SCHEDULES)
    _check_choice("transport", transport, _TRANSPORTS)
    _check_choice("on_nonfinite", on_nonfinite, ("stop", "continue"))
    _check_choice("gather", gather, ("rank0", "all", "none"))
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs is {epochs!r}: give a whole number of at least 1")
    if not isinstance(peer_timeout, (int, float)) or not 0 < peer_timeout < math.inf:
        raise ValueError(f"peer_timeout is {peer_timeout!r}: give seconds, more than 0")
    base_seed(seed)  # raises for a seed that is none, before any process starts
    for name, value in (("loss_fn", loss_fn), ("optimizer", optimizer)):
        if not callable(value):
            raise TypeError(f"{name} is a {type(value).__name__}: give a function")
    _check_data(data, epochs)
    _check_hooks(model)
    if trace is not None:
        check_trace_path(trace)

    options = JobOptions(
        plan=plan,
        loss_fn=loss_fn,
        optimizer=optimizer,
        schedule=schedule,
        epochs=epochs,
        seed=seed,
        transport=transport,
        peer_timeout_s=float(peer_timeout),
        on_nonfinite=on_nonfinite,
        gather=gather,
        progress=progress,
        num_threads=_threads_per_worker(plan),
    )
    if _under_torchrun():
        result = _run_this_rank(model, data, options)
    else:
        if isinstance(data, Iterator):
            data = PeekedIterator(data)
        result = run_locally(model, data, options)
    if seed is None:
        # The next run without a seed is another one: its shuffles and dropouts must not repeat this one's.
        torch.empty((), dtype=torch.int64).random_()
    if trace is not None and int(os.environ.get("RANK", "0")) == 0:
        result.save_trace(trace)
    return result


def _refuse_unbuilt(**arguments: tuple[Any, Any]) -> None:
    for name, (value, default) in arguments.items():
        if value != default:
            raise ValueError(f"{name} is {value!r}: this is not built yet, leave it at {default!r}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: use one of {', '.join(map(repr, choices))}")


def _check_data(data: Any, epochs: int) -> None:
    if not isinstance(data, Iterable):
        raise TypeError(f"data is a {type(data).__name__}: give something that yields (inputs, targets)")
    if isinstance(data, Iterator) and epochs > 1:
        raise ValueError(
            f"data is an iterator, which can be read once, but epochs is {epochs}: give a DataLoader, a list,"
            " or an object whose __iter__ starts anew"
        )


def _check_hooks(model: Model) -> None:
    for layer_name, layer in layers_of(model):
        for name, parameter in layer.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"parameter {name!r} of layer {layer_name!r} has a hook, which would not see the"
                    " gradients of the weight versions: remove it, or do its work in the optimizer"
                )


def _threads_per_worker(plan: Plan) -> int:
    """The caller's torch threads, shared by the workers of this machine."""
    if _under_torchrun():
        return torch.get_num_threads()  # torchrun and the user have said how many
    return max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // plan.workers_used))


def _under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _run_this_rank(model: Model, data: Iterable[Any], options: JobOptions) -> RunResult:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local_world_size != world_size:
        raise ValueError(
            f"{world_size} ranks, {local_world_size} of them here: runs on several machines need keys, which"
            " are not built yet; start all ranks on one"
        )
    job = os.environ.get("TORCHELASTIC_RUN_ID", "torchrun")
    incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # A script may call run() several times: each has its own keys and run id, counted alike at all ranks.
    script = f"pipedream/{job}/{incarnation}"
    prefix = f"{script}/{_next_run_index(script)}"
    place = WorkerPlace(
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        run_id=secrets.randbits(64),
        incarnation=incarnation,
        rendezvous=Rendezvous(torchrun_store(), prefix),
        board=None,
    )
    with generators_kept():
        return run_worker(place, options, model, data)


# Runs of this process so far, by torchrun's run id and restart count.
_num_runs: Counter[str] = Counter()


def _next_run_index(script: str) -> int:
    _num_runs[script] += 1
    return _num_runs[script]
