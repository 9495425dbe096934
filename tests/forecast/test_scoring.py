"""The accuracy score from packaged traces. Packaged forecasts must match the installed code."""

import pytest

from trainpace.forecast import packaged_traces, public_journal, public_runs, score
from trainpace.forecast.validation import forecast_of, with_forecast


def test_packaged_forecasts_match_installed_version():
    """Code or constants that change a forecast make the packaged ones stale. Run python -m fitting public-journal."""
    traces = packaged_traces()
    able = [run for run in public_runs() if run.id in traces.conditions]
    for run in able[::61]:
        stated = traces.conditions[run.id]
        anew = with_forecast(run, forecast_of(stated, traces.workloads[stated.trace]))
        assert anew.forecast_ms == pytest.approx(run.forecast_ms, rel=2e-4), (
            f"{run.id}: run python -m fitting public-journal"
        )
        assert anew.low_ms == pytest.approx(run.low_ms, rel=2e-4)
        assert anew.high_ms == pytest.approx(run.high_ms, rel=2e-4)


def test_packaged_conditions_match_their_runs():
    traces = packaged_traces()
    runs = {run.id: run for run in public_runs()}
    assert set(traces.conditions) <= set(runs)
    assert {stated.trace for stated in traces.conditions.values()} == set(traces.workloads)
    for name, stated in traces.conditions.items():
        run, e = runs[name], stated.execution
        assert (stated.device, e.world_size, e.nnodes) == (run.device, run.gpus, run.nodes)
        assert (e.micro_batch, e.accumulation, e.precision) == (
            run.micro_batch,
            run.accumulation,
            run.precision,
        )
        assert traces.workloads[stated.trace].mode == run.mode


@pytest.mark.slow
def test_score_counts_every_run_once():
    heard = []
    found = score(lambda done, of: heard.append((done, of)))
    runs = public_runs()
    assert found.fingerprint == public_journal().fingerprint
    assert found.runs + found.without_forecast == len(runs)
    assert found.runs == found.overall.n == found.in_fit.n + found.not_in_fit.n
    assert heard[-1] == (len(heard), len(heard))
    for lines in (found.by_card, found.by_model_kind, found.by_source):
        assert sum(line.in_fit.n for line in lines) == found.in_fit.n
        assert sum(line.not_in_fit.n for line in lines) == found.not_in_fit.n
    # coarse bounds that detect regressions, not small changes
    assert found.not_in_fit.mape < 20
    assert found.overall.coverage > 75
    assert {run.id: run.forecast_ms for run in found.rows} == pytest.approx(
        {run.id: run.forecast_ms for run in runs if run.forecast_ms is not None}, rel=2e-4
    )
