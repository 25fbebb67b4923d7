"""Formats plain-text tables, such as those of print(plan), also as HTML for a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]], aligned: str) -> str:
    """Returns the table as text. Columns are two spaces apart, and columns without any entry are left out.
    aligned: a string with "<" (left) or ">" (right) for each column.
    """
    kept = [c for c in range(len(headings)) if any(row[c] for row in rows)]
    widths = {c: max(len(headings[c]), *(len(row[c]) for row in rows)) for c in kept}
    lines = [
        "  ".join(f"{row[c]:{aligned[c]}{widths[c]}}" for c in kept).rstrip() for row in (headings, *rows)
    ]
    return "\n".join(lines)


def html_of(text: str) -> str:
    """Returns the text as HTML, which a notebook shows in a fixed-width font."""
    return f"<pre>{html.escape(text)}</pre>"


def shorten(text: str, length_max: int) -> str:
    """Shortens a text to length_max with ".." in its middle. Both ends of a layer's name are kept, because
    they distinguish layers.
    """
    if len(text) <= length_max:
        return text
    kept = length_max - 2
    return f"{text[: kept // 2]}..{text[len(text) - (kept - kept // 2) :]}"
