"""Reads the event files of TensorBoard back, and checks their checksums by another way than they are made."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["read_scalars"]


def read_scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag, (step, value) in order."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    for event in _records(path.read_bytes()):
        fields = dict(_fields(event))
        step = fields.get(2, 0)
        assert isinstance(step, int)
        summary = fields.get(5, b"")
        assert isinstance(summary, bytes)
        for _, value in _fields(summary):
            assert isinstance(value, bytes)
            parts = dict(_fields(value))
            tag, number = parts[1], parts[2]
            assert isinstance(tag, bytes) and isinstance(number, float)
            scalars.setdefault(tag.decode(), []).append((step, number))
    return scalars


def _records(content: bytes) -> Iterator[bytes]:
    while content:
        (length,) = struct.unpack_from("<Q", content)
        message = content[12 : 12 + length]
        assert content[8:12] == _masked(content[:8])
        assert content[12 + length : 16 + length] == _masked(message)
        yield message
        content = content[16 + length :]


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    while message:
        key, message = _varint(message)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, message = _varint(message)
            yield number, value
        elif kind == 1:
            yield number, struct.unpack_from("<d", message)[0]
            message = message[8:]
        elif kind == 5:
            yield number, struct.unpack_from("<f", message)[0]
            message = message[4:]
        else:
            length, message = _varint(message)
            yield number, message[:length]
            message = message[length:]


def _varint(content: bytes) -> tuple[int, bytes]:
    value = 0
    for index, byte in enumerate(content):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, content[index + 1 :]
    raise AssertionError("a number without an end")


def _masked(content: bytes) -> bytes:
    """CRC-32C bit by bit, rotated and shifted as these files have it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
