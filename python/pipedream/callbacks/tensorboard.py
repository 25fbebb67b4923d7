"""TensorBoard: a run's figures as the event files that it reads, written here, without its package.

A file is a list of records, each a message of protocol buffers (tensorflow/core/util/event.proto) between
checksums: the length, its masked CRC-32C, the message, its masked CRC-32C.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pipedream.callbacks.callback import Callback, EndReport, EpochReport, MinibatchReport, StartReport

__all__ = ["TensorBoard"]

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reversed
_MASK_DELTA = 0xA282EAD8


class TensorBoard(Callback):
    """Writes loss, rate and samples/s into `path`, and at the end the share of bubbles, the bytes sent, and
    each worker's peak memory and each stage's delay: `tensorboard --logdir path` shows them.

    every: minibatches between two writes; the loss of each minibatch is in one of them."""

    decides = False

    def __init__(self, path: str | os.PathLike[str], *, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"every of TensorBoard is {every}: use 1 or more minibatches")
        self.path = Path(path)
        self.every = every
        self._file: BinaryIO | None = None
        self._told_to = 0

    def on_start(self, report: StartReport) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self.path / name, "ab")  # noqa: SIM115 (until the end of the run)
        self._told_to = 0
        self._write(_field(3, b"brain.Event:2"))

    def on_minibatches(self, report: MinibatchReport) -> None:
        for minibatch, loss in enumerate(report.losses, start=report.first):
            self._add(minibatch, {"loss": loss})
        figures = {"samples_per_s": report.samples_per_s}
        for group, rate in enumerate(report.rates):
            figures["rate" if len(report.rates) == 1 else f"rate/{group}"] = rate
        self._add(report.end - 1, figures)
        self._flush()

    def on_epoch(self, report: EpochReport) -> None:
        figures = {"epoch/loss": report.loss}
        figures |= {f"validation/{name}": value for name, value in report.metrics.items()}
        self._add(report.end - 1, figures)
        self._flush()

    def on_end(self, report: EndReport) -> None:
        result = report.result
        if result is not None and result.losses:
            self._add(len(result.losses) - 1, _figures_of(result))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, step: int, figures: Mapping[str, float]) -> None:
        values = b"".join(
            _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in figures.items()
        )
        self._write(b"\x10" + _varint(step) + _field(5, values))

    def _write(self, event: bytes) -> None:
        assert self._file is not None
        message = b"\x09" + struct.pack("<d", time.time()) + event
        length = struct.pack("<Q", len(message))
        self._file.write(length + _masked_crc(length) + message + _masked_crc(message))

    def _flush(self) -> None:
        assert self._file is not None
        self._file.flush()


def _figures_of(result: Any) -> dict[str, float]:
    figures = {"bubble_share": result.bubble_share, "bytes_sent": float(result.bytes_sent)}
    for name, terms in zip(result.worker_names, result.memory, strict=True):
        peaks = [figures["peak"] for figures in terms.values() if figures["peak"] is not None]
        figures[f"memory_bytes/{name}"] = float(sum(peaks))
    for stage, reads in enumerate(result.versions):
        delays = [minibatch - forward for minibatch, (forward, _) in enumerate(reads)]
        figures[f"delay/stage {stage}"] = sum(delays) / max(len(delays), 1)
    return figures


def _field(number: int, content: bytes) -> bytes:
    """Of bytes, a text or a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc_table()


def _masked_crc(content: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + _MASK_DELTA) & 0xFFFFFFFF)
