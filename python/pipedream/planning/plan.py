"""Plan says which layers run in which stage, and on how many replicas. Its file has the form
pipedream.plan/1.

The partitioner makes a Plan, or a person writes its file. run() and every worker read it. Its values never
change once built; any thread; needs no torch.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from pipedream.common.document import (
    check_figures,
    check_format,
    check_list,
    check_number,
    check_object,
    check_text,
    check_whole,
    read_document,
    read_value,
    require,
    set_field,
    write_document,
)
from pipedream.common.errors import FileFormatError
from pipedream.common.table import html_of
from pipedream.planning.factor_rule import checked_codec
from pipedream.planning.layer_profile import checked_cuts
from pipedream.planning.plan_lines import describe_plan
from pipedream.planning.plan_stage import (
    STAGE_FIELDS,
    Stage,
    check_in_flight,
    check_stages,
    check_workers,
    derive_in_flight,
    is_counts,
    placement_of,
    stage_counts,
    stage_from_dict,
)
from pipedream.planning.program import rules_of
from pipedream.planning.shapes import Shapes, checked_shapes, largest_of, listed, shapes_of, with_apart

if TYPE_CHECKING:
    from pipedream import _core
    from pipedream.planning.layer_profile import Profile

__all__ = ["Plan", "Stage", "stage_counts"]

_KIND = "plan"
_VERSION = 1
_FORMAT = f"pipedream.{_KIND}/{_VERSION}"
_TAKEN_FIELDS = (
    *("model", "num_workers", "bandwidth_bytes_per_s", "cost_model", "bottleneck_ms", "predicted"),
    *("max_shapes", "cuts", "codec", "schedule", "microbatches"),
)
"""Fields of a file that Plan takes and checks as they are."""
_FIELDS = ("format", "stages", "noam", "in_flight", "shapes_apart", *_TAKEN_FIELDS)
_SIMILARITY_MIN = 0.75  # difflib's ratio of two short names that differ in one letter or in two swapped ones


@dataclass(frozen=True)
class Plan:
    """Stages that cover the layers 0, 1, ... in order, each layer once.

    Only `stages` is needed, so that a person can write a plan. Raises ValueError naming the field for stages
    that overlap, leave gaps or are out of order, and for fewer workers than replicas. Also raises it for an
    `in_flight` that has the wrong length or can deadlock.
    """

    stages: tuple[Stage, ...]
    model: str | None = None
    """The model's name, for readers only."""
    num_workers: int = 0
    """Training workers that the user asked for. The plan may use fewer. 0: as many as the plan uses. Spare
    shards are not counted.
    """
    bandwidth_bytes_per_s: float | None = None
    cost_model: str | None = None
    in_flight: tuple[int, ...] = ()
    """n_s, the number of microbatches in flight at each replica of stage s (of minibatches, if they are not
    cut). (): derived from the numbers of replicas r_s by n_{S-1} = 1 and
    n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s).
    """
    bottleneck_ms: float | None = None
    """Predicted time per minibatch of the slowest stage or boundary."""
    predicted: dict[str, Any] = field(default_factory=dict, hash=False)
    """Optional figures of the cost model. Among them are samples_per_s and memory_bytes (null: not
    predicted). print(plan) shows the lists stage_ms (time per minibatch), stage_parameter_bytes and
    stage_layers ([first, last] layer names), with an entry per stage, and boundary_ms, the time of the
    tensors to and from the next stage together, with an entry for each stage but the last.
    """
    max_shapes: Shapes = field(default_factory=dict, hash=False)
    """The largest sizes of a minibatch's entries for which `run` plans memory: {"input_ids": (8, 512)}, or
    "inputs" and "targets" for pairs. `run` also plans for the sizes of the first minibatch. The profile and
    fitting() set this field.
    """
    shapes_apart: tuple[Shapes, ...] = field(default=(), hash=False)
    """Several kinds of shapes, used instead of max_shapes. `run` plans memory for minibatches as large as one
    kind, or between two kinds. This memory need not suffice for a minibatch that has the largest size of
    every entry. fitting(apart=True) sets this field.
    """
    cuts: tuple[str, ...] | None = None
    """The module calls after which layers end, from the profile. None: layers end at every possible cut of
    the model.
    """
    codec: dict[str, str] = field(default_factory=dict, hash=False)
    """The codec that the plan was made for: {"pushes": "factors"}, or {}. `run` uses it if its own argument
    `codec` is not given.
    """
    schedule: str | None = None
    """The schedule that the plan was made for; `run(schedule="auto")` uses it. None: "pipedream", or unknown.
    """
    microbatches: int | None = None
    """The number of microbatches that the plan was made for; `run(schedule="auto")` uses it."""
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        set_field(self, "stages", tuple(self.stages))
        check_stages(self.stages)
        check_workers(self.stages)
        set_field(
            self,
            "num_workers",
            check_whole("num_workers", self.num_workers or self.workers_training, at_least=1),
        )
        if self.num_workers < self.workers_training:
            raise ValueError(
                f"num_workers is {self.num_workers}, but the stages have {self.workers_training} replicas"
            )
        if self.model is not None:
            check_text("model", self.model)
        if self.cost_model is not None:
            check_text("cost_model", self.cost_model)
        if self.bandwidth_bytes_per_s is not None:
            bandwidth = check_number("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, positive=True)
            set_field(self, "bandwidth_bytes_per_s", bandwidth)
        if self.bottleneck_ms is not None:
            set_field(self, "bottleneck_ms", check_number("bottleneck_ms", self.bottleneck_ms))
        check_figures("predicted", check_object("predicted", self.predicted))
        if self.cuts is not None:
            set_field(self, "cuts", checked_cuts(self.cuts, self.num_layers))
        set_field(self, "codec", checked_codec(check_object("codec", self.codec)))
        if self.schedule is not None:
            set_field(self, "schedule", rules_of(check_text("schedule", self.schedule)).name)
        if self.microbatches is not None:
            set_field(self, "microbatches", check_whole("microbatches", self.microbatches, at_least=1))
        set_field(self, "max_shapes", checked_shapes("max_shapes", self.max_shapes))
        apart = check_list("shapes_apart", list(self.shapes_apart))
        apart = [checked_shapes(f"shapes_apart[{i}]", shapes) for i, shapes in enumerate(apart)]
        set_field(self, "shapes_apart", tuple(apart))
        if self.max_shapes and self.shapes_apart:
            raise ValueError(
                "max_shapes and shapes_apart are both given: name sizes that every minibatch fits into, or"
                " several of which it fits into one"
            )
        set_field(self, "in_flight", tuple(self.in_flight) or derive_in_flight(self.stages))
        check_in_flight(self.in_flight, self.stages)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_layers(self) -> int:
        return self.stages[-1].last_layer + 1

    @property
    def workers_used(self) -> int:
        """Number of all workers, spares included."""
        return self.placement.num_ranks

    @property
    def num_spares(self) -> int:
        """Number of workers that own shards and train no minibatches. They have the last ranks."""
        return sum(stage.num_spare_shards for stage in self.stages)

    @property
    def workers_training(self) -> int:
        """Number of workers that train minibatches."""
        return self.workers_used - self.num_spares

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields to pickle. The placement cannot be pickled, and is computed again when
        needed.
        """
        return {name: value for name, value in self.__dict__.items() if name != "placement"}

    @functools.cached_property
    def placement(self) -> _core.Placement:
        """The ranks of every stage's replicas and spares."""
        return placement_of(self.stages)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a rank runs, in order. A spare, or a rank beyond the plan, runs none."""
        return tuple(self.placement.stages_at(rank)) if rank < self.workers_training else ()

    def spare_stage_of(self, rank: int) -> int | None:
        """Returns the stage that the rank is a spare of; None if it is no spare."""
        is_spare = self.workers_training <= rank < self.workers_used
        return self.placement.stages_at(rank)[0] if is_spare else None

    def describe_worker(self, rank: int, stage: int | None = None) -> str:
        """Returns a worker's name for errors and traces: "stage 1 (rank 1)", "stage 0 replica 2 (rank 2)" or
        "stage 0 spare 0 (rank 4)". stage: the stage to name, of a worker that runs several; None: all of
        them.
        """
        served = self.spare_stage_of(rank)
        if served is not None:
            spare = self.replica_of(rank) - self.stages[served].num_replicas
            return f"stage {served} spare {spare} (rank {rank})"
        stages = self.stages_of(rank) if stage is None else (stage,)
        if not stages:
            return f"rank {rank}"
        name = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        if self.stages[stages[0]].num_replicas > 1:
            name += f" replica {self.replica_of(rank)}"
        return f"{name} (rank {rank})"

    def replica_of(self, rank: int) -> int:
        """Returns the rank's number among the replicas of its stage. Spares are numbered after the
        replicas.
        """
        return self.placement.replica_at(rank)

    def fitting(self, *batches: Any, apart: bool = False) -> Plan:
        """Returns this plan with memory for minibatches as large as these in every dimension. For data whose
        shapes change, give a minibatch as large as the largest: `plan.fitting(collate([longest] *
        batch_size))`.

        apart: plans memory for minibatches as large as one of the given ones, or between two of them. Use it
        if minibatches have few long texts or many short ones: the memory need not suffice for many long
        texts. The shapes from the profile are dropped. If there are more than 16 kinds of shapes, two similar
        kinds are joined: the joined kind has the larger size in each dimension.

        Raises TypeError for a value that is no minibatch, and ValueError for apart=False if the plan has
        shapes_apart.
        """
        for batch in batches:
            is_one = isinstance(batch, (tuple, list)) and len(batch) == 2
            is_one = is_one or isinstance(batch, Mapping) or is_dataclass(batch)
            if not is_one or not shapes_of(batch):
                several = isinstance(batch, (tuple, list))
                what = f"{type(batch).__name__} of {len(batch)}" if several else type(batch).__name__
                raise TypeError(
                    f"a {what} is no minibatch with tensors: give fitting() minibatches as the data yield"
                    " them, pairs (inputs, targets) or dicts, each as an argument of its own"
                )
        if apart:
            return replace(self, max_shapes={}, shapes_apart=with_apart(self.shapes_apart, batches))
        if self.shapes_apart:
            raise ValueError(
                "this plan fits shapes apart, each by itself: give fitting() apart=True for these, too"
            )
        return replace(self, max_shapes=largest_of(batches, self.max_shapes))

    @property
    def noam(self) -> int:
        """Number of optimal active minibatches, ceil(training workers / replicas of the input stage).

        Source: PipeDream (SOSP'19), section 3.2. The run itself admits `in_flight[0]` microbatches at each
        replica.
        """
        return -(-self.workers_training // self.stages[0].num_replicas)

    def with_spare_shards(self, num_spare_shards: Sequence[int]) -> Plan:
        """Returns this plan with this number of spare shards for each stage. Raises ValueError as Stage does,
        or if there is not one number per stage.
        """
        if len(num_spare_shards) != self.num_stages:
            raise ValueError(
                f"num_spare_shards has {len(num_spare_shards)} entries for {self.num_stages} stages: give one"
                " for each"
            )
        stages = zip(self.stages, num_spare_shards, strict=True)
        return replace(self, stages=tuple(replace(stage, num_spare_shards=n) for stage, n in stages))

    @classmethod
    def straight(
        cls, num_layers: int, num_stages: int, *, num_workers: int | None = None, model: str | None = None
    ) -> Plan:
        """Returns a plan without replicas and with equal numbers of layers per stage. If the layers do not
        divide evenly, each of the first stages has one layer more.

        num_workers: the number of workers, if fewer than stages, for schedule "interleaved". Worker s mod
        num_workers runs stage s.
        """
        check_whole("num_layers", num_layers, at_least=1)
        check_whole("num_stages", num_stages, at_least=1)
        if num_stages > num_layers:
            raise ValueError(
                f"num_stages is {num_stages}, but there are {num_layers} layers: a stage needs one"
            )
        if num_workers is not None and not 1 <= check_whole("num_workers", num_workers) <= num_stages:
            raise ValueError(
                f"num_workers is {num_workers}, but there are {num_stages} stages: give 1 to {num_stages}"
            )
        base, num_larger = divmod(num_layers, num_stages)
        stages = []
        first_layer = 0
        for stage_index in range(num_stages):
            last_layer = first_layer + base + (stage_index < num_larger) - 1
            shared = num_workers is not None and num_workers < num_stages
            worker = stage_index % num_workers if num_workers is not None and shared else None
            stages.append(Stage(first_layer, last_layer, worker=worker))
            first_layer = last_layer + 1
        return cls(tuple(stages), model=model)

    @classmethod
    def replicated(cls, num_layers: int, num_replicas: Sequence[int], *, model: str | None = None) -> Plan:
        """Returns a plan of stages with these numbers of replicas. A stage gets as large a share of the
        layers as its replicas are of the workers, and at least one layer.
        """
        if not isinstance(num_replicas, (list, tuple)):
            raise TypeError(f"num_replicas is {num_replicas!r}: give each stage's replicas, as [2, 1]")
        counts = [check_whole("num_replicas", replicas, at_least=1) for replicas in num_replicas]
        check_whole("num_layers", num_layers, at_least=1)
        if not 1 <= len(counts) <= num_layers:
            raise ValueError(f"there are {len(counts)} stages and {num_layers} layers: a stage needs one")
        stages = []
        first_layer = 0
        for stage_index, replicas in enumerate(counts):
            workers_before = sum(counts[: stage_index + 1])
            num_after = len(counts) - 1 - stage_index  # later stages, which need a layer each
            wanted = round(num_layers * workers_before / sum(counts)) - 1
            last_layer = min(max(first_layer, wanted), num_layers - 1 - num_after)
            stages.append(Stage(first_layer, last_layer, replicas))
            first_layer = last_layer + 1
        return cls(tuple(stages), model=model)

    def hash(self) -> int:
        """Returns 64 bits that two workers compare before they exchange anything else. The bits depend only
        on the stages, their workers and in_flight, and are the same on every machine and Python version.
        """
        content: list[Any] = [
            [[s.first_layer, s.last_layer, s.num_replicas] for s in self.stages],
            list(self.in_flight),
        ]
        if self.stages[0].worker is not None:
            content.append([stage.worker for stage in self.stages])
        if self.num_spares:
            content.append({"spares": [stage.num_spare_shards for stage in self.stages]})
        text = json.dumps(content, separators=(",", ":"))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        num_layers: int | None = None,
        profile: Profile | None = None,
    ) -> Plan:
        """Reads a pipedream.plan/1 file. Raises FileFormatError naming file and field. Warns of an unknown
        field whose name resembles a known one.

        `path` may also give the replicas of every stage, as "2-1", or replicas and spare shards, as "3+1-1".
        Then one of two arguments must describe the model:
        profile: the plan takes its layers, cuts and largest shapes from this profile.
        num_layers: the model has this many layers.
        """
        source = os.fspath(path)
        if profile is not None:
            num_layers = profile.num_layers
        if num_layers is not None:
            counts = stage_counts(path)
        elif not os.path.exists(path) and is_counts(source):
            raise ValueError(
                f"plan is {source!r}, the replicas of each stage, but not of which layers: give"
                f" Plan.load({source!r}, profile=profile)"
            )
        else:
            counts = None
        if num_layers is not None and counts is not None:
            plan = cls.replicated(num_layers, [replicas for replicas, _ in counts])
            plan = plan.with_spare_shards([spares for _, spares in counts])
            if profile is None:
                return plan
            return replace(plan, model=profile.model, cuts=profile.cuts, max_shapes=profile.max_shapes or {})
        plan = cls.from_dict(read_document(path, _KIND, _VERSION), source=source)
        for caution in _misspelt_fields(plan):
            warnings.warn(f"{source}: {caution}", stacklevel=2)
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        write_document(path, self.to_dict())

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, source: str = "plan") -> Plan:
        """Makes a plan from the fields of a file. Errors name `source`. Unknown fields are kept."""
        check_format(fields, _KIND, _VERSION, source)
        try:
            require(fields, ["stages"], "")
            stages = check_list("stages", fields["stages"])
            given = {name: value for name, value in fields.items() if value is not None}
            if "num_workers" in given:
                check_whole("num_workers", given["num_workers"], at_least=1)
            if given.get("in_flight") == []:
                raise ValueError("in_flight is empty: give one number per stage, or leave it out")
            plan = cls(
                tuple(stage_from_dict(i, stage) for i, stage in enumerate(stages)),
                **{name: given[name] for name in _TAKEN_FIELDS if name in given},
                in_flight=read_value("in_flight", given.get("in_flight", []), tuple[int, ...]),
                shapes_apart=tuple(check_list("shapes_apart", given.get("shapes_apart", []))),
                extra={name: fields[name] for name in fields if name not in _FIELDS},
            )
            # A noam of other stages is an error, because it would mislead readers of the file.
            noam = given.get("noam", plan.noam)
            if noam != plan.noam or isinstance(noam, bool):
                raise ValueError(
                    f"noam is {noam!r}, but these stages make it {plan.noam}: correct it or leave it out"
                )
        except ValueError as error:
            raise FileFormatError(f"{source}: {error}") from None
        return plan

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the file."""
        return {
            "format": _FORMAT,
            "model": self.model,
            "num_workers": self.num_workers,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "cost_model": self.cost_model,
            "stages": [stage.to_dict() for stage in self.stages],
            "noam": self.noam,
            "in_flight": list(self.in_flight),
            "bottleneck_ms": self.bottleneck_ms,
            "predicted": self.predicted,
            **({} if self.cuts is None else {"cuts": list(self.cuts)}),
            **({"codec": self.codec} if self.codec else {}),
            **({} if self.schedule is None else {"schedule": self.schedule}),
            **({} if self.microbatches is None else {"microbatches": self.microbatches}),
            **({"max_shapes": listed(self.max_shapes)} if self.max_shapes else {}),
            **({"shapes_apart": [*map(listed, self.shapes_apart)]} if self.shapes_apart else {}),
        } | self.extra

    def __str__(self) -> str:
        return describe_plan(self)

    def _repr_html_(self) -> str:
        return html_of(str(self))


def _misspelt_fields(plan: Plan) -> Iterator[str]:
    """Yields a warning for each unknown field whose name resembles the name of a known field."""
    parts: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [("", plan.extra, _FIELDS)]
    parts += [(f"stages[{i}].", stage.extra, STAGE_FIELDS) for i, stage in enumerate(plan.stages)]
    for where, extra, known in parts:
        for name in extra:
            near = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILARITY_MIN)
            if near and abs(len(name) - len(near[0])) <= 1:
                yield f"{where}{name} is an unknown field, which is kept and means nothing: is it {near[0]}?"
