"""The table of measured runs gives the same times as single runs."""

import numpy as np
import pytest
from fitting.runs import RunTable
from msgspec.structs import replace

from nouns import workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.software import Software
from trainpace.forecast import Case, MeasuredRun, fitted_constants
from trainpace.forecast.kernels import KernelTable
from trainpace.forecast.rates import sustained_rates
from trainpace.forecast.software import as_run
from trainpace.workload import PLAIN


def pair(device, batch, precision="fp32", compiled=False):
    execution = Execution(micro_batch=batch, precision=precision, compile=compiled)
    form = "fp32" if precision == "fp32" else "amp"
    case = Case(
        MeasuredRun(index=0),
        "model",
        form,
        PLAIN,
        execution,
        Cluster(device=find_device(device)),
        5.0,
    )
    return case, with_activation(workload()) if compiled else workload()


def with_activation(work):
    """Return the workload with the backward matmul replaced by an activation that torch.compile fuses."""
    forms = {}
    for name, form in work.forms.items():
        o = form.operators
        dims = o.dims.copy()
        dims[1] = 0
        dims[1, :2, 1] = 4096
        kinds = {
            "kind": ("gemm", "elementwise", "optimizer"),
            "function": ("addmm", "relu", "_foreach_add_"),
        }
        forms[name] = replace(form, operators=replace(o, dims=dims, **kinds))
    return replace(work, forms=forms)


PAIRS = [
    pair("T4", 4),
    pair("T4", 4),
    pair("T4", 32),
    pair("A100", 4, "amp_fp16"),
    pair("A100", 4, "amp_fp16", compiled=True),
    pair("P100", 4),
]


def alone(case, work, c):
    """Return the seconds of the run's rows from the forecaster's kernel table."""
    e = case.execution
    table = KernelTable(work.forms[case.form].operators)
    rates = sustained_rates(case.cluster.device, e.precision, True, True, c)
    times = table.times(np.array(float(e.micro_batch)), rates, c, e.channels_last, e.compile)
    return np.broadcast_to(times.device_s, (len(table.operators),))


def test_run_table_times_equal_single_run_times():
    c = fitted_constants()
    expected = np.concatenate([alone(case, work, c) for case, work in PAIRS])
    assert RunTable(PAIRS).device_s(c) == pytest.approx(expected, rel=1e-12)


def test_run_table_applies_software_rewrites():
    case, work = pair("A100", 4, "amp_fp16")
    software = Software(optimizer="for_loop")
    rewritten = as_run(work, software.rewrites)
    assert rewritten is not work
    table = RunTable([(case._replace(software=software), work)])
    assert table.operators.launches == pytest.approx(rewritten.forms[case.form].operators.launches)


@pytest.mark.parametrize(
    ("name", "count"), [("pre_volta", 3), ("compile_launches", 3), ("latency_us", 18)]
)
def test_changed_recomputes_exactly_the_affected_rows(name, count):
    table, c = RunTable(PAIRS), fitted_constants()
    value = 1.3 * getattr(c, name)
    rows, seconds = table.changed(c, name, value)
    expected, together = table.device_s(replace(c, **{name: value})), table.device_s(c)
    assert (expected != together).any()
    together[rows] = seconds
    assert together == pytest.approx(expected, rel=1e-12)
    assert len(rows) == count
