"""Hugging Face `TrainingArguments`, as JSON or YAML. Names: transformers 5.23."""

from __future__ import annotations

from typing import Any

from trainpace.configs.settings import ConfigFile, Reading, SettingName
from trainpace.errors import nearest_names

NAMES = frozenset(
    """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval data_seed
dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval
do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches
eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config
full_determinism gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor
learning_rate length_column_name liger_kernel_config load_best_model_at_end local_rank log_level
log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter logging_steps logging_strategy
lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model neftune_noise_alpha
num_train_epochs optim optim_args optim_target_modules output_dir parallelism_config per_device_eval_batch_size
per_device_train_batch_size prediction_loss_only project push_to_hub remove_unused_columns report_to
restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
save_steps save_strategy save_total_limit seed skip_memory_metrics tf32 torch_compile torch_compile_backend
torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id
train_sampling_strategy use_cache use_cpu use_liger_kernel warmup_steps weight_decay
""".split()
)

_COUNTS: dict[str, SettingName] = {
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
}
_OLD_NAMES = {
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "evaluation_strategy": "eval_strategy",
    "group_by_length": "train_sampling_strategy",
    "no_cuda": "use_cpu",
}
_NOT_ARGUMENTS = {"model_name_or_path", "dataset_name", "max_length", "max_seq_length", "tokenizer_name", "output_dir"}


def is_training_arguments(data: dict[str, Any]) -> bool:
    """Two names of TrainingArguments, or the batch size alone."""
    known = data.keys() & (NAMES | _OLD_NAMES.keys())
    return len(known) >= 2 or bool(
        known & {"per_device_train_batch_size", "per_gpu_train_batch_size", "num_train_epochs"}
    )


def read_training_arguments(data: dict[str, Any], file: str) -> ConfigFile:
    """Settings of a TrainingArguments file; only what is written counts, never a default."""
    reading = Reading(file, "Hugging Face TrainingArguments")
    values: dict[str, Any] = {}
    for key, value in data.items():
        new = _OLD_NAMES.get(key, key)
        if new != key:
            reading.note(key, f"the old name of {new}")
            if new in data:
                raise reading.fail(key, value, f"left out, since {new} is given too")
        elif key not in NAMES and key not in _NOT_ARGUMENTS:
            near = nearest_names(key, NAMES, 2)
            reading.note(
                key, f"not a TrainingArguments name{'; nearest: ' + ', '.join(near) if near else ''}", "warning"
            )
        values[new] = value
    for key, name in _COUNTS.items():
        reading.count(name, values.get(key), key)
    reading.count("dataloader_workers", values.get("dataloader_num_workers"), "dataloader_num_workers", least=0)
    reading.number("learning_rate", values.get("learning_rate"), "learning_rate")
    _read_length(reading, values)
    _read_precision(reading, values)
    _read_flag(reading, values, "dataloader_drop_last", "drop_last")
    _read_flag(reading, values, "gradient_checkpointing", "activation_checkpointing")
    _read_flag(reading, values, "torch_compile", "compile")
    for strategy, steps, name in (("eval_strategy", "eval_steps", "evaluate_every_steps"),
                                  ("save_strategy", "save_steps", "checkpoint_every_steps")):  # fmt: skip
        _read_interval(reading, values, strategy, steps, name)
    optimizer = reading.text(values.get("optim"), "optim")
    if optimizer:
        reading.put("optimizer", optimizer, "optim")
    if values.get("fsdp"):
        reading.put("sharding", "fsdp", "fsdp")
    if isinstance(values.get("deepspeed"), str):
        reading.note("deepspeed", f"read {values['deepspeed']} too, with another --config")
    elif isinstance(values.get("deepspeed"), dict):
        reading.note("deepspeed", "settings inside are not read; give them as a file of their own", "warning")
    if "per_device_train_batch_size" not in values:
        reading.note("per_device_train_batch_size", "not stated; Hugging Face would use 8")
    return reading.done()


def _read_length(reading: Reading, values: dict[str, Any]) -> None:
    steps = values.get("max_steps")
    if steps is not None and steps != -1 and steps != 0:
        reading.count("max_steps", steps, "max_steps")
        if values.get("num_train_epochs") is not None:
            reading.note("num_train_epochs", "ignored by Hugging Face, since max_steps is given", "warning")
            return
    reading.number("epochs", values.get("num_train_epochs"), "num_train_epochs")


def _read_precision(reading: Reading, values: dict[str, Any]) -> None:
    states = {key: reading.flag(values.get(key), key) for key in ("bf16", "fp16", "tf32")}
    if states["bf16"] and states["fp16"]:
        raise reading.fail("fp16", True, "false where bf16 is true")
    for key, precision in (("bf16", "amp_bf16"), ("fp16", "amp_fp16"), ("tf32", "tf32")):
        if states[key]:
            reading.put("precision", precision, key)
            return
    if states["bf16"] is False and states["fp16"] is False and states["tf32"] is False:
        reading.put("precision", "fp32", "fp16, bf16, tf32")


def _read_flag(reading: Reading, values: dict[str, Any], key: str, name: SettingName) -> None:
    state = reading.flag(values.get(key), key)
    if state is not None:
        reading.put(name, state, key)


def _read_interval(reading: Reading, values: dict[str, Any], strategy: str, steps: str, name: SettingName) -> None:
    value = values.get(steps)
    if value is None:
        return
    if values.get(strategy) not in (None, "steps"):
        reading.note(steps, f"without effect, since {strategy} is {values[strategy]!r}")
    elif isinstance(value, float) and 0 < value < 1:
        reading.note(steps, f"{value} is a share of the run's steps, which is not resolved here")
    else:
        reading.count(name, value, steps)
