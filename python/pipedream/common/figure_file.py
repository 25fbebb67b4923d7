"""Saves figures that matplotlib draws, as .svg, .png and .pdf. matplotlib is imported only for drawing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FIGURE_SUFFIXES", "import_figure", "save_figure"]

FIGURE_SUFFIXES = (".svg", ".png", ".pdf")


def import_figure(path: str | os.PathLike[str], otherwise: str = "") -> type[Figure]:
    """Returns matplotlib's Figure. Raises ValueError naming the file if matplotlib is missing. otherwise: a
    further remedy for the message.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"{os.fspath(path)}: drawing needs matplotlib: pip install matplotlib{otherwise}"
        ) from None
    return Figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    import matplotlib

    # Text is stored as text and not as shapes. The same figure always gives the same bytes, so files have no
    # date and no random identifier.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "pipedream", "pdf.fonttype": 42}
    suffix = Path(path).suffix
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
    with matplotlib.rc_context(settings):
        figure.savefig(path, format=suffix[1:], dpi=200, metadata=metadata)
