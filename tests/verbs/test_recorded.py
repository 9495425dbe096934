"""Look, forecast, plan and match use the host's work and the caveats of a recording."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

import trainpace
from diagnose.recordings import fetch, loader, rank, recording
from nouns import workload
from trainpace.core.errors import TrainpaceError
from trainpace.core.outcome import Interval
from trainpace.core.records import save
from trainpace.diagnose import diagnose
from trainpace.measure import LoaderCost
from trainpace.verbs.look import Length, Looked, LookRequest, elsewhere
from trainpace.verbs.look import run as look
from trainpace.verbs.match import MatchRequest, run
from trainpace.verbs.plan import ALL_OFFLINE, NONE_OFFLINE
from trainpace.verbs.request import Misuse, Silent
from trainpace.verbs.traced import HostWork, caveats, host_work_of, recording_of
from trainpace.verbs.watch import Watched
from trainpace.watch.inside.event_log import FORWARD, OTHER, Fetch
from watch.test_recording import LOADER, MS, write

QUIET = {"no_journal": True, "evidence": "none"}
JOB = {"samples": 64_000, "epochs": 1}
SAMPLE_MS = 50.0
OWN_MS = 20.0
BUSY = "other programs keep all 2 cores busy (load average 9.0), so the times of this recording may be too long."


def recorded(folder, workers=2, steps=23, busy="", notes=()):
    """Write a recording with 20 ms of own code, and 50 ms of a core for each of 16 samples."""
    folder.mkdir()
    batch_ns = int(16 * SAMPLE_MS * MS)
    fetches = [Fetch(0, 16, 0, batch_ns, batch_ns, 0)] * 6
    write(
        folder,
        [("plain", {FORWARD: 10, OTHER: OWN_MS})] * steps,
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
    found = trainpace.forecast(model, gpu="H100", **JOB, **options, **QUIET)
    return found, found.rows[0].training_time


def test_recorded_loader_limits_the_training_time(with_workers):
    found, time = forecast(with_workers)
    each_s = SAMPLE_MS / 1e3 / 2  # two workers
    assert time.total_s - time.startup_s == pytest.approx(64_000 * each_s, rel=0.02)
    assert found.rows[0].step.data_wait_ms > 0


def test_loading_without_workers_adds_to_the_step_time(without):
    found, _ = forecast(without)
    (row,) = found.rows
    assert row.execution.micro_batch == 16
    assert row.step.data_wait_ms == pytest.approx(16 * SAMPLE_MS, rel=0.01)
    assert row.step.own_code_ms == pytest.approx(OWN_MS)


def test_loader_rate_replaces_the_recorded_cost(with_workers):
    steps = [
        forecast(with_workers, **more)[0].rows[0].step
        for more in ({}, {"loader_rate": 1000 / SAMPLE_MS}, {"loader_rate": 1e6})
    ]
    assert steps[1].total_ms == pytest.approx(steps[0].total_ms, rel=0.01)
    assert steps[2].data_wait_ms == 0


def test_workload_outside_a_recording_has_no_host_work(with_workers, tmp_path):
    save(workload(), tmp_path / "workload.json")
    found, _ = forecast(str(tmp_path / "workload.json"))
    assert found.recorded == ()
    assert found.rows[0].step.own_code_ms == found.rows[0].step.data_wait_ms == 0


def test_workers_without_a_known_loader_are_misuse():
    with pytest.raises(Misuse):
        trainpace.forecast(workload(), gpu="A100", workers=2, **QUIET)


def of_every_verb(model, looked, gpu, **length):
    """Return the step times in ms and the training times in s on one GPU, by every verb."""
    asked = {"gpu": gpu, **length, **QUIET}
    (row,) = trainpace.forecast(model, **asked).rows
    servers = MatchRequest(model=model, max_nodes=1, **{**asked, "gpu": (gpu,)})
    match = next(m for m in run(servers, Silent()).ranking.matches if m.offer.count == 1)
    now = trainpace.plan(model, watched=str(Path(model).parent), **asked).now
    ends = row.training_time_interval_s
    assert (now.job_low_s, now.job_high_s) == pytest.approx((ends.low, ends.high))
    (shown,) = elsewhere(looked, (gpu,), Silent())
    steps = [row.step.total_ms, match.forecast.step.total_ms, now.step_ms]
    seconds = [row.training_time.total_s, match.time.total_s, now.job_s]
    return [*steps, shown.match.forecast.step.total_ms], [*seconds, shown.match.time.total_s]


@pytest.mark.parametrize(("folder", "gpu"), [("with_workers", "RTX 4090"), ("without", "T4")])
def test_all_verbs_give_one_step_time_and_one_training_time(folder, gpu, request):
    model = request.getfixturevalue(folder)
    looked = Looked(
        watched=Watched(recording=recording_of(model), folder=Path(model).parent),
        diagnosis=diagnose(recording_of(model)),
        length=Length(steps=4000, of="training"),
        seconds=1.0,
        interval_s=Interval(low=1.0, high=1.0, coverage=0.9, basis=""),
    )
    steps, seconds = of_every_verb(model, looked, gpu, **JOB)
    assert steps == pytest.approx([steps[0]] * 4)
    assert seconds == pytest.approx([seconds[0]] * 4)
    assert steps[0] >= OWN_MS


SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 8, (4096,)))
for epoch in range(1000):
    for x, y in DataLoader(data, batch_size=32, num_workers=2, shuffle=True):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(0.02)
"""


@pytest.mark.slow
def test_all_verbs_agree_on_a_real_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    place = tmp_path / "recording"
    command = (sys.executable, str(tmp_path / "train.py"))
    asked = LookRequest(command=command, seconds=3.0, epochs=3.0, output=str(place), gpu=("T4",))
    looked = look(asked, Silent())
    model, length = str(place / "workload.json"), {"samples": 4096, "epochs": 3}
    steps, seconds = of_every_verb(model, looked, "T4", **length)
    assert steps == pytest.approx([steps[0]] * 4)
    assert seconds == pytest.approx([seconds[0]] * 4)
    assert steps[0] >= 20.0


def test_cores_limit_the_recorded_loader_in_a_plan(with_workers):
    place = str(Path(with_workers).parent)
    one, eight = (
        trainpace.plan(with_workers, gpu="H100", watched=place, cores=cores, **JOB, **QUIET)
        for cores in (1, 8)
    )
    assert one.now.step_ms == pytest.approx(2 * eight.now.step_ms, rel=0.01)
    assert one.assumed != eight.assumed


def test_host_work_is_scaled_by_the_speed_of_the_cpu():
    cost = LoaderCost(sample_wall_ms=4.0, sample_cpu_ms=4.0, collate_ms=0.0, batch_size=1)
    work = HostWork(cost, 1, 2, own_ms=30.0, points=1000.0)
    fast, same = work.on(4, 2000.0), work.on(4, None)
    assert (fast.own_ms, fast.ms_per_sample) == (15.0, 1.0)
    assert (same.own_ms, same.ms_per_sample) == (30.0, 2.0)
    assert work.on(1, None).ms_per_sample == 4.0
    assert work.on(4, None, workers=0).ms_per_sample == 4.0


@pytest.mark.parametrize(
    ("busy", "workers", "expected_ms"), [("", 2, 50.0), ("busy", 2, 2.0), ("", 9, 2.0)]
)
def test_waits_for_the_recordings_cores_do_not_count_elsewhere(busy, workers, expected_ms):
    """Waits for storage do."""
    fetched = fetch(wall=50.0, cpu=2.0, in_workers=True)
    seen = rank(forward=10, fetch=fetched, loader=loader(workers=workers), data=100)
    assert host_work_of(recording(seen, busy=busy), workload()).cost.sample_wall_ms == expected_ms


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
    assert len(caveats(recording_of(with_workers))) == 1


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
    asked = {"gpu": "H100", "watched": str(folder), **JOB, **QUIET}
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
