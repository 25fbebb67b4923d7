"""Describes every argument of run() once: default, check, command-line option, and line in docs/running.md.

    run()          checks its arguments by these descriptions; a test compares its signature with them
    cli.py         makes the options of `pipedream run` from the descriptions
    target.py      accepts the described names from a target
    docs           running.md has options_table()

Most arguments must be the same at all ranks. The fields of JobOptions and LinkOptions say which arguments may
differ (agreement.py). Torch-free until a check needs it; any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream import _core
from pipedream.callbacks.callback import Callback
from pipedream.checkpoint.checkpoints import checkpoints_of
from pipedream.common.checks import (
    check_choice,
    check_count,
    check_data,
    check_function,
    check_output_file,
    is_count,
    is_number,
)
from pipedream.common.own_rank import is_rank_0
from pipedream.common.table import shorten
from pipedream.common.units import parse_size
from pipedream.links.addresses import parse_ports
from pipedream.links.keys import keys_of
from pipedream.links.options import TRANSPORTS
from pipedream.planning.codec_choice import parse_codec, parse_codec_text
from pipedream.planning.partition_arguments import AUTO, SYNCS
from pipedream.planning.program import Program, schedule_name
from pipedream.simulate.trace import check_trace_path

__all__ = ["NEEDED", "RUN_OPTIONS", "CommandOption", "RunOption", "check_arguments", "options_table"]

NEEDED = object()
"""The default of an argument that must be given."""

_SHOWN_MAX = 60
"""The most characters of a value in an error."""


@dataclass(frozen=True)
class CommandOption:
    """The option of `pipedream run` for an argument. Without the option the argument has the target's value,
    and without that value run()'s default."""

    help: str
    kind: type = str
    flags: tuple[str, ...] = ()
    """The flags. Empty if the only flag follows from the argument's name."""
    metavar: str | None = None
    read: Callable[[Any], Any] = lambda value: value
    """Converts the option's value to the argument."""


@dataclass(frozen=True)
class RunOption:
    """An argument of run()."""

    name: str
    takes: str
    """The values that the argument takes, in words, for the table in docs/running.md."""
    default: Any = None
    check: Callable[[str, Any], object] = lambda name, value: None
    """Called with name and value. Raises ValueError or TypeError for a value that is wrong whatever the
    model, the plan and the other arguments are."""
    command: CommandOption | None = None
    is_built: bool = True
    """Whether the feature exists. If it does not, only the default is allowed."""


def _check_callbacks(name: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, Callback) for each in value):
        raise TypeError(
            f"{name} is {shorten(repr(value), _SHOWN_MAX)}: give a list of pipedream.callbacks.Callback"
        )
    for each in value:
        if each.every is not None and not is_count(each.every):
            raise ValueError(
                f"every of {type(each).__name__} in {name} is {each.every!r}: use 1 or more minibatches"
            )


def check_arguments(**arguments: Any) -> None:
    """Checks arguments of run() one by one, without model and plan. Callers may give only some of them, to
    find mistakes before slow work begins. Raises as run() does."""
    for option in RUN_OPTIONS:
        if option.name not in arguments:
            continue
        value = arguments[option.name]
        if not option.is_built and value != option.default:
            shown = shorten(repr(value), _SHOWN_MAX)
            raise ValueError(
                f"{option.name} is {shown}: this is not built yet, leave it at {option.default!r}"
            )
        option.check(option.name, value)


def options_table() -> str:
    """Returns the arguments as a Markdown table. Leaves out arguments whose feature does not exist."""
    lines = ["| argument | default | what it takes |", "| --- | --- | --- |"]
    for option in RUN_OPTIONS:
        if option.is_built:
            default = "needed" if option.default is NEEDED else f"`{option.default!r}`".replace("'", '"')
            lines.append(f"| `{option.name}` | {default} | {option.takes} |")
    return "\n".join(lines)


# Checks.


def _choice_of(*choices: str) -> Callable[[str, Any], None]:
    return lambda name, value: check_choice(name, value, choices)


def _check_schedule(name: str, value: Any) -> None:
    if isinstance(value, Program):
        return
    if isinstance(value, (str, os.PathLike)) and os.fspath(value).endswith(".txt"):
        raise ValueError(f"{name} is the file {os.fspath(value)!r}: give pipedream.Program.load of it")
    known = schedule_name(value) if isinstance(value, str) else value
    check_choice(name, known, (*_core.schedule_names(), AUTO))


def _schedule_given(text: str) -> str | Program:
    return Program.load(text) if text.endswith(".txt") else text


def _or_none(check: Callable[[str, Any], object]) -> Callable[[str, Any], object]:
    return lambda name, value: None if value is None else check(name, value)


def _check_factory(which: str, example: str) -> Callable[[str, Any], None]:
    """Returns the check of a function that makes an object for each stage, such as its optimizer. The check
    refuses an object that is already made, which users give by habit. which: a phrase for the error that says
    who calls the function. example: an example for the error."""

    def check(name: str, value: Any) -> None:
        if not callable(value):
            raise TypeError(
                f"{name} is a {type(value).__name__}: give a function {which}, as"
                f" functools.partial({example})"
            )

    return check


def _check_peer_timeout(name: str, value: Any) -> None:
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}: give seconds, more than 0")


def _check_max_grad_norm(name: str, value: Any) -> None:
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}: give a number above 0, or None")


def _check_staleness(name: str, value: Any) -> None:
    if not is_count(value, at_least=0):
        raise ValueError(f"{name} is {value!r}: give a number of rounds, 0 or more")


def _check_microbatches(name: str, value: Any) -> None:
    if value == AUTO:
        raise ValueError(f"{name} is 'auto': leave it out, and schedule='auto' takes it from the plan")
    check_count(name, value)


def _check_autocast(_: str, value: Any) -> None:
    from pipedream.model.precision import autocast_dtype

    autocast_dtype(value)


def _check_seed(_: str, value: Any) -> None:
    from pipedream.model.seeding import base_seed

    base_seed(value)


def _check_validation(name: str, value: Any) -> None:
    if value is not None:
        from pipedream.model.validation import check_validation

        check_validation(name, value)


def _check_weights(_: str, value: Any) -> None:
    from pipedream.model.initial_weights import check_weights

    check_weights(value)


def _check_state(name: str, value: Any) -> None:
    from pipedream.checkpoint.run_state import RunState

    if not isinstance(value, RunState):
        raise TypeError(f"{name} is a {type(value).__name__}: give the state of a RunResult, result.state")


def _check_save(name: str, value: Any) -> None:
    """Checks the folder. Makes the folder if it is missing, because every worker writes into it."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} is {value!r}: give the path of a folder")
    try:
        os.makedirs(value, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} is {os.fspath(value)!r}, which is no folder: {error.strerror}") from None


def _check_trace(name: str, value: Any) -> None:
    check_trace_path(value)
    if is_rank_0():  # only rank 0 writes the file, so other machines need not have its folder
        check_output_file(value, name)


RUN_OPTIONS: tuple[RunOption, ...] = (
    RunOption(
        "data",
        "yields `(inputs, targets)`, or dicts, once per epoch: a `DataLoader`, a list, a generator",
        NEEDED,
        check_data,
    ),
    RunOption(
        "loss_fn",
        "`(outputs, targets)` -> scalar tensor; `None`: the output's `loss`",
        None,
        _or_none(check_function),
    ),
    RunOption(
        "optimizer",
        "called with a stage's parameters, or named parameters",
        NEEDED,
        _check_factory("that each stage calls with its parameters", "torch.optim.SGD, lr=0.1"),
    ),
    RunOption(
        "epochs",
        "how often the data are iterated",
        1,
        check_count,
        CommandOption("Times through the data.", int),
    ),
    RunOption(
        "schedule",
        'a name of [schedules.md](schedules.md); `"auto"`: the plan\'s schedule and `microbatches`; or'
        " a `pipedream.Program`",
        "pipedream",
        _check_schedule,
        CommandOption(
            "The order of minibatches and weight versions: a schedule's name, auto for the plan's own, or"
            " a file (.txt) with a program.",
            read=_schedule_given,
        ),
    ),
    RunOption(
        "microbatches",
        "the number of pieces of every minibatch",
        1,
        _check_microbatches,
        CommandOption("The number of microbatches into which every minibatch is cut.", int),
    ),
    RunOption(
        "weight_fn",
        "`(targets)` -> how much a microbatch counts in the mean; `None`: its samples",
        None,
        _or_none(check_function),
    ),
    RunOption(
        "lr_scheduler",
        "called with a stage's optimizer; steps at every update, not every epoch",
        None,
        _or_none(
            _check_factory(
                "that each stage calls with its optimizer", "torch.optim.lr_scheduler.StepLR, step_size=1000"
            )
        ),
    ),
    RunOption(
        "recompute",
        "`True`, or the stages that keep no activations and repeat their forward before the backward",
        command=CommandOption(
            "Repeat every forward before its backward, to save memory.",
            bool,
            flags=("--recompute/--no-recompute",),
        ),
    ),
    RunOption(
        "memory",
        'the memory that a worker may use: `"8GiB"`, or bytes',
        None,
        _or_none(lambda name, value: parse_size(value, name)),
        CommandOption("The most memory of a worker, for example 8GiB.", metavar="SIZE"),
    ),
    RunOption(
        "autocast",
        '`"bfloat16"`, or `"float16"` with loss scaling',
        None,
        _check_autocast,
        CommandOption("Compute in bfloat16 or float16."),
    ),
    RunOption(
        "max_grad_norm",
        "gradients are scaled down to this 2-norm",
        None,
        _or_none(_check_max_grad_norm),
        CommandOption("Scale gradients down to this norm.", float),
    ),
    RunOption(
        "transport",
        ", ".join(f'`"{name}"`' for name in TRANSPORTS),
        "auto",
        _choice_of(*TRANSPORTS),
        CommandOption("How tensors travel between workers: auto, tcp, zmq, shm or ipc."),
    ),
    RunOption(
        "codec",
        'sends fewer bytes: `"bf16"`, `"fp16"`, `"int8"`, `"topk:0.05"`, or a mapping of these per'
        ' direction, pair of stages or `"pushes"`, which also takes `"factors"`'
        " ([transport.md](transport.md#codecs))",
        None,
        lambda _, value: parse_codec(value),
        CommandOption(
            "Compress activations and gradients between stages: bf16, fp16, int8, topk or topk:0.05. Or"
            " WHERE=CODEC,..., such as activations=bf16,1->0=int8,pushes=bf16 or pushes=factors.",
            read=parse_codec_text,
        ),
    ),
    RunOption(
        "keys",
        "a key file made by `pipedream keys`: encrypts all links",
        None,
        _or_none(lambda _, value: keys_of(value)),
        CommandOption("Encrypt all links with this file, made by `pipedream keys`.", Path, metavar="FILE"),
    ),
    RunOption(
        "bind",
        "the address or interface that workers listen on",
        command=CommandOption("The address or interface on which workers listen.", metavar="ADDRESS"),
    ),
    RunOption(
        "ports",
        'the ports that workers listen at, `"29600-29620"`; `None`: `PIPEDREAM_PORTS`, else any',
        None,
        _or_none(parse_ports),
        CommandOption("The ports at which workers listen, such as 29600-29620.", metavar="RANGE"),
    ),
    RunOption(
        "insecure",
        "`True` lets workers listen without keys where other machines can reach them",
        False,
        command=CommandOption(
            "Listen without keys on an address that other machines can reach.", bool, flags=("--insecure",)
        ),
    ),
    RunOption(
        "peer_timeout", "seconds after which a silent worker counts as lost", 15.0, _check_peer_timeout
    ),
    RunOption(
        "sync",
        'how [replicas of a stage](parameter-server.md) agree on weights: `"bsp"`, `"ssp"` with'
        ' `staleness`, `"asp"`, `"allreduce"`',
        "bsp",
        _choice_of(*SYNCS),
        CommandOption("How the replicas of a stage agree on weights: bsp, ssp, asp or allreduce."),
    ),
    RunOption(
        "staleness",
        'with `"ssp"`: by how many rounds the versions that replicas read may be older than with `"bsp"`',
        0,
        _check_staleness,
        CommandOption("With --sync ssp: by how many rounds weights may be older than with bsp.", int),
    ),
    RunOption(
        "sync_every",
        "above 1, replicas update weights of their own, and all take the mean after this number of updates",
        1,
        check_count,
        CommandOption("Let replicas make so many updates each before they average their weights.", int),
    ),
    RunOption(
        "validation",
        'held-out data to evaluate: `pipedream.Validation(data, metrics={}, every="epoch")`',
        None,
        _check_validation,
    ),
    RunOption(
        "checkpoints",
        "a folder, or `pipedream.Checkpoints(folder, every=...)`: saves the run there, and continues from it",
        None,
        lambda _, value: checkpoints_of(value),
        CommandOption(
            "Save checkpoints in this folder, and continue from the newest one there.", Path, metavar="FOLDER"
        ),
    ),
    RunOption("recovery", "from lost workers", is_built=False),
    RunOption(
        "on_epoch_end",
        "called with a report after every epoch; `False` stops the run",
        None,
        _or_none(check_function),
    ),
    RunOption(
        "callbacks", "[objects](callbacks.md) that hear of the run, and may steer it", (), _check_callbacks
    ),
    RunOption(
        "state",
        "`result.state` of a run to [continue](#going-on-where-a-run-ended)",
        None,
        _or_none(_check_state),
    ),
    RunOption(
        "seed",
        "the seed of all random numbers; `None` continues from the caller's generators",
        None,
        _check_seed,
        CommandOption("The seed of all random numbers.", int),
    ),
    RunOption(
        "on_nonfinite",
        '`"stop"` raises at a loss that is NaN or infinite, `"continue"` trains on',
        "stop",
        _choice_of("stop", "continue"),
    ),
    RunOption(
        "gather",
        'where the trained weights go: `"rank0"`, `"all"`, `"none"`',
        "rank0",
        _choice_of("rank0", "all", "none"),
    ),
    RunOption(
        "weights",
        "initial weights of a model on the meta device: a function of a module, or safetensors;"
        " `None`: the modules' own",
        None,
        _check_weights,
    ),
    RunOption(
        "save",
        "a folder: each stage writes its trained weights there",
        None,
        _or_none(_check_save),
        CommandOption("Let each stage write its trained weights into this folder.", Path, metavar="FOLDER"),
    ),
    RunOption("progress", "show epoch, loss and samples/s on stderr", True),
    RunOption(
        "trace",
        "a file (.json, .json.gz) for a trace that ui.perfetto.dev opens",
        None,
        _or_none(_check_trace),
        CommandOption(
            "Save a Perfetto trace here (.json or .json.gz).", Path, metavar="FILE", read=os.fspath
        ),
    ),
)
