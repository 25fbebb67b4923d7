"""Tests mistakes that run() refuses. Each error is one line that names the value and the remedy, and is the
same at every rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from mishaps import SGD, Layer, error_of, minibatches, model_with, run
from pipedream import DataMismatch, NonFiniteLoss, PeerLost, PipelineError, Plan, RunResult, Stage
from pipedream.launch import runner
from pipedream.worker import agreed_run
from refusals import assert_says, refused

_MODEL = model_with(None, stages=2)
_PLAN = Plan.straight(2, 2)


# Before any process starts.


def test_plans_that_do_not_fit_the_model() -> None:
    refused(lambda: run(_MODEL, plan=Plan.straight(5, 2)), ValueError, "covers 5 layers", "has 2", "profile")
    refused(
        lambda: run(_MODEL, plan=Plan.straight(3, 3)), ValueError, "3 stages", "2 layers", "at most 2 workers"
    )
    refused(lambda: run(_MODEL, plan={"stages": []}), TypeError, "plan is a dict", "Plan.load")


def test_what_replicas_cannot_have_and_what_only_they_have() -> None:
    plan = Plan((Stage(0, 0, 2), Stage(1, 1, 1)))
    asynchronous: dict[str, Any] = {"plan": plan, "sync": "asp"}
    for how, said in (
        ({"schedule": "flush"}, "schedule is 'flush'"),
        ({"schedule": "naive"}, "schedule is 'unstashed'"),  # "naive" is an alias of "unstashed"
        ({"max_grad_norm": 1.0}, "max_grad_norm is 1.0"),
        ({"autocast": "float16"}, "autocast is 'float16'"),
        ({"sync_every": 2}, "sync_every is 2"),
        ({"codec": {"pushes": "factors"}}, "which pushes factors"),
    ):
        refused(
            lambda how=how: run(_MODEL, **asynchronous, **how),
            ValueError,
            "sync is 'asp'",
            said,
            "sync='bsp'",
        )
    refused(lambda: run(_MODEL, **asynchronous, staleness=1), ValueError, "staleness is 1", "'asp'", "'ssp'")
    refused(lambda: run(_MODEL, plan=plan, sync="none"), ValueError, "sync is 'none'", "bsp")
    refused(lambda: run(_MODEL, plan=plan, sync_every=0), ValueError, "sync_every is 0")
    refused(lambda: run(_MODEL, plan=plan, sync_every=2, sync="ssp"), ValueError, "sync_every is 2", "'ssp'")
    refused(
        lambda: run(_MODEL, plan=plan, sync_every=2, max_grad_norm=1.0),
        ValueError,
        "sync_every is 2",
        "no common gradient",
    )
    refused(lambda: run(_MODEL, plan=plan, staleness=1), ValueError, "staleness is 1", "sync='ssp'")
    reduced: dict[str, Any] = {"plan": plan, "sync": "allreduce"}
    refused(lambda: run(_MODEL, **reduced, staleness=1), ValueError, "'allreduce'", "'ssp'")
    words = ("sync is 'allreduce'", "ports are given", "sync='bsp'")
    refused(lambda: run(_MODEL, **reduced, ports="29600-29620"), ValueError, *words)
    refused(lambda: run(_MODEL, **reduced, codec={"pushes": "bf16"}), ValueError, "pushes nothing")
    for how in ({"max_grad_norm": 1.0, "schedule": "flush"}, {"autocast": "float16"}):
        refused(
            lambda how=how: run(_MODEL, **reduced, **how),
            ValueError,
            "tell other stages nothing",
            "sync='bsp'",
        )
    refused(lambda: run(_MODEL, plan=plan, sync="ssp", staleness=-1), ValueError, "staleness is -1")
    shared = model_with(None, stages=2)
    for layer in shared:
        layer.register_parameter("tied", shared[0].weight)
    refused(lambda: run(shared, plan=plan, sync_every=2), ValueError, "sync_every is 2", "share a parameter")
    refused(lambda: run(shared, plan=plan, sync="asp"), ValueError, "sync is 'asp'", "share a parameter")


def test_models_that_cannot_be_cut_as_planned() -> None:
    wrong: Any = "model"
    shared = model_with(None, stages=2)
    for layer in shared:
        layer.register_buffer("count", torch.zeros(1))
    shared[1].count = shared[0].count
    refused(lambda: run(shared), ValueError, "'0.count'", "'1.count'", "one stage")
    half = model_with(None, stages=2)
    half[1].half()
    refused(lambda: run(half), ValueError, "'1.weight'", "float16", "model.float()")
    refused(lambda: pipedream.run(wrong, _PLAN, data=[], loss_fn=error_of, optimizer=SGD), TypeError, "str")


class _Closed:
    def __reduce__(self) -> Any:
        raise TypeError("it holds an open file")


def test_what_cannot_be_sent_to_the_workers() -> None:
    # Workers can get a local function that holds plain values only. This one holds a list, of which a worker
    # would fill a copy.
    kept: list[Any] = []
    local: Any = model_with(None, stages=2)
    local[1].callback = lambda: kept.append(1)
    refused(lambda: run(local), ValueError, "model (Sequential)", "top level of a module")
    held: Any = model_with(None, stages=2)
    held[1].file = _Closed()
    refused(lambda: run(held), ValueError, "model", "it holds an open file")
    refused(
        lambda: run(_MODEL, loss_fn=lambda outputs, targets: kept.append(targets) or outputs.sum()),
        ValueError,
        "loss_fn",
        "<lambda>",
        "top level of a module",
    )
    refused(
        lambda: run(_MODEL, optimizer=lambda parameters: kept.append(torch.optim.SGD(parameters)) or kept[0]),
        ValueError,
        "optimizer",
        "<lambda>",
        "top level of a module",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recovery", "of lost workers"),
    ],
)
def test_arguments_of_features_that_are_not_built(name: str, value: Any) -> None:
    refused(lambda: run(_MODEL, **{name: value}), ValueError, f"{name} is {value!r}", "not built yet")


@pytest.mark.parametrize(
    ("name", "value", "kind", "remedy"),
    [
        ("schedule", "1f1b", ValueError, "use one of 'pipedream'"),
        ("microbatches", 0, ValueError, "at least 1"),
        ("microbatches", 2.0, ValueError, "whole number"),
        ("microbatches", True, ValueError, "whole number"),
        ("max_grad_norm", 0, ValueError, "above 0"),
        ("max_grad_norm", -1.0, ValueError, "above 0"),
        ("max_grad_norm", float("nan"), ValueError, "above 0"),
        ("max_grad_norm", float("inf"), ValueError, "or None"),
        ("max_grad_norm", "1", ValueError, "give a number"),
        ("autocast", "float8", ValueError, "use 'bfloat16', 'float16' or None"),
        ("autocast", True, ValueError, "use 'bfloat16', 'float16' or None"),
        ("recompute", "all", ValueError, "a list of stages such as [0, 1]"),
        ("recompute", 1, ValueError, "a list of stages such as [0, 1]"),
        ("lr_scheduler", 0.1, TypeError, "give a function"),
        ("transport", "udp", ValueError, "use one of 'auto'"),
        ("on_nonfinite", "ignore", ValueError, "'continue'"),
        ("gather", "rank1", ValueError, "'rank0'"),
        ("epochs", 0, ValueError, "at least 1"),
        ("epochs", 1.5, ValueError, "whole number"),
        ("epochs", True, ValueError, "whole number"),
        ("peer_timeout", 0, ValueError, "more than 0"),
        ("peer_timeout", float("nan"), ValueError, "more than 0"),
        ("peer_timeout", float("inf"), ValueError, "seconds"),
        ("peer_timeout", "soon", ValueError, "seconds"),
        ("seed", "one", TypeError, "give an int"),
        ("loss_fn", 3, TypeError, "give a function"),
        ("optimizer", 0.1, TypeError, "give a function"),
        ("data", 3, TypeError, "yields (inputs, targets)"),
    ],
)
def test_arguments_out_of_range(name: str, value: Any, kind: type[Exception], remedy: str) -> None:
    refused(lambda: run(_MODEL, **{name: value}), kind, f"{name} is ", remedy)


@pytest.mark.parametrize("stages", [[2], [0, -1], ["0"], [True], [0.0]], ids=str)
def test_a_recompute_of_stages_that_are_not_there(stages: Any) -> None:
    refused(
        lambda: run(_MODEL, recompute=stages), ValueError, f"recompute names stage {stages[-1]!r}", "0 to 1"
    )


@pytest.mark.parametrize("memory", ["8 apples", "-1GiB", -5, float("nan"), [], True], ids=str)
def test_a_memory_that_is_no_size(memory: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        run(_MODEL, memory=memory)
    assert "\n" not in str(caught.value)
    assert repr(memory) in str(caught.value)


def test_an_unknown_schedule() -> None:
    refused(
        lambda: run(_MODEL, schedule="zero_bubble"),
        ValueError,
        "is 'zero_bubble': use one of 'pipedream'",
    )


def test_2bw_with_fewer_microbatches_than_are_in_flight() -> None:
    model = model_with(None, stages=3)
    refused(lambda: run(model, schedule="2bw"), ValueError, "microbatches is 1", "in_flight 3", "2bw")


def test_plans_with_several_stages_at_a_worker_and_schedules_that_cannot_run_them() -> None:
    model = model_with(None, stages=4)
    chunks = Plan.straight(4, 4, num_workers=2)
    for schedule in ("pipedream", "flush", "model_parallel"):
        refused(
            lambda: run(model, plan=chunks, schedule=schedule),  # noqa: B023
            ValueError,
            "stage 2",
            "only schedule",
            "interleaved",
        )
    uneven = Plan(tuple(Stage(i, i, worker=i % 2) for i in range(3)))
    refused(
        lambda: run(model_with(None), plan=uneven, schedule="interleaved"),
        ValueError,
        "3 stages over 2 workers",
        "as many stages at every worker",
    )
    alone = Plan(tuple(Stage(i, i, worker=0) for i in range(2)))
    refused(
        lambda: run(_MODEL, plan=alone, schedule="interleaved"),
        ValueError,
        "one worker",
        "at least 2 workers",
    )


def test_a_trace_file_of_another_kind() -> None:
    refused(lambda: run(_MODEL, trace="trace.txt"), ValueError, "trace file is 'trace.txt'", ".json.gz")


def test_a_trace_file_that_could_not_be_written_after_the_training(tmp_path: Path) -> None:
    gone = tmp_path / "gone" / "t.json"
    refused(
        lambda: run(_MODEL, trace=gone), ValueError, f"trace is '{gone}': there is no folder {gone.parent}"
    )
    folder = tmp_path / "folder.json"
    folder.mkdir()
    refused(lambda: run(_MODEL, trace=folder), ValueError, "trace is ", "is a folder, give a file")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PIPEDREAM_DEVICE", "gpu"), ("PIPEDREAM_OFFLOAD", "all"), ("PIPEDREAM_CHECKSUMS", "y")],
)
def test_a_variable_of_the_workers_that_is_mistaken(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(runner, "run_locally", None)  # fails if run() starts a process before it refuses
    refused(lambda: run(_MODEL), ValueError, variable, repr(value))


def test_a_result_outlives_a_trace_that_cannot_be_saved_after_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    result = SimpleNamespace(save_trace=full, losses=[], epoch_sizes=[], validation=[])
    monkeypatch.setattr(runner, "run_locally", lambda *_: result)
    returned: Any = run(_MODEL, trace=tmp_path / "t.json")
    assert returned is result
    assert "the trace was not saved: [Errno 28] No space left on device" in caplog.text


def test_data_that_can_be_read_once_for_several_epochs() -> None:
    refused(lambda: run(_MODEL, data=iter(minibatches()), epochs=2), ValueError, "read once", "epochs is 2")


def test_forwarded_data_that_are_empty_or_no_pairs() -> None:
    refused(lambda: run(_MODEL, data=iter(())), ValueError, "no minibatch")
    refused(lambda: run(_MODEL, data=iter([torch.ones(2)])), TypeError, "Tensor", "pairs")


# By the ranks.


def _refused_by_ranks(
    farm: Farm, kind: type[Exception], *words: str, num_ranks: int = 2, **options: Any
) -> None:
    """Asserts that every rank raises exactly this kind of error, in one line with these words."""
    options = {"model": _MODEL} | options
    for outcome in farm.run(run, num_ranks=num_ranks, **options):
        assert_says(outcome.error, kind, *words)


def test_fewer_ranks_than_the_plan_needs(farm: Farm) -> None:
    model = model_with(None, stages=3)
    words = ("needs 3 workers", "only 2 ranks", "--nproc-per-node 3")
    _refused_by_ranks(farm, ValueError, *words, model=model)


def test_plans_that_do_not_fit_are_refused_at_every_rank(farm: Farm) -> None:
    _refused_by_ranks(farm, ValueError, "covers 5 layers", "has 2", plan=Plan.straight(5, 2))


def test_data_that_are_empty_or_no_pairs(farm: Farm) -> None:
    _refused_by_ranks(farm, ValueError, "yielded nothing in epoch 0", data=[])
    _refused_by_ranks(
        farm, TypeError, "minibatch 0", "Tensor", "pairs (inputs, targets)", data=[torch.ones(2)]
    )


class _Unlisted:
    """Minibatches in no list, so that run() cannot look at all of them before the training."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _with_minibatch_4(inputs: torch.Tensor) -> _Unlisted:
    batches = minibatches()
    batches[4] = (inputs, batches[4][1])
    return _Unlisted(batches)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.ones(4, 3, 1).double(), ("(4, 3, 1) of rank 3, planned (4, 3) of rank 2", "one rank")),
        (torch.ones(4, 3).float(), ("is float32, planned float64", "one dtype")),
        ((torch.ones(4, 3).double(),), ("is a tuple, planned a tensor", "first minibatch")),
    ],
    ids=["rank", "dtype", "structure"],
)
def test_a_minibatch_that_is_not_as_planned(farm: Farm, inputs: Any, words: tuple[str, ...]) -> None:
    where = "stage 0, minibatch 4: "
    _refused_by_ranks(farm, ValueError, where, *words, data=_with_minibatch_4(inputs))


class Reshaping(Layer):
    """Returns an output of another dtype, shape or structure at minibatch 4."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def forward(self, value: torch.Tensor) -> Any:
        output = super().forward(value)
        if int(value.flatten()[0]) != 4:
            return output
        if self._kind == "dtype":
            return output.float()
        if self._kind == "rank":
            return output.unsqueeze(0)
        if self._kind == "larger":
            return torch.cat([output, output])
        return [output]


@pytest.mark.parametrize("kind", ["dtype", "rank", "larger", "structure"])
def test_a_stage_whose_output_changes(farm: Farm, kind: str) -> None:
    model = torch.nn.Sequential(Layer(), Reshaping(kind), Layer())
    _refused_by_ranks(farm, ValueError, "stage 1, minibatch 4: ", "planned", model=model, num_ranks=3)


def _loss_not_finite_at_4(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = error_of(outputs, targets)
    return loss + float("inf") if int(outputs.flatten()[0]) == 4 else loss


def test_a_loss_that_is_not_finite_stops_the_run(farm: Farm) -> None:
    words = ("minibatch 4 is inf", "learning rate", 'on_nonfinite="continue"')
    _refused_by_ranks(farm, NonFiniteLoss, *words, loss_fn=_loss_not_finite_at_4)


def test_the_error_has_the_losses_so_far_at_the_rank_of_the_last_stage(farm: Farm) -> None:
    first, last = farm.run(run, _MODEL, loss_fn=_loss_not_finite_at_4, num_ranks=2)
    assert last.error.losses == [float(i * i) for i in range(4)]  # type: ignore[union-attr]
    assert first.error.losses == []  # type: ignore[union-attr]


def test_a_loss_that_is_not_finite_is_trained_on_when_asked_to(farm: Farm) -> None:
    results = farm.results(run, _MODEL, loss_fn=_loss_not_finite_at_4, on_nonfinite="continue", num_ranks=2)
    assert results[0].losses == [float("inf") if i == 4 else float(i * i) for i in range(12)]


def _no_scalar(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs - targets


def _no_tensor(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return 1.0


def test_a_loss_that_is_no_scalar(farm: Farm) -> None:
    _refused_by_ranks(farm, PipelineError, "minibatch 0", "(4, 3)", "return a scalar", loss_fn=_no_scalar)
    _refused_by_ranks(farm, PipelineError, "minibatch 0", "returned a float", loss_fn=_no_tensor)


def _no_optimizer(parameters: Any) -> str:
    return "sgd"


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


def test_an_optimizer_that_is_none_or_needs_a_closure(farm: Farm) -> None:
    _refused_by_ranks(
        farm, TypeError, "optimizer returned str", "torch.optim.Optimizer", optimizer=_no_optimizer
    )
    _refused_by_ranks(farm, ValueError, "optimizer is LBFGS", "closure", "use another", optimizer=_lbfgs)


def _plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def _no_scheduler(optimizer: torch.optim.Optimizer) -> float:
    return 0.1


def test_a_scheduler_that_is_none_or_needs_a_metric(farm: Farm) -> None:
    _refused_by_ranks(farm, ValueError, "callbacks.ReduceLROnPlateau", "counts steps", lr_scheduler=_plateau)
    _refused_by_ranks(farm, TypeError, "lr_scheduler returned float", lr_scheduler=_no_scheduler)


def test_fewer_samples_than_microbatches(farm: Farm) -> None:
    words = ("minibatches of 4 samples", "microbatches=5", "use fewer microbatches")
    _refused_by_ranks(farm, ValueError, *words, microbatches=5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_inputs_and_targets_of_different_numbers_of_microbatches(farm: Farm, num_ranks: int) -> None:
    data = [(inputs.repeat(2, 1), targets.repeat(2, 1)[:5]) for inputs, targets in minibatches()]
    words = ("minibatch 0", "inputs that make 4", "targets that make 3", "one entry per sample")
    _refused_by_ranks(
        farm,
        ValueError,
        *words,
        model=model_with(None, stages=num_ranks),
        num_ranks=num_ranks,
        microbatches=4,
        data=data,
        loss_fn=_sum_of_outputs,
    )


def _sum_of_outputs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def _run_with_its_own(name: str, of_rank: list[Any]) -> RunResult:
    return run(_MODEL, **{name: of_rank[int(os.environ["RANK"])]})


@pytest.mark.parametrize(
    ("name", "of_rank"),
    [
        ("schedule", ["pipedream", "flush"]),
        ("microbatches", [1, 2]),
        ("autocast", [None, "bfloat16"]),
        ("max_grad_norm", [1.0, 2.0]),
        ("epochs", [1, 2]),
        ("gather", ["rank0", "all"]),
        ("gather", ["none", "rank0"]),
        ("on_nonfinite", ["stop", "continue"]),
        ("recompute", [None, True]),
        ("memory", [None, "1GiB"]),
        ("seed", [0, None]),
    ],
)
def test_ranks_with_different_arguments(farm: Farm, name: str, of_rank: list[Any]) -> None:
    for outcome in farm.run(_run_with_its_own, name, of_rank, num_ranks=2):
        assert_says(outcome.error, ValueError, f"{name} is ", "at rank 1", "at rank 0", "the same arguments")


def _run_in_a_folder_of_its_own(folders: Path) -> RunResult:
    before = Path.cwd()
    os.chdir(folders / os.environ["RANK"])
    try:
        return run(_MODEL, checkpoints="/proc/self/cwd/C")
    finally:
        os.chdir(before)


def test_a_folder_for_checkpoints_that_ranks_do_not_share(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The error must come at once. In such folders no checkpoint would ever be complete.
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for outcome in farm.run(_run_in_a_folder_of_its_own, tmp_path, num_ranks=2):
        assert_says(outcome.error, ValueError, "checkpoints: /proc/self/cwd/C of stage 1 (rank 1) is not the")
    assert [list((tmp_path / f"{rank}/C").iterdir()) for rank in range(2)] == [[], []]


def test_a_folder_for_checkpoints_that_cannot_be_written() -> None:
    # The error must come at once. Otherwise the run would train to its end, with a warning at each
    # checkpoint.
    refused(lambda: run(_MODEL, checkpoints="/proc/self"), ValueError, "checkpoints: /proc/self cannot be")
    refused(
        lambda: run(_MODEL, checkpoints="/proc/self/C"), ValueError, "checkpoints: /proc/self/C cannot be"
    )


# ---- Data that two workers read differently ----


class Diverging:
    """Minibatches. The first `at` are the same in all processes, and later ones differ. If ends_at_rank names
    a rank, later ones do not differ, but that rank has none.
    """

    def __init__(self, at: int, *, ends_at_rank: str = "") -> None:
        self._at = at
        self._ends_at_rank = ends_at_rank

    def __iter__(self) -> Iterator[Any]:
        for i, (inputs, targets) in enumerate(minibatches()):
            if i < self._at:
                yield inputs, targets
            elif not self._ends_at_rank:
                yield inputs, targets + os.getpid()
            elif self._ends_at_rank == os.environ["RANK"]:
                return
            else:
                yield inputs, targets


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("ends_at_rank", ["", "0", "1"], ids=["differ", "shorter first", "shorter last"])
def test_workers_that_read_different_data_train_on_none_of_it(farm: Farm, at: int, ends_at_rank: str) -> None:
    if at == 0 and ends_at_rank:
        at = 1  # an empty epoch has another error
    outcomes = farm.run(run, _MODEL, data=Diverging(at, ends_at_rank=ends_at_rank), num_ranks=2)
    words = (f"minibatch {at} is not the same data", "stage 0 (rank 0)", "stage 1 (rank 1)", "seeded")
    for outcome in outcomes:
        assert_says(outcome.error, DataMismatch, *words)
    # The error has the losses that the last stage trained on. Its rehearsal runs on other data, which it has
    # read itself, and changes none of these losses.
    assert outcomes[1].error.losses == [float(i * i) for i in range(at)]  # type: ignore[union-attr]


class OwnPart:
    """The rank's own part of the minibatches, as in a script for DistributedDataParallel."""

    def __iter__(self) -> Iterator[Any]:
        yield from minibatches()[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]


@pytest.mark.parametrize("plan", [Plan((Stage(0, 1, 2),)), Plan((Stage(0, 0, 2), Stage(1, 1, 1)))])
def test_replicas_that_read_a_part_each_train_on_none_of_it(farm: Farm, plan: Plan) -> None:
    # Without the check each replica would train on its minibatches of its own part, and leave out the others.
    for outcome in farm.run(run, _MODEL, plan=plan, data=OwnPart(), num_ranks=plan.workers_used):
        assert_says(outcome.error, DataMismatch, "minibatch 0 is not", "rank 0", "DistributedSampler")
        assert outcome.error.losses == []  # type: ignore[union-attr]


def test_data_that_a_middle_rank_need_not_read_may_differ_there(farm: Farm) -> None:
    # Only the first stage reads inputs, and only the last stage reads targets.
    results = farm.results(run, model_with(None), data=OnlyOutside(), num_ranks=3)
    assert results[0].losses == [float(i * i) for i in range(12)]


class OnlyOutside:
    def __iter__(self) -> Iterator[Any]:
        if os.environ["RANK"] == "1":
            raise OSError("this rank has no data set")
        yield from minibatches()


def test_a_rank_that_never_comes_is_named(farm: Farm) -> None:
    outcomes = farm.run(_run_with_short_start, num_ranks=2)
    assert_says(outcomes[0].error, PeerLost, "rank 1")
    assert outcomes[1].value is None and outcomes[1].error is None


def _run_with_short_start() -> None:
    if os.environ["RANK"] == "1":
        return
    patience_s, agreed_run.START_TIMEOUT_S = agreed_run.START_TIMEOUT_S, 0.5
    try:
        run(_MODEL)
    finally:
        agreed_run.START_TIMEOUT_S = patience_s
