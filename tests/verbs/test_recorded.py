"""Forecast, plan and match use the loader and the caveats of a recording."""

import json

import msgspec
import pytest

import trainpace
from nouns import workload
from trainpace.cli.program import main
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import save
from trainpace.measure import LoaderCost
from trainpace.verbs.plan import ALL_OFFLINE, NONE_OFFLINE
from trainpace.verbs.traced import caveats, loader_of, recording_of
from trainpace.watch.inside.event_log import FORWARD, Fetch
from watch.test_recording import LOADER, MS, write

QUIET = {"no_journal": True, "evidence": "none"}
JOB = {"samples": 64_000, "epochs": 1}
SAMPLE_MS = 50.0
BUSY = "other programs keep all 2 cores busy (load average 9.0), so the times of this recording may be too long."


def recorded(folder, workers=2, steps=23, busy="", notes=()):
    """Write a recording whose loader needs 50 ms of a core for each of 16 samples."""
    folder.mkdir()
    batch_ns = int(16 * SAMPLE_MS * MS)
    fetches = [Fetch(0, 16, 0, batch_ns, batch_ns, 0)] * 6
    write(
        folder,
        [("plain", {FORWARD: 10})] * steps,
        fetches,
        notes=({**LOADER, "workers": workers}, *notes),
    )
    if busy:
        note = json.loads((folder / "command.json").read_text())
        (folder / "command.json").write_text(json.dumps({**note, "busy": busy}))
    save(workload(), folder / "workload.json")
    return str(folder / "workload.json")


@pytest.fixture(scope="module")
def with_workers(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("two") / "rec")


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("none") / "rec", workers=0, steps=5, busy=BUSY)


def forecast(model, **options):
    found = trainpace.forecast(model, gpu="A100", **JOB, **options, **QUIET)
    return found, found.rows[0].training_time


def test_recorded_loader_limits_the_training_time(with_workers):
    found, time = forecast(with_workers)
    each_s = SAMPLE_MS / 1e3 / 2  # two workers on two cores
    assert time.stepping_s + time.data_wait_s == pytest.approx(64_000 * each_s, rel=0.01)
    assert "which waits for it" in found.recorded[0]
    assert "2 workers, 40 samples/s on the recording's 2 cores" in found.recorded[0]


def test_loading_without_workers_adds_to_the_step_time(without):
    _, time = forecast(without)
    assert time.data_wait_s == pytest.approx(64_000 * SAMPLE_MS / 1e3, rel=0.01)


def test_explicit_loader_rate_overrides_the_recording(with_workers):
    found, time = forecast(with_workers, loader_rate=1e6, workers=1)
    assert time.data_wait_s == 0
    assert not any("loader (" in said for said in found.recorded)


def test_workload_outside_a_recording_has_no_loader(with_workers, tmp_path):
    save(workload(), tmp_path / "workload.json")
    found, time = forecast(str(tmp_path / "workload.json"))
    assert (found.recorded, time.data_wait_s) == ((), 0)


def test_forecast_without_length_says_step_time_excludes_loading(with_workers, capsys):
    with pytest.raises(SystemExit):
        main(["forecast", with_workers, "--gpu", "A100", "--no-journal", "--evidence", "none"])
    shown = capsys.readouterr().out.split("\n")
    first = " ".join(" ".join(shown[:10]).split())
    assert "The recorded loader (2 workers, 40 samples/s" in first
    assert "not included in the step time" in first


def test_match_uses_the_recorded_loader(with_workers, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[[machine]]\nname = "lab"\ndevice = "A100 SXM 40GB"\ncount = 1\nprice_usd_per_hour = 2.0\n'
    )
    asked = {"machines": str(mine), "only_machines": True, **JOB, **QUIET}
    from trainpace.verbs.match import MatchRequest, run
    from trainpace.verbs.request import Silent

    answer = run(MatchRequest(model=with_workers, **{**asked, "machines": str(mine)}), Silent())
    assert answer.job.conditions.samples_per_cpu_s == pytest.approx(1000 / SAMPLE_MS)
    assert "worker on every core: 20 samples/s" in answer.recorded[0]


def test_plan_and_forecast_repeat_the_recording_caveats(without, tmp_path):
    folder = without.removesuffix("/workload.json")
    plan = trainpace.plan(without, gpu="A100", watched=folder, **JOB, **QUIET)
    said = " ".join(plan.cautions)
    assert "only 4 steps" in said
    assert "load average 9.0" in said
    assert "on a CPU" in said
    found, _ = forecast(without)
    assert [f"{c[:1].upper()}{c[1:]}." for c in caveats(recording_of(without))] == list(
        found.recorded[1:]
    )


def test_long_quiet_recording_has_only_the_cpu_caveat(with_workers):
    assert caveats(recording_of(with_workers)) == (
        "the script was recorded on a CPU, so only the speed of its loader is used, not the time"
        " of its steps",
    )
    assert loader_of(recording_of(with_workers)).workers == 2


# ---- what can be offline


LOADED = {"sample_ms": 60.0, "workers": 1, "cores": 2, "gpu": "A100", "batch": 32}


def offline(plan):
    return [c for c in (plan.best, plan.fastest) if c.choice.data.precomputed]


def planned(**options):
    return trainpace.plan(workload(), **{**LOADED, **options}, **JOB, **QUIET)


def test_precompute_removes_only_the_offline_share_of_a_sample():
    """Regression: the whole sample time was removed although only 53% can be offline."""
    half, whole = planned(offline_share=0.53), planned()
    assert offline(whole)
    assert whole.best.choice.data.ms_per_sample == 0
    for outlook in offline(half):
        assert outlook.choice.data.ms_per_sample >= 0.47 * 60 / 2
    assert half.best.job_s > whole.best.job_s
    assert ALL_OFFLINE in whole.cautions
    assert ALL_OFFLINE not in half.cautions


@pytest.mark.parametrize("is_random", [False, True])
def test_random_samples_of_a_recording_are_not_precomputed(tmp_path, is_random):
    folder = tmp_path / "rec"
    recorded(folder, notes=({"random_samples": is_random}, {"random_samples": False}))
    asked = {"gpu": "A100", "watched": str(folder), **JOB, **QUIET}
    plan = trainpace.plan(workload(), **asked)
    assert bool(offline(plan)) is not is_random
    assert (NONE_OFFLINE in plan.assumed) is is_random
    assert (ALL_OFFLINE in plan.cautions) is not is_random
    if is_random:
        assert offline(trainpace.plan(workload(), offline_share=0.9, **asked))


def test_zero_offline_share_allows_no_precompute():
    assert not offline(planned(offline_share=0))


def test_offline_share_is_read_from_the_loader_answer(tmp_path):
    cost = LoaderCost(sample_wall_ms=60, sample_cpu_ms=60, collate_ms=0, batch_size=32)
    answer = {"cost": msgspec.to_builtins(cost), "cores": 2, "advice": {"offline_share": 0.53}}
    path = tmp_path / "loader.json"
    path.write_text(json.dumps(answer))
    by_file = planned(loader=str(path), sample_ms=None, cores=None)
    assert by_file.best == planned(offline_share=0.53).best
    with pytest.raises(TrainpaceError, match="cannot be combined"):
        planned(loader=str(path))
    path.write_text(json.dumps({**answer, "cores": "many"}))
    with pytest.raises(TrainpaceError, match=r"loader\.json"):
        planned(loader=str(path), sample_ms=None)
    with pytest.raises(TrainpaceError, match="offline_share"):
        planned(offline_share=0.5, sample_ms=None, workers=None, cores=None)
