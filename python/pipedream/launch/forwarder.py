"""Data that cannot be sent to local workers: iterated in the caller's process, on a thread of its own, and
forwarded to the workers of the first and the last stage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

from pipedream import _core
from pipedream.common import errors
from pipedream.data.stream import ForwardedData, epochs_of, fingerprint, forwarded_counts
from pipedream.links.channels import CALLER, INPUTS, TARGETS, data_channels, forwarded_name
from pipedream.links.pulse import Pulse
from pipedream.links.rendezvous import START_TIMEOUT_S, Rendezvous
from pipedream.model.microbatch import check_alike, samples_of
from pipedream.model.seeding import RngState
from pipedream.planning.plan import Plan
from pipedream.stage.job import JobOptions

__all__ = ["forwarding"]

_PATIENCE_S = 3.0  # with the caller's data, when the run is over


@contextlib.contextmanager
def forwarding(
    forwarded: ForwardedData | None,
    data: Iterable[Any],
    options: JobOptions,
    run_id: int,
    rendezvous: Rendezvous,
) -> Iterator[None]:
    if forwarded is None:
        yield
        return
    forwarder = _Forwarder(forwarded, data, options, run_id, rendezvous)
    forwarder.start()
    try:
        yield
    except errors.PipelineError as failure:
        forwarder.stop()
        if forwarder.error is not None:  # the user's own: it is why the workers stopped
            raise forwarder.error from failure
        raise
    finally:
        forwarder.stop()


class _Forwarder(threading.Thread):
    """Iterates the caller's data and sends inputs to the first stage and targets to the last."""

    def __init__(
        self,
        forwarded: ForwardedData,
        data: Iterable[Any],
        options: JobOptions,
        run_id: int,
        rendezvous: Rendezvous,
    ) -> None:
        super().__init__(name="pipedream-forwarder", daemon=True)
        self._forwarded = forwarded
        self._data = data
        self._options = options
        self._run_id = run_id
        self._rendezvous = rendezvous
        self._stopping = threading.Event()
        self._rng = RngState.capture()
        self.error: Exception | None = None
        """Raised by the user's data, or by what it yielded."""

    def stop(self) -> None:
        self._stopping.set()
        self.join(_PATIENCE_S)  # no longer: the user's data may never yield again

    def run(self) -> None:
        plan = self._options.plan
        core: _core.Worker | None = None
        pulse: Pulse | None = None
        links = self._options.links
        try:
            core = _core.Worker(**links.core_arguments(), run_id=self._run_id, plan_hash=plan.hash())
            pulse = Pulse(core, links.peer_timeout_s)
            self._connect(core, plan)
            self._forward(core)
            while not self._stopping.wait(0.05):
                pass  # what was sent may still be on its way
        except (_core.RunFailure, errors.PipelineError):
            pass  # a worker failed or is gone: the launcher says which and why
        except Exception as error:
            self.error = error
            if core is not None:
                core.abort(errors.describe_error(error))  # at first: the store may not answer
            with contextlib.suppress(Exception):
                self._rendezvous.fail(errors.describe_error(error))
        finally:
            if core is not None:
                core.close(1.0)
            if pulse is not None:
                pulse.stop()

    def _connect(self, core: _core.Worker, plan: Plan) -> None:
        receivers = set()
        for channel in data_channels(plan, self._forwarded):
            if channel.sender == CALLER:
                channel.add_to(core, CALLER, plan)
                receivers.add(channel.receiver)
        core.seal()
        endpoints: dict[str, str] = {}
        for receiver in sorted(receivers):
            (published,) = self._wait_for(f"endpoints/{receiver}")
            endpoints |= published
        core.connect(endpoints)
        while not core.wait_open(0.1):
            self._check_stopping()

    def _wait_for(self, key: str) -> list[Any]:
        return self._rendezvous.wait_for(
            [key], START_TIMEOUT_S, lambda _: f"no {key}", meanwhile=self._check_stopping
        )

    def _forward(self, core: _core.Worker) -> None:
        forwarded = self._forwarded
        self._rng.restore()
        receivers = {name: self._replicas_of(name) for name in (INPUTS, TARGETS)}
        for minibatch, (inputs, targets, epoch) in enumerate(epochs_of(self._data, self._options.epochs)):
            check_alike(inputs, targets, self._options.microbatches, minibatch=minibatch)
            fields = _core.ItemFields(data_fingerprint=fingerprint(inputs, targets))
            counts = forwarded_counts(epoch, samples_of(inputs, targets))
            for channel, boundary, value in (
                (INPUTS, forwarded.inputs, inputs),
                (TARGETS, forwarded.targets, targets),
            ):
                tensors = boundary.flatten(value, minibatch=minibatch)
                boundary.check(tensors, minibatch=minibatch)
                num_replicas = receivers[channel]
                for replica in range(num_replicas):
                    sent = tensors
                    if minibatch % num_replicas != replica:  # it counts those of the others, and no more
                        sent = [tensor[:0] if tensor.dim() > 0 else tensor for tensor in tensors]
                    self._send(core, forwarded_name(channel, replica), [*sent, counts], fields)
        for channel, num_replicas in receivers.items():
            for replica in range(num_replicas):
                core.send_end(forwarded_name(channel, replica))

    def _replicas_of(self, channel: str) -> int:
        stages = self._options.plan.stages
        return stages[0 if channel == INPUTS else -1].num_replicas

    def _send(
        self, core: _core.Worker, channel: str, tensors: list[torch.Tensor], fields: _core.ItemFields
    ) -> None:
        # A copy: the user's generator may reuse its memory for the next minibatch.
        copies = [tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        capsules = [to_dlpack(copy) for copy in copies]
        while not core.send_item(channel, capsules, fields, 0.1):
            self._check_stopping()
            capsules = [to_dlpack(copy) for copy in copies]

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise _core.RunFailure("Closed", "the run is over")
