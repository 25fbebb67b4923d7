"""A proxy for one TCP connection that cuts, stalls, delays or corrupts the bytes that it forwards. It has one
thread for each direction.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["Proxy", "corrupt_at", "cut_after", "delay", "stall_after"]

# Maps the number of bytes forwarded so far and the next bytes to the bytes to forward. None drops them.
Mischief = Callable[[int, bytes], "bytes | None"]


class CutError(Exception):
    """Ends the connection in both directions."""


def cut_after(num_bytes: int) -> Mischief:
    def mischief(num_forwarded: int, piece: bytes) -> bytes:
        if num_forwarded + len(piece) > num_bytes:
            raise CutError
        return piece

    return mischief


def stall_after(num_bytes: int) -> Mischief:
    """Returns a mischief that forwards nothing more after num_bytes. The proxy still reads, so that neither
    side sees a full socket.
    """
    has_stalled = False

    def mischief(num_forwarded: int, piece: bytes) -> bytes | None:
        nonlocal has_stalled
        has_stalled = has_stalled or num_forwarded + len(piece) > num_bytes
        return None if has_stalled else piece

    return mischief


def delay(seconds: float) -> Mischief:
    def mischief(_: int, piece: bytes) -> bytes:
        time.sleep(seconds)
        return piece

    return mischief


def corrupt_at(position: int) -> Mischief:
    """Returns a mischief that inverts the byte at this position."""

    def mischief(num_forwarded: int, piece: bytes) -> bytes:
        at = position - num_forwarded
        if not 0 <= at < len(piece):
            return piece
        return piece[:at] + bytes([piece[at] ^ 0xFF]) + piece[at + 1 :]

    return mischief


class Proxy:
    """Forwards between a client of `endpoint` and `target`, such as tcp://127.0.0.1:40001."""

    def __init__(self, target: str, mischief: Mischief) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._mischief = mischief
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            ways = [(near, far, self._mischief), (far, near, lambda _, piece: piece)]
            threads = [threading.Thread(target=self._forward, args=way) for way in ways]
            self._threads += threads
            for thread in threads:
                thread.start()

    def _forward(self, source: socket.socket, target: socket.socket, mischief: Mischief) -> None:
        num_forwarded = 0
        with contextlib.suppress(OSError, CutError):
            while piece := source.recv(1 << 16):
                changed = mischief(num_forwarded, piece)
                if changed is not None:
                    target.sendall(changed)
                    num_forwarded += len(piece)
        self._cut()

    def _cut(self) -> None:
        for open_socket in list(self._sockets):
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()
