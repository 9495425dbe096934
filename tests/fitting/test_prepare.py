"""Implicit conventions of known collections are written out as table columns."""

import sys
from pathlib import Path

import pytest
from fitting.prepare import CONFIGURATIONS, FILES, prepared, prepared_case

from fitting import prepare
from trainpace.core.errors import TrainpaceError
from trainpace.core.hardware import find_host
from trainpace.forecast import MeasuredRun, case_of, read_runs

HERE = Path(".")


def case(tmp_path=HERE, **stated):
    values = {
        "index": 0,
        "model_spec": "torchvision:resnet50",
        "gpu_canonical": "V100-SXM-32GB",
        "precision": "fp32",
        "batch_per_gpu": 32.0,
        "step_time_ms": 100.0,
    }
    return prepared_case(MeasuredRun(**values | stated), HERE, tmp_path)


def test_plain_run_is_unchanged():
    run = MeasuredRun(
        index=0,
        model_spec="resnet50",
        precision="fp32",
        batch_per_gpu=32.0,
        parallelism="dp=8,ac=full",
        notes="torch.compile",
        framework="pytorch",
        framework_version="2.3",
        optimizer="sgd",
        peak_mem_gib=3.0,
    )
    assert prepared(run, HERE, HERE) == run


def megatron(tmp_path, **stated):
    values = {
        "index": 0,
        "file": "megatron_papers_nemo",
        "model": "GPT 76B",
        "framework": "pytorch/Megatron-LM",
        "framework_version": "2021",
        "model_variant_or_config": "layers=60 hidden=10240 heads=80 vocab=51200",
        "gpu_canonical": "A100-SXM-80GB",
        "num_gpus": 1024.0,
        "num_nodes": 128.0,
        "precision": "fp16",
        "batch_per_gpu": 2.0,
        "global_batch": 1792.0,
        "seq_len": 2048.0,
        "parallelism": "tp=8,pp=4,vp_layers=5,dp=32,ac=full(uniform)",
        "tflops_per_gpu": 140.0,
        "mode": "train",
        "notes": "FLOPs counted INCLUDE the activation recomputation",
        "interconnect": "NVSwitch + 8x HDR 200Gb/s InfiniBand per node",
    }
    return prepared_case(MeasuredRun(**values | stated), HERE, tmp_path)


def test_megatron_bridge_uses_megatron_core_engine(tmp_path):
    framework = {
        "framework": "pytorch/Megatron-Bridge",
        "framework_version": "26.04 NeMo Container",
    }
    bridge = megatron(tmp_path, file="megatron_bridge", **framework)
    e = bridge.execution
    assert (e.engine, e.sequence_parallel, e.async_tensor_parallel) == ("megatron_core", True, True)
    auto = case(framework="NeMo AutoModel (PyTorch DTensor)", parallelism="fsdp=8", num_gpus=8.0)
    assert auto.execution.engine == "ddp"


def test_newer_nemo_containers_overlap_expert_exchange(tmp_path):
    bridge = {
        "file": "megatron_bridge",
        "model": "DeepSeekV3",
        "framework": "pytorch/Megatron-Bridge",
        "gpu": "GB200",
        "gpu_canonical": "GB200",
        "num_gpus": 256.0,
        "num_nodes": None,
        "precision": "fp8",
        "batch_per_gpu": 1.0,
        "global_batch": 4096.0,
        "seq_len": 4096.0,
        "parallelism": "tp=1,pp=4,cp=1,vp=4,ep=64",
        "notes": "precision label MXFP8",
        "model_spec": "resnet50",
        "tflops_per_gpu": None,
        "model_variant_or_config": "",
    }
    exchanges = [
        megatron(
            tmp_path, **bridge, framework_version=f"{release} NeMo Container"
        ).execution.expert_exchange
        for release in ("26.04", "26.06.01", "26.08")
    ]
    assert exchanges == ["deep_ep", "overlapped", "overlapped"]
    newest = {"framework_version": "26.08 NeMo Container"}
    assert (
        megatron(tmp_path, **bridge | newest | {"model": "Kimi_K2"}).execution.expert_exchange
        == "deep_ep"
    )
    assert megatron(tmp_path, **bridge | newest).software.optimizer == "fused"


def test_automodel_expert_runs_use_full_checkpointing():
    """Its benchmark configurations set activation_checkpointing and fake_balanced_gate."""
    auto = {
        "file": "nemo_automodel",
        "framework": "NeMo AutoModel (PyTorch DTensor)",
        "num_gpus": 8.0,
    }
    e = case(
        **auto,
        parallelism="ep=8 fsdp=8",
        notes="kernels TE + DeepEP; mock data, balanced fake router",
    ).execution
    assert (e.activation_checkpointing, e.expert_nodes, e.expert_exchange) == ("full", 1, "deep_ep")
    assert case(**auto, parallelism="fsdp=8").execution.activation_checkpointing == "none"


def test_megatron_run_is_read_from_sizes_and_pipeline(tmp_path):
    c = megatron(tmp_path)
    e = c.execution
    assert (e.micro_batch, e.accumulation, e.data_parallel_size, e.global_batch) == (
        2,
        28,
        32,
        1792,
    )
    assert (e.pipeline_schedule, e.virtual_stages) == (
        "interleaved",
        3,
    )  # 60 layers / (4 stages x 5)
    assert (e.activation_checkpointing, e.engine, e.sequence_parallel) == (
        "full",
        "unoverlapped",
        False,
    )
    assert c.cluster.network_gb_per_s_per_device == 25
    assert (c.variant.legacy, c.software.slow_host, c.loads_all_kernels, e.compile) == (
        True,
        "",
        True,
        True,
    )
    # Narayanan et al. 2021 report 140 TFLOP/s: 76 billion parameters, 4 passes of 2 FLOPs each, plus attention
    at_least = 8 * 76.1e9 * 1792 * 2048 / (1024 * 140e12) * 1e3
    assert at_least < c.measured_ms < 1.1 * at_least


def test_unprepared_model_sizes_have_no_definition(tmp_path):
    assert case_of(megatron(tmp_path).run, HERE).spec.startswith("transformers:")
    with pytest.raises(TrainpaceError, match="no model definition"):
        case_of(
            MeasuredRun(
                index=0, model="GPT 76B", model_variant_or_config="layers=60 hidden=10240 heads=80"
            ),
            HERE,
        )


def test_recomputation_is_inferred_from_flops(tmp_path):
    """In Megatron's table of 2020, 136.8 TFLOP/s and 1026 ms are consistent with four passes, not with three."""
    c = megatron(
        tmp_path,
        model="GPT-2 2B",
        model_variant_or_config="layers=30 hidden=2304 heads=18 vocab=51200",
        num_gpus=2.0,
        num_nodes=1.0,
        batch_per_gpu=16.0,
        global_batch=16.0,
        seq_len=1024.0,
        parallelism="tp=2,dp=1",
        tflops_per_gpu=136.8,
        step_time_ms=1026.0,
    )
    assert c.execution.activation_checkpointing == "full"


def test_nemo_runs_overlap_communication(tmp_path):
    c = megatron(
        tmp_path,
        framework="pytorch/NeMo",
        framework_version="NeMo 24.07 container",
        parallelism="tp=8,pp=4",
        precision="bf16",
    )
    e = c.execution
    assert (e.engine, e.zero_stage, e.sequence_parallel, e.async_tensor_parallel) == (
        "megatron_core",
        1,
        True,
        True,
    )
    assert (c.software.attention, c.variant.legacy) == (
        "flash2",
        False,
    )  # default of current torch on an A100
    assert "an optimizer distributed" in c.assumed


def test_torchtitan_uses_one_micro_batch_per_pipeline_stage():
    c = case(
        file="torchtitan",
        gpu_canonical="H100-SXM-96GB",
        precision="bf16",
        num_gpus=512.0,
        num_nodes=64.0,
        batch_per_gpu=32.0,
        global_batch=256.0,
        parallelism="fsdp=8,tp=8,pp=8(Interleaved 1F1B),async_tp,ac=full",
    )
    e = c.execution
    assert (e.micro_batch, e.accumulation, e.zero_stage, e.virtual_stages) == (4, 8, 3, 2)
    assert e.async_tensor_parallel
    assert e.sequence_parallel
    assert c.cluster.network_gb_per_s_per_device == 50  # not stated; the default for H100 nodes
    assert c.peak == "reserved"
    assert "8 micro-batches" in c.assumed


@pytest.mark.parametrize(
    ("parallelism", "micro_batch", "accumulation", "schedule"),
    [("dp=4", 2, 1, "1f1b"), ("tp=4", 8, 1, "1f1b"), ("pp=4", 2, 4, "gpipe")],
)
def test_neusight_batch_is_global(parallelism, micro_batch, accumulation, schedule):
    c = case(
        file="neusight_labels",
        num_gpus=4.0,
        batch_per_gpu=8.0,
        parallelism=parallelism,
        mode="forward_backward",
        gpu_canonical="A100-SXM-40GB",
    )
    e = c.execution
    assert (e.micro_batch, e.accumulation, e.pipeline_schedule) == (
        micro_batch,
        accumulation,
        schedule,
    )
    assert e.global_batch == 8
    assert e.optimizer == "none"
    with pytest.raises(TrainpaceError, match="per rank"):
        case(file="neusight_labels", num_gpus=4.0, batch_per_gpu=6.0, parallelism="dp=4")


def test_bloom_precision_follows_date_of_row():
    def precision(notes):
        return case(file="bigscience_bloom", precision="bf16", notes=notes).execution.precision

    assert precision("section 'x'; row date 02-25") == "fp16"
    assert precision("section 'Rebalancing layers'; row date 02-28") == "bf16"
    assert precision("") == "bf16"


def test_nvidia_examples_use_cudnn_benchmark_only_for_images(tmp_path):
    examples = "pytorch (NVIDIA DeepLearningExamples, NGC container)"
    image = case(framework=examples, precision="amp_fp16")
    assert (image.peak, image.run.cudnn_benchmark, image.execution.precision) == (
        "device",
        "yes",
        "amp_fp16",
    )
    (tmp_path / "bert.json").write_text("{}")
    text = case(
        framework=examples, precision="amp_fp16", model_spec=f"transformers:{tmp_path}/bert.json"
    )
    assert (text.run.cudnn_benchmark, text.execution.precision, text.execution.engine) == (
        "",
        "fp16",
        "unoverlapped",
    )
    assert (
        text.software.rewrites.eager_attention
    )  # their BERT implements attention explicitly for every torch version
    assert not image.software.rewrites.eager_attention


@pytest.mark.parametrize(
    ("stated", "column", "value"),
    [
        ({"notes": "peak by nvidia-smi"}, "peak_memory_kind", "device"),
        ({"notes": "with H2D copy"}, "host_copy", "yes"),
        ({"file": "mosaic_llm_foundry"}, "attention", "flash1"),
        ({"framework": "pytorch/timm", "optimizer": "SGD"}, "optimizer", "sgd momentum"),
        ({"model_variant_or_config": "GBS=512", "global_batch": 64.0}, "global_batch", 512.0),
    ],
)
def test_notes_become_columns(stated, column, value):
    assert getattr(case(**stated).run, column) == value


def test_written_table_equals_prepared_runs(tmp_path, monkeypatch):
    text = "file,model_spec,model,model_variant_or_config,gpu,precision,batch_per_gpu,seq_len,step_time_ms,notes\n"
    text += "bigscience_bloom,,GPT 1B,layers=24 hidden=2304 heads=24,A100,bf16,2,2048,90,row date 02-25\na,resnet18,,,T4,fp32,8,,7,\n"
    for name in FILES:
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(
        sys, "argv", ["prepare", "--data", str(tmp_path), "--output", str(tmp_path / "out")]
    )
    prepare.main()
    for name in FILES:
        rows, again = read_runs(tmp_path / name), read_runs(tmp_path / "out" / name)
        assert again == [prepared(run, tmp_path, tmp_path / "out" / CONFIGURATIONS) for run in rows]
        assert case_of(again[0], tmp_path).execution.precision == "fp16"
        assert Path(again[0].model_spec.partition(":")[2]).is_file()


@pytest.mark.parametrize(
    ("file", "gpu", "notes", "host"),
    [
        ("profet_aws", "T4", "", "Xeon Platinum 8259CL"),
        ("profet_aws", "V100-SXM-16GB", "", "Xeon E5-2686 v4"),
        ("nvidia_deeplearningexamples", "A100 80GB", "NVIDIA DGX A100 (8x A100 80GB)", "EPYC 7742"),
        (
            "nvidia_deeplearningexamples",
            "V100 32GB",
            "NVIDIA DGX-2 (16x V100 32GB)",
            "Xeon Platinum 8168",
        ),
        ("nvidia_deeplearningexamples", "A100 80GB", "platform not said", ""),
        ("megatron_bridge", "GB300", "", "Grace"),
        ("timm_train_rtx3090", "RTX 3090", "", ""),
    ],
)
def test_collection_and_notes_determine_host(file, gpu, notes, host):
    run = MeasuredRun(index=0, file=file, gpu=gpu, notes=notes)
    assert prepare.host_of(run) == host


def test_every_collection_host_is_in_catalogue():
    for cpus in prepare.HOSTS.values():
        for cpu in cpus.values():
            assert find_host(cpu).name == cpu


def test_stated_host_overrides_collection_host():
    run = MeasuredRun(
        index=0,
        file="profet_aws",
        gpu="T4",
        model_spec="resnet50",
        precision="fp32",
        batch_per_gpu=32.0,
        host="13900K",
    )
    assert prepared(run, HERE, HERE).host == "13900K"


def languini(tmp_path, **stated):
    text = "L=4 h=768 mlp=3072 heads=12 head_dim=64 vocab=16384 params=53912064 use_flash=False"
    values = {
        "file": "languini_throughput",
        "model": "languini-gpt-tiny",
        "model_variant_or_config": text,
        "model_spec": "",
        "framework_version": "torch 2.x (2023)",
        "precision": "amp_fp16",
        "seq_len": 512.0,
        "compile": "compile",
    }
    return case(tmp_path, **values | stated)


@pytest.mark.parametrize("card", ["P100", "A100-SXM-80GB"])
def test_languini_runs_use_eager_attention_and_torch_2023(card, tmp_path):
    c = languini(tmp_path, gpu_canonical=card)
    assert (c.software.attention, c.software.slow_host, c.variant.legacy) == ("eager", "", False)
    assert (c.execution.compile, c.variant.sequence_length) == (True, 512)


def network(**stated):
    values = {
        "file": "nvidia_deeplearningexamples",
        "model": "efficientnet",
        "model_variant_or_config": "Model=efficientnet-b4",
        "model_spec": "",
        "framework": "pytorch",
        "framework_version": "NGC pytorch:21.03",
        "gpu": "A100 80GB",
        "gpu_canonical": "A100-?-80GB",
        "notes": "NVIDIA A100 (8x A100 80GB)",
    }
    return case(**values | stated)


def test_nvidia_image_networks_are_recognized_by_name():
    c = network(num_gpus=32.0, num_nodes=1.0, grad_accum=2.0)
    assert (c.spec, c.software.version, c.run.cudnn_benchmark) == (
        "timm:efficientnet_b4",
        (1, 9, 0),
        "yes",
    )
    assert (c.execution.nnodes, c.execution.nproc_per_node, c.execution.accumulation) == (4, 8, 2)
    assert (
        network(model="se-resnext101-32x4d", model_variant_or_config="").spec
        == "timm:seresnext101_32x4d"
    )


@pytest.mark.parametrize(
    "stated",
    [
        {"model_variant_or_config": "Model=efficientnet-quant-b4"},
        {"model_variant_or_config": "Model=efficientnet-widese-b4"},
        {"model": "Jasper", "model_variant_or_config": ""},
        {"file": "somebody_else"},
        {
            "gpu": "V100 32GB",
            "gpu_canonical": "V100-?-32GB",
            "num_gpus": 1.0,
        },  # 1/18 of the rate of eight GPUs
    ],
)
def test_unknown_nvidia_image_networks_are_rejected(stated):
    with pytest.raises(TrainpaceError, match="no model definition"):
        network(**stated)


def test_fms_acceleration_notes_set_checkpointing_and_sharding(tmp_path):
    c = case(
        tmp_path,
        file="fms_acceleration",
        model="ibm/PowerLM-3b",
        model_variant_or_config="framework=none; full fine-tuning",
        model_spec="",
        framework_version="torch 2.4.1, transformers 4.48.1",
        gpu_canonical="A100-SXM-80GB",
        precision="bf16",
        num_gpus=2.0,
        seq_len=4096.0,
        parallelism="FSDP full shard x2",
        notes="gradient checkpointing on; FlashAttention",
    )
    assert (
        c.execution.zero_stage,
        c.execution.activation_checkpointing,
        c.variant.checkpointing,
    ) == (3, "full", True)
    assert c.software.attention == "flash2"


def test_hsdp_shards_within_node():
    c = case(
        file="fms_fsdp",
        num_gpus=16.0,
        num_nodes=2.0,
        parallelism="HSDP x16",
        framework_version="2.4",
    )
    assert (c.execution.zero_stage, c.execution.shard_size) == (3, 8)


def test_torchao_runs_are_compiled_and_only_torch_optimizer_accepted():
    vit = {
        "file": "torchao_tables",
        "model": "vit",
        "model_spec": "timm:vit_huge_patch14_224",
        "precision": "bf16",
        "notes": "BF16 autocast; batch 8",
    }
    c = case(optimizer="PyTorch fused AdamW", **vit)
    assert (c.execution.precision, c.execution.compile, c.software.optimizer) == (
        "amp_bf16",
        True,
        "fused",
    )
    with pytest.raises(TrainpaceError, match="no model definition"):
        case(optimizer="ao 8-bit", **vit)
