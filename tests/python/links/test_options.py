"""Tests the options of links, made from run()'s arguments transport, keys, bind and insecure."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pipedream.common.agreement import settings_of
from pipedream.links.keys import CurveKeys, save_keys
from pipedream.links.options import TRANSPORTS, LinkOptions, make_link_options

_KEYS = CurveKeys("p" * 40, "s" * 40, ("p" * 40,))
_ELSEWHERE = "192.0.2.7"


def _links(several_machines: bool = False, **given: Any) -> LinkOptions:
    defaults: dict[str, Any] = {
        "transport": "auto",
        "codec": None,
        "keys": None,
        "bind": None,
        "ports": None,
        "insecure": False,
    }
    return make_link_options(**(defaults | given), peer_timeout_s=3.0, several_machines=several_machines)


def test_the_default_is_loopback_and_every_worker_beats() -> None:
    arguments = _links().core_arguments()
    assert (arguments["bind_host"], arguments["keys"], arguments["insecure"]) == ("127.0.0.1", None, False)
    assert (arguments["beats"], arguments["peer_timeout_s"]) == (True, 3.0)


def test_the_ports_are_the_arguments_else_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _links().core_arguments()["ports"] is None
    monkeypatch.setenv("PIPEDREAM_PORTS", "29600-29620")
    assert _links().core_arguments()["ports"] == (29600, 29620)
    assert _links(ports="7000-7000").core_arguments()["ports"] == (7000, 7000)
    monkeypatch.setenv("PIPEDREAM_PORTS", "some")
    with pytest.raises(ValueError, match=r"^PIPEDREAM_PORTS is 'some': give the first port and the last"):
        _links()


def test_memory_is_shared_but_where_the_wire_is_asked_for() -> None:
    shares = {name: _links(transport=name).core_arguments()["shares_memory"] for name in TRANSPORTS}
    assert shares == {"auto": True, "shm": True, "ipc": True, "tcp": False, "zmq": False}


def test_devices_are_written_to_where_nothing_else_is_asked_for() -> None:
    places = {name: _links(transport=name).places_on_devices for name in TRANSPORTS}
    assert places == {"auto": True, "shm": False, "ipc": True, "tcp": False, "zmq": False}


def test_ipc_refuses_a_pair_that_cannot_and_auto_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    ends, why = "stage 0 (rank 0) and stage 1 (rank 1)", "cuda:0 has no peer access to cuda:1"
    with caplog.at_level(logging.INFO, logger="pipedream"):
        _links(transport="auto").check_reach(ends, why)
        _links(transport="ipc").check_reach(ends, "")
    assert [record.getMessage() for record in caplog.records] == [
        f"{ends}: not by cuda ipc: {why}",
        f"{ends}: cuda ipc",
    ]
    with pytest.raises(ValueError) as caught:
        _links(transport="ipc").check_reach(ends, why)
    for word in ("transport is 'ipc'", ends, why, "'auto'"):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_address_needs_keys_or_insecure() -> None:
    with pytest.raises(ValueError) as caught:
        _links(bind=_ELSEWHERE)
    for word in (f"bind is '{_ELSEWHERE}'", "not loopback", "keys=", "`pipedream keys`", "insecure=True"):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    arguments = _links(bind=_ELSEWHERE, keys=_KEYS).core_arguments()
    assert arguments["bind_host"] == _ELSEWHERE
    assert arguments["keys"] == ("p" * 40, "s" * 40, ["p" * 40])


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    save_keys(_KEYS, tmp_path / "keys.json")
    assert _links(keys=tmp_path / "keys.json").keys == _KEYS


def test_insecure_is_logged_where_it_opens_something_and_only_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        _links(insecure=True)
        _links(insecure=True, bind=_ELSEWHERE, keys=_KEYS)
        monkeypatch.setenv("LOCAL_RANK", "1")  # only the first worker of a machine logs it
        _links(insecure=True, bind=_ELSEWHERE)
    assert not caplog.records
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _links(insecure=True, bind=_ELSEWHERE).core_arguments()["insecure"] is True
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"listening on {_ELSEWHERE} without keys" in record.getMessage()


def test_insecure_is_a_bool() -> None:
    with pytest.raises(TypeError, match="insecure is 1: give True or False"):
        _links(insecure=1)


def test_several_machines_listen_where_the_master_is_reached_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "master")
    monkeypatch.setattr("pipedream.links.options.route_address", lambda host: {"master": _ELSEWHERE}[host])
    assert _links(True, keys=_KEYS).bind_host == _ELSEWHERE
    assert _links(True, keys=_KEYS, bind="127.0.0.1").bind_host == "127.0.0.1"
    with pytest.raises(
        ValueError, match=rf"several machines.*listen on {_ELSEWHERE} here.*keys=.*insecure=True"
    ):
        _links(True)
    monkeypatch.setattr("pipedream.links.options.route_address", lambda host: "127.0.1.1")
    with pytest.raises(ValueError, match="MASTER_ADDR is 'master', which is loopback here"):
        _links(True, keys=_KEYS)


def test_settings_tell_ranks_apart_without_a_secret() -> None:
    settings = settings_of(_links(keys=_KEYS, codec="topk", bind="127.0.0.2"))
    assert settings == {
        "transport": "auto",
        "codec": {"activations": "topk:0.01", "gradients": "topk:0.01"},
        "keys": "given",
        "peer_timeout": 3.0,
    }
    assert settings_of(_links()) == {"transport": "auto", "codec": None, "keys": None, "peer_timeout": 3.0}


def _check(links: LinkOptions, public: str | None = None, machine: str = "", neighbour: bool = True) -> None:
    introduction = links.introduction() | ({"public_key": public} if public else {})
    introduction |= {"machine": machine} if machine else {}
    links.check_peer("stage 1 (rank 1)", introduction, shares_memory=neighbour, ends="stages 0 and 1")


def test_a_peer_whose_key_is_not_allowed_is_named() -> None:
    links = _links(keys=_KEYS)
    assert links.checks_peers
    _check(links)
    with pytest.raises(
        ValueError, match=r"public key of stage 1 \(rank 1\), q{40}, is not among the allowed"
    ):
        _check(links, "q" * 40)
    assert "s" * 40 not in str(links.introduction())


def test_shm_refuses_a_neighbour_on_another_machine_and_nobody_else() -> None:
    _check(_links(transport="shm"))
    _check(_links(transport="shm"), machine="elsewhere", neighbour=False)
    assert not _links(transport="auto").checks_peers
    with pytest.raises(ValueError, match="'shm', but stages 0 and 1 are on two machines"):
        _check(_links(transport="shm"), machine="elsewhere")


def test_shm_refuses_a_pair_that_travels_otherwise_and_auto_does_not() -> None:
    channels = {"activations": "stage 0 (rank 0) and stage 1 (rank 1)"}
    _links(transport="shm").check_transports(channels, {"activations": "shared memory"})
    _links(transport="auto").check_transports(channels, {"activations": "zmq/tcp"})
    with pytest.raises(ValueError) as caught:
        _links(transport="shm").check_transports(channels, {"activations": "zmq/tcp"})
    for word in ("transport is 'shm'", "stage 0 (rank 0) and stage 1 (rank 1)", "zmq/tcp", "'auto'"):
        assert word in str(caught.value)


@pytest.mark.parametrize(("value", "wanted"), [(None, False), ("0", False), ("1", True)])
def test_payloads_are_checksummed_when_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool
) -> None:
    monkeypatch.delenv("PIPEDREAM_CHECKSUMS", raising=False)
    if value is not None:
        monkeypatch.setenv("PIPEDREAM_CHECKSUMS", value)
    assert LinkOptions().core_arguments()["checksums"] is wanted


def test_a_checksum_wish_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEDREAM_CHECKSUMS", "yes")
    with pytest.raises(ValueError, match="PIPEDREAM_CHECKSUMS is 'yes': use 1 or 0"):
        LinkOptions().core_arguments()
