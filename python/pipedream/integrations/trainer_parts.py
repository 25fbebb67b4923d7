"""Makes the objects of a Trainer that are sent to workers: its loss, its metrics and its loader. They hold no
reference to the Trainer itself. Runs on the thread that called train().
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalPrediction

from pipedream.integrations.steps import HeldOut, LossForm
from pipedream.model.boundary import map_tensors, tensors_of
from pipedream.model.seeding import generators_kept

if TYPE_CHECKING:
    from pipedream.integrations.transformers import PipelineTrainer

__all__ = [
    "Loss",
    "Predictions",
    "autocast_of",
    "divides_by_items",
    "in_memory",
    "loss_form",
    "loss_of_batch",
    "plain_loader",
]

_HELD_OUT_BYTES_MAX = 1 << 30


class Loss:
    """The loss of a microbatch, as Trainer.compute_loss computes it."""

    def __init__(self, function: Any, smoother: Any, shifts: bool, is_mixed: bool) -> None:
        self._function = function
        self._is_mixed = is_mixed
        self._smoother = smoother
        self._shifts = shifts

    def __call__(self, outputs: Any, targets: Mapping[str, Any]) -> torch.Tensor:
        if not self._is_mixed:
            return self._loss(outputs, targets)
        # Under autocast the Trainer's model returns float32, and its loss is computed outside the region.
        device = next(tensor.device.type for tensor in tensors_of(outputs))
        with torch.autocast(device, enabled=False):
            return self._loss(map_tensors(_widened, outputs), targets)

    def _loss(self, outputs: Any, targets: Mapping[str, Any]) -> torch.Tensor:
        labels, items = targets["labels"], targets.get("items")
        if self._function is not None:
            loss = self._function(outputs, labels, num_items_in_batch=items)
        elif self._smoother is not None and labels is not None:
            loss = self._smoother(outputs, labels, shift_labels=self._shifts, num_items_in_batch=items)
        else:
            if isinstance(outputs, Mapping) and "loss" not in outputs:
                raise ValueError(
                    f"the model returned {', '.join(outputs)} and no loss: give labels in train_dataset and"
                    " eval_dataset, or compute_loss_func, or eval_strategy='no' for data without labels"
                )
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        # In float64, so that the scale and the sum over microbatches do not round the reported loss.
        scaled: torch.Tensor = loss.double() * targets["scale"]
        return scaled


def loss_of_batch(trainer: PipelineTrainer, form: LossForm) -> Loss:
    model = trainer.model
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    shifts = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return Loss(
        trainer.compute_loss_func, trainer.label_smoother, shifts, autocast_of(trainer.args) is not None
    )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def loss_form(trainer: PipelineTrainer) -> LossForm:
    own = trainer.compute_loss_func is not None
    accepts = bool(trainer.model_accepts_loss_kwargs)
    includes = "inputs" in trainer.args.include_for_metrics
    is_sum: bool | None = trainer.loss_is_scaled_for_ga
    if is_sum is None:
        is_sum = True if own else None if accepts else False
    names = tuple(trainer.label_names)
    others = trainer.compute_metrics is not None and names != ("labels",)
    return LossForm(
        takes_labels=own or trainer.label_smoother is not None,
        counts_items=accepts or own,
        gives_items=accepts,
        is_sum=is_sum,
        shifts_labels=trainer._loss_shifts_labels,
        items_dtype=torch.get_default_dtype(),
        label_names=names if others else (),
        kept_input=getattr(trainer.model, "main_input_name", "input_ids") if includes else None,
    )


def divides_by_items(trainer: PipelineTrainer, form: LossForm, loader: DataLoader[Any]) -> bool:
    """Whether the loss is divided by the number of items: doubling this number halves the loss of a batch."""
    if not form.counts_items:
        return False
    model = trainer.model
    loss_of, was_training = loss_of_batch(trainer, form), model.training
    losses = []
    with generators_kept(), torch.no_grad():
        batch = dict(next(iter(copy.deepcopy(loader))))
        if form.items_of(batch) is None:
            return False
        model.eval()
        for count in (1, 2):
            inputs, targets = form.parts(batch, 1.0, items=torch.tensor(count, dtype=form.items_dtype))
            inputs, targets = map_tensors(lambda tensor: tensor.to(model.device), (dict(inputs), targets))
            losses.append(float(loss_of(model(**inputs), targets)))
    model.train(was_training)
    return abs(losses[0] - 2 * losses[1]) <= 1e-3 * abs(losses[0])


class Predictions:
    """Calls compute_metrics in the worker of the last stage."""

    def __init__(self, trainer: PipelineTrainer, ignored_keys: list[str] | None) -> None:
        if ignored_keys is None:  # as in Trainer.prediction_step
            config = getattr(trainer.model, "config", None)
            ignored_keys = getattr(config, "keys_to_ignore_at_inference", [] if config is None else ["cache"])
        self._ignored = {*ignored_keys, "loss"}
        self._preprocess = trainer.preprocess_logits_for_metrics
        self._compute = trainer.compute_metrics
        self._concatenates = trainer.args.eval_do_concat_batches
        self._is_mixed = autocast_of(trainer.args) is not None

    def kept(self, outputs: Any, targets: Mapping[str, Any]) -> Any:
        """Returns the parts of a batch to keep: logits, labels, and an input if compute_metrics needs one."""
        outputs = map_tensors(_widened, outputs) if self._is_mixed else outputs
        if isinstance(outputs, Mapping):
            logits: Any = tuple(value for key, value in outputs.items() if key not in self._ignored)
        else:
            logits = outputs[1:]
        logits = logits[0] if len(logits) == 1 else logits
        labels = targets["label_ids"] if "label_ids" in targets else targets["labels"]
        if self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        return logits, labels, targets.get("inputs")

    def measure(self, kept: list[Any], _: list[Any]) -> dict[str, float]:
        arrays = []
        for each in zip(*kept, strict=True):
            container = EvalLoopContainer(self._concatenates, padding_index=-100)
            for batch in each:
                if batch is not None:
                    container.add(batch)
            arrays.append(container.get_arrays())
        predictions, labels, inputs = arrays
        given = {} if inputs is None else {"inputs": inputs}
        computed = self._compute(EvalPrediction(predictions=predictions, label_ids=labels, **given))
        return {key: _as_number(key, value) for key, value in computed.items()}


def _as_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"compute_metrics returned {name!r} as {value!r}: return a number") from None


def plain_loader(loader: Any) -> DataLoader[Any]:
    """Returns a plain torch DataLoader with the loader's settings. The loader itself is accelerate's, which
    moves batches to this process's device.
    """
    names = (
        *("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"),
        *("multiprocessing_context", "persistent_workers", "in_order"),
    )
    given = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    given["pin_memory"] = loader.pin_memory and torch.cuda.is_available()  # without a GPU torch would warn
    if not isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **given)
    return DataLoader(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **given)


def in_memory(held_out: HeldOut) -> Any:
    """Returns the batches as a list, so that the run can find the largest batch. Returns them unchanged if
    they take more than 1 GiB."""
    found, num_bytes = [], 0
    with generators_kept():
        for batch in held_out:
            found.append(batch)
            num_bytes += sum(tensor.nbytes for tensor in tensors_of(batch))
            if num_bytes > _HELD_OUT_BYTES_MAX:
                return held_out
    return found


def autocast_of(args: Any) -> str | None:
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else None
