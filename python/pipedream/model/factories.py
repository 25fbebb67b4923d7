"""Calls and checks the user's functions `optimizer` and `lr_scheduler`, and tries them before any process
starts.

If such a function fails, the error names the argument and the stage, and has the user's own error as its
cause. Any thread.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pipedream.common.compiling import unmarked_until_compiling
from pipedream.common.errors import PipelineError, describe_error
from pipedream.model.seeding import generators_kept
from pipedream.optim.master_weights import unwrapped

__all__ = [
    "NamedParameters",
    "OptimizerFactory",
    "SchedulerFactory",
    "build_optimizer",
    "build_scheduler",
    "make_masters",
    "parameter_like",
    "try_factories",
    "with_delay",
]

NamedParameters = Sequence[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[..., torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


def make_masters(named: NamedParameters) -> list[nn.Parameter]:
    """Returns parameters for an optimizer. They share the memory and attributes of the named parameters."""
    return [parameter_like(parameter, parameter.data) for _, parameter in named]


def parameter_like(original: nn.Parameter, content: Tensor, *, requires_grad: bool = True) -> nn.Parameter:
    """Returns a parameter in the content's memory, with the original's class and attributes, because the
    user's factory may group parameters by these.
    """
    kind = type(original) if nn.Parameter in type(original).__mro__ else nn.Parameter
    made: nn.Parameter = torch.Tensor._make_subclass(kind, content, requires_grad)
    vars(made).update(vars(original))
    return made


def build_optimizer(
    factory: OptimizerFactory, names: Sequence[str], parameters: list[nn.Parameter], where: str
) -> torch.optim.Optimizer:
    """Calls the user's factory with the parameters, or with (name, parameter) pairs if its first argument is
    named_parameters.

    where: "stage 1", for errors. Raises ValueError or TypeError if the factory raises one of these, and
    PipelineError if it raises anything else. Refuses a result that cannot train.
    """
    given = (
        list(zip(names, parameters, strict=True))
        if _arguments(factory)[:1] == ["named_parameters"]
        else parameters
    )
    try:
        optimizer = factory(given)
    except Exception as error:
        _raise_named("optimizer", where, error)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer returned {type(optimizer).__name__}: it must return a torch.optim.Optimizer, as"
            " functools.partial(torch.optim.SGD, lr=0.1) does"
        )
    if isinstance(unwrapped(optimizer), torch.optim.LBFGS):
        raise ValueError(
            "optimizer is LBFGS, which computes the loss again and again in one step (a closure): a pipeline"
            " has one backward per update; use another, for example torch.optim.Adam"
        )
    masters = {id(parameter) for parameter in parameters}
    if any(id(p) not in masters for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "optimizer was made of other parameters than those it was called with: use its argument, as"
            " in lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    return optimizer


def with_delay(factory: OptimizerFactory, delay: float) -> OptimizerFactory:
    """Returns the factory with its argument `delay` bound to the stage's mean delay in updates. Returns the
    factory unchanged if it has no such argument or the argument is bound already.
    """
    is_bound = isinstance(factory, functools.partial) and "delay" in factory.keywords
    if is_bound or "delay" not in _arguments(factory):
        return factory
    return functools.partial(factory, delay=delay)


def build_scheduler(factory: SchedulerFactory, optimizer: torch.optim.Optimizer, where: str) -> Any:
    """Calls the user's factory with the optimizer; raises as build_optimizer does."""
    try:
        scheduler = factory(optimizer)
    except Exception as error:
        _raise_named("lr_scheduler", where, error)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "lr_scheduler is a ReduceLROnPlateau, which needs a metric that the stages do not have: use"
            " callbacks=[pipedream.callbacks.ReduceLROnPlateau(...)], or a scheduler that counts steps, as"
            " functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1000)"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"lr_scheduler returned {type(scheduler).__name__}: it must return a learning-rate scheduler, as"
            " functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1000) does"
        )
    return scheduler


def try_factories(
    stages: Sequence[NamedParameters],
    optimizer: OptimizerFactory,
    lr_scheduler: SchedulerFactory | None,
    device_type: str,
    delays: Sequence[float] | None = None,
) -> list[torch.optim.Optimizer]:
    """Calls both factories as each stage will call them, so that a mistake shows before the run starts.
    Returns the optimizers. Random number generators keep their states.

    stages: the parameters that each stage updates. device_type: the device where they will be. delays: the
    stages' mean delays in updates; None: 0.

    If the parameters are on another device now, a factory may fail for that reason only (fused=True). The
    error is then ignored: the stage's own call will raise it again.
    """
    all_made = []
    with generators_kept(), _compiler_left_out():
        for stage_index, (named, delay) in enumerate(zip(stages, delays or [0.0] * len(stages), strict=True)):
            if not named:
                continue
            try:
                made = build_optimizer(
                    with_delay(optimizer, delay),
                    [name for name, _ in named],
                    make_masters(named),
                    f"stage {stage_index}",
                )
                all_made.append(made)
                if lr_scheduler is not None:
                    build_scheduler(lr_scheduler, made, f"stage {stage_index}")
            except (ValueError, TypeError, PipelineError):
                if all(parameter.device.type == device_type for _, parameter in named):
                    raise
    return all_made


@contextlib.contextmanager
def _compiler_left_out() -> Iterator[None]:
    """A context in which torch's optimizers are made without importing the compiler. The import would take
    seconds in a process that trains nothing.
    """
    marked = torch.optim.Optimizer.add_param_group
    torch.optim.Optimizer.add_param_group = unmarked_until_compiling(marked)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.add_param_group = marked  # type: ignore[method-assign]


def _raise_named(argument: str, where: str, error: Exception) -> NoReturn:
    kind = next((kind for kind in (ValueError, TypeError) if isinstance(error, kind)), PipelineError)
    raise kind(f"{argument}(...) of {where} raised {describe_error(error)}") from error


def _arguments(factory: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # no signature to be had: a builtin
        return []
