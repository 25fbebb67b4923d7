"""Shortens tracebacks to the frames of the user's own code.

PIPEDREAM_TRACEBACK=1 shows whole tracebacks. An error of an unexpected type that no user code raised is a bug
of pipedream, so its traceback is always shown whole. Torch-free; any thread.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from pipedream.common.errors import PipelineError

__all__ = [
    "describe_user_error",
    "place_of_user_code",
    "shorten",
    "wants_whole_tracebacks",
    "with_short_tracebacks",
]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# The messages of these errors say what is wrong. The place in pipedream's code would not help a user.
_FORESEEN = (ValueError, TypeError, OSError, PipelineError)

_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY_FOLDERS = tuple(
    sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Torch's own files. Some have frames around every forward, the others around every operation while a dispatch
# mode counts the bytes of tensors.
_CALLS = tuple(
    os.path.join("torch", *path)
    for path in (
        *(("nn", "modules", "module.py"), ("_compile.py",), ("_dynamo", "eval_frame.py"), ("_ops.py",)),
        ("utils", "_python_dispatch.py"),
    )
)


def wants_whole_tracebacks() -> bool:
    return os.environ.get("PIPEDREAM_TRACEBACK") == "1"


def with_short_tracebacks(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorates a function for users. The tracebacks of its errors have the user's frames and one frame of
    pipedream. An interrupt shows one line. The error for an unknown argument names the argument with the most
    similar name.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        for name in () if takes_any else kwargs.keys() - parameters.keys():
            if near := difflib.get_close_matches(name, parameters, n=1):
                raise TypeError(f"{function.__name__}() takes no argument {name!r}: do you mean {near[0]!r}?")
        try:
            return function(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise error  # PIPEDREAM_TRACEBACK=1 shows the frames that are left out here
        except KeyboardInterrupt as interrupt:
            _say_in_one_line(interrupt, function.__name__)
            raise

    return call


def _say_in_one_line(interrupt: KeyboardInterrupt, function_name: str) -> None:
    """Makes Python print one line, without a traceback, if nobody catches the interrupt. Does nothing if the
    user has installed a sys.excepthook.
    """
    if wants_whole_tracebacks() or sys.excepthook is not sys.__excepthook__:
        return
    losses = getattr(interrupt, "losses", ())
    after = f" after {len(losses)} minibatches" if losses else ""
    line = f"pipedream: {function_name} was interrupted{after}"

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if error is interrupt:
            print(line, file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = show


def shorten(error: Exception) -> None:
    """Cuts the tracebacks of the error and its causes down to the user's frames. A bug of pipedream keeps
    them whole.
    """
    if wants_whole_tracebacks():
        return
    if isinstance(error, _FORESEEN) or _is_users_error(error.__traceback__):
        cause: BaseException | None = error
        seen: set[int] = set()
        while cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            cause.__traceback__ = _cut(cause.__traceback__)
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def describe_user_error(error: BaseException) -> str | None:
    """Returns the traceback of the user's code that failed, as text to show with the error's message. Returns
    None if pipedream itself raised the error for the user: then the message says everything.
    """
    if wants_whole_tracebacks():
        return "".join(traceback.format_exception(error))
    of_user = error
    while isinstance(of_user, _FORESEEN) and of_user.__cause__ is not None:
        of_user = of_user.__cause__
    frames = _frames(of_user.__traceback__)
    if of_user is error and isinstance(error, _FORESEEN) and (not frames or _is_ours(frames[-1])):
        return None
    if of_user is not error or isinstance(of_user, _FORESEEN):
        of_user.__traceback__ = _cut(of_user.__traceback__)
    return "".join(traceback.format_exception(of_user))


def place_of_user_code(error: BaseException) -> str | None:
    """Returns the file and line of the user's code that raised, for output without a traceback. Returns None
    if pipedream called no user code.
    """
    users = [frame for frame in _users_frames(error.__traceback__) if _is_users(frame)]
    return f"{users[-1].tb_frame.f_code.co_filename}, line {users[-1].tb_lineno}" if users else None


def _cut(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without pipedream's frames and without those of torch that call modules. It
    begins with the first frame of the user's code that pipedream called.
    """
    frames = _frames(trace)
    if not any(map(_is_ours, frames)):
        return trace
    kept = [frame for frame in _users_frames(trace) or frames if not _is_ours(frame)]
    shown = [frame for frame in kept if not frame.tb_frame.f_code.co_filename.endswith(_CALLS)]
    cut: TracebackType | None = None
    for frame in reversed(shown or kept):
        cut = TracebackType(cut, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return cut


def _users_frames(trace: TracebackType | None) -> list[TracebackType]:
    """Returns the frames from the first frame of user code that pipedream called to the last. The list is
    empty if pipedream called no user code.
    """
    frames = _frames(trace)
    ours = next((index for index, frame in enumerate(frames) if _is_ours(frame)), len(frames))
    users = next((index for index in range(ours, len(frames)) if _is_users(frames[index])), len(frames))
    return frames[users:]


def _is_users_error(trace: TracebackType | None) -> bool:
    """Whether the error comes from user code that pipedream called. Torch's own modules and losses count as
    user code.
    """
    if _users_frames(trace):
        return True
    frames = _frames(trace)
    ours = max((index for index, frame in enumerate(frames) if _is_ours(frame)), default=len(frames))
    if ours + 1 >= len(frames):
        return False
    calls_a_loss = frames[ours].tb_frame.f_code.co_name == "call_loss"
    return calls_a_loss or frames[ours + 1].tb_frame.f_code.co_filename.endswith(_CALLS[0])


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _is_ours(frame: TracebackType) -> bool:
    """Whether the frame is pipedream's. Code that is made at run time, such as the __init__ of a dataclass,
    has the file name "<string>". Then the name of the frame's module decides.
    """
    code_file, module = frame.tb_frame.f_code.co_filename, frame.tb_frame.f_globals.get("__name__", "")
    return code_file.startswith(_OUR_FOLDER) or (code_file == "<string>" and _is_our_module(module))


def _is_our_module(name: str) -> bool:
    return name.partition(".")[0] == "pipedream"


def _is_users(frame: TracebackType) -> bool:
    name = frame.tb_frame.f_code.co_filename
    return not (_is_ours(frame) or name.startswith(("<frozen", *_LIBRARY_FOLDERS)))
