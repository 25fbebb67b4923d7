"""The pulse of a worker: a thread that tells the core, again and again, that the interpreter runs.

The core's transport thread says BEAT to the peers and needs no interpreter, so a beat proves the process
alone. The pulse needs the GIL: where some code holds it for good the pulse stops, beats go on without one,
and the peers give the worker up after peer_timeout. Owned by the thread that owns the core.
"""

from __future__ import annotations

import threading
from types import TracebackType

from pipedream import _core

__all__ = ["Pulse"]

# The core wants one in peer_timeout / 8 at least; twice as many, as the thread may have to wait for the GIL.
_PULSES_PER_TIMEOUT = 16


class Pulse:
    """Beats from its making to stop(). Use as a context manager around the core's life, close() included:
    the peers wait for what lingers."""

    def __init__(self, core: _core.Worker, peer_timeout_s: float) -> None:
        self._core = core
        self._period_s = peer_timeout_s / _PULSES_PER_TIMEOUT
        self._stopping = threading.Event()
        core.pulse()
        self._thread = threading.Thread(target=self._beat, name="pipedream-pulse", daemon=True)
        self._thread.start()

    def __enter__(self) -> Pulse:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Idempotent. Afterwards the core is not called any more."""
        self._stopping.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._core.pulse()
