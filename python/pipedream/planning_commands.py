"""The commands that plan and show what would be run: partition, table, simulate, trace. Torch-free."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pipedream.command_line import JsonOption, check_output, links_or_bandwidth, print_result, with_notes
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

_Microbatches = Annotated[int | None, typer.Option(help="Of every minibatch.")]
_Sync = Annotated[str, typer.Option(help="How replicas agree: bsp, ssp, asp or allreduce, as of run.")]
_Staleness = Annotated[
    int, typer.Option(help="How many rounds older a version replicas may read than without.")
]
_OptimizerCopies = Annotated[
    float, typer.Option(help="Of the weights, as its state: 0 plain SGD, 1 momentum, 2 Adam.")
]
_Recompute = Annotated[
    bool, typer.Option("--recompute", help="Every stage repeats its forward before the backward.")
]


def add_planning_commands(app: typer.Typer) -> None:
    app.command("partition")(partition_command)
    app.command("table")(table_command)
    app.command("simulate")(simulate_command)
    app.command("trace")(trace_command)


def partition_command(
    profile_file: Annotated[Path, typer.Argument(metavar="PROFILE", help="A file that `profile` saved.")],
    workers: Annotated[int, typer.Option(help="Workers to use at most.")],
    bandwidth: Annotated[
        str | None, typer.Option(help="Of the links between workers, for example 10Gbit/s.")
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="In place of --bandwidth: what `profile-links` measured."),
    ] = None,
    straight: Annotated[bool, typer.Option("--straight", help="One replica per stage.")] = False,
    cost_model: Annotated[
        str, typer.Option(help="What predicts the times: paper, or calibrated, of a calibrated profile.")
    ] = "paper",
    memory: Annotated[
        str | None,
        typer.Option(metavar="M[,M,...]", help="Of all workers, for example 16GiB, or of each by its rank."),
    ] = None,
    optimizer_copies: _OptimizerCopies = 1.0,
    recompute: Annotated[
        bool,
        typer.Option("--recompute/--no-recompute", help="Whether forwards may run again to save memory."),
    ] = True,
    schedule: Annotated[
        str,
        typer.Option(
            help="Plan for: pipedream, unstashed, vertical_sync, 2bw, flush, gpipe; auto chooses it, and the"
            " microbatches."
        ),
    ] = "pipedream",
    microbatches: Annotated[
        str | None, typer.Option(metavar="M", help="Of a minibatch, or auto; without it chosen.")
    ] = None,
    delay_max: Annotated[
        float, typer.Option(help="With auto: updates that a gradient may be late in the mean; 0 is flush.")
    ] = DELAY_MAX,
    workers_per_host: Annotated[
        int | None, typer.Option(help="That share a machine's cores, for the calibrated model.")
    ] = None,
    speeds: Annotated[
        str | None, typer.Option(metavar="X,X,...", help="Of each worker; 2 takes half as long.")
    ] = None,
    boundaries: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="The last layer of each stage but the last one.")
    ] = None,
    replicas: Annotated[str | None, typer.Option(metavar="N-N-...", help="Of each stage.")] = None,
    spare_workers: Annotated[
        int, typer.Option(help="Besides, as hosts without a GPU, that may serve as spare shards.")
    ] = 0,
    codec: Annotated[
        str | None,
        typer.Option(
            help="For runs with it: pushes=factors, which `run` takes from the plan. With --memory also a"
            " codec of what crosses, for which there is room then."
        ),
    ] = None,
    sync: _Sync = "bsp",
    staleness: _Staleness = 0,
    whole_tensors: Annotated[
        bool,
        typer.Option(
            "--whole-tensors", help="Room for optimizers that need whole tensors, or norms of gradients."
        ),
    ] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Cut a profiled model into the fastest stages."""
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
    workers: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of workers.")] = "4,8,16",
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="B,B,...", help=f"Of the links between workers; without it {_BANDWIDTHS}."),
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="In place of --bandwidth: what `profile-links` measured."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict how much faster the best plans are than one worker and than data parallel."""
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
            " auto, which is the plan's."
        ),
    ] = "pipedream",
    bandwidth: Annotated[
        str | None, typer.Option(help="Of the links between workers; without it the plan's.")
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="In place of --bandwidth: what `profile-links` measured."),
    ] = None,
    minibatches: Annotated[int | None, typer.Option(help="How many to simulate.")] = None,
    microbatches: _Microbatches = None,
    recompute: _Recompute = False,
    optimizer_copies: _OptimizerCopies = 1.0,
    factors: Annotated[
        bool | None,
        typer.Option(
            "--factors/--no-factors",
            help="Replicas push as with run's --codec pushes=factors; without it as the plan was made for.",
        ),
    ] = None,
    sync: _Sync = "bsp",
    staleness: _Staleness = 0,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Of a run of this plan: what differs from it is named."),
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
    """Predict what a plan does: time per minibatch, who works when, what the links carry. Nothing is run."""
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
        check_picture_path(output)  # after the other options: it may only miss matplotlib
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
            " data_parallel, or auto, which is the plan's."
        ),
    ] = "pipedream",
    stages: Annotated[int | None, typer.Option(help="Stages, without --plan.")] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="FILE", help="A plan's stages, or just the replicas of each, for example 2-1."
        ),
    ] = None,
    minibatches: Annotated[int | None, typer.Option(help="How many to show.")] = None,
    microbatches: _Microbatches = None,
    workers: Annotated[
        int | None, typer.Option(help="For interleaved: workers that share the stages; else half as many.")
    ] = None,
    in_flight: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="In flight at every stage, for example 4,3,2,1.")
    ] = None,
    recompute: _Recompute = False,
    sync: _Sync = "bsp",
    staleness: _Staleness = 0,
    times: Annotated[
        str | None,
        typer.Option(
            metavar="F,B[,U]",
            help="Forward and backward of a microbatch and update, in ms; without it a backward takes as"
            " long as two forwards, and each of r replicas r times as long as a stage that has one.",
        ),
    ] = None,
    transfer: Annotated[float, typer.Option(help="A microbatch's way to the next stage, in ms.")] = 0.0,
    shard: Annotated[
        float, typer.Option(help="The way of a shard, pushed or pulled, to another replica, in ms.")
    ] = 0.0,
    program_file: Annotated[
        Path | None,
        typer.Option("--program", metavar="FILE", help="Check and show the lists in FILE, as --text prints."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the picture here: .svg, .png, .pdf, .txt, or a Perfetto trace, .json or .json.gz.",
        ),
    ] = None,
    versions: Annotated[
        bool | None, typer.Option("--versions/--no-versions", help="Weight versions in the picture.")
    ] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Print the workers' instruction lists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a schedule: a picture as in the papers, the instruction lists, the bubble. Nothing is run."""
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
    given_times = dataclasses.replace(read_times(times), shard_ms=shard)
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
        check_picture_path(output)  # after the other options: it may only miss matplotlib
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
