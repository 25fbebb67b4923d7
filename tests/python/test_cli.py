"""Tests the command line. Most tests call main() in this process, and a few start the real command."""

from __future__ import annotations

import functools
import importlib
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from pipedream.cli import main
from pipedream.common.document import write_value
from pipedream.common.errors import WorkerLost
from pipedream.launch import link_profiling, runner
from pipedream.links.keys import load_keys
from pipedream.planning.job import exclusions
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.link_profile import LinkProfile, MeasuredLink
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.program import Program
from pipedream.planning.runtime_costs import FREE
from pipedream.worker.cautions import warn_the_caller

PROFILE = Profile(
    (LayerProfile("first", 4, 6, 1000, 8), LayerProfile("second", 4, 6, 0, 16)), model="tiny", batch_size=32
)
SHARED_PROFILES = Path(__file__).resolve().parents[3] / "shared" / "profiles"

TARGET = """
import os

def make():
    print("print of the user")
    os.system("echo from another process")
    return dict(model="m", data=[1, 2], loss_fn=len, optimizer=list)
"""


class _Channel(NamedTuple):
    """Stands in for result.ChannelFigures."""

    codec: str
    wire_bytes: int
    overlap_share: float | None


class Outcome:
    """The exit status and the output of a call of main()."""

    def __init__(self, status: int, stdout: str, stderr: str) -> None:
        self.status, self.stdout, self.stderr = status, stdout, stderr

    def error(self) -> str:
        """Returns the error's line. Asserts that stdout is empty and stderr has only that line."""
        assert self.stdout == ""
        assert self.stderr.startswith("pipedream: error: ")
        assert self.stderr.count("\n") == 1
        return self.stderr.removeprefix("pipedream: error: ").rstrip("\n")


class Caller:
    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *arguments: str | Path) -> Outcome:
        self.capture.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        stdout, stderr = self.capture.readouterr()
        assert isinstance(exit_info.value.code, int)
        return Outcome(exit_info.value.code, stdout, stderr)


@pytest.fixture
def call(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Caller]:
    """Calls main() in a folder with a profile, a plan and a target. Afterwards the target's module is
    removed.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("PIPEDREAM_TRACEBACK", raising=False)
    PROFILE.save("profile.json")
    Plan.straight(2, 2).save("plan.json")
    Path("cli_target.py").write_text(TARGET)
    yield Caller(capfd)
    sys.modules.pop("cli_target", None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the profiler and run(), which need torch. Records the arguments that a command gives them."""
    noted: dict[str, Any] = {}

    def profile(model: Any, batches: Any, loss_fn: Any, **options: Any) -> Profile:
        noted["profile"] = (model, batches, loss_fn, options)
        print("print of the profiler")
        return PROFILE

    def run(model: Any, plan: Plan, **options: Any) -> SimpleNamespace:
        noted["run"] = (model, plan, options)
        print("print of the runner")
        return SimpleNamespace(
            losses=[0.5, math.nan],
            epoch_losses=[0.25],
            samples_per_s=100.0,
            predicted_ms=10.0,
            measured_ms=11.0,
            bubble_share=0.1,
            bytes_sent=1000,
            bytes_synced=500,
            transports=("zmq",),
            worker_pids=[1, 2],
            memory=[{"model as given": {"predicted": 8, "peak": 8}}],
            recompute=[False],
            channels=[_Channel("bf16", 512, math.nan)],
            describe_memory=lambda: "worker  term  predicted  peak",
            describe_channels=lambda: "channel  transport",
        )

    # pipedream.launch.profiling holds a reference to the profiler if an earlier test has imported it.
    monkeypatch.setattr(importlib.import_module("pipedream.launch.profiling"), "profile", profile)
    module = ModuleType("pipedream.profiling.profiler")
    module.profile = profile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(runner, "run", functools.wraps(runner.run)(run))
    return noted


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_explain_prints_which_options_exclude_each_other(call: Caller) -> None:
    outcome = call("explain", "--options")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert "\nsync='asp', not together with:\n  a schedule whose replicas" in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines())) <= 100
    rows = json.loads(call("explain", "--options", "--json").stdout)["exclusions"]
    assert len(rows) == len(exclusions()) == len({frozenset((row["first"], row["second"])) for row in rows})
    assert call("explain").error().startswith("target is missing: write path/to/file.py:function")


def test_partition_prints_the_plan_as_a_table(call: Caller) -> None:
    outcome = call("partition", "profile.json", "--workers", "2", "--bandwidth", "10Gbit/s", "--straight")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("plan for tiny of 2 layers: 2 stages on 2 workers, 10 Gbit/s\n")


def test_partition_json_is_the_plan_file(call: Caller) -> None:
    outcome = call(
        *("partition", "profile.json", "--workers", "2", "--bandwidth", "8Mbit/s", "--straight"),
        *("--output", "new.json", "--json"),
    )
    assert (outcome.status, outcome.stderr) == (0, "")
    fields = json.loads(outcome.stdout)
    assert fields == json.loads(Path("new.json").read_text())
    plan = Plan.from_dict(fields)
    assert plan.stages == (Stage(0, 0), Stage(1, 1))
    assert (plan.num_workers, plan.bandwidth_bytes_per_s) == (2, 1e6)
    assert plan.bottleneck_ms == pytest.approx(10)


def test_partition_keeps_to_limits_given_on_the_command_line(call: Caller) -> None:
    arguments = ("partition", "profile.json", "--workers", "2", "--bandwidth", "10Gbit/s", "--json")
    given = call(*arguments, "--boundaries", "0", "--replicas", "1-1")
    assert [stage["last_layer"] for stage in json.loads(given.stdout)["stages"]] == [0, 1]
    slow = call(*arguments, "--speeds", "1,0.5", "--straight")
    assert json.loads(slow.stdout)["bottleneck_ms"] == pytest.approx(20)
    flush = json.loads(call(*arguments, "--schedule", "flush", "--microbatches", "2", "--straight").stdout)
    assert (flush["schedule"], flush["microbatches"]) == ("flush", 2)
    refused = call(*arguments, "--memory", "1KiB")
    assert refused.status == 2
    assert "no plan has 2 workers, memory of 1.00 KiB: give more memory" in refused.stderr
    each = call(*arguments, "--memory", "2KiB,1KiB")
    assert "no plan has 2 workers, memory of 1.00 KiB to 2.00 KiB: give more memory" in each.stderr
    unread = call(*arguments, "--speeds", "fast")
    assert (unread.status, unread.stderr) == (
        2,
        "pipedream: error: --speeds is 'fast': give numbers with ',' between them, for example 2,1\n",
    )


def test_table_predicts_speeds_of_all_profiles_in_a_folder(call: Caller) -> None:
    shown = call("table", ".", "--workers", "1,2", "--bandwidth", "10Gbit/s")
    assert (shown.status, shown.stderr) == (0, "")
    assert len(shown.stdout.splitlines()) == 3
    rows = json.loads(call("table", "profile.json", "--workers", "2", "--json").stdout)["rows"]
    assert [row["bandwidth_bytes_per_s"] for row in rows] == [1.25e8, 1.25e9, 3.125e9, 1.25e10]
    assert rows[0]["over_one_worker"] == pytest.approx(2)


LINKS = LinkProfile(2, (MeasuredLink(0, 1, 1e6, 20.0), MeasuredLink(1, 0, 1e6, 20.0)))


def test_partition_takes_measured_links_in_place_of_a_bandwidth(call: Caller) -> None:
    LINKS.save("links.json")
    arguments = ("partition", "profile.json", "--workers", "2", "--straight", "--json")
    measured = call(*arguments, "--links", "links.json")
    assert measured.status == 0
    assert json.loads(measured.stdout) == json.loads(call(*arguments, "--bandwidth", "8Mbit/s").stdout)


def test_table_and_run_take_measured_links_in_place_of_a_bandwidth(
    call: Caller, calls: dict[str, Any]
) -> None:
    LINKS.save("links.json")
    rows = json.loads(call("table", ".", "--workers", "2", "--links", "links.json", "--json").stdout)["rows"]
    assert [row["bandwidth_bytes_per_s"] for row in rows] == [1e6]
    given = ("--workers", "2", "--straight")
    for links in (("--links", "links.json"), ("--bandwidth", "8Mbit/s")):
        outcome = call("run", "cli_target.py:make", *given, *links)
        assert outcome.status == 0
        assert calls["run"][1].bandwidth_bytes_per_s == 1e6
    outcome = call("table", ".", "--links", "links.json", "--bandwidth", "1Gbit/s")
    assert outcome.error() == "give --bandwidth, for example 10Gbit/s, or --links FILE: one of them"


def test_simulate_draws_as_many_minibatches_as_a_person_can_read(call: Caller) -> None:
    arguments = ("simulate", "1-1", "--profile", "profile.json", "--bandwidth", "1Gbit/s", "--output")
    outcome = call(*arguments, "picture.txt")
    assert "pipedream: 2 stages, 36 minibatches" in outcome.stdout
    assert "picture of 8 minibatches saved in picture.txt" in outcome.stdout
    assert Path("picture.txt").read_text().startswith("pipedream: 2 stages, 8 minibatches")
    assert "of 36 minibatches saved" in call(*arguments, "trace.json").stdout
    assert "of 5 minibatches saved" in call(*arguments, "picture.txt", "--minibatches", "5").stdout


def test_simulate_takes_measured_links_in_place_of_a_bandwidth(call: Caller) -> None:
    LINKS.save("links.json")
    plan = ("--workers", "2", "--straight", "--bandwidth", "1Gbit/s", "--output", "plan.json")
    assert call("partition", "profile.json", *plan).status == 0
    arguments = ("simulate", "plan.json", "--profile", "profile.json", "--schedule", "flush", "--json")
    measured = json.loads(call(*arguments, "--links", "links.json").stdout)
    alike = json.loads(call(*arguments, "--bandwidth", "8Mbit/s").stdout)
    assert measured["boundaries"] == alike["boundaries"]
    assert measured["ms_per_minibatch"] > alike["ms_per_minibatch"]  # the measured links add their latency
    outcome = call(*arguments, "--links", "links.json", "--bandwidth", "8Mbit/s")
    assert outcome.error() == "give --bandwidth, for example 10Gbit/s, or --links FILE: one of them"


def test_partition_takes_a_memory_of_each_worker(call: Caller) -> None:
    arguments = ("partition", "profile.json", "--workers", "2", "--bandwidth", "8Mbit/s", "--straight")
    both = call(*arguments, "--memory", "1GiB", "--json")
    assert json.loads(call(*arguments, "--memory", "1GiB,1GiB", "--json").stdout) == json.loads(both.stdout)
    assert "no plan has 2 workers" in call(*arguments, "--memory", "1GiB,1KiB", "--boundaries", "0").error()


@pytest.mark.parametrize("given", [(), ("--bandwidth", "8Mbit/s", "--links", "links.json")])
def test_partition_takes_one_of_links_and_bandwidth(call: Caller, given: tuple[str, ...]) -> None:
    outcome = call("partition", "profile.json", "--workers", "2", *given)
    assert outcome.status == 2
    assert outcome.error() == "give --bandwidth, for example 10Gbit/s, or --links FILE: one of them"


def test_profile_links_prints_what_rank_0_has(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock(return_value=LINKS)
    monkeypatch.setattr(link_profiling, "profile_links", measure)
    outcome = call("profile-links", "--transport", "tcp", "--output", "links.json", "--json")
    assert json.loads(outcome.stdout) == LINKS.to_dict()
    given = measure.call_args.kwargs
    assert (given["transport"], given["save"], given["progress"]) == ("tcp", Path("links.json"), False)
    assert "--output links.json keeps them" in call("profile-links").stdout
    monkeypatch.setenv("RANK", "1")
    assert call("profile-links").stdout == ""


def test_profile_links_without_torchrun_says_how_to_start(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    outcome = call("profile-links")
    assert outcome.status == 2
    assert "torchrun --nproc-per-node 2 -m pipedream profile-links" in outcome.error()


def test_profile_calibrates_where_asked(
    call: Caller, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cli_target.py").write_text(TARGET, encoding="utf-8")
    calibration = importlib.import_module("pipedream.launch.calibration")
    given: list[Any] = []

    def calibrate(profile: Profile, *arguments: Any, **options: Any) -> Profile:
        given.extend([profile, arguments, options])
        return replace(profile, runtime=write_value(FREE))

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    outcome = call("profile", "cli_target.py:make", "--calibrate", "3", "--output", "p.json")
    assert outcome.status == 0, outcome.stderr
    assert given == [PROFILE, ("m", [1, 2], len), {"optimizer": list, "workers": 3}]
    assert Profile.load("p.json").runtime is not None
    on_meta = TARGET + '\ndef on_meta():\n    return make() | {"weights": "w"}\n'
    Path("cli_meta_target.py").write_text(on_meta, encoding="utf-8")
    assert call("profile", "cli_meta_target.py:on_meta", "--calibrate", "2").status == 0
    assert given[-1] == {"optimizer": list, "workers": 2, "weights": "w"}
    assert "`pipedream partition --cost-model calibrated --workers-per-host 3`" in outcome.stdout
    plan = call(
        *("partition", "p.json", "--workers", "2", "--bandwidth", "1Gbit/s"), "--cost-model", "calibrated"
    )
    assert plan.status == 0 and "predicted by cost model 'calibrated'" in plan.stdout
    assert (
        call("profile", "cli_target.py:make", "--calibrate", "1").error().startswith("--calibrate is 1: it")
    )


def test_simulate_prints_a_table_and_json_has_its_figures(call: Caller) -> None:
    made = call(
        *("partition", "profile.json", "--workers", "2", "--bandwidth", "8Mbit/s", "--straight"),
        *("--output", "new.json"),
    )
    assert made.status == 0
    arguments = ("simulate", "new.json", "--profile", "profile.json")
    shown = call(*arguments, "--output", "timeline.txt")
    assert (shown.status, shown.stderr) == (0, "")
    assert shown.stdout.startswith("pipedream: 2 stages, 38 minibatches, 8 Mbit/s\n")
    assert Path("timeline.txt").exists()
    fields = json.loads(call(*arguments, "--json").stdout)
    assert fields["ms_per_minibatch"] >= fields["bottleneck_ms"] == pytest.approx(10)
    assert [worker["stages"] for worker in fields["workers"]] == [[0], [1]]
    assert call(*arguments, "--output", "trace.json").status == 0
    counters = [
        event for event in json.loads(Path("trace.json").read_text())["traceEvents"] if event["ph"] == "C"
    ]
    for worker in fields["workers"]:
        used = [event["args"]["memory, bytes"] for event in counters if event["pid"] == worker["rank"]]
        assert round(max(used)) == worker["memory_peak_bytes"]
    refused = call(*arguments, "--schedule", "fast")
    assert refused.status == 2 and refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile.json", "--workers", "0", "--bandwidth", "1Gbit/s"], "num_workers is 0: give at least 1"),
        (
            ["profile.json", "--workers", "2", "--bandwidth", "1Gb"],
            "bandwidth is '1Gb': the unit 'Gb' is unk",
        ),
        (
            ["profile.json", "--workers", "2", "--bandwidth", "-1Gbit/s"],
            "bandwidth is '-1Gbit/s': it must be",
        ),
        (
            ["profile.json", "--workers", "x", "--bandwidth", "1Gbit/s"],
            "--workers is 'x': give a whole number",
        ),
        (
            ["profile.json", "--workers", "2", "--bandwidth", "1Gbit/s", "--optimizer-copies", "x"],
            "--optimizer-copies is 'x': give a number",
        ),
        (
            ["profile.json", "--workers", "2", "--bandwidth", "1Gbit/s", "--memory", "-1GiB"],
            "memory is '-1GiB': it must be finite and not negative, as 16GiB is",
        ),
        (
            ["profile.json", "--workers", "2", "--bandwidth", "1Gbit/s", "--memory", "1GiB,1GiB,1GiB"],
            "memory has 3 entries for 2 workers",
        ),
        (["profile.json", "--workers", "2"], "give --bandwidth, for example 10Gbit/s, or --links"),
        ([], "Missing argument 'PROFILE'"),
        (["gone.json", "--workers", "2", "--bandwidth", "1Gbit/s"], "gone.json: No such file or directory"),
        (
            ["plan.json", "--workers", "2", "--bandwidth", "1Gbit/s"],
            "plan.json: format is 'pipedream.plan/1'",
        ),
        ([".", "--workers", "2", "--bandwidth", "1Gbit/s"], ".: Is a directory"),
        (
            ["profile.json", "--workers", "2", "--bandwidth", "1Gbit/s", "--cost-model", "real"],
            "cost_model is 'real': it is one of paper",
        ),
        (
            ["profile.json", "--workers", "2", "--bandwidth", "1Gbit/s", "--output", "gone/plan.json"],
            "gone/plan.json: there is no folder",
        ),
        (["profile.json", "--workers", "2", "--bandwidth", "1Gbit/s", "--output", "."], ".: is a folder"),
        (["profile.json", "--bandwith", "1Gbit/s"], "No such option"),
        (["profile.json"], "Missing option '--workers': `pipedream partition --help` shows"),
        (["profile.json", "b"], "Missing option '--workers': `pipedream partition --help` shows"),
        (
            ["profile.json", "--workers", "1000000000", "--bandwidth", "1Gbit/s"],
            "num_workers is 1000000000: plans are made for at most 65536",
        ),
        (
            ["profile.json", "--workers", "2", "--bandwidth", "1Gbit/s", "--spare-workers", "1" * 30],
            f"spare_workers is {'1' * 30}: give a number of workers, 0 or more",
        ),
        (
            ["nested.json", "--workers", "2", "--bandwidth", "1Gbit/s"],
            "nested.json: not JSON: nested too deeply; give a file that pipedream wrote",
        ),
    ],
)
def test_mistake_is_one_line_on_stderr_and_status_2(call: Caller, arguments: list[str], message: str) -> None:
    Path("nested.json").write_text("[" * 100_000)
    for arguments_in_json in (arguments, [*arguments, "--json"]):
        outcome = call("partition", *arguments_in_json)
        assert outcome.status == 2
        assert outcome.error().startswith(message)


def test_malformed_profile_is_named_with_its_field(call: Caller) -> None:
    fields = PROFILE.to_dict()
    fields["layers"][1]["forward_ms"] = math.nan
    Path("bad.json").write_text(json.dumps(fields))
    outcome = call("partition", "bad.json", "--workers", "2", "--bandwidth", "1Gbit/s", "--json")
    assert outcome.status == 2
    assert outcome.error() == "bad.json: layers[1].forward_ms is nan: it must be finite"


def test_profile_gives_the_profiler_the_job_and_saves_what_it_measured(
    call: Caller, calls: dict[str, Any]
) -> None:
    outcome = call(
        "profile", "cli_target.py:make", "--minibatches", "7", "--seconds", "2", "--output", "p.json"
    )
    assert outcome.status == 0
    assert calls["profile"] == ("m", [1, 2], len, {"minibatches": 7, "seconds": 2.0})
    assert Profile.load("p.json") == PROFILE
    assert "profile of tiny: 2 layers" in outcome.stdout


def test_json_keeps_stdout_clean_of_what_user_code_and_its_processes_print(
    call: Caller, calls: dict[str, Any]
) -> None:
    outcome = call("profile", "cli_target.py:make", "--json")
    assert outcome.status == 0
    assert json.loads(outcome.stdout) == PROFILE.to_dict()
    for text in ("print of the user", "from another process", "print of the profiler"):
        assert text in outcome.stderr
    outcome = call("run", "cli_target.py:make", "--plan", "plan.json", "--json")
    assert outcome.status == 0
    assert json.loads(outcome.stdout)["worker_pids"] == [1, 2]
    assert "print of the runner" in outcome.stderr


def test_run_gives_the_runner_the_job_the_plan_and_the_options(call: Caller, calls: dict[str, Any]) -> None:
    call("keys", "keys.json")
    outcome = call(
        *("run", "cli_target.py:make", "--plan", "plan.json", "--epochs", "3", "--seed", "5"),
        *("--transport", "zmq", "--trace", "trace.json"),
        *("--schedule", "flush", "--microbatches", "4", "--recompute", "--memory", "1GiB"),
        *("--autocast", "bfloat16", "--max-grad-norm", "0.5"),
        *("--codec", "activations=bf16,1->0=topk:0.1", "--keys", "keys.json", "--bind", "eth0", "--insecure"),
        *("--ports", "29600-29620"),
    )
    assert (outcome.status, outcome.stderr) == (0, "")
    model, plan, options = calls["run"]
    assert (model, plan) == ("m", Plan.straight(2, 2))
    assert options == {
        "data": [1, 2],
        "loss_fn": len,
        "optimizer": list,
        "epochs": 3,
        "schedule": "flush",
        "microbatches": 4,
        "recompute": True,
        "memory": "1GiB",
        "autocast": "bfloat16",
        "max_grad_norm": 0.5,
        "transport": "zmq",
        "codec": {"activations": "bf16", "1->0": "topk:0.1"},
        "keys": Path("keys.json"),
        "bind": "eth0",
        "ports": "29600-29620",
        "insecure": True,
        "seed": 5,
        "trace": "trace.json",
    }
    assert "profile" not in calls
    assert "trained on 2 minibatches, 100.0 samples/s" in outcome.stdout
    assert outcome.stdout.endswith("\n\nworker  term  predicted  peak\n\nchannel  transport\n")
    assert "measured 11.000 ms, predicted 10.000 ms" in outcome.stdout


def job_file(more: str) -> str:
    """Writes a target whose job has further values, given as source text. Returns the target's name."""
    Path("cli_target.py").write_text(
        f"def make():\n    return dict(model='m', data=[1, 2], loss_fn=len, optimizer=list, {more})\n"
    )
    return "cli_target.py:make"


def test_run_takes_the_jobs_own_arguments_and_the_command_line_counts_more(
    call: Caller, calls: dict[str, Any]
) -> None:
    target = job_file("epochs=7, lr_scheduler=len, microbatches=2, seed=3, insecure=True")
    outcome = call("run", target, "--plan", "plan.json", "--microbatches", "4", "--json")
    assert (outcome.status, outcome.stderr) == (0, "print of the runner\n")
    options = {name: value for name, value in calls["run"][2].items() if name not in ("data", "loss_fn")}
    assert options == {
        "optimizer": list,
        "epochs": 7,
        "lr_scheduler": len,
        "microbatches": 4,
        "seed": 3,
        "insecure": True,
        "progress": False,
    }


@pytest.mark.parametrize("command", [["run", "--plan", "plan.json"], ["profile"]])
def test_a_job_with_what_nobody_reads_is_refused_before_anything_runs(
    call: Caller, calls: dict[str, Any], command: list[str]
) -> None:
    target = job_file("lr_schedule=1")
    outcome = call(command[0], target, *command[1:])
    assert outcome.status == 2
    assert outcome.error() == (
        f"target '{target}' returned 'lr_schedule', which pipedream.run does not take: do you mean"
        " 'lr_scheduler'?"
    )
    assert calls == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [("[][0]", "IndexError: list index out of range"), ("a, b = [1]", "ValueError: not enough values to")],
)
def test_an_error_of_the_jobs_code_names_its_kind_and_its_line(call: Caller, body: str, said: str) -> None:
    Path("cli_target.py").write_text(f"def make():\n    fail()\n\ndef fail():\n    {body}\n")
    for command in (("profile", "cli_target.py:make"), ("run", "cli_target.py:make", "--plan", "plan.json")):
        line = call(*command).error()
        assert line.startswith(said)
        assert line.endswith(f"({Path('cli_target.py').resolve()}, line 5)")


def test_a_target_that_ends_the_process_is_told_with_its_line(call: Caller) -> None:
    Path("cli_target.py").write_text("import sys\n\nsys.exit(3)\n")
    outcome = call("explain", "cli_target.py:make")
    assert outcome.status == 2
    assert outcome.error().startswith("SystemExit: sys.exit(3) was called: TARGET must return the job")
    assert outcome.error().endswith("cli_target.py, line 3)")


def test_a_warning_is_one_line_without_the_line_of_the_command_that_warns(
    call: Caller, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    warns = "lambda *arguments, **options: warn('the plan is\\nno good')"
    of_this_library = {"__name__": "pipedream.launch", "warn": warn_the_caller}
    monkeypatch.setattr(runner, "run", eval(warns, of_this_library))
    Path("odd.json").write_text(json.dumps(Plan.straight(2, 2).to_dict() | {"microbatchs": 4}))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        of_run = call("run", "cli_target.py:make", "--plan", "plan.json").stderr
        of_trace = call("trace", "--plan", "odd.json").stderr
    assert of_run.startswith("pipedream: warning: the plan is no good\n")
    assert of_trace.startswith("pipedream: warning: odd.json: ") and of_trace.count("\n") == 1


def test_a_jobs_mistake_is_told_before_its_layers_are_timed(call: Caller, calls: dict[str, Any]) -> None:
    target = job_file("memory='10Gb'")
    outcome = call("run", target, "--workers", "2", "--bandwidth", "1Gbps")
    assert outcome.error().startswith("memory is '10Gb'")
    assert calls == {}


def test_weights_that_no_rank_has_as_a_whole_are_not_saved(call: Caller, calls: dict[str, Any]) -> None:
    target = job_file("gather='none'")
    outcome = call("run", target, "--plan", "plan.json", "--output", "m.safetensors")
    assert outcome.error().startswith("gather is 'none', which leaves no whole model to save")
    assert calls == {}


def test_what_is_not_saved_is_said_with_the_option_that_does(call: Caller, calls: dict[str, Any]) -> None:
    for arguments, remedy in [
        (["profile", "cli_target.py:make"], "--output profile.json keeps it for"),
        (["partition", "profile.json", "--workers", "2", "--bandwidth", "1Gbps"], "--output plan.json keeps"),
        (["run", "cli_target.py:make", "--plan", "plan.json"], "--output FILE.safetensors does"),
    ]:
        assert remedy in call(*arguments).stdout
        json.loads(call(*arguments, "--json").stdout)
    assert "--output" not in call("profile", "cli_target.py:make", "--output", "p.json").stdout


def test_partition_chooses_the_schedule_and_simulate_takes_the_plans(call: Caller) -> None:
    arguments = ("partition", "profile.json", "--workers", "2", "--bandwidth", "1Gbit/s", "--straight")
    auto = ("--schedule", "auto", "--microbatches", "auto", "--output", "auto.json")
    assert "->  pipedream" in call(*arguments, *auto).stdout
    plan = Plan.load("auto.json")
    assert plan.schedule == "pipedream"
    simulated = json.loads(
        call("simulate", "auto.json", "--profile", "profile.json", "--schedule", "auto", "--json").stdout
    )
    assert (simulated["schedule"], simulated["num_microbatches"]) == ("pipedream", plan.microbatches)
    drawn = call("trace", "--plan", "auto.json", "--schedule", "auto", "--minibatches", "2", "--text")
    assert f"2 minibatches of {plan.microbatches} microbatches" in drawn.stdout
    without = call(*arguments, *auto, "--delay-max", "0")
    assert "->  flush" in without.stdout
    assert "give --plan FILE" in call("trace", "--stages", "2", "--schedule", "auto").error()
    assert "--microbatches is 'few'" in call(*arguments, "--microbatches", "few").error()


def test_straight_gives_a_plan_without_replicas_where_the_fastest_has_some(call: Caller) -> None:
    # One layer computes and the other does not, so the fastest plan has replicas.
    layers = (LayerProfile("first", 40, 60, 8, 8), LayerProfile("second", 0, 0, 0, 0))
    Profile(layers, model="tiny").save("profile.json")
    arguments = ["partition", "profile.json", "--workers", "2", "--bandwidth", "10Gbps", "--output", "p.json"]
    call(*arguments)
    assert max(stage.num_replicas for stage in Plan.load("p.json").stages) == 2
    call(*arguments, "--straight")
    assert max(stage.num_replicas for stage in Plan.load("p.json").stages) == 1


@pytest.mark.parametrize(("options", "num_replicas"), [((), 2), (("--straight",), 1)])
def test_run_takes_the_fastest_plan(
    call: Caller,
    calls: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    num_replicas: int,
) -> None:
    layers = (LayerProfile("first", 40, 60, 8, 8), LayerProfile("second", 0, 0, 0, 0))
    monkeypatch.setattr(
        sys.modules["pipedream.profiling.profiler"], "profile", lambda *_, **__: Profile(layers)
    )
    outcome = call("run", "cli_target.py:make", "--workers", "2", "--bandwidth", "10Gbps", *options)
    assert outcome.status == 0
    assert max(stage.num_replicas for stage in calls["run"][1].stages) == num_replicas


def test_run_without_a_plan_chooses_the_schedule_where_it_is_auto(
    call: Caller, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["pipedream.profiling.profiler"], "profile", lambda *_, **__: PROFILE)
    arguments = ("run", "cli_target.py:make", "--workers", "2", "--bandwidth", "1Gbit/s", "--straight")
    assert call(*arguments).status == 0
    assert calls["run"][1].schedule is None
    assert call(*arguments, "--schedule", "auto").status == 0
    assert (calls["run"][1].schedule, calls["run"][1].microbatches) == ("pipedream", 32)
    assert call(*arguments, "--schedule", "auto", "--microbatches", "4").status == 0
    assert calls["run"][1].microbatches == 4


def test_run_takes_the_replicas_of_each_stage_for_a_plan(call: Caller, calls: dict[str, Any]) -> None:
    Path("cli_layers.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(*map(torch.nn.Identity, range(6)))\n"
        "    return {'model': model, 'data': [], 'loss_fn': max, 'optimizer': max}\n"
    )
    assert call("run", "cli_layers.py:make", "--plan", "2-1").status == 0
    assert calls["run"][1] == Plan.replicated(6, (2, 1))
    outcome = call("run", "cli_layers.py:make", "--plan", "2-1-1-1-1-1-1")
    assert outcome.error() == "there are 7 stages and 6 layers: a stage needs one"


def test_run_counts_the_layers_of_a_module_that_is_cut_for_the_replicas_of_each_stage(
    call: Caller, calls: dict[str, Any]
) -> None:
    Path("cli_module.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))\n"
        "    def forward(self, inputs):\n"
        "        return self.third(self.second(self.first(inputs)))\n"
        "def make(data=None):\n"
        "    data = data or [(torch.randn(2, 4), torch.randn(2, 4))]\n"
        "    loss_fn = torch.nn.functional.mse_loss\n"
        "    return {'model': Net(), 'data': data, 'loss_fn': loss_fn, 'optimizer': max}\n"
        "def make_iterator():\n"
        "    return make(iter([]))\n"
    )
    outcome = call("run", "cli_module.py:make", "--plan", "2-1")
    assert outcome.status == 0, outcome.stderr
    assert calls["run"][1] == Plan.replicated(3, (2, 1))
    outcome = call("run", "cli_module.py:make_iterator", "--plan", "2-1")
    assert outcome.error().startswith("data is an iterator, which can be read once, and the model's layers")


def test_run_json_has_the_plan_and_the_result_with_null_for_nan(call: Caller, calls: dict[str, Any]) -> None:
    fields = json.loads(call("run", "cli_target.py:make", "--plan", "plan.json", "--json").stdout)
    assert fields["plan"] == Plan.straight(2, 2).to_dict()
    assert fields["losses"] == [0.5, None]
    assert fields["transports"] == ["zmq"]
    assert fields["memory"] == [{"model as given": {"predicted": 8, "peak": 8}}]
    assert fields["recompute"] == [False]
    (channel,) = fields["channels"]
    assert (channel["codec"], channel["wire_bytes"], channel["overlap_share"]) == ("bf16", 512, None)
    assert calls["run"][2]["progress"] is False


def test_run_without_a_plan_profiles_and_plans_first(call: Caller, calls: dict[str, Any]) -> None:
    outcome = call("run", "cli_target.py:make", "--workers", "2", "--bandwidth", "10Gbit/s", "--straight")
    assert outcome.status == 0, outcome.stderr
    assert calls["profile"][3]["seconds"] > 0
    assert calls["run"][1].stages == (Stage(0, 0), Stage(1, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --plan FILE, or --workers N and --bandwidth"),
        (["--workers", "2"], "give --plan FILE, or --workers N and --bandwidth"),
        (["--plan", "plan.json", "--workers", "2"], "--plan already says"),
        (["--plan", "2-x"], "2-x: neither a file nor the replicas of each stage, such as 2-1"),
        (["--plan", "profile.json"], "profile.json: format is 'pipedream.profile/1', not 'pipedream.plan/1'"),
        (
            ["--plan", "plan.json", "--output", "gone/model.safetensors"],
            "gone/model.safetensors: there is no",
        ),
        (["--plan", "plan.json", "--trace", "trace.txt"], "trace file is 'trace.txt': its name must end in"),
        (["--plan", "plan.json", "--trace", "gone/trace.json"], "gone/trace.json: there is no folder"),
        (
            ["--plan", "plan.json", "--output", "model.pt"],
            "model.pt: weights are saved in the safetensors fo",
        ),
        (["--plan", "plan.json", "--output", "model"], "model: weights are saved in the safetensors format"),
        (
            ["--plan", "plan.json", "--schedule", "zero_bubble"],
            "schedule is 'zero_bubble': use one of 'p",
        ),
        (["--workers", "2", "--bandwidth", "fast"], "bandwidth is 'fast': write a number and a unit"),
        (["--workers", "0", "--bandwidth", "1Gbps"], "--workers is 0: give a whole number of at least 1"),
        (
            ["--workers", "2", "--bandwidth", "1Gbps", "--memory", "10Gb"],
            "memory is '10Gb': the unit 'Gb' is",
        ),
        (["--workers", "2", "--bandwidth", "1Gbps", "--epochs", "0"], "epochs is 0: give a whole number"),
        (["--workers", "2", "--bandwidth", "1Gbps", "--keys", "gone.json"], "keys is 'gone.json': No such"),
        (["--plan", "plan.json", "--codec", "activations=bf16,int8"], "codec has the part 'int8': write WH"),
    ],
)
def test_mistake_in_run_is_found_before_anything_runs(
    call: Caller, calls: dict[str, Any], arguments: list[str], message: str
) -> None:
    outcome = call("run", "cli_target.py:make", *arguments)
    assert outcome.status == 2
    assert outcome.error().startswith(message)
    assert calls == {}


def test_run_under_torchrun_needs_a_plan_that_all_ranks_share(
    call: Caller, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = call("run", "cli_target.py:make", "--workers", "2", "--bandwidth", "10Gbit/s")
    assert outcome.status == 2
    assert outcome.error().startswith("under torchrun give --plan FILE")


def test_other_ranks_than_the_first_print_nothing(
    call: Caller, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    outcome = call("run", "cli_target.py:make", "--plan", "plan.json", "--json")
    assert (outcome.status, outcome.stdout) == (0, "")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (WorkerLost("stage 1 replica 0\nended at minibatch 7"), 1, "stage 1 replica 0 ended at minibatch 7"),
        (RuntimeError("no luck"), 1, "RuntimeError: no luck"),
        (ValueError("epochs is 0: give at least 1"), 2, "epochs is 0: give at least 1"),
        (TypeError("data is 3: give an iterable"), 2, "data is 3: give an iterable"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failure_of_a_run_is_one_line_with_its_status(
    call: Caller, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, line: str
) -> None:
    # The mock raises outside user code, so the error names no line of user code.
    monkeypatch.setattr(runner, "run", functools.wraps(runner.run)(Mock(side_effect=error)))
    outcome = call("run", "cli_target.py:make", "--plan", "plan.json", "--json")
    assert (outcome.status, outcome.stdout) == (status, "")
    assert outcome.stderr.splitlines()[-1] == f"pipedream: error: {line}"


def test_traceback_is_shown_where_the_environment_asks_for_it(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEDREAM_TRACEBACK", "1")
    outcome = call("partition", "profile.json", "--workers", "0", "--bandwidth", "1Gbit/s")
    assert outcome.status == 2
    assert outcome.stderr.startswith("Traceback")


def test_weights_are_saved_with_tied_ones_kept_once(
    call: Caller, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    layers[1].weight = layers[0].weight
    module = ModuleType("cli_layers_target")
    module.make = lambda: {"model": layers, "data": [1], "loss_fn": len, "optimizer": list}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cli_layers_target", module)
    outcome = call("run", "cli_layers_target:make", "--plan", "plan.json", "--output", "model.safetensors")
    assert outcome.status == 0
    saved = load_file("model.safetensors")
    assert set(saved) == {"0.weight", "0.bias", "1.bias"}
    assert torch.equal(saved["0.weight"], layers[0].weight)


def test_no_arguments_show_the_help_and_version_the_version(call: Caller) -> None:
    outcome = call()
    assert outcome.status == 0
    for command in ("profile", "partition", "run", "trace"):
        assert f"  {command}  " in outcome.stdout
    version = importlib.import_module("pipedream").__version__
    assert call("--version").stdout == f"pipedream {version}\n"


def test_keys_makes_one_file_for_all_machines_and_says_what_to_do_with_it(call: Caller) -> None:
    outcome = call("keys", "keys.json")
    assert (outcome.status, outcome.stderr) == (0, "")
    keys = load_keys("keys.json")
    assert outcome.stdout.startswith("keys.json\ncopy it to every machine of the run")
    assert keys.secret not in outcome.stdout
    again = call("keys", "keys.json")
    assert again.status == 2
    assert again.error().startswith("keys.json: is there already, and keys are never overwritten")
    assert load_keys("keys.json") == keys


def test_keys_makes_a_file_per_machine(call: Caller) -> None:
    outcome = call("keys", "keys", "--machines", "2", "--json")
    assert (outcome.status, outcome.stderr) == (0, "")
    fields = json.loads(outcome.stdout)
    assert fields["files"] == ["keys/machine-0.json", "keys/machine-1.json"]
    made = [load_keys(path) for path in fields["files"]]
    assert fields["public"] == [keys.public for keys in made]
    assert all(keys.allowed == tuple(fields["public"]) for keys in made)
    assert not any(keys.secret in outcome.stdout for keys in made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone/keys.json"], "gone/keys.json: there is no folder"),
        (["gone/keys", "--machines", "2"], "gone/keys: there is no folder"),
        (["."], ".: is a folder, give a file"),
        (["plan.json", "--machines", "2"], "plan.json: is a file, give a folder"),
        (["keys", "--machines", "0"], "machines is 0: give at least 1"),
        (["keys", "--machines", "1000000000"], "machines is 1000000000: a run has at most 65536 workers"),
        ([], "Missing argument 'PATH'"),
    ],
)
def test_mistake_in_keys_is_one_line_and_makes_no_file(
    call: Caller, arguments: list[str], message: str
) -> None:
    before = sorted(Path().iterdir())
    outcome = call("keys", *arguments)
    assert outcome.status == 2
    assert outcome.error().startswith(message)
    assert sorted(Path().iterdir()) == before


def test_keys_in_a_process_of_its_own_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pipedream.cli import main\n"
        "try:\n"
        "    main(['keys', sys.argv[1]])\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'rich', 'safetensors'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = run_python("-c", code, str(tmp_path / "keys.json"))
    assert done.returncode == 0, done.stderr
    assert load_keys(tmp_path / "keys.json").allowed


def test_partition_in_a_process_of_its_own_imports_no_torch(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    script = (
        "import sys\nimport pipedream.cli\n"
        "try:\n    pipedream.cli.main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'zmq', 'rich', 'safetensors'} & set(sys.modules)\n"
        "    print('heavy', sorted(heavy), file=sys.stderr)\n"
    )
    profile_file = str(tmp_path / "profile.json")
    done = run_python(
        "-c", script, "partition", profile_file, "--workers", "2", "--bandwidth", "10Gbit/s", "--json"
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["format"] == "pipedream.plan/1"
    assert done.stderr == "heavy []\n"
    done = run_python("-c", script, "partition", "--help")
    assert done.returncode == 0
    assert "--bandwidth" in done.stdout
    assert done.stderr == "heavy []\n"


def test_package_import_loads_no_torch_and_lists_its_public_names() -> None:
    script = (
        "import sys, pipedream\n"
        "assert set(pipedream.__all__) <= set(dir(pipedream))\n"
        "assert pipedream.Plan.straight(2, 2).num_stages == 2\n"
        "assert pipedream.partition.__module__ == 'pipedream.planning.partitioner'\n"
        "assert pipedream.FileFormatError.__mro__[1] is ValueError\n"
        "assert not {'torch', 'numpy', 'typer'} & set(sys.modules)\n"
        "try:\n    pipedream.plann\n"
        "except AttributeError as error:\n    print(error)\n"
    )
    done = run_python("-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "module 'pipedream' has no attribute 'plann'\n"


@pytest.mark.skipif(not SHARED_PROFILES.is_dir(), reason="the published profiles are not beside this tree")
def test_module_as_a_command_prints_the_published_vgg16_plan() -> None:
    done = run_python(
        *("-m", "pipedream", "partition", str(SHARED_PROFILES / "vgg16.json")),
        *("--workers", "16", "--bandwidth", "10Gbit/s", "--json"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    fields = json.loads(done.stdout)
    assert [stage["num_replicas"] for stage in fields["stages"]] == [15, 1]
    assert fields["bottleneck_ms"] == pytest.approx(44.159, rel=1e-9)


def test_trace_draws_the_schedule_and_says_its_bubble(call: Caller) -> None:
    outcome = call("trace", "--stages", "4", "--output", "schedule.svg")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout == (
        "pipedream: 4 stages, 8 minibatches\n"
        "bubble 27.3 %, 0.0 % in the steady state\n"
        "picture saved in schedule.svg\n"
    )
    drawn = Path("schedule.svg").read_text()
    for text in ("pipedream: 4 stages, 8 minibatches", "warm-up", "steady", "cool-down", "time, forwards"):
        assert f">{text}</text>" in drawn


def test_trace_without_an_output_prints_the_picture_and_writes_no_file(call: Caller) -> None:
    before = set(Path().iterdir())
    outcome = call("trace", "--schedule", "flush", "--stages", "2", "--minibatches", "1")
    assert (outcome.status, outcome.stderr) == (0, "")
    lines = outcome.stdout.splitlines()
    assert lines[0] == "flush: 2 stages, 1 minibatch of 2 microbatches"
    assert lines[1].startswith("bubble ")
    assert [line.split()[:2] for line in lines[3:5]] == [["worker", "0"], ["worker", "1"]]
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("schedule", "title"),
    [
        ("vertical_sync", "vertical_sync: 4 stages, 8 minibatches"),
        ("naive", "unstashed: 4 stages, 8 minibatches"),
        ("2bw", "2bw: 4 stages, 4 minibatches of 4 microbatches"),
        ("flush", "flush: 4 stages, 2 minibatches of 4 microbatches"),
        ("gpipe", "gpipe: 4 stages, 2 minibatches of 4 microbatches"),
        ("interleaved", "interleaved: 4 stages on 2 workers, 2 minibatches of 4 microbatches"),
        ("model_parallel", "model_parallel: 4 stages, 3 minibatches"),
    ],
)
def test_trace_has_fitting_numbers_for_every_schedule(call: Caller, schedule: str, title: str) -> None:
    outcome = call("trace", "--schedule", schedule, "--stages", "4", "--output", "picture.txt")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.splitlines()[0] == title
    assert Path("picture.txt").read_text().startswith(title + "\nbubble ")


def test_trace_text_can_be_read_back_and_drawn(call: Caller) -> None:
    chosen = ("--schedule", "interleaved", "--stages", "6", "--workers", "2", "--recompute")
    outcome = call("trace", *chosen, "--microbatches", "3", "--minibatches", "2", "--text")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith(
        "# interleaved: 6 stages on 2 workers, 2 minibatches of 3 microbatches\nworker 0\nFORWARD stage 0 "
    )
    assert not Path("schedule.svg").exists()
    Path("lists").write_text(outcome.stdout)
    again = call("trace", "--schedule", "interleaved", "--program", "lists", "--text")
    assert again.stdout == outcome.stdout


@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync", "unstashed", "2bw", "flush", "gpipe"])
def test_trace_text_of_a_straight_schedule_is_a_program_that_runs(call: Caller, schedule: str) -> None:
    chosen = ("--schedule", schedule, "--stages", "3", "--microbatches", "4")
    outcome = call("trace", *chosen, "--text")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.count("body every 1 minibatch\n") == 3
    Path("mine.txt").write_text(outcome.stdout)
    assert Program.load("mine.txt") == Program.of(schedule, 3, microbatches=4)
    again = call("trace", "--program", "mine.txt", "--text").stdout
    assert again.partition("\n")[2] == outcome.stdout.partition("\n")[2]
    fields = json.loads(call("trace", "--program", "mine.txt", "--minibatches", "5", "--json").stdout)
    of_name = json.loads(call("trace", *chosen, "--minibatches", "5", "--json").stdout)
    named = ("schedule", "in_flight", "notes")  # a program's in_flight is derived from its lists
    assert {name: value for name, value in fields.items() if name not in named} == {
        name: value for name, value in of_name.items() if name not in named
    }


def test_trace_names_what_is_wrong_with_a_program(call: Caller) -> None:
    text = call("trace", "--schedule", "flush", "--stages", "2", "--text").stdout
    Path("mine.txt").write_text(text.replace("UPDATE stage 1 minibatch 0", "UPGRADE stage 1 minibatch 0", 1))
    outcome = call("trace", "--program", "mine.txt")
    assert outcome.status == 2
    assert outcome.error().startswith("mine.txt: line ") and "UPGRADE" in outcome.error()
    Path("mine.txt").write_text(text)
    outcome = call("trace", "--program", "mine.txt", "--stages", "3")
    assert outcome.status == 2
    assert outcome.error() == "--program has a program, which says it all: leave --stages out"


_HALF_A_MINIBATCH_AHEAD = """
worker 0
warm-up
FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
body every 1 minibatch
FORWARD stage 0 minibatch 0 microbatch 1 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 0 reads version 0
FORWARD stage 0 minibatch 1 microbatch 0 reads version 0
BACKWARD stage 0 minibatch 0 microbatch 1 reads version 0
UPDATE stage 0 minibatch 0 writes version 1
"""


def test_trace_notes_a_backward_that_reads_another_version_than_its_forward(call: Caller) -> None:
    Path("mine.txt").write_text(_HALF_A_MINIBATCH_AHEAD)
    note = call("trace", "--program", "mine.txt").stdout.splitlines()[-1]
    assert note == (
        "line 7, time 2 of the body: BACKWARD stage 0 minibatch 1 microbatch 0 reads version 1, and its"
        " forward (line 8) version 0, as under unstashed; if both are to read one version, put all of"
        " minibatch 0, with its update, into the warm-up"
    )
    assert json.loads(call("trace", "--program", "mine.txt", "--json").stdout)["notes"] == [note]
    # This schedule reads other versions on purpose.
    named = call("trace", "--schedule", "unstashed", "--stages", "2", "--json")
    assert json.loads(named.stdout)["notes"] == []


def test_trace_names_the_worker_whose_body_is_missing(call: Caller) -> None:
    Path("mine.txt").write_text(_HALF_A_MINIBATCH_AHEAD.replace("body every 1 minibatch\n", ""))
    outcome = call("trace", "--program", "mine.txt")
    assert outcome.error().startswith("mine.txt: worker 0 has no body; write")


def test_a_program_is_drawn_with_recomputing_and_shown_as_lists_then(call: Caller) -> None:
    Path("mine.txt").write_text(call("trace", "--schedule", "pipedream", "--stages", "2", "--text").stdout)
    outcome = call("trace", "--program", "mine.txt", "--recompute", "--output", "picture.svg")
    assert (outcome.status, outcome.stderr) == (0, "")
    lists = call("trace", "--program", "mine.txt", "--recompute", "--text").stdout
    assert "RECOMPUTE" in lists and "body" not in lists
    assert "body" not in call("trace", "--schedule", "flush", "--stages", "2", "--recompute", "--text").stdout


def test_a_body_of_several_minibatches_has_the_mean_time_of_all(call: Caller) -> None:
    steps = [f"{{0}} stage {{1}} minibatch {i} microbatch 0 reads version 0" for i in range(5)]
    lines = []
    for stage in (0, 1):
        lines += [f"worker {stage}", "body every 5 minibatches"]
        lines += [step.format("FORWARD", stage) for step in steps]
        for i, step in enumerate(steps):
            lines += [step.format("BACKWARD", stage)]
            lines += [f"UPDATE stage {stage} minibatch {i} writes version {i + 1}"]
    Path("fives.txt").write_text("\n".join(lines))
    fields = json.loads(call("trace", "--program", "fives.txt", "--times", "1,2", "--json").stdout)
    # A repetition has 5 forwards and backwards, and a forward and a backward of the other stage: 5 (1 + 2) +
    # 1 + 2 ms.
    assert fields["ms_per_minibatch"] == pytest.approx(18 / 5)


def test_trace_shows_lists_in_another_order_than_the_schedules_own(call: Caller) -> None:
    text = call("trace", "--schedule", "gpipe", "--stages", "2", "--minibatches", "1", "--text").stdout
    lines = text.splitlines()
    second = lines.index("worker 1") + 3  # the lines after the first RECV and FORWARD
    lines[second : second + 4] = lines[second + 2 : second + 4] + lines[second : second + 2]
    Path("lists").write_text("\n".join(lines))
    fields = json.loads(call("trace", "--schedule", "gpipe", "--program", "lists", "--json").stdout)
    opcodes = [step["opcode"] for step in fields["programs"][1]]
    assert opcodes[:6] == ["RECV", "FORWARD", "BACKWARD", "SEND", "RECV", "FORWARD"]
    assert fields["activations_live_max"] == [2, 1]


def test_trace_adds_the_transfers_to_lists_that_have_none(call: Caller) -> None:
    text = call("trace", "--schedule", "flush", "--stages", "2", "--minibatches", "1", "--text").stdout
    computed = [line for line in text.splitlines() if not line.startswith(("SEND", "RECV"))]
    Path("lists").write_text("\n".join(computed))
    assert call("trace", "--schedule", "flush", "--program", "lists", "--text").stdout == text


@pytest.mark.parametrize(
    ("found", "put", "message"),
    [
        ("BACKWARD stage 1 minibatch 0 microbatch 1 reads version 0\n", "", "UPDATE stage 1 minibatch 0"),
        (
            "BACKWARD stage 1 minibatch 0 microbatch 1 reads version 0",
            "BACKWARD stage 1 minibatch 0 microbatch 1 reads version 1",
            "lists: worker 1, position 6, BACKWARD stage 1 minibatch 0 microbatch 1 reads version 1: ",
        ),
        ("UPDATE stage 0", "UPGRADE stage 0", "UPGRADE"),
        ("worker 1\n", "", "there are 1 programs; the plan has 2 workers"),
    ],
)
def test_broken_list_is_refused_with_the_instruction_at_fault(
    call: Caller, found: str, put: str, message: str
) -> None:
    text = call("trace", "--schedule", "flush", "--stages", "2", "--minibatches", "1", "--text").stdout
    assert found in text
    Path("lists").write_text(text.replace(found, put))
    outcome = call("trace", "--schedule", "flush", "--stages", "2", "--program", "lists")
    assert outcome.status == 2
    assert outcome.error().startswith("lists: ")
    assert message in outcome.error()
    assert not Path("schedule.svg").exists()


def test_trace_json_has_the_figures_and_every_instruction_with_its_time(call: Caller) -> None:
    outcome = call(
        *("trace", "--schedule", "flush", "--stages", "2", "--microbatches", "3", "--minibatches", "2"),
        *("--times", "10,20,5", "--transfer", "1", "--json"),
    )
    assert (outcome.status, outcome.stderr) == (0, "")
    fields = json.loads(outcome.stdout)
    programs = fields.pop("programs")
    # Stage 1 begins at 11 ms and has 3 * 30 ms of work. With two microbatches in flight, the third forward at
    # stage 0 waits for the first gradient, so stage 1 waits 2 ms once. The last backward of stage 0 ends 21
    # ms after that of stage 1.
    minibatch_ms = 11 + 90 + 2 + 21 + 5
    first_replicas = {"from_replica": 0, "to_replica": 0}
    assert fields == {
        "schedule": "flush",
        "num_stages": 2,
        "num_workers": 2,
        "worker_of_stage": [0, 1],
        "num_replicas": [1, 1],
        "num_spare_shards": 0,
        "staleness": 0,
        "num_minibatches": 2,
        "num_microbatches": 3,
        "in_flight": [2, 1],
        "recompute": [False, False],
        "forward_ms": 10.0,
        "backward_ms": 20.0,
        "update_ms": 5.0,
        "transfer_ms": 1.0,
        "shard_ms": 0.0,
        "makespan_ms": 2 * minibatch_ms,
        "bubble_share": pytest.approx(1 - 95 / minibatch_ms),
        "steady_bubble_share": pytest.approx(1 - 95 / minibatch_ms),
        "ms_per_minibatch": minibatch_ms,
        "versions_live_max": [1, 1],
        "activations_live_max": [2, 1],
        "activations_queued_max": [2],
        "gradients_queued_max": [2],
        "edges": [
            {"kind": "activation", "from_stage": 0, "to_stage": 1} | first_replicas | {"queued_max": 2},
            {"kind": "gradient", "from_stage": 1, "to_stage": 0} | first_replicas | {"queued_max": 2},
        ],
        "output": None,
        "notes": [],
    }
    assert [len(program) for program in programs] == [26, 26]
    assert programs[0][1] == {
        "opcode": "SEND",
        "stage": 0,
        "replica": 0,
        "minibatch": 0,
        "microbatch": 0,
        "version": 0,
        "edge": {"kind": "activation", "from_stage": 0, "to_stage": 1} | first_replicas,
        "begin_ms": 10,
        "end_ms": 10,
    }
    assert programs[0][-1] == {
        "opcode": "UPDATE",
        "stage": 0,
        "replica": 0,
        "minibatch": 1,
        "microbatch": 0,
        "version": 2,
        "begin_ms": 2 * minibatch_ms - 5,
        "end_ms": 2 * minibatch_ms,
    }
    assert not Path("schedule.svg").exists()


def test_trace_takes_stages_in_flight_and_workers_from_a_plan(call: Caller) -> None:
    Plan((Stage(0, 1), Stage(2, 2)), in_flight=(5, 1)).save("deep.json")
    fields = json.loads(call("trace", "--plan", "deep.json", "--json").stdout)
    assert (fields["in_flight"], fields["worker_of_stage"], fields["num_minibatches"]) == ([5, 1], [0, 1], 10)
    Plan.straight(4, 4, num_workers=2).save("shared.json")
    outcome = call("trace", "--plan", "shared.json", "--schedule", "interleaved", "--json")
    assert json.loads(outcome.stdout)["worker_of_stage"] == [0, 1, 0, 1]


def test_trace_writes_a_perfetto_trace_where_the_name_says_so(call: Caller) -> None:
    assert call("trace", "--stages", "2", "--output", "trace.json").status == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert "backward 7.0" in {event["name"] for event in events}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --stages N, for example 4, or --plan FILE"),
        (["--stages", "0"], "there are 0 stages: trace shows from 1 to 1024"),
        (["--stages", "1000000000000"], "there are 1000000000000 stages: trace shows from 1 to 1024"),
        (["--stages", "2", "--plan", "plan.json"], "--plan already says what --stages and --workers would"),
        (["--stages", "2", "--schedule", "nope"], "schedule is 'nope': it is one of"),
        (
            ["--stages", "2", "--schedule", "data_parallel"],
            "it has one stage, with a replica at",
        ),
        (
            ["--stages", "5", "--schedule", "interleaved"],
            "--stages is 5: give an even number, or --workers too",
        ),
        (["--stages", "4", "--schedule", "interleaved", "--workers", "0"], "--workers is 0: give at least 1"),
        (["--stages", "4", "--workers", "2"], 'only schedule "interleaved" runs several stages at a worker'),
        (
            ["--stages", "4", "--schedule", "2bw", "--microbatches", "2"],
            "num_microbatches is 2 with in_flight 4",
        ),
        (["--stages", "2", "--microbatches", "0"], "num_microbatches is 0"),
        (["--stages", "2", "--minibatches", "0"], "--minibatches is 0: give at least 1"),
        (["--stages", "2", "--minibatches", "1000000"], "trace shows at most 2000000: give fewer with"),
        (
            ["--stages", "3", "--in-flight", "2,1"],
            "--in-flight is '2,1': give one whole number for each of the 3",
        ),
        (
            ["--stages", "2", "--in-flight", "2,x"],
            "--in-flight is '2,x': give one whole number for each of the 2",
        ),
        (
            ["--stages", "2", "--in-flight", "1,2"],
            "--in-flight is '1,2': it must not rise downstream; deadlock",
        ),
        (
            ["--stages", "2", "--times", "1"],
            "--times is '1': give forward,backward or forward,backward,update",
        ),
        (["--stages", "2", "--times", "1,2,3,4"], "--times is '1,2,3,4': give forward,backward or"),
        (["--stages", "2", "--times", "1,-2"], "backward_ms is -2.0: it must not be negative"),
        (["--stages", "2", "--transfer", "nan"], "transfer_ms is nan: it must be finite"),
        (["--stages", "2", "--output", "a.bmp"], "picture file is 'a.bmp': its name must end in one of .svg"),
        (["--stages", "2", "--output", "no/a.svg"], "no/a.svg: there is no folder"),
        (["--stages", "2", "--text", "--json"], "--text and --json both print on stdout: give one of them"),
        (["--program", "missing"], "missing: No such file or directory"),
        (
            ["--program", "empty"],
            "empty: has no instructions; `pipedream trace --stages 4 --text` prints some",
        ),
        (["--program", "huge"], "there are 1000000000001 stages: trace shows from 1 to 1024"),
        (["--plan", "2-x"], "2-x: neither a file nor the replicas of each stage, such as 2-1"),
        (["--plan", "2-0"], "plan 2-0 gives stage 1 no replica: each stage has at least 1"),
        (
            ["--plan", "2+3-1"],
            "plan 2+3-1 gives stage 0 more spare shards, 3, than 2 replicas can use: at most 2",
        ),
        (
            ["--plan", "2-1", "--schedule", "interleaved"],
            "schedule is 'interleaved', and a stage has several",
        ),
        (
            ["--plan", "2-1", "--staleness", "1", "--schedule", "gpipe"],
            "staleness is 1, and schedule is",
        ),
        (["--plan", "1000000000"], "plan 1000000000 has 1000000000 replicas: a plan has at most 65536"),
        (["--plan", "2000-1"], "--plan has 2001 replicas: trace shows at most 1024"),
        (
            ["--stages", "2", "--microbatches", "1" * 30],
            f"--microbatches is {'1' * 30}: give at most 92233720",
        ),
        (["--stages", "2", "--in-flight", f"{'1' * 30},1"], "1,1': give one whole number for each of the 2"),
        (["--program", "binary"], "binary: 'utf-8' codec can't decode byte 0xff in position 0"),
        (["--program", "long"], f'long: line 1: "{"é" * 60}..." is not an instruction'),
        (["--plan", "2-1", "--shard", "-1"], "shard_ms is -1.0: it must not be negative"),
        (["--plan", "2-1", "--sync", "wild"], "sync is 'wild': use one of 'bsp', 'ssp', 'asp'"),
        (["--plan", "2-1", "--sync", "asp", "--schedule", "flush"], "sync is 'asp', and schedule is 'flush'"),
    ],
)
def test_mistake_in_trace_is_one_line_and_status_2(call: Caller, arguments: list[str], message: str) -> None:
    Path("empty").write_text("# nothing\n")
    Path("binary").write_bytes(b"\xff\xfe\x00")
    Path("long").write_text("é" * 1000)
    Path("huge").write_text(
        "worker 0\nFORWARD stage 1000000000000 minibatch 0 microbatch 0 reads version 0\n"
    )
    outcome = call("trace", *arguments)
    assert outcome.status == 2
    assert message in outcome.error()
    assert "<string>" not in outcome.error()  # frames of a dataclass's __init__ have this file name


def test_trace_shows_the_replicas_of_a_plan(call: Caller) -> None:
    Plan((Stage(0, 0, 2), Stage(1, 1))).save("replicated.json")
    written, saved = (
        json.loads(call("trace", "--plan", plan, "--json").stdout) for plan in ("2-1", "replicated.json")
    )
    assert written == saved
    assert (written["num_replicas"], written["num_workers"], written["in_flight"]) == ([2, 1], 3, [2, 1])
    assert {step["replica"] for step in written["programs"][1]} == {1}
    assert {(edge["kind"], edge["from_replica"]) for edge in written["edges"]} >= {("push", 0), ("pull", 1)}
    assert written["ms_per_minibatch"] == 3.0, "two replicas have twice the time"
    text = call("trace", "--plan", "2-1", "--staleness", "1", "--text").stdout
    assert text.startswith("# pipedream: 2 stages, 2-1 replicas, staleness 1, 16 minibatches\n")
    assert "SEND push stage 0 replica 1 to stage 0 minibatch 1" in text
    text = call("trace", "--plan", "2-1", "--sync", "asp", "--text").stdout
    assert text.startswith("# pipedream: 2 stages, 2-1 replicas, asynchronous, 16 minibatches\n")
    text = call("trace", "--plan", "2-1", "--sync", "allreduce", "--text").stdout
    assert "push" not in text


def test_trace_text_and_json_import_neither_torch_nor_matplotlib() -> None:
    script = (
        "import sys\nimport pipedream.cli\n"
        "try:\n    pipedream.cli.main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'zmq', 'matplotlib'} & set(sys.modules)\n"
        "    print('heavy', sorted(heavy), file=sys.stderr)\n"
    )
    for form in ("--text", "--json"):
        done = run_python("-c", script, "trace", "--stages", "4", form)
        assert (done.returncode, done.stderr) == (0, "heavy []\n")
        assert "FORWARD" in done.stdout


def test_a_mistaken_option_of_trace_is_told_before_a_matplotlib_that_is_missing(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert call("trace", "--schedule", "foo", "--stages", "4").error().startswith("schedule is 'foo'")
    assert call("trace", "--stages", "4", "--times", "1").error().startswith("--times is '1'")
    assert "needs matplotlib" in call("trace", "--stages", "4", "--output", "schedule.svg").error()
