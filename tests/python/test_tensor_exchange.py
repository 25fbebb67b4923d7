"""Tests tensors that go to the core. A tensor that the core cannot read by its address is refused by name."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import pytest
import torch
from pipedream import _core
from pipedream.links.keys import find_libzmq
from pipedream.model.boundary import TENSORS, exportable
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

_DEVICE_OFFSET = 8  # offset in DLManagedTensor, behind the address

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _capsule(tensor: Tensor, device_type: int, device_index: int = 0) -> Any:
    """Returns the tensor's capsule, which claims that the tensor is on a device of this DLPack type."""
    capsule = to_dlpack(tensor)
    address = _pointer_of(capsule, b"dltensor")
    (ctypes.c_int32 * 2).from_address(address + _DEVICE_OFFSET)[:] = [device_type, device_index]
    return capsule


def _core_with_channel() -> _core.Worker:
    core = _core.Worker(transport="inproc")
    tensors = [("float32", 1, 16), ("float32", 1, 16)]
    core.add_channel(name="out", sends=True, peer="stage 1", channel_id=0, tensors=tensors, num_items=2)
    return core


def test_a_forked_child_leaves_the_worker_to_its_parent() -> None:
    # If the child ended the parent's threads and sockets, it would abort.
    cores = [_core.Worker(libzmq_path=find_libzmq(), shares_memory=True) for _ in range(2)]
    for core in cores:
        core.add_channel(
            name="c",
            sends=core is cores[0],
            peer="other",
            channel_id=3,
            tensors=[("float32", 1, 16)],
            num_items=2,
        )
        core.seal()
    cores[0].connect(cores[1].listen())
    assert all(core.wait_open(60) for core in cores)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            del core
            cores.clear()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    cores[0].send_item("c", [to_dlpack(torch.ones(4))])
    assert cores[1].receive_item("c") is not None
    for core in cores:
        core.close(1)


@pytest.mark.parametrize(
    ("device_type", "where"),
    [(2, "cuda:3"), (8, "a device of DLPack type 8"), (13, "a device of DLPack type 13")],
)
def test_a_tensor_on_another_device_is_refused_with_its_place(device_type: int, where: str) -> None:
    # Without the error the core would read the tensor as if it were in the worker's own memory.
    core = _core_with_channel()
    tensors = [to_dlpack(torch.zeros(4)), _capsule(torch.zeros(4), device_type, 3)]
    with pytest.raises(ValueError) as caught:
        core.send_item("out", tensors)
    assert str(caught.value) == (
        f"'out': tensor 1 is on {where}, but it is sent from cpu: move it there (.to(device)) in the layer"
        " that makes it"
    )


@pytest.mark.parametrize(
    ("tensor", "fault"),
    [
        (torch.zeros(4, 4).t(), "is not contiguous, and cannot cross a boundary"),
        (torch.zeros([1] * 9), "has 9 dimensions: at most 8 can cross a boundary"),
    ],
)
def test_what_cannot_cross_is_refused_with_its_place(tensor: Tensor, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"^'out': tensor 0 {fault}$"):
        _core_with_channel().send_item("out", [to_dlpack(tensor)])


def test_the_tensors_of_a_refused_item_are_given_back() -> None:
    kept = torch.zeros(4)
    storage = kept.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    with pytest.raises(ValueError, match="tensor 1"):
        _core_with_channel().send_item("out", [to_dlpack(kept), _capsule(kept, 8)])
    assert torch._C._storage_Use_Count(storage._cdata) == before


_BY_CAPSULES = _core.TensorExchange(object, to_dlpack, from_dlpack, exportable)


def test_tensors_cross_by_their_types_table_where_it_has_one() -> None:
    assert TENSORS.by_table == hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert not _BY_CAPSULES.by_table


def test_a_table_is_a_capsule_of_that_name() -> None:
    class Odd:
        __dlpack_c_exchange_api__ = 7

    with pytest.raises(ValueError, match="invalid PyCapsule"):
        _core.TensorExchange(Odd, to_dlpack, from_dlpack, exportable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.int64])
def test_a_fingerprint_is_the_same_by_table_and_by_capsules(dtype: torch.dtype) -> None:
    tensors = [torch.arange(24).reshape(2, 3, 4).to(dtype), torch.zeros(0, 3), torch.tensor(2.0)]
    mark = TENSORS.fingerprint(tensors)
    assert mark is not None
    assert mark == _BY_CAPSULES.fingerprint(tensors)


def test_a_fingerprint_tells_contents_dtypes_shapes_and_order_apart() -> None:
    zeros, ones = torch.zeros(4), torch.ones(4)
    values = [[zeros], [ones], [zeros.int()], [zeros.view(2, 2)], [zeros, ones], [ones, zeros], []]
    assert len({TENSORS.fingerprint(tensors) for tensors in values}) == len(values)


def test_what_is_not_one_piece_of_memory_has_no_fingerprint() -> None:
    assert TENSORS.fingerprint([torch.zeros(2, 3).t()]) is None
    assert TENSORS.fingerprint([torch.zeros(2, device="meta")]) is None


def test_an_empty_tensor_is_one_piece_of_memory_in_any_order_of_its_dimensions() -> None:
    # An empty tensor goes upstream in place of a gradient that does not exist, also for a tensor with
    # permuted strides.
    assert TENSORS.fingerprint([torch.zeros(0, 2, 3).transpose(1, 2)]) is not None
    assert TENSORS.fingerprint([torch.zeros(2, 0, 3).permute(2, 0, 1)]) is not None


def test_a_fingerprint_keeps_no_tensor() -> None:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    for exchange in (TENSORS, _BY_CAPSULES):
        exchange.fingerprint([tensor, tensor])
    assert torch._C._storage_Use_Count(storage._cdata) == before


def test_what_takes_other_arguments_says_so() -> None:
    with pytest.raises(TypeError, match=r"fingerprint\(\) takes 1 arguments, 2 were given"):
        TENSORS.fingerprint([], [])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="a list is wanted"):
        TENSORS.fingerprint(())  # type: ignore[arg-type]
