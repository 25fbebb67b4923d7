"""Finds ranges of loopback ports, for tests that need to name some."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

__all__ = ["free_ports", "taken_ports"]


@contextlib.contextmanager
def taken_ports(num_ports: int) -> Iterator[str]:
    """Listens at num_ports consecutive ports, and yields them as text. They are below the ports that the
    system chooses for other sockets.
    """
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
    """Returns a range of ports at which no process listens now."""
    with taken_ports(num_ports) as ports:
        return ports
