"""Sphinx: the documents beside this file, and a reference made from the docstrings (docs/reference/).

The docstrings are plain text: `name` is code, and a line at the margin that begins with "name: " says what an
argument is. Both become reStructuredText here. `make docs` builds build/docs/index.html.
"""

import re
from typing import Any

project = "pipedream"
extensions = ["sphinx.ext.autodoc", "myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["README.md"]
html_theme = "furo"
html_title = "pipedream"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Documents also link to what is beside them in the repository.
suppress_warnings = ["myst.xref_missing"]

_ARGUMENT = re.compile(r"(\w+): ")


def _to_rst(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:  # autodoc-process-docstring
    rst: list[str] = []
    in_argument = False
    for line in lines:
        text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line).replace("*", r"\*").replace("|", r"\|")
        argument = _ARGUMENT.match(text)
        if argument and what in ("function", "method", "class"):
            text = f":param {argument[1]}: {text[argument.end() :]}"
            if not in_argument and rst and rst[-1]:
                rst.append("")
            in_argument = True
        elif not line:
            in_argument = False
        elif in_argument and not line.startswith(" "):
            text = f"    {text}"
        rst.append(text)
    lines[:] = _with_literal_blocks(rst)


def _with_literal_blocks(lines: list[str]) -> list[str]:
    """Marks indented text after a blank line as a literal block."""
    marked: list[str] = []
    is_literal = False
    for index, line in enumerate(lines):
        begins = line.startswith("    ") and (index == 0 or not lines[index - 1])
        if begins and not is_literal:
            marked += ["", "::", ""]
        is_literal = begins or (is_literal and (line.startswith("    ") or not line))
        marked.append(line)
    return marked


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _to_rst)
