"""Measurements correct the forecasts of every cluster, in `forecast` and `match` alike."""

import json
import math
import subprocess
import sys

import pytest
from msgspec.structs import replace

from nouns import TOKENS, stacked, workload
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.records import save
from trainpace.forecast import Forecaster, Grid, Target
from trainpace.job import Schedule
from trainpace.journal import Journal, Knowledge, may_know
from trainpace.journal.entry import Entry, new_id, now_utc
from trainpace.plan import Problem, forecast_of
from trainpace.plan.evaluate import evaluate
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.forecast import run as forecast
from trainpace.verbs.request import Silent

SLOWER = 1.4


def on(device, count=1):
    return Forecaster(
        workload(), Target(Cluster(device=find_device(device), devices_per_node=count))
    )


@pytest.fixture
def journal(tmp_path):
    """Journal in which a T4 takes 1.4 times the forecast."""
    with Journal.open(str(tmp_path / "runs.db")) as runs:
        for batch in (16, 32, 64):
            e = Execution(micro_batch=batch, optimizer=workload().optimizer)
            ms = SLOWER * on("T4").forecast(e).step.total_ms
            run = {
                "kind": "measure",
                "outcome": "ok",
                "model": workload().model,
                "device": "T4",
                "execution": e,
            }
            runs.add(Entry(id=new_id(), created_at=now_utc(), step_time_ms=ms, **run))
        yield runs


@pytest.mark.parametrize(
    ("device", "count", "least"), [("T4", 1, 1.3), ("T4", 2, 1.05), ("A100", 1, 1.02)]
)
def test_journal_corrects_forecast_and_match_equally(journal, device, count, least):
    """The correction is full on the same GPU, smaller on two of them, smallest on another GPU. It narrows the interval."""
    there = on(device, count)
    e = Execution(micro_batch=32, nproc_per_node=count, optimizer=workload().optimizer)
    plain = there.at([e]).brief(0)
    knowledge = Knowledge(journal, workload())
    corrected = there.knowing(knowledge).forecast(e)
    from_elsewhere = (
        on("A100").knowing(knowledge).on(there.target).forecast(e)
    )  # as match and plan come to it
    assert corrected.step == from_elsewhere.step
    assert least < corrected.step.total_ms / plain.step.total_ms < 1.45
    widths = [
        f.step_time_interval_ms.high / f.step_time_interval_ms.low for f in (corrected, plain)
    ]
    assert widths[0] < widths[1]


def test_padded_runs_do_not_correct_packed_forecasts(tmp_path):
    model = replace(stacked(), sequence_length=TOKENS)
    place = str(tmp_path / "runs.db")
    with Journal.open(place) as runs:
        e = Execution(micro_batch=8, optimizer=model.optimizer, precision="bf16")
        run = {
            "kind": "measure",
            "outcome": "ok",
            "model": model.model,
            "device": "H100 SXM",
            "execution": e,
        }
        runs.add(
            Entry(
                id=new_id(), created_at=now_utc(), step_time_ms=1e3, sequence_length=TOKENS, **run
            )
        )
    asked = ForecastRequest(
        model=model,
        gpu=("H100 SXM",),
        precision="bf16",
        batch=(8,),
        sequence_length=(TOKENS,),
        journal=place,
    )
    packed = replace(asked, packed=True, mean_length=100.0)
    found, plain = (
        forecast(request, Silent()) for request in (packed, replace(packed, no_journal=True))
    )
    assert found.rows[0].step == plain.rows[0].step
    assert any("packed rows" in note for note in found.notes)
    assert (
        forecast(asked, Silent()).rows[0].step
        != forecast(replace(asked, no_journal=True), Silent()).rows[0].step
    )


def test_unrelated_workloads_do_not_change_forecast(journal):
    other = Forecaster(
        replace(workload(), model="another"), Target(Cluster(device=find_device("A100")))
    )
    plain = other.at([Execution(micro_batch=32)]).brief(0)
    knowledge = Knowledge(journal, other.workload)
    assert other.knowing(knowledge).at([Execution(micro_batch=32)]).brief(0) == plain
    assert knowledge.in_words(other) == ""


def test_newest_of_similar_runs_counts(journal):
    """A thousand runs of three sizes count as three measurements; otherwise every server would solve for a thousand."""
    e = Execution(micro_batch=16, optimizer=workload().optimizer)
    run = {
        "kind": "measure",
        "outcome": "ok",
        "model": workload().model,
        "device": "T4",
        "execution": e,
    }
    old, ms = "2020-01-01T00:00:00.000000Z", on("T4").forecast(e).step.total_ms
    journal.add_many(
        [Entry(id=new_id(), created_at=old, step_time_ms=ms, **run) for _ in range(1000)]
    )
    there = on("A100")
    known = Knowledge(journal, there.workload).posterior(there).known
    assert sorted(seen.run.batch for seen in known) == [16, 32, 64]
    assert all(seen.log_ratios[0] == pytest.approx(math.log(SLOWER)) for seen in known)


def test_runs_of_other_image_size_are_ignored(tmp_path):
    """A quarter of the pixels takes a quarter of the time. Without a key only the stated image size distinguishes the runs."""
    images = replace(workload(), model="resnet50", sample="3 x 224 x 224 image")
    there = Forecaster(images, Target(Cluster(device=find_device("T4"))))
    e = Execution(micro_batch=32, optimizer=images.optimizer)
    plain = there.at([e]).brief(0)
    run = {
        "kind": "import",
        "outcome": "ok",
        "device": "T4",
        "execution": e,
        "step_time_ms": plain.step.total_ms / 3.8,
    }
    run |= {"model": "torchvision:resnet50"}
    with Journal.open(str(tmp_path / "sizes.db")) as runs:
        runs.add(Entry(id=new_id(), created_at=now_utc(), image_size=112, **run))
        assert there.knowing(Knowledge(runs, images)).at([e]).brief(0) == plain
        runs.add(Entry(id=new_id(), created_at=now_utc(), image_size=224, **run))
        assert (
            there.knowing(Knowledge(runs, images)).forecast(e).step.total_ms
            < 0.5 * plain.step.total_ms
        )


def test_match_reports_use_of_journal(journal, tmp_path):
    save(workload(), tmp_path / "model.json")
    ask = [
        sys.executable,
        "-m",
        "trainpace",
        "match",
        str(tmp_path / "model.json"),
        "--samples",
        "1M",
        "--epochs",
        "1",
        "--gpu",
        "T4",
        "--precision",
        "fp32",
        "--provider",
        "gcp",
    ]

    def answer(*more):
        done = subprocess.run([*ask, *more], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = ("--journal", str(tmp_path / "runs.db"))
    assert "Corrected by the journal" in answer(*said)
    assert "Corrected by the journal" not in answer("--no-journal")
    corrected, plain = (
        json.loads(answer(*way, "--json"))["rows"][0] for way in (said, ("--no-journal",))
    )
    assert (corrected["provenance"], plain["provenance"]) == ("transferred", "fitted")
    assert corrected["usd"] > plain["usd"]


def test_plan_uses_corrected_forecasts(journal):
    setting = Problem(
        workload(),
        Cluster(device=find_device("T4"), devices_per_node=2),
        Schedule(samples=1000, epochs=1.0),
    )
    knowing = setting._replace(knowledge=Knowledge(journal, workload())).with_forecaster()
    e = Execution(micro_batch=8, optimizer=workload().optimizer)
    grid = Grid.vary(e, micro_batch=[8, 16, 32, 64], nproc_per_node=[1, 1, 2, 2])
    found, plain = (evaluate(s, grid).step_ms for s in (knowing, setting))
    for i in range(len(grid)):
        assert found[i] == pytest.approx(
            forecast_of(knowing, grid.execution(i)).step.total_ms, rel=1e-9
        )
    assert (found / plain > 1.05).all()


def test_sweeps_of_other_models_count_on_measured_devices(journal):
    """Other models count on the requested GPU and on GPUs of the workload, with a few sizes of their newest sweep."""
    shares = tuple(on("T4").at([Execution(optimizer=workload().optimizer)]).shares()[0].tolist())
    for device, model, second in (
        ("T4", "b", 1),
        ("A100", "b", 1),
        ("A100", "c", 1),
        ("A100", "c", 2),
        ("V100", "b", 1),
    ):
        for batch in range(1, 11):
            e = Execution(micro_batch=batch, optimizer=workload().optimizer)
            run = {
                "kind": "measure",
                "outcome": "ok",
                "model": model,
                "device": find_device(device).name,
                "execution": e,
            }
            run |= {
                "step_time_ms": 10.0 * second,
                "forecast_ms": 10.0,
                "forecast_low_ms": 5.0,
                "forecast_high_ms": 20.0,
            }
            created = f"2026-01-01T00:00:{second:02}.000000Z"
            journal.add(
                Entry(
                    id=new_id(),
                    created_at=created,
                    forecast_shares=shares,
                    sweep=f"{second}" * 32,
                    **run,
                )
            )
    there = on("A100")
    known = Knowledge(journal, workload()).posterior(there).known
    others = sorted(
        {(o.run.model, o.run.device, o.run.batch) for o in known if o.run.model != workload().model}
    )
    sizes, a100 = (1, 4, 7, 10), there.target.cluster.device.name
    assert others == [(m, d, b) for m, d in (("b", a100), ("b", "T4"), ("c", a100)) for b in sizes]
    newest = [o.log_ratios[0] for o in known if o.run.model == "c"]
    assert newest == pytest.approx([math.log(2.0)] * 4)


def test_plan_uses_the_journal(journal, tmp_path):
    save(workload(), tmp_path / "model.json")
    ask = [
        sys.executable,
        "-m",
        "trainpace",
        "plan",
        str(tmp_path / "model.json"),
        "--gpu",
        "T4",
        "--batch",
        "32",
        "--samples",
        "1M",
        "--epochs",
        "1",
        "--journal",
        str(tmp_path / "runs.db"),
    ]

    def answer(*more):
        done = subprocess.run([*ask, *more], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with_it, without = (
        json.loads(answer("--json", *more))["now"]["step_ms"] for more in ((), ("--no-journal",))
    )
    assert with_it / without == pytest.approx(SLOWER, rel=0.05)


def test_journal_knows_model_by_torchvision_name(tmp_path):
    e = Execution(micro_batch=32)
    run = {"kind": "import", "outcome": "ok", "device": "T4", "execution": e, "step_time_ms": 10.0}
    with Journal.open(str(tmp_path / "runs.db")) as runs:
        runs.add(Entry(id=new_id(), created_at=now_utc(), model="torchvision:vgg16", **run))
    assert may_know(str(tmp_path / "runs.db"), {"A100"}, {"vgg16"})
    assert may_know(str(tmp_path / "runs.db"), {"A100"}, {"torchvision:vgg16"})
    assert not may_know(str(tmp_path / "runs.db"), {"A100"}, {"vgg19"})
