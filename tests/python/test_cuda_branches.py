"""Tests the branches that ask torch.cuda, on a stand-in for its functions (tests/cuda_double.py). Without a
GPU no other test reaches these branches. Four parts are not tested: the native optimizers' launch, the
asynchronous server's stream, the meter of links, and residuals of codecs.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from cuda_double import CudaDouble, Event, Stream
from pipedream import _core
from pipedream.budget.copy_streams import make_copy_streams
from pipedream.budget.footprint import make_meter
from pipedream.budget.torch_pool import TorchPool
from pipedream.links.replica_group import _has_device_of_its_own
from pipedream.model.draws import DrawSites, KeyedDraws
from pipedream.model.seeding import RngState, RngStream, TorchState, seed_torch
from pipedream.profiling.timed_passes import make_clock
from pipedream.report.losses import make_loss_record
from pipedream.splitting.check_precision import fits_in_float64
from pipedream.stage.device_clock import make_device_clock
from pipedream.worker.devices import choose_device
from pipedream.worker.worker_links import WorkerLinks
from torch import nn

_GPU = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    monkeypatch.setattr("pipedream.model.seeding._HAS_CUDA", True)
    monkeypatch.setattr(_core, "why_no_cuda", lambda: "")
    monkeypatch.delenv("PIPEDREAM_DEVICE", raising=False)
    return CudaDouble(monkeypatch)


# ---- Copies beside the compute stream ----


def test_a_copy_out_comes_after_what_was_computed_and_the_next_computation_after_the_copy(
    cuda: CudaDouble,
) -> None:
    copies = make_copy_streams(_GPU)
    read_before = Event()
    read_before.done = {"home was read"}
    CudaDouble.compute.give("forward")
    out = copies.out(torch.ones(3), home := torch.zeros(3), read_before)
    stream, before = cuda.copies[0]
    assert before >= {"forward", "home was read"} and stream is not CudaDouble.compute
    assert ("copy", 0) not in CudaDouble.compute.done  # the compute stream does not wait for the copy
    copies.wait(out, None)
    assert ("copy", 0) in CudaDouble.compute.done and torch.equal(home, torch.ones(3))


def test_both_directions_have_a_stream_of_their_own_and_the_host_waits_for_both(cuda: CudaDouble) -> None:
    copies = make_copy_streams(_GPU)
    out = copies.out(torch.ones(1), torch.zeros(1))
    copies.into(torch.ones(1), torch.zeros(1), out)
    (out_stream, _), (into_stream, before_into) = cuda.copies
    assert out_stream is not into_stream and ("copy", 0) in before_into
    assert not CudaDouble.host
    copies.finish()
    assert CudaDouble.host >= {("copy", 0), ("copy", 1)}


def test_a_loss_is_read_when_its_copy_is_done_and_not_where_it_is_made(cuda: CudaDouble) -> None:
    told: list[tuple[int, float]] = []
    record = make_loss_record("stop", lambda i, loss, weight: told.append((i, loss)), _GPU)
    record.add(0, torch.tensor(2.5), 1.0)
    record.close(0)
    assert not told and not CudaDouble.host
    record.read_pending()
    assert told == [(0, 2.5)] and ("copy", 0) in CudaDouble.host
    assert CudaDouble.num_spins == 0


# ---- Clocks and memory ----


def test_a_minibatch_is_timed_by_events_and_the_host_waits_once_before_and_once_after(
    cuda: CudaDouble,
) -> None:
    clock = make_clock(_GPU)
    clock.start_minibatch()
    clock.start()
    clock.next()
    clock.stop()
    assert all(span >= 0 for span in clock.finish_minibatch())
    assert cuda.calls == [("synchronize", _GPU)] * 2


def test_the_device_clock_tells_when_the_device_was_done_with_an_item(cuda: CudaDouble) -> None:
    told: list[tuple[int, int]] = []
    clock = make_device_clock(_GPU, lambda began_ns, ended_ns: told.append((began_ns, ended_ns)))
    assert clock is not None and make_device_clock(torch.device("cpu"), lambda *_: None) is None
    for _ in range(2):
        clock.begin()
        clock.end()
        clock.complete()
    clock.finish()
    assert CudaDouble.num_spins == 0
    assert len(told) == 2 and told[0][0] <= told[0][1] <= told[1][0] <= told[1][1]


def test_memory_counts_from_what_was_allocated_before(cuda: CudaDouble) -> None:
    cuda.allocated_bytes = cuda.peak_bytes = 100
    meter = make_meter(_GPU)
    cuda.allocated_bytes, cuda.peak_bytes = 140, 190
    assert (meter.live_bytes, meter.peak_bytes) == (40, 90)
    meter.reset_peak()
    assert meter.peak_bytes == 40


@pytest.mark.parametrize(("free_bytes", "fits"), [(1 << 20, True), (8 * 1000, False)])
def test_the_check_is_in_float64_where_the_device_has_room(
    cuda: CudaDouble, free_bytes: int, fits: bool
) -> None:
    cuda.free_bytes = free_bytes
    assert fits_in_float64([("model", nn.Linear(32, 32))], _GPU) == fits


def test_tensors_of_torch_come_from_the_pool_inside_its_region_on_one_thread(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(
        _core, "open_segment_arena", lambda *arguments: bool(opened.append(arguments)) or True
    )
    slot = torch.zeros(4096, dtype=torch.uint8)
    pool = TorchPool(slot)
    assert opened == [(slot.data_ptr(), 4096, "host")]
    with pool.region():
        assert not torch.autograd.is_multithreading_enabled()
        assert cuda.calls[-1][0] == "use_mem_pool"
        assert cuda.calls[-1][1].allocator[1:] == ("pipedream_segment_allocate", "pipedream_segment_free")
    assert torch.autograd.is_multithreading_enabled()


# ---- Random numbers ----


def test_a_forward_that_is_done_again_draws_what_it_drew_on_the_device(cuda: CudaDouble) -> None:
    generator = cuda.generators[1]
    state = TorchState.capture()
    first = torch.rand(3, generator=generator)
    assert not state.equals(TorchState.capture())
    after = generator.get_state()
    with state.replayed():
        assert torch.equal(torch.rand(3, generator=generator), first)
    assert torch.equal(generator.get_state(), after)


def test_a_stream_of_random_numbers_has_the_devices_generators_too(cuda: CudaDouble) -> None:
    seed_torch(3)
    outside = RngState.capture()
    with (stream := RngStream(seed=7)):
        first = torch.rand(2, generator=cuda.generators[0])
    assert outside.equals(RngState.capture())
    with stream:
        second = torch.rand(2, generator=cuda.generators[0])
    assert not torch.equal(first, second)
    with RngStream(seed=7):
        assert torch.equal(torch.rand(4, generator=cuda.generators[0]), torch.cat([first, second]))


def test_a_forward_on_a_device_draws_by_its_minibatch_from_that_devices_generator(cuda: CudaDouble) -> None:
    draws = KeyedDraws(5, DrawSites(), [], _GPU)
    other = cuda.generators[0].get_state()
    drawn = []
    for minibatch in (0, 1, 0):
        draws.begin(minibatch, 0, None)
        drawn.append(torch.rand(2, generator=cuda.generators[1]))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    assert torch.equal(cuda.generators[0].get_state(), other)


# ---- Placement ----


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (2, 0)])
def test_a_process_takes_its_device_and_makes_the_context_first(
    cuda: CudaDouble, local_rank: int, index: int
) -> None:
    device = torch.device("cuda", index)
    assert choose_device(local_rank) == device
    assert cuda.calls == [("set_device", device), ("synchronize", device)]


def test_the_core_computes_on_torchs_current_stream(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class Core:
        def __init__(self, **options: Any) -> None:
            made.append(options)

    class Links:
        peer_timeout_s = 15.0

        def core_arguments(self) -> dict[str, Any]:
            return {}

    class Place:
        run_id, incarnation, local_rank = 1, 0, 0

    class Run:
        links, place, plan_hash = Links(), Place(), 5

    monkeypatch.setattr(_core, "Worker", Core)
    monkeypatch.setattr("pipedream.worker.worker_links.Pulse", lambda core, timeout: None)
    stream = Stream()
    with torch.cuda.stream(stream):  # type: ignore[arg-type]
        WorkerLinks(None).make_core(Run(), _GPU)  # type: ignore[arg-type]
    assert (made[0]["device"], made[0]["compute_stream"]) == ("cuda:1", stream.cuda_stream)
    assert made[0]["own_cpus"] == []


@pytest.mark.parametrize(("indices", "alone"), [((0, 1), True), ((0, 0), False)])
def test_replicas_have_devices_of_their_own_where_their_uuids_differ(
    cuda: CudaDouble, indices: tuple[int, int], alone: bool
) -> None:
    store = torch.distributed.HashStore()
    said: dict[int, bool] = {}

    def ask(replica: int) -> None:
        device = torch.device("cuda", indices[replica])
        said[replica] = _has_device_of_its_own(store, replica, 2, device)

    threads = [threading.Thread(target=ask, args=(replica,)) for replica in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {0: alone, 1: alone}
