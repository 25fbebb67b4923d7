"""Forwards data that cannot be pickled to local workers. A thread of the caller's process iterates the data,
and sends each minibatch to the workers of the first and the last stage. Another thread forwards validation
data.

Workers cannot look ahead in forwarded data. If a minibatch is larger than planned, the forwarder ends the
segment of the run, its part with one memory plan (worker/segment.py), and begins another segment:

    1. reads a group of minibatches, after which the pipeline may be emptied (minibatch_source.py)
    2. if one is larger than planned, writes the sizes that the next segment plans for into the run's folder
    3. sends the end of the data on each channel; a worker that finds the file knows that a segment follows
    4. when no worker needs the old channels any more, opens new channels for the larger minibatch
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

from pipedream import _core
from pipedream.common import errors
from pipedream.common.microbatches import Microbatches
from pipedream.data.batch_reader import ForwardedValidation, ValidationReader
from pipedream.data.first_minibatch import enlarge_forwarded
from pipedream.data.minibatch_source import exceeds, in_own_memory, larger_in
from pipedream.data.stream import ForwardedData, Minibatch, epochs_of, fingerprint, forwarded_counts
from pipedream.links.channels import CALLER, INPUTS, TARGETS, data_channels, forwarded_name
from pipedream.links.liveness import Pulse
from pipedream.links.rendezvous import START_TIMEOUT_S, Rendezvous
from pipedream.model.microbatch import check_alike, filled_up, samples_of
from pipedream.model.seeding import RngState, base_seed, evaluation_seed
from pipedream.stage.job import JobOptions
from pipedream.worker.agreed_run import segment_key
from pipedream.worker.task_files import WorkerTask, folder_of_validation, write_batch, write_larger

__all__ = ["forwarding", "forwarding_validation"]

_log = logging.getLogger("pipedream")

_LOOK_S = 0.01  # seconds between two looks for evaluations that begin
_NUM_AHEAD_MAX = 4  # the most validation minibatches that are written before a worker has read the first one
_TURN_S = 5.0
"""Seconds for which validation data wait for training data at most. The wait must end, because training data
may wait for a callback, which waits for the evaluation."""
_PATIENCE_S = 3.0  # seconds in which the user's data must yield after the run is over


@contextlib.contextmanager
def forwarding(
    forwarded: ForwardedData | None,
    data: Iterable[Any],
    options: JobOptions,
    task: WorkerTask,
    rendezvous: Rendezvous,
    iterating: threading.Lock,
) -> Iterator[Callable[[], RngState | None]]:
    """Forwards the data on a thread in the with block. With forwarded=None there is no such thread.

    Yields a function that returns the generators' state after the last minibatch; None if the data have not
    ended. Another run continues from that state.
    iterating: a lock that is held while the user's data are iterated, because the data draw from the
    generators of this process. Each run has its own lock. Otherwise data that never yield again would stop
    later runs."""
    if forwarded is None:
        yield lambda: None
        return
    forwarder = _Forwarder(forwarded, data, options, task, rendezvous, iterating)
    forwarder.start()
    try:
        yield lambda: forwarder.rng_at_end
    except errors.PipelineError as failure:
        forwarder.stop()
        if forwarder.error is not None:  # the workers stopped because of an error of the user's data
            raise forwarder.error from failure
        raise
    finally:
        forwarder.stop()


@contextlib.contextmanager
def forwarding_validation(
    options: JobOptions | None, folder: Path, iterating: threading.Lock
) -> Iterator[Callable[[], None] | None]:
    """Forwards validation data on a thread in the with block. With options=None there is no such thread.

    Yields a function that raises an error of the data if there is one. Call it now and then. Yields None if
    nothing is forwarded. iterating: as in forwarding().
    """
    if options is None:
        yield None
        return
    forwarder = _ValidationForwarder(options, folder, iterating)
    forwarder.start()
    try:
        yield forwarder.check
    finally:
        forwarder.stop()


class _ValidationForwarder(threading.Thread):
    """Iterates the caller's validation data when an evaluation begins. Passes the minibatches to the first
    and the last stage through files (ForwardedValidation)."""

    def __init__(self, options: JobOptions, folder: Path, iterating: threading.Lock) -> None:
        super().__init__(name="pipedream-validation", daemon=True)
        self._iterating = iterating
        assert options.validation is not None
        placement, last = options.plan.placement, options.plan.num_stages - 1
        self._reader = ValidationReader(options.validation.data, evaluation_seed(base_seed(options.seed)))
        self._readers = sorted({placement.rank_of(0, 0), placement.rank_of(last, 0)})
        self._files = ForwardedValidation(folder_of_validation(folder), ((), ()))
        self._has_callbacks = options.call_points.at_epochs
        self._waits_s = 0.0
        """The most seconds for which the next minibatch of the evaluation waits for the training data."""
        self._stopping = threading.Event()
        self._error: Exception | None = None

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopping.set()
        self.join(_PATIENCE_S)

    def run(self) -> None:
        newest = -1
        try:
            while not self._stopping.wait(_LOOK_S):
                for wanted in self._files.folder.glob("*.wanted"):
                    wanted.unlink()
                    boundary = int(wanted.stem)
                    if boundary > newest:  # the first and the last stage both ask
                        newest = boundary
                        self._hand_over(boundary)
        except Exception as error:
            self._error = error

    def _hand_over(self, boundary: int) -> None:
        self._waits_s = _TURN_S if self._has_callbacks else math.inf
        for number in itertools.count():
            with self._turn():
                if self._stopping.is_set():
                    return
                if number == 0:
                    self._reader.begin(boundary)
                batch = self._reader.next()
            for rank in self._readers:
                not_taken = self._files.file(boundary, rank, number - _NUM_AHEAD_MAX)
                while not_taken.exists():
                    if self._stopping.wait(_LOOK_S):
                        return
                write_batch(self._files.file(boundary, rank, number), batch and batch[:2])
            if batch is None:
                return

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits until the training data have yielded, or until the run is over. The wait has a limit, because
        the training data may wait for a callback that waits for this evaluation."""
        waits_until_s = time.monotonic() + self._waits_s
        while not (has_turn := self._iterating.acquire(timeout=_LOOK_S)) and not self._stopping.is_set():
            if time.monotonic() > waits_until_s:
                if self._waits_s > 0.0:
                    _log.warning(
                        "the training data have yielded nothing for %g s, and the validation data go on"
                        " meanwhile: should both draw random numbers at once, they are not another run's",
                        self._waits_s,
                    )
                self._waits_s = 0.0
                break
        try:
            yield
        finally:
            if has_turn:
                self._iterating.release()


class _Forwarder(threading.Thread):
    """Iterates the caller's data. Sends inputs to the first stage and targets to the last stage."""

    def __init__(
        self,
        forwarded: ForwardedData,
        data: Iterable[Any],
        options: JobOptions,
        task: WorkerTask,
        rendezvous: Rendezvous,
        iterating: threading.Lock,
    ) -> None:
        super().__init__(name="pipedream-forwarder", daemon=True)
        self._iterating = iterating
        self._forwarded = forwarded  # describes the data of the current segment
        self._segment_index = 0
        self._data = data
        self._options = options
        self._plan = options.plan
        schedule = options.schedule_options()
        self._rounds = {
            INPUTS: _core.rounds_of(schedule, 0),
            TARGETS: _core.rounds_of(schedule, schedule.num_stages - 1),
        }
        self._task = task
        self._rendezvous = rendezvous
        self._core: _core.Worker | None = None  # the core of the current segment
        self._pulse: Pulse | None = None
        self._stopping = threading.Event()
        self._rng = RngState.capture()
        self.rng_at_end: RngState | None = None
        self.error: Exception | None = None
        """An error that the user's data raised, or that their minibatches caused."""

    def stop(self) -> None:
        self._stopping.set()
        self.join(_PATIENCE_S)  # the wait has a limit, because the user's data may never yield again

    def run(self) -> None:
        try:
            self._forward_all()
            while not self._stopping.wait(0.05):
                pass  # the last items may still be on their way
        except (_core.RunFailure, errors.PipelineError):
            pass  # a worker has failed or is lost; the launcher reports which one and why
        except Exception as error:
            self.error = error
            if self._core is not None:
                # The workers are told over the links first, because the store may not answer.
                self._core.abort(errors.describe_error(error))
            with contextlib.suppress(Exception):
                self._rendezvous.fail(errors.describe_error(error))
        finally:
            self._close()

    def _forward_all(self) -> None:
        """Forwards one segment after another. Leaves the links of the last segment open."""
        core = self._open()
        self._rng.restore()
        for group in self._groups():
            larger = larger_in(group, self._is_larger)
            if larger is not None:
                self._forwarded = enlarge_forwarded(
                    self._forwarded, self._plan, larger, self._options.microbatches
                )
                write_larger(Path(self._task.folder), self._segment_index + 1, self._forwarded)
                self._send_ends(core)
                self._wait_until_left()
                self._close()
                self._segment_index += 1
                core = self._open()
            for minibatch, batch in group.items():
                self._forward(core, minibatch, batch)
        self._send_ends(core)

    def _groups(self) -> Iterator[dict[int, Minibatch]]:
        """Yields groups of minibatches, {index: minibatch}. Each group is read as a whole before it is
        yielded."""
        size = _core.minibatches_between_drains(self._options.schedule_options())
        minibatches = self._minibatches(reuses_memory=size > 1)
        while True:
            with self._iterating:
                group = dict(itertools.islice(minibatches, size))
                if not group:
                    self.rng_at_end = RngState.capture()
                    return
            yield group

    def _minibatches(self, *, reuses_memory: bool) -> Iterator[tuple[int, Minibatch]]:
        """Yields (index, minibatch). reuses_memory: whether the data may overwrite a minibatch's memory
        before the minibatch is forwarded. Each minibatch is then copied."""
        batches = epochs_of(self._data, self._options.epochs)
        # A run from a checkpoint gets the data from the beginning, and skips the minibatches before the
        # checkpoint. A run from a `state` gets new data.
        if self._options.continues is not None:
            batches = itertools.islice(batches, self._options.first_minibatch, None)
        for index, (inputs, targets, epoch) in enumerate(batches, self._options.first_minibatch):
            batch = Minibatch(inputs, targets, epoch, samples_of(inputs, targets))
            yield index, in_own_memory(batch) if reuses_memory else batch

    def _is_larger(self, batch: Minibatch) -> bool:
        boundaries = (self._forwarded.inputs, self._forwarded.targets)
        return any(map(exceeds, boundaries, self._filled_up(batch)))

    def _filled_up(self, batch: Minibatch) -> tuple[Any, Any]:
        """Returns (inputs, targets). Adds empty microbatches to Microbatches, up to the number for which the
        channels are planned."""
        if not isinstance(batch.inputs, Microbatches):
            return batch.inputs, batch.targets
        m = self._options.microbatches
        return filled_up(batch.inputs, m), filled_up(batch.targets, m)

    # The following functions open and close the links of a segment.

    def _open(self) -> _core.Worker:
        links = self._options.links
        core = self._core = _core.Worker(
            **links.core_arguments(), run_id=self._task.run_id, plan_hash=self._plan.hash()
        )
        self._pulse = Pulse(core, links.peer_timeout_s)
        receivers = set()
        for channel in data_channels(self._plan, self._forwarded, self._options.schedule_options()):
            if channel.sender == CALLER:
                channel.add_to(core, CALLER, self._plan.describe_worker)
                receivers.add(channel.receiver)
        core.seal()
        published = self._wait_for("endpoints", sorted(receivers), START_TIMEOUT_S)
        core.connect({name: address for endpoints in published for name, address in endpoints.items()})
        while not core.wait_open(0.1):
            self._check_stopping()
        return core

    def _close(self) -> None:
        core, pulse, self._core, self._pulse = self._core, self._pulse, None, None
        if core is not None:
            core.close(1.0)
        if pulse is not None:
            pulse.stop()

    def _wait_until_left(self) -> None:
        """Waits until no worker needs these links any more. The wait has no time limit, because workers still
        train on the forwarded minibatches."""
        self._wait_for("drained", range(self._plan.workers_used), math.inf)

    def _wait_for(self, name: str, ranks: Iterable[int], timeout_s: float) -> list[Any]:
        key = segment_key(name, self._segment_index)
        keys = [f"{key}/{rank}" for rank in ranks]
        return self._rendezvous.wait_for(
            keys, timeout_s, lambda missing: f"no {missing[0]}", meanwhile=self._check_stopping
        )

    # Sending.

    def _forward(self, core: _core.Worker, minibatch: int, batch: Minibatch) -> None:
        forwarded, inputs, targets = self._forwarded, batch.inputs, batch.targets
        check_alike(inputs, targets, self._options.microbatches, minibatch=minibatch)
        fields = _core.ItemFields(data_fingerprint=fingerprint(inputs, targets))
        filled_inputs, filled_targets = self._filled_up(batch)
        counts = forwarded_counts(batch)
        for channel, boundary, value in (
            (INPUTS, forwarded.inputs, filled_inputs),
            (TARGETS, forwarded.targets, filled_targets),
        ):
            tensors = boundary.checked(value, minibatch=minibatch)
            rounds = self._rounds[channel]
            for replica in range(rounds.num_replicas):
                sent = tensors
                if not rounds.own_microbatches(replica, minibatch):  # this replica needs only the counts
                    sent = [tensor[:0] if tensor.dim() > 0 else tensor for tensor in tensors]
                sent = boundary.sent(sent)
                self._send(core, forwarded_name(channel, replica), [*sent, counts], fields)

    def _send_ends(self, core: _core.Worker) -> None:
        for channel in (INPUTS, TARGETS):
            for replica in range(self._rounds[channel].num_replicas):
                core.send_end(forwarded_name(channel, replica))

    def _send(
        self, core: _core.Worker, channel: str, tensors: list[torch.Tensor], fields: _core.ItemFields
    ) -> None:
        # The tensors are copied, because the user's generator may reuse their memory for the next minibatch.
        copies = [tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        capsules = [to_dlpack(copy) for copy in copies]
        while not core.send_item(channel, capsules, fields, 0.1):
            self._check_stopping()
            capsules = [to_dlpack(copy) for copy in copies]

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise _core.RunFailure("Closed", "the run is over")
