"""The errors that pipedream raises, besides ValueError and TypeError for a mistaken argument.

Each message is one line. Imports no other module of pipedream, so that every one may use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

__all__ = [
    "DataMismatch",
    "FileFormatError",
    "NonFiniteLoss",
    "PeerLost",
    "PipelineError",
    "WorkerLost",
    "afterwards",
    "arrived_error",
    "describe_error",
    "failures_of_others",
    "one_line",
    "position_kept",
    "raise_failure",
]


class FileFormatError(ValueError):
    """A profile or plan that is not in the form it claims; names the file and the field."""


class PipelineError(RuntimeError):
    """A run that could not go on. The base of everything that fails while a pipeline runs."""

    losses: Sequence[float] = ()
    """Losses of the minibatches that were done, in order. Under torchrun a rank has all of them if it alone
    has the last stage, else none. Everything that ends a run has them, and the next."""
    minibatch: int | None = None
    """At which the run ended: the failed worker's, else the newest that any has begun; under torchrun this
    rank's. None: none had begun."""


class WorkerLost(PipelineError):  # noqa: N818 (the words of the design)
    """A worker process ended before its program did; names its stage, replica and last minibatch."""


class PeerLost(PipelineError):  # noqa: N818 (the words of the design)
    """A neighbouring stage could not be reached within the bound; names it and the last minibatch."""


class DataMismatch(PipelineError):  # noqa: N818 (the words of the design)
    """Two workers read different data for the same minibatch, so nothing was trained on it."""


class NonFiniteLoss(PipelineError):  # noqa: N818 (the words of the design)
    """A loss was NaN or infinite under on_nonfinite="stop"; names the minibatch."""


def describe_error(error: BaseException) -> str:
    """ "TypeName: message", as it travels to the other workers."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """The error's message in one line; its type's name when it has none."""
    return " ".join(str(error).split()) or type(error).__name__


# What one worker raises, the others raise too; anything else arrives as a PipelineError.
_TRAVELLING = {kind.__name__: kind for kind in (ValueError, TypeError, DataMismatch, NonFiniteLoss, PeerLost)}


def arrived_error(text: str) -> Exception:
    name, separator, message = text.partition(": ")
    known = _TRAVELLING.get(name)
    if known is not None and separator:
        error: Exception = known(message)
    else:
        error = PipelineError(message if name == "PipelineError" and separator else text)
    error._pipedream_derived = True  # type: ignore[attr-defined]  # somebody else's mistake
    return error


def raise_failure(kind: str, message: str) -> NoReturn:
    """Raises what the core's RunFailure(kind, message) stands for."""
    if kind == "Aborted":
        raise arrived_error(message) from None
    if kind == "PeerLost":
        raise PeerLost(message) from None
    raise PipelineError(f"{kind}: {message}") from None


@contextlib.contextmanager
def position_kept(losses: Callable[[], list[float]], minibatch: Callable[[], int | None]) -> Iterator[None]:
    """Around a run: whatever ends it has the losses so far as `error.losses`, and `error.minibatch`."""
    try:
        yield
    except BaseException as error:
        error.losses = losses()  # type: ignore[attr-defined]  # an interrupt has them, too
        if getattr(error, "minibatch", None) is None:
            error.minibatch = minibatch()  # type: ignore[attr-defined]
        raise


@contextlib.contextmanager
def afterwards(clean_up: Callable[[], object]) -> Iterator[None]:
    """Cleans up at the end. What fails then does not replace the error that ended the block, but is noted on
    it: after an error of a device, whatever touches the device fails too."""
    try:
        yield
    except BaseException as error:
        try:
            clean_up()
        except Exception as second:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"and then, while cleaning up: {describe_error(second)}")
        raise
    clean_up()


@contextlib.contextmanager
def failures_of_others() -> Iterator[None]:
    """Around what raises PipelineError with the text that another worker left in the rendezvous."""
    try:
        yield
    except PeerLost:
        raise
    except PipelineError as failed:
        raise arrived_error(str(failed)) from None
