"""Hugging Face `TrainingArguments`, as JSON, YAML or flags. Names: transformers 5.23, training_args.py."""

from __future__ import annotations

from typing import Any

from trainpace.configs.reading import Reading
from trainpace.configs.settings import ConfigFile, SettingName

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
_RENAMED = {  # names of transformers 4 that 5.23 no longer has (gradient_checkpointing: it still has both)
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "gradient_checkpointing": "activation_checkpointing",
}
_REMOVED = {
    "group_by_length": 'now train_sampling_strategy: "group_by_length"',
    "warmup_ratio": "now warmup_steps, which also takes a share",
    "overwrite_output_dir": "gone from transformers 5",
    "fp16_opt_level": "gone from transformers 5, with Apex",
    "fp16_backend": "gone from transformers 5, with Apex",
    "half_precision_backend": "gone from transformers 5, with Apex",
    "push_to_hub_model_id": "now hub_model_id",
    "push_to_hub_token": "now hub_token",
    "logging_dir": "gone from transformers 5",
    "evaluate_during_training": 'now eval_strategy: "steps"',
    "include_tokens_per_second": "gone from transformers 5",
}
# arguments that scripts and trainers beside TrainingArguments keep in the same file
_BESIDE = frozenset(
    """
model_name_or_path config_name tokenizer_name cache_dir dataset_name dataset_config_name train_file validation_file
max_length max_seq_length max_train_samples max_eval_samples preprocessing_num_workers torch_dtype dtype
attn_implementation block_size trust_remote_code
""".split()
)
_COUNTS: dict[str, SettingName] = {
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "block_size": "sequence_length",
}
_FLAGS: dict[str, SettingName] = {
    "dataloader_drop_last": "drop_last",
    "activation_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
}
_INTERVALS: tuple[tuple[str, str, SettingName], ...] = (
    ("eval_strategy", "eval_steps", "evaluate_every_steps"),
    ("save_strategy", "save_steps", "checkpoint_every_steps"),
)
# one algorithm, several implementations
_SAME_OPTIMIZER = dict.fromkeys(
    "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf adamw_apex_fused".split(), "adamw"
)
DISTINCTIVE = frozenset(
    ("per_device_train_batch_size", "per_gpu_train_batch_size", "num_train_epochs", "gradient_accumulation_steps")
)


def is_training_arguments(data: dict[str, Any]) -> bool:
    names = data.keys() & (NAMES | _RENAMED.keys() | _REMOVED.keys())
    return len(names) >= 2 or bool(names & DISTINCTIVE)


def read_training_arguments(data: dict[str, Any], file: str, prefix: str = "") -> ConfigFile:
    """Settings that a TrainingArguments file states; defaults are not filled in."""
    reading = Reading(file, "Hugging Face TrainingArguments", prefix)
    names = NAMES | _RENAMED.keys() | _REMOVED.keys()
    reading.flag_unknown(
        {k: v for k, v in data.items() if k not in _BESIDE}, names, "not a TrainingArguments name, so it is not read"
    )
    put_training_arguments(reading, data)
    if not data.keys() & {"per_device_train_batch_size", "per_gpu_train_batch_size"}:
        reading.note("per_device_train_batch_size", "not stated; Hugging Face would use 8")
    return reading.done()


def put_training_arguments(reading: Reading, data: dict[str, Any], dashes: str = "") -> None:
    """Record the settings in `data`. `dashes`: "--" where they were written as flags."""
    keys: dict[str, str] = {}  # a name of today -> the key as written
    for key in data:
        if key in _REMOVED:
            reading.warn(dashes + key, _REMOVED[key])
        new = _RENAMED.get(key, key)
        if new != key:
            if data[key] is not None and data.get(new) is not None:
                raise reading.fail(dashes + key, data[key], f"left out, since {new}, its new name, is given too")
            reading.note(dashes + key, f"the old name of {new}")
        if new == key or data[key] is not None:
            keys[new] = key
    values = {new: data[key] for new, key in keys.items()}
    written = {new: dashes + key for new, key in keys.items()}
    for key, name in _COUNTS.items():
        reading.count(name, values.get(key), written.get(key, key))
    reading.count(
        "dataloader_workers", values.get("dataloader_num_workers"), f"{dashes}dataloader_num_workers", least=0
    )
    reading.number("learning_rate", values.get("learning_rate"), f"{dashes}learning_rate")
    for key, name in _FLAGS.items():
        reading.flag(name, values.get(key), written.get(key, key))
    _read_length(reading, values, dashes)
    _read_precision(reading, values, dashes)
    for strategy, steps, name in _INTERVALS:
        _read_interval(reading, values, written.get(strategy, strategy), strategy, dashes + steps, steps, name)
    optimizer = reading.word(values.get("optim"), f"{dashes}optim")
    if optimizer:
        reading.put("optimizer", _SAME_OPTIMIZER.get(optimizer, optimizer), f"{dashes}optim")
    _read_engines(reading, values, dashes)


def _read_length(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    key, steps, epochs = f"{dashes}max_steps", values.get("max_steps"), values.get("num_train_epochs")
    if isinstance(steps, bool) or steps not in (None, -1, 0):  # -1 and 0 are off
        reading.count("max_steps", steps, key)
        if epochs is not None:
            reading.warn(f"{dashes}num_train_epochs", "ignored by Hugging Face, since max_steps is given")
    else:
        reading.number("epochs", epochs, f"{dashes}num_train_epochs")


def _read_precision(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    on = {key: reading.truth(values.get(key), dashes + key, "precision") for key in ("bf16", "fp16", "tf32")}
    if on["bf16"] and on["fp16"]:
        raise reading.fail(f"{dashes}fp16", True, "false where bf16 is true")
    chosen = next((key for key in on if on[key]), None)
    if chosen:
        words = {"bf16": "amp_bf16", "fp16": "amp_fp16", "tf32": "tf32"}
        reading.put("precision", words[chosen], dashes + chosen)
        if on["tf32"] and chosen != "tf32":
            reading.note(f"{dashes}tf32", f"concerns only what {chosen} leaves in fp32")
    elif on["bf16"] is False and on["fp16"] is False:
        reading.put("precision", "fp32", f"{dashes}fp16, {dashes}bf16")
    else:
        for key in (key for key in on if on[key] is False):
            reading.note(dashes + key, "off; the precision itself is not stated")


def _read_interval(
    reading: Reading, values: dict[str, Any], when_key: str, when: str, key: str, steps: str, name: SettingName
) -> None:
    value, strategy = values.get(steps), values.get(when)
    if strategy is False:  # YAML reads an unquoted `no` as false
        strategy = "no"
    strategy = reading.word(strategy, when_key, ("no", "steps", "epoch", "best"))
    if value is None:
        if strategy == "steps" and steps == "eval_steps":
            reading.note(when_key, "steps, without eval_steps: Hugging Face would take logging_steps", leaves_open=name)
        elif strategy in ("epoch", "best"):
            reading.note(when_key, f"{strategy}: not a number of steps", leaves_open=name)
    elif strategy not in (None, "steps"):
        reading.note(key, f"without effect, since {when} is {strategy!r}")
    elif isinstance(value, float) and 0 < value < 1:
        reading.note(key, f"{value} is a share of the run's steps, which is not resolved here", leaves_open=name)
    else:
        reading.count(name, value, key)
        if strategy is None and steps == "eval_steps":
            reading.warn(key, "eval_strategy is not stated; Hugging Face would not evaluate while it trains")


def _read_engines(reading: Reading, values: dict[str, Any], dashes: str) -> None:
    fsdp = values.get("fsdp")
    if fsdp is not None and not isinstance(fsdp, bool | str | list):
        raise reading.fail(f"{dashes}fsdp", fsdp, "options such as full_shard")
    if fsdp:
        reading.put("sharding", "fsdp", f"{dashes}fsdp")
    nested = values.get("fsdp_config")
    if isinstance(nested, dict):
        for key in ("activation_checkpointing", "fsdp_activation_checkpointing"):
            reading.flag("activation_checkpointing", nested.get(key), f"fsdp_config.{key}")
    sizes = values.get("parallelism_config")
    if isinstance(sizes, dict):
        reading.count("tp", sizes.get("tp_size"), "parallelism_config.tp_size")
        reading.count("cp", sizes.get("cp_size"), "parallelism_config.cp_size")
    for key, other in (("fsdp_config", nested), ("parallelism_config", sizes), ("deepspeed", values.get("deepspeed"))):
        if isinstance(other, str):
            reading.note(dashes + key, f"{other} is a file of its own; read it too")
        elif other is not None and not isinstance(other, dict):
            raise reading.fail(dashes + key, other, "a section, or the name of a file")
    if isinstance(values.get("deepspeed"), dict):
        reading.warn("deepspeed", "the settings inside are not read; give them as a file of their own")
    if reading.truth(values.get("auto_find_batch_size"), f"{dashes}auto_find_batch_size"):
        reading.warn(f"{dashes}auto_find_batch_size", "the batch shrinks where memory runs out")
    if values.get("torch_compile") is None and (
        values.get("torch_compile_backend") or values.get("torch_compile_mode")
    ):
        reading.note(f"{dashes}torch_compile", "on, since a backend or mode is given; not stated itself")
    accelerator = values.get("accelerator_config")
    if isinstance(accelerator, dict) and accelerator.get("split_batches"):
        reading.warn("accelerator_config.split_batches", "the batch is split over all processes, not one for each")
