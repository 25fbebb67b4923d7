"""Defines the commands of the command line: pipedream explain | profile | profile-links | run | keys.

planning_commands.py and checkpoint_commands.py have the other commands. A command runs on the main thread of
its process. The exit status is 0 for success, 2 for a user's mistake, 130 after an interrupt, and 1 for any
other failure. An error is one line on stderr. With --json stdout has exactly one JSON object. Nothing here
imports torch before a command needs it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipedream import __version__
from pipedream.checkpoint_commands import checkpoint_app
from pipedream.command_line import (
    JsonOption,
    check_output,
    describe_usage_error,
    links_or_bandwidth,
    print_result,
    with_notes,
)
from pipedream.common.checks import check_count
from pipedream.common.errors import PipelineError
from pipedream.common.figure_file import FIGURE_SUFFIXES
from pipedream.common.own_rank import is_rank_0, under_torchrun
from pipedream.common.tracebacks import place_of_user_code, wants_whole_tracebacks
from pipedream.common.units import parse_bandwidth
from pipedream.launch.run_options import RUN_OPTIONS, check_arguments
from pipedream.planning.job import describe_exclusions
from pipedream.planning.partition_arguments import AUTO
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan, stage_counts
from pipedream.planning_commands import add_planning_commands

if TYPE_CHECKING:
    from pipedream.launch.target import Job
    from pipedream.planning.layer_profile import Profile
    from pipedream.planning.link_profile import LinkProfile
    from pipedream.report.result import RunResult

__all__ = ["app", "main"]

_USER_ERROR_STATUS = 2
_FAILURE_STATUS = 1
_INTERRUPTED_STATUS = 130  # the status with which a shell reports SIGINT

# `run` without a plan profiles the model first. Profiling for 10 s gives steady figures, and is short
# compared with a training.
_PROFILE_BEFORE_RUN_S = 10.0

_PLANNED_WITH_AUTO = ("schedule", "microbatches")

_RESULT_FIELDS = (
    "losses",
    "epoch_losses",
    "samples_per_s",
    "predicted_ms",
    "measured_ms",
    "bubble_share",
    "bytes_sent",
    "bytes_synced",
    "transports",
    "worker_pids",
    "memory",
    "recompute",
    "channels",
)

# With rich_markup_mode=None help and errors are plain text, and rich is not imported.
app = typer.Typer(
    name="pipedream",
    help="Pipeline-parallel training of PyTorch models.",
    epilog="PIPEDREAM_TRACEBACK=1 shows the whole traceback of an error.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TARGET = typer.Argument(
    metavar="TARGET",
    help="A function: path/to/file.py:function or package.module:function. It returns a mapping or an object"
    " with model, data, loss_fn, for `run` an optimizer, and any other argument of pipedream.run.",
)
_Target = Annotated[str, _TARGET]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipedream {__version__}")
        raise typer.Exit


@app.callback()
def pipedream(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pipeline-parallel training of PyTorch models: profile the layers, partition them, run the pipeline."""


@app.command("profile")
def profile_command(
    target: _Target,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the profile here.")] = None,
    minibatches: Annotated[int, typer.Option(help="The most minibatches to time.")] = 1000,
    seconds: Annotated[float | None, typer.Option(help="The most seconds to time.")] = None,
    calibrated_for: Annotated[
        int | None,
        typer.Option(
            "--calibrate",
            metavar="WORKERS",
            help="Also measure the costs of a run, by short runs with so many workers on this machine, for"
            " `partition --cost-model calibrated`.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time every layer of a model on this machine."""
    from pipedream.launch.target import load_job

    check_output(output)
    if calibrated_for is not None and calibrated_for < 2:
        raise ValueError(
            f"--calibrate is {calibrated_for}: it takes 2 workers to see what they do to each other"
        )
    with _clean_stdout(as_json):
        job = load_job(target, needs_optimizer=calibrated_for is not None)
        from pipedream.profiling.profiler import profile

        how = _given(job, "autocast", "weights") | {"minibatches": minibatches, "seconds": seconds}
        measured = profile(job.model, job.data, job.loss_fn, **how)
        if calibrated_for is not None:
            measured = _calibrate(measured, target, calibrated_for)
    notes = []
    if measured.runtime is not None:
        notes.append(
            f"calibrated for {calibrated_for} workers on a machine: `pipedream partition --cost-model"
            f" calibrated --workers-per-host {calibrated_for}` plans with it"
        )
    if output is not None:
        measured.save(output)
    else:
        notes.append("not saved: --output profile.json keeps it for `pipedream partition`")
    print_result(with_notes(measured, notes), measured.to_dict(), as_json)


def _calibrate(measured: Profile, target: str, workers: int) -> Profile:
    # The target is loaded again, because profiling may have used up its data.
    from pipedream.launch.calibration import calibrate
    from pipedream.launch.target import load_job

    job = load_job(target, needs_optimizer=True)
    options = _given(job, "optimizer", "weights")
    return calibrate(measured, job.model, job.data, job.loss_fn, workers=workers, **options)


def _given(job: Job, *names: str) -> dict[str, Any]:
    return {name: job.options[name] for name in names if name in job.options}


@app.command("explain")
def explain_command(
    target: Annotated[str | None, _TARGET] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save a picture here: .svg, .png or .pdf.")
    ] = None,
    plan_path: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Mark this plan's cuts in the picture.")
    ] = None,
    options: Annotated[
        bool,
        typer.Option("--options", help="Show which options exclude each other, and why. Needs no TARGET."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show where a model can be cut, which tensors cross there, and why it cannot be cut elsewhere.

    With --options, show which options exclude each other.
    """
    if options:
        print_result(*describe_exclusions(), as_json)
        return
    if target is None:
        raise ValueError("target is missing: write path/to/file.py:function, or give --options")
    from pipedream.launch.target import load_job

    check_output(output)
    if output is not None and output.suffix not in FIGURE_SUFFIXES:
        raise ValueError(f"output is {os.fspath(output)!r}: a picture ends in {', '.join(FIGURE_SUFFIXES)}")
    if plan_path is not None and output is None:
        raise ValueError("--plan marks its cuts in a picture: give --output FILE, too")
    plan = None if plan_path is None else Plan.load(plan_path)
    with _clean_stdout(as_json):
        job = load_job(target, needs_optimizer=False)
        from pipedream.data.first_minibatch import first_of
        from pipedream.splitting.explanation import explain

        explained = explain(job.model, first_of(job.data), job.loss_fn, **_given(job, "weights"))
    if plan is not None and plan.num_layers != len(explained.layers):
        raise ValueError(
            f"the plan is of {plan.num_layers} layers, the model has {len(explained.layers)}: use a plan of a"
            " profile with all its cuts"
        )
    if output is None:
        print_result(str(explained), explained.to_dict(), as_json)
        return
    explained.save_picture(output, [] if plan is None else [stage.last_layer for stage in plan.stages[:-1]])
    shown = with_notes(explained.describe_refused(), [f"picture of the layers saved in {output}"])
    print_result(shown, explained.to_dict(), as_json)


_Command = Callable[..., None]


def _with_run_options(*names: str) -> Callable[[_Command], _Command]:
    """Returns a decorator that replaces a command's **arguments by options of RUN_OPTIONS: by those named, or
    by all if no names are given. An option that the user leaves out is None.
    """
    described = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                option.command.kind | None,
                typer.Option(*option.command.flags, help=option.command.help, metavar=option.command.metavar),
            ],
        )
        for option in RUN_OPTIONS
        if option.command is not None and (not names or option.name in names)
    ]

    def decorate(command: _Command) -> _Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*own, *described])  # type: ignore[attr-defined]
        return command

    return decorate


def _read_run_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of run() for the options that were given."""
    return {
        option.name: option.command.read(arguments[option.name])
        for option in RUN_OPTIONS
        if option.command is not None and arguments.get(option.name) is not None
    }


@app.command("run")
@_with_run_options()
def run_command(
    target: _Target,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="A file that `partition` saved, or the number of replicas of each stage, such as 2-1.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Instead of --plan: profile first, and plan for so many workers.")
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="With --workers: bandwidth of the links between workers, for example 10Gbit/s."),
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --workers: the links that `profile-links` measured, not --bandwidth."
        ),
    ] = None,
    straight: Annotated[
        bool, typer.Option("--straight", help="With --workers: give every stage one replica.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the trained weights here (.safetensors).")
    ] = None,
    as_json: JsonOption = False,
    **arguments: Any,
) -> None:
    """Train a model as a pipeline of worker processes.

    TARGET may return any argument of pipedream.run. An option of this command overrides the value that TARGET
    returns, and that overrides the default.
    """
    from pipedream.launch.fork_server import start_server
    from pipedream.launch.target import load_job

    _check_weights_file(output)
    check_output(arguments["trace"])
    _check_plan_options(plan_file, workers, bandwidth, links, straight)
    options = _read_run_options(arguments)
    if as_json:
        options["progress"] = False
    counts = None if plan_file is None else stage_counts(plan_file)
    given_plan = None if plan_file is None or counts is not None else Plan.load(plan_file)
    if plan_file is not None and not under_torchrun():
        start_server()  # the server imports torch while this process goes on
    with _clean_stdout(as_json):
        from pipedream.launch.runner import run
        from pipedream.launch.target import share_out

        check_arguments(**options)
        if plan_file is None:
            among = links_or_bandwidth(links, bandwidth)
            given_plan = _make_plan(target, workers or 0, among, straight, options)
        job = load_job(target, needs_optimizer=True)
        options = job.options | options
        plan = given_plan or share_out(job, counts or (), options)
        if output is not None and options.get("gather") == "none":
            raise ValueError("gather is 'none', which leaves no whole model to save: leave --output out")
        if not as_json and is_rank_0():
            unsaved = "the trained weights will not be saved: --output FILE.safetensors does"
            typer.echo(with_notes(plan, [unsaved] if output is None else []) + "\n")
        result = run(job.model, plan, data=job.data, loss_fn=job.loss_fn, **options)
        if output is not None and is_rank_0():
            _save_weights(job.model, output)
    if is_rank_0():
        summary = {"plan": plan.to_dict()} | {name: getattr(result, name) for name in _RESULT_FIELDS}
        print_result(_describe(result, output, options.get("trace")), summary, as_json)


@app.command("profile-links")
@_with_run_options("transport", "keys", "bind", "ports", "insecure")
def profile_links_command(
    seconds: Annotated[float, typer.Option(help="The most seconds for each figure of a pair.")] = 1.0,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the links here.")] = None,
    as_json: JsonOption = False,
    **arguments: Any,
) -> None:
    """Measure bandwidth and latency between all workers: torchrun ... -m pipedream profile-links."""
    options = _read_run_options(arguments)
    with _clean_stdout(as_json):
        from pipedream.launch.link_profiling import profile_links

        measured = profile_links(**options, seconds=seconds, save=output, progress=not as_json)
    if not is_rank_0():
        return
    notes = []
    if output is None:
        notes.append("not saved: --output links.json keeps them for `pipedream partition --links links.json`")
    print_result(with_notes(measured, notes), measured.to_dict(), as_json)


@app.command("keys")
def keys_command(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The file to make; with --machines, the folder.")
    ],
    machines: Annotated[
        int | None,
        typer.Option(help="Make a file for each of so many machines: machine-0.json, machine-1.json, ..."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make the keys that encrypt and authenticate the links of runs on several machines."""
    from pipedream.links.keys import write_key_file, write_key_folder

    if machines is None:
        check_output(path)
        paths, made = [path], [write_key_file(path)]
    else:
        check_output(path / "machine-0.json" if path.is_dir() else path)
        paths, made = write_key_folder(path, machines)
    fields = {"files": [os.fspath(path) for path in paths], "public": [keys.public for keys in made]}
    if machines is None:
        remedy = f"copy it to every machine of the run, readable by you alone, and give keys={str(path)!r}"
    else:
        remedy = "move each file to its machine, readable by you alone, and give its path as keys="
    print_result("\n".join([*fields["files"], remedy]), fields, as_json)


def _check_plan_options(
    plan_file: Path | None, workers: int | None, bandwidth: str | None, links: Path | None, straight: bool
) -> None:
    if plan_file is None:
        if workers is None or (bandwidth is None and links is None):
            raise ValueError("give --plan FILE, or --workers N and --bandwidth, for example 10Gbit/s")
        if under_torchrun():
            raise ValueError("under torchrun give --plan FILE: every rank would measure and plan on its own")
    elif workers is not None or bandwidth is not None or links is not None or straight:
        raise ValueError(
            "--plan already says what --workers, --bandwidth, --links and --straight would: leave those out"
        )


def _make_plan(
    target: str,
    workers: int,
    bandwidth: str | LinkProfile,
    straight: bool,
    options: Mapping[str, Any],
) -> Plan:
    """Profiles the target and plans for it. options: arguments of run() from the command line."""
    # The target is called twice, once to profile and once to run: its data may be a generator, and profiling
    # must not affect the model that is trained.
    from pipedream.launch.target import load_job

    if isinstance(bandwidth, str):
        parse_bandwidth(bandwidth)  # an error should come before the seconds of profiling
    check_count("--workers", workers)
    job = load_job(target, needs_optimizer=True)
    check_arguments(**job.options)
    from pipedream.launch.profiling import profile

    how = _given(job, "autocast") | {"seconds": _PROFILE_BEFORE_RUN_S}
    measured = profile(job.model, job.data, job.loss_fn, **how)
    asked = {
        name: value for name, value in (job.options | dict(options)).items() if name in _PLANNED_WITH_AUTO
    }
    for_schedule = asked if asked.get("schedule") == AUTO else {}
    return partition(measured, workers, bandwidth, straight=straight, **for_schedule)


def _save_weights(model: Any, output: Path) -> None:
    import torch
    from safetensors.torch import save_model

    # save_file would refuse tied weights. save_model stores one copy of them.
    save_model(
        model if isinstance(model, torch.nn.Module) else torch.nn.Sequential(*model), os.fspath(output)
    )


def _describe(result: RunResult, output: Path | None, trace: str | os.PathLike[str] | None) -> str:
    lines = [f"trained on {len(result.losses)} minibatches, {result.samples_per_s:.1f} samples/s"]
    if result.losses:
        lines[0] += f", last loss {result.losses[-1]:.4f}"
    if result.epoch_losses:
        lines.append("mean loss per epoch: " + ", ".join(f"{loss:.4f}" for loss in result.epoch_losses))
    predicted = "" if result.predicted_ms is None else f", predicted {result.predicted_ms:.3f} ms"
    lines.append(f"per minibatch: measured {result.measured_ms:.3f} ms{predicted}")
    lines += [
        f"{what} saved in {path}"
        for what, path in (("weights", output), ("trace", trace))
        if path is not None and os.path.exists(path)
    ]
    lines += [f"\n{table}" for table in (result.describe_memory(), result.describe_channels()) if table]
    return "\n".join(lines)


def _check_weights_file(path: Path | None) -> None:
    if path is None:
        return
    check_output(path)
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path}: weights are saved in the safetensors format, so the name must end in .safetensors"
        )


@contextlib.contextmanager
def _clean_stdout(as_json: bool) -> Iterator[None]:
    """Redirects stdout to stderr inside the block, because user code and worker processes may print."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        # Both ways to stdout are redirected. Child processes and C++ write to file descriptor 1. Python code
        # writes to sys.stdout, which may be another file.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _fail(error: BaseException | str, status: int, text: str = "") -> int:
    """Prints one line about the error, and returns the status. text: replaces the error's own message."""
    if wants_whole_tracebacks() and isinstance(error, BaseException):
        traceback.print_exception(error)
    message = " ".join((text or str(error)).split()) or type(error).__name__
    place = place_of_user_code(error) if isinstance(error, BaseException) else None
    if place is not None:
        named = "" if message.startswith(type(error).__name__) else f"{type(error).__name__}: "
        message = f"{named}{message} ({place})"
    print(f"pipedream: error: {message}", file=sys.stderr)
    return status


add_planning_commands(app)
app.add_typer(checkpoint_app)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Shows a warning of pipedream as one line. Python's own form would add the line of code that warned."""
    shown = warnings.showwarning
    callers = (str(Path(__file__).parent), str(Path(typer.__file__).parent))

    def show(
        message: Warning | str, category: type[Warning], filename: str, *place: Any, **where: Any
    ) -> None:
        if filename.startswith(callers):
            print(f"pipedream: warning: {' '.join(str(message).split())}", file=sys.stderr)
        else:
            shown(message, category, filename, *place, **where)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _run_command(arguments: list[str] | None) -> int:
    """Runs a command and returns the exit status. Turns errors into one line."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with _plain_warnings():
            status = app(given or ["--help"], prog_name="pipedream", standalone_mode=False)
        if status == _INTERRUPTED_STATUS:  # some versions of typer return this, others raise
            return _fail("interrupted", _INTERRUPTED_STATUS)
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED_STATUS)
    except SystemExit as error:
        text = f"sys.exit({error.code!r}) was called: TARGET must return the job, and read no command line"
        return _fail(error, _USER_ERROR_STATUS, text)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        named = f"{error.filename}: {error.strerror}" if error.filename else ""
        return _fail(error, _USER_ERROR_STATUS, named)
    except (ValueError, TypeError) as error:
        return _fail(error, _USER_ERROR_STATUS)
    except PipelineError as error:
        return _fail(error, _FAILURE_STATUS)
    except Exception as error:
        # Typer's exception for wrong options has no public name; it has this method.
        if hasattr(error, "format_message"):
            return _fail(describe_usage_error(error), _USER_ERROR_STATUS)
        return _fail(error, _FAILURE_STATUS, f"{type(error).__name__}: {error}")


def main(arguments: list[str] | None = None) -> None:
    """Runs the `pipedream` command."""
    sys.exit(_run_command(arguments))
