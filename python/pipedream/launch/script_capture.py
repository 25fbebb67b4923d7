"""Finds the values that a script has set since its modules were imported. Workers import the modules again,
and would not have these values.

    caller   starts from the model, the loss and so on, and follows the user's functions and classes that
             workers will run, and the global names that these read
    pickle   has the values in one graph of objects with the model and the loss (task_files.py)
    worker   imports the modules, and sets the values that differ (script_state.py)

For example, workers get the value of `SCALE = args.scale` under `if __name__ == "__main__"`. They also get
functions that the script has put into a class or into a library's module, and global hooks of nn.Module. If a
value cannot be sent, workers have the value from the import, and `unsent` names it.

A module is the user's unless it is a library's. A module is a library's if it lies in Python's folders or
site-packages, or is installed elsewhere with a record (a PEX, `pip install --target`). An editable
installation is a library too, unless the script or the working directory lies in its project. Runs on the
caller's thread.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.metadata
import io
import json
import site
import sys
import sysconfig
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
import torch.nn.modules.module as hooks_of_all
from torch import Tensor, nn

from pipedream.common import errors
from pipedream.common.units import format_bytes
from pipedream.worker.host_pickler import HostPickler, HostUnpickler
from pipedream.worker.script_state import ScriptState

__all__ = ["CapturedScript", "Libraries", "capture_script", "libraries"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CONTAINERS = {dict, OrderedDict, defaultdict, list, tuple, set, frozenset, deque}
_LENGTH_MAX = 1024
"""The most entries of a container whose values are followed. A longer container is taken for a table of
data."""
_OBJECTS_MAX = 100_000
_VALUE_BYTES_MAX = 64 << 20
"""The most bytes of a global value that is sent. A larger value is probably made by the import, or belongs to
the model or the data."""
# Modules of torch in which scripts often replace functions. They are always searched.
_PATCHED = (torch, torch.nn.functional, torch.nn.init)
_OF_TENSORS = ("_parameters", "_buffers")
_HOOKS_OF_ALL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


@dataclass(frozen=True)
class CapturedScript:
    state: ScriptState
    unsent: list[str]
    """The names of the values that cannot be sent, each with the reason."""
    code: list[types.CodeType]
    """The code of the user's functions, as this process has imported it. Workers import it from the files."""

    def likely_cause(self) -> str:
        """Returns a text that says why the workers' loss may differ from the caller's."""
        edited = _edited_files(self.code)
        if edited:
            return f"{', '.join(edited)} has changed since it was imported here: start the script again"
        told = "the workers import modules anew"
        if self.unsent:
            others = f" and {len(self.unsent) - 3} more" if len(self.unsent) > 3 else ""
            return f"{told}, and could not be sent {', '.join(self.unsent[:3])}{others}"
        return (
            f"{told}, so look for what was set or replaced in a library since then, and for what layers hand"
            " on outside their return values"
        )


def _edited_files(code: Iterable[types.CodeType]) -> list[str]:
    """Returns the files in which one of these functions was edited after this process had imported it."""
    edited: dict[str, None] = {}
    on_disk: dict[str, dict[str, list[types.CodeType]]] = {}
    for own in code:
        path = own.co_filename
        if path not in on_disk:
            on_disk[path] = _code_of_file(path)
        there = on_disk[path].get(_name_of(own), [])
        if there and own not in there:
            edited[path] = None
    return list(edited)


def _name_of(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # co_qualname exists from Python 3.11 on


def _code_of_file(path: str) -> dict[str, list[types.CodeType]]:
    """Returns the file's code objects by name; empty if the file cannot be read or compiled."""
    found: dict[str, list[types.CodeType]] = {}
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        pending = [compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)]
        while pending:
            code = pending.pop()
            found.setdefault(_name_of(code), []).append(code)
            pending += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return found


def capture_script(roots: Iterable[Any], data: Any) -> CapturedScript:
    """Finds the values. roots: the objects that workers get, such as the model and the loss. data: are
    followed, too, but the data and their dataset are not sent from here."""
    walk = _Walk()
    roots = list(roots)
    for root in (*roots, data):
        walk.visit(root)
    for module in _PATCHED:
        walk.look_for_patches(module)
    walk.visit([Tensor, nn.Module])
    sent_anyway = {id(value) for root in roots for value in _parts_of(root)}
    left_out = {id(data), id(getattr(data, "dataset", None))}
    return walk.captured(sent_anyway, left_out)


def _parts_of(root: Any) -> Iterator[Any]:
    yield root
    if isinstance(root, nn.Module):
        yield from root.modules()
        yield from root.parameters()
        yield from root.buffers()


class _Walk:
    """Follows the references from object to object, and notes the values to send. Visits each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # keeps the objects, so that none of their ids is reused
        self._modules: set[tuple[str, frozenset[str]]] = set()
        self._pending: list[Any] = []
        self._names: dict[str, dict[str, Any]] = {}
        self._attributes: dict[tuple[type, str], Any] = {}
        self._code: list[types.CodeType] = []

    def visit(self, value: Any) -> None:
        self._pending.append(value)
        while self._pending and len(self._seen) < _OBJECTS_MAX:
            found = self._pending.pop()
            if isinstance(found, (*_ATOMS, Tensor, np.ndarray, types.ModuleType)) or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            with contextlib.suppress(Exception):  # a user's object may raise anything when it is read
                self._look_into(found)

    def look_for_patches(self, module: types.ModuleType) -> None:
        for name, value in list(vars(module).items()):
            if _is_users_function(value):
                self._note(module.__name__, name, value)

    def captured(self, sent_anyway: set[int], left_out: set[int]) -> CapturedScript:
        unsent: list[str] = []
        state = ScriptState()
        for module_name, values in self._names.items():
            for name, value in values.items():
                why_not = "" if id(value) in sent_anyway else _why_not_sent(value)
                if id(value) in left_out:
                    continue
                if why_not:
                    unsent.append(f"{name!r} of {module_name} ({why_not})")
                else:
                    state.names.setdefault(module_name, {})[name] = value
        for (kind, name), value in self._attributes.items():
            why_not = "" if id(value) in sent_anyway else _why_not_sent((kind, value))
            if why_not:
                unsent.append(f"{kind.__qualname__}.{name} ({why_not})")
            else:
                state.attributes.append((kind, name, value))
        for table in _HOOKS_OF_ALL:
            for key, hook in getattr(hooks_of_all, table, {}).items():
                why_not = _why_not_sent(hook)
                if why_not:
                    unsent.append(f"a hook of all modules ({why_not})")
                else:
                    state.hooks.setdefault(table, {})[key] = hook
        return CapturedScript(state, unsent, self._code)

    def _look_into(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._look_into_function(value)
        elif isinstance(value, types.MethodType):
            self._pending += [value.__func__, value.__self__]
        elif isinstance(value, (staticmethod, classmethod)):
            self._pending.append(value.__func__)
        elif isinstance(value, property):
            self._pending += [value.fget, value.fset]
        elif isinstance(value, type):
            self._look_into_class(value)
        elif isinstance(value, functools.partial):
            self._pending += [value.func, *value.args, *value.keywords.values()]
        elif type(value) in _CONTAINERS:
            if len(value) <= _LENGTH_MAX:
                self._pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, nn.Module):
            self._pending.append(type(value))
            self._pending += [held for name, held in vars(value).items() if held and name not in _OF_TENSORS]
        else:
            self._pending.append(type(value))
            self._pending += _attributes_of(value).values()

    def _look_into_function(self, function: types.FunctionType) -> None:
        self._pending += [function.__defaults__, function.__kwdefaults__, vars(function)]
        for cell in function.__closure__ or ():
            try:
                self._pending.append(cell.cell_contents)
            except ValueError:  # the cell has no value yet
                continue
        module = sys.modules.get(function.__globals__.get("__name__", ""))
        if module is None or not _is_users(module) or vars(module) is not function.__globals__:
            return
        self._code.append(function.__code__)
        for name, path in _names_read(function.__code__).items():
            if name in function.__globals__:
                self._look_at_name(module, name, path)

    def _look_at_name(self, module: types.ModuleType, name: str, read: frozenset[str]) -> None:
        """Notes the value of a global name. If the value is a module, follows those of its attributes whose
        names are in `read`. `read` has the names of all attributes that the function reads."""
        value = vars(module)[name]
        if not isinstance(value, types.ModuleType):
            if _is_users(module) or _is_users_function(value):
                self._note(module.__name__, name, value)
            return
        if (value.__name__, read) in self._modules:
            return
        self._modules.add((value.__name__, read))
        for attribute in read & vars(value).keys():
            self._look_at_name(value, attribute, read)

    def _note(self, module_name: str, name: str, value: Any) -> None:
        is_class = isinstance(value, type)
        if not (is_class and _is_at_home(value, module_name, name)):
            is_function = isinstance(value, types.FunctionType)
            at_home = is_function and _is_at_home(value, module_name, name)
            # A function of the script is always noted, because the script may define it a second time under
            # its guard.
            if not at_home or module_name == "__main__":
                self._names.setdefault(module_name, {})[name] = value
        self._pending.append(value)

    def _look_into_class(self, kind: type) -> None:
        for base in kind.__mro__:
            users = _is_users(sys.modules.get(base.__module__))
            for name, value in list(vars(base).items()):
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    put_there = not _is_at_home(function, base.__module__, f"{base.__qualname__}.{name}")
                    if put_there and (users or _is_users_function(function)):
                        self._attributes[base, name] = value
                elif users and not name.startswith(("__", "_abc_")) and not _is_of_the_class(value):
                    self._attributes[base, name] = value
                if users and name != "__init__":  # workers get finished objects, and call no __init__
                    self._pending.append(value)


def _is_of_the_class(value: Any) -> bool:
    """Whether a class's attribute is a nested class, a method, a property or a slot."""
    return isinstance(value, type) or hasattr(type(value), "__get__")


def _attributes_of(value: Any) -> dict[str, Any]:
    of_kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in of_kinds for name in ([names] if isinstance(names, str) else names)]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def _names_read(code: types.CodeType) -> dict[str, frozenset[str]]:
    """Returns the global names that the code reads. With each name comes the same set: the names of all
    attributes that the code reads of any object."""
    names: set[str] = set()
    attributes: set[str] = set()
    pending = [code]
    while pending:
        found = pending.pop()
        for step in dis.get_instructions(found):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                attributes.add(step.argval)
        pending += [constant for constant in found.co_consts if isinstance(constant, types.CodeType)]
    return dict.fromkeys(sorted(names), frozenset(attributes))


def _is_users(module: types.ModuleType | None) -> bool:
    """Whether the module is a file of the user. False for a library's module, and for a notebook, whose cells
    have no file."""
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__.partition(".")[0] in ("pipedream", "torch"):
        return False
    return not libraries().have(module)


def _is_users_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and _is_users(sys.modules.get(value.__module__ or ""))


def _is_at_home(value: Any, module_name: str, qualified_name: str) -> bool:
    """Whether the function or class was defined in this module under this name."""
    return (value.__module__, value.__qualname__) == (module_name, qualified_name)


class _TooLargeError(Exception):
    pass


class _Content(io.BytesIO):
    """A buffer that raises _TooLargeError if it would have more than _VALUE_BYTES_MAX."""

    def write(self, content: Any, /) -> int:
        self.check_room(len(content))
        return super().write(content)

    def check_room(self, num_bytes: int) -> None:
        if self.tell() + num_bytes > _VALUE_BYTES_MAX:
            raise _TooLargeError


class _Trial(HostPickler):
    """Tries to pickle and unpickle a value."""

    def __init__(self) -> None:
        self._content = _Content()
        super().__init__(self._content, None)
        self.sends_functions = True

    def run(self, value: Any) -> None:
        self.dump(value)
        self._content.seek(0)
        HostUnpickler(self._content).load()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage):
            self._content.check_room(value.nbytes())
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._content.check_room(value.nbytes)
        reduced = super().reducer_override(value)
        if isinstance(value, types.FunctionType) and reduced is not NotImplemented:
            return _no_function, reduced[1]  # the trial must not define the function again
        return reduced


def _no_function(*_: Any) -> Any:
    return _no_function


def _why_not_sent(value: Any) -> str:
    try:
        _Trial().run(value)
    except _TooLargeError:
        return f"{type(value).__name__} of more than {format_bytes(_VALUE_BYTES_MAX)}"
    except Exception as error:  # a user's object may raise anything
        return f"{type(value).__name__}: {errors.one_line(error)}"
    return ""


_OF_A_PROJECT = ("pyproject.toml", "setup.py", "setup.cfg")


class Libraries:
    """Finds out which modules are libraries of a Python installation."""

    def __init__(self, site_folders: Iterable[str], own_folders: Iterable[Path]) -> None:
        """site_folders: folders for installed packages. own_folders: the script's folder and the working
        directory."""
        folders = list(site_folders)
        self._folders = tuple(f"{folder}/" for folder in folders)
        edited = {project for path in _edited_in_place(folders) if (project := _project_of(path))}
        own = {outer for folder in own_folders for outer in (folder, *folder.parents)}
        self._projects = tuple(f"{project}/" for project in sorted(edited - own))
        self._recorded: dict[Path, str] = {}
        """By folder, the text of all RECORD files of packages that are installed in the folder."""

    def have(self, module: types.ModuleType) -> bool:
        """Whether the module is a library's. The module must have a file."""
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
    """Returns the object that knows the libraries of this process's Python."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    own = [Path.cwd(), *([] if script is None else [Path(script).resolve().parent])]
    return Libraries({*paths, *site.getsitepackages(), site.getusersitepackages()}, own)


def _edited_in_place(folders: list[str]) -> Iterator[Path]:
    """Yields the folders of editable installations, which direct_url.json files and .pth files name."""
    for found in importlib.metadata.distributions(path=folders):
        with contextlib.suppress(Exception):  # these files come from other tools, and may be wrong
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
