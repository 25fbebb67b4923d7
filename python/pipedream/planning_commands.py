"""Implements the commands that plan, predict and draw: partition, table, simulate, trace. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pipedream.command_line import JsonOption, check_output, links_or_bandwidth, print_result, with_notes
from pipedream.common.document import check_number
from pipedream.common.units import parse_bandwidth
from pipedream.planning.codec_choice import parse_codec_text
from pipedream.planning.layer_profile import Profile
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.partition_arguments import AUTO, DELAY_MAX
from pipedream.planning.partitioner import partition

if TYPE_CHECKING:
    from pipedream.planning.simulator import Simulation
    from pipedream.simulate.trace import Counter
    from pipedream.simulate.traced_schedule import TracedSchedule

__all__ = ["add_planning_commands"]

_BANDWIDTHS = "1Gbit/s,10Gbit/s,25Gbit/s,100Gbit/s"

_Microbatches = Annotated[int | None, typer.Option(help="Microbatches per minibatch.")]
_Sync = Annotated[
    str, typer.Option(help="How replicas agree on weights: bsp, ssp, asp or allreduce, as for `run`.")
]
_Staleness = Annotated[
    int, typer.Option(help="With --sync ssp: by how many rounds weights may be older than with bsp.")
]
_OptimizerCopies = Annotated[
    float,
    typer.Option(help="Size of the optimizer's state, in copies of the weights: 0 SGD, 1 momentum, 2 Adam."),
]
_Recompute = Annotated[
    bool, typer.Option("--recompute", help="Repeat every forward before its backward, to save memory.")
]
_Links = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Use the links that `profile-links` measured, instead of --bandwidth."),
]


def add_planning_commands(app: typer.Typer) -> None:
    app.command("partition")(partition_command)
    app.command("table")(table_command)
    app.command("simulate")(simulate_command)
    app.command("trace")(trace_command)


def partition_command(
    profile_file: Annotated[Path, typer.Argument(metavar="PROFILE", help="A file that `profile` saved.")],
    workers: Annotated[int, typer.Option(help="The most workers to use.")],
    bandwidth: Annotated[
        str | None, typer.Option(help="Bandwidth of the links between workers, for example 10Gbit/s.")
    ] = None,
    links: _Links = None,
    straight: Annotated[bool, typer.Option("--straight", help="Give every stage one replica.")] = False,
    cost_model: Annotated[
        str,
        typer.Option(help="How times are predicted: paper, or calibrated, which needs a calibrated profile."),
    ] = "paper",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="M[,M,...]",
            help="Memory of a worker, for example 16GiB; or a list with one value per worker, by rank.",
        ),
    ] = None,
    optimizer_copies: _OptimizerCopies = 1.0,
    recompute: Annotated[
        bool,
        typer.Option("--recompute/--no-recompute", help="Whether stages may repeat forwards to save memory."),
    ] = True,
    schedule: Annotated[
        str,
        typer.Option(
            help="The run's schedule: pipedream, unstashed, vertical_sync, 2bw, flush or gpipe; auto chooses"
            " schedule and microbatches."
        ),
    ] = "pipedream",
    microbatches: Annotated[
        str | None,
        typer.Option(metavar="M", help="Microbatches per minibatch, or auto; without it, chosen if needed."),
    ] = None,
    delay_max: Annotated[
        float,
        typer.Option(
            help="With auto: the most updates by which gradients may be late in the mean; 0 is flush."
        ),
    ] = DELAY_MAX,
    workers_per_host: Annotated[
        int | None, typer.Option(help="With --cost-model calibrated: workers that share a machine's cores.")
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(
            metavar="X,X,...", help="Speed of each worker, by rank; one of speed 2 takes half the time."
        ),
    ] = None,
    boundaries: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Fix the last layer of each stage, except the last stage's."),
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(metavar="N-N-...", help="Fix the number of replicas of each stage.")
    ] = None,
    spare_workers: Annotated[
        int,
        typer.Option(help="Further workers, such as hosts without a GPU, that may serve as spare shards."),
    ] = 0,
    codec: Annotated[
        str | None,
        typer.Option(
            help="Plan for runs with a codec: pushes=factors, which `run` then takes from the plan. With"
            " --memory also a codec of activations and gradients, for which memory is reserved."
        ),
    ] = None,
    sync: _Sync = "bsp",
    staleness: _Staleness = 0,
    whole_tensors: Annotated[
        bool,
        typer.Option(
            "--whole-tensors",
            help="Reserve memory for an optimizer that needs whole tensors, or for norms of gradients.",
        ),
    ] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan a profiled model: cut it into the stages with the smallest predicted time per minibatch."""
    check_output(output)
    plan = partition(
        Profile.load(profile_file),
        workers,
        links_or_bandwidth(links, bandwidth),
        memory=_one_or_each(memory),
        cost_model=cost_model,
        straight=straight,
        workers_per_host=workers_per_host,
        schedule=schedule,
        microbatches=_microbatches(microbatches),
        delay_max=delay_max,
        speeds=None if speeds is None else _numbers("--speeds", speeds, float),
        boundaries=None if boundaries is None else _numbers("--boundaries", boundaries, int),
        replicas=None if replicas is None else _numbers("--replicas", replicas, int, separator="-"),
        optimizer_copies=optimizer_copies,
        recompute=recompute,
        spare_workers=spare_workers,
        codec=None if codec is None else parse_codec_text(codec),
        sync=sync,
        staleness=staleness,
        whole_tensors=whole_tensors,
    )
    notes = []
    if output is not None:
        plan.save(output)
    else:
        notes.append("not saved: --output plan.json keeps it for `pipedream run TARGET --plan plan.json`")
    print_result(with_notes(plan, notes), plan.to_dict(), as_json)


def table_command(
    profiles: Annotated[
        list[Path],
        typer.Argument(metavar="PROFILE...", help="Files that `profile` saved, or folders of them."),
    ],
    workers: Annotated[
        str, typer.Option(metavar="N,N,...", help="Numbers of workers to plan for.")
    ] = "4,8,16",
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="B,B,...", help=f"Bandwidths of the links between workers; without it {_BANDWIDTHS}."
        ),
    ] = None,
    links: _Links = None,
    as_json: JsonOption = False,
) -> None:
    """Predict how much faster the best plans are than one worker, and than data parallelism."""
    from pipedream.planning.speed_table import describe_speeds, make_speeds, read_profiles

    counts = _numbers("--workers", workers, int)
    given = links_or_bandwidth(links, _BANDWIDTHS if bandwidth is None and links is None else bandwidth)
    among = [one.strip() for one in given.split(",")] if isinstance(given, str) else [given]
    rows = make_speeds(read_profiles(profiles), counts, among)
    print_result(describe_speeds(rows), {"rows": [row.to_dict() for row in rows]}, as_json)


def _microbatches(text: str | None) -> int | str | None:
    return text if text is None or text == AUTO else _numbers("--microbatches", text, int)[0]


def _one_or_each(text: str | None) -> str | list[str] | None:
    return text.split(",") if text is not None and "," in text else text


_Number = TypeVar("_Number", int, float)


def _numbers(option: str, text: str, kind: type[_Number], *, separator: str = ",") -> list[_Number]:
    try:
        return [kind(number) for number in text.split(separator)]
    except ValueError:
        example = separator.join(("2", "1"))
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(
            f"{option} is {text!r}: give {what} with {separator!r} between them, for example {example}"
        ) from None


def simulate_command(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A file that `partition` saved.")],
    profile_file: Annotated[
        Path, typer.Option("--profile", metavar="FILE", help="The profile that the plan was made from.")
    ],
    schedule: Annotated[
        str,
        typer.Option(
            help="pipedream, vertical_sync, unstashed, 2bw, flush, gpipe, interleaved, model_parallel, or"
            " auto: the schedule for which the plan was made."
        ),
    ] = "pipedream",
    bandwidth: Annotated[
        str | None, typer.Option(help="Bandwidth of the links between workers; without it the plan's.")
    ] = None,
    links: _Links = None,
    minibatches: Annotated[int | None, typer.Option(help="The number of minibatches to simulate.")] = None,
    microbatches: _Microbatches = None,
    recompute: _Recompute = False,
    optimizer_copies: _OptimizerCopies = 1.0,
    factors: Annotated[
        bool | None,
        typer.Option(
            "--factors/--no-factors",
            help="Whether replicas push factors, as with run's --codec pushes=factors. Default: as planned.",
        ),
    ] = None,
    sync: _Sync = "bsp",
    staleness: _Staleness = 0,
    trace_file: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="The trace of a run of this plan: show how the prediction differs.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save a picture here: .svg, .png, .pdf, .txt, or a Perfetto trace, .json or .json.gz.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a plan: time per minibatch, when each worker works, load of the links. Nothing is run."""
    from pipedream.simulate.measured_trace import compare_with_trace
    from pipedream.simulate.plan_simulation import simulate_plan
    from pipedream.simulate.schedule_picture import check_picture_path, is_drawn
    from pipedream.simulate.trace import Counter
    from pipedream.simulate.traced_schedule import minibatches_to_draw

    check_output(output)
    make = functools.partial(
        simulate_plan,
        plan_file,
        Profile.load(profile_file),
        schedule=schedule,
        bandwidth_bytes_per_s=None if bandwidth is None else parse_bandwidth(bandwidth),
        links=None if links is None else LinkProfile.load(links),
        microbatches=microbatches,
        recompute=recompute,
        optimizer_copies=optimizer_copies,
        factors=factors,
        sync=sync,
        staleness=staleness,
    )
    simulated = make(minibatches=minibatches)
    notes = []
    if output is not None:
        check_picture_path(output)  # the last check, so that a missing matplotlib hides no wrong argument
        shows_few = minibatches is None and is_drawn(output)
        drawn = make(minibatches=minibatches_to_draw(simulated.traced.options)) if shows_few else simulated
        counters = [
            Counter(f"worker {worker}", "memory, bytes", [(use.begin_ms, use.num_bytes) for use in uses])
            for worker, uses in enumerate(drawn.memory)
        ]
        _draw(output, drawn.traced, drawn.simulation, time_unit="ms", counters=counters)
        notes.append(f"picture of {drawn.traced.num_minibatches} minibatches saved in {output}")
    shown, fields = str(simulated), simulated.to_dict()
    if trace_file is not None:
        comparison = compare_with_trace(simulated.simulation, trace_file)
        shown, fields = f"{shown}\n\n{comparison}", fields | {"trace": comparison.to_dict()}
    print_result(with_notes(shown, notes), fields, as_json)


def trace_command(
    schedule: Annotated[
        str,
        typer.Option(
            help="pipedream, vertical_sync, unstashed, 2bw, flush, gpipe, interleaved, model_parallel,"
            " data_parallel, or auto: the schedule for which the plan was made."
        ),
    ] = "pipedream",
    stages: Annotated[int | None, typer.Option(help="The number of stages, if --plan is not given.")] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="A plan that has the stages, or the number of replicas of each stage, such as 2-1.",
        ),
    ] = None,
    minibatches: Annotated[int | None, typer.Option(help="The number of minibatches to show.")] = None,
    microbatches: _Microbatches = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="With interleaved: workers that share the stages; without it half as many as stages."
        ),
    ] = None,
    in_flight: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Minibatches in flight at each stage, for example 4,3,2,1."),
    ] = None,
    recompute: _Recompute = False,
    sync: _Sync = "bsp",
    staleness: _Staleness = 0,
    times: Annotated[
        str | None,
        typer.Option(
            metavar="F,B[,U]",
            help="Milliseconds of a microbatch's forward and backward, and of an update. Without it a"
            " backward takes two forwards, and each of r replicas takes r times as long as a single one.",
        ),
    ] = None,
    transfer: Annotated[
        float, typer.Option(help="Milliseconds that a microbatch travels to the next stage.")
    ] = 0.0,
    shard: Annotated[
        float, typer.Option(help="Milliseconds that a shard travels to another replica, pushed or pulled.")
    ] = 0.0,
    program_file: Annotated[
        Path | None,
        typer.Option(
            "--program", metavar="FILE", help="Check and show the program in FILE, in the form of --text."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the picture here: .svg, .png, .pdf, .txt, or a Perfetto trace, .json or .json.gz.",
        ),
    ] = None,
    versions: Annotated[
        bool | None,
        typer.Option("--versions/--no-versions", help="Whether the picture shows weight versions."),
    ] = None,
    as_text: Annotated[
        bool, typer.Option("--text", help="Print the schedule as a program: each worker's instructions.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a schedule as a picture like the papers', or as lists of instructions. Nothing is run."""
    from pipedream.planning.plan_schedule import minibatches_per_body
    from pipedream.planning.simulator import simulate
    from pipedream.simulate.schedule_picture import check_picture_path, draw_text
    from pipedream.simulate.traced_schedule import (
        TraceRequest,
        describe_bubble,
        make_traced,
        read_times,
        trace_fields,
    )

    if as_text and as_json:
        raise ValueError("--text and --json both print on stdout: give one of them")
    check_output(output)
    given_times = read_times(times, shard)
    check_number("transfer_ms", transfer)
    traced = make_traced(
        TraceRequest(
            schedule=schedule,
            stages=stages,
            plan_file=plan_file,
            minibatches=minibatches,
            microbatches=microbatches,
            workers=workers,
            in_flight=in_flight,
            recompute=recompute,
            staleness=staleness,
            sync=sync,
        ),
        program_file,
    )
    if output is not None:
        check_picture_path(output)  # the last check, so that a missing matplotlib hides no wrong argument
    stage_times = traced.balanced(given_times) if times is None else given_times
    per_body = minibatches_per_body(traced.options)
    simulation = simulate(traced.programs, stage_times, transfer, minibatches_per_body=per_body)
    if output is not None:
        time_unit = "forwards" if times is None and not (transfer or shard) else "ms"
        _draw(output, traced, simulation, time_unit=time_unit, show_versions=versions)
    if as_text:
        typer.echo(traced.text(), nl=False)
        return
    if output is None:
        shown = draw_text(simulation, traced.title(), describe_bubble(simulation), show_versions=versions)
    else:
        shown = f"{traced.title()}\n{describe_bubble(simulation)}\npicture saved in {output}"
    notes = traced.notes() if program_file is not None else []
    fields = trace_fields(traced, simulation, given_times, transfer, output) | {"notes": notes}
    print_result(with_notes(shown.removesuffix("\n"), notes), fields, as_json)


def _draw(
    output: Path,
    traced: TracedSchedule,
    simulation: Simulation,
    *,
    time_unit: str,
    show_versions: bool | None = None,
    counters: Sequence[Counter] = (),
) -> None:
    from pipedream.simulate.schedule_picture import write_picture
    from pipedream.simulate.traced_schedule import describe_bubble, input_phases

    write_picture(
        output,
        simulation,
        traced.title(),
        describe_bubble(simulation),
        phases=input_phases(traced, simulation),
        time_unit=time_unit,
        show_versions=show_versions,
        counters=counters,
    )
