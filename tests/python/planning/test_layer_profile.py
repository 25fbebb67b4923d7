"""Tests Profile and its file form, pipedream.profile/1."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipedream.common.errors import FileFormatError
from pipedream.planning.layer_profile import LayerProfile, MicrobatchTimes, Profile

SHARED_PROFILES = Path(__file__).resolve().parents[4] / "shared" / "profiles"


def make_fields() -> dict[str, Any]:
    return {
        "format": "pipedream.profile/1",
        "model": "tiny",
        "batch_size": 8,
        "device": "host",
        "minibatches": 10,
        "layers": [
            {
                "name": "conv",
                "forward_ms": 1.5,
                "backward_ms": 2.5,
                "activation_bytes": 1024,
                "parameter_bytes": 64,
                "saved_bytes": 4096,
            },
            {
                "name": "head",
                "forward_ms": 0.5,
                "backward_ms": 1.0,
                "activation_bytes": 0,
                "parameter_bytes": 256,
            },
        ],
    }


def test_fields_of_the_file_are_attributes() -> None:
    profile = Profile.from_dict(make_fields())
    assert (profile.model, profile.batch_size, profile.device, profile.minibatches) == ("tiny", 8, "host", 10)
    assert profile.layers == (
        LayerProfile("conv", 1.5, 2.5, 1024, 64, saved_bytes=4096),
        LayerProfile("head", 0.5, 1.0, 0, 256),
    )
    assert (profile.num_layers, profile.compute_ms, profile.parameter_bytes) == (2, 5.5, 320)


def test_round_trip_keeps_every_field_and_the_unknown_ones(tmp_path: Path) -> None:
    fields = make_fields() | {"source": {"commit": "abc", "figures": [-1, None]}}
    fields["layers"][1]["flops"] = -12.5
    fields["layers"][1]["factors"] = [{"weight_bytes": 128, "factor_bytes": 96}]
    fields["layers"][1]["microbatch_ms"] = [
        {"num_microbatches": 2, "forward_ms": 0.3, "backward_ms": 0.5},
        {"num_microbatches": 4, "forward_ms": 0.2, "backward_ms": 0.25},
    ]
    (tmp_path / "in.json").write_text(json.dumps(fields))
    profile = Profile.load(tmp_path / "in.json")
    profile.save(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == fields
    assert Profile.load(tmp_path / "out.json") == profile


layer_profiles = st.builds(
    LayerProfile,
    name=st.text(max_size=8),
    forward_ms=st.floats(0, 1e9),
    backward_ms=st.floats(0, 1e9),
    activation_bytes=st.integers(0, 2**63 - 1),
    parameter_bytes=st.integers(0, 2**63 - 1),
    saved_bytes=st.none() | st.integers(0, 2**63 - 1),
)


@given(st.lists(layer_profiles, min_size=1, max_size=5))
def test_any_profile_survives_json_unchanged(layers: list[LayerProfile]) -> None:
    profile = Profile(tuple(layers))
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_header_may_be_absent() -> None:
    fields = {name: make_fields()[name] for name in ("format", "layers")}
    profile = Profile.from_dict(fields)
    assert (profile.model, profile.batch_size, profile.device, profile.minibatches) == (None,) * 4


def test_whole_numbers_may_be_written_as_floats() -> None:
    fields = make_fields()
    fields["layers"][0]["activation_bytes"] = 1.5e9
    activation_bytes = Profile.from_dict(fields).layers[0].activation_bytes
    assert activation_bytes == 1_500_000_000
    assert isinstance(activation_bytes, int)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("forward_ms", -1, r"layers\[1\]\.forward_ms is -1: it must not be negative"),
        ("backward_ms", 1e300, r"layers\[1\]\.backward_ms is 1e\+300: it must be at most 1e\+12, in milli"),
        ("forward_ms", math.nan, r"layers\[1\]\.forward_ms is nan: it must be finite"),
        ("backward_ms", math.inf, r"layers\[1\]\.backward_ms is inf: it must be finite"),
        ("backward_ms", 10**400, r"layers\[1\]\.backward_ms is 1000.*: it must be finite"),
        ("forward_ms", "12", r"layers\[1\]\.forward_ms is '12': it must be a number"),
        ("forward_ms", True, r"layers\[1\]\.forward_ms is True: it must be a number"),
        ("forward_ms", None, r"layers\[1\]\.forward_ms is None: it must be a number"),
        ("activation_bytes", 1.5, r"layers\[1\]\.activation_bytes is 1\.5: it must be a whole number"),
        ("activation_bytes", -4, r"layers\[1\]\.activation_bytes is -4: it must not be negative"),
        ("parameter_bytes", 2**63, r"layers\[1\]\.parameter_bytes is 9223372036854775808: it must be from 0"),
        ("parameter_bytes", "1MiB", r"layers\[1\]\.parameter_bytes is '1MiB': it must be a number"),
        ("saved_bytes", -1, r"layers\[1\]\.saved_bytes is -1: it must not be negative"),
        ("name", 3, r"layers\[1\]\.name is 3: it must be a text"),
        ("microbatch_ms", 3, r"layers\[1\]\.microbatch_ms is 3: it must be a list"),
        (
            "microbatch_ms",
            [{"num_microbatches": 2, "forward_ms": -1, "backward_ms": 0}],
            r"layers\[1\]\.microbatch_ms\[0\]\.forward_ms is -1: it must not be negative",
        ),
        (
            "microbatch_ms",
            [{"num_microbatches": 2, "forward_ms": 1, "backward_ms": 1}] * 2,
            r"layers\[1\]\.microbatch_ms\[1\]\.num_microbatches is 2, not above 2",
        ),
        (
            "microbatch_ms",
            [{"num_microbatches": 1, "forward_ms": 1, "backward_ms": 1}],
            r"layers\[1\]\.microbatch_ms\[0\]\.num_microbatches is 1",
        ),
    ],
)
def test_bad_figure_of_a_layer_is_refused_by_field(name: str, value: object, message: str) -> None:
    fields = make_fields()
    fields["layers"][1][name] = value
    with pytest.raises(FileFormatError, match=r"^here\.json: " + message):
        Profile.from_dict(fields, source="here.json")


@pytest.mark.parametrize("name", ["name", "forward_ms", "backward_ms", "activation_bytes", "parameter_bytes"])
def test_missing_field_of_a_layer_is_named(name: str) -> None:
    fields = make_fields()
    del fields["layers"][0][name]
    with pytest.raises(FileFormatError, match=rf"layers\[0\]\.{name} is missing"):
        Profile.from_dict(fields)


def test_another_unit_in_a_field_name_is_pointed_out() -> None:
    fields = make_fields()
    fields["layers"][0]["forward_us"] = fields["layers"][0].pop("forward_ms")
    with pytest.raises(FileFormatError, match=r"forward_ms is missing: found 'forward_us', the unit is ms"):
        Profile.from_dict(fields)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("format", "pipedream.profile/2", r"format is 'pipedream.profile/2', this pipedream reads .*later"),
        ("format", "pipedream.plan/1", r"format is 'pipedream.plan/1', not 'pipedream.profile/1'"),
        ("format", None, r"format is None, not 'pipedream.profile/1'"),
        ("layers", [], r"layers is empty"),
        ("layers", {}, r"layers is \{\}: it must be a list"),
        ("layers", ["conv"], r"layers\[0\] is 'conv': it must be an object"),
        ("batch_size", 0, r"batch_size is 0: it must be from 1"),
        ("batch_size", -8, r"batch_size is -8: it must not be negative"),
        ("minibatches", 2.5, r"minibatches is 2\.5: it must be a whole number"),
        ("model", 7, r"model is 7: it must be a text"),
        ("device", ["cpu"], r"device is \['cpu'\]: it must be a text"),
    ],
)
def test_bad_header_is_refused_by_field(name: str, value: object, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        Profile.from_dict(make_fields() | {name: value})


def test_missing_layers_are_named() -> None:
    with pytest.raises(FileFormatError, match="layers is missing"):
        Profile.from_dict({"format": "pipedream.profile/1"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"not JSON: "),
        (b"", r"not JSON: "),
        (b"\xff\xfe\x00", r"not JSON: "),
        (b"[" * 100_000, r"not JSON: "),
        (b"[1]", r"is not a JSON object with a format 'pipedream.profile/1'"),
        (b"{}", r"format is None"),
        (
            b'{"format": 1, "layers": [{"name": 1, "name": 2}]}',
            r"'name' is twice in one object: leave one out",
        ),
    ],
)
def test_file_that_is_not_a_document_is_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_nan_in_an_unknown_field_is_refused_by_field(tmp_path: Path) -> None:
    path = tmp_path / "nan.json"
    path.write_text(json.dumps(make_fields() | {"source": {"figures": [1, math.nan]}}))
    with pytest.raises(FileFormatError, match=r"source\.figures\[1\] is nan: it must be finite"):
        Profile.load(path)


def test_profile_in_code_is_checked_like_one_from_a_file() -> None:
    with pytest.raises(ValueError, match="forward_ms is -1"):
        LayerProfile("conv", -1, 0, 0, 0)
    with pytest.raises(ValueError, match="layers is empty"):
        Profile(())


def test_text_shows_every_layer_and_the_sums() -> None:
    text = str(Profile.from_dict(make_fields()))
    assert "profile of tiny: 2 layers, minibatches of 8, on host" in text
    assert "conv" in text
    assert "4.00 KiB" in text
    assert "together 5.500 ms per minibatch, 320 B of parameters" in text


def test_text_of_many_layers_has_a_row_for_each_block_with_its_number() -> None:
    names = ["embed", *(f"model.layers.{i}.{part}" for i in range(12) for part in "abcd"), "head"]
    profile = Profile(tuple(LayerProfile(name, 1.0, 2.0, i, 1) for i, name in enumerate(names)))
    lines = str(profile).splitlines()
    (row,) = [line for line in lines if "model.layers.1," in line]
    assert row.split() == ["5-8", "model.layers.1,", "4", "layers", "4.000", "8.000", "8", "B", "4", "B"]
    assert len([line for line in lines if "model.layers" in line]) == 12
    assert len([line for line in profile.describe_layers().splitlines() if "model.layers" in line]) == 48
    assert profile._repr_html_().startswith("<pre>profile of a model: 50 layers")


@pytest.mark.skipif(not SHARED_PROFILES.is_dir(), reason="the published profiles are not beside this tree")
@pytest.mark.parametrize("model", ["alexnet", "gnmt", "resnet50", "vgg16"])
def test_published_profiles_round_trip(model: str, tmp_path: Path) -> None:
    profile = Profile.load(SHARED_PROFILES / f"{model}.json")
    profile.save(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(
        (SHARED_PROFILES / f"{model}.json").read_text()
    )


def test_what_a_microbatch_takes_is_measured_or_its_share_of_the_minibatch() -> None:
    times = (MicrobatchTimes(2, 0.75, 1.5), MicrobatchTimes(4, 0.5, 1.0))
    layer = LayerProfile("a", 1.0, 2.0, 0, 0, microbatch_ms=times)
    assert [layer.compute_ms_with(m) for m in (1, 2, 4)] == [3, 2 * 2.25, 4 * 1.5]
    assert 4 * 1.5 < layer.compute_ms_with(8) < 8 * 1.5
    assert replace(layer, microbatch_ms=None).compute_ms_with(4) == 3
    assert layer.at_speed(2).compute_ms_with(4) == 3
    assert layer.joined_with(layer).compute_ms_with(4) == 12
    assert layer.joined_with(replace(layer, microbatch_ms=None)).microbatch_ms is None
