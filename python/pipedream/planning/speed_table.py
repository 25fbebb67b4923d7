"""Makes a table of plans for several models, numbers of workers and links, with their predicted speedups.

    model x workers x bandwidth: the plan, its speedup over one worker and over data parallelism

Pure except for the files that it reads; any thread; needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipedream.common.document import read_document
from pipedream.common.errors import FileFormatError
from pipedream.common.table import format_table, shorten
from pipedream.common.units import format_bandwidth, parse_bandwidth
from pipedream.planning.layer_profile import Profile
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan

__all__ = ["SpeedRow", "describe_speeds", "make_speeds", "read_profiles"]


class SpeedRow(NamedTuple):
    """One plan of the table."""

    model: str
    num_workers: int
    """The number of workers that the plan was allowed to use."""
    bandwidth_bytes_per_s: float
    plan: Plan

    @property
    def over_one_worker(self) -> float:
        return self._over("one_worker")

    @property
    def over_data_parallel(self) -> float:
        return self._over("data_parallel")

    def _over(self, name: str) -> float:
        other_ms: float = self.plan.predicted["alternatives_ms"][name]
        return other_ms / self.plan.bottleneck_ms if self.plan.bottleneck_ms else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "num_workers": self.num_workers,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "over_one_worker": self.over_one_worker,
            "over_data_parallel": self.over_data_parallel,
            "plan": self.plan.to_dict(),
        }


def read_profiles(paths: Iterable[Path]) -> dict[str, Profile]:
    """Reads profiles by their models' names. A profile without such a name, or with the name of an earlier
    one, gets its file's name. A folder stands for all profiles (.json) in it; its other files are ignored.

    Raises FileFormatError for a file that is no profile, and for a folder without profiles.
    """
    profiles: dict[str, Profile] = {}
    for path in paths:
        found = (
            [path] if not path.is_dir() else [file for file in sorted(path.glob("*.json")) if _is_one(file)]
        )
        if not found:
            raise FileFormatError(
                f"{path} has no profiles: `pipedream profile TARGET --output FILE` makes one"
            )
        for file in found:
            profile = Profile.load(file)
            named = profile.model is not None and profile.model not in profiles
            profiles[(profile.model or "") if named else os.fspath(file)] = profile
    return profiles


def make_speeds(
    profiles: dict[str, Profile], workers: Sequence[int], bandwidths: Sequence[str | LinkProfile]
) -> list[SpeedRow]:
    """Makes a row for each combination, by the paper's cost model. With measured links a row shows the
    slowest link that its plan uses. Raises the errors of partition().
    """
    plans = (
        (model, num_workers, bandwidth, partition(profile, num_workers, bandwidth, hides_links=False))
        for model, profile in profiles.items()
        for num_workers in workers
        for bandwidth in bandwidths
    )
    return [
        SpeedRow(model, num_workers, _bytes_per_s(bandwidth, plan), plan)
        for model, num_workers, bandwidth, plan in plans
    ]


def describe_speeds(rows: Sequence[SpeedRow]) -> str:
    headings = ("model", "workers", "link", "plan", "used", "ms", "x one worker", "x data parallel")
    cells = [
        (
            shorten(row.model, 24),
            str(row.num_workers),
            format_bandwidth(row.bandwidth_bytes_per_s),
            shorten(_describe_stages(row.plan), 40),
            str(row.plan.workers_used),
            f"{row.plan.bottleneck_ms:.3f}",
            f"{row.over_one_worker:.2f}",
            f"{row.over_data_parallel:.2f}",
        )
        for row in rows
    ]
    return format_table(headings, cells, "<>><>>>>")


def _bytes_per_s(bandwidth: str | LinkProfile, plan: Plan) -> float:
    if isinstance(bandwidth, str):
        return parse_bandwidth(bandwidth)
    assert plan.bandwidth_bytes_per_s is not None
    return plan.bandwidth_bytes_per_s


def _describe_stages(plan: Plan) -> str:
    """Returns the replicas of each stage as text: "15-1", "data parallel, 16" or "straight, 4 stages"."""
    if plan.num_stages == 1:
        return "one worker" if plan.workers_used == 1 else f"data parallel, {plan.workers_used}"
    if all(stage.num_replicas == 1 for stage in plan.stages):
        return f"straight, {plan.num_stages} stages"
    return "-".join(str(stage.num_replicas) for stage in plan.stages)


def _is_one(path: Path) -> bool:
    """Whether the file declares itself a profile."""
    try:
        return str(read_document(path, "profile", 1).get("format", "")).startswith("pipedream.profile/")
    except FileFormatError:
        return False
