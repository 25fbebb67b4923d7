"""Carries the script's logging set-up to local workers. They import the script without running its guarded
part, so they would lack the set-up.

It has the levels and filters of all loggers, and the handlers that write to stderr, stdout or a file. Every
worker appends to such a file. Other handlers are left out, and so is what cannot be pickled. Any thread.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["ScriptLogging"]

_STREAMS = ("stderr", "stdout")


@dataclass(frozen=True)
class _HandlerSettings:
    target: str
    """One of _STREAMS, or the path of a file."""
    level: int
    formatter: logging.Formatter | None
    filters: tuple[Any, ...]

    @classmethod
    def of(cls, handler: logging.Handler) -> _HandlerSettings | None:
        """Returns the settings of the handler; None if a worker cannot make such a handler."""
        target = ""
        if type(handler) is logging.StreamHandler:
            names = [name for name in _STREAMS if handler.stream in (getattr(sys, name), _own(name))]
            target = names[0] if names else ""
        elif type(handler) is logging.FileHandler:
            target = os.path.abspath(handler.baseFilename)
        settings = cls(target, handler.level, handler.formatter, tuple(handler.filters))
        return settings if target and _can_be_sent(settings) else None

    def make(self) -> logging.Handler:
        handler = (
            logging.StreamHandler(getattr(sys, self.target))
            if self.target in _STREAMS
            else logging.FileHandler(self.target)
        )
        handler.setLevel(self.level)
        handler.setFormatter(self.formatter)
        handler.filters[:] = self.filters
        return handler


@dataclass(frozen=True)
class _LoggerSettings:
    level: int
    propagate: bool
    disabled: bool
    filters: tuple[Any, ...]
    handlers: tuple[_HandlerSettings, ...]

    @classmethod
    def of(cls, logger: logging.Logger) -> _LoggerSettings:
        handlers = map(_HandlerSettings.of, logger.handlers)
        return cls(
            logger.level,
            logger.propagate,
            logger.disabled,
            tuple(filter(_can_be_sent, logger.filters)),
            tuple(handler for handler in handlers if handler is not None),
        )

    def apply(self, logger: logging.Logger) -> None:
        """Sets up the worker's logger like the caller's logger. If importing the script has given the logger
        handlers, these stay and no others are added."""
        logger.setLevel(self.level)
        logger.propagate, logger.disabled = self.propagate, self.disabled
        logger.filters[:] = self.filters
        if not logger.handlers:
            logger.handlers += [settings.make() for settings in self.handlers]


@dataclass(frozen=True)
class ScriptLogging:
    disabled_level: int
    loggers: dict[str, _LoggerSettings]
    """The settings of each logger by its name; the root logger has the empty name."""

    @classmethod
    def capture(cls) -> ScriptLogging:
        manager = logging.root.manager
        named = {
            name: logger for name, logger in manager.loggerDict.items() if type(logger) is logging.Logger
        }
        loggers = {"": logging.root, **named}
        return cls(manager.disable, {name: _LoggerSettings.of(logger) for name, logger in loggers.items()})

    def apply(self) -> None:
        logging.disable(self.disabled_level)
        for name, settings in self.loggers.items():
            settings.apply(logging.getLogger(name))


def _own(name: str) -> Any:
    """Returns the stream that the process was started with: sys.__stderr__ or sys.__stdout__."""
    return getattr(sys, f"__{name}__")


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # a user's object may raise anything
        return False
    return True
