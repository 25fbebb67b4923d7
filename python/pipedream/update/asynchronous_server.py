"""Runs one replica's part of a parameter server with asynchronous shards. Each replica owns one shard of the
stage's parameters. The owner updates its shard with each gradient as soon as the gradient arrives. Then it
sends the updated shard back to the replica that pushed the gradient.

    replica q, its part of round j                 the owner of another shard
    SEND push    its gradient, chunk by chunk ---> each chunk: the optimizer's step of this gradient alone
    UPDATE       the same for its own shard        |
    RECV pull    its version j + 1 <-------------- SEND pull: the chunk as it is now, and how many gradients
                                                   it has: j + 1 of replica q, and those of others so far

No replica waits for another's gradient (Downpour SGD, NIPS'12, with n_push = n_fetch = 1; Project Adam,
OSDI'14). In a round each replica has the same number of microbatches, except in a short last round, and
pushes their weighted mean gradient. With r replicas a round makes r updates, each with the full learning
rate. A replica receives the answer to a push before it pushes again, so an owner keeps at most one answer per
replica. An owner has this memory:

    master     the shard as it is now, in memory that forwards do not read
    answers    one copy of the shard for each other replica, until it has been sent
    slots      the versions that forwards read, as with shards that are not asynchronous

A shard has parts (shards.ShardPart), each of which the optimizer updates in one call. A part is a chunk, or
the whole shard if the optimizer needs whole tensors.

Two threads work here. The worker's compute thread pushes, makes the replica's own updates and pulls. A second
thread serves the other replicas at any time. A lock guards the master, the optimizer and the count of
updates. When the run or a segment of it (worker/segment.py) ends, each owner sends the other replicas its
master, which then has every gradient.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.budget.footprint import StepMeter, make_meter
from pipedream.checkpoint.stage_files import piece_name
from pipedream.common.errors import PipelineError, describe_error
from pipedream.model.layers import flat_view
from pipedream.update.gradients import RunStep
from pipedream.update.pushes import item_of
from pipedream.update.shard_client import ShardClient
from pipedream.update.shards import Chunk, Piece, ShardLayout, ShardPart, parts_of
from pipedream.update.weights import view_like

__all__ = ["NUM_ORDERED_MAX", "AsynchronousServer"]


NUM_ORDERED_MAX = 1 << 20  # the most updates of a shard whose order is reported
# The number of updates for other replicas that are measured. The first ones make the optimizer's state.
_NUM_MEASURED_MAX = 8


class AsynchronousServer(ShardClient):
    """Owns one replica's shard, and exchanges gradients and shards with the other replicas."""

    def __init__(
        self,
        *arguments: Any,
        layout: ShardLayout,
        master: Tensor,
        answers: Mapping[int, Tensor],
        names: Sequence[str],
        where: str,
        **options: Any,
    ) -> None:
        """master: flat memory for the shard.
        answers: flat memory for an answer to each other replica, by replica.
        names: the parameters' names.
        where: describes the worker in errors."""
        super().__init__(*arguments, layout=layout, **options)
        own_chunks = self._own_chunks
        self._where = where
        self._names = names
        self._parts = parts_of(own_chunks, layout.pieces_of(self._replica), at_once=layout.whole_tensors)
        self._master = _chunks_in(master, own_chunks)
        self._answers = {other: _chunks_in(memory, own_chunks) for other, memory in answers.items()}
        self._own: deque[list[Tensor | None]] = deque()
        """The gradients that this replica has pushed, and not yet used for its own shard: one list per round,
        each by parameter."""
        self._own_round: list[Tensor | None] | None = None
        """This replica's gradients for the next apply()."""
        first = self._newest = self._rounds.first_version
        self._contained: dict[int, tuple[int, int]] = {first: (first * self._rounds.num_replicas,) * 2}
        for place, chunk in zip(self._master, own_chunks, strict=True):
            place.copy_(self._place_of(chunk, self._slot_of[first]))
        # State of the thread that serves the others.
        self._awaiting = [*self._others]
        """The other replicas that may still push. The replica that was served last is at the end of the
        list."""
        self._arrived: dict[int, list[list[Tensor]]] = {other: [] for other in self._others}
        """By other replica: the chunks received so far of the part that the other replica is pushing."""
        self._next_part = dict.fromkeys(self._others, 0)
        self._failure: BaseException | None = None
        self._is_over = False
        """Whether the serving thread has ended."""
        device = self._weights.own.slots[0].device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._step_meter = StepMeter(make_meter(device))
        # On the host, measuring slows down each operator, so only the first updates are measured. On a device
        # no update is measured, because the meter counts the memory of all threads.
        self._num_unmeasured = 0 if self._stream is not None else _NUM_MEASURED_MAX
        # State of both threads.
        self._lock = threading.Condition()
        """Guards the attributes below, the master and the optimizer. Threads that wait on it are woken when
        another replica's gradient is in the shard, and when no more gradients will come."""
        self._pieces = self._pieces_of_master(layout)
        self._round_of = [first] * self._rounds.num_replicas
        """By replica: the round of its next gradient."""
        self._num_updates = [first * self._rounds.num_replicas] * len(self._parts)
        """For each part, the number of gradients in it. Each earlier round counts as one gradient of each
        replica."""
        self._order: list[int] = []
        """The replica of each update of a part, in the order in which this run made the updates."""

    def _pieces_of_master(self, layout: ShardLayout) -> list[Tensor]:
        """Returns the pieces of this shard as views of the master, in the optimizer's order."""
        places = {
            id(piece): (place, piece)
            for place, chunk in zip(self._master, self._own_chunks, strict=True)
            for piece in chunk.pieces
        }
        return [
            self._piece_in(*places[id(piece)])
            for chunk in layout.chunks_of(self._replica)
            for piece in chunk.pieces
        ]

    def _piece_in(self, content: Tensor, piece: Piece) -> Tensor:
        leaf = self._leaves(0, 0)[piece.parameter]
        if piece.is_whole:
            return view_like(content, piece.begin_bytes, leaf)
        flat = content[piece.begin_bytes : piece.begin_bytes + piece.num_bytes]
        return flat.view(leaf.dtype).data

    # The compute thread calls these functions.

    def take(self, minibatch: int, own_slot: int) -> None:
        """Prepares the update of this shard with the replica's own gradient of the minibatch's round."""
        self._own_round = self._own.popleft()

    def _take_gradients(self, own_slot: int) -> list[Tensor | None]:
        self._own.append(super()._take_gradients(own_slot))
        return self._own[-1]

    def apply(self, read_slot: int, write_slot: int, gradient_scale: float, run: RunStep) -> None:
        assert self._own_round is not None
        own = self._own_round
        self._weights.own.show(write_slot)
        self._exchange.note_version(write_slot)
        self._newest += 1
        for index, part in enumerate(self._parts):
            gradients = self._to_keep([_own_piece(own, piece) for piece in part.pieces])
            with self._lock:
                run(functools.partial(self._step, self._replica, index, gradients))
                self._note_contained(self._newest, [self._num_updates[index]])
                for position, chunk in part.chunks:
                    self._place_of(chunk, write_slot).copy_(self._master[position])
        self._own_round = None
        self._finish()

    def _note_contained(self, version: int, num_updates: Sequence[int]) -> None:
        known = [count for pair in (self._contained.get(version),) if pair for count in pair]
        counts = [*known, *num_updates]
        if counts:
            self._contained[version] = min(counts), max(counts)

    def finish(self, newest_slot: int, *, is_over: bool) -> None:
        """Waits until every gradient is in this shard. Then sends the shard to all other replicas, and
        receives their shards."""
        self._thread.join()
        self._raise_failure()
        for content, chunk in zip(self._master, self._own_chunks, strict=True):
            self._core.send_items(
                [(channel, item_of([content])) for channel in self._channels.pull_to.values()]
            )
            self._place_of(chunk, newest_slot).copy_(content)
        self._exchange.note_version(newest_slot)
        for other in self._others:
            self._exchange.pull_from(other)

    def wait_for_minibatches(self, end: int) -> None:
        """Waits until the shard has the other replicas' gradients of all minibatches before `end`."""
        wanted = {other: self._rounds.num_begun(other, end) for other in self._others if self._parts}

        def have_come() -> bool:
            return all(self._round_of[other] >= count for other, count in wanted.items())

        with self._lock:
            self._lock.wait_for(lambda: self._is_over or have_come())
        self._raise_failure()

    def newest_pieces(self) -> dict[str, Tensor]:
        """Returns the shard as it is now, by the names of its pieces (checkpoint/stage_files.py)."""
        pieces = [piece for chunk in self.layout.chunks_of(self._replica) for piece in chunk.pieces]
        return {
            piece_name(self._names[piece.parameter], piece.first, piece.count): flat_view(content)
            for piece, content in zip(pieces, self._pieces, strict=True)
        }

    def _place_of(self, chunk: Chunk, slot: int) -> Tensor:
        return self._weights.own.slots[slot][chunk.begin_bytes : chunk.end_bytes]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread = threading.Thread(target=self._serve_all, name="shard", daemon=True)
        self._thread.start()
        try:
            yield
        except _core.RunFailure:
            self._raise_failure()  # if the serving thread has failed, its error is the cause
            raise
        finally:
            self._core.stop_serving()
            self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def record(self) -> dict[str, Any]:
        """Returns a record of the shard's updates and of the versions that this replica has read. Call it
        after the run. "parts" and "order" are as in report.result.UpdateOrder. "contained" has a pair for
        each version: the fewest gradients that a part of the version contains, and the most."""
        parts = [
            [(self._names[piece.parameter], piece.first, piece.count) for piece in part.pieces]
            for part in self._parts
        ]
        # A stage that trains nothing has no parts and counts no gradients, so a version's number stands for
        # both counts.
        versions = range(self._rounds.first_version, self._newest + 1)
        for version, counts in self._exchange.contained().items():
            self._note_contained(version, counts)
        contained = [self._contained.get(version, (version, version)) for version in versions]
        order = self._order if len(self._order) <= NUM_ORDERED_MAX else []
        return {"parts": parts, "order": order, "contained": contained}

    @property
    def step_peak_bytes(self) -> int:
        """The most bytes of temporary memory that a measured update for another replica has used."""
        return self._step_meter.peak_bytes

    # The second thread calls these functions to serve the other replicas.

    def _serve_all(self) -> None:
        try:
            with (
                torch.no_grad(),
                contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream),
            ):
                self._serve_until_the_end()
        except BaseException as failure:
            self._failure = failure
            self._core.fail(describe_error(failure))
        finally:
            with self._lock:
                self._is_over = True
                self._lock.notify_all()

    def _serve_until_the_end(self) -> None:
        while self._awaiting:
            found = self._core.receive_any([self._channels.push_from[other] for other in self._awaiting])
            if found is None:
                return  # the run has ended early
            index, item = found
            self.serve(self._awaiting[index], item)

    def serve(self, other: int, item: _core.ReceivedItem) -> None:
        """Takes one chunk that another replica has pushed. After the last chunk of a part, updates the part
        and sends it back."""
        self._awaiting.remove(other)
        if item.fields.is_end_of_data:
            return
        self._awaiting.append(other)
        index, arrived = self._next_part[other], self._arrived[other]
        arrived.append([from_dlpack(capsule) for capsule in item.take_tensors()])
        if len(arrived) < len(self._parts[index].chunks):
            return
        self._next_part[other] = (index + 1) % len(self._parts)
        self._arrived[other] = []
        with self._measured():
            self._answer(other, index, self._gradients_in(self._parts[index], arrived))

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        if self._num_unmeasured == 0:
            yield
            return
        self._num_unmeasured -= 1
        with self._step_meter.step():
            yield

    def _gradients_in(self, part: ShardPart, items: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
        gradients = {
            id(piece): self._piece_in_item(tensors, position, piece)
            for (_, chunk), tensors in zip(part.chunks, items, strict=True)
            for position, piece in enumerate(chunk.pieces)
        }
        return self._to_keep([gradients[id(piece)] for piece in part.pieces])

    def _answer(self, other: int, index: int, gradients: Sequence[Tensor | None]) -> None:
        channel, part = self._channels.pull_to[other], self._parts[index]
        # The other replica pushes a part again only after it has received the part's previous answer. So at
        # most the answers to this round's earlier chunks are unsent, and the call below does not wait. It
        # makes the core free the answers that have been sent.
        num_answered = part.chunks[0][0]
        self._core.wait_until_sent(channel, num_answered)
        with self._lock:
            self._step_for(other, index, gradients)
            self._lock.notify_all()
            num_updates = self._num_updates[index]
            for position, _ in part.chunks:
                self._answers[other][position].copy_(self._master[position])
        answers = [(channel, item_of([self._answers[other][position]])) for position, _ in part.chunks]
        self._core.send_items(answers, _core.ItemFields(num_minibatches=num_updates))

    def _step_for(self, other: int, index: int, gradients: Sequence[Tensor | None]) -> None:
        round_index = self._round_of[other]
        try:
            self._step(other, index, gradients)
        except PipelineError:
            raise
        except Exception as error:
            raise PipelineError(
                f"{self._where} failed in optimizer, at the gradient of replica {other}, round {round_index}:"
                f" {describe_error(error)}"
            ) from error

    def _piece_in_item(self, tensors: Sequence[Tensor], position: int, piece: Piece) -> Tensor | None:
        """Returns the gradient of a piece from a pushed item; None if the piece has no gradient. position:
        the piece's position in its chunk."""
        flags, content = tensors
        if not flags[position]:
            return None
        part = content.view(torch.uint8)[piece.begin_bytes : piece.begin_bytes + piece.num_bytes]
        return part.view(self._leaves(0, 0)[piece.parameter].dtype)

    # Both threads call these functions.

    def _to_keep(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients themselves, or copies if the optimizer may keep or change them."""
        if self._steps_by_element:
            return gradients
        return [None if gradient is None else gradient.clone() for gradient in gradients]

    def _step(self, replica: int, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Updates the part with the replica's next gradient. The caller holds the lock."""
        part = self._parts[index]
        pieces = self._pieces[part.first : part.first + len(part.pieces)]
        shaped = [
            None if gradient is None else self._shaped(gradient, piece)
            for gradient, piece in zip(gradients, part.pieces, strict=True)
        ]
        self._optimizer.step_some(part.first, pieces, pieces, shaped)
        self._num_updates[index] += 1
        if len(self._order) <= NUM_ORDERED_MAX:
            self._order.append(replica)
        if index + 1 == len(self._parts):
            self._optimizer.end_step()
            self._round_of[replica] += 1


def _own_piece(gradients: Sequence[Tensor | None], piece: Piece) -> Tensor | None:
    """Returns the piece's part of this replica's gradients; None if the parameter has no gradient. gradients:
    by parameter, flat."""
    gradient = gradients[piece.parameter]
    return None if gradient is None else gradient[piece.first : piece.first + piece.count]


def _chunks_in(memory: Tensor, chunks: Sequence[Chunk]) -> list[Tensor]:
    """Returns views of the memory, one per chunk. They lie one behind the other, in the order in which chunks
    are sent."""
    sizes = [chunk.num_bytes for chunk in chunks]
    return list(torch.split(memory[: sum(sizes)], sizes)) if sizes else []
