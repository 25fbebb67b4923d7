"""Decides from which generator each part of a run draws random numbers, so that a run can be repeated
exactly.

The rule is the same in the workers and in the reference.

With one worker everything but validation data draws from the process's global generators, as in a plain
PyTorch loop. If a seed is given, `seed_all` sets them first. With several workers:

    data                 data_seed        the same at all workers; torch's generators are switched to the
                                          data's stream while data are read; only data use `random` and numpy
    a forward            draws_seed       by place and microbatch (draws.py)
    a backward           backward_seed    by stage and microbatch
    an optimizer's step  update_seed      by stage, names of the parameters, and number of the step
    all else in a stage  process_seed     by the process's first stage
    validation data      evaluation_seed  by evaluation; the same at all workers

All these seeds derive from `base`, the caller's `base_seed(seed)`, or rank 0's under torchrun.

A layer in a pipeline must therefore draw from torch's generator only, as dropout does. Generators are global
to a process: use them on the thread that runs the stage.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

import torch

from pipedream.common.checks import is_whole

__all__ = [
    "RngState",
    "RngStream",
    "TorchState",
    "backward_seed",
    "base_seed",
    "data_seed",
    "draws_seed",
    "evaluation_seed",
    "generators_kept",
    "generators_of_torch_kept",
    "process_seed",
    "seed_all",
    "seed_data",
    "seed_torch",
    "update_seed",
]

_SEED_BITS = 63  # so that a seed also fits into a signed 64-bit number
_NUMPY_SEED_BITS = 32  # numpy.random.seed takes no more
_HAS_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_seed_host = torch.default_generator.manual_seed


def base_seed(seed: int | None) -> int:
    """Returns the 63-bit number from which all streams of a run derive. It depends on `seed`, or on torch's
    present CPU state.

    Nothing is drawn, so the state does not change. Only torch's state counts: a script that calls
    torch.manual_seed and nothing else can be repeated. Raises TypeError for a seed that is no int.
    """
    if seed is None:
        return _mix(b"state", torch.get_rng_state().numpy().tobytes())
    if not is_whole(seed):
        raise TypeError(f"seed is {seed!r}: give an int, or None to continue from torch's present state")
    return _mix(b"seed", str(seed).encode())


def draws_seed(base: int) -> int:
    """Returns the 63-bit seed for a model's draws in its forwards. It depends on `base` alone."""
    return _mix(b"draws", str(base).encode())


def update_seed(base: int, stage_index: int, names: Iterable[str]) -> int:
    """Returns the seed for an optimizer's draws in its steps. names: names of the parameters, or pieces of
    parameters, that the optimizer updates.
    """
    return _mix(b"update", f"{base} {stage_index} {' '.join(names)}".encode())


def evaluation_seed(base: int) -> int:
    """Returns the seed for the validation data's draws."""
    return _mix(b"evaluation", str(base).encode())


def backward_seed(base: int, stage_index: int) -> int:
    """Returns the seed for a stage's draws in its backwards."""
    return _mix(b"backward", f"{base} {stage_index}".encode())


def process_seed(base: int, stage_index: int) -> int:
    """Returns the seed of a process's own generators. stage_index: the process's first stage."""
    return _mix(b"process", f"{base} {stage_index}".encode())


def data_seed(base: int, stopped_at: int | None = None) -> int:
    """Returns the 63-bit seed of the stream from which data draw (shuffling, augmentation).

    stopped_at: if this run continues an earlier run, the minibatch before which the earlier run stopped; else
        None.
    """
    return _mix(b"data", (str(base) if stopped_at is None else f"{base} {stopped_at}").encode())


def seed_all(seed: int) -> None:
    """Sets the global generators: torch's on all devices, `random`'s, and numpy's if numpy is imported.

    `seed` is a number that torch.manual_seed accepts.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << _NUMPY_SEED_BITS))


def seed_data(base: int, seed: int | None, num_workers: int) -> None:
    """Seeds the global generators of the process that reads a run's data, as the head of this file says."""
    if num_workers > 1:
        seed_all(data_seed(base))
    elif seed is not None:
        seed_all(seed)


class TorchState(NamedTuple):
    """A copy of torch's generators: the CPU's and CUDA's."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    """States, one per device; empty if CUDA was not initialised at capture."""

    @classmethod
    def capture(cls) -> TorchState:
        # Asking an uninitialised CUDA would initialise it, which costs memory and forbids a later fork.
        cuda = torch.cuda.get_rng_state_all() if _cuda_is_initialized() else ()
        return cls(torch.get_rng_state(), tuple(cuda))

    def restore(self) -> None:
        """Restores the generators. A state may be restored any number of times."""
        torch.set_rng_state(self.cpu)
        for device_index, state in enumerate(self.cuda):
            torch.cuda.set_rng_state(state, device_index)

    def equals(self, other: TorchState) -> bool:
        """Whether nothing was drawn between the two captures."""
        # The states are not joined, because that would allocate memory while a rehearsal measures what the
        # stage allocates (budget/rehearsal.py).
        pairs = zip((self.cpu, *self.cuda), (other.cpu, *other.cuda), strict=False)
        return len(self.cuda) == len(other.cuda) and all(torch.equal(*pair) for pair in pairs)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """In the with block, the generators draw the same random numbers as after the capture. Afterwards the
        generators have the states from before the block.
        """
        with generators_of_torch_kept():
            self.restore()
            yield


@dataclass(frozen=True)
class RngState:
    """A copy of every global generator: torch's, `random`'s, numpy's (if imported)."""

    torch: TorchState
    python: tuple[Any, ...]
    numpy: Any | None

    @classmethod
    def capture(cls) -> RngState:
        numpy = sys.modules.get("numpy")
        numpy_state = None if numpy is None else numpy.random.get_state()
        return cls(TorchState.capture(), random.getstate(), numpy_state)

    def restore(self) -> None:
        """Restores the generators. A state may be restored any number of times."""
        self.torch.restore()
        random.setstate(self.python)
        if self.numpy is not None:
            importlib.import_module("numpy").random.set_state(self.numpy)

    def equals(self, other: RngState) -> bool:
        """Whether nothing was drawn between the two captures."""
        are_equal = self.python == other.python and self.of_numpy() == other.of_numpy()
        return are_equal and self.torch.equals(other.torch)

    def to_document(self) -> dict[str, Any]:
        """Returns the state as a value for JSON, for from_document()."""
        document: dict[str, Any] = {
            "torch": _hex_of(self.torch.cpu),
            "cuda": [_hex_of(state) for state in self.torch.cuda],
            "python": self.python,
        }
        if self.numpy is not None:
            kind, keys, *rest = self.numpy
            document["numpy"] = [kind, keys.tobytes().hex(), *rest]
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> RngState:
        version, internal, gauss = document["python"]
        numpy_state = None
        if "numpy" in document:
            import numpy

            kind, keys, *rest = document["numpy"]
            numpy_state = (kind, numpy.frombuffer(bytes.fromhex(keys), dtype=numpy.uint32).copy(), *rest)
        return cls(
            TorchState(_of_hex(document["torch"]), tuple(map(_of_hex, document["cuda"]))),
            (version, tuple(internal), gauss),
            numpy_state,
        )

    def of_numpy(self) -> Any:
        """Returns the state of numpy's generator in a form that can be compared; None if numpy is not
        imported.
        """
        if self.numpy is None:
            return None
        kind, keys, *rest = self.numpy
        return kind, keys.tobytes(), rest


@contextlib.contextmanager
def generators_kept() -> Iterator[RngState]:
    """In the with block, the generators may be used. Afterwards they have their former states, which are
    yielded.
    """
    state = RngState.capture()
    try:
        yield state
    finally:
        state.restore()


@contextlib.contextmanager
def generators_of_torch_kept() -> Iterator[None]:
    """In the with block, torch's generators may be used. Afterwards they have their former states."""
    state = TorchState.capture()
    try:
        yield
    finally:
        state.restore()


class RngStream:
    """A stream of random numbers for torch's generators (CPU and CUDA), separate from all others. In `with
    stream:` torch draws from it. Each such block continues where the last block stopped.

    `random` and numpy belong to the data and are left alone.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: TorchState | None = None
        self._outside: TorchState | None = None

    def left_at(self) -> RngState | None:
        """Returns the states of torch's generators where this stream stopped, with the present states of
        `random` and numpy; None before the stream's first use.
        """
        return None if self._inside is None else replace(RngState.capture(), torch=self._inside)

    def go_on_from(self, state: RngState) -> None:
        """Makes the stream go on from the state of torch's generators."""
        self._inside = state.torch

    def __enter__(self) -> RngStream:
        if self._outside is not None:
            raise RuntimeError("this RngStream is already entered")
        self._outside = TorchState.capture()
        if self._inside is None:
            seed_torch(self._seed)
            return self
        self._inside.restore()
        if not self._inside.cuda and _cuda_is_initialized():  # CUDA came up since this stream was left
            torch.cuda.manual_seed_all(self._seed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._outside is not None
        self._inside = TorchState.capture()
        self._outside.restore()
        self._outside = None


def _hex_of(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _of_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def seed_torch(seed: int) -> None:
    """Seeds torch's generators of the host and of all devices in use."""
    # torch.manual_seed would take a hundred times as long, because it also looks for other kinds of devices.
    _seed_host(seed)
    if _cuda_is_initialized():
        torch.cuda.manual_seed_all(seed)


def _cuda_is_initialized() -> bool:
    return _HAS_CUDA and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _mix(purpose: bytes, content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8, person=b"pd " + purpose).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
