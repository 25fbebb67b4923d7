"""How the ranks of one call meet under torchrun. On the caller's thread."""

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

# Where no store answers, nobody waits in it: the mistake is raised here all the same.
_TELL_TIMEOUT_S = 30.0
_SHARING_TIMEOUT_S = 3600.0  # rank 0 may profile a large model


@contextlib.contextmanager
def mistakes_told(prefix: str | None) -> Iterator[None]:
    """Around the checks. A mistake may be this rank's alone (a key file, an interface): under torchrun the
    others hear of it, instead of waiting for a rank that will not come."""
    try:
        yield
    except Exception as error:
        if prefix is not None:
            _tell_the_others(prefix, error)
        raise


def _tell_the_others(prefix: str, error: Exception) -> None:
    """Best effort: the store may not be there either."""
    with contextlib.suppress(Exception):
        text = f"rank {os.environ['RANK']} could not start: {describe_error(error)}"
        with torchrun_rendezvous(prefix, _TELL_TIMEOUT_S) as rendezvous:
            rendezvous.fail(text)


def rendezvous_prefix() -> str:
    """Returns the prefix of this call's keys in the store of torchrun: a script may make several calls."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "torchrun")
    script = f"pipedream/{job}/{_incarnation()}"
    return f"{script}/{_next_call_index(script)}"


def _incarnation() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextlib.contextmanager
def this_rank(prefix: str) -> Iterator[WorkerPlace]:
    """This rank's place, while its rendezvous lasts."""
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
    """Returns a JSON value that rank 0 makes, at every rank, when all have called this. Raises PeerLost for a
    rank that does not come, and what make() raises."""
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


# Calls of this process so far, by torchrun's run id and restart count.
_num_calls: Counter[str] = Counter()


def _next_call_index(script: str) -> int:
    _num_calls[script] += 1
    return _num_calls[script]
