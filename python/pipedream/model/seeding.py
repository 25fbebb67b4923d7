"""Random numbers: which generator each part of a run draws from, so that a run can be repeated exactly.

The rule, the same in the workers and in the reference:

- One worker: everything draws from the process's global generators, as in a plain PyTorch loop; a seed
  that is given is set first with `seed_all`.
- Several workers: the data have streams of their own, from `seed_all(data_seed(base))`, so that every
  worker reads the same minibatches. Torch's is swapped in while data are read, `random` and numpy belong to
  them. What the model draws in its forwards is keyed by where and for which microbatch (draws.py), an
  optimizer's step by its stage, its parameters' names and its number, a backward that draws by its stage and
  microbatch: `update_seed`, `backward_seed`. The rest of a stage draws from the process's generators,
  `process_seed`. `base` is `base_seed(seed)` of the caller (of rank 0 under torchrun).

So a layer of a pipeline draws from torch's generator only, as dropout does.
Generators are global to a process: use by the thread that runs the stage.
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
from typing import Any

import torch

from pipedream.common.checks import is_whole

__all__ = [
    "RngState",
    "RngStream",
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

_SEED_BITS = 63  # torch.manual_seed takes a signed 64-bit number
_NUMPY_SEED_BITS = 32  # numpy.random.seed takes no more
_HAS_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_seed_host = torch.default_generator.manual_seed


def base_seed(seed: int | None) -> int:
    """The 63-bit number all streams of a run derive from: of `seed`, or of torch's present CPU state.

    Draws nothing: the state stays as it is. Only torch's state counts, so that a script that calls
    torch.manual_seed and no more is repeatable. Raises TypeError for a seed that is no int.
    """
    if seed is None:
        return _mix(b"state", torch.get_rng_state().numpy().tobytes())
    if not is_whole(seed):
        raise TypeError(f"seed is {seed!r}: give an int, or None to continue from torch's present state")
    return _mix(b"seed", str(seed).encode())


def draws_seed(base: int) -> int:
    """The 63-bit seed of what a model draws in its forwards; the same on every machine and version."""
    return _mix(b"draws", str(base).encode())


def update_seed(base: int, stage_index: int, names: Iterable[str]) -> int:
    """The seed of an optimizer's draws in its steps. names: of its parameters, or of its pieces of them."""
    return _mix(b"update", f"{base} {stage_index} {' '.join(names)}".encode())


def evaluation_seed(base: int) -> int:
    """The seed of what validation data draw."""
    return _mix(b"evaluation", str(base).encode())


def backward_seed(base: int, stage_index: int) -> int:
    """The seed of a stage's draws in its backwards."""
    return _mix(b"backward", f"{base} {stage_index}".encode())


def process_seed(base: int, stage_index: int) -> int:
    """The seed of a process's own generators. stage_index: its first stage."""
    return _mix(b"process", f"{base} {stage_index}".encode())


def data_seed(base: int, stopped_at: int | None = None) -> int:
    """The 63-bit seed of the stream that the data (shuffling, augmentation) draw from. stopped_at: the
    minibatch before which the run was stopped that this one goes on from."""
    return _mix(b"data", (str(base) if stopped_at is None else f"{base} {stopped_at}").encode())


def seed_all(seed: int) -> None:
    """Sets the global generators: torch on all devices, `random`, and numpy's if numpy is imported.

    `seed` is a number that torch.manual_seed takes.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << _NUMPY_SEED_BITS))


def seed_data(base: int, seed: int | None, num_workers: int) -> None:
    """Sets the global generators as whoever reads the data of a run does, by the rule above."""
    if num_workers > 1:
        seed_all(data_seed(base))
    elif seed is not None:
        seed_all(seed)


@dataclass(frozen=True)
class RngState:
    """A copy of every global generator: torch CPU, torch CUDA, `random`, numpy (if imported)."""

    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    """One per device; empty when CUDA was not initialised at capture."""
    python: tuple[Any, ...]
    numpy: Any | None

    @classmethod
    def capture(cls) -> RngState:
        numpy = sys.modules.get("numpy")
        numpy_state = None if numpy is None else numpy.random.get_state()
        return cls(torch.get_rng_state(), _cuda_state(), random.getstate(), numpy_state)

    def restore(self) -> None:
        """Puts the generators back; the state may be restored any number of times."""
        torch.set_rng_state(self.torch_cpu)
        _set_cuda_state(self.torch_cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            importlib.import_module("numpy").random.set_state(self.numpy)

    def equals(self, other: RngState) -> bool:
        """Whether nothing was drawn between the two captures."""
        mine, others = (torch.cat([one.torch_cpu, *one.torch_cuda]) for one in (self, other))
        return (
            torch.equal(mine, others) and self.python == other.python and self.of_numpy() == other.of_numpy()
        )

    def to_document(self) -> dict[str, Any]:
        """JSON; from_document() makes it the state again."""
        document: dict[str, Any] = {
            "torch": _hex_of(self.torch_cpu),
            "cuda": [_hex_of(state) for state in self.torch_cuda],
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
            _of_hex(document["torch"]),
            tuple(_of_hex(state) for state in document["cuda"]),
            (version, tuple(internal), gauss),
            numpy_state,
        )

    def of_numpy(self) -> Any:
        """The state of numpy's generator in a form that compares; None where nobody has imported numpy."""
        if self.numpy is None:
            return None
        kind, keys, *rest = self.numpy
        return kind, keys.tobytes(), rest


@contextlib.contextmanager
def generators_kept() -> Iterator[RngState]:
    """Inside, the generators may be used; afterwards they are as they were. Gives their state."""
    state = RngState.capture()
    try:
        yield state
    finally:
        state.restore()


@contextlib.contextmanager
def generators_of_torch_kept() -> Iterator[None]:
    """Inside, torch's generators may be used; afterwards they are as they were."""
    cpu, cuda = torch.get_rng_state(), _cuda_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        _set_cuda_state(cuda)


class RngStream:
    """A torch stream of its own (CPU and CUDA): `with stream:` draws from it where it was left.

    Swapping costs about 1 us each way: `random` and numpy are left alone, they belong to the data.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None
        self._outside: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def left_at(self) -> RngState | None:
        """Torch's generators where it was left, the others as they are; None before it was entered."""
        if self._inside is None:
            return None
        cpu_state, cuda_state = self._inside
        return replace(RngState.capture(), torch_cpu=cpu_state, torch_cuda=cuda_state)

    def go_on_from(self, state: RngState) -> None:
        """Makes it draw next what torch's generators in this state would."""
        self._inside = (state.torch_cpu, state.torch_cuda)

    def __enter__(self) -> RngStream:
        if self._outside is not None:
            raise RuntimeError("this RngStream is already entered")
        self._outside = (torch.get_rng_state(), _cuda_state())
        if self._inside is None:
            seed_torch(self._seed)
            return self
        cpu_state, cuda_state = self._inside
        torch.set_rng_state(cpu_state)
        if cuda_state:
            _set_cuda_state(cuda_state)
        elif _cuda_is_initialized():  # CUDA came up since this stream was left
            torch.cuda.manual_seed_all(self._seed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._outside is not None
        self._inside = (torch.get_rng_state(), _cuda_state())
        cpu_state, cuda_state = self._outside
        torch.set_rng_state(cpu_state)
        _set_cuda_state(cuda_state)
        self._outside = None


def _hex_of(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _of_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def seed_torch(seed: int) -> None:
    """Torch's generators, of the host and of all devices in use."""
    # As torch.manual_seed, which takes a hundred times as long to ask for devices that are not there.
    _seed_host(seed)
    if _cuda_is_initialized():
        torch.cuda.manual_seed_all(seed)


def _cuda_state() -> tuple[torch.Tensor, ...]:
    # Asking an uninitialised CUDA would initialise it, which costs memory and forbids a later fork.
    return tuple(torch.cuda.get_rng_state_all()) if _cuda_is_initialized() else ()


def _cuda_is_initialized() -> bool:
    return _HAS_CUDA and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _set_cuda_state(state: tuple[torch.Tensor, ...]) -> None:
    for device_index, device_state in enumerate(state):
        torch.cuda.set_rng_state(device_state, device_index)


def _mix(purpose: bytes, content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=8, person=b"pd " + purpose).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
