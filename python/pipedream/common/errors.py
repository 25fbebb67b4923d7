"""Defines the errors that pipedream raises, besides ValueError and TypeError for a wrong argument.

Each message is one line. This module imports no other module of pipedream, so that all of them may import it.
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
    """A file of pipedream, such as a plan, has a wrong format. The error names the file and the field."""


class PipelineError(RuntimeError):
    """A run could not continue. The base class of all errors while a pipeline runs."""

    losses: Sequence[float] = ()
    """Losses of the finished minibatches, in order. Under torchrun only the rank of the last stage has them,
    if that stage has no replicas. Any exception that ends a run has this attribute and `minibatch`.
    """
    minibatch: int | None = None
    """The minibatch at which the run ended. It is the failed worker's minibatch if known, else the newest
    that any worker has begun. Under torchrun it is this rank's minibatch. None: no minibatch had begun.
    """


class WorkerLost(PipelineError):  # noqa: N818 (the words of the design)
    """A worker process ended too early. The error names the worker and its last minibatch."""


class PeerLost(PipelineError):  # noqa: N818 (the words of the design)
    """Another worker was lost, or could not be reached in time."""


class DataMismatch(PipelineError):  # noqa: N818 (the words of the design)
    """Two workers read different data for the same minibatch, so the minibatch was not trained on."""


class NonFiniteLoss(PipelineError):  # noqa: N818 (the words of the design)
    """A loss was NaN or infinite under on_nonfinite="stop". The error names the minibatch."""


def describe_error(error: BaseException) -> str:
    """Returns "TypeName: message", the form in which an error is sent to other workers."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Returns the error's message in one line; the name of its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


# An error of these types is raised again with its type at the other workers. An error of any other type is
# raised there as a PipelineError.
_TRAVELLING = {kind.__name__: kind for kind in (ValueError, TypeError, DataMismatch, NonFiniteLoss, PeerLost)}


def arrived_error(text: str) -> Exception:
    name, separator, message = text.partition(": ")
    known = _TRAVELLING.get(name)
    if known is not None and separator:
        error: Exception = known(message)
    else:
        error = PipelineError(message if name == "PipelineError" and separator else text)
    error._pipedream_derived = True  # type: ignore[attr-defined]  # another worker's error
    return error


def raise_failure(kind: str, message: str) -> NoReturn:
    """Raises the error for the core's RunFailure(kind, message)."""
    if kind == "Aborted":
        raise arrived_error(message) from None
    if kind == "PeerLost":
        raise PeerLost(message) from None
    raise PipelineError(f"{kind}: {message}") from None


@contextlib.contextmanager
def position_kept(losses: Callable[[], list[float]], minibatch: Callable[[], int | None]) -> Iterator[None]:
    """A context around a run. Any exception that ends the run gets the attributes `losses` (the losses so
    far) and `minibatch`.
    """
    try:
        yield
    except BaseException as error:
        error.losses = losses()  # type: ignore[attr-defined]  # also on KeyboardInterrupt
        if getattr(error, "minibatch", None) is None:
            error.minibatch = minibatch()  # type: ignore[attr-defined]
        raise


@contextlib.contextmanager
def afterwards(clean_up: Callable[[], object]) -> Iterator[None]:
    """Calls clean_up after the with block, whether the block failed or not. If both fail, the block's error
    is raised with clean_up's error as a note. On a failed device every later call fails, and only the first
    error says why.
    """
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
    """A context around calls that read the rendezvous (links/). They raise PipelineError with the text of
    another worker's error. The context raises that error with its own type instead.
    """
    try:
        yield
    except PeerLost:
        raise
    except PipelineError as failed:
        raise arrived_error(str(failed)) from None
