"""Tests the table of models, workers and links: its speeds, and the profiles that it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipedream.common.errors import FileFormatError
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.speed_table import describe_speeds, make_speeds, read_profiles

SHARED_PROFILES = Path(__file__).resolve().parents[4] / "shared" / "profiles"


def _profile(model: str | None, parameter_bytes: int = 0) -> Profile:
    """Returns a profile of four equal layers of 10 ms."""
    layers = [LayerProfile(f"layer{i}", 4.0, 6.0, 0, parameter_bytes) for i in range(4)]
    return Profile(tuple(layers), model=model)


def test_speeds_are_over_one_worker_and_over_data_parallel() -> None:
    # An update of r = 2 data-parallel workers takes two minibatches. For it a link carries 4 (r - 1) w / r =
    # 8 MB, both directions together, where w is the 4 MB of parameters. That takes 80 ms at 100 MB/s.
    rows = make_speeds({"even": _profile("even", 1_000_000)}, [1, 2], ["800Mbit/s"])
    assert [(row.num_workers, row.plan.workers_used) for row in rows] == [(1, 1), (2, 2)]
    assert [row.over_one_worker for row in rows] == [pytest.approx(1), pytest.approx(2)]
    assert rows[1].over_data_parallel == pytest.approx(40 / 20)
    assert rows[1].to_dict()["plan"]["stages"][0]["num_replicas"] == 1


def test_a_row_says_which_kind_of_plan_it_is() -> None:
    profiles = {"even": _profile("even"), "heavy": _profile("heavy", 10**9)}
    lines = describe_speeds(make_speeds(profiles, [1, 4], ["1Gbit/s"])).splitlines()
    assert " ".join(lines[0].split()) == "model workers link plan used ms x one worker x data parallel"
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "even 1 1 Gbit/s one worker 1 40.000 1.00 1.00",
        "even 4 1 Gbit/s data parallel, 4 4 10.000 4.00 1.00",
        "heavy 1 1 Gbit/s one worker 1 40.000 1.00 1.00",
        "heavy 4 1 Gbit/s straight, 4 stages 4 10.000 4.00 2400.00",
    ]


def test_a_folder_s_profiles_are_read_and_its_other_files_passed_over(tmp_path: Path) -> None:
    _profile("b").save(tmp_path / "1.json")
    _profile("a").save(tmp_path / "2.json")
    # Has the name of another profile, so the table calls it by its file.
    _profile("a").save(tmp_path / "3.json")
    (tmp_path / "optima.json").write_text("[]")
    assert list(read_profiles([tmp_path])) == ["b", "a", str(tmp_path / "3.json")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileFormatError, match="empty has no profiles"):
        read_profiles([tmp_path / "empty"])
    with pytest.raises(FileFormatError, match=r"optima\.json"):
        read_profiles([tmp_path / "optima.json"])


@pytest.mark.skipif(not SHARED_PROFILES.is_dir(), reason="the published profiles are not beside this tree")
def test_the_table_of_the_published_profiles_has_the_published_optima() -> None:
    published = {
        (row["model"], row["num_workers"], row["bandwidth_bytes_per_s"]): row
        for row in json.loads((SHARED_PROFILES / "optima.json").read_text())["rows"]
    }
    bandwidths = ["1Gbit/s", "10Gbit/s", "25Gbit/s", "100Gbit/s"]
    rows = make_speeds(read_profiles([SHARED_PROFILES]), [4, 8, 16], bandwidths)
    assert len(rows) == 4 * 3 * 4
    compared = 0
    for row in rows:
        known = published.get((row.model, row.num_workers, row.bandwidth_bytes_per_s))
        if known is None:
            continue
        compared += 1
        assert row.plan.bottleneck_ms == pytest.approx(known["bottleneck_ms"], rel=1e-9)
        for name in ("one_worker", "data_parallel"):
            speed = known[f"{name}_ms"] / known["bottleneck_ms"]
            assert getattr(row, f"over_{name}") == pytest.approx(speed, rel=1e-9)
    assert compared
