"""Runs pd_transport_bench on the loopback interface, and over shaped links between two network namespaces.

    make bench-build; sudo .venv/bin/python bench/system/transport.py [--links 10Gbit/s 1Gbit/s]

Prints a Markdown table. It compares the channel and shared memory with bare ZeroMQ, raw TCP, a ring in memory
and one memcpy, measured in the same run. Ratios are medians over the rounds. Links need root, see links.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from links import Link, can_make_links
from pipedream.links.keys import find_libzmq

PROGRAM = Path(__file__).parents[2] / "build/release/bench/micro/pd_transport_bench"
# 64 MiB is left out, because one message of it takes half a second at 1 Gbit/s.
SIZES_OF_LINKS = "4096,65536,1048576,4194304,16777216"
SECONDS_OF_LINKS = "0.5"


def measure(*arguments: str, rounds: int) -> list[dict[str, Any]]:
    command = [str(PROGRAM), "--json", "--rounds", str(rounds), *arguments]
    rows = []
    environment = os.environ | {"PIPEDREAM_LIBZMQ": find_libzmq()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as bench:
        assert bench.stdout is not None
        for line in bench.stdout:
            rows.append(json.loads(line))
            print(".", end="", file=sys.stderr, flush=True)
    if bench.returncode != 0:
        raise SystemExit(f"{PROGRAM.name} failed with {bench.returncode}")
    print(file=sys.stderr)
    return rows


def over_link(bandwidth: str, rounds: int) -> list[dict[str, Any]]:
    with Link(bandwidth) as link:
        sender, receiver = link.hosts
        return measure(
            *("--sender-netns", sender.namespace, "--receiver-netns", receiver.namespace),
            *("--address", receiver.address, "--sizes", SIZES_OF_LINKS, "--seconds", SECONDS_OF_LINKS),
            rounds=rounds,
        )


def table(title: str, rows: list[dict[str, Any]]) -> str:
    ways = list(dict.fromkeys(row["way"] for row in rows))
    by_size: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_size.setdefault(row["bytes"], {})[row["way"]] = row
    lines = [f"{title}: GB/s, median (minimum to maximum)", ""]
    lines += ["| bytes | " + " | ".join(ways) + " |", "| --- " * (len(ways) + 1) + "|"]
    for size, found in by_size.items():
        cells = [f"{r['gb_per_s']:.3f} ({r['min']:.3f} to {r['max']:.3f})" for r in found.values()]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    lines += ["", "Ratios, and latency of one message of the smallest size:", ""]
    for size, found in by_size.items():
        for way in ("channel", "shared memory"):
            if way not in found:
                continue
            ratios = ", ".join(f"{value:.3f} of {other}" for other, value in found[way]["ratio_to"].items())
            lines.append(f"- {size} bytes, {way}: {ratios}")
        latencies = {way: row["latency_us"] for way, row in found.items() if row["latency_us"] > 0}
        if latencies:
            lines.append("- latency, us: " + ", ".join(f"{way} {us:.1f}" for way, us in latencies.items()))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--links", nargs="*", default=["10Gbit/s", "1Gbit/s"])
    options = parser.parse_args()
    if not PROGRAM.exists():
        raise SystemExit(f"{PROGRAM} is missing: make bench-build")
    missing = can_make_links()
    if missing is not None and options.links:
        raise SystemExit(f"{missing}; --links without a value measures the loopback interface only")
    print(table("Loopback", measure(rounds=options.rounds)))
    for bandwidth in options.links:
        print(table(f"A link of {bandwidth}", over_link(bandwidth, options.rounds)))


if __name__ == "__main__":
    main()
