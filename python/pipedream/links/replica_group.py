"""A process group of torch.distributed, in which the replicas of one stage all-reduce gradients and weights.

The backend is NCCL if each replica has its own CUDA device, otherwise gloo. The process's default group stays
as it is. gloo listens on the address of the links. Neither backend encrypts. The worker's compute thread owns
the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.common.errors import PeerLost, one_line

__all__ = ["ReplicaGroup"]

_JOIN_TIMEOUT = timedelta(seconds=60)  # enough, because all replicas have just opened their links
_REDUCE_TIMEOUT = timedelta(days=30)  # no limit in practice: another replica may compute for any time
_LOOK_PERIOD = timedelta(seconds=0.5)  # between two checks of the links
_PATIENCE_S = 2.0  # the most time in which the links find out which worker was lost
_LOOK_AGAIN_S = 0.02


class ReplicaGroup:
    """This replica's membership in the process group. Its owner must close() it."""

    def __init__(
        self,
        store: dist.Store,
        replica: int,
        num_replicas: int,
        device: torch.device,
        *,
        bind_host: str,
        check_links: Callable[[], object],
    ) -> None:
        """Joins the group; raises PeerLost if the other replicas do not join.

        store: a store that only this group uses. bind_host: the address on which gloo listens.
        check_links: raises if another worker has failed."""
        self.replica = replica
        self.num_replicas = num_replicas
        self._check_links = check_links
        self._waits_on_stream = False
        self._is_reducing = False  # stays True after a failed all_reduce()
        self._group: Any  # torch's classes of process groups have no common type
        self._options = dist.AllreduceOptions()
        self._options.timeout = _REDUCE_TIMEOUT
        try:
            if _has_device_of_its_own(store, replica, num_replicas, device):
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = _REDUCE_TIMEOUT
                self._group = dist.ProcessGroupNCCL(store, replica, num_replicas, nccl)
                self._waits_on_stream = True
            else:
                gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=bind_host)]
                gloo._timeout = _JOIN_TIMEOUT
                self._group = dist.ProcessGroupGloo(store, replica, num_replicas, gloo)
        except RuntimeError as error:
            raise PeerLost(f"the replicas do not reach each other to reduce: {one_line(error)}") from None

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over the replicas. All replicas get the same bits.

        The tensors are dense and contiguous. All replicas give the same shapes in the same order."""
        works = [self._group.allreduce([tensor], self._options) for tensor in tensors]
        self._is_reducing = True
        for work in works:
            self._wait(work)
        self._is_reducing = False

    def _wait(self, work: dist.Work) -> None:
        if self._waits_on_stream:
            work.wait()
            return
        while True:
            try:
                work.wait(_LOOK_PERIOD)
                return
            except RuntimeError as error:
                self._check_links()
                if work.is_completed():
                    self._raise_lost(error)

    def _raise_lost(self, error: RuntimeError) -> NoReturn:
        """Raises the error that names the lost worker. gloo sees a connection end before the links know which
        worker was lost, so this function asks the links again for up to 2 s."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            self._check_links()
            time.sleep(_LOOK_AGAIN_S)
        raise PeerLost(f"another replica was lost: {one_line(error)}") from None

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        if self._is_reducing and not self._waits_on_stream:
            # gloo's abort() does not end a wait for a process that is stopped (SIGSTOP), and the group's
            # destructor would wait for that process, too. So the group is leaked; its two threads end with
            # this process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


def _has_device_of_its_own(store: dist.Store, replica: int, num_replicas: int, device: torch.device) -> bool:
    """Whether each replica has its own CUDA device. All replicas get the same answer."""
    own = "host"
    if device.type == "cuda":
        own = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"device {replica}", own)
    devices = {store.get(f"device {other}").decode() for other in range(num_replicas)}
    return len(devices) == num_replicas and "host" not in devices
