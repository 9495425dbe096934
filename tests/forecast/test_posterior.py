"""Measurements correct forecasts of related runs. Closer runs get larger corrections."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nouns import measurement, workload
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import (
    Forecaster,
    Grid,
    Measured,
    Posterior,
    Target,
    observe,
    observe_elsewhere,
)
from trainpace.forecast.uncertainty import (
    MEASURING_SD,
    PARTS,
    Observed,
    Relatedness,
    Run,
    covariance,
    fitted_spreads,
)

V100, A100 = (
    Forecaster(workload(), Target(Cluster(device=find_device(name)))) for name in ("V100", "A100")
)
RUN = Execution(micro_batch=64)
KIN = Relatedness(
    user=0.1,
    device=0.2,
    model=0.1,
    user_near=0.1,
    device_near=0.1,
    model_near=0.05,
    run=0.25,
    run_elsewhere=0.1,
    batch_scale=3.0,
    time_scale=1.0,
    shares_scale=0.3,
)


def measured(factor, micro_batch=64):
    execution = replace(RUN, micro_batch=micro_batch)
    there = V100.forecast(execution).step.total_ms
    return replace(
        measurement(), model=workload().model, execution=execution, median_ms=there * factor
    )


def width(f):
    return math.log(f.step_time_interval_ms.high / f.step_time_interval_ms.low)


def ratio(after, before):
    return after.step.total_ms / before.step.total_ms


def corrected(forecaster, executions, known, words=""):
    return forecaster.knowing(Measured(tuple(known), words)).at(executions).forecasts()


def posterior(asked, known, law):
    told = Posterior(known, law)
    runs = told.runs_of([asked])
    return told.means(runs)[0], float(told.log_sd(runs)[0])


def run(model="a", device="x", variant="", batch=8, part=0, log_sd=0.2):
    shares = np.full(len(PARTS), 0.1)
    shares[part] = 1.0
    return Run(model, device, variant, batch, tuple(shares / shares.sum()), log_sd)


def observed(log_ratio, **of):
    return Observed(run(**of), (log_ratio,) * 4)


def test_slow_model_on_one_gpu_raises_forecast_on_another():
    seen = observe_elsewhere(measured(1.3), V100)
    assert seen.log_ratios[0] == pytest.approx(math.log(1.3))
    plain = A100.forecast(RUN)
    (sharper,) = corrected(A100, [RUN], [seen], "measured on V100")
    assert 1.02 < ratio(sharper, plain) < 1.3
    assert sharper.provenance == "transferred"
    assert sharper.step_time_interval_ms.basis.endswith("; measured on V100")
    assert width(sharper) < width(plain)
    assert sharper.mfu == pytest.approx(plain.mfu / ratio(sharper, plain))


def test_measured_run_is_forecast_near_its_measurement():
    plain = V100.forecast(RUN)
    seen = observe(V100, RUN, 1.3 * plain.step.total_ms)
    (again,) = corrected(V100, [RUN], [seen], "measured here")
    assert ratio(again, plain) == pytest.approx(1.3, rel=0.03)
    assert width(again) < 0.5 * width(plain)
    farther = V100.forecast(replace(RUN, micro_batch=8))
    near, far = corrected(V100, [RUN, replace(RUN, micro_batch=8)], [seen], "measured here")
    assert near == again
    assert width(near) < width(far) < width(farther)


def test_closely_related_measurement_corrects_more():
    kin = [
        {"model": "b", "device": "y"},
        {"device": "y"},
        {"model": "b"},
        {"variant": "fp16"},
        {"batch": 64},
        {"batch": 8},
    ]
    said = [posterior(run(), [observed(0.3, **of)], KIN) for of in kin]
    means, sds = [float(mean[0]) for mean, _ in said], [sd for _, sd in said]
    assert 0 < means[0] < means[1] < means[2] < means[3] < means[4] < means[5] < 0.3
    assert sds == sorted(sds, reverse=True)
    assert means[5] == pytest.approx(0.3, rel=0.03)


def test_measurement_of_different_step_mix_corrects_less():
    (alike, _), (unlike, _) = (
        posterior(run(), [observed(0.3, model="b", part=part)], KIN) for part in (0, 3)
    )
    assert 0 < unlike[0] < alike[0] / 2


def test_correction_never_exceeds_measured_error():
    for card_sd, log_sd in ((0.0, 0.4), (0.38, 0.4), (0.0, 0.1)):
        asked = run()._replace(log_sd=log_sd, card_sd=card_sd)
        for of in (
            {"model": "b", "device": "y"},
            {"device": "y"},
            {"model": "b"},
            {"batch": 16},
            {},
        ):
            moved = posterior(asked, [observed(0.3, **of)], KIN)[0][0]
            assert 0 < moved <= 0.3


def test_new_card_error_is_learned_only_from_runs_on_it():
    new = run()._replace(log_sd=0.5, card_sd=0.45)
    on_it, elsewhere = (
        posterior(
            new,
            [
                Observed(
                    run(model="b", device=device)._replace(log_sd=0.5, card_sd=0.45), (0.3,) * 4
                )
            ],
            KIN,
        )
        for device in "xy"
    )
    assert on_it[0][0] > 0.7 * 0.3
    assert elsewhere[0][0] < 0.1 * 0.3
    assert on_it[1] < 0.75 * elsewhere[1]


def test_measurement_overrides_distant_narrow_forecast():
    asked = run(log_sd=0.04)
    means, log_sd = posterior(asked, [observed(0.5, log_sd=0.04)], KIN)
    assert means[0] == pytest.approx(0.5, rel=0.03)
    assert log_sd == pytest.approx(0.03, rel=0.1)


def test_more_models_on_device_increase_its_correction():
    few, many = (
        posterior(run(), [observed(0.3, model=f"m{i}") for i in range(n)], KIN) for n in (1, 10)
    )
    assert few[0][0] < many[0][0] < 0.3
    assert many[1] < few[1] < 0.2


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from("xy"),
            st.sampled_from(("", "fp16")),
            st.integers(1, 512),
            st.integers(0, 7),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_covariance_is_valid_and_measuring_never_widens_interval(places):
    runs = [run(*place) for place in places]
    told = Posterior([Observed(one, (0.1,) * 4) for one in runs], KIN)
    arrays = told.runs_of(runs)
    between = covariance(arrays, arrays, arrays.variances, arrays.variances, KIN)
    assert np.allclose(between, between.T)
    assert np.linalg.eigvalsh(between).min() > -1e-9
    assert np.allclose(np.diag(between), 0.2**2 - MEASURING_SD**2)
    _, log_sd = posterior(run(), [Observed(one, (0.1,) * 4) for one in runs], KIN)
    assert 0 < log_sd <= 0.2 + 1e-9


def test_noisy_repeats_correct_less():
    steady, noisy = (Observed(run(), (0.3,) * 4, noise) for noise in (0.03, 0.3))
    assert posterior(run(), [noisy], KIN)[0][0] < 0.5 * posterior(run(), [steady], KIN)[0][0]


def test_phases_are_corrected_separately():
    plain = V100.forecast(RUN)
    step = plain.step
    longer = replace(step, optimizer_ms=2 * step.optimizer_ms)
    seen = observe(V100, RUN, longer.total_ms, longer)
    (again,) = corrected(V100, [RUN], [seen], "")
    assert again.step.total_ms == pytest.approx(longer.total_ms, rel=0.02)
    assert (
        again.step.optimizer_ms / step.optimizer_ms > 1.5 * again.step.forward_ms / step.forward_ms
    )


def test_measurement_of_other_model_or_implausible_time_is_rejected():
    with pytest.raises(TrainpaceError, match="of the same model"):
        observe_elsewhere(replace(measured(1.0), model="other"), V100)
    with pytest.raises(TrainpaceError, match="too far apart"):
        observe_elsewhere(measured(30.0), V100)


def test_fitted_relatedness_shares_sum_to_one():
    r = fitted_spreads().relatedness
    names = (
        "user",
        "device",
        "model",
        "user_near",
        "device_near",
        "model_near",
        "run",
        "run_elsewhere",
    )
    shares = [getattr(r, name) for name in names]
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0


def test_other_models_on_both_devices_improve_transfer():
    """Every model is slower than forecast on y by more than on x. The queried model was measured only on x."""
    others = [observed(on, model=m, device=d) for m in "bcde" for d, on in (("x", 0.1), ("y", 0.5))]
    (alone, _), (among, _) = (
        posterior(run(device="y"), [observed(0.1, device="x"), *more], KIN) for more in ((), others)
    )
    assert alone[0] < 0.1
    assert 0.2 < among[0] < 0.5


def test_steps_of_similar_length_correct_more():
    near, far = (
        posterior(run(), [Observed(run(model="b")._replace(step_ms=ms), (0.3,) * 4)], KIN)[0][0]
        for ms in (2.0, 200.0)
    )
    assert 0 < far < near


def test_large_measured_errors_raise_all_variances():
    """Ten runs miss their forecasts by far more than expected, so the eleventh may miss by as much."""
    off = [observed(0.8 if i % 2 else -0.8, model=f"m{i}", log_sd=0.05) for i in range(10)]
    assert posterior(run(log_sd=0.05), off, KIN)[1] > 0.3


def test_grid_correction_equals_single_corrections():
    seen = observe_elsewhere(measured(1.3), V100)
    knowing = A100.knowing(Measured((seen,), "measured"))
    grid = Grid.vary(RUN, micro_batch=np.arange(1, 3001))
    together = knowing.at(grid)
    for i in (0, 63, 2047, 2048, 2999):
        alone = knowing.at([grid.execution(i)])
        assert together.step_ms[i] == pytest.approx(alone.step_ms[0], rel=1e-12)
        assert together.low_ms[i] == pytest.approx(alone.low_ms[0], rel=1e-9)
        assert alone.forecast(0).step.total_ms == pytest.approx(alone.step_ms[0], rel=1e-12)
