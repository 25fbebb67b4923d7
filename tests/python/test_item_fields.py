"""Tests that ItemFields, which an item carries besides its tensors, has the members of the core's struct."""

from __future__ import annotations

import pytest
from pipedream import _core


def test_fields_are_what_they_are_made_and_set_to() -> None:
    fields = _core.ItemFields(data_fingerprint=(1 << 64) - 1, num_minibatches=3)
    assert (fields.data_fingerprint, fields.num_minibatches) == ((1 << 64) - 1, 3)
    assert (fields.loss_scale, fields.gradients_overflowed, fields.is_empty) == (0.0, False, False)
    fields.loss_scale, fields.is_empty, fields.data_fingerprint = 0.5, True, 7
    fields.gradients_overflowed = fields.is_end_of_data = True
    assert (fields.loss_scale, fields.is_empty, fields.data_fingerprint) == (0.5, True, 7)
    assert fields.gradients_overflowed and fields.is_end_of_data
    fields.boundary_events = 255
    assert fields.boundary_events == 255


def test_what_is_no_field_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lossscale'"):
        _core.ItemFields(lossscale=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes keywords alone"):
        _core.ItemFields(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        _core.ItemFields(is_empty=1)
    with pytest.raises(TypeError):
        _core.ItemFields(loss_scale="one")  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        _core.ItemFields(data_fingerprint=-1)
    with pytest.raises(TypeError, match="fields are no ItemFields"):
        _core.Worker(transport="inproc").advance([], None, 0, None)  # type: ignore[arg-type]
