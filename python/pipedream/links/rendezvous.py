"""The rendezvous of a run: its workers exchange addresses and other JSON values through a c10d store of
torch.

All keys begin with a prefix that no other run and no restart of this run uses. Workers use the store before
the first minibatch and after the last. In between they use it only for rare events, such as answers of
callbacks and checkpoints of replicas. The store has no authentication, so no secret key goes through it, and
nothing that comes from it is unpickled.

Every Rendezvous has a thread of its own, the only one that talks to the store. So a caller can stop waiting
when the store's host is gone, and signs of life (liveness.py) go on while the worker computes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pipedream.common.errors import PeerLost, PipelineError, one_line
from pipedream.links.addresses import LOOPBACK, is_loopback
from pipedream.links.liveness import LivenessMonitor, Sign, sign_period_s

__all__ = ["START_TIMEOUT_S", "Rendezvous", "connect_store", "host_store", "torchrun_rendezvous"]

START_TIMEOUT_S = 600.0
"""Seconds that a rank waits for ranks that have not joined, because those may be profiling or importing
torch."""
_LOOKS_AGAIN_MIN_S, _LOOKS_AGAIN_MAX_S = 0.001, 0.02
_STORE_TIMEOUT = timedelta(seconds=60)
_LAST_SIGN_S = 1.0
"""The most seconds that a rank with open links waits until its last sign is in the store. It is also the
time-out of the test of the loopback interface."""
_FAILED_KEY = "failed"
_LINGER_S = 5.0
"""The most seconds that the store's host waits after a failure, until no other rank needs the store
(_needs_no_store)."""

_T = TypeVar("_T")


def host_store() -> tuple[dist.Store, int]:
    """Makes a store on a free port of the loopback interface. Returns the store and the port.

    Raises PipelineError if the loopback interface is down, because torch would try to connect for minutes."""
    _check_loopback()
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        return _store_at(listener, LOOPBACK, port), port


def _check_loopback() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        try:
            socket.create_connection(listener.getsockname(), timeout=_LAST_SIGN_S).close()
        except OSError as error:
            raise PipelineError(
                f"local workers meet at {LOOPBACK}, which cannot be reached ({one_line(error)}): bring the"
                " loopback interface up (ip link set lo up)"
            ) from None


def _store_at(listener: socket.socket, host: str, port: int) -> dist.Store:
    """Makes a store that listens on `listener`, and connects this process to it at host:port. Without a
    listener TCPStore would listen on all interfaces.
    """
    descriptor = os.dup(listener.fileno())
    try:
        return dist.TCPStore(
            host,
            port,
            None,
            True,
            _STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,  # a process group that is made later may share the store
            master_listen_fd=descriptor,  # the store closes the descriptor
            use_libuv=False,
        )
    except BaseException:
        # The store may have closed the descriptor already. Another file may have its number by now.
        with contextlib.suppress(OSError):
            if os.path.sameopenfile(descriptor, listener.fileno()):
                os.close(descriptor)
        raise


def connect_store(port: int) -> dist.Store:
    return dist.TCPStore(LOOPBACK, port, None, False, _STORE_TIMEOUT, wait_for_workers=False)


def torchrun_rendezvous(prefix: str, timeout_s: float) -> Rendezvous:
    """Joins the store of torchrun's agent. Under a launcher without such a store, rank 0 hosts the store.

    No process group is needed. Raises ValueError if MASTER_ADDR or MASTER_PORT is missing, or if other
    machines cannot reach MASTER_ADDR. Raises PeerLost if no store answers there within timeout_s, and
    PipelineError if rank 0 cannot host the store.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = _from_environment("MASTER_ADDR"), int(_from_environment("MASTER_PORT"))
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = "torchrun's agent" if has_agent else "rank 0"
    hosts = rank == 0 and not has_agent
    try:
        if hosts:
            store = _hosted_at(*address)
        else:
            store = dist.TCPStore(*address, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
            store.set_timeout(_STORE_TIMEOUT)
    except (OSError, dist.DistError) as error:
        where = f"{address[0]}:{address[1]} (MASTER_ADDR and MASTER_PORT)"
        if hosts:
            raise PipelineError(
                f"rank 0 cannot host the store of the run at {where}: {_why_not_there(error)}"
            ) from None
        raise PeerLost(f"no store answers at {where} within {timeout_s:g} s: {host} did not start") from None
    return Rendezvous(store, prefix, rank=rank, world_size=world_size, host=host, hosts=hosts)


@functools.cache  # keeps the store until this process ends, because other ranks may still read from it
def _hosted_at(host: str, port: int) -> dist.Store:
    """Returns the store that this process hosts at host:port. A process group of this process may share the
    store. Raises OSError or DistError if the store cannot listen there."""
    try:
        listener = _listener_at(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # If a process group of this process uses the port, this call joins the group's store. If another
        # process uses the port, this call fails.
        return dist.TCPStore(
            host, port, None, True, _STORE_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
    with listener:
        _check_others_reach(listener.getsockname()[0], host)
        return _store_at(listener, host, port)


def _check_others_reach(address: str, host: str) -> None:
    world_size = os.environ.get("WORLD_SIZE")
    if is_loopback(address) and os.environ.get("LOCAL_WORLD_SIZE", world_size) != world_size:
        raise ValueError(
            f"MASTER_ADDR is {host!r}, which is loopback at rank 0, so that other machines could not reach"
            " the store of the run: set it to rank 0's address"
        )


def _why_not_there(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return "that is no address of this machine; give rank 0's, which the others reach"
    return one_line(error)


def _listener_at(host: str, port: int) -> socket.socket:
    """Listens on IPv4 if the host has such an address, else on IPv6."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    # The backlog is large because all ranks connect at the same moment.
    return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)


def _from_environment(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"RANK is set, but {name} is not: start with torchrun, or set it")
    return value


class Rendezvous:
    """Exchanges JSON values between the ranks of one run, by key. One thread of each process owns it and must
    close() it."""

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        *,
        rank: int | None = None,
        world_size: int = 0,
        host: str = "the launcher",
        hosts: bool = False,
    ) -> None:
        """rank: this process's rank; None for the caller of local workers. host: describes in errors the
        process that hosts the store. hosts: whether this process hosts the store."""
        self._store = dist.PrefixStore(prefix, store)
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._hosts = hosts
        self._patience_s = _STORE_TIMEOUT.total_seconds()
        self._phase = "starting"
        self._store_is_gone = ""  # becomes the error's text when the store is gone
        self._has_failed = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._signs: _Signs | None = None  # the thread below uses it, too
        self._thread = threading.Thread(target=self._serve, name="pipedream-rendezvous", daemon=True)
        self._thread.start()

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the rendezvous; a second call does nothing. If the run has failed, the process that hosts
        the store first waits up to 5 s until all ranks have read why or have open links, because the store
        ends with this process."""
        if self._hosts and self._has_failed:
            self._linger()
        self._hosts = False
        self._calls.put(None)
        self._thread.join(0 if self._store_is_gone else self._patience_s)

    # JSON values.

    def publish(self, key: str, value: Any) -> None:
        self._ask(lambda store: store.set(key, json.dumps(value)))

    def forget(self, key: str) -> None:
        self._ask(lambda store: store.delete_key(key))

    def read(self, keys: list[str]) -> list[Any] | None:
        """Returns the values of these keys, or None if one of the keys is not in the store yet."""
        return self._ask(
            lambda store: [json.loads(store.get(key)) for key in keys] if store.check(keys) else None
        )

    def store_for(self, group: str) -> dist.Store:
        """Returns a store for a process group of this run. The returned store has its own connection, so
        another thread may use it."""
        return dist.PrefixStore(group, self._ask(lambda store: store.clone()))  # type: ignore[attr-defined]

    def fail(self, message: str) -> None:
        """Tells every rank that waits in the rendezvous that the run has failed, and why. Only the first
        message of a run counts."""
        self._has_failed = True

        def tell(store: dist.Store) -> None:
            if not store.check([_FAILED_KEY]):
                store.set(_FAILED_KEY, json.dumps(message))
            self._note_heard(store)

        self._ask(tell)

    def raise_if_failed(self) -> None:
        """Raises PipelineError with the message that some rank gave to fail(). Raises PeerLost if a rank that
        has joined gives no sign of life, or if the store's host is gone."""

        self._raise_failure(self._ask(self._read_failure))

    def _read_failure(self, store: dist.Store) -> str | None:
        if not store.check([_FAILED_KEY]):
            return None
        message: str = json.loads(store.get(_FAILED_KEY))
        self._note_heard(store)
        return message

    def _raise_failure(self, message: str | None) -> None:
        if message is not None:
            raise PipelineError(message)
        lost = None if self._signs is None else self._signs.describe_lost()
        if lost is not None:
            raise PeerLost(lost)

    def wait_for(
        self,
        keys: list[str],
        timeout_s: float,
        describe: Callable[[list[str]], str],
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Waits until all keys are in the store, and returns their values.

        `meanwhile` is called again and again during the wait; its error ends the wait. So does the failure of
        the run, or a lost rank. After timeout_s, raises PeerLost with the text that `describe` makes of the
        missing keys. The timeout no longer counts once all ranks have joined, because then signs of life show
        which ranks live.
        """
        begin_s = time.monotonic()
        missing = list(keys)

        def look(store: dist.Store) -> tuple[list[str], str | None]:
            absent = [key for key in missing if not store.check([key])]
            return absent, self._read_failure(store) if absent else None

        # This loop polls, because the store's own wait() does not end when the run fails, a rank is lost or
        # `meanwhile` raises. wait() also holds the connection, so that signs of life would have to wait.
        while True:
            missing, failure = self._ask(look)
            if not missing:
                return self._ask(lambda store: [json.loads(store.get(key)) for key in keys])
            meanwhile()
            self._raise_failure(failure)
            waited_s = time.monotonic() - begin_s
            if waited_s > timeout_s and not self._all_joined():
                raise PeerLost(f"{describe(missing)} within {timeout_s:g} s")
            _pause(waited_s)

    # Signs of life.

    def _all_joined(self) -> bool:
        return self._signs is not None and self._signs.has_heard_all()

    def join(self, peer_timeout_s: float) -> None:
        """Starts to give this rank's signs of life, and to read the signs of the other ranks."""
        assert self._rank is not None
        self._patience_s = peer_timeout_s
        self._signs = _Signs(self._rank, self._world_size, peer_timeout_s)
        self.enter(self._phase)  # wakes the store's thread, which from now on gives the signs

    def enter(self, phase: str) -> None:
        """Sets the phase that this rank is in, for errors of other ranks. With phase "opening links" such an
        error says "rank 2 gave no sign of life for 15 s while opening links"."""
        self._phase = phase
        signs = self._signs
        if signs is not None:
            self._ask(lambda store: signs.enter(store, phase))

    def leave(self) -> None:
        """Gives the last sign of life. Call it when this rank's links are open: from then on the links show
        whether a worker is lost. A failure is ignored, because this rank no longer needs the store."""
        signs, self._signs = self._signs, None
        if signs is not None:
            concurrent.futures.wait([self._post(signs.end)], _LAST_SIGN_S)

    def _linger(self) -> None:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        begin_s = time.monotonic()

        def waiting(store: dist.Store) -> list[int]:
            return [rank for rank in others if not _needs_no_store(store, rank)]

        try:
            # When a rank no longer needs the store, one of two keys says so (_needs_no_store). The store's
            # own wait() would wait for both keys, so this loop polls.
            while self._ask(waiting) and time.monotonic() - begin_s < _LINGER_S:
                _pause(time.monotonic() - begin_s)
        except PeerLost:
            pass  # the store is gone, so there is nothing to wait for

    def _note_heard(self, store: dist.Store) -> None:
        if self._rank is not None:
            store.set(_heard_key(self._rank), "")

    # The store's thread.

    def _ask(self, call: Callable[[dist.Store], _T]) -> _T:
        """Runs the call on the store's thread and returns its result. Raises PeerLost if the store is gone or
        does not answer."""
        if self._store_is_gone:
            raise PeerLost(self._store_is_gone)
        answer = self._post(call)
        try:
            return answer.result(self._patience_s)
        except concurrent.futures.TimeoutError:
            how = f"has not answered for {self._patience_s:g} s"
        except dist.DistError:
            how = "is gone"
        self._store_is_gone = f"{self._host}, which hosts the store of the run, {how} while {self._phase}"
        raise PeerLost(self._store_is_gone) from None

    def _post(self, call: Callable[[dist.Store], _T]) -> concurrent.futures.Future[_T]:
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def perform() -> None:
            try:
                answer.set_result(call(self._store))
            except BaseException as error:
                answer.set_exception(error)

        self._calls.put(perform)
        return answer

    def _serve(self) -> None:
        while True:
            signs = self._signs
            timeout_s = None if signs is None else max(0.0, signs.due_s - time.monotonic())
            try:
                call = self._calls.get(timeout=timeout_s)
            except queue.Empty:
                assert signs is not None
                signs.give(self._store)
                continue
            if call is None:
                return
            call()


def _pause(waited_s: float) -> None:
    """Sleeps before the next poll of a wait. The sleep is an eighth of the time waited so far, but at least 1
    ms and at most 20 ms. So a short wait ends soon, and a long wait costs little."""
    time.sleep(min(max(waited_s / 8, _LOOKS_AGAIN_MIN_S), _LOOKS_AGAIN_MAX_S))


class _Signs:
    """Gives this rank's signs of life, and reads the other ranks' signs. Only the store's thread calls it;
    any thread may call describe_lost() and has_heard_all()."""

    def __init__(self, rank: int, world_size: int, peer_timeout_s: float) -> None:
        self._rank = rank
        self._unheard = [other for other in range(world_size) if other != rank]
        self._heard: list[int] = []
        self._peer_timeout_s = peer_timeout_s
        self._liveness = LivenessMonitor(peer_timeout_s)
        self._count = 0
        self._lost: str | None = None
        self._phase = ""
        self.due_s = 0.0
        """The time of the next sign, on time.monotonic()."""

    def describe_lost(self) -> str | None:
        return self._lost

    def has_heard_all(self) -> bool:
        return not self._unheard

    def enter(self, store: dist.Store, phase: str) -> None:
        """Gives a sign with the new phase at once, because this rank may hang in that phase."""
        self._phase = phase
        self._say(store)

    def end(self, store: dist.Store) -> None:
        self._say(store, is_done=True)

    def give(self, store: dist.Store) -> None:
        """Gives one sign, and reads the signs of the other ranks."""
        try:
            self._say(store)
            self._look(store)
        except dist.DistError:
            # The store is gone, so this rank gives no more signs. The next _ask() raises PeerLost.
            self.due_s = float("inf")

    def _say(self, store: dist.Store, *, is_done: bool = False) -> None:
        self._count += 1
        sign = Sign(self._count, self._peer_timeout_s, self._phase, is_done)
        store.set(_sign_key(self._rank), sign.to_json())
        self.due_s = time.monotonic() + sign_period_s(self._peer_timeout_s)

    def _look(self, store: dist.Store) -> None:
        new = [rank for rank in self._unheard if store.check([_sign_key(rank)])]
        self._heard += new
        self._unheard = [rank for rank in self._unheard if rank not in new]
        if not self._heard:
            return
        texts = store.multi_get([_sign_key(rank) for rank in self._heard])
        signs = {rank: Sign.from_json(text) for rank, text in zip(self._heard, texts, strict=True)}
        self._liveness.observe(signs, time.monotonic())
        self._lost = self._liveness.describe_lost()


def _sign_key(rank: int) -> str:
    return f"signs of life/{rank}"


def _heard_key(rank: int) -> str:
    return f"{_FAILED_KEY}/heard/{rank}"


def _needs_no_store(store: dist.Store, rank: int) -> bool:
    """Whether the rank has read why the run failed, or has open links. Open links show the rank that the run
    has failed."""
    if store.check([_heard_key(rank)]):
        return True
    return store.check([_sign_key(rank)]) and Sign.from_json(store.get(_sign_key(rank))).is_done
