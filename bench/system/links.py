"""Makes several hosts on one machine, joined by links of a chosen bandwidth.

    with Link("1Gbit/s") as link:
        subprocess.run([*link.hosts[0].prefix, "python", "script.py"])

Each host is a network namespace. A veth pair joins two hosts; a bridge in a namespace of its own joins more.
tbf shapes both directions of each host. Needs root, `ip` and `tc` (Debian: iproute2). The namespaces are
removed at the end of the context, even if it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream.common.units import parse_bandwidth

# tbf's bucket holds as many bytes as the link carries in this time, and at least two segments of the offload.
# It makes up for timers that are late. A real link has no bucket, so PEAK lets the bucket's bytes leave only
# a little faster than the rate. Otherwise they would leave at once after a pause: 16 KiB in 0.1 ms instead of
# 0.7 ms at 200 Mbit/s.
BURST_SECONDS = 0.0005
PEAK = 1.05  # times the rate
SEGMENT_HEADERS_BYTES = 200  # at most
QUEUE_SECONDS = 0.02
MTU_BYTES = 9000
STORE_PORT = 29511
SEND_BUFFER_BYTES = 65536  # for each connection of a slowed-down host; the system's default is 4 MiB
SEGMENT_BYTES_MAX = 65536  # largest segment that the segmentation offload makes
CONGESTION_CONTROL = "reno"  # every host has it, and allows it in a namespace
# These are the arguments of pipedream.run() at the ranks.
RUN_OPTIONS: dict[str, Any] = {
    "gather": "none",
    "progress": False,
    "insecure": True,
    "transport": "tcp",  # the hosts are one machine and could share memory, which would bypass the links
    "seed": 0,
}


@dataclass(frozen=True)
class Host:
    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Returns the first words of a command line that runs a command on this host."""
        return ["ip", "netns", "exec", self.namespace]


def can_make_links() -> str | None:
    """Returns the name of the tool or permission that is missing, or None if links can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{missing[0]} is not installed: apt-get install iproute2" if missing else None


class Link:
    """Joins the hosts. `bandwidth` is that of each host in each direction, for example "1Gbit/s". With None
    the links are as fast as the machine.
    """

    def __init__(self, bandwidth: str | None, *, name: str = "pd", num_hosts: int = 2) -> None:
        self.bandwidth = bandwidth
        self.bytes_per_s = None if bandwidth is None else parse_bandwidth(bandwidth)
        tag = f"{name}{os.getpid()}"
        self.hosts = tuple(
            Host(f"{tag}{side}", f"{tag}{side}", f"10.203.0.{number}")
            for number, side in enumerate("abcdefgh"[:num_hosts], start=1)
        )
        self._switch = f"{tag}s"  # the bridge's namespace, if there are more than two hosts

    def __enter__(self) -> Link:
        missing = can_make_links()
        if missing is not None:
            raise RuntimeError(missing)
        # SIGTERM ends the process like an interrupt, so that the namespaces are removed.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def remove(self) -> None:
        namespaces = [host.namespace for host in self.hosts]
        for namespace in [*namespaces, self._switch] if len(self.hosts) > 2 else namespaces:
            with contextlib.suppress(
                subprocess.CalledProcessError
            ):  # the deletion also removes both ends of the namespace's links
                _run("ip", "netns", "delete", namespace)

    def _make(self) -> None:
        for host in self.hosts:
            _run("ip", "netns", "add", host.namespace)
        if len(self.hosts) == 2:
            first, second = self.hosts
            self._join(first, second.interface, second.namespace)
        else:
            self._join_by_switch()
        for host in self.hosts:
            inside = ["ip", "-n", host.namespace]
            _run(*inside, "address", "add", f"{host.address}/24", "dev", host.interface)
            _run(*inside, *f"link set {host.interface} mtu {MTU_BYTES} up".split())
            _run(*inside, "link", "set", "lo", "up")
            _run(*host.prefix, "sysctl", "-w", f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")
            self._shape(host.namespace, host.interface, self.bytes_per_s)

    def _join_by_switch(self) -> None:
        inside = ["ip", "-n", self._switch]
        _run("ip", "netns", "add", self._switch)
        _run(*inside, *f"link add bridge mtu {MTU_BYTES} type bridge".split())
        _run(*inside, "link", "set", "bridge", "up")
        for host in self.hosts:
            port = host.interface
            self._join(host, port, self._switch)
            _run(*inside, *f"link set {port} mtu {MTU_BYTES} master bridge up".split())
            self._shape(self._switch, port, self.bytes_per_s)

    @staticmethod
    def _join(host: Host, other_interface: str, other_namespace: str) -> None:
        end, other_end = (
            f"{host.interface} netns {host.namespace}",
            f"{other_interface} netns {other_namespace}",
        )
        _run(*f"ip link add {end} type veth peer name {other_end}".split())

    def slow_down(self, host: Host, bandwidth: str) -> None:
        """Limits the rate at which this host sends, on a link that is not shaped. The host receives as fast
        as before. The system's send buffers are made small, so that waiting bytes stay in the process."""
        _run(*host.prefix, "sysctl", "-w", f"net.ipv4.tcp_wmem=4096 16384 {SEND_BUFFER_BYTES}")
        self._shape(host.namespace, host.interface, parse_bandwidth(bandwidth))

    @staticmethod
    def _shape(namespace: str, interface: str, bytes_per_s: float | None) -> None:
        """Limits the rate at which bytes leave through the interface."""
        if bytes_per_s is None:
            return
        burst = max(2 * MTU_BYTES, int(bytes_per_s * BURST_SECONDS))
        segment = min(burst // 2, SEGMENT_BYTES_MAX)
        _run(*f"ip -n {namespace} link set {interface} gso_max_size {segment}".split())
        limit = burst + int(bytes_per_s * QUEUE_SECONDS)
        shape = (
            f"dev {interface} root tbf rate {int(bytes_per_s * 8)}bit burst {burst} limit {limit}"
            f" peakrate {int(PEAK * bytes_per_s * 8)}bit mtu {segment + SEGMENT_HEADERS_BYTES}"
        )
        _run("tc", "-n", namespace, "qdisc", "add", *shape.split())


def run_ranks(link: Link, script: str, arguments: list[Any]) -> dict[str, Any]:
    """Starts `script --rank-of [*arguments, PATH]` on all hosts, as torchrun would on as many machines.
    Returns the JSON object that rank 0 wrote to PATH."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        rank_of = json.dumps([*arguments, str(path)])
        common = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        common["WORLD_SIZE"] = str(len(link.hosts))
        place = {"MASTER_ADDR": link.hosts[0].address, "MASTER_PORT": str(STORE_PORT)}
        ranks = [
            subprocess.Popen(
                [*host.prefix, sys.executable, script, "--rank-of", rank_of],
                env=os.environ | common | place | {"RANK": str(rank)},
            )
            for rank, host in enumerate(link.hosts)
        ]
        try:
            codes = [rank.wait() for rank in ranks]
        finally:  # also if this process is told to end
            for process in ranks:
                process.kill()
        if any(codes):
            raise SystemExit(f"{rank_of}: the ranks ended with {codes}")
        figures: dict[str, Any] = json.loads(path.read_text())
        return figures


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
