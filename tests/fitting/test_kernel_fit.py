"""Measured calls become rows of a trace, and card constants are fitted on them."""

import json

import numpy as np
import pytest
import torch
from fitting.calls import Measured, rows_of_profiled, rows_of_work
from fitting.card_fit import fit_family
from fitting.cards import log_ratios
from fitting.families import FAMILIES, UNDECIDED, family_of, group_of
from fitting.kernel_rows import joined, kernel_rows
from fitting.lent_kernels import convolution
from msgspec.structs import replace

from trainpace.forecast.constants import CardConstants, KernelConstants
from trainpace.workload import CONV
from trainpace.workload.operators import Row


def record(*arguments):
    """Build a profiler record of a call from (dims, type, strides, concrete value)."""
    return {
        name: json.dumps(list(column))
        for name, column in zip(
            ("dims", "types", "strides", "concrete"), zip(*arguments, strict=True), strict=True
        )
    }


def tensor(*dims, strides=None, kind="float"):
    steps = np.cumprod([1, *dims[:0:-1]])[::-1].tolist()
    return list(dims), kind, list(strides or steps), ""


def test_profiled_convolution_equals_traced_row():
    pair = [2, 2]
    arguments = (
        tensor(8, 32, 14, 14, strides=(6272, 1, 448, 32), kind="c10::BFloat16"),
        tensor(64, 32, 3, 3, kind="c10::BFloat16"),
        *(([], "ScalarList", [], str(v)) for v in ([1, 1], pair, [1, 1])),
        *(([], "Scalar", [], v) for v in ("1", "False")),
    )
    (row,), nhwc = rows_of_profiled("aten::cudnn_convolution", record(*arguments))
    expected = convolution("conv", torch.bfloat16, 8, 32, 64, 14, 3, 2, 1, "NHWC")
    assert nhwc
    assert row == expected
    assert row.flops == 2 * 8 * 7 * 7 * 64 * 32 * 9


def test_profiled_copy_counts_read_and_written_bytes():
    (row,), nhwc = rows_of_profiled(
        "aten::copy_",
        record(tensor(4, 8, kind="c10::BFloat16"), tensor(4, 8), ([], "Scalar", [], "False")),
    )
    assert (row.kind, row.read_bytes, row.written_bytes, nhwc) == ("copy", 128, 64, False)


@pytest.mark.parametrize("call", ["aten::no_such_call", "aten::mul"])
def test_unsupported_profiled_calls_are_skipped(call):
    assert rows_of_profiled(call, record(([], "Scalar", [], "1"))) is None


def test_rows_of_work_exclude_input_creation():
    def make():
        x = torch.ones(4, 8, device="cuda")
        return lambda: torch.nn.functional.dropout(x + 1, 0.1)

    assert [row.function for row in rows_of_work(make)] == ["add", "native_dropout"]


def copy(numbers):
    return Row(
        "copy", "clone", False, 1, float(numbers), 4.0 * numbers, 4.0 * numbers, (numbers, numbers)
    )


def measured(device, us, numbers=2**28, operator="copy"):
    return Measured("a", device, "fp32", operator, (copy(numbers),), us)


def test_multi_row_kernels_sum_rows_and_are_selected_together():
    two = Measured("a", "T4", "fp32", "two", (copy(2**20), copy(2**22)), 5.0)
    table = kernel_rows([measured("A100 SXM 80GB", 7.0), two, measured("T4", 9.0)])
    seconds = table.by_kernel(table.device_s(KernelConstants()))
    assert seconds[1] == pytest.approx(table.device_s(KernelConstants())[1:3].sum())
    part = table.select(np.array([False, True, True]))
    assert part.by_kernel(part.device_s(KernelConstants())) == pytest.approx(seconds[1:])
    both = joined([part, table])
    assert both.by_kernel(both.device_s(KernelConstants())) == pytest.approx(
        [*seconds[1:], *seconds]
    )
    assert both.measured_ms.tolist() == [0.005, 0.009, 0.007, 0.005, 0.009]


def test_every_card_has_equal_weight():
    table = kernel_rows([measured("T4", 1.0)] * 3 + [measured("A100 SXM 80GB", 1.0)])
    assert table.weights() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_fit_recovers_card_and_shared_constants():
    """The simulated copies of two generations reach 0.5 and 0.8 of the bandwidth."""
    shares, c = {"T4": 0.5, "A100 SXM 80GB": 0.8}, KernelConstants()
    sizes = [2**n for n in range(26, 30)] * 10
    every = []
    for device, share in shares.items():
        table = kernel_rows([measured(device, 1.0, n) for n in sizes])
        us = 1e6 * table.device_s(replace(c, traffic_copy=share))
        every += [measured(device, float(t), n) for t, n in zip(us, sizes, strict=True)]
    table = kernel_rows(every)
    pooled = fit_family(table, ("traffic_copy",), c)["copy"]
    for key, device in table.devices.items():
        assert pooled.of(device)["traffic_copy"] == pytest.approx(shares[key[0]], rel=0.04)
    assert 0.5 < np.exp(pooled.shared[0]) < 0.8
    assert set(pooled.generations) == {"7.5", "8.0"}


def test_fit_is_independent_of_earlier_fits():
    """Otherwise a fit that holds out a card would use results of a fit that includes it."""
    c = KernelConstants()
    table = kernel_rows([measured("T4", us) for us in (30000.0, 31000.0)] * 20)
    first = fit_family(table, ("traffic_copy",), c)
    log_ratios(table, c, CardConstants(families=first))
    assert fit_family(table, ("traffic_copy",), c) == first


def test_family_constants_are_valid_and_unique():
    names = [name for family in FAMILIES.values() for name in family]
    assert len(names) == len(set(names))
    assert set(names) <= set(KernelConstants.__struct_fields__)
    assert set(UNDECIDED) < set(FAMILIES)
    assert {group_of(name) for name in FAMILIES["conv"]} == {"conv_plain", "conv_tensor", "conv"}


@pytest.mark.parametrize(("groups", "family"), [(1, "conv"), (32, "depthwise"), (4, "grouped")])
def test_convolution_family_follows_groups(groups, family):
    row = convolution("conv_wgrad", torch.float32, 2, 32, 32, 14, 3, 1, groups)
    assert row.dims[CONV.groups] == groups
    assert family_of((row,)) == family
