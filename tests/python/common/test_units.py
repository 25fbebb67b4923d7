"""Tests bandwidths, sizes and durations: they are parsed from text and written as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipedream.common.units import (
    format_bandwidth,
    format_bytes,
    parse_bandwidth,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10Gbit/s", 1.25e9),
        ("200Mbit/s", 25e6),
        (" 1.5 Gbit/s ", 187.5e6),
        ("8000bit/s", 1000.0),
        ("1kbit/s", 125.0),
        ("10Gbps", 1.25e9),
        ("200 Mbps", 25e6),
        ("64kbps", 8e3),
        ("8000bps", 1000.0),
        ("64kbit/s", 8e3),
        ("1e-3Tbit/s", 125e6),
    ],
)
def test_bandwidth_is_decimal_bits_per_second(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


def test_bandwidth_as_a_number_is_bytes_per_second() -> None:
    assert parse_bandwidth(1.25e9) == 1.25e9
    assert parse_bandwidth(125_000_000) == 125e6


@pytest.mark.parametrize(
    ("bandwidth", "message"),
    [
        ("10Gb", r"bandwidth is '10Gb': the unit 'Gb' is unknown; units are bit/s, kbit/s, Mbit/s"),
        ("10GB/s", r"the unit 'GB/s' is unknown"),
        ("10Mbyte/s", r"units are bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s, as in 10Gbit/s$"),
        ("10gbps", r"the unit 'gbps' is unknown"),
        ("10gbit/s", r"the unit 'gbit/s' is unknown"),
        ("1.25e9", r"bandwidth is '1.25e9': it has no unit"),
        ("Gbit/s", r"write a number and a unit, for example 10Gbit/s"),
        ("", r"write a number and a unit"),
        ("nanGbit/s", r"write a number and a unit"),
        ("0Gbit/s", r"must be positive and finite"),
        ("-1Gbit/s", r"must be positive and finite"),
        ("1e999Gbit/s", r"must be positive and finite"),
        (0, r"bandwidth is 0: it must be positive and finite"),
        (-1.0, r"must be positive and finite"),
        (math.nan, r"must be positive and finite"),
        (math.inf, r"must be positive and finite"),
        (10**400, r"must be positive and finite"),
    ],
)
def test_bandwidth_that_cannot_be_is_refused_by_value(bandwidth: str | float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bandwidth(bandwidth)


@pytest.mark.parametrize(
    ("bandwidth", "meaning"),
    [
        ("10bit/s", r"bandwidth is '10bit/s', 10 bit/s: it must be at least 1 kbit/s"),
        ("999bps", r"bandwidth is '999bps', 999 bit/s: "),
        (10, r"bandwidth is 10, 80 bit/s \(a number is bytes per second\): .* for example 10Gbit/s$"),
        (124.9, r"bandwidth is 124\.9, 999\.2 bit/s \(a number is bytes per second\)"),
    ],
)
def test_bandwidth_below_any_link_is_refused_as_the_mistake_that_it_is(
    bandwidth: str | float, meaning: str
) -> None:
    with pytest.raises(ValueError, match=meaning):
        parse_bandwidth(bandwidth)


@pytest.mark.parametrize("bandwidth", [None, True, [1], b"10Gbit/s"])
def test_bandwidth_of_another_type_is_a_type_error(bandwidth: object) -> None:
    with pytest.raises(TypeError, match=r"bandwidth is .*: give a text such as"):
        parse_bandwidth(bandwidth)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("16GiB", 16 * 2**30), ("1.5 KiB", 1536), ("0B", 0), ("2TiB", 2**41), ("3MiB", 3 * 2**20)],
)
def test_size_is_binary_bytes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


def test_size_as_a_number_keeps_every_bit() -> None:
    assert parse_size(2**62 + 1) == 2**62 + 1


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("16GB", r"size is '16GB': the unit 'GB' is unknown; units are B, KiB, MiB, GiB, TiB"),
        ("16", r"size is '16': it has no unit"),
        ("-1GiB", r"must be finite and not negative"),
        (-1, r"size is -1: it must be finite and not negative"),
        (math.nan, r"must be finite and not negative"),
    ],
)
def test_size_that_cannot_be_is_refused_by_value(size: str | int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_size(size)


def test_a_size_is_refused_by_the_name_of_its_argument() -> None:
    with pytest.raises(
        ValueError, match=r"^memory is '10Gb': the unit 'Gb' is unknown; units are B, KiB, MiB"
    ):
        parse_size("10Gb", "memory")
    with pytest.raises(ValueError, match=r"^memory is -1: "):
        parse_size(-1, "memory")
    with pytest.raises(TypeError, match=r"^memory is \[\]: give a text such as"):
        parse_size([], "memory")  # type: ignore[arg-type]


@given(st.integers(1, 10**6), st.sampled_from(["kbit/s", "Mbit/s", "Gbit/s"]))
def test_formatted_bandwidth_reads_back_to_four_digits(count: int, unit: str) -> None:
    bytes_per_s = parse_bandwidth(f"{count}{unit}")
    assert parse_bandwidth(format_bandwidth(bytes_per_s)) == pytest.approx(bytes_per_s, rel=1e-3)


def test_figures_are_shown_in_the_unit_that_fits() -> None:
    assert format_bandwidth(1.25e9) == "10 Gbit/s"
    assert format_bandwidth(25e6) == "200 Mbit/s"
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1644167168) == "1.53 GiB"
