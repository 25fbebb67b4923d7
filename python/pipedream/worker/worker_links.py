"""Opens and closes the links of one worker. The links belong to a core. A thread (Pulse) tells the core that
the interpreter runs, and the core sends signs of life.

A worker has a core for the set-up and another core for each segment of the training (segment.py). The core of
the set-up carries the initial weights and the rehearsal, whose channels are known at once. Runs on the
worker's compute thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pipedream import _core
from pipedream.common.cpus import own_cpus
from pipedream.common.errors import PeerLost, failures_of_others
from pipedream.links.addresses import check_ports
from pipedream.links.channels import CALLER, RunChannel
from pipedream.links.descriptors import check_descriptors
from pipedream.links.device_memory import agree_on_device_memory, place_on_devices
from pipedream.links.liveness import Pulse, sign_period_s
from pipedream.links.rendezvous import START_TIMEOUT_S, Rendezvous
from pipedream.stage.job import LinkedRun
from pipedream.worker.agreed_run import wait_for

__all__ = ["WorkerLinks", "no_word"]

_OPEN_POLL_S = 0.5
_LOOK_PERIOD_S = 0.02
_LINGER_S = 10.0
_FAREWELL_S = 1.0  # seconds for which a failed worker tries to tell the others why it failed


def no_word(keys: list[str]) -> str:
    return "no word from rank " + ", ".join(key.rpartition("/")[2] for key in keys)


class WorkerLinks:
    """The current core of a worker, and its links. Through the rendezvous this object learns the addresses of
    peers, and why other ranks failed."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._core: _core.Worker | None = None
        self._pulse: Pulse | None = None
        self._peer_timeout_s = 0.0

    def make_core(self, run: LinkedRun, device: torch.device) -> _core.Worker:
        """Makes the core and its pulse. Both exist until close()."""
        on_cuda = device.type == "cuda"
        self._peer_timeout_s = run.links.peer_timeout_s
        core = self._core = _core.Worker(
            device=f"cuda:{device.index}" if on_cuda else "host",
            **run.links.core_arguments(),
            run_id=run.place.run_id,
            incarnation=run.place.incarnation,
            plan_hash=run.plan_hash,
            compute_stream=torch.cuda.current_stream().cuda_stream if on_cuda else 0,
            own_cpus=[] if on_cuda else own_cpus(run.place.local_rank),
        )
        self._pulse = Pulse(core, self._peer_timeout_s)
        return core

    def check_ports(self, run: LinkedRun, *phases: Sequence[RunChannel]) -> None:
        """Raises ValueError if the user's range of ports is too small. Each of the phases lists the channels
        that are open at the same time."""
        here = run.place.ranks_of_machine
        num_needed = max(sum(channel.receiver in here for channel in phase) for phase in phases)
        check_ports(run.links.ports, num_needed, len(here))

    def placed_on_devices(
        self,
        run: LinkedRun,
        device: torch.device,
        channels: Sequence[RunChannel],
        told: Callable[[RunChannel], bool],
        key: Callable[[str], str],
    ) -> list[RunChannel]:
        """Finds out with the other ranks which devices of one host can access each other's memory. Marks the
        channels between such devices, because they need no staging buffers. Returns all channels.

        told: chooses channels of this rank. If such a channel does not go from device to device, the log says
            why. With transport="ipc" an error says so.
        key: makes the key under which a value is in the rendezvous, from the value's name."""
        core, rank, on_host = self._core, run.place.rank, device.type != "cuda"
        if not run.links.places_on_devices:
            return [*channels]
        assert core is not None

        def publish(name: str, value: Any) -> None:
            self._rendezvous.publish(key(name), value)

        def wait(names: list[str]) -> list[Any]:
            return wait_for(self._rendezvous, [*map(key, names)], no_word) if names else []

        reach = agree_on_device_memory(core, rank, channels, on_host=on_host, publish=publish, wait_for=wait)
        for channel in channels if run.links.transport == "ipc" or not on_host else []:
            if rank not in (channel.sender, channel.receiver) or not told(channel):
                continue
            why = reach[channel.sender, channel.receiver]
            if not why and channel.is_encoded:
                why = f"they travel encoded (codec {channel.codec})"
            run.links.check_reach(run.describe_ends(channel.sender, channel.receiver), why)
        return place_on_devices(channels, reach)

    def connect(self, run: LinkedRun, channels: Sequence[RunChannel], key: str) -> None:
        """Opens the links of the sealed core. key: the key under which the ranks publish their endpoints."""
        core, rank, links = self._core, run.place.rank, run.links
        assert core is not None
        check_descriptors(rank, sum(rank in (c.sender, c.receiver) for c in channels))
        self.check_ports(run, channels)
        self._rendezvous.publish(f"{key}/{rank}", core.listen())
        self._check_peers(run, channels, key)
        receivers = sorted({c.receiver for c in channels if c.sender == rank})
        published = wait_for(self._rendezvous, [f"{key}/{receiver}" for receiver in receivers], no_word)
        core.connect({name: address for endpoints in published for name, address in endpoints.items()})
        between = [c for c in channels if c.stages is not None and c.sender == rank]
        links.check_transports(
            {c.name: run.describe_ends(c.sender, c.receiver) for c in between}, core.channel_transports()
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with self.explained():
            while not core.wait_open(_OPEN_POLL_S):
                self._raise_if_others_failed()
                if time.monotonic() > deadline_s:
                    missing = core.channels_not_open()
                    raise PeerLost(f"channels not open within {START_TIMEOUT_S:g} s: {missing}")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Explains failures of waits on links inside the with block. A link knows only that its peer is
        silent or gone. This function finds out why, and raises that error instead."""
        try:
            yield
        except _core.RunFailure as failure:
            if failure.args[0] != "Aborted":  # an abort contains its reason
                self._raise_if_others_failed()
            if failure.args[0] == "Timeout":
                self._look_for_the_lost()
            raise

    def wait_until_sent(self) -> None:
        """Waits until everything is sent. That may take long, because a worker downstream may still run its
        rehearsal."""
        assert self._core is not None
        while not self._core.wait_for_transfers(_OPEN_POLL_S):
            self._raise_if_others_failed()
            time.sleep(_LOOK_PERIOD_S)  # after a failure the call above does not wait

    def say_why(self, text: str) -> None:
        """Tells the other workers why this worker failed, as far as possible. It uses the links first. The
        rendezvous may not answer until the peer timeout, and workers that do not hear of the failure would
        wait as long."""
        core = self._core
        if core is not None:
            with contextlib.suppress(Exception):
                core.abort(text)
        with contextlib.suppress(Exception):
            self._rendezvous.fail(text)
        if core is not None:
            with contextlib.suppress(Exception):
                core.close(_FAREWELL_S)

    def close(self, linger_s: float = _LINGER_S) -> None:
        """Closes the links. linger_s: seconds to wait for unsent data and for the peers' last message."""
        if self._core is not None:
            self._core.close(linger_s)
            self._core = None
        if self._pulse is not None:
            self._pulse.stop()
            self._pulse = None

    def _check_peers(self, run: LinkedRun, channels: Sequence[RunChannel], key: str) -> None:
        """Checks that this worker and its peers may talk, and that they share memory if they must. Returns
        when all peers have checked, too. So all workers report a mistake at once, with the same error."""
        rank, links = run.place.rank, run.links
        if not links.checks_peers:
            return
        self._rendezvous.publish(f"{key}/peer/{rank}", links.introduction())
        ends = {end for c in channels if rank in (c.sender, c.receiver) for end in (c.sender, c.receiver)}
        peers = sorted(ends - {rank, CALLER})  # the caller has this worker's own keys
        neighbours = {c.sender for c in channels if c.stages is not None and c.receiver == rank}
        introductions = wait_for(self._rendezvous, [f"{key}/peer/{peer}" for peer in peers], no_word)
        for peer, introduction in zip(peers, introductions, strict=True):
            ends_text = run.describe_ends(rank, peer)
            name = run.describe_worker(peer)
            links.check_peer(name, introduction, shares_memory=peer in neighbours, ends=ends_text)
        self._rendezvous.publish(f"{key}/checked/{rank}", True)
        wait_for(self._rendezvous, [f"{key}/checked/{peer}" for peer in peers], no_word)

    def _look_for_the_lost(self) -> None:
        """Waits a little for the rendezvous to say which rank is lost. A peer whose link is silent also stops
        sending signs of life to the rendezvous, but the rendezvous notices that later than the link."""
        deadline_s = time.monotonic() + 3 * sign_period_s(self._peer_timeout_s)
        # The loop polls, because the store cannot wait for signs of life that do not come.
        while time.monotonic() < deadline_s:
            self._raise_if_others_failed()
            time.sleep(_LOOK_PERIOD_S)

    def _raise_if_others_failed(self) -> None:
        with failures_of_others():
            self._rendezvous.raise_if_failed()
