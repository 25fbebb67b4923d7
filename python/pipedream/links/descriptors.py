"""The limit of open files in a process: every link of a run takes some descriptors. Torch-free."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterator

from pipedream.common.errors import PipelineError

__all__ = ["DESCRIPTORS_PER_LINK", "check_descriptors", "descriptor_limit_raised"]

DESCRIPTORS_PER_LINK = 9
"""The most descriptors that one end of a link opens. libzmq opens some for its sockets, their events and the
connection; shared memory needs the others."""
_SPARE = 64  # descriptors for the user's files, the store and the DataLoaders

_log = logging.getLogger("pipedream")


@contextlib.contextmanager
def descriptor_limit_raised() -> Iterator[None]:
    """Lets this process open as many files as its hard limit allows, within the with block. The soft limit
    (1,024 on most systems) returns afterwards, because it protects programs that call select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # some sandboxes refuse a higher limit, which may not be needed
        _log.info("the limit of %d open files cannot be raised to %d: %s", soft, hard, error)
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_descriptors(rank: int, num_links: int) -> None:
    """Raises PipelineError if the links need more open files than this process may have. Without this check
    libzmq would silently stop accepting connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    needed = num_open + num_links * DESCRIPTORS_PER_LINK + _SPARE
    if soft != resource.RLIM_INFINITY and needed > soft:
        raise PipelineError(
            f"rank {rank} needs up to {needed} open files for its {num_links} links, but may have {soft}:"
            " raise the hard limit (ulimit -Hn; LimitNOFILE= of a service, --ulimit nofile= of a container)"
        )
