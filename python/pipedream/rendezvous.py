"""How the workers of a run find each other: a c10d store, and keys of this run and incarnation only.

Used before the first minibatch and after the last, never in between. The store has no authentication:
nothing secret goes through it, and nothing that came from it is unpickled.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .errors import PeerLost, PipelineError

__all__ = ["Rendezvous", "connect_store", "host_store", "torchrun_store"]

_POLL_PERIOD_S = 0.02
_STORE_TIMEOUT = timedelta(seconds=60)
_FAILED_KEY = "failed"


def host_store() -> tuple[dist.Store, int]:
    """A store on a free port of the loopback interface, and the port."""
    # By itself the store would listen on all interfaces, whatever its host name.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            None,
            True,
            _STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
            use_libuv=False,
        )
    return store, port


def connect_store(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, None, False, _STORE_TIMEOUT, wait_for_workers=False)


def torchrun_store() -> dist.Store:
    """The store that torchrun offers, without a process group."""
    store: dist.Store = next(iter(dist.rendezvous("env://")))[0]
    return store


class Rendezvous:
    """Named JSON values of one run. Owned by one thread of each process."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, store)

    def publish(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def fail(self, message: str) -> None:
        """Tells everyone who waits here that the run is over, and why. The first message stays."""
        if not self._store.check([_FAILED_KEY]):
            self.publish(_FAILED_KEY, message)

    def raise_if_failed(self) -> None:
        """Raises PipelineError with the message of whoever called fail()."""
        if self._store.check([_FAILED_KEY]):
            raise PipelineError(json.loads(self._store.get(_FAILED_KEY)))

    def wait_for(self, keys: list[str], timeout_s: float, describe: Callable[[list[str]], str]) -> list[Any]:
        """The values of the keys once all are there.

        Raises PipelineError with the message of whoever failed meanwhile, and PeerLost after timeout_s,
        naming by `describe` the keys that are missing.
        """
        deadline_s = time.monotonic() + timeout_s
        missing = list(keys)
        while True:
            missing = [key for key in missing if not self._store.check([key])]
            if not missing:
                return [json.loads(self._store.get(key)) for key in keys]
            self.raise_if_failed()
            if time.monotonic() > deadline_s:
                raise PeerLost(f"{describe(missing)} within {timeout_s:g} s")
            time.sleep(_POLL_PERIOD_S)
