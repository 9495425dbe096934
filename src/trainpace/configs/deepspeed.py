"""DeepSpeed JSON. Keys: DeepSpeed 0.19's documentation and runtime/constants.py, runtime/zero/config.py.

DeepSpeed ignores a top-level key that it does not know without a word; a wrong one inside zero_optimization stops it.
"""

from __future__ import annotations

from typing import Any

from trainpace.configs.settings import ConfigFile, Reading
from trainpace.errors import nearest_names

TOP_LEVEL = frozenset(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler fp16 bf16 bfloat16 amp
    zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer gradient_clipping steps_per_print
    wall_clock_breakdown dump_state memory_breakdown flops_profiler activation_checkpointing sparse_attention
    data_efficiency curriculum_learning tensorboard wandb csv_monitor comet comms_logger compression_training elasticity
    autotuning aio checkpoint data_types nebula pipeline compile tensor_parallel communication_data_type
    seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor sparse_gradients hybrid_engine
    eigenvalue progressive_layer_drop quantize_training disable_allgather fp32_allreduce dataloader_drop_last
    use_data_before_expert_parallelism graph_harvesting load_universal_checkpoint sequence_parallel_size torch_autocast
    timers local_rank use_node_local_storage vocabulary_size data_sampling zenflow weight_quantization
    train_steps monitor_config repro_mode""".split()
)
ZERO = frozenset(
    """stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow
    sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size
    stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold
    model_persistence_threshold stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters
    max_reuse_distance stage3_max_reuse_distance gather_16bit_weights_on_model_save
    stage3_gather_16bit_weights_on_model_save module_granularity_threshold stage3_module_granularity_threshold
    use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params stage3_gather_fp16_weights_on_model_save
    ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights
    zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
    mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings save_muon_momentum_buffer_in_memory enable_sanity_checks""".split()
)


def is_deepspeed(data: dict[str, Any]) -> bool:
    """A key that only DeepSpeed has."""
    return bool(data.keys() & {"train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization"})


def read_deepspeed(data: dict[str, Any], file: str) -> ConfigFile:
    """Settings of a DeepSpeed file; "auto" leaves a setting to the other files, with a note."""
    reading = Reading(file, "DeepSpeed")
    for key in data.keys() - TOP_LEVEL:
        near = nearest_names(key, TOP_LEVEL, 2)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        reading.note(key, f"unknown to DeepSpeed, which ignores it silently{hint}", "warning")
    reading.count("global_batch", data.get("train_batch_size"), "train_batch_size")
    reading.count("micro_batch", data.get("train_micro_batch_size_per_gpu"), "train_micro_batch_size_per_gpu")
    reading.count("accumulation", data.get("gradient_accumulation_steps"), "gradient_accumulation_steps")
    _read_precision(reading, data)
    zero = reading.section(data.get("zero_optimization"), "zero_optimization")
    for key in zero.keys() - ZERO:
        near = nearest_names(key, ZERO, 2)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        reading.note(
            f"zero_optimization.{key}", f"DeepSpeed stops with a validation error at this key{hint}", "warning"
        )
    stage = zero.get("stage")
    if stage is not None:
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3, "auto"):
            raise reading.fail("zero_optimization.stage", stage, "0, 1, 2 or 3")
        reading.count("zero_stage", stage, "zero_optimization.stage", least=0)
    offload = reading.section(zero.get("offload_optimizer"), "zero_optimization.offload_optimizer")
    if offload:
        where = offload.get("device", "none")
        if where not in ("cpu", "nvme", "none"):
            raise reading.fail("zero_optimization.offload_optimizer.device", where, "cpu, nvme or none")
        reading.put("offload_optimizer", where != "none", "zero_optimization.offload_optimizer.device")
    optimizer = reading.section(data.get("optimizer"), "optimizer")
    name = reading.text(optimizer.get("type"), "optimizer.type")
    if name:
        reading.put("optimizer", name.lower(), "optimizer.type")
    parameters = reading.section(optimizer.get("params"), "optimizer.params")
    reading.number("learning_rate", parameters.get("lr"), "optimizer.params.lr")
    parallel = reading.section(data.get("tensor_parallel"), "tensor_parallel")
    reading.count("tp", parallel.get("autotp_size") or None, "tensor_parallel.autotp_size")
    drop_last = reading.flag(data.get("dataloader_drop_last"), "dataloader_drop_last")
    if drop_last is not None:
        reading.put("drop_last", drop_last, "dataloader_drop_last")
    return reading.done()


def _read_precision(reading: Reading, data: dict[str, Any]) -> None:
    enabled: dict[str, bool | None] = {}
    for key in ("fp16", "bf16", "bfloat16", "amp"):
        section = reading.section(data.get(key), key)
        enabled[key] = reading.flag(section.get("enabled"), f"{key}.enabled") if section else None
    half = [key for key in ("fp16", "bf16", "bfloat16") if enabled[key]]
    if "fp16" in half and len(half) > 1:
        raise reading.fail("fp16.enabled", True, f"false where {half[1]}.enabled is true")
    if half:
        reading.put("precision", "fp16" if half[0] == "fp16" else "bf16", f"{half[0]}.enabled")
    elif enabled["amp"]:
        reading.put("precision", "amp_fp16", "amp.enabled")
    elif enabled["fp16"] is False and (enabled["bf16"] or enabled["bfloat16"]) is False:
        reading.put("precision", "fp32", "fp16.enabled, bf16.enabled")
