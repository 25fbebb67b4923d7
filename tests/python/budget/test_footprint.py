"""Tests footprint.py: meters that count the memory that a stage's work allocates, in a rehearsal and in
training.
"""

from __future__ import annotations

import torch
from pipedream.budget.footprint import StepMeter, WorkMeter, make_meter, storage_bytes

_CPU = torch.device("cpu")
_KIB = 1024


def test_the_host_meter_counts_each_memory_once_and_until_it_is_gone() -> None:
    outside = torch.zeros(1000)
    with make_meter(_CPU) as meter:
        made = torch.zeros(256)  # 1 KiB
        assert meter.live_bytes == _KIB
        view = made[:10]
        made += 1
        outside.mul_(2)
        assert meter.live_bytes == _KIB  # views and operations in place allocate nothing
        del made
        assert meter.live_bytes == _KIB  # the view keeps the memory
        del view
        assert meter.live_bytes == 0
        assert meter.peak_bytes == _KIB
        meter.reset_peak()
        assert meter.peak_bytes == 0


def test_the_host_meter_sees_nothing_outside_but_frees_what_it_saw() -> None:
    meter = make_meter(_CPU)
    with meter:
        made = torch.zeros(256)
    torch.zeros(5000)
    assert (meter.live_bytes, meter.peak_bytes) == (_KIB, _KIB)
    del made
    assert meter.live_bytes == 0


def _meter(gradients: list[torch.Tensor]) -> WorkMeter:
    return WorkMeter(make_meter(_CPU), lambda: storage_bytes(gradients))


def _bytes(num_kib: int) -> torch.Tensor:
    return torch.zeros(num_kib * _KIB, dtype=torch.uint8)


def test_the_terms_of_work_items_add_up_to_the_peak() -> None:
    gradients: list[torch.Tensor] = []
    meter = _meter(gradients)
    with meter.forward():
        first = [_bytes(10), _bytes(30)]
        first.pop()
    assert (meter.stash_peak_bytes, meter.transient_peak_bytes) == (10 * _KIB, 30 * _KIB)
    with meter.forward():
        second = [_bytes(10)]
    assert meter.stash_peak_bytes == 20 * _KIB
    with meter.backward():
        gradients.append(_bytes(5))
        temporary = _bytes(40)
        first.clear()
        del temporary
    assert meter.gradient_peak_bytes == 5 * _KIB
    assert (meter.stash_peak_bytes, meter.transient_peak_bytes) == (20 * _KIB, 40 * _KIB)
    assert second


def test_a_smaller_microbatchs_backward_counts_from_the_most_that_was_kept() -> None:
    # The first microbatch needs 20 KiB that are kept and 50 KiB besides, the second one 4 and 60. The second
    # one needs less in all, so it must not raise a term.
    meter = _meter([])
    for kept, beside in ((20, 50), (4, 60)):
        with meter.forward():
            stash = [_bytes(kept)]
        with meter.backward():
            temporary = _bytes(beside)
            del temporary
            stash.clear()
    assert (meter.stash_peak_bytes, meter.transient_peak_bytes) == (20 * _KIB, 50 * _KIB)


def test_gradients_on_their_way_upstream_are_kept_and_a_recompute_is_transient() -> None:
    meter = _meter([])
    with meter.forward():
        _bytes(3)
    with meter.recompute():
        stash = [_bytes(30)]
    with meter.backward():
        upstream = _bytes(12)
        stash.clear()
    assert (meter.stash_peak_bytes, meter.transient_peak_bytes) == (12 * _KIB, 30 * _KIB)
    with meter.forward():
        output = _bytes(1)
    assert meter.stash_peak_bytes == 13 * _KIB
    assert upstream.numel() + output.numel() == 13 * _KIB


def test_a_step_counts_what_it_drops_and_not_what_it_keeps() -> None:
    meter = StepMeter(make_meter(_CPU))
    state: list[torch.Tensor] = []
    for temporary, kept in ((10, 100), (30, 0), (20, 0)):
        gradient = _bytes(50)
        with meter.step():
            made = _bytes(temporary)
            del made, gradient
            state.append(_bytes(kept))
    assert meter.peak_bytes == 30 * _KIB


def test_the_meter_of_meta_tensors_counts_the_memory_that_they_do_not_have() -> None:
    with make_meter(torch.device("meta")) as meter:
        torch.zeros(256)
        made = torch.zeros(256, device="meta")
        view = made.view(16, 16)
        del made
        assert meter.live_bytes == meter.peak_bytes == _KIB
        del view
        assert meter.live_bytes == 0
