"""Tests that bfloat16 parameters with float32 masters train exactly like the same recipe in a plain loop."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from oracle import assert_equals_reference, assert_memory_as_predicted
from pipedream.budget.memory import GRADIENTS, MASTERS, OPTIMIZER_STATE, WEIGHT_VERSIONS
from pipedream.worker.cautions import warn_if_coarse
from training import (
    OPTIMIZERS,
    Training,
    assert_close_losses,
    assert_equal_state,
    train_by_reference,
    train_in_pipeline,
    train_plainly,
)

_SGD = functools.partial(pipedream.optim.SGD, lr=0.05, momentum=0.9)
_ADAMW = functools.partial(pipedream.optim.AdamW, lr=0.01)
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "native sgd": _SGD,
    "native adam": functools.partial(pipedream.optim.Adam, lr=0.01, amsgrad=True),
    "native adamw": _ADAMW,
    "native nadamw": functools.partial(pipedream.optim.NAdamW, lr=0.01),
    "torch's, with masters": functools.partial(pipedream.optim.MasterWeights, torch.optim.AdamW, lr=0.01),
    "torch's, without": OPTIMIZERS["sgd"],
}
_SAME_BITS = 1e-30
_ROUNDING = 2e-2  # allows for bfloat16 gradients that are added in another order


def _training(case_name: str = "transformer", num_stages: int = 2, **how: Any) -> Training:
    given = {"optimizer": _ADAMW, "schedule": "flush", "short_last": False} | how
    return Training(case_name, num_stages, torch.bfloat16, **given)


@pytest.mark.parametrize(
    ("case_name", "optimizer"),
    [
        *(("mlp", optimizer) for optimizer in _OPTIMIZERS),
        ("transformer", "native adamw"),
        ("transformer", "torch's, with masters"),
        ("frozen", "native sgd"),
    ],
)
def test_a_flushing_run_is_the_plain_loop_to_the_last_bit(farm: Farm, case_name: str, optimizer: str) -> None:
    training = _training(case_name, 3, microbatches=2, optimizer=_OPTIMIZERS[optimizer])
    result, state = farm.results(train_in_pipeline, training, num_ranks=3)[0]
    losses, expected = train_plainly(training)
    assert_close_losses(result.losses, losses, _SAME_BITS)
    assert_equal_state(state, expected)
    assert_memory_as_predicted(result)


@pytest.mark.parametrize(
    ("case_name", "optimizer", "how"),
    [
        ("transformer", "native adamw", {"schedule": "pipedream"}),
        ("cnn", "torch's, with masters", {"schedule": "pipedream"}),
        ("tied_apart", "native sgd", {"schedule": "vertical_sync"}),
        ("lstm", "native nadamw", {"schedule": "2bw", "microbatches": 4, "recompute": True}),
        ("dropout", "native adam", {"schedule": "pipedream", "microbatches": 2}),
        ("mlp", "torch's, without", {"schedule": "unstashed", "microbatches": 2}),
    ],
)
def test_every_version_is_the_oracles_to_the_last_bit(
    farm: Farm, case_name: str, optimizer: str, how: dict[str, Any]
) -> None:
    assert_equals_reference(
        farm, _training(case_name, 3, optimizer=_OPTIMIZERS[optimizer], **how), relative=_SAME_BITS
    )


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        ("native adamw", {"replicas": (2, 1), "schedule": "pipedream"}),
        ("native sgd", {"replicas": (1, 2), "spares": (0, 1), "microbatches": 2}),
        ("torch's, with masters", {"replicas": (2, 2), "microbatches": 2}),
        ("native sgd", {"replicas": (2, 1), "sync": "allreduce", "schedule": "pipedream"}),
        ("native sgd", {"max_grad_norm": 0.3, "microbatches": 2}),
        ("native adamw", {"case_name": "tied_apart", "replicas": (1, 2), "microbatches": 2}),
    ],
)
def test_replicas_and_clipping_are_the_oracles_to_bfloat16s_rounding(
    farm: Farm, optimizer: str, how: dict[str, Any]
) -> None:
    training = _training(optimizer=_OPTIMIZERS[optimizer], num_minibatches=8, **how)
    assert_equals_reference(farm, training, relative=_ROUNDING)


def test_replicas_push_gradients_and_pull_versions_of_two_bytes_a_parameter(farm: Farm) -> None:
    how: dict[str, Any] = {"replicas": (2, 1), "schedule": "pipedream", "num_minibatches": 4}
    narrow = farm.results(train_in_pipeline, _training("connected", 2, **how), num_ranks=3)[0][0]
    wide = Training("connected", 2, torch.float32, optimizer=_ADAMW, short_last=False, **how)
    of_float32 = farm.results(train_in_pipeline, wide, num_ranks=3)[0][0]
    ratio = narrow.bytes_synced / of_float32.bytes_synced
    assert 0.5 <= ratio < 0.51  # the gaps between tensors do not become smaller


def test_masters_and_moments_are_float32_in_the_pool(farm: Farm) -> None:
    training = _training("mlp", 2)
    memory = farm.results(train_in_pipeline, training, num_ranks=2)[0][0].memory
    trained = sum(p.numel() for p in training.model().parameters())

    def planned(term: str) -> int:
        return sum(
            figures["predicted"] or 0
            for of_worker in memory
            for name, figures in of_worker.items()
            if name.startswith(term)
        )

    padding = 64 * 2 * len(list(training.model().parameters()))
    for term, bytes_each in ((WEIGHT_VERSIONS, 2), (GRADIENTS, 2), (MASTERS, 4), (OPTIMIZER_STATE, 8)):
        assert 0 <= planned(term) - bytes_each * trained <= padding, term


@pytest.mark.parametrize(
    ("replicas", "how", "codec", "relative"),
    [
        ((1, 1), {}, {"activations": "int8", "gradients": "topk:0.5"}, 0.1),
        ((2, 1), {}, {"pushes": "bf16"}, _ROUNDING),  # this codec leaves bfloat16 as it is
        ((2, 1), {}, {"pushes": "factors"}, _ROUNDING),
        # With asp every minibatch's gradient makes an update. The oracle here makes an update from the mean
        # of two minibatches' gradients.
        ((2, 1), {"sync": "asp", "schedule": "pipedream"}, None, 0.5),
    ],
    ids=str,
)
def test_codecs_and_asp_train_bfloat16(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any], codec: Any, relative: float
) -> None:
    training = _training("connected", optimizer=_SGD, replicas=replicas, num_minibatches=6, **how)
    result, _ = farm.results(train_in_pipeline, training, num_ranks=training.num_workers, codec=codec)[0]
    losses = result.losses
    exact, _ = train_by_reference(
        _training("connected", optimizer=_SGD, replicas=replicas, num_minibatches=6)
    )
    assert_close_losses(losses, exact.losses, relative)
    assert_memory_as_predicted(result)


def test_sync_every_is_refused_with_masters_and_trains_without(farm: Farm) -> None:
    training = _training(replicas=(2, 1), schedule="pipedream", sync_every=2)
    errors = [outcome.error for outcome in farm.run(train_in_pipeline, training, num_ranks=3)]
    assert any("sync_every is 2, and stage 0 has bfloat16 parameters" in str(error) for error in errors)
    assert_equals_reference(farm, replace(training, optimizer=OPTIMIZERS["sgd"]), relative=_ROUNDING)


def test_an_optimizer_that_steps_in_bfloat16_is_told_of() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    with pytest.warns(UserWarning, match=r"use pipedream\.optim\.AdamW or .*MasterWeights, AdamW"):
        warn_if_coarse([torch.optim.AdamW(parameters)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_coarse([_ADAMW(parameters), pipedream.optim.MasterWeights(torch.optim.SGD, parameters)])
        warn_if_coarse([torch.optim.AdamW([parameters[0].float().detach().requires_grad_()])])
