"""Tests the documents, and the reference that Sphinx makes from the docstrings. Without Sphinx, tests that
need it are skipped.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pipedream
import pytest

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_REFERENCE = (_DOCS / "reference" / "index.rst").read_text(encoding="utf-8")


def test_the_reference_has_all_public_names() -> None:
    missing = [
        name
        for name in pipedream.__all__
        if not name.startswith("_") and name not in _REFERENCE.replace(",", "")
    ]
    assert not missing


def test_the_index_has_every_document() -> None:
    index = (_DOCS / "index.rst").read_text(encoding="utf-8").split()
    assert {path.stem for path in _DOCS.glob("*.md")} <= set(index)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser")),
    reason="sphinx or myst-parser is not installed",
)
def test_they_build_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        str(_DOCS),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert "pipedream.run" in (tmp_path / "reference" / "index.html").read_text(encoding="utf-8")
