"""The part of a traceback that a user is shown: the frames of their own code, without ours.

PIPEDREAM_TRACEBACK=1 shows all of it. An error that nobody foresaw, our bug, is always shown whole.
Torch-free; any thread.
"""

from __future__ import annotations

import functools
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

# The message of such an error says what is wrong: where in our code that was noticed tells a user nothing.
_FORESEEN = (ValueError, TypeError, OSError, PipelineError)

_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY_FOLDERS = tuple(
    sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Torch's frames around every forward, and around every operation while a dispatch mode of ours counts bytes.
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
    """Decorates what users call: its errors show the user's frames and one of ours, an interrupt one line."""

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
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
    """Shows an interrupt that nobody catches as one line; a hook of somebody else stays in charge."""
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
    """Cuts what the error and its causes show down to the user's frames."""
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
    """The traceback, as text, that somebody else should see beside the error's message: of the user's code
    that failed; None where the message is all there is to say."""
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
    """The line of the user's code that raised, where ours called it, for who shows no traceback."""
    users = [frame for frame in _users_frames(error.__traceback__) if _is_users(frame)]
    return f"{users[-1].tb_frame.f_code.co_filename}, line {users[-1].tb_lineno}" if users else None


def _cut(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame inside ours on, without our own frames. All of it where none
    is ours."""
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
    """The frames from the first one on of the user's code that ours called; none where it called none."""
    frames = _frames(trace)
    ours = next((index for index, frame in enumerate(frames) if _is_ours(frame)), len(frames))
    users = next((index for index in range(ours, len(frames)) if _is_users(frames[index])), len(frames))
    return frames[users:]


def _is_users_error(trace: TracebackType | None) -> bool:
    """Whether the user's code was called, of which a module or a loss of torch's is part, too."""
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
    """Whether the frame is ours. The __init__ of a dataclass has no file; a script of python -c has none
    either."""
    code_file, module = frame.tb_frame.f_code.co_filename, frame.tb_frame.f_globals.get("__name__", "")
    return code_file.startswith(_OUR_FOLDER) or (code_file == "<string>" and _is_our_module(module))


def _is_our_module(name: str) -> bool:
    return name.partition(".")[0] == "pipedream"


def _is_users(frame: TracebackType) -> bool:
    name = frame.tb_frame.f_code.co_filename
    return not (_is_ours(frame) or name.startswith(("<frozen", *_LIBRARY_FOLDERS)))
