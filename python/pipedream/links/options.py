"""The options of a run's links: transport, codec, address and ports, keys, and the time after which a silent
peer is considered lost. Plain values, which run() makes from its arguments; any thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipedream.common.agreement import OWN, compared, given
from pipedream.common.own_rank import is_first_of_machine
from pipedream.links.addresses import (
    LOOPBACK,
    PortRange,
    check_reachable,
    is_loopback,
    ports_of,
    resolve_bind,
    route_address,
)
from pipedream.links.keys import CurveKeys, find_libzmq, keys_of
from pipedream.planning.codec_choice import CodecChoice, parse_codec
from pipedream.simulate.trace import read_clock

__all__ = ["TRANSPORTS", "LinkOptions", "make_link_options"]

TRANSPORTS = ("auto", "tcp", "zmq", "shm", "ipc")

_log = logging.getLogger("pipedream")


@dataclass(frozen=True)
class LinkOptions:
    """The options of links. Workers may differ in address, ports, key files and `insecure`; the other options
    are the same at all workers."""

    transport: str = "auto"
    codec: CodecChoice = field(default_factory=dict, metadata=compared(said=lambda choice: choice or None))
    peer_timeout_s: float = field(default=15.0, metadata=compared("peer_timeout"))
    bind_host: str = field(default=LOOPBACK, metadata=OWN)
    """The address on which this worker listens."""
    ports: PortRange | None = field(default=None, metadata=OWN)
    """The ports at which this worker may listen; None lets the system choose."""
    keys: CurveKeys | None = field(default=None, metadata=compared(said=given))
    insecure: bool = field(default=False, metadata=OWN)

    @property
    def shares_memory(self) -> bool:
        """Whether two workers on one host may use shared memory."""
        return self.transport in ("auto", "shm", "ipc")

    @property
    def places_on_devices(self) -> bool:
        """Whether a worker may write into the device memory of another worker on its host."""
        return self.transport in ("auto", "ipc")

    def core_arguments(self) -> dict[str, Any]:
        """Returns the arguments of _core.Worker that concern links."""
        keys = self.keys
        return {
            "transport": "zmq",
            "libzmq_path": find_libzmq(),
            "bind_host": self.bind_host,
            "ports": self.ports,
            "peer_timeout_s": self.peer_timeout_s,
            "keys": None if keys is None else (keys.public, keys.secret, list(keys.allowed)),
            "insecure": self.insecure,
            "beats": True,
            "shares_memory": self.shares_memory,
            "checksums": wants_checksums(),
        }

    @property
    def checks_peers(self) -> bool:
        """Whether workers must exchange their introduction() before they open links."""
        return self.keys is not None or self.transport == "shm"

    def introduction(self) -> dict[str, str | None]:
        """Returns the facts that peers must know about this worker, as JSON values: its public key and its
        machine."""
        return {
            "public_key": None if self.keys is None else self.keys.public,
            "machine": read_clock().boot_id,
        }

    def check_peer(
        self, peer: str, introduction: Mapping[str, str | None], *, shares_memory: bool, ends: str
    ) -> None:
        """Raises ValueError if this worker does not allow the peer's public key; without this check the link
        would stay silent. With transport="shm", also raises it if the peer must share memory with this worker
        but runs on another machine.

        peer: the peer's name for errors. introduction: what the peer's introduction() returned.
        shares_memory: whether the peer must share memory. ends: both workers' names for errors."""
        public = introduction["public_key"]
        if self.keys is not None and public not in self.keys.allowed:
            raise ValueError(
                f"the public key of {peer}, {public}, is not among the allowed ones of this worker's key"
                " file: make all files of a run with one `pipedream keys` command"
            )
        if self.transport == "shm" and shares_memory and introduction["machine"] != read_clock().boot_id:
            raise ValueError(
                f"transport is 'shm', but {ends} are on two machines and cannot share memory: use 'auto',"
                " or start both on one"
            )

    def check_transports(self, peers: Mapping[str, str], transports: Mapping[str, str]) -> None:
        """With transport="shm", raises ValueError for a channel that does not use shared memory.

        peers: the two ends of each channel, in words. transports: the transport that each channel uses."""
        from pipedream import _core

        if self.transport != "shm":
            return
        for channel, ends in peers.items():
            if transports[channel] != _core.SHARED_MEMORY:
                raise ValueError(
                    f"transport is 'shm', but {ends} cannot share memory, so that {channel} would travel by"
                    f" {transports[channel]}: use 'auto', or start both on one host, as one user"
                )

    def check_reach(self, ends: str, why: str) -> None:
        """Logs whether a pair of workers uses CUDA IPC. With transport="ipc", raises ValueError if the pair
        cannot.

        ends: both workers' names. why: the reason why they cannot; empty if they use CUDA IPC."""
        from pipedream import _core

        if self.transport == "ipc" and why:
            raise ValueError(
                f"transport is 'ipc', but the tensors of {ends} cannot go from device to device: {why}; use"
                " 'auto'"
            )
        _log.info("%s: %s", ends, f"not by {_core.CUDA_IPC}: {why}" if why else _core.CUDA_IPC)


def wants_checksums() -> bool:
    """Whether PIPEDREAM_CHECKSUMS=1 asks for a checksum (CRC-32C) over every payload on the wire. Headers
    always have a checksum."""
    wanted = os.environ.get("PIPEDREAM_CHECKSUMS", "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"PIPEDREAM_CHECKSUMS is {wanted!r}: use 1 or 0")
    return wanted == "1"


def make_link_options(
    *,
    transport: str,
    codec: Any,
    keys: Any,
    bind: Any,
    ports: Any,
    insecure: Any,
    peer_timeout_s: float,
    several_machines: bool,
) -> LinkOptions:
    """Checks the arguments of run() that concern links, and finds this worker's address.

    An address other than loopback needs keys, or insecure=True, which logs a warning once per machine. Raises
    ValueError or TypeError, which name the argument.
    """
    if not isinstance(insecure, bool):
        raise TypeError(f"insecure is {insecure!r}: give True or False")
    loaded = None if keys is None else keys_of(keys)
    address = _bind_address(bind, several_machines)
    if loaded is None and not is_loopback(address):
        if not insecure:
            raise ValueError(
                f"{_address_said(bind, address)}, where anybody who reads the network could read the tensors"
                " and take part in the run: give keys=, a file that `pipedream keys` makes, or insecure=True"
                " if you trust everybody on the network"
            )
        if is_first_of_machine():
            _log.warning(
                "insecure=True: listening on %s without keys; whoever reads the network can read the tensors"
                " of this run and send others",
                address,
            )
    return LinkOptions(
        transport,
        parse_codec(codec),
        peer_timeout_s,
        bind_host=address,
        ports=ports_of(ports),
        keys=loaded,
        insecure=insecure,
    )


def _bind_address(bind: Any, several_machines: bool) -> str:
    if bind is not None:
        return resolve_bind(bind)
    if not several_machines:
        return LOOPBACK
    master = os.environ["MASTER_ADDR"]
    address = route_address(master)
    check_reachable(address, master)
    return address


def _address_said(bind: Any, address: str) -> str:
    if bind is None:
        return f"this run has several machines, so that its workers listen on {address} here"
    shown = f"bind is {bind!r}" if bind == address else f"bind is {bind!r}, {address}"
    return f"{shown}, which is not loopback"
