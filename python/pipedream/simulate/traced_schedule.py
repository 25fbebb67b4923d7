"""Makes the schedule that `pipedream trace` shows: its options, its figures, and its lists of instructions,
which the validator has accepted.

The core numbers a stage's spares (workers that own shards but have no minibatches) after its replicas
(csrc/schedule/placement.h). With two replicas, the core calls the first spare of stage 0 "stage 0 replica 2".
print_programs() writes "stage 0 spare 0", and a user's lists of instructions may use that name, too. Pure
except for the files that it reads; any thread; needs no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipedream.common.checks import WHOLE_MAX, check_choice
from pipedream.common.document import check_number
from pipedream.planning.partition_arguments import SYNCS
from pipedream.planning.plan import Plan, stage_counts
from pipedream.planning.plan_schedule import schedule_to_run
from pipedream.planning.program import PROGRAM, Program, rules_of

if TYPE_CHECKING:
    from pipedream import _core
    from pipedream.planning.simulator import Simulation
    from pipedream.simulate.schedule_drawing import PhaseSpan

__all__ = [
    "TraceRequest",
    "TracedSchedule",
    "describe_bubble",
    "input_phases",
    "make_traced",
    "minibatches_to_draw",
    "parse_programs",
    "print_programs",
    "read_times",
    "trace_fields",
]

_REPORT_FIELDS = ("versions_live_max", "activations_live_max")

# The most instructions that `trace` builds. With more, a picture would show nothing new, and memory would run
# out.
_TRACED_INSTRUCTIONS_MAX = 2_000_000
_TRACED_STAGES_MAX = 1_024


class TraceRequest(NamedTuple):
    """The options of `trace` that determine the schedule. None: the user has not given the option."""

    schedule: str
    stages: int | None = None
    plan_file: Path | None = None
    """A plan's file, or the replicas of each stage, as in "2-1"."""
    minibatches: int | None = None
    microbatches: int | None = None
    workers: int | None = None
    in_flight: str | None = None
    recompute: bool = False
    staleness: int = 0
    sync: str = "bsp"


class TracedSchedule(NamedTuple):
    """A schedule with its lists of instructions, which the validator has accepted."""

    options: _core.ScheduleOptions
    num_minibatches: int
    programs: list[list[_core.Instruction]]
    report: dict[str, Any]
    shows_program: bool = False
    """Whether text() returns a program. If not, it returns the lists of a run."""

    def title(self) -> str:
        options, num_stages = self.options, self.options.num_stages
        title = f"{options.schedule}: {_count(num_stages, 'stage')}"
        if len(self.programs) < num_stages:
            title += f" on {_count(len(self.programs), 'worker')}"
        replicas = _replica_counts(options)
        if max(replicas) > 1:
            title += f", {'-'.join(map(str, replicas))} replicas"
        if options.placement.num_spares:
            title += f" and {_count(options.placement.num_spares, 'spare shard')}"
        if options.staleness:
            title += f", staleness {options.staleness}"
        if options.asynchronous:
            title += ", asynchronous"
        title += f", {_count(self.num_minibatches, 'minibatch')}"
        if options.num_microbatches > 1:
            title += f" of {options.num_microbatches} microbatches"
        return title

    def balanced(self, times: _core.StageDurations) -> list[_core.StageDurations]:
        """Returns each stage's times for a balanced pipeline. A stage with r replicas gets r times as long
        forwards and backwards.
        """
        from pipedream import _core

        return [
            _core.StageDurations(
                replicas * times.forward_ms,
                replicas * times.backward_ms,
                times.update_ms,
                pull_ms=times.pull_ms,
            )
            for replicas in _replica_counts(self.options)
        ]

    def text(self) -> str:
        """Returns the schedule as a program for run(). If no program describes it, or if the user asked for a
        number of minibatches, returns the lists of instructions of one run.
        """
        from pipedream import _core

        if self.shows_program:
            of_whom = self.title().rsplit(f", {_count(self.num_minibatches, 'minibatch')}", 1)[0]
            return f"# {of_whom}\n{_core.ListedProgram.of(self.options).text}"
        return f"# {self.title()}\n{print_programs(self.programs, self.options.placement)}"

    def notes(self) -> list[str]:
        """Returns notes about effects of a program that its author may not have intended."""
        note = "" if self.options.program is None else self.options.program.note_on_unstashed
        return [note] if note else []


def make_traced(request: TraceRequest, program_file: Path | None) -> TracedSchedule:
    """Returns the schedule that was asked for, with generated lists of instructions, or with those of the
    file. The file then also supplies missing options.
    """
    from pipedream import _core

    for name in ("minibatches", "microbatches", "staleness", "workers"):
        if (getattr(request, name) or 0) > WHOLE_MAX:
            raise ValueError(f"--{name} is {getattr(request, name)}: give at most {WHOLE_MAX}")
    given = None if program_file is None else _read_programs(program_file)
    if isinstance(given, Program):
        programs, options = None, _options_of_program(request, given)
    else:
        programs = given
        if programs is not None:
            request = _complete_request(request, programs)
        request = _with_schedule_of_plan(request)
        options = _make_options(request, programs)
    num_minibatches = _choose_minibatches(request, options)
    if programs is None:
        workers = range(options.num_workers)
        programs = [_core.make_program(options, worker, num_minibatches) for worker in workers]
    elif not any(step.edge for program in programs for step in program):
        # The lists have no transfers, so a user probably wrote them. The core derives the transfers from the
        # other instructions.
        programs = _core.add_transfers(options, programs, num_minibatches)
    report = _core.replay(options, num_minibatches, programs)
    if not report["ok"]:
        if program_file is not None:
            raise ValueError(f"{program_file}: {report['error']}")
        if request.in_flight is not None:
            raise ValueError(
                f"--in-flight is {request.in_flight!r}: it must not rise downstream; {report['error']}"
            )
        raise RuntimeError(f"the generated lists are wrong: {report['error']}")
    # Recomputing is an option of the run, not a part of a program.
    has_program = not (
        any(options.recompute) or options.placement.num_spares or options.staleness or options.asynchronous
    )
    return TracedSchedule(
        options, num_minibatches, programs, report, has_program and request.minibatches is None
    )


def _options_of_program(request: TraceRequest, program: Program) -> _core.ScheduleOptions:
    """Returns the options of a program's schedule. Raises ValueError if the user also gave an option that the
    program decides.
    """
    from pipedream import _core

    unasked = TraceRequest(request.schedule)
    for name in ("stages", "plan_file", "microbatches", "workers", "in_flight", "staleness", "sync"):
        if getattr(request, name) != getattr(unasked, name):
            option = {"plan_file": "plan", "in_flight": "in-flight"}.get(name, name)
            raise ValueError(f"--program has a program, which says it all: leave --{option} out")
    return _core.ScheduleOptions(
        PROGRAM,
        program.in_flight,
        program.microbatches,
        program.listed.placement,
        recompute=[request.recompute] * program.num_stages,
        program=program.listed,
    )


def _read_programs(path: Path) -> Program | list[list[_core.Instruction]]:
    """Reads a program if the text has its sections (warm-up, body), or else the lists of instructions of a
    run.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if re.search(r"^\s*(warm-up|body|cool-down)\b", text, re.MULTILINE):
            return Program(text)
        programs = parse_programs(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not any(programs):
        raise ValueError(f"{path}: has no instructions; `pipedream trace --stages 4 --text` prints some")
    return programs


def _complete_request(request: TraceRequest, programs: list[list[_core.Instruction]]) -> TraceRequest:
    steps = [step for program in programs for step in program]
    if request.stages is None and request.plan_file is None:
        request = request._replace(stages=1 + max(step.stage for step in steps))
    if request.minibatches is None:
        request = request._replace(minibatches=1 + max(step.minibatch for step in steps))
    if request.microbatches is None:
        request = request._replace(microbatches=1 + max(step.microbatch for step in steps))
    shares_workers = not rules_of(request.schedule).has_stage_per_worker
    if request.workers is None and request.plan_file is None and shares_workers:
        request = request._replace(workers=len(programs))
    return request


def _with_schedule_of_plan(request: TraceRequest) -> TraceRequest:
    if request.schedule != "auto":
        return request
    if request.plan_file is None or stage_counts(request.plan_file) is not None:
        raise ValueError("--schedule is 'auto', which takes a plan's: give --plan FILE of one that has it")
    plan = Plan.load(request.plan_file)
    schedule, microbatches = schedule_to_run(plan, request.schedule, request.microbatches)
    return request._replace(schedule=schedule, microbatches=microbatches)


def _make_options(
    request: TraceRequest, given: list[list[_core.Instruction]] | None
) -> _core.ScheduleOptions:
    from pipedream import _core

    check_choice("sync", request.sync, SYNCS)
    placement, in_flight = _choose_stages(request)
    num_stages, num_workers = placement.num_stages, placement.num_ranks
    is_replicated = num_workers > num_stages
    if request.in_flight is not None:
        in_flight = _read_in_flight(request.in_flight, num_stages)
    num_microbatches = request.microbatches
    if num_microbatches is None:
        num_microbatches = _enough_microbatches(rules_of(request.schedule), placement, in_flight)
    steps = [step for program in given or [] for step in program]
    recomputed = {step.stage for step in steps if step.traits.stash == "restored"}
    return _core.ScheduleOptions(
        schedule=request.schedule,
        in_flight=in_flight,
        num_microbatches=num_microbatches,
        placement=placement,
        recompute=[request.recompute or stage in recomputed for stage in range(num_stages)],
        staleness=request.staleness,
        uses_allreduce=request.sync == "allreduce" and is_replicated,
        asynchronous=request.sync == "asp" and is_replicated,
    )


def _enough_microbatches(rules: _core.ScheduleRules, placement: _core.Placement, in_flight: list[int]) -> int:
    """Returns as many microbatches per minibatch as the schedule needs with this in_flight."""
    if not rules.needs_microbatches:
        return 1
    if not rules.has_stage_per_worker:
        return 2 * placement.num_ranks
    if not rules.is_round_late:
        return placement.num_stages
    return max(len(in_flight), *(held * placement.num_replicas(i) for i, held in enumerate(in_flight)))


def _choose_stages(request: TraceRequest) -> tuple[_core.Placement, list[int]]:
    """Returns the placement and in_flight of the plan, or of a pipeline without replicas."""
    from pipedream import _core

    if request.plan_file is not None:
        if request.stages is not None or request.workers is not None:
            raise ValueError("--plan already says what --stages and --workers would: leave those out")
        written = stage_counts(request.plan_file)
        if written is not None:
            replicas, spares = zip(*written, strict=True)
            if sum(replicas) > _TRACED_STAGES_MAX:
                raise ValueError(
                    f"--plan has {sum(replicas)} replicas: trace shows at most {_TRACED_STAGES_MAX}"
                )
            return _core.Placement.in_order(replicas, spares), _core.derive_in_flight(replicas)
        plan = Plan.load(request.plan_file)
        return plan.placement, list(plan.in_flight)
    num_stages, num_workers = request.stages, request.workers
    if num_stages is None:
        raise ValueError("give --stages N, for example 4, or --plan FILE")
    if not 1 <= num_stages <= _TRACED_STAGES_MAX:
        raise ValueError(f"there are {num_stages} stages: trace shows from 1 to {_TRACED_STAGES_MAX}")
    if num_workers is None:
        num_workers = num_stages
        if not rules_of(request.schedule).has_stage_per_worker:
            if num_stages % 2:
                raise ValueError(f"--stages is {num_stages}: give an even number, or --workers too")
            num_workers = num_stages // 2
    if num_workers < 1:
        raise ValueError(f"--workers is {num_workers}: give at least 1")
    placement = _core.Placement.at_ranks([stage % num_workers for stage in range(num_stages)])
    return placement, list(range(num_stages, 0, -1))


def minibatches_to_draw(options: _core.ScheduleOptions) -> int:
    """Returns a number of minibatches that shows the steady state and leaves the boxes readable."""
    from pipedream import _core

    replicas = max(_replica_counts(options))
    if _core.drains_every_minibatch(options):
        rounds = 3 if options.num_microbatches == 1 else 2
    elif options.program is not None:
        rounds = options.program.num_minibatches_listed + 3 * options.program.minibatches_per_body
    elif options.rules.is_round_late:
        rounds = 4
    else:
        least = 8 if replicas == 1 else math.ceil(16 / replicas)
        rounds = max(least, 2 * options.in_flight[0])
    return rounds * replicas


def _choose_minibatches(request: TraceRequest, options: _core.ScheduleOptions) -> int:
    num_minibatches = minibatches_to_draw(options) if request.minibatches is None else request.minibatches
    if num_minibatches < 1:
        raise ValueError(f"--minibatches is {num_minibatches}: give at least 1")
    num_instructions = num_minibatches * options.num_microbatches * options.num_stages * 3
    if num_instructions > _TRACED_INSTRUCTIONS_MAX:
        raise ValueError(
            f"{num_minibatches} minibatches make up to {num_instructions} instructions, and trace shows at"
            f" most {_TRACED_INSTRUCTIONS_MAX}: give fewer with --minibatches or --microbatches"
        )
    return num_minibatches


def _read_in_flight(text: str, num_stages: int) -> list[int]:
    try:
        in_flight = [int(number) for number in text.split(",")]
    except ValueError:
        in_flight = []
    if len(in_flight) != num_stages or max(in_flight) > WHOLE_MAX:
        raise ValueError(
            f"--in-flight is {text!r}: give one whole number for each of the"
            f" {_count(num_stages, 'stage')}, with commas between them"
        )
    return in_flight


def read_times(text: str | None, shard_ms: float) -> _core.StageDurations:
    """Returns the durations of a stage from the options --times and --shard."""
    from pipedream import _core

    try:
        given_ms = [1.0, 2.0] if text is None else [float(number) for number in text.split(",")]
    except ValueError:
        given_ms = []
    if len(given_ms) not in (2, 3):
        raise ValueError(
            f"--times is {text!r}: give forward,backward or forward,backward,update in ms, for example 1,2"
        )
    names = ("forward_ms", "backward_ms", "update_ms")
    forward_ms, backward_ms, update_ms = map(check_number, names, [*given_ms, 0.0])
    return _core.StageDurations(
        forward_ms, backward_ms, update_ms, pull_ms=check_number("shard_ms", shard_ms)
    )


def input_phases(traced: TracedSchedule, simulation: Simulation) -> list[PhaseSpan]:
    """Returns the first worker's phases: warm-up, steady, cool-down. Returns an empty list if they repeat
    with every minibatch, because they would be too narrow to label.
    """
    from pipedream import _core
    from pipedream.simulate.schedule_drawing import PhaseSpan

    spans: list[PhaseSpan] = []
    for step, (_, begin_ms, end_ms) in zip(traced.programs[0], simulation.timeline[0], strict=True):
        if step.edge is not None:
            continue
        name = _core.phase_of(traced.options, step, traced.num_minibatches)
        if spans and spans[-1].name == name:
            spans[-1] = spans[-1]._replace(end_ms=end_ms)
        else:
            spans.append(PhaseSpan(name, begin_ms, end_ms))
    return spans if len(spans) == len({span.name for span in spans}) else []


def describe_bubble(simulation: Simulation) -> str:
    whole, steady = simulation.bubble_share, simulation.steady_bubble_share
    text = f"bubble {100 * whole:.1f} %"
    # The two shares are equal if every minibatch drains. Then the second is left out.
    if steady is not None and not math.isclose(whole, steady, abs_tol=5e-4):
        text += f", {100 * steady:.1f} % in the steady state"
    return text


def trace_fields(
    traced: TracedSchedule,
    simulation: Simulation,
    times: _core.StageDurations,
    transfer_ms: float,
    output: Path | None,
) -> dict[str, Any]:
    options = traced.options
    names = ("opcode", "stage", "replica", "minibatch", "microbatch", "version")
    return {
        "schedule": options.schedule,
        "num_stages": options.num_stages,
        "num_workers": simulation.num_workers,
        "worker_of_stage": [options.placement.rank_of(stage) for stage in range(options.num_stages)],
        "num_replicas": _replica_counts(options),
        "num_spare_shards": options.placement.num_spares,
        "staleness": options.staleness,
        "num_minibatches": traced.num_minibatches,
        "num_microbatches": options.num_microbatches,
        "in_flight": list(options.in_flight),
        "recompute": list(options.recompute),
        "forward_ms": times.forward_ms,
        "backward_ms": times.backward_ms,
        "update_ms": times.update_ms,
        "transfer_ms": transfer_ms,
        "shard_ms": times.pull_ms,
        "makespan_ms": simulation.makespan_ms,
        "bubble_share": simulation.bubble_share,
        "steady_bubble_share": simulation.steady_bubble_share,
        "ms_per_minibatch": simulation.ms_per_minibatch,
        **{name: traced.report[name] for name in _REPORT_FIELDS},
        "activations_queued_max": _queued_max(traced, "activation"),
        "gradients_queued_max": _queued_max(traced, "gradient"),
        "edges": [_edge_fields(edge) | {"queued_max": most} for edge, most in traced.report["edges"]],
        "output": None if output is None else os.fspath(output),
        "programs": [
            [
                {name: getattr(step, name) for name in names}
                | ({} if step.edge is None else {"edge": _edge_fields(step.edge)})
                | {"begin_ms": begin_ms, "end_ms": end_ms}
                for step, begin_ms, end_ms in row
            ]
            for row in simulation.timeline
        ],
    }


def _replica_counts(options: _core.ScheduleOptions) -> list[int]:
    return [options.placement.num_replicas(stage) for stage in range(options.num_stages)]


def _queued_max(traced: TracedSchedule, kind: str) -> list[int]:
    """Returns for each boundary the largest number of tensors of this kind that wait there at once."""
    return [
        most
        for edge, most in sorted(
            traced.report["edges"], key=lambda row: min(row[0].from_stage, row[0].to_stage)
        )
        if edge.kind == kind
    ]


def _edge_fields(edge: _core.Edge) -> dict[str, Any]:
    ends = {"from_stage": edge.from_stage, "to_stage": edge.to_stage}
    return {"kind": edge.kind, **ends, "from_replica": edge.from_replica, "to_replica": edge.to_replica}


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


_REPLICA = re.compile(r"\bstage (\d+) replica (\d+)\b", re.ASCII)
_SPARE = re.compile(r"\bstage (\d+) spare (\d+)\b", re.ASCII)


def print_programs(programs: Sequence[Sequence[_core.Instruction]], placement: _core.Placement) -> str:
    from pipedream import _core

    def named(found: re.Match[str]) -> str:
        stage, owner = int(found[1]), int(found[2])
        spare = owner - placement.num_replicas(stage)
        return found[0] if spare < 0 else f"stage {stage} spare {spare}"

    return _REPLICA.sub(named, _core.print_programs(programs))


def parse_programs(text: str) -> list[list[_core.Instruction]]:
    """Reads lists of instructions from a text. Raises ValueError naming the line. A spare's number in the
    core is counted on from the largest replica that the text names for its stage.
    """
    from pipedream import _core

    num_replicas: dict[int, int] = {}
    for stage, replica in _REPLICA.findall(text):
        num_replicas[int(stage)] = max(num_replicas.get(int(stage), 1), 1 + int(replica))

    def counted(found: re.Match[str]) -> str:
        stage, spare = int(found[1]), int(found[2])
        return f"stage {stage} replica {num_replicas.get(stage, 1) + spare}"

    return _core.parse_programs(_SPARE.sub(counted, text))
