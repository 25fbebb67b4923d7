"""Tests the order of folders in Python and C++. A folder imports only itself and folders before it in the
list, and `common`, `planning` and `simulate` import no torch. CONTRIBUTING.md explains the order.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TOP = Path(__file__).parents[2]
_PACKAGE = _TOP / "python" / "pipedream"
_CORE = _TOP / "csrc"

PYTHON_FOLDERS = [
    "common",
    "optim",
    "planning",
    "simulate",
    "model",
    "splitting",
    "profiling",
    "data",
    "links",
    "budget",
    "checkpoint",
    "callbacks",
    "report",
    "update",
    "stage",
    "worker",
    "launch",
    "integrations",
    "reference",
]
CPP_FOLDERS = [
    "base",
    "schedule",
    "planner",
    "device",
    "pool",
    "weights",
    "wire",
    "codec",
    "transport",
    "channel",
    "param_server",
    "stage",
    "bindings",
]
_COMMANDS = {"checkpoint_commands", "cli", "command_line", "planning_commands"}
_ON_TOP = {"__init__", "__main__", "_core", *_COMMANDS}


def _imports(path: Path, *, of_annotations: bool = True) -> Iterator[str]:
    """Yields the package's modules that a module imports, such as "stage.weights". With of_annotations it
    also yields those under `if TYPE_CHECKING`.
    """
    tree = ast.parse(path.read_text())
    if not of_annotations:
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}:{node.lineno}: imports are absolute"
            if node.module == "pipedream":
                yield from (alias.name for alias in node.names)
            elif (node.module or "").startswith("pipedream."):
                module = str(node.module).removeprefix("pipedream.")
                is_package = (_PACKAGE / module.replace(".", "/")).is_dir()
                yield from (f"{module}.{alias.name}" if is_package else module for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("pipedream.")
                for alias in node.names
                if alias.name.startswith("pipedream.")
            )


def _modules() -> dict[str, Path]:
    """Returns a dict from each module of all folders, such as "stage.weights", to its file."""
    return {
        f"{folder}.{path.stem}": path
        for folder in PYTHON_FOLDERS
        for path in sorted((_PACKAGE / folder).glob("*.py"))
        if path.stem != "__init__"
    }


def test_every_module_has_its_folder() -> None:
    assert {path.stem for path in _PACKAGE.glob("*.py")} <= _ON_TOP
    folders = {path.name for path in _PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(PYTHON_FOLDERS)
    assert {path.name for path in _CORE.iterdir() if path.is_dir()} == set(CPP_FOLDERS)


def test_python_imports_downwards_only() -> None:
    upwards = []
    for module, path in _modules().items():
        floor = PYTHON_FOLDERS.index(module.split(".")[0])
        for imported in _imports(path):
            folder = imported.split(".")[0]
            # The core is below all folders.
            if folder in ("_core", "__version__"):
                continue
            if folder not in PYTHON_FOLDERS or PYTHON_FOLDERS.index(folder) > floor:
                upwards.append(f"{module} imports {imported}")
    assert not upwards


def test_no_modules_import_each_other() -> None:
    modules = _modules()
    graph = {
        module: set(_imports(path, of_annotations=False)) & set(modules) for module, path in modules.items()
    }
    while leaves := {module for module, imported in graph.items() if not imported & set(graph)}:
        graph = {module: imported for module, imported in graph.items() if module not in leaves}
    assert not graph


def test_the_oracle_shares_no_code_with_what_it_judges() -> None:
    judged = {"update", "stage", "worker", "launch", "links", "budget", "data"}
    imported = {
        name
        for module, path in _modules().items()
        for name in _imports(path)
        if module.startswith("reference.")
    }
    assert not {name for name in imported if name.split(".")[0] in judged}


def test_core_includes_downwards_only() -> None:
    upwards = []
    for path in sorted(_CORE.rglob("*")):
        if path.suffix not in (".h", ".cc", ".cu"):
            continue
        floor = CPP_FOLDERS.index(path.relative_to(_CORE).parts[0])
        for folder in re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE):
            if folder not in CPP_FOLDERS or CPP_FOLDERS.index(folder) > floor:
                upwards.append(f"{path.relative_to(_TOP)} includes {folder}/")
    assert not upwards


@pytest.mark.parametrize("folder", CPP_FOLDERS)
def test_a_core_folder_names_to_cmake_the_folders_that_it_includes(folder: str) -> None:
    recipe = (_CORE / folder / "CMakeLists.txt").read_text()
    named = set(re.findall(r"\bpipedream::(\w+)", recipe))
    for links in re.findall(r"\bLINKS ([\w ]+)", recipe):
        named.update(re.split(r" (?:EXTRA|EXCLUDE)\b", links)[0].split())
    included = {
        name
        for path in (_CORE / folder).rglob("*")
        if path.suffix in (".h", ".cc", ".cu")
        for name in re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE)
    }
    assert included - {folder} <= named


def test_only_the_bindings_know_python() -> None:
    knowing = {
        path.relative_to(_CORE).parts[0]
        for path in _CORE.rglob("*.*")
        if path.suffix in (".h", ".cc", ".cu") and re.search(r"#include <(pybind11|Python)", path.read_text())
    }
    assert knowing == {"bindings"}


@pytest.mark.parametrize("order", [PYTHON_FOLDERS, CPP_FOLDERS], ids=["python", "core"])
def test_contributing_names_the_folders_in_order(order: list[str]) -> None:
    text = (_TOP / "CONTRIBUTING.md").read_text()
    places = [text.find(f"`{folder}`", text.find(f"`{order[0]}`")) for folder in order]
    assert -1 not in places and places == sorted(places), dict(zip(order, places, strict=True))


def test_planning_needs_no_torch() -> None:
    modules = [
        f"pipedream.{module}"
        for module in _modules()
        if module.split(".")[0] in ("common", "planning", "simulate")
    ]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    code += "print('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "False"


def _texts_that_choose(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each text by which code chooses: in a comparison, in `case`, or as a key of a
    dict that is looked up.
    """
    for node in ast.walk(tree):
        chosen: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            chosen = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            chosen = [node.func.value]
        elif isinstance(node, (ast.Subscript, ast.MatchValue)):
            chosen = [node.value]
        for part in chosen:
            texts = [*part.elts] if isinstance(part, (ast.Tuple, ast.List, ast.Set)) else [part]
            texts = [key for key in part.keys if key] if isinstance(part, ast.Dict) else texts
            for text in texts:
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.lineno, text.value


def test_no_source_but_the_schedules_rules_chooses_by_a_schedules_name() -> None:
    rules = _CORE / "schedule" / "schedule_rules.cc"
    names = {*re.findall(r'\.name = "(\w+)"', rules.read_text()), "naive"}
    assert {"pipedream", "2bw", "flush", "interleaved"} <= names
    asking = []
    for module, path in _modules().items():
        lines = path.read_text().splitlines()
        asking += [
            f"{module}:{line}: {lines[line - 1].strip()}"
            for line, text in _texts_that_choose(ast.parse(path.read_text()))
            # "pipedream" is also the package's name.
            if text in names and (text != "pipedream" or "schedule" in lines[line - 1])
            if not module.startswith("reference.")
        ]
    name = rf'"(?:{"|".join(names)})"'
    for path in sorted(_CORE.rglob("*")):
        if path.suffix in (".h", ".cc", ".cu") and path != rules:
            text = path.read_text()
            asking += [
                f"{path.relative_to(_TOP)}: {found}"
                for found in re.findall(rf"\S+ (?:==|!=) {name}|{name} (?:==|!=) \S+", text)
            ]
    assert not asking


def test_no_source_but_the_executors_chooses_by_an_opcodes_name() -> None:
    table = _CORE / "schedule" / "opcode.h"
    names = set(re.findall(r'\.name = "(\w+)"', table.read_text()))
    assert {"FORWARD", "BACKWARD", "UPDATE", "EVALUATE", "SEND", "RECV"} <= names
    names -= {"SEND", "RECV"}  # these also name the two ends of an edge
    # stage_loop executes instructions. measured_costs measures forwards, backwards and updates.
    may_choose = {"stage.stage_loop", "launch.measured_costs"}
    asking = []
    for module, path in _modules().items():
        if module in may_choose or module.startswith("reference."):
            continue
        asking += [
            f"{module}:{line}: {text}"
            for line, text in _texts_that_choose(ast.parse(path.read_text()))
            if text in names
        ]
    for path in sorted(_CORE.rglob("*")):
        if path.suffix in (".h", ".cc", ".cu"):
            found = re.findall(r"(?:[=!]= |case )Opcode::k(?!Send\b|Recv\b)\w+", path.read_text())
            asking += [f"{path.relative_to(_TOP)}: {one}" for one in found]
    assert not asking
