"""Selective recomputation repeats unfused attention kernels, or half of the matmuls if attention is fused."""

import numpy as np
import pytest

from trainpace.forecast.ranks import kept_bytes, repeated_share
from trainpace.workload import Blocks, Operators


def table(*rows: tuple[str, str, float]) -> Operators:
    """Return a table from rows of (kind, phase, bytes written per sample), 4 operators each."""
    n = len(rows)
    dims = np.zeros((n, 16, 2))
    flops = np.zeros((n, 2))
    for i, (kind, _, _) in enumerate(rows):
        if kind == "gemm":
            dims[i, :4, 0] = (1, 1, 8, 8)
            dims[i, 1] = (0, 1)
            flops[i, 1] = 2 * 8 * 8
        if kind == "attention":
            dims[i, :5, 0] = (0, 2, 4, 4, 8)
            dims[i, 0] = (0, 1)
            flops[i, 1] = 2 * 2 * 2 * 4 * 4 * 8
    written = np.array([[0.0, size] for *_, size in rows])
    return Operators(
        kind=tuple(kind for kind, *_ in rows),
        function=("f",) * n,
        phase=tuple(phase for _, phase, _ in rows),
        module=("m",) * n,
        half=np.ones(n, bool),
        count=np.full(n, 4),
        launches=np.ones(n),
        flops=flops,
        read_bytes=written,
        written_bytes=written,
        dims=dims,
    )


def blocks(operators: Operators, attention_saved: float) -> Blocks:
    counts = np.array([4 if kind != "embedding" else 0 for kind in operators.kind])
    return Blocks(
        module="Block",
        count=4,
        heads=2,
        key_value_heads=2,
        parameters=64,
        tensor_parameters=64,
        outside_parameters=0,
        outside_tensor_parameters=0,
        tied_parameters=0,
        operator_counts=counts,
        roles=("",) * len(counts),
        input_bytes=(0.0, 10.0),
        saved_bytes=(0.0, 400.0),
        sharded_saved_bytes=(0.0, 300.0),
        attention_saved_bytes=(0.0, attention_saved),
        working_bytes=(0.0, 50.0),
        outside_saved_bytes=(0.0, 0.0),
    )


FUSED = table(
    ("embedding", "forward", 8),
    ("norm", "forward", 10),
    ("gemm", "forward", 60),
    ("attention", "forward", 20),
    ("gemm", "backward", 60),
)


def test_selective_with_fused_attention_repeats_half_of_matmuls():
    assert repeated_share(FUSED, blocks(FUSED, 0.0)).tolist() == [0, 1, 0.5, 0, 0]


def test_selective_keeps_input_attention_and_half_of_matmuls():
    assert kept_bytes(FUSED, blocks(FUSED, 0.0)) == pytest.approx((0.0, 10 + 0.5 * 60 + 20))


def test_selective_repeats_only_unfused_attention():
    pieces = table(
        ("norm", "forward", 10),
        ("gemm", "forward", 60),
        ("softmax", "forward", 20),
        ("softmax", "backward", 20),
    )
    assert repeated_share(pieces, blocks(pieces, 100.0)).tolist() == [0, 0, 1, 0]


def test_model_without_blocks_repeats_nothing():
    assert not repeated_share(FUSED, None).any()
