"""The place of libzmq, which the core loads at run time. Torch-free; any thread."""

from __future__ import annotations

from pathlib import Path

__all__ = ["find_libzmq"]


def find_libzmq() -> str:
    """The libzmq inside the pyzmq wheel; empty leaves the search to the core."""
    import zmq

    bundled = Path(zmq.__file__).parent.parent / "pyzmq.libs"
    found = sorted(bundled.glob("libzmq*.so*")) if bundled.is_dir() else []
    return str(found[0]) if found else ""
