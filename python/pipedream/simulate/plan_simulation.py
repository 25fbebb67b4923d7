"""Simulates a plan with a schedule. It runs the schedule's lists of instructions with times from a profile.
Torch-free; any thread.

- A stage takes the sum of its layers' times. A microbatch takes the time that the profile has measured for
  it, or else an even part of the minibatch's time.
- Crossing a boundary takes its bytes divided by the bandwidth, in each direction (C_i in
  csrc/planner/partition.h). A boundary carries the tensors of one microbatch at a time in each direction.
- Each of a stage's r replicas has its own link, over which it pushes and pulls shards. A shard has 1 / r of
  the stage's parameters.
- Measured links have the bandwidth of their direction, and a latency.
- An update takes time only with factors: that of their products. The optimizer's step, the runtime's own work
  and the sharing of cores are ignored. A plan of the calibrated cost model has these costs, and they are used
  (prediction.py).

Figures are per minibatch of the whole run. For example, a worker of a stage with two replicas trains every
second minibatch, so per minibatch it is busy for half of the time that its layers take.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedream.common.document import check_number
from pipedream.common.table import format_table
from pipedream.common.units import format_bandwidth, format_bytes
from pipedream.planning.factor_rule import check_has_factors
from pipedream.planning.formulas import StageLinks, parameter_bytes_of
from pipedream.planning.job import check_together
from pipedream.planning.layer_profile import Profile
from pipedream.planning.limits import Limits
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.partition_arguments import check_microbatches
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.plan_schedule import minibatches_of_round
from pipedream.planning.plan_stage import ranks_of
from pipedream.planning.prediction import LinkCosts, boundary_links, simulate_programs
from pipedream.planning.runtime_costs import FREE, StageCosts, costs_of, predicted_rows, stage_costs
from pipedream.planning.simulator import Simulation, Transfer, ms_per_minibatch
from pipedream.planning.synced_bytes import shares_of_a_shard, spare_link_ms
from pipedream.simulate.simulated_memory import MemoryUse, memory_in_use
from pipedream.simulate.traced_schedule import TracedSchedule, TraceRequest, describe_bubble, make_traced

if TYPE_CHECKING:
    pass

__all__ = ["PlanSimulation", "simulate_plan"]

# The most minibatches that each replica is simulated for, besides warm-up and cool-down, unless the user
# gives a number.
_STEADY_ROUNDS = 32
_STEADY_ROUNDS_MIN = 4
_EXCHANGES_MAX = 400_000  # transfers between replicas; more would take too long


@dataclass(frozen=True)
class PlanSimulation:
    """A plan, the lists of instructions of its schedule, and when each instruction runs."""

    plan: Plan
    profile: Profile
    bandwidth_bytes_per_s: float
    """Bandwidth of the links. With measured links it is the bandwidth of the slowest link that the plan
    uses.
    """
    links: StageLinks
    traced: TracedSchedule
    simulation: Simulation
    optimizer_copies: float = 1.0

    @functools.cached_property
    def memory(self) -> list[list[MemoryUse]]:
        """Returns each worker's memory along the timeline."""
        return memory_in_use(
            self.simulation,
            self.plan,
            self.profile,
            self.traced.options,
            optimizer_copies=self.optimizer_copies,
        )

    @functools.cached_property
    def _ranks(self) -> list[set[int]]:
        return list(map(set, ranks_of(self.traced.options.placement)))

    @functools.cached_property
    def _sent_by(self) -> list[list[Transfer]]:
        sent: list[list[Transfer]] = [[] for _ in range(self.simulation.num_workers)]
        for transfer in self.simulation.transfers:
            sent[transfer.from_worker].append(transfer)
        return sent

    @property
    def ms_per_minibatch(self) -> float:
        """Milliseconds per minibatch in the steady state. A simulation that is too short for a steady state
        gives the mean over all minibatches.
        """
        return ms_per_minibatch(self.simulation)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second. None: the profile does not say how many samples a minibatch has, or minibatches
        take no time.
        """
        if self.profile.batch_size is None or self.ms_per_minibatch == 0:
            return None
        return self.profile.batch_size * 1e3 / self.ms_per_minibatch

    @property
    def speed_up(self) -> float | None:
        """Speed relative to one worker that computes all layers. None: the layers take no time."""
        return self.profile.compute_ms / self.ms_per_minibatch if self.ms_per_minibatch else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `pipedream simulate --json` prints."""
        return {
            "schedule": self.traced.options.schedule,
            "num_minibatches": self.traced.num_minibatches,
            "num_microbatches": self.traced.options.num_microbatches,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "ms_per_minibatch": self.ms_per_minibatch,
            "samples_per_s": self.samples_per_s,
            "speed_up": self.speed_up,
            "bottleneck_ms": self.plan.bottleneck_ms,
            "makespan_ms": self.simulation.makespan_ms,
            "bubble_share": self.simulation.bubble_share,
            "steady_bubble_share": self.simulation.steady_bubble_share,
            "workers": [self._worker_fields(worker) for worker in range(self.simulation.num_workers)],
            "boundaries": [
                {"after_stage": stage, "bytes_per_minibatch": 2 * num_bytes, "one_way_ms": of_slower_ms}
                for stage, (num_bytes, of_slower_ms) in enumerate(
                    zip(
                        _boundary_bytes(self.plan, self.profile),
                        [
                            max(times.one_way_ms, times.back_ms or 0.0)
                            for times in _transfers(self.plan, self.profile, self.links)
                        ],
                        strict=True,
                    )
                )
            ],
        }

    def __str__(self) -> str:
        headings = ("worker", "layers", "busy ms", "busy", "sends", "link ms", "memory")
        rows = [self._row(worker) for worker in range(self.simulation.num_workers)]
        lines = [self._title(), "", format_table(headings, rows, "<<>>>>>"), "", self._summary()]
        return "\n".join(lines)

    def _title(self) -> str:
        return f"{self.traced.title()}, {format_bandwidth(self.bandwidth_bytes_per_s)}"

    def _summary(self) -> str:
        parts = [f"{self.ms_per_minibatch:.3f} ms per minibatch"]
        if self.plan.bottleneck_ms is not None:
            parts.append(f"the plan says {self.plan.bottleneck_ms:.3f}")
        if self.samples_per_s is not None:
            parts.append(f"{self.samples_per_s:.1f} samples/s")
        if self.speed_up is not None:
            parts.append(f"{self.speed_up:.2f} times one worker")
        return ", ".join([*parts, describe_bubble(self.simulation)])

    def _worker_fields(self, worker: int) -> dict[str, Any]:
        busy_ms = sum(timed.end_ms - timed.begin_ms for timed in self.simulation.timeline[worker])
        sent = self._sent_by[worker]
        makespan_ms, num_minibatches = self.simulation.makespan_ms, self.traced.num_minibatches
        link_ms = sum(transfer.end_ms - transfer.begin_ms for transfer in sent) / num_minibatches
        sent_ms: dict[int, float] = {}  # by the receiver
        for transfer in sent:
            so_far_ms = sent_ms.get(transfer.to_worker, 0.0)
            sent_ms[transfer.to_worker] = so_far_ms + transfer.end_ms - transfer.begin_ms
        sent_bytes = sum(
            to_ms / 1e3 * self._bytes_per_s(worker, receiver) for receiver, to_ms in sent_ms.items()
        )
        served = self.plan.spare_stage_of(worker)
        if served is not None:  # simulated transfers leave out what a spare sends while it receives
            link_ms = spare_link_ms(self.plan.stages[served], self.profile, self.bandwidth_bytes_per_s)
            sent_bytes = link_ms / 1e3 * self.bandwidth_bytes_per_s * num_minibatches
        return {
            "rank": worker,
            "stages": list(self.plan.stages_of(worker)),
            "busy_ms_per_minibatch": busy_ms / num_minibatches,
            "busy_share": busy_ms / makespan_ms if makespan_ms else 0.0,
            "link_ms_per_minibatch": link_ms,
            "bytes_sent_per_minibatch": round(sent_bytes / num_minibatches),
            "memory_peak_bytes": round(max(use.num_bytes for use in self.memory[worker])),
        }

    def _bytes_per_s(self, sender: int, receiver: int) -> float:
        ranks = self._ranks
        for stage, here in enumerate(ranks):
            if sender in here and receiver in here:
                return self.links.replicas[stage]
            below = ranks[stage + 1] if stage + 1 < len(ranks) else ()
            if sender in here and receiver in below:
                return self.links.downstream[stage]
            if sender in below and receiver in here:
                return self.links.upstream[stage]
        return self.bandwidth_bytes_per_s  # between a replica and a spare

    def _row(self, worker: int) -> tuple[str, ...]:
        fields = self._worker_fields(worker)
        stages = [self.plan.stages[stage] for stage in fields["stages"]]
        return (
            self.plan.describe_worker(worker),
            ", ".join(f"{stage.first_layer}-{stage.last_layer}" for stage in stages),
            f"{fields['busy_ms_per_minibatch']:.3f}",
            f"{100 * fields['busy_share']:.1f} %",
            format_bytes(fields["bytes_sent_per_minibatch"]),
            f"{fields['link_ms_per_minibatch']:.3f}",
            format_bytes(fields["memory_peak_bytes"]),
        )


def simulate_plan(
    plan_file: Path,
    profile: Profile,
    *,
    schedule: str = "pipedream",
    bandwidth_bytes_per_s: float | None = None,
    links: LinkProfile | None = None,
    minibatches: int | None = None,
    microbatches: int | None = None,
    recompute: bool = False,
    optimizer_copies: float = 1.0,
    factors: bool | None = None,
    sync: str = "bsp",
    staleness: int = 0,
) -> PlanSimulation:
    """Simulates the plan with a schedule and the profile's costs.

    optimizer_copies: as in partition(). sync, staleness: as in run().
    factors: whether replicas push factors, as with run's codec={"pushes": "factors"}. None: as the plan was
        made. For a calibrated plan that was made without factors, they change the bytes on links and the
        memory of workers, but not the times of computing.
    bandwidth_bytes_per_s: bandwidth of each link. links: measured links, in place of a bandwidth. If neither
        is given, the times of links that a simulated plan has stored are used, or else the plan's bandwidth.
    minibatches: None chooses enough for a steady state. microbatches: None chooses as many as the schedule
        needs.

    Raises ValueError

    - for a profile with another number of layers, and for the reasons of make_traced();
    - if there is no bandwidth, or both a bandwidth and links;
    - for links between too few workers, or together with spare shards;
    - for factors that the profile does not have, and for factors=False if a calibrated plan was made with
      them.
    """

    plan = Plan.load(plan_file, profile=profile)
    if plan.num_layers != profile.num_layers:
        raise ValueError(
            f"{plan_file} has {plan.num_layers} layers and the profile {profile.num_layers}: give the profile"
            " that the plan was made from"
        )
    if factors is False and plan.codec and costs_of(plan) is not None:
        raise ValueError(
            f"{plan_file} has calibrated costs of codec={plan.codec}: partition without it to simulate that"
        )
    factors = bool(plan.codec) if factors is None else factors
    if factors:
        pushed = "replicas push factors"
        asked = {"asp": "asp", "allreduce": "reduced"}.get(sync, "not_ssp")
        check_together({"factors": pushed, "push_codec": pushed, asked: f"sync is {sync!r}"})
    check_number("optimizer_copies", optimizer_copies)
    check_microbatches(microbatches, profile)
    if minibatches is None:
        minibatches = _enough_minibatches(plan)
    traced = make_traced(
        TraceRequest(
            schedule=schedule,
            plan_file=plan_file,
            minibatches=minibatches,
            microbatches=microbatches,
            recompute=recompute,
            staleness=staleness,
            sync=sync,
        ),
        None,
    )
    stage_links, bandwidth = _links_of(plan, plan_file, traced, bandwidth_bytes_per_s, links)
    if factors:
        check_has_factors(profile)
    else:
        profile = profile.without_factors()
    is_own = bandwidth_bytes_per_s is None and links is None
    simulation = _simulate(plan, profile, traced, stage_links, over_own_links=is_own)
    return PlanSimulation(plan, profile, bandwidth, stage_links, traced, simulation, optimizer_copies)


def _simulate(
    plan: Plan,
    profile: Profile,
    traced: TracedSchedule,
    links: StageLinks,
    *,
    over_own_links: bool,
) -> Simulation:
    """Simulates the plan's schedule with the plan's own costs, or with the profile's if it has none.
    over_own_links: whether the links are those for which the plan was made.
    """
    from pipedream import _core

    of_rounds = minibatches_of_round(traced.options)
    transfers = _transfers(plan, profile, links)
    costs = costs_of(plan, drains=_core.drains_every_minibatch(traced.options))
    has_costs = costs is not None
    if costs is None:
        costs = _uncalibrated_costs(plan, profile, links, of_rounds)
    else:
        own_links = boundary_links(plan)
        if over_own_links:
            transfers = own_links
        else:
            costs = _costs_over(links, plan, profile, costs)
            transfers = [
                one._replace(latency_ms=max(one.latency_ms, own.latency_ms))
                for one, own in zip(transfers, own_links, strict=True)
            ]
        if not (plan.codec and over_own_links):
            costs = [
                _exchanging(cost, profile, stage, of_round)
                for cost, stage, of_round in zip(costs, plan.stages, of_rounds, strict=True)
            ]
    sizes = {"stage_parameter_bytes": [parameter_bytes_of(profile, stage) for stage in plan.stages]}
    return simulate_programs(
        replace(plan, predicted=plan.predicted | sizes),
        traced.options,
        traced.programs,
        costs,
        transfers,
        one_link=has_costs,
    )


def _enough_minibatches(plan: Plan) -> int:
    """Returns a number of minibatches with which the simulation reaches a steady state. With many replicas
    each of them gets fewer, because at every update all replicas of a stage exchange with each other.
    """
    warm_up = 2 * max(plan.in_flight)
    exchanged = 4 * sum(stage.num_replicas * (stage.num_replicas - 1) for stage in plan.stages)
    steady = min(_STEADY_ROUNDS, max(_STEADY_ROUNDS_MIN, _EXCHANGES_MAX // max(exchanged, 1) - warm_up))
    return (warm_up + steady) * max(stage.num_replicas for stage in plan.stages)


def _links_of(
    plan: Plan,
    plan_file: Path,
    traced: TracedSchedule,
    bandwidth_bytes_per_s: float | None,
    links: LinkProfile | None,
) -> tuple[StageLinks, float]:
    """Returns the links between the stages, and the slowest bandwidth in bytes per second."""
    if links is None:
        bandwidth = plan.bandwidth_bytes_per_s if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s
        if bandwidth is None:
            raise ValueError(
                f"{plan_file} does not say the links' bandwidth: give --bandwidth, for example 10Gbit/s, or"
                " --links FILE"
            )
        return StageLinks.uniform(plan.stages, bandwidth), bandwidth
    if bandwidth_bytes_per_s is not None:
        raise ValueError("give --bandwidth, for example 10Gbit/s, or --links FILE: one of them")
    if any(stage.num_spare_shards for stage in plan.stages):
        check_together({"spares": f"{plan_file} has spare shards", "measured_links": "--links is given"})
    ranks = ranks_of(traced.options.placement)
    num_workers = 1 + max(max(of_stage) for of_stage in ranks)
    if num_workers > links.num_workers:
        raise ValueError(
            f"--links has the links of {links.num_workers} workers, but the plan has {num_workers}: measure"
            " them with as many ranks"
        )
    measured = StageLinks.between(ranks, links)
    return measured, measured.slowest(links.speeds_of_first(num_workers)[0])


def _uncalibrated_costs(
    plan: Plan, profile: Profile, links: StageLinks, minibatches: Sequence[float]
) -> list[StageCosts]:
    """Returns each stage's costs from the profile alone. minibatches: for each stage, how many minibatches
    one replica trains per update.
    """
    # A stage is as fast as its slowest worker, because the others wait for it.
    slowed = Limits(speeds=tuple(_speeds_of(plan))).slowed(profile, plan.stages)
    costs = stage_costs(
        slowed,
        FREE,
        plan.stages,
        links.replicas,
        latency_ms=links.replica_latency_ms,
        minibatches=minibatches,
    )
    return [replace(cost, num_chunks=None, push_leads=()) for cost in costs]


def _costs_over(
    links: StageLinks, plan: Plan, profile: Profile, costs: Sequence[StageCosts]
) -> list[StageCosts]:
    """Returns a calibrated plan's costs with the exchange between replicas over these links."""
    return [
        replace(
            cost,
            shard_ms=1e3 * parameter_bytes_of(profile, stage) / bytes_per_s / stage.num_replicas,
            sync_latency_ms=max(cost.sync_latency_ms, latency_ms),
        )
        if stage.num_replicas > 1
        else cost
        for cost, stage, bytes_per_s, latency_ms in zip(
            costs, plan.stages, links.replicas, links.replica_latency_ms, strict=True
        )
    ]


def _exchanging(cost: StageCosts, profile: Profile, stage: Stage, minibatches: float) -> StageCosts:
    """Returns the costs if replicas push factors where these are smaller. minibatches: how many minibatches
    one replica trains per update.
    """
    layers = profile.layers[stage.first_layer : stage.last_layer + 1]
    share = shares_of_a_shard(layers, stage.num_replicas, minibatches=minibatches)
    if share.pushed != share.pulled:  # factors do not travel in chunks
        cost = replace(cost, num_chunks=None, push_leads=())
    return replace(cost, push_ms=cost.shard_ms * share.pushed, shard_ms=cost.shard_ms * share.pulled)


def _speeds_of(plan: Plan) -> list[float]:
    """Returns each worker's speed from the plan. The speeds are 1 if the plan has none."""
    if plan.predicted.get("speeds") is None:
        return [1.0] * plan.workers_training
    speeds = predicted_rows(plan, "speeds", float, plan.workers_training, "workers")
    if not all(speeds):
        raise ValueError(f"predicted.speeds is {speeds}: each must be positive")
    return speeds


def _boundary_bytes(plan: Plan, profile: Profile) -> list[int]:
    """Returns the bytes per minibatch that cross each boundary one way."""
    return [profile.layers[stage.last_layer].activation_bytes for stage in plan.stages[:-1]]


def _transfers(plan: Plan, profile: Profile, links: StageLinks) -> list[LinkCosts]:
    return [
        LinkCosts(1e3 * num_bytes / down, latency_ms, 1e3 * num_bytes / up)
        for num_bytes, down, up, latency_ms in zip(
            _boundary_bytes(plan, profile), links.downstream, links.upstream, links.latency_ms, strict=True
        )
    ]
