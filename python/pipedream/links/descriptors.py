"""How many files a worker may have open: every link of a run takes some descriptors. Torch-free."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterator

from pipedream.common.errors import PipelineError

__all__ = ["DESCRIPTORS_PER_LINK", "check_descriptors", "descriptor_limit_raised"]

DESCRIPTORS_PER_LINK = 9
"""At most, of one end: its two sockets of libzmq and what tells of their traffic (3), where it listens, its
connection, and what it shares with the other end: memory of items and of rings, and who wakes whom (3)."""
_SPARE = 64  # for the user's files, the store and the loaders of data

_log = logging.getLogger("pipedream")


@contextlib.contextmanager
def descriptor_limit_raised() -> Iterator[None]:
    """This process may meanwhile open as many files as the system lets it: the soft limit, 1,024 on most, is
    there for programs that call select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # a sandbox: check_descriptors() says whether it matters
        _log.info("the limit of %d open files cannot be raised to %d: %s", soft, hard, error)
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_descriptors(rank: int, num_links: int) -> None:
    """Raises PipelineError when this process may not open as many files as the links need: libzmq would stop
    to accept connections, without a word."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    needed = num_open + num_links * DESCRIPTORS_PER_LINK + _SPARE
    if soft != resource.RLIM_INFINITY and needed > soft:
        raise PipelineError(
            f"rank {rank} needs up to {needed} open files for its {num_links} links, but may have {soft}:"
            " raise the hard limit (ulimit -Hn; LimitNOFILE= of a service, --ulimit nofile= of a container)"
        )
