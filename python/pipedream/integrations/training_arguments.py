"""Lists the arguments of transformers.TrainingArguments that PipelineTrainer refuses. docs/trainer.md lists
the arguments without an effect; all others work as in the Trainer. A test compares both lists with the
installed transformers. Imports neither transformers nor torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["REFUSED", "check_training_arguments"]

REFUSED = {
    "auto_find_batch_size": "memory is planned before the first minibatch: set per_device_train_batch_size",
    "batch_eval_metrics": "leave it out, and compute_metrics is called once with all predictions",
    "bf16_full_eval": "evaluations run as the training does: use bf16",
    "debug": "leave it out; a NaN is named by its stage and minibatch where logging_nan_inf_filter is False",
    "deepspeed": "leave it out: the pipeline takes its place",
    "enable_jit_checkpoint": "leave it out: a SIGTERM ends the training at its newest checkpoint",
    "fp16_full_eval": "evaluations run as the training does: use fp16",
    "fsdp": "leave it out: the pipeline takes its place",
    "full_determinism": "leave it out: runs with the same seed and plan are equal without it",
    "ignore_data_skip": "leave it out: a resumed run takes the data from its place on",
    "include_num_input_tokens_seen": "leave it out: the caller reads no minibatch",
    "neftune_noise_alpha": "leave it out: its noise was not tried in stages",
    "optim_target_modules": "leave it out: an optimizer sees the parameters of one stage",
    "parallelism_config": "leave it out: the pipeline takes its place",
    "predict_with_generate": "evaluations compute logits: leave it out, and generate after train()",
    "push_to_hub": "leave it out, and call push_to_hub() after train()",
    "torch_compile": "leave it out: stages are not compiled as a whole",
    "torch_compile_backend": "leave it out: stages are not compiled as a whole",
    "torch_compile_mode": "leave it out: stages are not compiled as a whole",
    "use_liger_kernel": "leave it out: its kernels were not tried in stages",
}
"""Arguments that are refused unless their value is empty. Each has the remedy."""

_REFUSED_OPTIM = ("8bit", "4bit", "paged", "schedule_free", "lomo")
"""An optimizer is refused if its name contains one of these texts. Such optimizers need arguments or calls
that stages cannot give them."""

_NOTHING = (None, False, "", "no", 0)


def check_training_arguments(args: Any) -> None:
    """Raises ValueError if a refused argument or optimizer is set."""
    optim = getattr(args, "optim", None)
    optim = getattr(optim, "value", optim)
    if any(part in str(optim) for part in _REFUSED_OPTIM):
        raise ValueError(
            f"optim of TrainingArguments is {optim!r}, which a pipeline refuses: stages do not make it as the"
            " Trainer does; use 'adamw_torch', 'adafactor' or 'sgd'"
        )
    for name, remedy in REFUSED.items():
        value = getattr(args, name, None)
        value = getattr(value, "value", value)  # the value of an enumeration
        if value not in _NOTHING and value not in ([], {}):
            raise ValueError(f"{name} of TrainingArguments is {value!r}, which a pipeline refuses: {remedy}")
