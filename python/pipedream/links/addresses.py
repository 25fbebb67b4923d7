"""Finds the address and the ports at which a worker listens. The address is loopback, or one that other
machines reach.

No function here sends a packet, except to look up a host's name. All addresses are IPv4. Torch-free; any
thread.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct

__all__ = [
    "LOOPBACK",
    "PortRange",
    "check_ports",
    "check_reachable",
    "is_loopback",
    "parse_ports",
    "ports_of",
    "resolve_bind",
    "route_address",
]

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_INTERFACE_NAME_BYTES_MAX = 15  # Linux's IFNAMSIZ is 16, because it counts a final 0 byte, too
_ANY_PORT = 9  # connect() needs a port; nothing is sent to it
_PORT_MAX = 65_535

PortRange = tuple[int, int]
"""The first port and the last port of a range."""


def resolve_bind(bind: str) -> str:
    """Returns the IPv4 address that a `bind` argument means: "10.0.0.5" itself, or the address of "eth0".

    Raises TypeError if `bind` is no text or is empty. Raises ValueError in these cases: `bind` is neither an
    address nor an interface of this machine; it is an IPv6 address, a multicast address or a wildcard such as
    0.0.0.0; the interface has no IPv4 address. An address is not checked to belong to this machine.
    """
    if not isinstance(bind, str) or not bind:
        raise TypeError(f"bind is {bind!r}: give an address of this machine, or the name of an interface")
    if bind == "localhost":
        return LOOPBACK
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        return _interface_address(bind)
    if address.version != 4:
        raise ValueError(f"bind is {bind!r}: give an IPv4 address, or the name of an interface that has one")
    if address.is_unspecified or address.is_multicast:
        raise ValueError(
            f"bind is {bind!r}, which is no address that others can connect to: name one address or"
            " interface of this machine"
        )
    return bind


def _interface_address(name: str) -> str:
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        raise ValueError(
            f"bind is {name!r}, neither an address nor an interface of this machine: it has"
            f" {', '.join(sorted(names))}"
        )
    request = struct.pack("256s", name.encode()[:_INTERFACE_NAME_BYTES_MAX])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            raise ValueError(
                f"bind is {name!r}, an interface without an IPv4 address: name another one, or an address"
            ) from None
    return socket.inet_ntoa(answer[20:24])  # in struct ifreq, name, family and port come first: 20 bytes


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def route_address(host: str) -> str:
    """Returns this machine's address on the route to a host. If there is no route, raises a ValueError that
    names the host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _ANY_PORT))  # with UDP this only chooses the route, and sends nothing
        except OSError as error:
            raise ValueError(
                f"MASTER_ADDR is {host!r}, to which there is no route from here ({error.strerror}): give"
                " bind=, this machine's address or interface"
            ) from None
        return str(probe.getsockname()[0])


def check_reachable(address: str, host: str) -> None:
    """Raises ValueError for a loopback address of this machine in a run of several machines.

    address: this machine's address on the route to `host`. host: MASTER_ADDR.
    """
    if is_loopback(address):
        raise ValueError(
            f"MASTER_ADDR is {host!r}, which is loopback here, so that other machines could not reach this"
            " one: give bind=, this machine's address or interface"
        )


def ports_of(ports: str | None) -> PortRange | None:
    """Returns the ports at which a worker may listen. They are those of the argument, or without it those of
    $PIPEDREAM_PORTS. None allows any port."""
    if ports is not None:
        return parse_ports("ports", ports)
    from_environment = os.environ.get("PIPEDREAM_PORTS")
    return parse_ports("PIPEDREAM_PORTS", from_environment) if from_environment else None


def parse_ports(name: str, ports: str) -> PortRange:
    """Turns "29600-29620" into (29600, 29620). Raises ValueError or TypeError if `ports` is no such text; the
    error's text begins with `name`."""
    if not isinstance(ports, str):
        raise TypeError(f"{name} is {ports!r}: give a range of ports as text, such as '29600-29620'")
    found = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", ports, re.ASCII)
    if not found:
        raise ValueError(f"{name} is {ports!r}: give the first port and the last, such as '29600-29620'")
    first, last = map(int, found.groups())
    if not 1 <= first <= last <= _PORT_MAX:
        raise ValueError(f"{name} is {ports!r}: ports are 1 to {_PORT_MAX}, and the last comes last")
    return first, last


def check_ports(ports: PortRange | None, num_needed: int, num_workers: int) -> None:
    """Raises ValueError for a range that has fewer ports than the workers of this machine need at once."""
    if ports is None:
        return
    first, last = ports
    num_ports = last - first + 1
    if num_ports < num_needed:
        raise ValueError(
            f"the range of ports {first}-{last} has {num_ports}, but this machine's workers ({num_workers})"
            f" need {num_needed}, one for each channel that they receive by: give a range of at least"
            f" {num_needed}"
        )
