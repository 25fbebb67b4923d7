"""profile_links() measures bandwidth and latency between the ranks of torchrun, over channels like a run's.

    agree      all ranks check that they have the same options, and take rank 0's run id
    rounds     in each round a rank has at most one partner and opens links to it; the lower rank leads
    share      every rank publishes what it has measured as a leader to all ranks

All pairs of a round measure at the same time. Runs on the caller's thread, which is the core's compute
thread.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipedream import _core
from pipedream.common.agreement import difference, settings_of
from pipedream.common.checks import check_choice, check_output_file, is_number
from pipedream.common.document import write_value
from pipedream.common.errors import PeerLost, afterwards, describe_error, raise_failure
from pipedream.common.guard import one_run_at_a_time
from pipedream.common.own_rank import is_on_several_machines, is_rank_0, under_torchrun
from pipedream.common.progress_bar import progress_bar
from pipedream.common.tracebacks import with_short_tracebacks
from pipedream.launch.torchrun import mistakes_told, rendezvous_prefix, this_rank
from pipedream.links.channels import RunChannel
from pipedream.links.descriptors import descriptor_limit_raised
from pipedream.links.link_meter import (
    ITEM_BYTES,
    WORD_BYTES,
    PairChannels,
    PairFigures,
    follow,
    lead,
    pair_rounds,
)
from pipedream.links.options import TRANSPORTS, LinkOptions, make_link_options
from pipedream.planning.link_profile import LinkProfile, MeasuredLink
from pipedream.stage.job import LinkedRun, WorkerPlace
from pipedream.worker.agreed_run import wait_for
from pipedream.worker.devices import choose_device
from pipedream.worker.worker_links import WorkerLinks, no_word

__all__ = ["profile_links"]

_WORD = ("int64", 1, WORD_BYTES)
_PIECES = ("uint8", 1, ITEM_BYTES)
_NUM_SLOTS = 4


@with_short_tracebacks
def profile_links(
    *,
    transport: str = "auto",
    keys: Any = None,
    bind: Any = None,
    ports: str | None = None,
    insecure: bool = False,
    peer_timeout: float = 15.0,
    seconds: float = 1.0,
    save: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> LinkProfile:
    """Measures bandwidth and latency between each two ranks of torchrun, in both directions.

    All ranks must call it, and all get the same result. It uses the channels and the transport of a run. A
    rank measures with one other rank at a time. Pairs without a common rank measure at the same time, and
    share the network of their machines. A rank on a GPU sends from the GPU's memory.

    transport, keys, bind, ports, insecure, peer_timeout: see run().
    seconds: the most seconds for each figure of a pair. There are at least 3 samples per figure. Measuring
        ends earlier if the error is below 2 %.
    save: a file that rank 0 writes; LinkProfile.load() reads it.
    progress: shows on rank 0's stderr how many rounds are done, if stderr is a terminal.

    Raises ValueError without torchrun, for a single rank, and as run() does. Raises errors.PipelineError if a
    worker fails.
    """
    if not under_torchrun():
        raise ValueError(
            "profile_links measures between the workers that torchrun starts, on one machine, too: torchrun"
            " --nproc-per-node 2 -m pipedream profile-links"
        )
    prefix = rendezvous_prefix()
    with one_run_at_a_time(), descriptor_limit_raised():
        with mistakes_told(prefix):
            options = _checked_options(transport, keys, bind, ports, insecure, peer_timeout, seconds)
            if save is not None and is_rank_0():
                check_output_file(save, "save")
        with this_rank(prefix) as place:
            measured = _Profiling(place, options).run(shows_progress=progress)
    if save is not None and is_rank_0():
        measured.save(save)
    return measured


@dataclass(frozen=True)
class _Options:
    links: LinkOptions
    seconds: float


def _checked_options(
    transport: str, keys: Any, bind: Any, ports: Any, insecure: bool, peer_timeout: float, seconds: float
) -> _Options:
    check_choice("transport", transport, TRANSPORTS)
    for name, value in (("peer_timeout", peer_timeout), ("seconds", seconds)):
        if not is_number(value) or value <= 0:
            raise ValueError(f"{name} is {value!r}: give a positive number of seconds")
    links = make_link_options(
        transport=transport,
        codec=None,
        keys=keys,
        bind=bind,
        ports=ports,
        insecure=insecure,
        peer_timeout_s=float(peer_timeout),
        several_machines=is_on_several_machines(),
    )
    return _Options(links, float(seconds))


class _Profiling:
    """The measurements of one rank, in the phases of the module's docstring."""

    def __init__(self, place: WorkerPlace, options: _Options) -> None:
        self._place = place
        self._options = options
        self._links = WorkerLinks(place.rendezvous)

    def run(self, *, shows_progress: bool) -> LinkProfile:
        try:
            with afterwards(self._links.close):
                try:
                    return self._measure_all(shows_progress)
                except _core.RunFailure as failure:
                    raise_failure(*failure.args)
        except BaseException as error:
            self._links.say_why(describe_error(error))
            raise

    def _measure_all(self, shows_progress: bool) -> LinkProfile:
        rank, rendezvous = self._place.rank, self._place.rendezvous
        # Making a CUDA context holds the GIL, so it is made before join(), as in worker.py.
        device = choose_device(self._place.local_rank)
        rendezvous.join(self._options.links.peer_timeout_s)
        rendezvous.enter("measuring the links")
        run = self._agree()
        rounds = pair_rounds(self._place.world_size)
        measured: list[MeasuredLink] = []
        is_shown = shows_progress and is_rank_0()
        with progress_bar("measuring links", len(rounds), "rounds", is_shown=is_shown) as advance:
            for index, pairs in enumerate(rounds):
                for pair in pairs:
                    if rank in pair:
                        measured += self._measure(run, pair, device, f"links/{index}")
                advance(1)
        return self._share(measured)

    def _agree(self) -> LinkedRun:
        place = self._place
        if place.world_size == 1:
            raise ValueError("WORLD_SIZE is 1: it takes 2 workers to have a link, start torchrun with more")
        mine = settings_of(self._options)
        if place.rank == 0:
            place.rendezvous.publish("agreed", {"settings": mine, "run_id": place.run_id})
            return LinkedRun(place, self._options.links, "rank {}".format)
        (agreed,) = wait_for(place.rendezvous, ["agreed"], lambda _: "rank 0 did not start")
        differs = difference(mine, place.rank, agreed["settings"])
        if differs is not None:
            raise ValueError(differs)
        place = replace(place, run_id=int(agreed["run_id"]))
        return LinkedRun(place, self._options.links, "rank {}".format)

    def _measure(
        self, run: LinkedRun, pair: tuple[int, int], device: torch.device, key: str
    ) -> list[MeasuredLink]:
        """Measures one pair. At the leader returns the figures of both directions, at the follower an empty
        list."""
        leader, follower = pair
        core = self._links.make_core(run, device)
        channels = self._links.placed_on_devices(
            run, device, _channels_of(pair), lambda channel: channel.on_device, f"{key}/{{}}".format
        )
        for channel in channels:
            channel.add_to(core, run.place.rank, run.describe_worker)
        core.seal()
        self._links.connect(run, channels, f"{key}/endpoints")
        transports = core.channel_transports()
        out, back = (leader, follower), (follower, leader)
        mine, theirs = (out, back) if run.place.rank == leader else (back, out)
        pieces = _pieces_name(*mine)
        run.links.check_transports({pieces: run.describe_ends(*pair)}, transports)
        ends = PairChannels(
            core, _words_name(*mine), _words_name(*theirs), pieces, _pieces_name(*theirs), device
        )
        with self._links.explained():
            if run.place.rank == leader:
                measured = _links_of(pair, lead(ends, self._options.seconds), transports[pieces])
            else:
                follow(ends)
                measured = []
        self._links.close()
        return measured

    def _share(self, measured: list[MeasuredLink]) -> LinkProfile:
        rank, world_size, rendezvous = self._place.rank, self._place.world_size, self._place.rendezvous
        rendezvous.publish(f"measured/{rank}", write_value(tuple(measured)))
        found = wait_for(rendezvous, [f"measured/{other}" for other in range(world_size)], no_word)
        links = tuple(MeasuredLink(**fields) for of_rank in found for fields in of_rank)
        if rank == 0:  # this process may host the store, so it waits until all ranks have read
            wait_for(rendezvous, [f"read/{other}" for other in range(1, world_size)], no_word)
        else:
            with contextlib.suppress(PeerLost):
                rendezvous.publish(f"read/{rank}", True)
        rendezvous.leave()
        return LinkProfile(world_size, links)


def _words_name(sender: int, receiver: int) -> str:
    return f"words, rank {sender} to rank {receiver}"


def _pieces_name(sender: int, receiver: int) -> str:
    return f"pieces, rank {sender} to rank {receiver}"


def _channels_of(pair: tuple[int, int]) -> list[RunChannel]:
    """Returns the four channels of a pair. They have the same ids at both ends."""
    named = [
        (name(*ends), *ends, tensors, tensors is _PIECES)
        for ends in (pair, pair[::-1])
        for name, tensors in ((_words_name, _WORD), (_pieces_name, _PIECES))
    ]
    return [
        RunChannel(
            name, channel_id, sender, receiver, [tensors], _NUM_SLOTS, _NUM_SLOTS, 1, on_device=on_device
        )
        for channel_id, (name, sender, receiver, tensors, on_device) in enumerate(named)
    ]


def _links_of(pair: tuple[int, int], figures: PairFigures, transport: str) -> list[MeasuredLink]:
    leader, follower = pair
    return [
        MeasuredLink(
            sender,
            receiver,
            bytes_per_s=1 / per_byte.mean,
            latency_us=1e6 * figures.latency_s.mean,
            bytes_per_s_error=per_byte.error,
            latency_error=figures.latency_s.error,
            transport=transport,
        )
        for sender, receiver, per_byte in (
            (leader, follower, figures.to_follower_s_per_byte),
            (follower, leader, figures.to_leader_s_per_byte),
        )
    ]
