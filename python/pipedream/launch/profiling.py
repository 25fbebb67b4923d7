"""Provides pipedream.profile. It runs the profiler, and starts the fork server, which forks the workers of a
later run.

A caller that profiles will probably train. The fork server needs one core for seconds to import torch and its
compiler. If torch's threads leave a core free, the server starts before the profiler. Otherwise it starts
after the profiler, so that it does not slow down the measured layers. It does not start under torchrun, nor
in a child process of multiprocessing. Runs on the caller's thread.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from pipedream.common.own_rank import under_torchrun
from pipedream.common.tracebacks import with_short_tracebacks
from pipedream.launch.fork_server import start_server
from pipedream.profiling import profiler

__all__ = ["profile"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _with_server_beside(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        is_wanted = not under_torchrun() and multiprocessing.parent_process() is None
        has_free_core = len(os.sched_getaffinity(0)) > torch.get_num_threads()
        if is_wanted and has_free_core:
            start_server(compiler="if idle")
        result = function(*args, **kwargs)
        if is_wanted:
            start_server(compiler="if idle")
        return result

    return call


profile = with_short_tracebacks(_with_server_beside(profiler.profile))
