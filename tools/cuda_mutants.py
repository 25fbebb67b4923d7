"""Finds waits in the CUDA code that no test checks: removes one at a time and runs the tests, without a GPU.

    tools/cuda_mutants.py [--list] [--only TEXT] [--tries N]

A mutant is a source of csrc/device/cuda, codec/cuda or weights/cuda from which one record, wait, query or
synchronise (of a stream, an event or a block) is removed. It is compiled with the same command as the
original in the tests' stand-in for CUDA (tests/cpp/cuda_stub), and linked in its place with the objects of
the last build. Then the CUDA cases run. A case that fails, aborts or hangs has caught the mutant. The tree
and the build are left as they are.

Build the C++ tests first (make build-cpp). Prints a line for each mutant, then the survivors. Exits with 1 if
less than 90 % are caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SHARE_CAUGHT = 0.9
_HANGS_AFTER_S = 150.0

# Patterns of the calls that are removed, each with its replacement.
_WAITS = (
    (
        re.compile(
            r"\bcuda(?:EventRecord|EventSynchronize|EventQuery|StreamWaitEvent|(?:Stream|Device)Synchronize)\("
        ),
        "cudaSuccess",
    ),
    (re.compile(r"(?<!void )\b(?:\w+(?:->|\.))(?:record|wait|note_record)\("), "(void)0"),
    (re.compile(r"\b__syncthreads\("), "(void)0"),
)

# The tests that may catch a mutant of a folder, the quickest first: (executable, filter).
_TESTS = {
    "device": (
        ("device", "*Cuda*"),
        ("stage", "*DeviceWorkers*cuda:*DevicesOfOneHost*cuda"),
        ("channel", "*Cuda*-*zmq_rings*:*Codec*"),
    ),
    "codec": (("codec", "*Cuda*:*cuda*"),),
    "weights": (("weights", "*Cuda*:*cuda*"),),
}


@dataclass(frozen=True)
class Mutant:
    source: Path
    line: int
    """The number of the changed line, counted from 1."""
    text: str
    """The changed source."""
    was: str
    """The line as it was before the change."""

    @property
    def folder(self) -> str:
        return self.source.relative_to(ROOT / "csrc").parts[0]

    def __str__(self) -> str:
        return f"{self.source.relative_to(ROOT)}:{self.line}: {self.was.strip()}"


def end_of_call(text: str, opening: int) -> int:
    """Returns the position behind the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    raise ValueError("a parenthesis is not closed")


def mutants_of(source: Path) -> list[Mutant]:
    text = source.read_text(encoding="utf-8")
    found = []
    for pattern, instead in _WAITS:
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            was = text.splitlines()[line - 1]
            if was.lstrip().startswith("//"):
                continue
            end = end_of_call(text, match.end() - 1)
            found.append(Mutant(source, line, text[: match.start()] + instead + text[end:], was))
    return sorted(found, key=lambda mutant: mutant.line)


def all_mutants() -> list[Mutant]:
    sources = [
        path for folder in _TESTS for path in sorted((ROOT / "csrc" / folder / "cuda").glob("cuda_*.c*"))
    ]
    return [mutant for source in sources for mutant in mutants_of(source)]


class Build:
    """The last build of the C++ tests."""

    def __init__(self) -> None:
        builds = sorted(ROOT.glob("build/python/*/build.ninja"))
        if not builds:
            raise SystemExit("cuda_mutants: there is no build of the C++ tests: run make build-cpp")
        self.folder = builds[0].parent
        beside = Path(sys.executable).parent / "ninja"
        self._ninja = str(beside) if beside.exists() else "ninja"

    def command_of(self, target: str) -> list[str]:
        """Returns the last command with which the build makes the target."""
        said = subprocess.run(
            [self._ninja, "-C", str(self.folder), "-t", "commands", "-s", target],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return shlex.split(said.strip().splitlines()[-1])

    def object_of(self, source: Path) -> str:
        """Returns the object of this source in the stand-in for CUDA, as a path in the build's folder."""
        return f"tests/cpp/CMakeFiles/pd_cuda_stub.dir/{os.path.relpath(source, ROOT)}.o".replace(
            "csrc/", "__/__/csrc/"
        )

    def compile(self, mutant: Mutant, to: Path) -> None:
        original = self.object_of(mutant.source)
        changed = to.with_suffix(mutant.source.suffix)
        changed.write_text(mutant.text, encoding="utf-8")
        command = self.command_of(original)
        command = [str(to) if part == original else part for part in command if part != "-Werror"]
        self._run([str(changed) if part == str(mutant.source) else part for part in command])

    def link(self, test: str, mutant: Mutant, compiled: Path, to: Path) -> None:
        target = f"tests/cpp/pd_{test}_test"
        command = self.command_of(target)
        # CMake's command is ": && compiler ... && :".
        linker = command[command.index("&&") + 1 : len(command) - 1 - command[::-1].index("&&")]
        places = {target: str(to), self.object_of(mutant.source): str(compiled)}
        self._run([places.get(part, part) for part in linker])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, cwd=self.folder, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"cuda_mutants: {shlex.join(command[:3])} ... failed:\n{done.stderr[-2000:]}")


def catches(program: Path, tests: str) -> str:
    """Returns the first case that failed, or in which the process died or hung; "" if all passed."""
    command = [str(program), f"--gtest_filter={tests}", "--gtest_fail_fast"]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", timeout=_HANGS_AFTER_S
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        return f"{running_in(said)} hangs"
    if done.returncode == 0:
        return ""
    failed = re.search(r"\[  FAILED  \] (\S+)", done.stdout)
    return f"{failed[1]} fails" if failed else f"{running_in(done.stdout)} dies"


def running_in(said: str) -> str:
    begun = re.findall(r"\[ RUN      \] (\S+)", said)
    return begun[-1] if begun else "the start"


def caught_by(build: Build, mutant: Mutant, num_tries: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "mutant.o"
        build.compile(mutant, compiled)
        for test, filtered in _TESTS[mutant.folder]:
            program = Path(folder) / f"pd_{test}_test"
            build.link(test, mutant, compiled, program)
            for _ in range(num_tries):
                if caught := catches(program, filtered):
                    return caught
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="tools/cuda_mutants.py",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, and run none")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose line has this text")
    parser.add_argument(
        "--tries", type=int, default=2, metavar="N", help="runs of the tests, which delay at random"
    )
    options = parser.parse_args()
    mutants = [mutant for mutant in all_mutants() if options.only in str(mutant)]
    if options.list:
        print("\n".join(map(str, mutants)))
        return 0
    build = Build()
    survivors = []
    for mutant in mutants:
        caught = caught_by(build, mutant, options.tries)
        print(f"{'caught  ' if caught else 'SURVIVES'} {mutant}\n         {caught}", flush=True)
        if not caught:
            survivors.append(mutant)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} caught")
    for mutant in survivors:
        print(f"survivor: {mutant}")
    return 0 if len(survivors) <= (1 - _SHARE_CAUGHT) * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
