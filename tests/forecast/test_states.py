"""Bytes per parameter match the papers and documentation of each engine."""

import numpy as np
import pytest

from nouns import stacked, step_memory
from trainpace.core.execution import Execution
from trainpace.core.units import BYTES_PER_GIB
from trainpace.forecast import Grid
from trainpace.forecast.memory import widths

WORKLOAD = stacked()
D = 8
"""Number of data-parallel ranks."""


def bytes_a_parameter(precision="bf16", **changes):
    """Return unsharded bytes per parameter with Adam and 16-bit weights: (weights, gradients, states, extra during the update)."""
    execution = Execution(
        micro_batch=1, precision=precision, nproc_per_node=D * changes.get("tp", 1), **changes
    )
    w = widths(Grid.of([execution]), half=True, trains=True)
    shards, gradients, states, masters, update = (
        float(a[0, 0]) for a in (w.shards, w.gradients, w.states, w.masters, w.update)
    )
    return 2 * shards, 2 * gradients, 4 * states + 2 * masters, 2 * update


@pytest.mark.parametrize(
    ("changes", "stated"),
    [
        ({}, (2, 2, 4, 0)),  # torch.optim keeps its states in the dtype of the parameters
        ({"tp": 2}, (2, 4, 12, 0)),  # Megatron Core: 18
        ({"tp": 2, "zero_stage": 1}, (2, 4, 12, 0)),  # 6 + 12/d
        ({"tp": 2, "zero_stage": 1, "precision": "fp16"}, (2, 2, 12, 6)),  # at least 4 + 16/d
        ({"zero_stage": 1}, (2, 2, 12, 6)),  # Rajbhandari et al. 2020: 4 + 12/d
        ({"zero_stage": 3}, (4, 4, 8, 0)),  # FSDP2's shards are the fp32 parameters
    ],
)
def test_engines_keep_documented_bytes_per_parameter(changes, stated):
    assert bytes_a_parameter(**changes) == stated


def test_unsharded_zero1_update_is_the_memory_peak():
    """DeepSpeed ZeRO-1 on one data-parallel rank holds 2 + 2 + 12 + 6 bytes per parameter, without activations."""
    run = Execution(
        micro_batch=1,
        nproc_per_node=1,
        precision="fp16",
        zero_stage=1,
        activation_checkpointing="full",
    )
    memory = step_memory(WORKLOAD.forms["half"], run, True)
    assert memory.allocated_gib * BYTES_PER_GIB == pytest.approx(22 * WORKLOAD.parameters, rel=0.02)


def test_fp32_forms_have_no_master_weights():
    for stage in range(3):
        w = widths(
            Grid.of([Execution(nproc_per_node=8, zero_stage=stage)]), half=False, trains=True
        )
        assert all(np.all(factor == 1) for factor in (w.shards, w.gathered, w.states, w.gradients))
        assert not w.masters.any()
        assert not w.update.any()
