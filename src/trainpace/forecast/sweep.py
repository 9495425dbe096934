"""Many batch sizes on many devices at once, as array expressions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainpace.execution import Execution
from trainpace.forecast.constants import KernelConstants, fitted_constants
from trainpace.forecast.kernels import KernelTimes, kernel_table
from trainpace.forecast.rates import Rates, sustained_rates
from trainpace.forecast.step import PhaseTimes, host_us, phase_sums
from trainpace.hardware.device import Device
from trainpace.workload import Workload

Floats = NDArray[np.float64]


def sweep_ms(
    workload: Workload,
    execution: Execution,
    devices: Sequence[Device],
    batches: Sequence[int],
    constants: KernelConstants | None = None,
) -> Floats:
    """Step times (devices x batches) in milliseconds, of one device each. A device that cannot compute in this
    precision gives NaN.

    The same numbers as `forecast` gives one by one, for an execution on a single device without accumulation.
    """
    c = constants or fitted_constants()
    operators = workload.form(execution.precision).operators
    table = kernel_table(operators)
    needs_full, needs_half = bool((~operators.half).any()), bool(operators.half.any())
    found = [sustained_rates(device, execution.precision, needs_full, needs_half, c) for device in devices]
    able = [i for i, rates in enumerate(found) if isinstance(rates, Rates)]
    result = np.full((len(devices), len(batches)), np.nan)
    if not able:
        return result
    factor = c.compile_host if execution.compile else 1.0
    host_ms = phase_sums(operators, host_us(operators, c) * 1e-3) * factor
    sizes = np.asarray(batches, dtype=np.float64)[:, None]
    for i in able:  # one device at a time: its arrays stay in the cache
        rates = found[i]
        assert isinstance(rates, Rates)
        times: KernelTimes = table.times(sizes, rates, c, execution.channels_last, execution.compile)
        phases = PhaseTimes(phase_sums(operators, 1e3 * times.device_s), host_ms)
        result[i] = phases.together_ms().sum(axis=-1) + c.host_step_us * 1e-3 * factor
    return result
