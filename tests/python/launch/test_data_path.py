"""Tests that the data of run() pass through few files until the training loop takes them.
docs/inside-a-run.md names these files.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_TOP = Path(__file__).parents[3]
_PACKAGE = _TOP / "python" / "pipedream"
_ROOMS = ("data", "links", "budget", "callbacks", "report", "update", "stage", "worker", "launch")
_CARRIERS = re.compile(r"DataStream|MinibatchStream|MinibatchSource|BatchReader|ForwardedData")


def _named(heading: str) -> list[set[str]]:
    """Returns the files in the tables below a heading, table by table."""
    text = (_TOP / "docs" / "inside-a-run.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text[text.index(f"## {heading}\n") + 3 :], flags=re.MULTILINE)[0]
    tables = re.split(r"^\| file \|.*$", section, flags=re.MULTILINE)[1:]
    return [set(re.findall(r"`(\w+/\w+\.py)`", table)) for table in tables]


def _takes_data(function: ast.FunctionDef) -> bool:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    return any(
        argument.arg == "data" or (argument.annotation and _CARRIERS.search(ast.unparse(argument.annotation)))
        for argument in arguments
    )


def _files_that_take_data() -> Iterator[str]:
    for path in (path for room in _ROOMS for path in sorted((_PACKAGE / room).glob("*.py"))):
        functions = (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
        )
        if any(map(_takes_data, functions)):
            yield path.relative_to(_PACKAGE).as_posix()


def test_data_go_through_at_most_twelve_files_from_run_to_the_loop() -> None:
    on_the_way, looking_on = _named("The way of the data")
    assert len(on_the_way) <= 12
    assert not on_the_way & looking_on
    # local_worker.py is added here, because it gets the data from a file and not as an argument.
    assert {*_files_that_take_data(), "worker/local_worker.py"} == on_the_way | looking_on
