"""Lets the ranks of torchrun meet for one call of run() or profile_links(). Runs on the caller's thread."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from pipedream.common.errors import describe_error
from pipedream.links.rendezvous import START_TIMEOUT_S, torchrun_rendezvous
from pipedream.stage.job import WorkerPlace

__all__ = ["mistakes_told", "rendezvous_prefix", "shared_by_rank_0", "this_rank"]

# Seconds for which a rank tries to tell the others that it has failed. If the store has not answered by then,
# the other ranks do not wait on it any more.
_TELL_TIMEOUT_S = 30.0
_SHARING_TIMEOUT_S = 3600.0  # rank 0 may profile a large model


@contextlib.contextmanager
def mistakes_told(prefix: str | None, *, text: str = "could not start") -> Iterator[None]:
    """Tells the other ranks if a check in the with block fails. A check may fail at one rank only, for
    example because of its key file, and the other ranks would wait for that rank. prefix: the prefix of this
    call's keys; None without torchrun. text: what has happened to this rank."""
    try:
        yield
    except Exception as error:
        if prefix is not None:
            _tell_the_others(prefix, text, error)
        raise


def _tell_the_others(prefix: str, text: str, error: Exception) -> None:
    """Tells the other ranks that this rank has failed. Does nothing if the store does not answer."""
    with contextlib.suppress(Exception):
        text = f"rank {os.environ['RANK']} {text}: {describe_error(error)}"
        with torchrun_rendezvous(prefix, _TELL_TIMEOUT_S) as rendezvous:
            rendezvous.fail(text)


def rendezvous_prefix() -> str:
    """Returns the prefix of this call's keys in torchrun's store. Each call of a script has another
    prefix."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "torchrun")
    script = f"pipedream/{job}/{_incarnation()}"
    return f"{script}/{_next_call_index(script)}"


def _incarnation() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextlib.contextmanager
def this_rank(prefix: str) -> Iterator[WorkerPlace]:
    """Opens this rank's rendezvous, and yields the rank's place in the run."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with torchrun_rendezvous(prefix, START_TIMEOUT_S) as rendezvous:
        yield WorkerPlace(
            rank=rank,
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            run_id=secrets.randbits(64),
            incarnation=_incarnation(),
            rendezvous=rendezvous,
            board=None,
        )


def shared_by_rank_0(key: str, make: Callable[[], Any]) -> Any:
    """Returns at every rank the JSON value that make() returns at rank 0. All ranks must call this function.

    Raises PeerLost if a rank does not call it. If make() raises an error, rank 0 raises the same error, and
    the other ranks raise a PipelineError."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with torchrun_rendezvous(key, START_TIMEOUT_S) as rendezvous:
        try:
            if rank == 0:
                rendezvous.publish("made", make())
        except Exception as error:
            rendezvous.fail(f"rank 0: {describe_error(error)}")
            raise
        (made,) = rendezvous.wait_for(["made"], _SHARING_TIMEOUT_S, lambda _: "rank 0 made nothing")
        rendezvous.publish(f"read/{rank}", True)
        readers = [f"read/{other}" for other in range(world_size)]
        rendezvous.wait_for(readers, START_TIMEOUT_S, lambda missing: f"no {missing[0]}")
        return made


# The number of calls that this process has made. The key has torchrun's run id and restart count.
_num_calls: Counter[str] = Counter()


def _next_call_index(script: str) -> int:
    _num_calls[script] += 1
    return _num_calls[script]
