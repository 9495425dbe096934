"""Conditions of a measured run: stated values and defaults from its date and software."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from nouns import workload
from trainpace.core.errors import TrainpaceError
from trainpace.forecast import MeasuredRun, case_of, forecast_case
from trainpace.forecast.measured_runs import network_gb_per_s

HERE = Path(".")


def case(**stated):
    values = {
        "index": 0,
        "model_spec": "torchvision:resnet50",
        "gpu_canonical": "V100-SXM-32GB",
        "precision": "fp32",
        "batch_per_gpu": 32.0,
        "step_time_ms": 100.0,
    }
    return case_of(MeasuredRun(**values | stated), HERE)


def test_plain_run_sets_execution_and_variant():
    c = case(mode="train", optimizer="sgd momentum", memory_format="nhwc", img_size=160.0)
    assert c.form == "fp32"
    assert c.execution.micro_batch == 32
    assert c.execution.channels_last
    assert c.variant.optimizer == "sgd_momentum"
    assert c.variant.image_size == 160
    assert c.measured_ms == 100.0


def test_mode_and_optimizer_names_are_recognized():
    assert case(mode="inference").variant.mode == "inference"
    assert case(mode="forward_backward").execution.optimizer == "none"
    assert case(optimizer="decoupled_adamw (llm-foundry yamls)").execution.optimizer == "adamw"
    assert case(optimizer="BertAdam/FusedAdam").execution.optimizer == "adam"
    assert case(optimizer="SGD").execution.optimizer == "sgd"


@pytest.mark.parametrize(
    ("version", "legacy", "host"),
    [
        ("torch 1.4 / CUDA 10.0", True, "host_old_torch"),
        ("1.13.0a0+d0d6b1f", True, ""),
        ("torch 2.1.0 (README)", False, ""),
        ("2.8.0a0+5228986c39.nv25.06", False, ""),
        ("", False, "host_old_torch"),
    ],
)
def test_torch_version_sets_legacy_and_slow_host(version, legacy, host):
    c = case(framework="pytorch", framework_version=version)
    assert (c.variant.legacy, c.software.slow_host) == (legacy, host)


def test_parallelism_text_is_parsed():
    c = case(
        num_gpus=16.0,
        num_nodes=2.0,
        parallelism="fsdp=FULL_SHARD mp_mode=PURE dp=16 ac=full act_cpu_offload=False",
        interconnect="1600 Gbps RoCE",
    )
    assert c.execution.zero_stage == 3
    assert c.execution.activation_checkpointing
    assert c.execution.world_size == 16
    assert c.cluster.network_gb_per_s_per_device == 1600 / 8 / 8
    assert (
        case(num_gpus=4.0, parallelism="nn.DataParallel dp=4").execution.engine == "data_parallel"
    )
    tensor = case(
        num_gpus=64.0,
        num_nodes=8.0,
        parallelism="dp=1,tp=8,pp=8,zero=1",
        interconnect="RDMA 400 Gb/s per GPU",
        global_batch=512.0,
    )
    assert (tensor.execution.tp, tensor.execution.pp, tensor.execution.zero_stage) == (8, 8, 1)
    assert tensor.cluster.network_gb_per_s_per_device == 50


def test_step_time_is_derived_from_throughput():
    c = case(
        step_time_ms=None,
        samples_per_sec=640.0,
        num_gpus=2.0,
        parallelism="dp=2",
        global_batch=64.0,
    )
    assert c.measured_ms == pytest.approx(100.0)
    rounded = case(
        step_time_ms=None,
        samples_per_sec=1.0,
        tokens_per_sec=150.0,
        seq_len=100.0,
        batch_per_gpu=3.0,
    )
    assert rounded.measured_ms == pytest.approx(
        2000.0
    )  # 1.5 samples/s, which the source rounds to 1
    tokens = case(step_time_ms=None, tokens_per_sec=32000.0, seq_len=100.0, global_batch=32.0)
    assert tokens.measured_ms == pytest.approx(100.0)


@pytest.mark.parametrize(
    "stated",
    [
        {"precision": ""},
        {"precision": "int8"},
        {"precision": "fp8_rowwise"},
        {"num_gpus": 8.0, "parallelism": "dp=8,ep=3"},
        {"num_gpus": 8.0, "parallelism": "pp=8"},
        {"num_gpus": 8.0, "parallelism": "dp=8", "global_batch": 300.0},
        {"gpu_canonical": "V1000"},
        {"batch_per_gpu": None},
        {"mode": "sleep"},
        {"model_spec": "", "model": "VGG16 CIFAR variant"},
        {"model_spec": "transformers:none.json"},
        {"num_gpus": 3.0, "num_nodes": 2.0},
        {"num_gpus": 4.0, "parallelism": "tp=8"},
    ],
)
def test_case_of_rejects_impossible_runs(stated):
    with pytest.raises(TrainpaceError):
        case(**stated)


def test_pipeline_schedule_and_virtual_stages_are_parsed():
    sizes = {"num_gpus": 8.0, "global_batch": 64.0, "batch_per_gpu": 4.0}
    for words, expected in (
        ("", ("1f1b", 1)),
        ("gpipe", ("gpipe", 1)),
        ("vp=3", ("interleaved", 3)),
        ("Interleaved 1F1B", ("interleaved", 2)),
    ):
        e = case(**sizes, parallelism=f"pp=8,{words}").execution
        assert (e.pipeline_schedule, e.virtual_stages) == expected
        assert (e.micro_batch, e.accumulation) == (4, 16)


def test_software_columns_override_defaults():
    c = case(
        engine="unoverlapped",
        attention="native",
        peak_memory_kind="device",
        assumed="64 heads",
        num_gpus=16.0,
        num_nodes=2.0,
    )
    assert (c.execution.engine, c.software.attention, c.peak) == (
        "unoverlapped",
        "efficient",
        "device",
    )  # default on a V100
    assert (
        c.assumed == "64 heads, a network of 25 GB/s per GPU, a host that launches as torch 1.9 did"
    )
    plain = case(framework_version="torch 2.1")
    assert (plain.execution.engine, plain.software.fused_attention, plain.peak) == (
        "ddp",
        "flash1",
        "allocated",
    )
    assert case(attention="flash2", framework_version="torch 2.1").software.attention == "flash2"


def test_host_to_device_copies_take_time():
    saved = replace(workload(), sample_bytes=1e6)
    plain, copied = (
        forecast_case(case(host_copy=word), saved).step.host_to_device_ms for word in ("", "yes")
    )
    assert (plain, copied > 0) == (0.0, True)


def test_hybrid_shard_and_shard_grad_op_are_parsed():
    c = case(
        num_gpus=16.0,
        num_nodes=2.0,
        parallelism="fsdp=HYBRID_SHARD dp=16",
        interconnect="1600 Gbps",
    )
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
def test_network_bandwidth_is_parsed_from_text(text, gpus, expected):
    assert network_gb_per_s(text, gpus) == expected


def test_named_host_sets_launch_speed():
    slow = case(host="Xeon Platinum 8259CL", batch_per_gpu=1.0)
    assert slow.cluster.host.name == "Xeon Platinum 8259CL"
    fast = case(host="13900K", batch_per_gpu=1.0)
    small = workload()
    times = [forecast_case(one, small).step.host_overhead_ms for one in (fast, slow)]
    assert times[0] < times[1]
    assert case().cluster.host is None
    with pytest.raises(TrainpaceError, match="unknown host CPU 'a fast one'"):
        case(host="a fast one")


@pytest.mark.parametrize(
    ("gpu", "gb_per_s"), [("V100 SXM2 32GB", 25), ("H100 SXM", 50), ("MI300X", 25)]
)
def test_missing_network_defaults_to_bandwidth_of_gpu_generation(gpu, gb_per_s):
    c = case(gpu_canonical=gpu, num_gpus=16.0, num_nodes=2.0)
    assert c.cluster.network_gb_per_s_per_device == gb_per_s
