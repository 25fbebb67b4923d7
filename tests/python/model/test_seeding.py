"""Tests seeding.py: the generators from which a run draws."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from pipedream.model.seeding import (
    RngState,
    RngStream,
    backward_seed,
    base_seed,
    data_seed,
    draws_seed,
    process_seed,
    seed_all,
    update_seed,
)

# These are base_seed(0), draws_seed(base) and data_seed(base).
PINNED_SEEDS = (439447896215772966, 2713569199408562941, 9132376182267266863)


def _draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.random())


def test_restored_state_draws_the_same_numbers_from_every_generator() -> None:
    state = RngState.capture()
    first = _draw()
    assert _draw() != first
    state.restore()
    assert _draw() == first
    state.restore()  # a state may be restored again
    assert _draw() == first


def test_seed_all_sets_every_generator_also_from_a_63_bit_seed() -> None:
    seed = draws_seed(base_seed(1))
    seed_all(seed)
    first = _draw()
    seed_all(seed)
    assert _draw() == first
    seed_all(seed + 1)
    second = _draw()
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_base_seed_without_seed_follows_torch_state_and_draws_nothing() -> None:
    torch.manual_seed(11)
    state = RngState.capture()
    base = base_seed(None)
    drawn = _draw()
    state.restore()
    assert _draw() == drawn  # base_seed() drew nothing
    assert base_seed(None) != base  # the draw before has changed torch's state
    torch.manual_seed(11)
    random.seed()  # generators that torch.manual_seed does not set do not count
    assert base_seed(None) == base


def test_derived_seeds_are_63_bits_distinct_and_the_same_in_every_version() -> None:
    base = base_seed(0)
    seeds = [base, data_seed(base), draws_seed(base)]
    for stage_index in range(16):
        seeds += [backward_seed(base, stage_index), process_seed(base, stage_index)]
        seeds += [update_seed(base, stage_index, names) for names in ([], ["a"], ["a", "b"])]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    # Changing these numbers changes the result of every seeded run.
    assert (base, draws_seed(base), data_seed(base)) == PINNED_SEEDS


def test_base_seed_takes_any_int_and_refuses_the_rest() -> None:
    assert len({base_seed(seed) for seed in (0, -1, 1, 1 << 100)}) == 4
    for seed in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="give an int"):
            base_seed(seed)


def test_a_stream_continues_where_it_was_left_and_leaves_the_outside_alone() -> None:
    torch.manual_seed(5)
    expected_inside = torch.rand(4)
    torch.manual_seed(6)
    expected_outside = torch.rand(4)

    torch.manual_seed(6)
    stream = RngStream(5)
    inside, outside = [], []
    for _ in range(4):
        with stream:
            inside.append(torch.rand(()))
        outside.append(torch.rand(()))
    # On the CPU four single draws give the same numbers as one draw of a vector. This does not hold on every
    # device.
    assert torch.equal(torch.stack(inside), expected_inside)
    assert torch.equal(torch.stack(outside), expected_outside)


def test_a_stream_restores_the_outside_after_an_error_and_refuses_to_nest_in_itself() -> None:
    stream = RngStream(5)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), stream:
        torch.rand(())
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    with stream, pytest.raises(RuntimeError, match="already entered"):
        stream.__enter__()
