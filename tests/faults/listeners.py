"""Finds the TCP sockets on which a process and its children listen, in the kernel's tables."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["listening_addresses"]

_LISTEN = "0A"
_LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listening_addresses(pid: int) -> dict[str, bool]:
    """Returns the addresses (hexadecimal address:port) at which the process or a child listens.

    The value of each address says whether only this machine can reach it.
    """
    inodes = {inode for each in _family(pid) for inode in _sockets_of(each)}
    found: dict[str, bool] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                found[fields[1]] = fields[1].split(":")[0] in _LOOPBACK
    return found


def _family(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return [pid, *(member for child in children for member in _family(child))]


def _sockets_of(pid: int) -> set[str]:
    inodes = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    return inodes
