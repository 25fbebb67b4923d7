"""Tests labels of -100, which are ignored. With microbatches, a loss that is a mean over the other labels is
refused unless weight_fn is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pipedream
import pytest
import torch
import torch.nn.functional as F
from farm import Farm
from models import straight_plan
from pipedream import reference
from pipedream.planning.plan import Plan
from torch import Tensor, nn

_IGNORED = -100
_WIDTH, _VOCABULARY, _LENGTH = 8, 11, 6
_SGD = functools.partial(torch.optim.SGD, lr=0.1)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor


class CausalModel(nn.Module):
    """A causal language model that computes its own loss, with dropout."""

    def __init__(self, *, is_shifted: bool = True) -> None:
        super().__init__()
        self.is_shifted = is_shifted
        self.words = nn.Embedding(_VOCABULARY, _WIDTH)
        self.body = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x = self.words(input_ids)
        for layer in self.body:
            x = x + self.drop(torch.tanh(layer(x)))
        logits = self.head(x)
        if self.is_shifted:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(logits, loss)


def _labels(valid: list[int]) -> Tensor:
    """Returns a minibatch. `valid` has the number of valid labels of each sample. They are the last labels of
    the sample, as after a prompt.
    """
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(_VOCABULARY, (len(valid), _LENGTH), generator=generator)
    for sample, count in enumerate(valid):
        labels[sample, : _LENGTH - count] = _IGNORED
    return labels


def _batch(valid: list[int]) -> dict[str, Tensor]:
    labels = _labels(valid)
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def _model(*, is_shifted: bool = True) -> CausalModel:
    torch.manual_seed(1)
    return CausalModel(is_shifted=is_shifted)


_PLAN = Plan.straight(3, 2)


def _plan() -> Plan:
    return Plan(_PLAN.stages, cuts=("body.0", "body.1"))


def _train(data: list[Any], *, is_shifted: bool = True, **options: Any) -> list[float]:
    options = {"microbatches": 2, "schedule": "flush", "progress": False} | options
    model = _model(is_shifted=is_shifted)
    return list(pipedream.run(model, _plan(), data=data, optimizer=_SGD, **options).losses)


@pytest.mark.parametrize(
    ("is_shifted", "valid", "minibatch"),
    [
        (True, [[4, 2, 6, 5]], 0),
        # Refused at a later minibatch, which has a microbatch without valid labels.
        (True, [[6, 6, 6, 6], [6, 6, 0, 0]], 1),
        (True, [[3, 5]], 0),  # one sample in a microbatch
        (False, [[4, 2, 6, 5]], 0),
    ],
)
def test_a_language_models_own_mean_over_its_labels_is_refused(
    farm: Farm, is_shifted: bool, valid: list[list[int]], minibatch: int
) -> None:
    data = [_batch(counts) for counts in valid]
    first = "[:, 1:]" if is_shifted else ""
    wanted = f'give run weight_fn=lambda batch: (batch["labels"]{first} != -100).sum()'
    errors = [outcome.error for outcome in farm.run(_train, data, is_shifted=is_shifted, num_ranks=2)]
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert all(f"labels of minibatch {minibatch} hold -100" in str(e) and wanted in str(e) for e in errors)
    with pytest.raises(ValueError, match="hold -100"):
        reference.run(_model(is_shifted=is_shifted), _plan(), data=data, optimizer=_SGD, microbatches=2)


def test_labels_that_are_spread_evenly_and_weighted_ones_are_trained_on(farm: Farm) -> None:
    even = [_batch([4, 2, 2, 4])]
    assert len(farm.results(_train, even, num_ranks=2)[0]) == 1
    uneven = [_batch([4, 2, 6, 5])]
    assert len(farm.results(_train, uneven, weight_fn=_num_valid, num_ranks=2)[0]) == 1


def _num_valid(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != _IGNORED).sum()


def _token_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")


def over_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets)


def over_a_mask(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = (targets != _IGNORED).float()
    losses = F.cross_entropy(outputs.transpose(1, 2), targets.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum() + 0.5 * outputs.square().mean()


def over_all_positions(outputs: Tensor, targets: Tensor) -> Tensor:
    return _token_losses(outputs, targets).mean()


def of_means_of_samples(outputs: Tensor, targets: Tensor) -> Tensor:
    counts = (targets != _IGNORED).sum(1).clamp(min=1)
    return (_token_losses(outputs, targets).sum(1) / counts).mean()


def of_samples_with_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    counts = (targets != _IGNORED).sum(1)
    sums = _token_losses(outputs, targets).sum(1)
    return (sums[counts > 0] / counts[counts > 0]).mean()


def _train_list(loss_fn: Callable[[Any, Any], Tensor], valid: list[int]) -> list[float]:
    torch.manual_seed(1)
    layers = [nn.Embedding(_VOCABULARY, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _VOCABULARY)]
    targets = _labels(valid)
    result = pipedream.run(
        nn.Sequential(*layers),
        straight_plan(3, (1,)),
        data=[(targets.clamp(min=0), targets)],
        loss_fn=loss_fn,
        optimizer=_SGD,
        microbatches=2,
        schedule="flush",
        progress=False,
    )
    return list(result.losses)


@pytest.mark.parametrize("loss_fn", [over_labels, over_a_mask])
def test_a_loss_functions_mean_over_its_labels_is_refused(farm: Farm, loss_fn: Any) -> None:
    outcomes = farm.run(_train_list, loss_fn, [4, 2, 6, 5], num_ranks=2)
    wanted = "give run weight_fn=lambda targets: (targets != -100).sum()"
    assert all(wanted in str(outcome.error) for outcome in outcomes), outcomes


@pytest.mark.parametrize("loss_fn", [over_all_positions, of_means_of_samples, of_samples_with_labels])
@pytest.mark.parametrize("valid", [[4, 2, 6, 5], [4, 2]])
def test_losses_that_are_means_over_something_else_are_trained_on(
    farm: Farm, loss_fn: Any, valid: list[int]
) -> None:
    assert len(farm.results(_train_list, loss_fn, valid, num_ranks=2)[0]) == 1
