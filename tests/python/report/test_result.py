"""Tests RunResult: how it combines the workers' reports."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipedream import Plan, RunResult, _core
from pipedream.links.channels import RunChannel
from pipedream.report.result import ChannelFigures
from pipedream.report.transfers import ReceivedTransfer, SentTransfer
from pipedream.report.worker_reports import combine_reports

_PLAN = Plan.straight(2, 2)
_OUT, _BACK = "activations of stage 0 to stage 1", "gradients of stage 1 to stage 0"
_MS = 1_000_000


def _channel(name: str, sender: int, receiver: int) -> RunChannel:
    # The channel has no tensors, because rank 0 knows the tensors of its own channels only.
    edge = _core.Edge("activation" if sender < receiver else "gradient", sender, receiver)
    return RunChannel(name, 0, sender, receiver, [], 2, 4, 1, True, "int8", edge)


_CHANNELS = [_channel(_OUT, 0, 1), _channel(_BACK, 1, 0)]


def _stats(**changes: Any) -> dict[str, Any]:
    stats = {
        "wire_bytes_sent": 0,
        "wire_bytes_received": 0,
        "num_items": 0,
        "num_chunks": 0,
        "chunk_bytes": 0,
        "num_refused": 0,
        "tensor_bytes": 0,
        "placed_bytes": 0,
        "transfer_ns": 0,
        "credit_wait_ns": 0,
        "wait_ns": 0,
        "transport": None,
        "codec": "none",
    }
    return stats | changes


def _report(stage: int, channels: dict[str, Any], clock: tuple[str, int] = ("a", 0)) -> dict[str, Any]:
    span = ["UPDATE", stage, 0, 0, 100, 110, 120, 10, 10]
    return {
        "pid": 70 + stage,
        "stages": {str(stage): {"versions": [(0, 0)], "recompute": False, "offload": [], "shard": None}},
        "totals": {"num_work_items": 3, "wait_ns": 1, "compute_ns": 2, "elapsed_ns": 4},
        "spans": [span],
        "transfers": [{}, {}],
        "memory": {},
        "channels": channels,
        "synced_bytes": 0,
        "clock": clock,
        "losses": [0.5] if stage == 1 else [],
        "samples": [6] if stage == 1 else [],
        "epochs": [0] if stage == 1 else [],
        "stopped": False,
        "data": {"source": "list", "read_ns": 0},
        "drained_at": [],
        "validation": [],
    }


def _reports(wait_ns: int = 3 * _MS, clock: tuple[str, int] = ("a", 0)) -> list[dict[str, Any]]:
    sent = {
        "transport": "shared memory",
        "codec": "bf16",
        "transfer_ns": 12 * _MS,
        "chunk_bytes": 1 << 20,
        "num_refused": 1,
        "credit_wait_ns": 2 * _MS,
        "num_items": 6,  # the receiver has counted one more item
        "wire_bytes_sent": 900,
    }
    received = {
        "num_items": 7,
        "num_chunks": 9,
        "tensor_bytes": 4096,
        "placed_bytes": 2048,
        "wire_bytes_received": 1000,
        "wait_ns": wait_ns,
    }
    reports = [
        _report(0, {_OUT: _stats(**sent), _BACK: _stats(wire_bytes_received=50)}),
        _report(1, {_OUT: _stats(**received), _BACK: _stats(transport="zmq/tcp")}, clock),
    ]
    # Two items overlap on the first channel. The first one was copied, and the receiver no longer has its
    # times. The second one is longer and was not copied. One item goes the other way.
    reports[0]["transfers"] = [
        {_OUT: [[0, 0, 64, 100, 110, 130, 120, 190], [1, 0, 48, 125, 126, 0, 127, 230]]},
        {_BACK: [[0, 0, 32, 500, 510]]},
    ]
    reports[1]["transfers"] = [
        {_BACK: [[0, 0, 32, 400, 401, 0, 402, 403]]},
        {_OUT: [[1, 0, 48, 240, 250]]},
    ]
    return reports


def _combined(**how: Any) -> RunResult:
    schedule = _core.ScheduleOptions(in_flight=[2, 1])
    return combine_reports(_PLAN, schedule, _CHANNELS, _reports(**how))


def test_a_channels_counts_are_the_receivers_and_its_times_each_ends_own() -> None:
    out, back = _combined().channels
    assert out == ChannelFigures(
        *(_OUT, 0, 1, "shared memory", "bf16", 7, 9, 4096, 1000, 2048, 10.0, 2.0, 3.0, 0.7, 1 << 20, 1)
    )
    assert (back.name, back.sender, back.receiver, back.transport, back.codec) == (
        _BACK,
        1,
        0,
        "zmq/tcp",
        "none",
    )


def test_tensors_are_under_way_until_the_receiver_has_them() -> None:
    reports = _reports()
    reports[1]["channels"][_OUT]["transfer_ns"] = 30 * _MS
    schedule = _core.ScheduleOptions(in_flight=[2, 1])
    out = combine_reports(_PLAN, schedule, _CHANNELS, reports).channels[0]
    assert (out.transfer_ms, out.overlap_share) == (30.0, 0.9)


@pytest.mark.parametrize(("wait_ns", "share"), [(0, 1.0), (12 * _MS, 0.0), (50 * _MS, 0.0)])
def test_the_overlap_share_stays_within_0_and_1(wait_ns: int, share: float) -> None:
    assert _combined(wait_ns=wait_ns).channels[0].overlap_share == share


def test_the_overlap_share_of_a_channel_that_carried_nothing_is_none() -> None:
    assert _combined().channels[1].overlap_share is None


def test_bytes_sent_are_those_on_the_wire_and_those_that_were_placed() -> None:
    assert _combined().bytes_sent == 1000 + 2048 + 50


def test_transports_are_the_senders_word() -> None:
    assert _combined().transports == {"0->1": "shared memory", "1->0": "zmq/tcp"}


def test_a_result_survives_json() -> None:
    result = _combined()
    assert RunResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_the_table_of_channels_has_a_row_each() -> None:
    head, out, back = _combined().describe_channels().splitlines()
    assert head.split()[:4] == ["channel", "transport", "codec", "items"]
    assert out.startswith(f"{_OUT}  shared memory  bf16") and out.endswith("70 %")
    assert "4.00 KiB" in out and "10.0 ms" in out
    assert back.startswith(_BACK) and back.endswith("0.0 ms")


def test_the_table_of_a_run_without_channels_is_empty() -> None:
    result = combine_reports(Plan.straight(1, 1), _core.ScheduleOptions(), [], [_report(0, {}) | _LAST])
    assert result.describe_channels() == ""
    assert (result.transports, result.bytes_sent) == ({}, 0)


_LAST = {"losses": [0.5], "samples": [6], "epochs": [0]}


def test_spans_of_another_machine_are_shown_on_the_first_ones_clock() -> None:
    spans = _combined(clock=("b", 7_000)).spans
    assert [(s.asked_ns, s.ready_ns, s.completed_ns) for (s,) in spans] == [
        (100, 110, 120),
        (7100, 7110, 7120),
    ]
    same_machine = _combined(clock=("a", 7_000)).spans
    assert [s.asked_ns for (s,) in same_machine] == [100, 100]


def test_transfers_are_those_of_both_ends_of_every_channel() -> None:
    out, back = _combined().transfers
    assert (out.channel, out.sender_rank, out.receiver_rank) == (_OUT, 0, 1)
    assert out.sent == [
        SentTransfer(0, 0, 64, 100, 110, 130, 120, 190),
        SentTransfer(1, 0, 48, 125, 126, None, 127, 230),
    ]
    assert out.received == [ReceivedTransfer(1, 0, 48, 240, 250)]
    assert (back.channel, back.sender_rank, back.receiver_rank) == (_BACK, 1, 0)
    assert (len(back.sent), len(back.received)) == (1, 1)


def test_transfers_of_another_machine_are_shown_on_the_first_ones_clock() -> None:
    out, back = _combined(clock=("b", 7_000)).transfers
    assert out.sent == _combined().transfers[0].sent
    assert out.received == [ReceivedTransfer(1, 0, 48, 7_240, 7_250)]
    assert back.sent == [SentTransfer(0, 0, 32, 7_400, 7_401, None, 7_402, 7_403)]
    assert back.received == [ReceivedTransfer(0, 0, 32, 500, 510)]


def test_the_trace_shows_what_travelled_on_tracks_of_its_two_workers(tmp_path: Path) -> None:
    _combined().save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {
        (e["pid"], e["tid"]): (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"
    }
    shown = {
        (*tracks[e["pid"], e["tid"]], e["name"], round(1e3 * e["ts"]), round(1e3 * e["dur"]))
        for e in events
        if e["ph"] == "X" and tracks[e["pid"], e["tid"]][1] not in ("compute", "waiting")
    }
    assert shown == {  # times are relative to the first span, which begins at 100
        (0, f"send {_OUT}: queued", "A0", 0, 10),
        (0, f"send {_OUT}: queued", "A1", 25, 1),
        (0, f"send {_OUT}: copy", "A0", 10, 20),
        (0, f"send {_OUT}: wire", "A0", 20, 70),
        (0, f"send {_OUT}: wire (2)", "A1", 27, 103),
        (1, f"receive {_OUT}", "A1", 140, 10),
        (1, f"send {_BACK}: queued", "G0", 300, 1),
        (1, f"send {_BACK}: wire", "G0", 302, 1),
        (0, f"receive {_BACK}", "G0", 400, 10),
    }
    (sent,) = (e for e in events if e["ph"] == "X" and round(1e3 * e["ts"]) == 27)
    assert sent["args"] == {
        "minibatch": 1,
        "microbatch": 0,
        "bytes": 48,
        "codec": "bf16",
        "transport": "shared memory",
    }
    arrows = [(e["ph"], round(1e3 * e["ts"])) for e in events if e["ph"] in ("s", "f")]
    assert sorted(arrows) == [("f", 140), ("f", 400), ("s", 27), ("s", 302)]


def test_the_trace_has_the_channels_beside_it(tmp_path: Path) -> None:
    _combined().save_trace(tmp_path / "trace.json")
    figures = json.loads((tmp_path / "trace.json").read_text())["otherData"]["channels"]
    assert figures[_OUT]["overlap_share"] == 0.7
    assert list(figures) == [_OUT, _BACK]


# What a result shows of itself.


def _trained(**changes: Any) -> RunResult:
    """Returns the result of two epochs of three minibatches with two workers."""
    reports = _reports()
    reports[1] |= {"losses": [3.0, 2.0, 1.0, 0.9, 0.6, 0.3], "samples": [4] * 6, "epochs": [0] * 3 + [1] * 3}
    for report in reports:
        report["memory"] = {
            "weights": {"predicted": 3 << 20, "peak": 2 << 20},
            "beyond": {"predicted": 1 << 20, "peak": None},
        }
    for report, source, read_ns in zip(
        reports, ("DataLoader with num_workers=2", "list"), (2, 0), strict=True
    ):
        report["data"] = {"source": source, "read_ns": read_ns}
    schedule = _core.ScheduleOptions(in_flight=[2, 1])
    return replace(combine_reports(_PLAN, schedule, _CHANNELS, reports), **changes)


def test_the_time_that_workers_waited_for_data_is_a_share_of_theirs() -> None:
    result = _trained()
    assert result.data_wait_share == [0.5, 0.0]
    assert result.data_sources == ["DataLoader with num_workers=2", "list"]
    assert result.epoch_sizes == [3, 3]


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (
            "DataLoader with num_workers=2",
            "more num_workers, and persistent_workers=True where there are several epochs",
        ),
        (
            "DataLoader with num_workers=2, iterated by the caller and forwarded",
            "more num_workers, or a dataset that can be pickled, which the workers read themselves",
        ),
        ("DataLoader with num_workers=0", "with num_workers above 0 other processes read ahead"),
        ("Corpus", "a DataLoader with num_workers reads ahead"),
    ],
)
def test_a_stage_that_waited_for_its_data_is_named_below_the_channels(source: str, remedy: str) -> None:
    result = _trained(data_sources=[source, "list"], data_wait_share=[0.41, 0.09])
    line = f"stage 0 (rank 0) waited 41.0 % of its time for its data ({source}): {remedy}"
    assert result.describe_channels().splitlines()[-2:] == ["", line]
    assert result.summary().endswith(line)
    assert replace(result, channels=[]).describe_channels() == line


def test_a_run_that_was_planned_again_says_so_in_its_title() -> None:
    title = repr(_trained(drained_at=[2, 4])).splitlines()[0]
    assert title == (
        "RunResult: 6 minibatches in 2 epochs by 2 workers,"
        " planned again 2 times for larger minibatches, first before minibatch 2"
    )


def test_the_steady_time_leaves_out_what_lies_between_two_segments() -> None:
    # A minibatch takes 1 ms. Before minibatch 6 there is a pause of 100 ms.
    reports = _reports()
    ends_ns = [_MS * (index + (100 if index >= 6 else 0)) for index in range(8)]
    for report, stage in zip(reports, (0, 1), strict=True):
        report["spans"] = [["UPDATE", stage, i, 0, end, end, end, 0, 0] for i, end in enumerate(ends_ns)]
    schedule = _core.ScheduleOptions(in_flight=[2, 1])
    reports[1] |= {"losses": [1.0] * 8, "samples": [1] * 8, "epochs": [0] * 8}
    for drained_at, expected in (([6], 1.0), ([], 51.0)):
        for report in reports:
            report["drained_at"] = drained_at
        result = combine_reports(_PLAN, schedule, _CHANNELS, reports)
        assert result.drained_at == drained_at
        assert result.measured_ms == pytest.approx(expected)


def test_the_repr_has_five_short_lines() -> None:
    result = _trained()
    assert repr(result) == (
        "RunResult: 6 minibatches in 2 epochs by 2 workers\n"
        "  loss     3 -> 0.3; mean by epoch 2, 0.6\n"
        "  time     6000000000 samples/s; 2e-05 ms per minibatch; bubble share 50.0 %\n"
        "  traffic  3.03 KiB by shared memory, zmq/tcp\n"
        "  memory   2.00 MiB at most, at stage 0 (rank 0); 4.00 MiB predicted"
    )
    many = replace(result, losses=[0.5] * 90_000, epoch_losses=[0.5] * 300, epoch_sizes=[300] * 300)
    assert len(repr(many).splitlines()) == 5
    assert "mean by epoch 0.5, 0.5, 0.5, 0.5, .., 0.5\n" in repr(many)
    assert all(len(line) <= 110 for line in repr(many).splitlines())


def test_what_replicas_send_each_other_is_shown_where_there_is_any() -> None:
    reports = [report | {"synced_bytes": 1 << 20} for report in _reports()]
    schedule = _core.ScheduleOptions(in_flight=[2, 1])
    result = combine_reports(_PLAN, schedule, _CHANNELS, reports)
    assert result.bytes_synced == 2 << 20
    assert "; 2.00 MiB between replicas\n" in repr(result)
    assert any(
        row.split() == ["bytes", "between", "replicas", "2.00", "MiB"] for row in result.summary().split("\n")
    )


def test_the_summary_has_every_figure() -> None:
    sources = ["Corpus", "list"]
    result = _trained(measured_ms=4.25, predicted_ms=4.0, samples_per_s=12340.0, data_sources=sources)
    assert result.summary().split("\n\n")[:4] == [
        "6 minibatches in 2 epochs by 2 workers",
        (
            "epoch  minibatches  first loss  last loss  mean loss\n"
            "    1            3           3          1          2\n"
            "    2            3         0.9        0.3        0.6"
        ),
        (
            "figure                       of the run\n"
            "samples/s                         12340\n"
            "ms per minibatch, measured         4.25\n"
            "ms per minibatch, predicted           4\n"
            "bubble share                     50.0 %\n"
            "bytes sent                     3.03 KiB"
        ),
        (
            "worker            reads   waited for peers  for data  overhead    memory  predicted\n"
            "stage 0 (rank 0)  Corpus            25.0 %    50.0 %    0.0 us  2.00 MiB   4.00 MiB\n"
            "stage 1 (rank 1)  list              25.0 %     0.0 %    0.0 us  2.00 MiB   4.00 MiB"
        ),
    ]


def test_the_plot_is_written_in_the_form_of_its_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for result in (_trained(), _combined()):  # a result of several epochs, and one of a single minibatch
        result.plot(tmp_path / "loss.svg")
        text = (tmp_path / "loss.svg").read_text()
        assert "minibatch" in text and "loss" in text
        assert ("mean of an epoch" in text) == (len(result.losses) > 1)
        assert "running mean" not in text  # a running mean of a few minibatches would show nothing
    replace(_trained(), losses=[math.nan, *([2.0, 1.0] * 20)]).plot(tmp_path / "loss.svg")
    assert "running mean" in (tmp_path / "loss.svg").read_text()
    result.plot(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'loss.gif': its name must end in one of .svg, .png, .pdf"):
        _trained().plot("loss.gif")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ValueError, match=r"loss.png: drawing needs matplotlib: pip install matplotlib .the extra plot."
    ):
        _trained().plot(tmp_path / "loss.png")
