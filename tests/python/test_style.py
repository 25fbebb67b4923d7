"""Checks the rules of style that clang-format and ruff do not know, in all files that git tracks."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_TOP = Path(__file__).parents[2]
_FUNCTION_LINES_MAX = 70  # as many as fit on a screen; docstring and signature do not count
_CPP_SUFFIXES = {".h", ".cc", ".cu"}
_NAMES_THAT_SAY_NOTHING = r"n|idx|tmp|foo|bar|(?:data|buf|buffer|value|tensor|result|thing)\d"


def _files(*folders: str) -> Iterator[Path]:
    """Yields the files that git tracks in these folders, or all files if there is no git."""
    command = ["git", "ls-files", "--", *folders]
    listed = subprocess.run(command, cwd=_TOP, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = (_TOP / name for name in listed.stdout.splitlines())
    else:
        paths = (path for folder in folders for path in (_TOP / folder).rglob("*"))
    return (path for path in paths if path.is_file())


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


@functools.cache
def _cpp_files() -> list[Path]:
    return [path for path in _files("csrc", "tests", "bench") if path.suffix in _CPP_SUFFIXES]


@functools.cache
def _python_files() -> list[Path]:
    folders = ("python", "tests", "bench", "tools", "examples")
    return [path for path in _files(*folders) if path.suffix in (".py", ".pyi")]


def _place(path: Path, line: int) -> str:
    return f"{path.relative_to(_TOP)}:{line}"


def _matches(path: Path, pattern: str) -> Iterator[str]:
    """Yields the matches of the pattern in a file's code, outside of comments and quoted text."""
    for line, text in enumerate(_text(path).splitlines(), start=1):
        code = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text).split("//")[0]
        for match in re.finditer(pattern, code):
            yield f"{_place(path, line)}: {match.group(0).strip()}"


def test_a_source_says_first_what_it_is() -> None:
    silent = []
    for path in _cpp_files():
        first = _text(path).splitlines()[0]
        # A source file needs no comment if it first includes its own header, or that of the code that it
        # tests.
        header = re.match(r'#include "[\w/]*?(\w+)\.h"', first)
        is_described = header is not None and header.group(1) == path.stem.removesuffix("_test")
        if not first.startswith("//") and not is_described:
            silent.append(str(path.relative_to(_TOP)))
    for path in _python_files():
        if ast.get_docstring(_tree(path)) is None and not _text(path).startswith("#"):
            silent.append(str(path.relative_to(_TOP)))
    assert not silent


def test_nothing_is_left_to_be_done() -> None:
    marks = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
    here = Path(__file__)
    found = [
        _place(path, line)
        for path in (*_cpp_files(), *_python_files())
        if path != here
        for line, text in enumerate(_text(path).splitlines(), start=1)
        if marks.search(text)
    ]
    assert not found


def test_names_say_what_they_name_in_cpp() -> None:
    value_type = r"(?:auto|bool|int|double|float|char|std::[\w:]+(?:<[^<>]*>)?)"
    declared = rf"\b{value_type}[&* ]+(?:{_NAMES_THAT_SAY_NOTHING})\b"
    assert not [found for path in _cpp_files() for found in _matches(path, declared)]


def test_names_say_what_they_name_in_python() -> None:
    vague = re.compile(rf"(?:{_NAMES_THAT_SAY_NOTHING})\Z")
    found = []
    for path in _python_files():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef):
                named = [(each.lineno, each.arg) for each in (*node.args.args, *node.args.kwonlyargs)]
            elif isinstance(node, ast.Assign):
                named = [(each.lineno, each.id) for each in node.targets if isinstance(each, ast.Name)]
            else:
                continue
            found += [f"{_place(path, line)}: {name}" for line, name in named if vague.match(name)]
    assert not found


def test_constants_of_cpp_begin_with_k() -> None:
    declared = r"^(?:inline |static )*constexpr [\w:<>, ]+? (?!k[A-Z]|operator)\w+(?= *(?:=|\{|\[))"
    assert not [found for path in _cpp_files() for found in _matches(path, declared)]


def test_private_members_of_cpp_end_in_an_underscore() -> None:
    declared = r"  (?! |return|using|friend|static|typedef)[\w:<>,*& ]+ (\w+)"
    member = re.compile(declared + r"(?: = .*|\{.*\})?;(?: *//.*)?\Z")
    found = []
    for path in _cpp_files():
        is_private = False
        for line, text in enumerate(_text(path).splitlines(), start=1):
            if re.match(r"class \w.*\{$", text):
                is_private = True
            elif text in (" public:", " protected:", " private:"):
                is_private = text == " private:"
            elif text.startswith(("}", "struct ")):
                is_private = False
            match = member.match(text) if is_private else None
            if match and not match.group(1).endswith("_"):
                found.append(f"{_place(path, line)}: {match.group(1)}")
    assert not found


def test_a_test_of_python_is_named_by_its_fact() -> None:
    # A fact has a subject and a verb, so at least two words.
    fact = re.compile(r"test(?:_[a-z0-9]+){2,}\Z")
    found = [
        f"{_place(path, node.lineno)}: {node.name}"
        for path in _python_files()
        if path.name.startswith("test_")
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and not fact.match(node.name)
    ]
    assert not found


# These blocks may be long, because a reader need not follow them: declarations, tables, and lists of
# bindings.
_NO_CODE = ("namespace", "class", "struct", "enum", "extern", "void bind_")


def _function_lengths(path: Path) -> Iterator[tuple[int, int]]:
    """Yields (line, number of lines of the body) of each function."""
    if path.suffix in _CPP_SUFFIXES:
        begin = 0
        for line, text in enumerate(_text(path).splitlines(), start=1):
            if not text.startswith((" ", "}", "#", "/")) and text.endswith("{"):
                is_code = not text.startswith(_NO_CODE) and not text.endswith(("= {", "= {{"))
                begin = line if is_code else 0
            elif text.startswith("}") and begin:
                yield begin, line - begin - 1
                begin = 0
        return
    for node in ast.walk(_tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            yield node.lineno, int(node.end_lineno or 0) - body[0].lineno + 1


@pytest.mark.parametrize("files", [_cpp_files, _python_files], ids=["cpp", "python"])
def test_a_function_fits_on_a_screen(files: object) -> None:
    assert callable(files)
    found = [
        f"{_place(path, line)}: {length} lines"
        for path in files()
        for line, length in _function_lengths(path)
        if length > _FUNCTION_LINES_MAX
    ]
    assert not found


def test_the_changelog_has_a_place_for_what_is_not_released() -> None:
    headings = re.findall(r"^## (.*)", (_TOP / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


_FIRST_WORDS_REFUSED = ("Of", "As", "What", "That", "Where", "Else", "Which")
# A docstring that begins with such a word says when, from where or by whom, but not what the thing is.
_FIRST_WORDS_REFUSED_IN_PYTHON = ("After", "Before", "Beside", "By", "From", "Per", "Those", "Until", "Whose")


def test_a_docstring_begins_with_a_subject_or_a_verb() -> None:
    nodes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    found = [
        _place(path, getattr(node, "lineno", 1))
        for path in _python_files()
        for node in ast.walk(_tree(path))
        if isinstance(node, nodes)
        and (text := ast.get_docstring(node))
        and text.split()[0].strip('",:') in _FIRST_WORDS_REFUSED
    ]
    assert not found


def test_a_docstring_of_the_package_names_its_subject() -> None:
    found = [
        _place(path, node.body[0].lineno)
        for path in _python_files()
        if path.is_relative_to(_TOP / "python")
        for node in ast.walk(_tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module))
        and (text := ast.get_docstring(node))
        and text.split()[0].strip('",:') in _FIRST_WORDS_REFUSED_IN_PYTHON
    ]
    assert not found


def test_a_paragraph_of_the_documents_begins_with_a_subject_or_a_verb() -> None:
    begins = re.compile(rf"(?:[-*] |\d+\. )?\**(?:{'|'.join(_FIRST_WORDS_REFUSED)})\b")
    pages = (path for path in _files("docs", "README.md", "CONTRIBUTING.md") if path.suffix == ".md")
    found = [
        f"{_place(path, number)}: {line}"
        for path in pages
        for number, (before, line) in enumerate(itertools.pairwise(["", *_text(path).splitlines()]), 1)
        if (not before or line.startswith(("- ", "* ", "1. "))) and begins.match(line)
    ]
    assert not found


def test_a_comment_of_the_core_begins_with_a_subject_or_a_verb() -> None:
    found = []
    for path in sorted((_TOP / "csrc").rglob("*")):
        if path.suffix not in (".h", ".cc", ".cu"):
            continue
        lines = [line.lstrip() for line in path.read_text().splitlines()]
        found += [
            _place(path, number)
            for number, (before, line) in enumerate(itertools.pairwise(["", *lines]), 1)
            if line.startswith("// ") and not before.startswith("//")
            if line.split()[1].strip('",:') in _FIRST_WORDS_REFUSED
        ]
    assert not found
