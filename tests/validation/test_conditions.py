"""A run's own conditions: what it states, and what its time and software imply."""

from pathlib import Path

import pytest

from trainpace.errors import TrainpaceError
from trainpace.validation.conditions import case_of, network_gb_per_s
from trainpace.validation.runs import Run

HERE = Path(".")


def case(**stated):
    values = {
        "index": 0, "model_spec": "torchvision:resnet50", "gpu_canonical": "V100-SXM-32GB", "precision": "fp32", "batch_per_gpu": 32.0,
        "step_time_ms": 100.0,
    }  # fmt: skip
    return case_of(Run(**values | stated), HERE)


def test_a_plain_run():
    c = case(mode="train", optimizer="sgd momentum", memory_format="nhwc", img_size=160.0)
    assert c.form == "fp32"
    assert c.execution.micro_batch == 32
    assert c.execution.channels_last
    assert c.variant.optimizer == "sgd_momentum"
    assert c.variant.image_size == 160
    assert c.measured_ms == 100.0


def test_modes_and_optimizers():
    assert case(mode="inference").variant.mode == "inference"
    assert case(mode="forward_backward").execution.optimizer == "none"
    assert case(optimizer="decoupled_adamw (llm-foundry yamls)").execution.optimizer == "adamw"
    assert case(optimizer="BertAdam/FusedAdam").execution.optimizer == "adam"
    assert case(optimizer="SGD").execution.optimizer == "sgd"


@pytest.mark.parametrize(
    ("version", "legacy", "host"),
    [("torch 1.4 / CUDA 10.0", True, "old_torch"), ("1.13.0a0+d0d6b1f", True, ""), ("torch 2.1.0 (README)", False, ""),
     ("2.8.0a0+5228986c39.nv25.06", False, ""), ("", False, "old_torch")],
)  # fmt: skip
def test_the_version_decides_what_torch_could_do(version, legacy, host):
    c = case(framework="pytorch", framework_version=version)
    assert (c.variant.legacy, c.host) == (legacy, host)


def test_parallelism_is_read_from_its_text():
    c = case(num_gpus=16.0, num_nodes=2.0, parallelism="fsdp=FULL_SHARD mp_mode=PURE dp=16 ac=full act_cpu_offload=False",
             interconnect="1600 Gbps RoCE")  # fmt: skip
    assert c.execution.zero_stage == 3
    assert c.execution.activation_checkpointing
    assert c.execution.world_size == 16
    assert c.cluster.network_gb_per_s_per_device == 1600 / 8 / 8
    assert case(num_gpus=4.0, parallelism="nn.DataParallel dp=4").execution.engine == "data_parallel"
    tensor = case(
        num_gpus=64.0,
        num_nodes=8.0,
        parallelism="dp=1,tp=8,pp=8,zero=1",
        interconnect="RDMA 400 Gb/s per GPU",
        global_batch=512.0,
    )
    assert (tensor.execution.tp, tensor.execution.pp, tensor.execution.zero_stage) == (8, 8, 1)
    assert tensor.cluster.network_gb_per_s_per_device == 50


def test_step_time_from_throughput():
    c = case(step_time_ms=None, samples_per_sec=640.0, num_gpus=2.0, parallelism="dp=2", global_batch=64.0)
    assert c.measured_ms == pytest.approx(100.0)
    rounded = case(step_time_ms=None, samples_per_sec=1.0, tokens_per_sec=150.0, seq_len=100.0, batch_per_gpu=3.0)
    assert rounded.measured_ms == pytest.approx(2000.0)  # 1.5 samples/s, which the source rounds to 1
    tokens = case(step_time_ms=None, tokens_per_sec=32000.0, seq_len=100.0, global_batch=32.0)
    assert tokens.measured_ms == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("stated", "word"),
    [
        ({"precision": ""}, "no precision"),
        ({"precision": "int8"}, "int8"),
        ({"precision": "fp8", "notes": "float8 rowwise"}, "scale for every row"),
        ({"num_gpus": 8.0, "parallelism": "dp=8,ep=8"}, "expert parallelism"),
        ({"num_gpus": 8.0, "parallelism": "pp=8"}, "neither a global batch"),
        ({"num_gpus": 8.0, "parallelism": "dp=8", "global_batch": 300.0}, "not a multiple"),
        ({"gpu_canonical": "V1000"}, "unknown GPU"),
        ({"batch_per_gpu": None}, "no batch size"),
        ({"mode": "sleep"}, "sleep"),
        ({"model_spec": "", "model": "VGG16 CIFAR variant"}, "no model definition"),
        ({"model_spec": "transformers:none.json"}, "no such file"),
        ({"num_gpus": 3.0, "num_nodes": 2.0}, "divided over"),
        ({"num_gpus": 4.0, "parallelism": "tp=8"}, "tp x pp x cp"),
    ],
)
def test_what_cannot_be_forecast_says_why(stated, word):
    with pytest.raises(TrainpaceError, match=word):
        case(**stated)


def megatron(tmp_path, **stated):
    values = {
        "index": 0, "file": "megatron_papers_nemo", "model": "GPT 76B", "framework": "pytorch/Megatron-LM", "framework_version": "2021",
        "model_variant_or_config": "layers=60 hidden=10240 heads=80 vocab=51200", "gpu_canonical": "A100-SXM-80GB", "num_gpus": 1024.0,
        "num_nodes": 128.0, "precision": "fp16", "batch_per_gpu": 2.0, "global_batch": 1792.0, "seq_len": 2048.0,
        "parallelism": "tp=8,pp=4,vp_layers=5,dp=32,ac=full(uniform)", "tflops_per_gpu": 140.0, "mode": "train",
        "notes": "FLOPs counted INCLUDE the activation recomputation", "interconnect": "NVSwitch + 8x HDR 200Gb/s InfiniBand per node",
    }  # fmt: skip
    return case_of(Run(**values | stated), HERE, tmp_path)


def test_a_model_of_stated_sizes_in_a_pipeline(tmp_path):
    c = megatron(tmp_path)
    e = c.execution
    assert (e.micro_batch, e.accumulation, e.data_parallel_size, e.global_batch) == (2, 28, 32, 1792)
    assert (e.pipeline_schedule, e.virtual_stages) == ("interleaved", 3)  # 60 layers / (4 stages x 5)
    assert (e.activation_checkpointing, e.engine, e.sequence_parallel) == ("full", "unoverlapped", False)
    assert c.cluster.network_gb_per_s_per_device == 25
    assert c.variant.legacy
    # Narayanan et al. 2021 give this row's 140 TFLOP/s; 76 billion parameters, 4 passes of 2 FLOPs each, plus attention
    at_least = 8 * 76.1e9 * 1792 * 2048 / (1024 * 140e12) * 1e3
    assert at_least < c.measured_ms < 1.1 * at_least


def test_without_a_place_for_its_configuration_a_model_of_sizes_is_unknown(tmp_path):
    run = megatron(tmp_path).run
    with pytest.raises(TrainpaceError, match="no model definition"):
        case_of(run, HERE)


def test_recomputation_that_only_the_flops_tell(tmp_path):
    """Megatron's own table of 2020: 136.8 TFLOP/s and 1026 ms go together with four passes, not with three."""
    c = megatron(
        tmp_path, model="GPT-2 2B", model_variant_or_config="layers=30 hidden=2304 heads=18 vocab=51200", num_gpus=2.0, num_nodes=1.0,
        batch_per_gpu=16.0, global_batch=16.0, seq_len=1024.0, parallelism="tp=2,dp=1", tflops_per_gpu=136.8, step_time_ms=1026.0,
    )  # fmt: skip
    assert c.execution.activation_checkpointing == "full"


def test_torchtitan_cuts_a_rank_s_batch_into_as_many_micro_batches_as_stages():
    c = case(
        file="torchtitan", model_spec="torchvision:resnet50", gpu_canonical="H100-SXM-96GB", precision="bf16", num_gpus=512.0,
        num_nodes=64.0, batch_per_gpu=32.0, global_batch=256.0, parallelism="fsdp=8,tp=8,pp=8(Interleaved 1F1B),async_tp,ac=full",
    )  # fmt: skip
    e = c.execution
    assert (e.micro_batch, e.accumulation, e.zero_stage, e.virtual_stages) == (4, 8, 3, 2)
    assert e.async_tensor_parallel
    assert e.sequence_parallel
    assert c.cluster.network_gb_per_s_per_device == 50  # not stated: as nodes of H100 have


@pytest.mark.parametrize(
    ("parallelism", "micro_batch", "accumulation", "schedule"),
    [("dp=4", 2, 1, "1f1b"), ("tp=4", 8, 1, "1f1b"), ("pp=4", 2, 4, "gpipe")],
)
def test_neusight_s_batch_on_four_gpus_is_global(parallelism, micro_batch, accumulation, schedule):
    c = case(
        file="neusight_labels", num_gpus=4.0, batch_per_gpu=8.0, parallelism=parallelism, mode="forward_backward",
        gpu_canonical="A100-SXM-40GB",
    )  # fmt: skip
    e = c.execution
    assert (e.micro_batch, e.accumulation, e.pipeline_schedule) == (micro_batch, accumulation, schedule)
    assert e.global_batch == 8
    assert e.optimizer == "none"
    with pytest.raises(TrainpaceError, match="divided over 4"):
        case(file="neusight_labels", num_gpus=4.0, batch_per_gpu=6.0, parallelism="dp=4")


def test_hybrid_sharding_and_gathered_parameters_kept():
    c = case(num_gpus=16.0, num_nodes=2.0, parallelism="fsdp=HYBRID_SHARD dp=16", interconnect="1600 Gbps")
    assert c.execution.shard_size == 8
    kept = case(num_gpus=8.0, parallelism="fsdp=SHARD_GRAD_OP mp_mode=DEFAULT dp=8 ac=none")
    assert (kept.execution.zero_stage, kept.execution.reshard_after_forward) == (3, False)


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("NVSwitch + 8x HDR 200Gb/s InfiniBand per node (paper; not in the table)", 8, 25.0),
        ("NVLink + 4x Omni-Path 100 Gb/s per node", 8, 6.25),
        ("NVLink + RDMA 400 Gb/s per GPU", 8, 50.0),
        ("1600 Gbps RoCE", 8, 25.0),
        ("NVSwitch + HDR InfiniBand", 8, None),
    ],
)
def test_networks(text, gpus, expected):
    assert network_gb_per_s(text, gpus) == expected


def test_blooms_trials_had_16_bit_gradients_until_the_bf16_optimizer():
    def precision(notes):
        return case(file="bigscience_bloom", precision="bf16", notes=notes).execution.precision

    assert precision("section 'x'; row date 02-25") == "fp16"
    assert precision("section 'Rebalancing layers'; row date 02-28") == "bf16"
    assert precision("") == "bf16"
