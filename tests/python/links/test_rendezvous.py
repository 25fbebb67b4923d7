"""Tests values, failures and signs of life that pass through a store."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed as dist
from pipedream import PeerLost, PipelineError
from pipedream.links import rendezvous as module
from pipedream.links.rendezvous import Rendezvous, connect_store, host_store

_DEADLINE_S = 60.0
_TIMEOUT_S = 0.4


class Ranks:
    """The ranks of one run, all in this process. Each rank has its own connection to the store."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.store, self._port = host_store()

    def rank(self, rank: int, *, world_size: int = 2, hosts: bool = False) -> Rendezvous:
        store = connect_store(self._port)
        rendezvous = Rendezvous(store, "run", rank=rank, world_size=world_size, host="rank 0", hosts=hosts)
        return self._stack.enter_context(rendezvous)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack)


def _no_word(keys: list[str]) -> str:
    return f"no {keys}"


def _error_after_a_while(rendezvous: Rendezvous) -> Exception:
    deadline_s = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline_s:
        try:
            rendezvous.raise_if_failed()
        except PipelineError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


def test_values_are_waited_for_and_arrive_as_they_are(ranks: Ranks) -> None:
    one, other = ranks.rank(0), ranks.rank(1)
    one.publish("a", {"b": [1, None, "é"]})
    timer = threading.Timer(0.05, lambda: one.publish("c", 2))
    timer.start()
    assert other.wait_for(["a", "c"], _DEADLINE_S, _no_word) == [{"b": [1, None, "é"]}, 2]
    timer.join()


def test_what_is_missing_is_named(ranks: Ranks) -> None:
    one = ranks.rank(0)
    one.publish("a", 1)
    with pytest.raises(PeerLost, match=r"no \['b', 'c'\] within 0.1 s"):
        one.wait_for(["a", "b", "c"], 0.1, _no_word)


def test_a_failure_is_heard_by_whoever_waits_and_the_first_one_stays(ranks: Ranks) -> None:
    one, other = ranks.rank(0), ranks.rank(1)
    one.fail("the first")
    other.fail("the second")
    for rendezvous in (one, other):
        with pytest.raises(PipelineError, match="the first"):
            rendezvous.wait_for(["a"], _DEADLINE_S, _no_word)


def test_a_rank_that_ends_before_its_links_are_open_is_lost(ranks: Ranks) -> None:
    one, other = ranks.rank(0), ranks.rank(1)
    for rendezvous in (one, other):
        rendezvous.join(_TIMEOUT_S)
    other.enter("opening links")
    other.close()
    error = _error_after_a_while(one)
    assert type(error) is PeerLost
    assert str(error) == "rank 1 gave no sign of life for 0.4 s while opening links"


def test_a_rank_whose_links_are_open_and_one_that_never_joins_are_not_lost(ranks: Ranks) -> None:
    one, other = ranks.rank(0, world_size=3), ranks.rank(1, world_size=3)
    for rendezvous in (one, other):
        rendezvous.join(_TIMEOUT_S)
    other.leave()
    other.close()
    with pytest.raises(PeerLost, match="no word within"):
        one.wait_for(["a"], 3 * _TIMEOUT_S, lambda _: "no word")


def test_a_rank_that_has_joined_is_waited_for_as_long_as_it_lives(ranks: Ranks) -> None:
    # A rank that has joined may be reading its first minibatch, which may take any time.
    one, other = ranks.rank(0), ranks.rank(1)
    for rendezvous in (one, other):
        rendezvous.join(_TIMEOUT_S)
    assert one._signs is not None
    deadline_s = time.monotonic() + _DEADLINE_S
    while not one._signs.has_heard_all() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    looks: list[int] = []

    def publish_after_some_looks() -> None:
        looks.append(1)
        if len(looks) == 5:
            other.publish("a", 1)

    assert one.wait_for(["a"], 0.0, _no_word, meanwhile=publish_after_some_looks) == [1]


def test_after_its_links_are_open_a_rank_says_nothing_to_the_store(ranks: Ranks) -> None:
    one = ranks.rank(0)
    one.join(_TIMEOUT_S)
    one.leave()
    one.raise_if_failed()  # the store answers only after it has done all earlier requests
    last = ranks.store.get("run/signs of life/0")
    time.sleep(2 * _TIMEOUT_S)
    assert ranks.store.get("run/signs of life/0") == last


def test_the_host_of_the_store_stays_until_the_others_have_heard_why(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The host's process ends next, and the store with it. The other ranks must first read why, and not only
    # find a broken connection.
    host, other, done = (ranks.rank(rank, world_size=3, hosts=rank == 0) for rank in range(3))
    done.join(_TIMEOUT_S)
    done.leave()  # its links are open and tell it of a failure, so the host need not wait for it
    heard: list[str] = []

    def hear(_: float) -> None:
        with pytest.raises(PipelineError) as caught:
            other.raise_if_failed()
        heard.append(str(caught.value))

    host.fail("a mistake")
    monkeypatch.setattr(time, "sleep", hear)  # sleep() is what the host does while it stays
    monkeypatch.setattr(module, "_LINGER_S", _DEADLINE_S)
    host.close()
    # more than once if the host looks again before the store has the rank's note
    assert set(heard) == {"a mistake"}


def test_the_host_of_the_store_does_not_stay_for_ever(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINGER_S", 0.1)
    host = ranks.rank(0, hosts=True)
    host.fail("a mistake")
    host.close()


def test_the_host_of_the_store_does_not_stay_when_all_went_well(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LINGER_S", float("inf"))
    ranks.rank(0, hosts=True).close()


class Silent:
    """A store whose host was stopped."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def check(self, _: list[str]) -> bool:
        self._over.wait()
        return False

    def set(self, _: str, __: str) -> None:
        pass


def test_a_store_that_does_not_answer_is_given_up_after_the_peer_timeout(ranks: Ranks) -> None:
    over = threading.Event()
    one = ranks.rank(1)
    one.join(_TIMEOUT_S)
    one.enter("agreeing on the plan")
    one._store = Silent(over)  # type: ignore[assignment]
    try:
        for _ in range(2):  # the second call fails at once
            with pytest.raises(PeerLost) as caught:
                one.wait_for(["a"], _DEADLINE_S, _no_word)
            assert str(caught.value) == (
                "rank 0, which hosts the store of the run, has not answered for 0.4 s"
                " while agreeing on the plan"
            )
    finally:
        over.set()


class Stalled:
    """A store that answers nothing until `over` is set, and then fails."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def set(self, _: str, __: str) -> None:
        self._over.wait()
        raise dist.DistStoreError("broken")


@pytest.mark.parametrize("breaks", [False, True], ids=["stalls", "breaks"])
def test_a_rank_whose_links_are_open_does_without_the_store(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    monkeypatch.setattr(module, "_LAST_SIGN_S", _DEADLINE_S if breaks else 0.1)
    over = threading.Event()
    one = ranks.rank(0)
    one.join(_TIMEOUT_S)
    one._store = Stalled(over)  # type: ignore[assignment]
    if breaks:
        over.set()
    try:
        one.leave()
    finally:
        over.set()


def test_whoever_waits_may_stop_waiting(ranks: Ranks) -> None:
    def stop() -> None:
        raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        ranks.rank(0).wait_for(["a"], _DEADLINE_S, _no_word, meanwhile=stop)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_an_environment_that_does_not_say_where_the_store_is(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"RANK is set, but {name} is not: start with torchrun"):
        module.torchrun_rendezvous("run", 0.1)


def test_a_store_that_is_not_there_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(PeerLost) as caught:
        module.torchrun_rendezvous("run", 0.1)
    assert "no store answers at 127.0.0.1:1 (MASTER_ADDR and MASTER_PORT)" in str(caught.value)
    assert "rank 0 did not start" in str(caught.value)
    assert "\n" not in str(caught.value)


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_store_that_cannot_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_once(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("before it has taken the descriptor over")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = _num_descriptors()
        # The listener has another port than 1, so TCPStore fails. It has then closed the descriptor already.
        with pytest.raises(dist.DistError, match="bound to port"):
            module._store_at(listener, "127.0.0.1", 1)
        assert _num_descriptors() == before
        monkeypatch.setattr(dist, "TCPStore", fail_at_once)
        with pytest.raises(dist.DistNetworkError, match="taken the descriptor over"):
            module._store_at(listener, "127.0.0.1", 1)
        assert _num_descriptors() == before


def test_a_descriptor_that_the_store_has_closed_itself_is_not_closed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reused: list[int] = []

    def fail(*_: object, master_listen_fd: int, **__: object) -> None:
        os.close(master_listen_fd)
        reused.append(os.open(os.devnull, os.O_RDONLY))  # another thread gets the closed descriptor's number
        assert reused == [master_listen_fd]
        raise dist.DistNetworkError("no memory")

    monkeypatch.setattr(dist, "TCPStore", fail)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(dist.DistNetworkError):
        module._store_at(listener, "127.0.0.1", listener.getsockname()[1])
    os.close(reused[0])  # raises an error if it was closed already


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _store_of_a_process_group(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, multi_tenant=True)


@pytest.mark.parametrize("comes_first", [True, False])
def test_the_store_of_rank_0_is_shared_with_a_process_group(comes_first: bool) -> None:
    port = _free_port()
    makers = [_store_of_a_process_group, lambda port: module._hosted_at("127.0.0.1", port)]
    stores = [make(port) for make in (makers if comes_first else makers[::-1])]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    # closes this store, because a process group's store listens on all interfaces
    module._hosted_at.cache_clear()


def _at(monkeypatch: pytest.MonkeyPatch, address: str, port: int, **more: str) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)} | more
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_rank_0_says_why_it_cannot_host_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    where = r"rank 0 cannot host the store of the run at {}:\d+ \(MASTER_ADDR and MASTER_PORT\): "
    _at(monkeypatch, "192.0.2.251", _free_port())  # 192.0.2.0/24 (TEST-NET-1) belongs to nobody
    with pytest.raises(
        PipelineError, match=where.format("192.0.2.251") + "that is no address of this machine"
    ):
        module.torchrun_rendezvous("run", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as somebody_elses:
        _at(monkeypatch, "127.0.0.1", somebody_elses.getsockname()[1])
        with pytest.raises(PipelineError, match=where.format("127.0.0.1")) as caught:
            module.torchrun_rendezvous("run", 0.1)
    assert "\n" not in str(caught.value)


def test_a_store_on_loopback_is_of_no_use_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    _at(monkeypatch, "localhost", _free_port(), LOCAL_WORLD_SIZE="1")
    with pytest.raises(ValueError) as caught:
        module.torchrun_rendezvous("run", 0.1)
    assert str(caught.value) == (
        "MASTER_ADDR is 'localhost', which is loopback at rank 0, so that other machines could not reach the"
        " store of the run: set it to rank 0's address"
    )


def test_a_loopback_interface_that_is_down_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without a network may have no loopback interface. torch's store would then try to connect
    for more than a minute.
    """

    def connect(*_: Any, **__: Any) -> socket.socket:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(PipelineError, match=r"127\.0\.0\.1.*unreachable.*ip link set lo up"):
        host_store()
