"""Tests draws.py: a random draw in a forward depends only on its place in the model and on the microbatch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pipedream.model.draws import KeyedDraws, SeenDraws, keyed_draws
from pipedream.model.stage_module import StageModule
from pipedream.splitting.cut_model import cut_model
from pipedream.splitting.span import SpanStage
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_HOST = torch.device("cpu")


class _Uniform(nn.Module):
    """Notes what it draws."""

    def __init__(self, drawn: list[Tensor]) -> None:
        super().__init__()
        self._drawn = drawn

    def forward(self, x: Tensor) -> Tensor:
        number = torch.rand(())
        self._drawn.append(number)
        return torch.sin(x) * number


class _Model(nn.Module):
    """Draws random numbers in a module that is called twice, in a module that is called once, and between
    modules."""

    def __init__(self, drawn: list[Tensor], *, twice: bool = True) -> None:
        super().__init__()
        self.drawn, self.twice = drawn, twice
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.shared, self.own, self.late = _Uniform(drawn), _Uniform(drawn), _Uniform(drawn)
        self.calls_late = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(x))
        number = torch.rand(())
        self.drawn.append(number)
        x = self.own(x * number)
        if self.calls_late:
            x = self.late(x)
        out: Tensor = self.shared(x) if self.twice else x
        return torch.as_tensor(self.last(out))


def _traced(model: nn.Module, cuts: list[str]) -> tuple[list[SpanStage], KeyedDraws]:
    batch = torch.ones(3, 2)
    cut = cut_model(model, batch, batch, F.mse_loss).at(cuts)
    stages = [cut.stage(index, index, index) for index in range(len(cuts) + 1)]
    draws = keyed_draws(7, stages, [SeenDraws()] * len(stages), _HOST)
    assert draws is not None
    for stage in stages:
        stage.draws = draws
    return stages, draws


def _forward(stages: list[Any], draws: KeyedDraws, minibatch: int, microbatch: int = 0) -> None:
    value: Any = torch.ones(3, 2)
    with draws.installed():
        for stage in stages:
            torch.rand(5)  # stands for any draws before the microbatch
            draws.begin(minibatch, microbatch, stage)
            value = stage(value)


def test_each_call_draws_by_its_place_and_microbatch_alone() -> None:
    drawn: list[Tensor] = []
    stages, draws = _traced(_Model(drawn), [])
    drawn.clear()
    for at in ((0, 0), (0, 1), (1, 0), (0, 0)):
        _forward(stages, draws, *at)
    runs = [drawn[begin : begin + 4] for begin in range(0, 16, 4)]
    assert runs[0] == runs[3]
    assert len({float(number) for run in runs[:3] for number in run}) == 12


def test_stages_draw_what_the_uncut_forward_draws() -> None:
    whole: list[Tensor] = []
    stages, draws = _traced(_Model(whole), [])
    whole.clear()
    _forward(stages, draws, 4)
    drawn: list[Tensor] = []
    stages, draws = _traced(_Model(drawn), ["own"])
    drawn.clear()
    _forward(stages, draws, 4)
    # Both stages run the code between modules, and draw the same numbers there.
    assert drawn == [*whole[:3], whole[1], whole[3]]


def test_a_module_that_the_first_minibatch_did_not_call_changes_no_other_draw() -> None:
    drawn: list[Tensor] = []
    model = _Model(drawn)
    stages, draws = _traced(model, [])
    drawn.clear()
    _forward(stages, draws, 0)
    model.calls_late = True
    for _ in range(2):
        _forward(stages, draws, 0)
    late = drawn[7]
    assert late not in drawn[:4]
    assert drawn[4:] == [*drawn[:3], late, drawn[3]] * 2


class _Sometimes(nn.Linear):
    draws = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(()) if self.draws else x)


def test_a_call_before_a_cut_that_draws_in_a_later_minibatch_alone_moves_no_draw_behind_it() -> None:
    drawn: list[Tensor] = []
    model = _Model(drawn, twice=False)
    model.shared, model.own = _Sometimes(2, 2), _Sometimes(2, 2)
    stages, draws = _traced(model, ["own"])
    drawn.clear()
    _forward(stages, draws, 0)
    model.shared.draws = True
    _forward(stages, draws, 0)
    assert len(drawn) == 4 and len(set(map(float, drawn))) == 1


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for _ in range(2):
            out = checkpoint(self.inner, self.layer(out), use_reentrant=False)
        return out


def test_what_is_checkpointed_draws_the_same_again_in_the_backward_of_its_microbatch() -> None:
    drawn: list[Tensor] = []
    model = _Checkpointed(_Uniform(drawn))
    stages, draws = _traced(model, [])
    (stage,) = stages
    drawn.clear()
    with draws.installed():
        draws.begin(0, 0, stage)
        first = stage(torch.ones(3, 2))
        draws.begin(0, 1, stage)
        second = stage(torch.ones(3, 2))
        draws.go_back_to(0, 0)
        first.sum().backward()
        draws.go_back_to(0, 1)
        second.sum().backward()
    assert len(set(map(float, drawn[:4]))) == 4
    assert sorted(drawn[4:6]) == sorted(drawn[:2])
    assert sorted(drawn[6:]) == sorted(drawn[2:4])


def test_nothing_is_keyed_where_nothing_is_drawn() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    layers = [(name, f"{name}.", layer) for name, layer in model.named_children()]
    assert keyed_draws(7, [StageModule(0, 0, layers)], [SeenDraws()], _HOST) is None
    model.train()
    assert keyed_draws(7, [StageModule(0, 0, layers)], [SeenDraws()], _HOST) is not None
    assert keyed_draws(7, [StageModule(0, 0, layers[:1])], [SeenDraws()], _HOST) is None
