"""Tests mistakes with transport, codec, keys and addresses, which are refused in one line. If one process can
see the mistake, it is refused before any worker starts. Otherwise it is refused with the same words at every
rank.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from farm import Farm
from mishaps import NUM_MINIBATCHES, model_with, run
from pipedream.links import options as links
from pipedream.links.keys import CurveKeys, write_key_file, write_key_folder
from ports import taken_ports
from refusals import assert_says, refused

_MODEL = model_with(None, stages=2)
_ELSEWHERE = "192.0.2.251"  # belongs to nobody: TEST-NET-1 (RFC 5737)


@pytest.fixture
def no_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr("pipedream.launch.runner.run_locally", start)


@pytest.mark.usefixtures("no_worker_starts")
def test_an_address_that_others_reach_without_keys() -> None:
    words = ("bind is '192.0.2.251'", "keys=", "`pipedream keys`", "insecure=True")
    refused(lambda: run(_MODEL, bind=_ELSEWHERE), ValueError, *words)
    refused(lambda: run(_MODEL, bind="0.0.0.0", insecure=True), ValueError, "'0.0.0.0'", "name one address")
    refused(lambda: run(_MODEL, bind="eth99"), ValueError, "'eth99'", "neither an address nor an interface")
    refused(lambda: run(_MODEL, bind=7), TypeError, "bind is 7")
    refused(lambda: run(_MODEL, ports="29600"), ValueError, "ports is '29600'", "the first port and the last")
    refused(lambda: run(_MODEL, ports=29600), TypeError, "ports is 29600", "'29600-29620'")
    refused(lambda: run(_MODEL, insecure="yes"), TypeError, "insecure is 'yes'", "True or False")


@pytest.mark.usefixtures("no_worker_starts")
def test_key_files_that_are_missing_open_to_others_or_broken(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    refused(lambda: run(_MODEL, keys=path), ValueError, str(path), "No such file", "`pipedream keys")
    write_key_file(path)
    for mode in (0o640, 0o604, 0o666):
        path.chmod(mode)
        refused(lambda: run(_MODEL, keys=path), ValueError, f"mode {mode:04o}", f"chmod 600 {path}")
    path.chmod(0o600)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"secret": fields["secret"][1:]}))
    with pytest.raises(ValueError) as caught:
        run(_MODEL, keys=path)
    assert str(caught.value) == f"{path}: secret is 39 characters: a key is 40 characters of Z85 text"
    refused(lambda: run(_MODEL, keys=True), TypeError, "keys is a bool", "`pipedream keys`")


@pytest.mark.usefixtures("no_worker_starts")
@pytest.mark.parametrize(
    ("codec", "kind", "words"),
    [
        ("int4", ValueError, ("'int4'", "none, bf16, fp16, int8, topk")),
        ("topk:2", ValueError, ("'topk:2'", "at most 1")),
        ({"activation": "bf16"}, ValueError, ("'activation'", "'activations', 'gradients'")),
        ({"activations": "bf61"}, ValueError, ("codec of activations", "'bf61'")),
        ({(0, 2): "bf16"}, ValueError, ("codec names 0->2", "stages 0 to 1")),
        ({(1, 2): "bf16"}, ValueError, ("codec names 1->2", "stages 0 to 1")),
        (8, TypeError, ("codec is a int", '"bf16"')),
    ],
    ids=str,
)
def test_codecs_and_pairs_that_are_not_there(
    codec: Any, kind: type[Exception], words: tuple[str, ...]
) -> None:
    refused(lambda: run(_MODEL, codec=codec), kind, *words)


@pytest.mark.usefixtures("no_worker_starts")
@pytest.mark.parametrize("codec", ["topk", {"gradients": "topk:0.1"}, {(1, 0): "topk:0.1"}], ids=str)
@pytest.mark.parametrize("autocast", ["float16", torch.float16])
def test_topk_of_gradients_whose_scale_changes(codec: Any, autocast: Any) -> None:
    words = ("topk:0.", "autocast is 'float16'", "use int8, or autocast='bfloat16'")
    refused(lambda: run(_MODEL, codec=codec, autocast=autocast), ValueError, *words)


@pytest.mark.parametrize("options", [{"codec": {"activations": "topk:0.5"}}, {"codec": "int8"}], ids=str)
def test_codecs_that_hold_no_gradient_back_go_with_a_loss_scale(options: dict[str, Any]) -> None:
    assert len(run(_MODEL, autocast="float16", **options).losses) == NUM_MINIBATCHES


def test_keys_whose_halves_do_not_belong_together(tmp_path: Path) -> None:
    _, (one, other) = write_key_folder(tmp_path / "keys", 2)
    mixed = CurveKeys(one.public, other.secret, one.allowed)
    with pytest.raises(ValueError) as caught:
        run(_MODEL, keys=mixed)
    assert one.public in str(caught.value)
    assert other.secret not in str(caught.value)
    assert "\n" not in str(caught.value)


# By the ranks.


def _run_differently(options: list[dict[str, Any]]) -> None:
    run(_MODEL, **options[int(os.environ["RANK"])])


def _refused_by_ranks(farm: Farm, options: list[dict[str, Any]], *words: str, **how: Any) -> None:
    for outcome in farm.run(_run_differently, options, num_ranks=2, **how):
        assert_says(outcome.error, ValueError, *words)


@pytest.mark.parametrize(
    ("name", "first", "second", "shown"),
    [
        ("codec", "bf16", "int8", ("'bf16'", "'int8'")),
        ("codec", {"gradients": "topk:0.1"}, None, ("None", "'topk:0.1'")),
        ("transport", "auto", "tcp", ("'auto'", "'tcp'")),
        ("peer_timeout", 15, 20.0, ("15.0", "20.0")),
    ],
)
def test_ranks_that_were_given_different_arguments(
    farm: Farm, name: str, first: Any, second: Any, shown: tuple[str, ...]
) -> None:
    words = (f"{name} is ", "at rank 1", "at rank 0", "give all ranks the same arguments", *shown)
    _refused_by_ranks(farm, [{name: first}, {name: second}], *words)


@pytest.mark.parametrize("rank", [0, 1])
def test_keys_at_one_rank_alone(farm: Farm, tmp_path: Path, rank: int) -> None:
    write_key_file(tmp_path / "keys.json")
    options: list[dict[str, Any]] = [{}, {}]
    options[rank] = {"keys": tmp_path / "keys.json"}
    _refused_by_ranks(farm, options, "keys is ", "'given'", "None", "give all ranks the same arguments")


def test_ranks_whose_keys_do_not_allow_each_other_are_named_at_once(farm: Farm, tmp_path: Path) -> None:
    made = [write_key_file(tmp_path / f"{rank}.json") for rank in (0, 1)]
    options = [{"keys": tmp_path / f"{rank}.json"} for rank in (0, 1)]
    outcomes = farm.run(_run_differently, options, num_ranks=2)
    messages = {str(outcome.error) for outcome in outcomes}
    for outcome in outcomes:
        assert_says(
            outcome.error, ValueError, "is not among the allowed ones", "one `pipedream keys` command"
        )
    named = {f"the public key of stage {rank} (rank {rank}), {made[rank].public}" for rank in (0, 1)}
    assert all(any(name in message for name in named) for message in messages)
    assert not any(keys.secret in message for keys in made for message in messages)


def test_a_rank_that_one_side_alone_allows(farm: Farm, tmp_path: Path) -> None:
    _, (one, other) = write_key_folder(tmp_path / "keys", 2)
    narrow = CurveKeys(one.public, one.secret, (one.public,))
    _refused_by_ranks(farm, [{"keys": narrow}, {"keys": other}], "stage 1 (rank 1)", other.public, "allowed")


def test_several_machines_without_keys_or_with_a_master_that_only_one_reaches(
    farm: Farm, tmp_path: Path
) -> None:
    write_key_file(tmp_path / "keys.json")
    with_keys = {"keys": tmp_path / "keys.json"}
    # The farm's master is 127.0.0.1.
    words = ("MASTER_ADDR is '127.0.0.1'", "loopback", "give bind=")
    _refused_by_ranks(farm, [with_keys, with_keys], *words, ranks_per_machine=1)
    here = {"bind": _ELSEWHERE}
    words = ("bind is '192.0.2.251'", "keys=", "insecure=True")
    _refused_by_ranks(farm, [here, here], *words, ranks_per_machine=1)


def _run_without_local_world_size() -> None:
    kept = os.environ.pop("LOCAL_WORLD_SIZE")
    try:
        run(_MODEL)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = kept


def test_ranks_of_a_launcher_that_does_not_say_how_many_are_on_a_machine(farm: Farm) -> None:
    for outcome in farm.run(_run_without_local_world_size, num_ranks=2):
        assert_says(outcome.error, ValueError, "WORLD_SIZE is 2", "LOCAL_WORLD_SIZE", "set it", "torchrun")


def test_an_address_that_is_not_this_machines(farm: Farm, tmp_path: Path) -> None:
    write_key_file(tmp_path / "keys.json")
    options = {"keys": tmp_path / "keys.json", "bind": _ELSEWHERE}
    _refused_by_ranks(farm, [options, options], "cannot listen at", _ELSEWHERE)


def test_a_range_with_too_few_ports_for_the_workers_of_a_machine(farm: Farm) -> None:
    """The set-up needs fewer ports than the training. The error names the number that is enough for both."""
    few = {"ports": "29600-29600"}
    words = ("the range of ports 29600-29600 has 1", "workers (2) need 4", "at least 4")
    _refused_by_ranks(farm, [few, few], *words)


def test_ports_that_others_have_taken(farm: Farm) -> None:
    with taken_ports(2) as ports:
        options: dict[str, Any] = {"bind": "127.0.0.1", "peer_timeout": 0.3}
        words = (f"all ports of {ports} are taken", "127.0.0.1", "another range")
        _refused_by_ranks(farm, [options | {"ports": ports}, options], *words, ranks_per_machine=1)


def _run_with_rank_1_apart(how: str, **options: Any) -> None:
    """Makes rank 1 look like a worker that offers no shared memory, or like one on another machine."""
    apart: Any = property(lambda self: False)
    if how == "introduction":
        apart = lambda self: {"public_key": None, "machine": "elsewhere"}  # noqa: E731
    kept = vars(links.LinkOptions)[how]
    if os.environ["RANK"] == "1":
        setattr(links.LinkOptions, how, apart)
    try:
        run(_MODEL, **options)
    finally:
        setattr(links.LinkOptions, how, kept)


def _large_minibatches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((64, 64), i, dtype=torch.float64), torch.zeros(64, 64).double()) for i in range(4)]


def test_shared_memory_between_workers_that_cannot_share_any(farm: Farm) -> None:
    data = _large_minibatches()
    for outcome in farm.run(_run_with_rank_1_apart, "shares_memory", transport="shm", data=data, num_ranks=2):
        assert_says(
            outcome.error,
            ValueError,
            "transport is 'shm'",
            "stage 0 (rank 0) and stage 1 (rank 1) cannot share memory",
            "would travel by zmq/tcp",
        )


def test_shared_memory_between_two_machines_is_refused_for_small_tensors_too(farm: Farm) -> None:
    words = ("transport is 'shm'", "stage 0 (rank 0) and stage 1 (rank 1) are on two machines")
    for outcome in farm.run(_run_with_rank_1_apart, "introduction", transport="shm", num_ranks=2):
        assert_says(outcome.error, ValueError, *words)


def _run_with_rank_1_on_the_host(**options: Any) -> None:
    kept = dict(os.environ)
    if os.environ["RANK"] == "1":
        os.environ["PIPEDREAM_DEVICE"] = "host"
    try:
        run(_MODEL, **options)
    finally:
        os.environ.clear()
        os.environ.update(kept)


def test_device_to_device_where_a_worker_computes_on_the_host(farm: Farm) -> None:
    for outcome in farm.run(_run_with_rank_1_on_the_host, transport="ipc", num_ranks=2):
        assert_says(
            outcome.error,
            ValueError,
            "transport is 'ipc'",
            "stage 0 (rank 0) and stage 1 (rank 1)",
            "computes on the host",
            "use 'auto'",
        )
