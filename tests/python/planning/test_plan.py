"""Tests Plan and its file form, pipedream.plan/1."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipedream import _core
from pipedream.common.errors import FileFormatError
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.plan import Plan, Stage, stage_counts


def make_fields(*stages: tuple[int, int, int]) -> dict[str, Any]:
    """Returns the fields that a plan's file must have."""
    return {
        "format": "pipedream.plan/1",
        "stages": [
            {"first_layer": first, "last_layer": last, "num_replicas": replicas}
            for first, last, replicas in stages
        ],
    }


VGG16_FIELDS: dict[str, Any] = make_fields((0, 30, 15), (31, 39, 1)) | {
    "model": "vgg16",
    "num_workers": 16,
    "bandwidth_bytes_per_s": 1.25e9,
    "cost_model": "paper",
    "noam": 2,
    "in_flight": [2, 1],
    "bottleneck_ms": 44.159,
    "predicted": {"samples_per_s": 2898.6, "memory_bytes": None},
}

plans = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=5).map(
    lambda sizes: Plan(
        tuple(
            Stage(sum(s for s, _ in sizes[:i]), sum(s for s, _ in sizes[: i + 1]) - 1, replicas)
            for i, (_, replicas) in enumerate(sizes)
        )
    )
)


def test_plan_of_the_design_is_read_as_it_is_written() -> None:
    plan = Plan.from_dict(VGG16_FIELDS)
    assert plan.stages == (Stage(0, 30, 15), Stage(31, 39, 1))
    assert (plan.num_stages, plan.num_layers, plan.num_workers, plan.workers_used) == (2, 40, 16, 16)
    assert (plan.noam, plan.in_flight, plan.bottleneck_ms) == (2, (2, 1), 44.159)
    assert (plan.placement.rank_of(1), plan.stages_of(15), plan.stages_of(16)) == (15, (1,), ())
    assert plan.to_dict() == VGG16_FIELDS


def test_stages_alone_make_a_plan() -> None:
    plan = Plan.from_dict(make_fields((0, 1, 1), (2, 2, 2), (3, 5, 1)))
    assert (plan.num_workers, plan.noam, plan.in_flight) == (4, 4, (5, 2, 1))
    assert (plan.model, plan.bandwidth_bytes_per_s, plan.cost_model, plan.bottleneck_ms) == (None,) * 4
    assert plan.predicted == {}


@pytest.mark.parametrize(
    "name", ["num_workers", "noam", "in_flight", "predicted", "model", "cost_model", "bottleneck_ms"]
)
def test_null_stands_for_absent(name: str) -> None:
    fields = make_fields((0, 1, 1), (2, 2, 1))
    assert Plan.from_dict(fields | {name: None}) == Plan.from_dict(fields)


def test_unknown_fields_are_kept_in_the_file(tmp_path: Path) -> None:
    fields = VGG16_FIELDS | {"note": {"by": "hand", "offset": -3}}
    fields["stages"] = [stage | {"device": "a"} for stage in fields["stages"]]
    (tmp_path / "in.json").write_text(json.dumps(fields))
    plan = Plan.load(tmp_path / "in.json")
    plan.save(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == fields
    assert Plan.load(tmp_path / "out.json") == plan


def test_schedule_and_microbatches_of_a_file_are_optional_and_kept(tmp_path: Path) -> None:
    fields = make_fields((0, 1, 1), (2, 3, 1))
    assert not {"schedule", "microbatches"} & Plan.from_dict(fields).to_dict().keys()
    plan = Plan.from_dict(fields | {"schedule": "naive", "microbatches": 8})
    assert (plan.schedule, plan.microbatches) == ("unstashed", 8)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    for name, value, message in [
        ("schedule", "auto", "schedule is 'auto': it is one of pipedream, vertical_sync, unstashed"),
        ("schedule", 1, "schedule is 1: it must be a text"),
        ("microbatches", 0, "microbatches is 0"),
        ("microbatches", "8", "microbatches is '8'"),
    ]:
        with pytest.raises(FileFormatError, match=f"^here.json: {message}"):
            Plan.from_dict(fields | {name: value}, source="here.json")


def _warnings_of_loading(folder: Path, fields: dict[str, Any]) -> list[str]:
    path = folder / "plan.json"
    path.write_text(json.dumps(fields))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Plan.load(path)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message).removeprefix(f"{path}: ") for warning in caught]


def test_a_field_that_is_one_letter_off_is_told(tmp_path: Path) -> None:
    fields = make_fields((0, 1, 1), (2, 3, 1))
    fields["stages"][1]["workers"] = 1
    misspelt = fields | {"in_fligth": [2, 1], "modle": "vgg16", "num_worker": 2}
    assert _warnings_of_loading(tmp_path, misspelt) == [
        f"{name} is an unknown field, which is kept and means nothing: is it {meant}?"
        for name, meant in [
            ("in_fligth", "in_flight"),
            ("modle", "model"),
            ("num_worker", "num_workers"),
            ("stages[1].workers", "worker"),
        ]
    ]


def test_other_unknown_fields_are_kept_without_a_word(tmp_path: Path) -> None:
    fields = make_fields((0, 1, 1)) | {"comment": "", "predicted_ms": 3.0, "model_name": "", "notes": []}
    assert _warnings_of_loading(tmp_path, fields) == []


@given(plans)
def test_any_plan_survives_json_unchanged(plan: Plan) -> None:
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.hash() == plan.hash()


@given(plans)
def test_derived_in_flight_follows_the_recurrence_and_can_be_given_back(plan: Plan) -> None:
    replicas = [stage.num_replicas for stage in plan.stages]
    assert plan.in_flight[-1] == 1
    for s in range(plan.num_stages - 1):
        assert plan.in_flight[s] == 1 + math.ceil(plan.in_flight[s + 1] * replicas[s + 1] / replicas[s])
    assert Plan(plan.stages, in_flight=plan.in_flight) == plan


@given(plans)
def test_ranks_go_to_the_replicas_stage_by_stage(plan: Plan) -> None:
    next_rank = 0
    for stage_index, stage in enumerate(plan.stages):
        assert plan.placement.num_replicas(stage_index) == stage.num_replicas
        for replica in range(stage.num_replicas):
            assert plan.placement.rank_of(stage_index, replica) == next_rank
            assert plan.stages_of(next_rank) == (stage_index,)
            next_rank += 1
    assert plan.workers_used == next_rank
    assert plan.stages_of(next_rank) == ()


def test_spare_shards_have_the_last_ranks_and_no_minibatches() -> None:
    plan = Plan((Stage(0, 1, 3, num_spare_shards=2), Stage(2, 2), Stage(3, 3, 2, num_spare_shards=1)))
    assert (plan.workers_used, plan.workers_training, plan.num_spares, plan.num_workers) == (9, 6, 3, 6)
    assert [plan.spare_stage_of(rank) for rank in range(10)] == [None] * 6 + [0, 0, 2, None]
    assert [plan.stages_of(rank) for rank in (5, 6, 8, 9)] == [(2,), (), (), ()]
    assert plan.describe_worker(7) == "stage 0 spare 1 (rank 7)"
    assert plan.describe_worker(8) == "stage 2 spare 0 (rank 8)"
    assert [plan.replica_of(rank) for rank in (2, 6, 7, 8)] == [2, 3, 4, 2]
    straight = plan.with_spare_shards([0, 0, 0])
    assert (plan.noam, plan.in_flight) == (straight.noam, straight.in_flight)
    assert "3 stages on 6 workers and 3 spare shards" in str(plan)
    assert "3+2" in str(plan)


def test_spare_shards_are_written_and_read_back_and_hash_otherwise() -> None:
    plan = Plan((Stage(0, 1, 2), Stage(2, 2)))
    assert "num_spare_shards" not in str(plan.to_dict())
    spared = plan.with_spare_shards([1, 0])
    assert spared.to_dict()["stages"][0]["num_spare_shards"] == 1
    assert "num_spare_shards" not in spared.to_dict()["stages"][1]
    assert Plan.from_dict(json.loads(json.dumps(spared.to_dict()))) == spared
    assert spared.hash() != plan.hash() == spared.with_spare_shards([0, 0]).hash()
    fields = make_fields((0, 1, 2))
    fields["stages"][0]["num_spare_shards"] = None
    assert Plan.from_dict(fields).num_spares == 0


@pytest.mark.parametrize(
    ("replicas", "spares", "message"),
    [
        (1, 1, "num_spare_shards is 1, but num_replicas is 1: spares help 2 replicas or more"),
        (2, 3, "num_spare_shards is 3, but num_replicas is 2"),
        (2, -1, "num_spare_shards is -1"),
    ],
)
def test_spare_shards_that_make_no_sense_are_refused(replicas: int, spares: int, message: str) -> None:
    fields = make_fields((0, 1, replicas))
    fields["stages"][0]["num_spare_shards"] = spares
    with pytest.raises(FileFormatError, match=r"stages\[0\]\." + message):
        Plan.from_dict(fields)


def test_workers_that_the_stages_name_run_several_of_them() -> None:
    plan = Plan(tuple(Stage(i, i, worker=i % 2) for i in range(5)))
    assert plan.workers_used == plan.num_workers == 2
    assert [plan.placement.rank_of(stage) for stage in range(5)] == [0, 1, 0, 1, 0]
    assert [plan.stages_of(rank) for rank in range(3)] == [(0, 2, 4), (1, 3), ()]
    assert plan.describe_worker(0) == "stages 0, 2, 4 (rank 0)"
    assert plan.describe_worker(1) == "stages 1, 3 (rank 1)"
    assert plan.describe_worker(1, stage=3) == "stage 3 (rank 1)"
    assert Plan.straight(3, 3).describe_worker(2) == "stage 2 (rank 2)"
    assert plan.describe_worker(2) == "rank 2"


def test_a_plan_with_workers_is_written_and_read_back_and_hashes_otherwise() -> None:
    plan = Plan.straight(4, 4, num_workers=2)
    assert [stage["worker"] for stage in plan.to_dict()["stages"]] == [0, 1, 0, 1]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    # Two workers with different plans would wait for each other forever, so these plans must have different
    # hashes.
    straight = Plan.straight(4, 4)
    swapped = Plan(tuple(Stage(i, i, worker=w) for i, w in enumerate((1, 0, 1, 0))))
    assert len({plan.hash(), straight.hash(), swapped.hash()}) == 3


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((Stage(0, 0, worker=0), Stage(1, 1)), r"stages\[1\].worker is missing: give it for all"),
        ((Stage(0, 0), Stage(1, 1, worker=0)), r"stages\[0\].worker is missing"),
        ((Stage(0, 0, 2, worker=0), Stage(1, 1, worker=1)), r"stages\[0\].worker is 0, but .* 2 replicas"),
        ((Stage(0, 0, worker=0), Stage(1, 1, worker=2)), r"no stage has worker 1, but stages\[1\]"),
    ],
)
def test_workers_that_make_no_sense_are_refused(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Plan(stages)
    assert "\n" not in str(caught.value)


def test_a_stage_refuses_a_worker_that_is_no_rank() -> None:
    for worker in (-1, 0.5, True, "0"):
        with pytest.raises(ValueError, match="worker is "):
            Stage(0, 0, worker=worker)  # type: ignore[arg-type]


def test_straight_plan_spreads_the_layers_evenly_larger_stages_upstream() -> None:
    plan = Plan.straight(7, 3, model="tiny")
    assert plan.stages == (Stage(0, 2), Stage(3, 4), Stage(5, 6))
    assert (plan.in_flight, plan.noam, plan.model) == ((3, 2, 1), 3, "tiny")
    assert plan.placement == _core.Placement.in_order([1, 1, 1])
    assert Plan.straight(4, 4).stages == tuple(Stage(i, i) for i in range(4))
    assert Plan.straight(5, 1).stages == (Stage(0, 4),)


def test_replicated_plan_shares_out_the_layers_like_the_workers() -> None:
    plan = Plan.replicated(6, (2, 1), model="tiny")
    assert plan.stages == (Stage(0, 3, 2), Stage(4, 5))
    assert (plan.in_flight, plan.workers_used, plan.model) == ((2, 1), 3, "tiny")
    assert Plan.replicated(2, (1, 15)).stages == (Stage(0, 0), Stage(1, 1, 15))
    assert Plan.replicated(3, (15, 1, 1)).stages == (Stage(0, 0, 15), Stage(1, 1), Stage(2, 2))
    assert Plan.replicated(7, (1, 1, 1)).workers_used == 3
    assert Plan.load("2-1", num_layers=6) == Plan.replicated(6, (2, 1))
    with pytest.raises(TypeError, match=r"num_replicas is 2: give each stage's replicas, as \[2, 1\]"):
        Plan.replicated(6, 2)  # type: ignore[arg-type]
    for counts, message in (((1, 1), "2 stages and 1 layers"), ((0,), "num_replicas is 0"), ((), "0 stages")):
        with pytest.raises(ValueError, match=message):
            Plan.replicated(1, counts)


def test_stage_counts_are_numbers_with_dashes_between_them_and_else_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert stage_counts("2-1") == ((2, 0), (1, 0))
    assert stage_counts("15") == ((15, 0),)
    assert stage_counts("3+2-1-2+1") == ((3, 2), (1, 0), (2, 1))
    with pytest.raises(ValueError, match="plan 2-0-1 gives stage 1 no replica: each stage has at least 1"):
        stage_counts("2-0-1")
    with pytest.raises(
        ValueError,
        match=r"plan 1-2\+3 gives stage 1 more spare shards, 3, than 2 replicas can use: at most 2",
    ):
        stage_counts("1-2+3")
    with pytest.raises(ValueError, match="stage 0 more spare shards, 1, than 1 replicas can use: at most 0"):
        stage_counts("1+1-2")
    for text in ("plan.json", "2-1.json", "2-", "-1", "./2-1", "2+", "+1-1"):
        with pytest.raises(FileNotFoundError, match="neither a file nor the replicas of each stage"):
            stage_counts(text)
        Path(text).touch()
        assert stage_counts(text) is None
    plan = Plan.load("3+1-1", num_layers=8)
    assert [(stage.num_replicas, stage.num_spare_shards) for stage in plan.stages] == [(3, 1), (1, 0)]


def test_a_plan_of_replicas_has_the_cuts_and_the_shapes_of_the_profile_that_it_is_for(tmp_path: Path) -> None:
    layers = tuple(LayerProfile(name, 1, 1, 8, 8) for name in ("a", "b", "c"))
    profile = Profile(layers, model="net", cuts=("a", "b"), max_shapes={"inputs": (4, 8)})
    plan = Plan.load("2-1", profile=profile)
    assert plan.stages == Plan.replicated(3, (2, 1)).stages
    assert (plan.model, plan.cuts, plan.max_shapes) == ("net", ("a", "b"), {"inputs": (4, 8)})
    without = Plan.load("1-1", profile=Profile(layers))
    assert (without.cuts, without.max_shapes) == (None, {})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", profile=profile) == plan
    with pytest.raises(
        ValueError,
        match=r"^plan is '2-1', the replicas of each stage, but not of which layers: give Plan.load\('2-1', ",
    ):
        Plan.load("2-1")


def test_stages_that_are_no_stages_are_refused() -> None:
    with pytest.raises(TypeError, match=r"stages\[1\] is a dict: give a Stage, for example Stage\(0, 3\)"):
        Plan((Stage(0, 0), {"first_layer": 1}))  # type: ignore[arg-type]


def test_straight_plan_for_fewer_workers_deals_the_stages_out_in_turn() -> None:
    plan = Plan.straight(7, 4, num_workers=2)
    assert [(s.first_layer, s.last_layer, s.worker) for s in plan.stages] == [
        (0, 1, 0),
        (2, 3, 1),
        (4, 5, 0),
        (6, 6, 1),
    ]
    # With as many workers as stages, the plan need not name workers.
    assert Plan.straight(7, 4, num_workers=4) == Plan.straight(7, 4)
    for num_workers in (0, 5):
        with pytest.raises(ValueError, match=f"num_workers is {num_workers}, but there are 4 stages: give 1"):
            Plan.straight(7, 4, num_workers=num_workers)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "message"),
    [
        (2, 3, "num_stages is 3, but there are 2 layers"),
        (2, 0, "num_stages is 0: it must be from 1"),
        (0, 1, "num_layers is 0: it must be from 1"),
    ],
)
def test_straight_plan_that_cannot_be_is_refused(num_layers: int, num_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.straight(num_layers, num_stages)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], r"stages is empty"),
        ([(1, 2, 1)], r"stages\[0\]\.first_layer is 1, not 0: .*gap"),
        ([(0, 1, 1), (3, 4, 1)], r"stages\[1\]\.first_layer is 3, not 2: .*gap"),
        ([(0, 3, 1), (3, 4, 1)], r"stages\[1\]\.first_layer is 3, not 4: it overlaps with stages\[0\]"),
        ([(0, 3, 1), (0, 3, 1)], r"stages\[1\]\.first_layer is 0, not 4: it overlaps with stages\[0\]"),
        ([(2, 3, 1), (0, 1, 1)], r"stages\[0\]\.first_layer is 2, not 0: .*out of order"),
        ([(0, 1, 1), (2, 3, 1), (1, 1, 1)], r"stages\[2\]\.first_layer is 1, not 4: it is out of order"),
        ([(0, 3, 1), (4, 3, 1)], r"stages\[1\]\.last_layer is 3: it must not be below first_layer 4"),
        ([(0, 3, 0)], r"stages\[0\]\.num_replicas is 0: it must be from 1"),
        ([(0, 3, -1)], r"stages\[0\]\.num_replicas is -1: it must not be negative"),
        ([(-1, 3, 1)], r"stages\[0\]\.first_layer is -1: it must not be negative"),
        ([(0, 3, 1.5)], r"stages\[0\]\.num_replicas is 1\.5: it must be a whole number"),
        ([(0, math.nan, 1)], r"stages\[0\]\.last_layer is nan: it must be finite"),
        ([(0, "3", 1)], r"stages\[0\]\.last_layer is '3': it must be a number"),
    ],
)
def test_stages_that_do_not_cover_the_layers_in_order_are_refused(stages: list[Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=r"^here\.json: " + message) as caught:
        Plan.from_dict(make_fields(*stages), source="here.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("format", "pipedream.plan/2", r"format is 'pipedream.plan/2', this pipedream reads .*later"),
        ("format", "pipedream.profile/1", r"format is 'pipedream.profile/1', not 'pipedream.plan/1'"),
        ("stages", None, r"stages is None: it must be a list"),
        ("stages", [3], r"stages\[0\] is 3: it must be an object"),
        ("stages", [{"first_layer": 0, "last_layer": 1}], r"stages\[0\]\.num_replicas is missing"),
        ("num_workers", 15, r"num_workers is 15, but the stages have 16 replicas"),
        ("num_workers", 0, r"num_workers is 0: it must be from 1"),
        ("num_workers", "16", r"num_workers is '16': it must be a number"),
        ("noam", 3, r"noam is 3, but these stages make it 2"),
        ("in_flight", [], r"in_flight is empty"),
        ("in_flight", [2], r"in_flight has 1 numbers for 2 stages"),
        ("in_flight", [2, 1, 1], r"in_flight has 3 numbers for 2 stages"),
        ("in_flight", [2, 0], r"in_flight\[1\] is 0: it must be from 1"),
        ("in_flight", [2, 1.5], r"in_flight\[1\] is 1\.5: it must be a whole number"),
        ("in_flight", [1, 2], r"in_flight\[1\] is 2: it deadlocks.* rises from 0 to 1 downstream"),
        ("in_flight", 2, r"in_flight is 2: it must be a list"),
        ("bandwidth_bytes_per_s", 0, r"bandwidth_bytes_per_s is 0: it must be positive"),
        ("bandwidth_bytes_per_s", "10Gbit/s", r"bandwidth_bytes_per_s is '10Gbit/s': it must be a number"),
        ("bottleneck_ms", -1, r"bottleneck_ms is -1: it must not be negative"),
        ("bottleneck_ms", math.nan, r"bottleneck_ms is nan: it must be finite"),
        ("cost_model", 1, r"cost_model is 1: it must be a text"),
        ("model", 1, r"model is 1: it must be a text"),
        ("predicted", [], r"predicted is \[\]: it must be an object"),
        ("predicted", {"samples_per_s": -5}, r"predicted\.samples_per_s is -5: it must not be negative"),
        ("predicted", {"stage_ms": [1, math.nan]}, r"predicted\.stage_ms\[1\] is nan: it must be finite"),
    ],
)
def test_bad_field_is_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(FileFormatError, match=message) as caught:
        Plan.from_dict(VGG16_FIELDS | {name: value})
    assert "\n" not in str(caught.value)


def test_in_flight_may_be_raised_where_it_cannot_deadlock() -> None:
    fields = make_fields((0, 0, 2), (1, 1, 1))
    assert Plan.from_dict(fields | {"in_flight": [4, 7]}).in_flight == (4, 7)
    with pytest.raises(FileFormatError, match=r"in_flight\[1\] is 8: it deadlocks"):
        Plan.from_dict(fields | {"in_flight": [4, 8]})


def test_more_workers_than_the_stages_use_are_kept_as_asked_for() -> None:
    plan = Plan.from_dict(make_fields((0, 1, 1), (2, 2, 1)) | {"num_workers": 8})
    assert (plan.num_workers, plan.workers_used, plan.noam) == (8, 2, 2)


def test_hash_depends_on_what_runs_and_on_nothing_else() -> None:
    plan = Plan.from_dict(VGG16_FIELDS)
    assert 0 <= plan.hash() < 2**64
    for name in ("model", "bandwidth_bytes_per_s", "cost_model", "bottleneck_ms", "predicted"):
        assert Plan.from_dict(VGG16_FIELDS | {name: None}).hash() == plan.hash()
    assert Plan.from_dict(VGG16_FIELDS | {"in_flight": [3, 1]}).hash() != plan.hash()
    assert Plan((Stage(0, 29, 15), Stage(30, 39))).hash() != plan.hash()
    assert Plan((Stage(0, 30, 14), Stage(31, 39)), in_flight=(2, 1)).hash() != plan.hash()


def test_hash_is_the_same_on_every_machine() -> None:
    # Two hosts compare this number before they exchange anything else. It may change only with the version of
    # the wire format.
    assert Plan.straight(4, 2).hash() == 6578546783282547415


def test_text_shows_stages_and_predictions_within_a_hundred_columns() -> None:
    predicted = {
        "samples_per_s": 2898.6,
        "memory_bytes": None,
        "stage_ms": [44.159, 10.15],
        "boundary_ms": [20.552],
        "stage_parameter_bytes": [2**20, 2**30],
        "stage_layers": [["features.0.convolution", "features.30.pool"], ["flatten", "head"]],
    }
    text = str(Plan.from_dict(VGG16_FIELDS | {"predicted": predicted}))
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 100
    assert lines[0] == "plan for vgg16 of 40 layers: 2 stages on 16 workers, 10 Gbit/s"
    assert " ".join(lines[3].split()) == "0 0-30 featur..lution .. featur..0.pool 15 2 44.159 20.552 1.00 MiB"
    assert " ".join(lines[4].split()) == "1 31-39 flatten .. head 1 1 10.150 1.00 GiB"
    assert lines[-1] == (
        "NOAM 2, bottleneck 44.159 ms per minibatch, 2898.6 samples/s, predicted by cost model 'paper'"
    )


def test_text_of_a_plan_by_hand_leaves_out_what_is_not_known() -> None:
    lines = str(Plan.from_dict(make_fields((0, 0, 1), (1, 2, 1)) | {"num_workers": 3})).splitlines()
    assert lines == [
        "plan for a model of 3 layers: 2 stages on 2 of 3 workers",
        "",
        "stage  layers  replicas  in flight",
        "    0       0         1          2",
        "    1     1-2         1          1",
        "",
        "NOAM 2",
    ]


def test_text_ignores_predictions_of_another_form() -> None:
    predicted = {"stage_ms": "fast", "stage_layers": [["only one"]], "samples_per_s": "many"}
    assert "NOAM 2" in str(Plan.from_dict(make_fields((0, 0, 1), (1, 2, 1)) | {"predicted": predicted}))


def test_a_plan_whose_placement_was_asked_for_can_be_sent_to_a_worker() -> None:
    plan = Plan.straight(4, 2)
    assert plan.placement.num_ranks == 2
    sent = pickle.loads(pickle.dumps(plan))
    assert sent == plan and sent.placement.num_ranks == 2
