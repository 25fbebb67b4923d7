"""Builds, tests and measures on a GPU machine without a network, in named groups, the most useful first.

    tools/gpu_check.sh [GROUP ...] [--results FOLDER] [--limit SECONDS] [--list]

    core       builds with CUDA; runs the C++ tests of device, weights, codec, transport, pool, channel and
               stage, and their CUDA cases again under compute-sanitizer memcheck
    training   compares every pair of options with the reference, with two and four workers on one GPU; tests
               the transports (CUDA IPC, and staging through shared memory and through tcp), codecs,
               optimizers' kernels, offloading, and models, data and optimizers that do unusual things
    speed      compares transfers between devices through a channel with plain CUDA copies, and a worker with
               a plain loop; records the timelines of copies and kernels
    models     compares two workers with a plain loop on a Llama-like model in bfloat16; runs two examples on
               the GPU

Without GROUP all groups run, one after the other. Each group can run alone on a bare machine, and ends within
--limit seconds (540). A step for which no time is left is reported as not run.

The machine must have Python 3.10 or later with torch (CUDA), pybind11, cmake, ninja or make, pytest,
hypothesis; nvcc; and GoogleTest for the C++ tests. Other wheels that it lacks (pyzmq, typer, rich,
safetensors, scikit-learn, matplotlib) are taken from the folder .whl.

Each group writes two files into FOLDER (bench/results/gpu). <group>.log has all output. <group>.json has the
device, the commit, every step's outcome, and the figures that steps printed as JSON. The group speed also
writes timelines.zip. If a step fails, the steps that do not need it still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"
CPP = BUILD / "cpp"
_LIMIT_S = 540.0
_TAIL_LINES = 25
_NATIVE = "-DCMAKE_CUDA_ARCHITECTURES=native"  # compiles for this machine's GPU alone, which is faster
_CPP_SUITES = (
    "device",
    "weights",
    "codec",
    "transport",
    "pool",
    "channel",
    "stage",
)  # the most useful first


@dataclass(frozen=True)
class Step:
    """One command of a group. It runs if all steps in `needs` have passed."""

    name: str
    command: Sequence[str]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = _LIMIT_S


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str
    """One of "passed", "failed", "timed out", "not run"."""
    seconds: float
    figures: list[Any]
    """The lines of the output that are JSON objects or lists."""
    tail: str
    """The last lines of the output if the step did not pass, or the reason why it did not run."""


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


_PIP = python("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target", str(SITE))


def wheel_steps() -> list[Step]:
    """Returns the step that installs the wheels from the folder .whl into SITE; empty if there are none."""
    wheels = sorted(str(wheel) for wheel in (ROOT / ".whl").glob("*.whl"))
    return [Step("wheels", (*_PIP, "--no-compile", *wheels))] if wheels else []


def install_steps() -> list[Step]:
    """Returns the steps that install the wheels, and pipedream with CUDA."""
    return [*wheel_steps(), Step("install", (*_PIP, "--no-build-isolation", "."))]


def configure_command(*options: str) -> tuple[str, ...]:
    cuda = ("-DPIPEDREAM_CUDA=on", _NATIVE)
    return ("cmake", "-S", ".", "-B", str(CPP), *cuda, *options)


def core_steps() -> list[Step]:
    configure = configure_command("-DPIPEDREAM_BUILD_TESTS=ON", "-DPIPEDREAM_WARNINGS_AS_ERRORS=ON")
    targets = [f"pd_{suite}_test" for suite in _CPP_SUITES]
    jobs = str(os.cpu_count() or 1)
    steps = [
        Step("configure", configure),
        Step(
            "build", ("cmake", "--build", str(CPP), "--parallel", jobs, "--target", *targets), ("configure",)
        ),
    ]
    tests = CPP / "tests" / "cpp"
    for suite, target in zip(_CPP_SUITES, targets, strict=True):
        steps.append(Step(f"test-{suite}", (str(tests / target), "--gtest_brief=1"), ("build",), limit_s=120))
    # The sanitizer runs only the cases that use the GPU. The others use a stand-in on the host.
    on_gpu = "--gtest_filter=*cuda*:*Cuda*"
    sanitizer = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1")
    for suite, target in zip(_CPP_SUITES, targets, strict=True):
        command = (*sanitizer, str(tests / target), "--gtest_brief=1", on_gpu)
        steps.append(Step(f"memcheck-{suite}", command, ("build",), limit_s=120))
    return steps


def training_steps() -> list[Step]:
    pytest = python("-m", "pytest", "-q", "--durations=5")
    schedules, transports = "tests/equivalence/test_schedules.py", "tests/equivalence/test_transports.py"
    on_gpu = {"PIPEDREAM_DEVICE": "cuda"}

    def step(name: str, *arguments: str, **environment: str) -> Step:
        return Step(name, (*pytest, *arguments), ("install",), {**on_gpu, **environment})

    return [
        # The second part of a case's name is the number of stages. The transport "auto" uses CUDA IPC; "shm"
        # and "tcp" stage items in host memory.
        step("pairs-two-workers", schedules, "-k", "every_pair and -2-"),
        step("pairs-four-workers", schedules, "-k", "every_pair and -4-"),
        step("transports", transports, "-k", "not codec and not round"),
        step(
            "kernels",
            "tests/python/optim",
            "tests/python/profiling/test_profiler.py",
            "-k",
            "gpu or cuda",
        ),
        step("codecs", transports, "-k", "codec or round"),
        # Two features that are off by default: torch's tensors in the planned memory, and offloading to the
        # host.
        step("torch-pool", schedules, "-k", "every_pair and -2- and cnn", PIPEDREAM_TORCH_POOL="1"),
        step("offload", "tests/equivalence/test_offloaded_runs.py"),
        step("quirks", "tests/equivalence/test_quirks.py"),
    ]


def speed_steps() -> list[Step]:
    configure = configure_command("-DPIPEDREAM_BUILD_BENCH=ON", "-DCMAKE_BUILD_TYPE=Release")
    bench = "pd_device_transport_bench"
    jobs = str(os.cpu_count() or 1)
    steps = [
        Step("configure", configure),
        Step("build", ("cmake", "--build", str(CPP), "--parallel", jobs, "--target", bench), ("configure",)),
        Step("device-transport", (str(CPP / "bench" / "micro" / bench), "--json"), ("build",), limit_s=150),
        Step(
            "worker-overhead",
            python(
                "bench/system/two_stages.py", "--rounds", "3", "--device", "cuda", "--json", "/dev/stdout"
            ),
            ("install",),
            {"PIPEDREAM_DEVICE": "cuda"},
            limit_s=150,
        ),
    ]
    launch = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for transport in ("ipc", "shm", "tcp"):
        options = ("--folder", str(_timeline_folder(transport)), "--transport", transport)
        command = (*launch, "bench/system/device_timeline.py", *options)
        environment = {"PIPEDREAM_DEVICE": "cuda"}
        steps.append(Step(f"timeline-{transport}", command, ("install",), environment, limit_s=90))
    return steps


def models_steps() -> list[Step]:
    folder = str(BUILD / "examples")
    on_gpu = {"PIPEDREAM_DEVICE": "cuda"}
    llama = [
        Step(
            f"llama-{batch}",
            python("bench/system/llama.py", "--batch", batch),
            ("install",),
            on_gpu,
            limit_s=180,
        )
        for batch in ("8", "32")
    ]
    return llama + [
        Step(
            name,
            python(f"examples/{name}.py", "--workers", "2", "--output-dir", f"{folder}/{name}"),
            ("install",),
            on_gpu,
        )
        for name in ("digits", "char_lm")
    ]


GROUPS: dict[str, tuple[bool, Callable[[], list[Step]]]] = {
    # name -> (whether pipedream must be installed, the function that returns the group's steps)
    "core": (False, core_steps),
    "training": (True, training_steps),
    "speed": (True, speed_steps),
    "models": (True, models_steps),
}


def steps_of(group: str) -> list[Step]:
    imports_pipedream, make_steps = GROUPS[group]
    return [*(install_steps() if imports_pipedream else wheel_steps()), *make_steps()]


def _timeline_folder(transport: str) -> Path:
    return BUILD / "timelines" / transport


class Group:
    """Runs steps one after the other, as long as there is time."""

    def __init__(self, log: Path, limit_s: float) -> None:
        self._log = log
        self._ends_s = time.monotonic() + limit_s
        self.outcomes: list[Outcome] = []

    def run(self, step: Step) -> Outcome:
        outcome = self._attempt(step)
        self.outcomes.append(outcome)
        print(f"{step.name:20} {outcome.status:10} {outcome.seconds:7.1f} s", flush=True)
        if outcome.status != "passed":
            print(outcome.tail, flush=True)
        return outcome

    def _attempt(self, step: Step) -> Outcome:
        passed = {outcome.name for outcome in self.outcomes if outcome.status == "passed"}
        missing = [name for name in step.needs if name not in passed]
        left_s = min(step.limit_s, self._ends_s - time.monotonic())
        if missing:
            return Outcome(step.name, "not run", 0.0, [], f"{', '.join(missing)} did not pass")
        if left_s <= 0:
            return Outcome(step.name, "not run", 0.0, [], "no time was left")
        began_s = time.monotonic()
        status, output = _run(step.command, {**os.environ, **_settings(), **step.environment}, left_s)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"==> {step.name}: {' '.join(step.command)}\n{output}\n")
        tail = "" if status == "passed" else "\n".join(output.splitlines()[-_TAIL_LINES:])
        return Outcome(step.name, status, time.monotonic() - began_s, figures_in(output), tail)


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[str, str]:
    """Runs the command, and returns (status, all output). Kills the command and its children after
    limit_s."""
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return "failed", str(error)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return "timed out", output
    return ("passed" if process.returncode == 0 else "failed"), output


def _settings() -> dict[str, str]:
    """Returns the environment variables of all steps. They name the folder where pipedream is installed, and
    pyzmq's libzmq."""
    libraries = sorted(SITE.glob("pyzmq.libs/libzmq*")) or sorted(
        library for path in sys.path for library in Path(path).glob("pyzmq.libs/libzmq*")
    )
    found = {
        "PYTHONPATH": str(SITE),
        "PIPEDREAM_CUDA": "on",
        "CMAKE_ARGS": _NATIVE,
        "CMAKE_GENERATOR": "Ninja" if shutil.which("ninja") else "Unix Makefiles",
    }
    return found | ({"PIPEDREAM_LIBZMQ": str(libraries[0])} if libraries else {})


def figures_in(output: str) -> list[Any]:
    """Returns the JSON documents in a program's output. Each is an object or a list, on a line of its own."""
    found = []
    for line in output.splitlines():
        if line.startswith(("{", "[")):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def machine() -> dict[str, str]:
    """Describes the machine and the commit that the figures come from."""
    said = {
        "commit": ("git", "rev-parse", "--short", "HEAD"),
        "device": ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "torch": python("-c", "import torch; print(torch.__version__, 'CUDA', torch.version.cuda)"),
        "nvcc": ("nvcc", "--version"),
    }
    return {
        name: _run(command, os.environ, 60.0)[1].strip().splitlines()[-1:][0]
        if shutil.which(command[0])
        else "none"
        for name, command in said.items()
    }


def run_group(name: str, results: Path, limit_s: float) -> bool:
    """Runs the group, and writes <name>.json and <name>.log. Returns whether every step passed."""
    print(f"==> {name}", flush=True)
    log = results / f"{name}.log"
    log.unlink(missing_ok=True)
    group = Group(log, limit_s)
    for step in steps_of(name):
        group.run(step)
    document = {
        "group": name,
        **machine(),
        "command": f"tools/gpu_check.sh {name} --limit {limit_s:g}",
        "steps": [vars(outcome) for outcome in group.outcomes],
    }
    (results / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return all(outcome.status == "passed" for outcome in group.outcomes)


def keep_timelines(results: Path) -> None:
    files = sorted(_timeline_folder("").rglob("*.gz"))
    if files:
        with zipfile.ZipFile(results / "timelines.zip", "w") as archive:
            for file in files:
                archive.write(file, file.relative_to(_timeline_folder("")))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="tools/gpu_check.sh"
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results" / "gpu", metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, metavar="SECONDS", help="for each group")
    parser.add_argument("--list", action="store_true", help="print the steps of the groups, and run none")
    options = parser.parse_args()
    unknown = [name for name in options.groups if name not in GROUPS]
    if unknown:
        parser.error(f"group {unknown[0]!r} is unknown: use {', '.join(GROUPS)}")
    groups = options.groups or list(GROUPS)
    if options.list:
        for name in groups:
            for step in steps_of(name):
                print(f"{name:9} {step.name:20} {' '.join(step.command)}")
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    SITE.mkdir(parents=True, exist_ok=True)
    passed = [run_group(name, options.results, options.limit) for name in groups]
    keep_timelines(options.results)
    failed = [name for name, ok in zip(groups, passed, strict=True) if not ok]
    print(f"not all passed: {', '.join(failed)}" if failed else "all steps passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
