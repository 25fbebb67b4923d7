"""Converts bandwidths and sizes from text and to text.

Bandwidths are decimal bits per second with a unit ("10Gbit/s" or "10Gbps"), the usual form for networks.
Sizes are binary bytes ("16GiB"), the usual form for memory. Inside the program both are plain bytes, or bytes
per second.
"""

from __future__ import annotations

import math
import re

__all__ = [
    "format_bandwidth",
    "format_bytes",
    "format_figure",
    "parse_bandwidth",
    "parse_size",
]

_BITS_PER_S = {"bit/s": 1e0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12}
_SPELLINGS = {unit.replace("bit/s", "bps"): unit for unit in _BITS_PER_S}
# The smallest bandwidth. A smaller value is a mistake, such as "10" for "10Gbit/s".
_BITS_PER_S_MIN = 1e3
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*", re.ASCII)


def parse_bandwidth(bandwidth: str | float) -> float:
    """Returns bytes per second from "10Gbit/s" or "10Gbps", or from a number of bytes per second.

    Raises ValueError for an unknown or missing unit, for a value that is not positive and finite, and for
    less than 1 kbit/s.
    """
    if isinstance(bandwidth, str):
        count, unit = _split_quantity(
            bandwidth, "bandwidth", [*_BITS_PER_S, *_SPELLINGS], list(_BITS_PER_S), "10Gbit/s"
        )
        bytes_per_s = count * _BITS_PER_S[_SPELLINGS.get(unit, unit)] / 8
    else:
        bytes_per_s = _to_float(
            bandwidth, "bandwidth", 'a text such as "10Gbit/s" or a number of bytes per second'
        )
    if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
        raise ValueError(f"bandwidth is {bandwidth!r}: it must be positive and finite")
    if bytes_per_s * 8 < _BITS_PER_S_MIN:
        meaning = "" if isinstance(bandwidth, str) else " (a number is bytes per second)"
        raise ValueError(
            f"bandwidth is {bandwidth!r}, {format_bandwidth(bytes_per_s)}{meaning}: it must be at least"
            " 1 kbit/s; write a link's speed with its unit, for example 10Gbit/s"
        )
    return bytes_per_s


def parse_size(size: str | int, name: str = "size") -> int:
    """Returns bytes from "16GiB", or from a number of bytes. A fraction of a byte is dropped. name: name of
    the argument, for errors.

    Raises ValueError for an unknown or missing unit, and for a negative or infinite value.
    """
    if isinstance(size, str):
        count, unit = _split_quantity(size, name, list(_BYTES), list(_BYTES), "16GiB")
        num_bytes = count * _BYTES[unit]
    else:
        num_bytes = _to_float(size, name, 'a text such as "16GiB" or a number of bytes')
    if not (math.isfinite(num_bytes) and num_bytes >= 0):
        raise ValueError(f"{name} is {size!r}: it must be finite and not negative, as 16GiB is")
    return int(num_bytes) if isinstance(size, str) else int(size)


def format_bandwidth(bytes_per_s: float) -> str:
    """Returns a bandwidth as text: "10 Gbit/s" for 1.25e9."""
    bits_per_s = bytes_per_s * 8
    unit = _largest_unit(bits_per_s, _BITS_PER_S)
    return f"{bits_per_s / _BITS_PER_S[unit]:.4g} {unit}"


def format_bytes(num_bytes: float) -> str:
    """Returns a size as text: "1.53 GiB" for 1644167168. Below one KiB the number of bytes is whole."""
    unit = _largest_unit(num_bytes, _BYTES)
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes / _BYTES[unit]:.2f} {unit}"


def format_figure(number: float) -> str:
    """Returns a number with four digits, such as "0.08333". A number from 1000 on is rounded to a whole
    number, such as "15300".
    """
    return f"{number:.0f}" if 1000 <= abs(number) < 1e15 else f"{number:.4g}"


def _split_quantity(
    text: str, what: str, units: list[str], shown_units: list[str], example: str
) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{what} is {text!r}: write a number and a unit, for example {example}")
    count, unit = match.groups()
    if unit not in units:
        fault = f"the unit {unit!r} is unknown" if unit else "it has no unit"
        raise ValueError(f"{what} is {text!r}: {fault}; units are {', '.join(shown_units)}, as in {example}")
    return float(count), unit


def _to_float(number: float, what: str, remedy: str) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{what} is {number!r}: give {remedy}")
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _largest_unit(amount: float, units: dict[str, float] | dict[str, int]) -> str:
    # `units` is ordered from small to large. Amounts below the smallest unit get the smallest unit.
    names = list(units)
    return max(
        (name for name in names if abs(amount) >= units[name]), key=lambda name: units[name], default=names[0]
    )
