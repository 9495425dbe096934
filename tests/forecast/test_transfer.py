"""A measurement on one card corrects the forecast on another."""

import pytest
from msgspec.structs import replace

from nouns import measurement, workload
from trainpace.errors import TrainpaceError
from trainpace.execution import Execution
from trainpace.forecast import Forecaster, Target
from trainpace.forecast.transfer import transfer_ratio, transferred
from trainpace.hardware import Cluster, find_device

V100, A100 = (Forecaster(workload(), Target(Cluster(device=find_device(name)))) for name in ("V100", "A100"))
RUN = Execution(micro_batch=64)


def measured(factor):
    there = V100.forecast(RUN).step.total_ms
    return replace(measurement(), model=workload().model, execution=RUN, median_ms=there * factor)


def test_a_model_that_is_slower_than_forecast_is_slower_elsewhere_too():
    ratio = transfer_ratio(measured(1.3), V100)
    assert ratio == pytest.approx(1.3)
    plain = A100.forecast(RUN)
    sharper = transferred(plain, ratio, "V100")
    assert sharper.step.total_ms == pytest.approx(1.3 * plain.step.total_ms)
    assert sharper.provenance == "transferred"
    widths = [f.step_time_interval_ms.high / f.step_time_interval_ms.low for f in (plain, sharper)]
    assert widths[1] == pytest.approx(widths[0])


def test_a_measurement_of_something_else_is_refused():
    with pytest.raises(TrainpaceError, match="of the same model"):
        transfer_ratio(replace(measured(1.0), model="other"), V100)
    with pytest.raises(TrainpaceError, match="too far apart"):
        transfer_ratio(measured(30.0), V100)
