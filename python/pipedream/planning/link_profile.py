"""LinkProfile has the bandwidth and latency between every pair of workers. Its file has the form
pipedream.links/1. Workers are ranks. Torch-free; any thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipedream.common.document import (
    check_format,
    check_number,
    check_whole,
    read_document,
    read_value,
    require,
    set_field,
    write_document,
    write_value,
)
from pipedream.common.errors import FileFormatError
from pipedream.common.table import format_table
from pipedream.common.units import format_bandwidth

__all__ = ["LinkProfile", "MeasuredLink"]

_KIND, _VERSION = "links", 1


@dataclass(frozen=True)
class MeasuredLink:
    """One direction of the link between two workers. Raises ValueError naming a field whose value is
    impossible.
    """

    sender: int
    receiver: int
    bytes_per_s: float
    latency_us: float
    """Microseconds: half of the round trip of a few bytes, equal in both directions."""
    bytes_per_s_error: float | None = None
    """Half the width of the 95 % confidence interval of a transfer's mean time, as a share of that mean.
    None: unknown.
    """
    latency_error: float | None = None
    """Half the width of the 95 % confidence interval of the latency, as a share of it. None: unknown."""
    transport: str | None = None
    """The transport that carried the tensors, by its name in the core."""

    def __post_init__(self) -> None:
        for name in ("sender", "receiver"):
            check_whole(name, getattr(self, name))
        if self.sender == self.receiver:
            raise ValueError(f"receiver is {self.receiver}: a worker has no link to itself")
        check_number("bytes_per_s", self.bytes_per_s, positive=True)
        check_number("latency_us", self.latency_us)


@dataclass(frozen=True)
class LinkProfile:
    """The links between every pair of workers, in both directions. Raises ValueError if a link is missing or
    is there twice.
    """

    num_workers: int
    links: tuple[MeasuredLink, ...]
    """The links, sorted by sender, then by receiver."""
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the file that this version does not know. Saving writes them back unchanged."""

    def __post_init__(self) -> None:
        set_field(self, "num_workers", check_whole("num_workers", self.num_workers, at_least=2))
        ordered = tuple(sorted(self.links, key=lambda link: (link.sender, link.receiver)))
        set_field(self, "links", ordered)
        ends = [(link.sender, link.receiver) for link in ordered]
        ranks = range(self.num_workers)
        wanted = [(a, b) for a in ranks for b in ranks if a != b]
        if ends == wanted:
            return
        for pair in ends:
            if ends.count(pair) > 1:
                raise ValueError(f"links has {pair[0]} to {pair[1]} twice")
            if pair not in wanted:
                raise ValueError(
                    f"links has {pair[0]} to {pair[1]}, but num_workers is {self.num_workers}: workers count"
                    " from 0"
                )
        sender, receiver = next(pair for pair in wanted if pair not in ends)
        raise ValueError(f"links lacks {sender} to {receiver}: both directions of every pair are needed")

    def between(self, sender: int, receiver: int) -> MeasuredLink:
        return self.links[sender * (self.num_workers - 1) + receiver - (receiver > sender)]

    def speeds_of_first(self, num_workers: int) -> list[float]:
        """Returns the distinct bandwidths, in ascending order, of the links between the first num_workers
        workers. For num_workers = 1 there are no such links, and the bandwidths of all links are returned.
        """
        found = {link.bytes_per_s for link in self.links if max(link.sender, link.receiver) < num_workers}
        return sorted(found or {link.bytes_per_s for link in self.links})

    def slowest_bytes_per_s(self, senders: Iterable[int], receivers: Iterable[int]) -> float:
        """Returns the slowest bandwidth from any of the senders to any of the receivers; infinite if there is
        no link."""
        return min((link.bytes_per_s for link in self._from_to(senders, receivers)), default=float("inf"))

    def largest_latency_us(self, senders: Iterable[int], receivers: Iterable[int]) -> float:
        """Returns the longest latency from any of the senders to any of the receivers; 0 if there is no
        link.
        """
        return max((link.latency_us for link in self._from_to(senders, receivers)), default=0.0)

    def _from_to(self, senders: Iterable[int], receivers: Iterable[int]) -> list[MeasuredLink]:
        ends = list(receivers)
        return [self.between(a, b) for a in senders for b in ends if a != b]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinkProfile:
        """Reads a pipedream.links/1 file; raises FileFormatError naming file and field."""
        return cls.from_dict(read_document(path, _KIND, _VERSION), source=os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        write_document(path, self.to_dict())

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, source: str = "links") -> LinkProfile:
        """Makes the links from the fields of a file. Errors name `source`. Unknown fields are kept."""
        check_format(fields, _KIND, _VERSION, source)
        try:
            require(fields, ["num_workers", "links"], "")
            links = read_value("links", fields["links"], tuple[MeasuredLink, ...])
            extra = {n: fields[n] for n in fields if n not in {"format", "num_workers", "links"}}
            return cls(fields["num_workers"], links, extra)
        except ValueError as error:
            raise FileFormatError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        header = {"format": f"pipedream.{_KIND}/{_VERSION}", "num_workers": self.num_workers}
        return header | self.extra | {"links": write_value(self.links)}

    def __str__(self) -> str:
        headings = ("from", "to", "bandwidth", "known to", "latency", "known to", "by")
        rows = [
            (
                str(link.sender),
                str(link.receiver),
                format_bandwidth(link.bytes_per_s),
                _percent(link.bytes_per_s_error),
                f"{link.latency_us:.1f} us",
                _percent(link.latency_error),
                link.transport or "",
            )
            for link in self.links
        ]
        speeds = [link.bytes_per_s for link in self.links]
        ends = f"{format_bandwidth(min(speeds))} to {format_bandwidth(max(speeds))}"
        title = f"links between {self.num_workers} workers: {ends}"
        return f"{title}\n\n{format_table(headings, rows, '>>>>>><')}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
