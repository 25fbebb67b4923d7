"""Tests the address that a worker listens on."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from pipedream.links.addresses import check_reachable, is_loopback, parse_ports, resolve_bind, route_address


def test_an_address_stays_and_names_become_addresses() -> None:
    assert resolve_bind("127.0.0.1") == resolve_bind("localhost") == resolve_bind("lo") == "127.0.0.1"
    assert resolve_bind("192.0.2.7") == "192.0.2.7"


def test_the_loopback_net_is_loopback_and_nothing_else() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("127.3.2.1")
    assert not is_loopback("128.0.0.1") and not is_loopback("10.0.0.1")


@pytest.mark.parametrize(
    ("bind", "words"),
    [
        ("nowhere7", ("'nowhere7'", "neither an address nor an interface", "lo")),
        ("10.0.0.1:5000", ("'10.0.0.1:5000'", "neither an address")),
        ("0.0.0.0", ("'0.0.0.0'", "no address that others can connect to")),
        ("224.0.0.1", ("'224.0.0.1'", "no address that others can connect to")),
        ("::1", ("'::1'", "IPv4")),
    ],
)
def test_what_cannot_be_bound_is_refused(bind: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_bind(bind)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ("29600", "give the first port and the last, such as '29600-29620'"),
        ("", "give the first port"),
        ("-1-5", "give the first port"),
        ("1-2-3", "give the first port"),
        ("0-5", "ports are 1 to 65535"),
        ("29620-29600", "the last comes last"),
        ("65000-65536", "ports are 1 to 65535"),
    ],
)
def test_a_range_of_ports_that_is_none_is_refused(ports: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_ports("ports", ports)
    assert str(caught.value).startswith(f"ports is {ports!r}: ") and words in str(caught.value)


def test_ports_are_a_range_as_text() -> None:
    assert parse_ports("ports", " 29600 - 29620 ") == (29600, 29620)
    with pytest.raises(TypeError, match=r"^ports is 29600: give a range of ports as text"):
        parse_ports("ports", 29600)  # type: ignore[arg-type]


@pytest.mark.parametrize("bind", ["", 5, True])
def test_what_is_no_name_is_a_type_error(bind: Any) -> None:
    with pytest.raises(TypeError, match=r"bind is .*: give an address of this machine"):
        resolve_bind(bind)


def test_every_interface_gives_its_own_address_or_says_that_it_has_none() -> None:
    for _, name in socket.if_nameindex():
        try:
            address = resolve_bind(name)
        except ValueError as error:
            assert f"bind is {name!r}, an interface without an IPv4 address" in str(error)
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))  # only an address of this machine can be bound


def test_the_route_to_this_machine_is_loopback_which_others_cannot_reach() -> None:
    assert route_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"MASTER_ADDR is 'localhost', which is loopback here.*give bind="):
        check_reachable(route_address("localhost"), "localhost")
    check_reachable("192.0.2.7", "elsewhere")


def test_a_master_without_a_route_is_named() -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR is 'no host', to which there is no route"):
        route_address("no host")
