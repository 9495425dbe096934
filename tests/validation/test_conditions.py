"""A run's own conditions: what it states, and what its time and software imply."""

from pathlib import Path

import pytest

from trainpace.errors import TrainpaceError
from trainpace.validation.conditions import case_of
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
        num_gpus=64.0, num_nodes=8.0, parallelism="dp=1,tp=8,pp=8,zero=1", interconnect="RDMA 400 Gb/s per GPU"
    )
    assert (tensor.execution.tp, tensor.execution.pp, tensor.execution.zero_stage) == (8, 8, 1)
    assert tensor.cluster.network_gb_per_s_per_device == 50


def test_step_time_from_throughput():
    c = case(step_time_ms=None, samples_per_sec=640.0, num_gpus=2.0, parallelism="dp=2", global_batch=64.0)
    assert c.measured_ms == pytest.approx(100.0)
    tokens = case(step_time_ms=None, tokens_per_sec=32000.0, seq_len=100.0, global_batch=32.0)
    assert tokens.measured_ms == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("stated", "word"),
    [
        ({"precision": ""}, "no precision"),
        ({"precision": "int8"}, "int8"),
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
