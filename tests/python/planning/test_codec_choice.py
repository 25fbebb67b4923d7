"""Tests that run(codec=...) chooses a codec for each boundary."""

from __future__ import annotations

from typing import Any

import pytest
from pipedream.planning.codec_choice import (
    check_pairs,
    codec_between,
    codec_of_pushes,
    parse_codec,
    parse_codec_text,
    pushes_factors,
)


def _between(codec: Any, num_stages: int = 3) -> dict[tuple[int, int], str]:
    choice = parse_codec(codec)
    check_pairs(choice, num_stages)
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    return {ends: codec_between(choice, *ends) for pair in pairs for ends in (pair, pair[::-1])}


def test_none_leaves_every_tensor_as_it_is() -> None:
    assert set(_between(None).values()) == set(_between({}).values()) == {"none"}


def test_a_name_is_for_all() -> None:
    assert set(_between("bf16").values()) == {"bf16"}


def test_directions_are_named() -> None:
    assert _between({"activations": "fp16", "gradients": "topk:0.25"}, 2) == {
        (0, 1): "fp16",
        (1, 0): "topk:0.25",
    }
    assert _between({"gradients": "int8"}, 2) == {(0, 1): "none", (1, 0): "int8"}


def test_a_pair_counts_more_than_its_direction() -> None:
    assert _between({"activations": "bf16", (1, 2): "int8", "2->1": "fp16", (1, 0): None}) == {
        (0, 1): "bf16",
        (1, 2): "int8",
        (2, 1): "fp16",
        (1, 0): "none",
    }


def test_pushes_are_encoded_only_where_they_are_named() -> None:
    assert "pushes" not in parse_codec("bf16")
    assert parse_codec(parse_codec_text("pushes=topk")) == {"pushes": "topk:0.01"}
    assert set(_between({"pushes": "int8"}).values()) == {"none"}


@pytest.mark.parametrize(
    ("name", "parsed", "codec"),
    [
        ("factors", "factors", "none"),
        ("factors:none", "factors", "none"),
        ("factors:bf16", "factors:bf16", "bf16"),
        ("factors:topk", "factors:topk:0.01", "topk:0.01"),
    ],
)
def test_pushes_may_be_factors_and_what_is_not_may_be_encoded(name: str, parsed: str, codec: str) -> None:
    choice = parse_codec(parse_codec_text(f"pushes={name}"))
    assert choice == {"pushes": parsed}
    assert pushes_factors(choice)
    assert codec_of_pushes(choice) == codec
    assert not pushes_factors(parse_codec({"pushes": codec}))
    assert codec_of_pushes(parse_codec({"pushes": codec})) == codec


def test_nothing_is_pushed_as_factors_where_nobody_asks() -> None:
    assert not pushes_factors(parse_codec("bf16"))
    assert codec_of_pushes(parse_codec("bf16")) == "none"


def test_names_are_completed_so_that_ranks_can_compare_them() -> None:
    assert parse_codec("topk") == parse_codec("topk:0.01") == parse_codec("topk:1e-2")


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("int9", ("'int9'", "none, bf16, fp16, int8, topk")),
        ("topk:0", ("'topk:0'", "above 0")),
        ("topk:1.5", ("'topk:1.5'", "at most 1")),
        ("topk:", ("'topk:'", "topk:0.05")),
        ("BF16", ("'BF16'", "bf16")),
        ("", ("''", "bf16")),
        ({"gradients": "int9"}, ("codec of gradients", "'int9'")),
        ({"pushes": "factor"}, ("codec of pushes", "'factor'", "factors:bf16")),
        ({"pushes": "factors:"}, ("codec of pushes", "''", "factors:bf16")),
        ({(0, 1): "zip"}, ("codec of 0->1", "'zip'")),
        ({"weights": "bf16"}, ("'weights'", "'activations', 'gradients', 'pushes', or a pair")),
        ({"0": "bf16"}, ("'0'", "a pair of stages such as (0, 1) or '0->1'")),
        ({"0->x": "bf16"}, ("'0->x'", "a pair")),
        ({"-1->0": "bf16"}, ("'-1->0'", "a pair")),
        ({(0, 1, 2): "bf16"}, ("(0, 1, 2)", "a pair")),
        ({(True, 0): "bf16"}, ("(True, 0)", "a pair")),
        ({0: "bf16"}, ("codec names 0:", "a pair")),
        ({(0, 1): "bf16", "0->1": "int8"}, ("0->1 twice",)),
        ({(0, 2): "bf16"}, ("codec names 0->2", "neighbours", "stages 0 to 2")),
        ({(1, 1): "bf16"}, ("codec names 1->1", "neighbours")),
        ({(2, 3): "bf16"}, ("codec names 2->3", "stages 0 to 2")),
        ({(-1, 0): "bf16"}, ("codec names -1->0",)),
    ],
    ids=str,
)
def test_mistakes_are_one_line_with_the_choices(codec: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        _between(codec)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (16, "codec is a int: give for example"),
        (["bf16"], "codec is a list: give for example"),
        ({"gradients": 8}, "codec of gradients is a int: give for example"),
    ],
)
def test_what_is_no_codec_at_all_is_a_type_error(codec: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        parse_codec(codec)
    assert str(caught.value).startswith(message)


def test_text_of_a_command_line_names_one_codec_or_several() -> None:
    assert parse_codec_text("topk:0.05") == "topk:0.05"
    assert parse_codec_text("activations=bf16, 1->0 = topk:0.1") == {
        "activations": "bf16",
        "1->0": "topk:0.1",
    }
    with pytest.raises(ValueError, match="codec has the part 'int8': write WHERE=CODEC"):
        parse_codec_text("activations=bf16,int8")
