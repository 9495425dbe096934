"""PyTorch snippets of a plan run on a small model on the CPU."""

import ast
import functools

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nouns import workload
from trainpace.core.execution import Execution
from trainpace.job import DataPath
from trainpace.plan import Choice
from trainpace.plan.settings import code_of, differing

START = Execution(micro_batch=4, precision="torch_fp32")
EIGHT = replace(START, nproc_per_node=8)


def code(before, after, data=(None, None)):
    a, b = Choice(execution=before), Choice(execution=after)
    a, b = (c if d is None else replace(c, data=d) for c, d in zip((a, b), data, strict=True))
    knobs = differing(a, b)
    assert knobs
    return code_of(knobs, a, b, workload())


WORKERS = (DataPath(workers=0), DataPath(workers=2))
CASES = {
    "bf16": code(START, replace(START, precision="amp_bf16")),
    "fp16": code(START, replace(START, precision="amp_fp16")),
    "tf32": code(START, replace(START, precision="tf32")),
    "fp32": code(START, replace(START, precision="fp32")),
    "torch_fp32": code(replace(START, precision="tf32"), START),
    "weights in bf16": code(START, replace(START, precision="bf16")),
    "weights in fp16": code(START, replace(START, precision="fp16")),
    "micro-batch": code(replace(START, accumulation=2), replace(START, micro_batch=8)),
    "accumulation": code(START, replace(START, micro_batch=2, accumulation=2)),
    "global batch": code(START, replace(START, accumulation=2)),
    "compile": code(START, replace(START, compile=True)),
    "no compile": code(replace(START, compile=True), START),
    "channels_last": code(START, replace(START, channels_last=True)),
    "contiguous": code(replace(START, channels_last=True), START),
    "recomputation": code(START, replace(START, activation_checkpointing="full")),
    "of attention": code(START, replace(START, activation_checkpointing="selective")),
    "none": code(replace(START, activation_checkpointing="full"), START),
    "ZeRO-1": code(EIGHT, replace(EIGHT, zero_stage=1)),
    "ZeRO-2": code(EIGHT, replace(EIGHT, zero_stage=2)),
    "ZeRO-3": code(EIGHT, replace(EIGHT, zero_stage=3)),
    "hybrid": code(EIGHT, replace(EIGHT, zero_stage=3, shard_size=4)),
    "kept gathered": code(EIGHT, replace(EIGHT, zero_stage=3, reshard_after_forward=False)),
    "no sharding": code(replace(EIGHT, zero_stage=3), EIGHT),
    "optimizer's offload": code(
        replace(EIGHT, zero_stage=2), replace(EIGHT, zero_stage=2, offload_optimizer=True)
    ),
    "tensor parallelism": code(EIGHT, replace(EIGHT, tp=8, micro_batch=32)),
    "GPUs": code(replace(START, accumulation=8), EIGHT),
    "workers": code(START, START, WORKERS),
    "offline": code(START, START, (WORKERS[0], DataPath(workers=2, precomputed=True))),
}
OFFLOADED = code(
    replace(EIGHT, zero_stage=3),
    replace(EIGHT, zero_stage=3, offload_optimizer=True, offload_parameters=True),
)
NEVER_RUN = (OFFLOADED, code(START, replace(START, precision="fp8")))
"""Snippets that are only compiled: CPUOffloadPolicy needs an accelerator, and torchao is not installed."""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def names(monkeypatch, tmp_path):
    """Names of a training loop for the snippets. torch.compile needs no C++ compiler, and shards are the original samples."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(
        "trainpace.shards.ShardDataset", lambda folder, transform: dataset, raising=False
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    dataset = TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(0, 2, (32,)))
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield {
        "torch": torch,
        "DataLoader": DataLoader,
        "model": model,
        "dataset": dataset,
        "blocks": [model[0], model[1]],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.CrossEntropyLoss(),
        "lr": 0.1,
        "inputs": torch.randn(4, 3, 8, 8),
        "targets": torch.randint(0, 2, (4,)),
        "x": torch.randn(4, 3, 8, 8),
        "attention": nn.Identity(),
        "random_transform": None,
    }
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.filterwarnings(
    "ignore:.*pin_memory", "ignore::DeprecationWarning"
)  # pin_memory without a GPU; a deprecation inside torch
@pytest.mark.parametrize("case", CASES)
def test_snippets_run_on_cpu(case, names, one_process):
    text = (
        CASES[case].replace('"cuda"', '"cpu"').replace("(2, 4)", "(1, 1)")
    )  # a mesh of one process
    exec(compile(text, case, "exec"), names)
    loss = names["loss_fn"](names["model"](names["inputs"]).float(), names["targets"])
    loss.backward()
    assert all(p.grad is not None for p in names["model"].parameters())
    for loader in filter(None, [names.get("loader")]):
        inputs, _ = next(iter(loader))
        assert len(inputs) == loader.batch_size


@pytest.mark.parametrize("text", NEVER_RUN)
def test_unrunnable_snippets_are_valid_python(text):
    ast.parse(text)


def test_every_setting_has_a_snippet():
    said = "\n".join((*CASES.values(), *NEVER_RUN))
    for words in (
        "autocast",
        "GradScaler",
        "torch.compile",
        "fully_shard",
        "DistributedDataParallel",
        "checkpoint(",
        "ZeroRedundancyOptimizer",
        "ShardDataset",
        "num_workers=2",
        "torchrun",
        "CPUOffloadPolicy",
    ):
        assert words in said


def test_snippet_numbers_match_the_plan():
    assert "batch_size=2," in CASES["accumulation"]
    assert "/ 2" in CASES["accumulation"]
    assert "accumulat" not in CASES["micro-batch"]
    assert "batch_size=4" in CASES["GPUs"]  # eight processes replace the accumulation
    assert "reshard_after_forward=False" in CASES["ZeRO-2"]
    assert "mesh=mesh" in CASES["hybrid"]
