"""Defines the forms that a minibatch may have, and calls a model and a loss with each form.

    (inputs, targets)      model(inputs), loss_fn(outputs, targets). If the model's forward takes several
                           arguments, a tuple or list of inputs is its positional arguments, and a dict is its
                           arguments by name.
    a dict or dataclass    model(**batch), loss_fn(outputs, batch)
    Microbatches           each of its batches in turn, in one of these forms
    loss_fn=None           the model computes the loss: its output's .loss, the first entry of a tuple or
                           list, or the output itself

These functions are pure; any thread.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipedream.common.microbatches import Microbatches

__all__ = ["Keywords", "call_model", "first_microbatch", "own_loss", "parts_of"]


class Keywords(dict[str, Any]):
    """Inputs with which a model is called by name."""


def parts_of(batch: Any, minibatch: int) -> tuple[Any, Any]:
    """Splits a batch from `data` or `batches` into (inputs, targets). Microbatches are split into
    Microbatches of inputs and Microbatches of targets. Raises TypeError naming the minibatch, and ValueError
    for Microbatches without a batch.
    """
    if isinstance(batch, Microbatches):
        return _parts_of_each(batch, minibatch)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, (type, Mapping)):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if not isinstance(batch, Mapping):
        what = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        raise TypeError(
            f"minibatch {minibatch} of the data is a {what}: yield pairs (inputs, targets), several inputs"
            " in one tuple; or a dict of what the model's forward takes by name"
        )
    for key in batch:
        if type(key) is not str:
            raise TypeError(
                f"minibatch {minibatch} of the data has the key {key!r}: the model is called with its entries"
                " by name, so use texts"
            )
    keywords = Keywords(batch)
    return keywords, keywords


def _parts_of_each(batches: Microbatches, minibatch: int) -> tuple[Any, Any]:
    if not batches:
        raise ValueError(f"minibatch {minibatch} of the data is Microbatches of no batch: give one or more")
    pairs = [parts_of(batch, minibatch) for batch in batches]
    inputs = Microbatches(inputs for inputs, _ in pairs)
    if all(inputs is targets for inputs, targets in pairs):
        return inputs, inputs
    return inputs, Microbatches(targets for _, targets in pairs)


def first_microbatch(part: Any) -> Any:
    """Returns the first batch of Microbatches. Any other inputs or targets are returned whole, because they
    are cut later.
    """
    return part[0] if isinstance(part, Microbatches) else part


def call_model(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return model(inputs)
    if type(inputs) is Keywords:
        return _call_by_name(model, inputs)
    if isinstance(inputs, (tuple, list, Mapping)) and not _takes_one(type(model).forward):
        return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    return model(inputs)


def _call_by_name(model: nn.Module, inputs: Keywords) -> Any:
    try:
        return model(**inputs)
    except TypeError:
        why_not = _why_not_bound(model, inputs)
        if not why_not:
            raise
        raise TypeError(
            f"the entries of a minibatch ({', '.join(inputs)}) are the arguments of {type(model).__name__}'s"
            f" forward by name: {why_not}; yield pairs (inputs, targets), where the inputs may be a dict, if"
            " the loss alone reads some"
        ) from None


def _why_not_bound(model: nn.Module, inputs: Keywords) -> str:
    """Returns why the model's forward does not accept these arguments. Returns "" if it accepts them: then
    the error came from inside the forward.
    """
    try:
        inspect.signature(model.forward).bind(**inputs)
    except TypeError as error:
        return str(error)
    except ValueError:  # a forward without a signature
        return ""
    return ""


@functools.cache
def _takes_one(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward can be called with a single argument besides self."""
    try:
        inspect.signature(forward).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a forward without a signature
        return True
    return True


def _check_only_loss(outputs: Sequence[Any]) -> None:
    """Raises ValueError if several outputs are scalars that need a gradient: only the first would be
    trained.
    """
    scalars = [one for one in outputs if isinstance(one, Tensor) and one.dim() == 0 and one.requires_grad]
    if len(scalars) > 1:
        raise ValueError(
            f"the model's output is a {type(outputs).__name__} with {len(scalars)} scalars, of which the"
            " first alone would be the loss, and there is no loss_fn: give one that makes one loss of them,"
            " as their sum; losses that have optimizers of their own, as in a GAN, are not built"
        )


def own_loss(outputs: Any, targets: Any) -> Tensor:
    """Returns the loss in a model's output. Raises ValueError if there is none."""
    loss = outputs
    if not isinstance(outputs, Tensor):
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if loss is None and isinstance(outputs, (tuple, list)) and outputs:
            loss = outputs[0]
            _check_only_loss(outputs)
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        raise ValueError(
            f"the model's output, a {type(outputs).__name__}, has no scalar loss, and there is no loss_fn:"
            " give one, or the batch what the model computes its loss from (labels, in many)"
        )
    return loss
