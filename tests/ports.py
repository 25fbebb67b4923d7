"""Ranges of ports of loopback, for tests that name some."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

__all__ = ["free_ports", "taken_ports"]


@contextlib.contextmanager
def taken_ports(num_ports: int) -> Iterator[str]:
    """This process listens at all of them. They are below those that the system gives to others."""
    for first in range(21_000 + os.getpid() % 5_000, 32_000, num_ports):
        with contextlib.ExitStack() as listeners:
            try:
                for port in range(first, first + num_ports):
                    listeners.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            yield f"{first}-{first + num_ports - 1}"
            return
    raise AssertionError("no port is free")


def free_ports(num_ports: int) -> str:
    """Nobody listens at any of them, for now."""
    with taken_ports(num_ports) as ports:
        return ports
