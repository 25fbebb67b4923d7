"""Lists the arguments of transformers.TrainingArguments in three groups: arguments that PipelineTrainer
honours, arguments without a meaning for a pipeline, and arguments that it refuses. A test compares the lists
with the installed version's fields.

Data; needs neither transformers nor torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["HONOURED", "REFUSED", "WITHOUT_MEANING", "check_training_arguments"]

HONOURED = frozenset(
    {
        # Length, and minibatches.
        *("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context"),
        *("dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory"),
        *("dataloader_prefetch_factor", "train_sampling_strategy", "length_column_name"),
        *("remove_unused_columns", "label_names", "accelerator_config", "seed", "data_seed"),
        # Optimizer, loss and precision.
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
        *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
        *("label_smoothing_factor", "bf16", "fp16", "tf32", "use_cache", "use_cpu"),
        *("activation_checkpointing", "gradient_checkpointing"),
        # Logs, evaluations and checkpoints.
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_level"),
        *("disable_tqdm", "report_to", "run_name", "project"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_do_concat_batches"),
        *("per_device_eval_batch_size", "prediction_loss_only", "include_for_metrics"),
        *("output_dir", "save_strategy", "save_steps", "save_total_limit", "save_only_model"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "restore_callback_states_from_checkpoint",
        # Arguments of push_to_hub(), which a script may call after train().
        *("hub_model_id", "hub_token", "hub_private_repo", "hub_revision"),
    }
)

WITHOUT_MEANING = {
    "activation_checkpointing_kwargs": "stages run their forward again in a way of their own",
    "gradient_checkpointing_kwargs": "stages run their forward again in a way of their own",
    "average_tokens_across_devices": "a minibatch is one for all workers, and its tokens are counted once",
    "ddp_backend": "workers use no process group",
    "ddp_broadcast_buffers": "workers use no process group",
    "ddp_bucket_cap_mb": "workers use no process group",
    "ddp_find_unused_parameters": "workers use no process group",
    "ddp_static_graph": "workers use no process group",
    "ddp_timeout": "workers use no process group",
    "do_eval": "scripts read it themselves",
    "do_predict": "scripts read it themselves",
    "do_train": "scripts read it themselves",
    "eval_accumulation_steps": "predictions lie in the last worker's host memory from the beginning",
    "eval_use_gather_object": "one worker has all predictions",
    "fsdp_config": "fsdp is refused",
    "hub_always_push": "push_to_hub is refused",
    "hub_strategy": "push_to_hub is refused",
    "liger_kernel_config": "use_liger_kernel is refused",
    "local_rank": "torchrun says it",
    "log_level_replica": "rank 0 alone logs",
    "log_on_each_node": "rank 0 alone logs",
    "resume_from_checkpoint": "scripts hand it on to train() themselves",
    "save_on_each_node": "each checkpoint is one for all workers",
    "skip_memory_metrics": "it measures the caller, which does not train",
    "torch_empty_cache_steps": "the memory of stages is planned and stays",
}
"""Arguments that mean nothing for a pipeline, with the reason."""

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
    "push_to_hub": "leave it out, and call push_to_hub() after train()",
    "torch_compile": "leave it out: stages are not compiled as a whole",
    "torch_compile_backend": "leave it out: stages are not compiled as a whole",
    "torch_compile_mode": "leave it out: stages are not compiled as a whole",
    "use_liger_kernel": "leave it out: its kernels were not tried in stages",
}
"""Arguments that are refused unless they have an empty value, with the remedy."""

_REFUSED_OPTIM = ("8bit", "4bit", "paged", "schedule_free", "lomo")
"""Parts of the names of refused optimizers. These need constructor arguments or calls that stages cannot give
them."""

_NOTHING = (None, False, "", "no", 0)


def check_training_arguments(args: Any) -> None:
    """Raises ValueError for a TrainingArguments with an argument that PipelineTrainer does not honour."""
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
