"""Packing documents into a row changes only the work of attention."""

import numpy as np
import pytest
from msgspec.structs import replace

from nouns import TOKENS, stacked
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import Forecaster, Target, packed
from trainpace.workload import ATTENTION, ATTENTION_KINDS, Documents, Workload


def half_only() -> Workload:
    whole = stacked()
    return replace(whole, forms={"half": whole.forms["half"]})


def row_of(lengths):
    return Documents.of(lengths, "here").packed(TOKENS)


def test_packing_changes_only_attention():
    whole = half_only()
    lengths = {256: 1, 128: 1, 64: 2}  # one full row
    found = packed(whole, row_of(lengths))
    before, after = whole.forms["half"].operators, found.forms["half"].operators
    attends = np.isin(before.kind, ATTENTION_KINDS)
    share = sum(n * length**2 for length, n in lengths.items()) / TOKENS**2
    assert after.flops[attends] == pytest.approx(before.flops[attends] * share)
    assert np.array_equal(after.flops[~attends], before.flops[~attends])
    assert np.array_equal(after.read_bytes, before.read_bytes)
    tokens = (
        after.dims[attends][:, ATTENTION.batch, 1] * after.dims[attends][:, ATTENTION.queries, 0]
    )
    assert tokens == pytest.approx(TOKENS)
    assert "4.0" in found.notes[-1]


def test_packing_one_document_per_row_changes_nothing():
    whole = half_only()
    found, expected = (
        w.forms["half"].operators for w in (packed(whole, row_of({TOKENS: 3})), whole)
    )
    assert np.array_equal(found.dims, expected.dims)
    assert np.array_equal(found.flops, expected.flops)


def test_packing_shorter_documents_takes_less_time():
    target = Target(Cluster(device=find_device("H100")))
    whole, execution = half_only(), Execution(micro_batch=64, precision="bf16", optimizer="adam")
    times = [
        Forecaster(packed(whole, row_of({length: 64})), target).forecast(execution).step.total_ms
        for length in (512, 256, 64)
    ]
    assert times == sorted(times, reverse=True)
    assert times[2] < times[0]


def test_packing_rejects_windowed_attention():
    whole = half_only()
    operators = whole.forms["half"].operators
    dims, flops = operators.dims.astype(float), operators.flops.astype(float)
    rows = np.isin(operators.kind, ATTENTION_KINDS)
    dims[rows, ATTENTION.seen, 0] = TOKENS / 8
    flops[rows] /= 4  # causal attention sees half of the keys
    form = replace(whole.forms["half"], operators=replace(operators, dims=dims, flops=flops))
    with pytest.raises(TrainpaceError, match="attends within windows"):
        packed(replace(whole, forms={"half": form}), row_of({64: 8}))


def test_packing_rejects_fp32_attention():
    with pytest.raises(TrainpaceError, match="16-bit"):
        packed(stacked(), row_of({64: 8}))
