"""Tests offload.py: saved tensors that go to host memory and come back, and the choice of what to offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pipedream import _core
from pipedream.budget import offload
from pipedream.budget.copy_streams import make_copy_streams
from pipedream.budget.footprint import Footprint
from pipedream.budget.memory import (
    OFFLOADED_ACTIVATIONS,
    OFFLOADED_VERSIONS,
    STASH,
    WEIGHT_VERSIONS,
    MemoryPlan,
    StageBytes,
    channel_terms,
    choose_savings,
)
from pipedream.budget.offload import (
    Offload,
    SavedTensors,
    StageOffload,
    forced_offload,
    graph_root,
    measure_offloadable,
)
from pipedream.budget.resident_versions import ResidentVersions
from pipedream.links.channels import RunChannel
from pipedream.planning.plan import Plan
from resident import HOST, linear_versions, memory
from torch import Tensor


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL_BYTES", 0)


def _stage(
    home_bytes: int = 4096,
    num_homes: int = 1,
    versions: ResidentVersions | None = None,
    kept: Sequence[Tensor] = (),
) -> StageOffload:
    homes = [memory(home_bytes) for _ in range(num_homes)]
    return StageOffload(HOST, make_copy_streams(HOST), homes, versions, kept)


def _saved(stage: StageOffload, kept: Sequence[Tensor] = (), *, is_next: bool = False) -> SavedTensors:
    saved = stage.forward(kept, is_next=is_next)
    assert saved is not None
    return saved


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Square(torch.autograd.Function):
    """Saves its arguments for the backward without changing them."""

    unpacked: list[Tensor]

    @staticmethod
    def forward(ctx: Any, first: Tensor, *more: Tensor) -> Tensor:
        ctx.save_for_backward(first, *more)
        return first.sum() + sum(tensor.sum() for tensor in more)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Square.unpacked = list(ctx.saved_tensors)
        return tuple(gradients[0] * tensor for tensor in ctx.saved_tensors)


def _round_trip(make: Callable[[Tensor], Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns copies of the tensors that a forward saved, and the tensors that its backward got back. `make`
    computes the tensors to save from a leaf.
    """
    stage = _stage()
    leaf = _random(4, 6).requires_grad_()
    saved = _saved(stage, [leaf])
    with saved:
        made = list(make(leaf * 1.0))
        wanted = [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in made]
        strides = [tensor.stride() for tensor in made]
        loss = Square.apply(*made)
    del made
    saved.prefetch()
    saved.arrive()
    loss.backward()
    assert [tensor.stride() for tensor in Square.unpacked] == strides
    return wanted, Square.unpacked


_VIEWS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "whole": lambda x: [x],
    "transposed": lambda x: [x.t()],
    "rows": lambda x: [x[1:3]],
    "every other column": lambda x: [x[:, 1::2]],
    "expanded": lambda x: [x[:1].expand(5, 6)],
    "one element": lambda x: [x[2, 3]],
    "pieces of one storage": lambda x: x.chunk(3, dim=1),
    "the same tensor twice": lambda x: [x, x],
    "a tensor and its view": lambda x: [x, x.t()[2:]],
    "real part of complex": lambda x: [torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)))],
    "negative lazily": lambda x: [torch._neg_view(x)],
}


@pytest.mark.parametrize("name", _VIEWS)
def test_a_saved_tensor_comes_back_with_its_values_and_strides(name: str) -> None:
    wanted, unpacked = _round_trip(_VIEWS[name])
    for tensor, value in zip(unpacked, wanted, strict=True):
        assert torch.equal(tensor, value)


def test_a_conjugate_view_comes_back_as_one() -> None:
    stage = _stage()
    leaf = torch.view_as_complex(_random(4, 2)).requires_grad_()
    saved = _saved(stage, [leaf])
    with saved:
        made = (leaf * 1.0).conj()
        wanted = made.detach().clone()
        loss = Square.apply(made).abs()
    saved.arrive()
    loss.backward()
    assert Square.unpacked[0].is_conj() and torch.equal(Square.unpacked[0], wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32])
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    content = _random(3, 5).sign().to(dtype)
    stage = _stage()
    leaf = _random(3, 5).requires_grad_()
    saved = _saved(stage, [leaf])
    with saved:
        mask = content.clone()
        loss = leaf.mul(2.0).masked_fill(mask.bool(), 0.0).sum() + Square.apply(leaf * 1.0, mask)
    saved.arrive()
    mask.zero_()  # the tensor that comes back is a copy
    Square.unpacked = []
    loss.backward()
    assert torch.equal(Square.unpacked[1], content)


def test_pieces_of_one_storage_take_room_once_and_other_storages_lie_apart() -> None:
    stage = _stage(home_bytes=2 * 256)
    leaf = _random(4, 6).requires_grad_()  # 192 bytes
    saved = _saved(stage, [leaf])
    with saved:
        first, second = leaf * 2.0, leaf * 3.0
        wanted = [second.detach().clone(), *(piece.detach().clone() for piece in first.chunk(3, dim=1))]
        loss = Square.apply(second, *first.chunk(3, dim=1))
        assert len(saved._memories) == 2
    assert saved._used_bytes == 2 * 192
    saved.arrive()
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(Square.unpacked, wanted, strict=True))


def test_parts_of_one_storage_that_count_their_versions_apart_come_back_as_each_was_saved() -> None:
    """A GRUCell saves its gates one by one, each after it was written. All gates lie in one storage. Each has
    a version counter of its own, and the counters are equal.
    """
    cell, inputs = torch.nn.GRUCell(6, 6, dtype=torch.float64), _random(4, 6)
    stage = _stage(home_bytes=1 << 16)
    parameters = list(cell.parameters())
    wanted = torch.autograd.grad(cell(inputs).sum(), parameters)
    saved = _saved(stage, parameters)
    with saved:
        loss = cell(inputs).sum()
    saved.prefetch()
    saved.arrive()
    for gradient, expected in zip(torch.autograd.grad(loss, parameters), wanted, strict=True):
        assert torch.equal(gradient, expected)


def test_what_does_not_fit_stays_on_the_device() -> None:
    stage = _stage(home_bytes=200)
    leaf = _random(4, 6).requires_grad_()
    saved = _saved(stage, [leaf])
    with saved:
        first, second = leaf * 2.0, leaf * 3.0
        loss = Square.apply(first, second)
    assert len(saved._away) == 1
    saved.arrive()
    loss.backward()
    assert Square.unpacked[0].data_ptr() != first.data_ptr()
    assert Square.unpacked[1].data_ptr() == second.data_ptr()


def _address_after(stage: StageOffload, saved: SavedTensors, tensor: Tensor) -> int:
    with saved:
        loss = Square.apply(tensor)
    saved.arrive()
    loss.backward()
    return Square.unpacked[0].data_ptr()


def test_received_tensors_inputs_buffers_targets_and_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, buffer, target = (_random(4, 6, seed=seed).requires_grad_() for seed in range(3))
    stage = _stage(kept=[buffer])
    saved = _saved(stage, [leaf])
    saved.keep([target])
    for tensor in (leaf.view(24), buffer.t(), target[1:]):
        assert _address_after(stage, saved, tensor) == tensor.data_ptr()
    made = (leaf * 1.0).detach().requires_grad_()
    monkeypatch.setattr(offload, "SMALL_BYTES", 193)
    assert _address_after(stage, _saved(_stage(), [leaf]), made) == made.data_ptr()
    monkeypatch.setattr(offload, "SMALL_BYTES", 192)
    assert _address_after(stage, _saved(_stage(), [leaf]), made) != made.data_ptr()


def test_the_microbatch_whose_backward_is_next_stays_and_takes_no_home() -> None:
    stage = _stage(num_homes=1)
    assert stage.forward([], is_next=True) is None
    assert _saved(stage).leaves_device
    assert stage.forward([], is_next=False) is None  # the only buffer in host memory is taken


def test_a_home_is_free_again_once_its_content_came_back() -> None:
    stage = _stage(num_homes=1)
    leaf = _random(4, 6).requires_grad_()
    losses, wanted = [], []
    for seed in range(3):
        saved = _saved(stage, [leaf])
        with saved:
            made = leaf * (seed + 1.0)
            wanted.append(made.detach().clone())
            losses.append(Square.apply(made))
        saved.prefetch()
    for loss, value in zip(losses, wanted, strict=True):
        loss.backward()
        assert torch.equal(Square.unpacked[0], value)


def test_device_memory_is_free_while_it_is_away_and_free_again_as_the_backward_uses_it() -> None:
    stage = _stage()
    leaf = _random(4, 6).requires_grad_()
    saved = _saved(stage, [leaf])
    with saved:
        loss = Square.apply(leaf * 1.0)
        memories = list(saved._memories.values())
        assert [memory.flat is not None for memory in memories] == [True]
    (memory,) = memories
    stage.settle()
    assert memory.flat is None
    saved.prefetch()
    assert memory.flat is not None
    away = [offload.weakref.ref(memory)]
    del memory, memories
    Square.unpacked = []
    loss.backward()
    Square.unpacked = []
    assert away[0]() is None


def test_what_the_graph_has_dropped_does_not_come_back() -> None:
    stage = _stage()
    leaf = _random(4, 6).requires_grad_()
    saved = _saved(stage, [leaf])
    with saved:
        loss, dropped = Square.apply(leaf * 1.0), Square.apply(leaf * 2.0)
    del dropped
    stage.settle()
    assert [reference() is not None for reference in saved._away] == [True, False]
    saved.arrive()
    loss.backward()


def test_a_gradient_inside_the_forward_finds_its_tensors() -> None:
    stage = _stage()
    leaf = _random(4, 6).requires_grad_()
    with _saved(stage, [leaf]):
        inner = (leaf * 1.0).square().sum()
        (gradient,) = torch.autograd.grad(inner, leaf)
    assert torch.equal(gradient, 2 * leaf)


@pytest.mark.parametrize("is_away", [True, False], ids=["offloaded", "kept"])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error_as_in_plain_torch(is_away: bool) -> None:
    leaf = _random(4, 6).requires_grad_()
    stage = _stage()
    saved = _saved(stage, [leaf])
    with saved:
        made = leaf * 1.0
        if not is_away:
            saved.keep([made])
        loss = made.square().sum()
        made.detach().add_(1.0)
    saved.arrive()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_contents_of_one_memory_are_two_copies() -> None:
    leaf = _random(4, 6).requires_grad_()
    saved = _saved(_stage(), [leaf])
    with saved:
        made = leaf * 1.0
        unused = Square.apply(made)
        made.detach().add_(1.0)
        wanted = made.detach().clone()
        loss = Square.apply(made)
    assert unused is not None
    saved.arrive()
    loss.backward()
    assert torch.equal(Square.unpacked[0], wanted)


def test_the_rehearsal_counts_what_would_go() -> None:
    leaf, kept = _random(4, 6).requires_grad_(), _random(5, 5).requires_grad_()
    with measure_offloadable([leaf, kept]) as num_bytes:
        made = leaf * 1.0
        Square.apply(made, made.t(), kept, leaf * 2.0)
        Square.apply(leaf[:1, :1] * 1.0)
        assert num_bytes() == 192 + 192 + 64
    (made * 2.0).square()
    assert num_bytes() == 192 + 192 + 64


def test_a_root_stands_for_an_output_whose_memory_is_gone() -> None:
    leaf = _random(4, 6).requires_grad_()
    output = leaf * 3.0
    alive = offload.weakref.ref(output)
    root = graph_root(output)
    del output
    assert alive() is None
    root.backward(torch.ones(4, 6, dtype=torch.float64))
    assert torch.equal(leaf.grad, torch.full((4, 6), 3.0, dtype=torch.float64))
    assert not graph_root(_random(2)).requires_grad


def test_a_graph_reads_its_version_wherever_that_lies_by_then() -> None:
    layer, weights, resident = linear_versions(5)
    stage = _stage(num_homes=0, versions=resident)
    leaves, losses, wanted = [], [], []
    inputs = _random(2, 3).requires_grad_()
    for version in range(5):
        weights.bind(version)
        with _saved(stage, [inputs]):
            # Each graph saves the weight and its transpose.
            losses.append((inputs @ layer.weight.t() @ layer.weight).square().sum())
        current = weights.leaves(version)[0].detach().clone().requires_grad_()
        alone = (inputs @ current.t() @ current).square().sum()
        wanted.append(torch.autograd.grad(alone, [inputs, current]))
        leaves.append(weights.leaves(version)[0])
        if version < 4:
            weights.begin_update(version, version + 1)
            with torch.no_grad():
                weights.leaves(version + 1)[0].copy_(weights.leaves(version)[0] * 1.5 + version)
            weights.end_update(version + 1)
    for version, loss in enumerate(losses):
        inputs.grad = None
        weights.bind(version)
        if version < 4:
            weights.prefetch(version + 1)
        loss.backward()
        assert torch.allclose(inputs.grad, wanted[version][0], rtol=1e-12)
        (gradient,) = weights.take_gradients(version)
        assert torch.allclose(gradient, wanted[version][1], rtol=1e-12)
        assert weights.leaves(version)[0] is leaves[version]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("versions", ["versions"]),
        ("activations", ["activations"]),
        (" versions , activations,", ["versions", "activations"]),
    ],
)
def test_the_variable_names_what_to_offload(
    monkeypatch: pytest.MonkeyPatch, text: str, names: list[str]
) -> None:
    monkeypatch.setenv("PIPEDREAM_OFFLOAD", text)
    assert forced_offload().names() == names


def test_the_variable_refuses_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEDREAM_OFFLOAD", "activations,weights")
    with pytest.raises(ValueError, match="has 'weights': use activations, versions or both"):
        forced_offload()


# What a worker chooses.

_MIB = 1 << 20


def _plan_of(
    device_type: str,
    *,
    in_flight: tuple[int, ...] = (6, 1),
    weight_mib: int = 0,
    stash_mib: int = 0,
    offloadable_mib: int = 0,
    input_mib: int = 0,
    channels: Sequence[RunChannel] = (),
) -> MemoryPlan:
    """Returns the memory plan of rank 0 in a pipeline of two stages."""
    footprint = Footprint(
        input_bytes=input_mib * _MIB,
        stash_bytes=stash_mib * _MIB,
        transient_bytes=0,
        gradient_bytes=0,
        is_measured=True,
        offloadable_bytes=offloadable_mib * _MIB,
    )
    return MemoryPlan(
        Plan.straight(2, 2),
        0,
        _core.ScheduleOptions(in_flight=in_flight),
        {0: footprint, 1: footprint},
        channels,
        stages={0: StageBytes(weight_mib * _MIB)},
        model_bytes=0,
        device_type=device_type,
    )


def _chosen(
    memory: MemoryPlan, limit_mib: int, recompute: Sequence[bool] | None = None
) -> tuple[bool, list[str]]:
    """Returns whether stage 0 recomputes, and the names of the parts that it offloads."""
    chosen = choose_savings(memory, recompute, limit_mib * _MIB)
    assert chosen.counted_bytes() <= limit_mib * _MIB
    done = Offload(chosen.offloads_versions(0), chosen.offloads_activations(0))
    return chosen.schedule.recompute[0], done.names()


# Stage 0 has six microbatches in flight. So this is 60 MiB of weights, 120 MiB of stashes and 6 MiB of
# inputs.
_LARGE = {"weight_mib": 10, "stash_mib": 20, "offloadable_mib": 18, "input_mib": 1}


def test_nothing_is_chosen_without_a_limit_or_with_room() -> None:
    assert choose_savings(_plan_of("cuda", **_LARGE), None, None).offload == {}
    assert _chosen(_plan_of("cuda", **_LARGE), 186) == (False, [])


def test_recompute_is_tried_first_then_versions_then_activations() -> None:
    memory = _plan_of("cuda", **_LARGE)
    assert _chosen(memory, 185) == (True, [])
    # With recompute the stage needs 60 + 6 + 21 MiB and 48 KiB. With only three versions on the device it
    # needs 30 MiB less.
    assert _chosen(memory, 88) == (True, [])
    assert _chosen(memory, 87) == (True, ["versions"])
    assert _chosen(memory, 58) == (True, ["versions"])


def test_a_given_recompute_is_not_changed() -> None:
    memory = _plan_of("cuda", **_LARGE)
    assert _chosen(memory, 185, [False, False]) == (False, ["versions"])
    # The needs in MiB are: three versions 30, six stashes of 2, two microbatches' activations of 18, and
    # inputs 6.
    assert _chosen(memory, 155, [False, False]) == (False, ["versions", "activations"])
    assert _chosen(memory, 84, [False, False]) == (False, ["versions", "activations"])
    with pytest.raises(
        ValueError, match=r"needs 84\.00 MiB, 1\.00 MiB more, with what recompute and offloading may save"
    ):
        choose_savings(memory, [False, False], 83 * _MIB)


def test_recompute_that_is_not_needed_after_all_is_left_out() -> None:
    # 600 + 12 + 6 MiB are needed, and recompute would save 9.
    memory = _plan_of("cuda", weight_mib=100, stash_mib=2, input_mib=1)
    assert _chosen(memory, 605) == (False, ["versions"])
    needed = memory.with_recompute([False, False]).with_offload(0, Offload(versions=True)).counted_bytes()
    assert not any(choose_savings(memory, None, needed).schedule.recompute)
    assert choose_savings(memory, None, needed - 1).schedule.recompute[0]


def test_on_the_host_offloading_saves_nothing_and_is_never_chosen() -> None:
    memory = _plan_of("cpu", **_LARGE)
    assert _chosen(memory, 88) == (True, [])
    with pytest.raises(ValueError, match="with what recompute and offloading may save"):
        choose_savings(memory, None, 87 * _MIB)
    for names in (Offload(versions=True), Offload(activations=True)):
        assert memory.with_offload(0, names).counted_bytes() >= memory.counted_bytes()


def test_a_stage_with_few_versions_or_microbatches_in_flight_is_not_offloaded() -> None:
    memory = _plan_of("cuda", in_flight=(3, 1), weight_mib=10, stash_mib=0)
    assert not memory.with_offload(0, Offload(versions=True)).offloads_versions(0)
    memory = _plan_of("cuda", in_flight=(1, 1), stash_mib=20, offloadable_mib=20)
    assert not memory.with_offload(0, Offload(activations=True)).offloads_activations(0)
    # One of the two microbatches in flight is on the device because its backward is next, and the other one
    # because it is being copied. So offloading saves nothing.
    memory = _plan_of("cuda", in_flight=(2, 1), stash_mib=20, offloadable_mib=20)
    with pytest.raises(ValueError, match=r"needs 40\.00 MiB"):
        choose_savings(memory, [False, False], 39 * _MIB)


def test_terms_name_what_lies_where() -> None:
    memory = _plan_of("cuda", **_LARGE)
    plain = memory.terms()
    terms = memory.with_offload(0, Offload(versions=True, activations=True)).terms()
    assert (plain[WEIGHT_VERSIONS], terms[WEIGHT_VERSIONS]) == (60 * _MIB, 30 * _MIB)
    assert terms[OFFLOADED_VERSIONS] == 60 * _MIB
    assert terms[OFFLOADED_ACTIVATIONS] == 5 * 18 * _MIB
    assert plain[STASH] - terms[STASH] == (6 - 2) * 18 * _MIB


def _channel(name: str, tensor: tuple[str, int, int], *, on_device: bool, codec: str = "none") -> RunChannel:
    """Returns a channel from rank 1 to rank 0, with two slots."""
    return RunChannel(
        name=name,
        channel_id=0,
        sender=1,
        receiver=0,
        tensors=[tensor],
        num_slots=2,
        num_unsent_max=2,
        num_microbatches=1,
        on_device=on_device,
        codec=codec,
    )


@pytest.mark.parametrize(("device_type", "counted"), [("cuda", 60 * _MIB), ("cpu", 60 * _MIB + 512)])
def test_channels_in_host_memory_do_not_count_on_a_gpu(device_type: str, counted: int) -> None:
    channel = _channel("weights and result, rank 1 to rank 0", ("uint8", 1, 200), on_device=False)
    memory = _plan_of(device_type, weight_mib=10, channels=[channel])
    assert memory.counted_bytes() == counted
    assert replace(memory, channels=[replace(channel, on_device=True)]).counted_bytes() == 60 * _MIB + 512


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_has_room_for_an_encoded_item_of_each_channel(rank: int) -> None:
    channel = _channel("activations", ("float32", 1, 4000), on_device=True, codec="bf16")
    on_gpu, on_host = (channel_terms(channel, rank, device_type) for device_type in ("cuda", "cpu"))
    assert on_gpu == on_host | {"encoded, activations": 2048}
    memory = _plan_of("cuda", weight_mib=10, channels=[channel])
    received_bytes = 2 * 4096
    assert memory.counted_bytes() == 60 * _MIB + received_bytes + 2048
