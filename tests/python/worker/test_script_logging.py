"""Tests script_logging.py: a worker's log messages appear where the caller's messages would appear."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from farm import Farm
from pipedream.worker.script_logging import ScriptLogging


def _log(settings: ScriptLogging) -> tuple[int, list[str]]:
    """Applies the settings at a rank, and returns its level and handlers. Then restores the rank's own
    settings.
    """
    own = ScriptLogging.capture()
    settings.apply()
    logging.getLogger("of.a.script").debug("said by a worker")
    logging.getLogger("of.a.script.quiet").warning("said by nobody")
    found = logging.getLogger().level, [type(h).__name__ for h in logging.getLogger("of").handlers]
    for handler in logging.getLogger("of").handlers[:]:
        logging.getLogger("of").removeHandler(handler)
        handler.close()
    own.apply()
    return found


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """Yields two loggers. Their levels, and the root's, are restored afterwards."""
    level = logging.root.level
    named = logging.getLogger("of"), logging.getLogger("of.a.script.quiet")
    yield named
    logging.root.setLevel(level)
    for logger in named:
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(logging.NOTSET)
        logger.propagate, logger.disabled = True, False


def test_workers_log_as_the_caller_does(
    farm: Farm, tmp_path: Path, loggers: tuple[logging.Logger, logging.Logger]
) -> None:
    of, quiet = loggers
    logging.root.setLevel(logging.INFO)
    of.setLevel(logging.DEBUG)
    of.propagate, quiet.disabled = False, True
    to_file = logging.FileHandler(tmp_path / "log")
    to_file.setFormatter(logging.Formatter("%(name)s|%(levelname)s|%(message)s"))
    to_stream, unknown = logging.StreamHandler(sys.stderr), logging.NullHandler()
    to_stream.setLevel(logging.ERROR)
    for handler in (to_file, to_stream, unknown):
        of.addHandler(handler)
    (found,) = farm.results(_log, ScriptLogging.capture(), num_ranks=1)
    assert found == (logging.INFO, ["FileHandler", "StreamHandler"])
    assert (tmp_path / "log").read_text() == "of.a.script|DEBUG|said by a worker\n"
