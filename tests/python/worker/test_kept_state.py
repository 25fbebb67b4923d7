"""Tests kept_state.py: a state that would fill the disk is not kept. tests/equivalence tests everything
else.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from pipedream.worker.kept_state import check_room


def test_a_state_that_all_workers_have_no_room_for_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8 << 20))
    check_room(tmp_path / "run", 1 << 20, 4)
    with pytest.raises(
        ValueError, match=r"it takes 1\.25 MiB, and .*, where 4 workers .* has 8(\.00)? MiB free"
    ):
        check_room(tmp_path / "run", 5 << 18, 4)
