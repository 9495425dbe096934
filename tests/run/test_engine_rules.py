"""Unsupported settings are rejected before anything starts, and the chosen engine supports the execution."""

import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.run.trial import LoaderSettings, Trial, check_engine, engine_for


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["fp32", "amp_bf16", "bf16"]),
)
def test_chosen_engine_supports_every_execution(ranks, stage, optimizer, parameters, precision):
    assume(stage >= 1 or not optimizer)
    assume(stage == 3 or not parameters)
    e = Execution(
        nproc_per_node=ranks,
        zero_stage=stage,
        offload_optimizer=optimizer,
        offload_parameters=parameters,
        precision=precision,
    )
    check_engine(engine_for(e), e)


@pytest.mark.parametrize(
    ("engine", "execution"),
    [
        ("plain", {"nproc_per_node": 2}),
        ("ddp", {"nproc_per_node": 2, "zero_stage": 2}),
        ("fsdp2", {"zero_stage": 1}),
        ("fsdp2", {"zero_stage": 3, "precision": "amp_fp16"}),
        ("fsdp2", {"zero_stage": 3, "offload_optimizer": True}),
        ("deepspeed", {"zero_stage": 2, "offload_parameters": True}),
        ("deepspeed", {"zero_stage": 0, "offload_optimizer": True}),
        ("deepspeed", {"nproc_per_node": 4, "zero_stage": 3, "shard_size": 2}),
        ("deepspeed", {"zero_stage": 3, "reshard_after_forward": False}),
        ("ddp", {"nproc_per_node": 2, "tp": 2}),
        ("ddp", {"engine": "data_parallel"}),
        ("ddp", {"offload_parameters": True}),
        ("plain", {"activation_checkpointing": "selective"}),
        ("plain", {"precision": "fp8"}),
    ],
)
def test_unsupported_executions_are_rejected(engine, execution):
    with pytest.raises(Contradiction) as caught:
        check_engine(engine, Execution(**execution))
    assert caught.value.hint


def test_engine_rules_do_not_import_torch_or_engines():
    code = "import sys, trainpace.run.trial; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert not any(f"'{name}'" in loaded for name in ("torch", "lightning", "deepspeed"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmup_steps": -1},
        {"steps": 0},
        {"seconds": 0.0},
        {"seconds": float("inf")},
        {"threads_per_process": 0},
    ],
)
def test_trial_rejects_invalid_values(wrong):
    with pytest.raises(TrainpaceError):
        Trial(task="m.py:task", execution=Execution(), **wrong)


@pytest.mark.parametrize("wrong", [{"workers": -1}, {"workers": 1, "prefetch_factor": 0}])
def test_loader_settings_reject_invalid_values(wrong):
    with pytest.raises(TrainpaceError):
        LoaderSettings(**wrong)
