"""The errors that pipedream raises, besides ValueError and TypeError for a mistaken argument.

Each message is one line. Imports nothing, so that every module may use it.
"""

from __future__ import annotations

__all__ = [
    "DataMismatch",
    "FileFormatError",
    "NonFiniteLoss",
    "PeerLost",
    "PipelineError",
    "WorkerLost",
]


class FileFormatError(ValueError):
    """A profile or plan that is not in the form it claims; names the file and the field."""


class PipelineError(RuntimeError):
    """A run that could not go on. The base of everything that fails while a pipeline runs."""


class WorkerLost(PipelineError):  # noqa: N818 (the words of the design)
    """A worker process ended before its program did; names its stage, replica and last minibatch."""


class PeerLost(PipelineError):  # noqa: N818 (the words of the design)
    """A neighbouring stage could not be reached within the bound; names it and the last minibatch."""


class DataMismatch(PipelineError):  # noqa: N818 (the words of the design)
    """Two workers read different data for the same minibatch, so nothing was trained on it."""


class NonFiniteLoss(PipelineError):  # noqa: N818 (the words of the design)
    """A loss was NaN or infinite under on_nonfinite="stop"; names the minibatch."""
