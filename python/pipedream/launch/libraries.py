"""Tells modules of libraries from those of the user's.

    in Python's folders, site-packages     a library's
    installed elsewhere, with a record     a library's: a PEX, `pip install --target`
    installed to be edited in place        a library's, unless the script or the working directory lies in
                                           that project: then it is the user's own
    anything else                          the user's

The installed distributions are read once per process. On the caller's thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["Libraries", "libraries"]

_OF_A_PROJECT = ("pyproject.toml", "setup.py", "setup.cfg")


class Libraries:
    """The places of one installation's libraries."""

    def __init__(self, site_folders: Iterable[str], own_folders: Iterable[Path]) -> None:
        """site_folders: into which is installed. own_folders: of the script, and the working directory."""
        folders = list(site_folders)
        self._folders = tuple(f"{folder}/" for folder in folders)
        edited = {project for path in _edited_in_place(folders) if (project := _project_of(path))}
        own = {outer for folder in own_folders for outer in (folder, *folder.parents)}
        self._projects = tuple(f"{project}/" for project in sorted(edited - own))
        self._recorded: dict[Path, str] = {}
        """By folder the records of what is installed there."""

    def have(self, module: types.ModuleType) -> bool:
        """Whether a module that is in a file belongs to one of them."""
        path = str(module.__file__)
        if path.startswith(self._folders):
            return True
        if module.__name__ == "__main__":
            return False
        return str(Path(path).resolve()).startswith(self._projects) or self._is_recorded(module)

    def _is_recorded(self, module: types.ModuleType) -> bool:
        names = module.__name__.split(".")
        path = Path(str(module.__file__))
        levels = len(names) - (path.stem != "__init__")
        folder = path.parents[min(levels, len(path.parents) - 1)]
        if folder not in self._recorded:
            records = [record for record in folder.glob("*.dist-info/RECORD") if record.is_file()]
            self._recorded[folder] = "".join(f"\n{_text_of(record)}" for record in records)
        return f"\n{names[0]}/" in self._recorded[folder] or f"\n{names[0]}." in self._recorded[folder]


@functools.cache
def libraries() -> Libraries:
    """Those that this process may import."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    own = [Path.cwd(), *([] if script is None else [Path(script).resolve().parent])]
    return Libraries({*paths, *site.getsitepackages(), site.getusersitepackages()}, own)


def _edited_in_place(folders: list[str]) -> Iterator[Path]:
    """Folders that are on the path without being copied: by a file that says where a distribution comes from,
    or by a .pth."""
    for found in importlib.metadata.distributions(path=folders):
        with contextlib.suppress(Exception):  # whatever others have written
            origin = json.loads(found.read_text("direct_url.json") or "{}")
            if origin.get("dir_info", {}).get("editable"):
                yield Path(unquote(urlsplit(origin["url"]).path)).resolve()
    for listing in (path for folder in folders for path in Path(folder).glob("*.pth")):
        for line in _text_of(listing).splitlines():
            path = listing.parent / line.strip()
            if line.strip() and not line.startswith(("import ", "import\t", "#")) and path.is_dir():
                yield path.resolve()


def _project_of(folder: Path) -> Path | None:
    for outer in (folder, *folder.parents):
        if any((outer / name).exists() for name in _OF_A_PROJECT):
            return outer
    return None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
