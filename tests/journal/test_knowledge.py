"""What was measured corrects the forecasts of every cluster, in forecast and in match alike."""

import json
import math
import subprocess
import sys

import pytest
from msgspec.structs import replace

from nouns import workload
from trainpace.execution import Execution
from trainpace.forecast import Forecaster, Target
from trainpace.hardware import Cluster, find_device
from trainpace.journal import Journal, Knowledge, foresight_of
from trainpace.journal.entry import Entry, new_id, now_utc
from trainpace.records import save

SLOWER = 1.4


def on(device, count=1):
    return Forecaster(workload(), Target(Cluster(device=find_device(device), devices_per_node=count)))


@pytest.fixture
def journal(tmp_path):
    """T4 takes 1.4 times what is forecast."""
    with Journal.open(str(tmp_path / "runs.db")) as runs:
        for batch in (16, 32, 64):
            e = Execution(micro_batch=batch, optimizer=workload().optimizer)
            ms = SLOWER * on("T4").forecast(e).step.total_ms
            run = {"kind": "measure", "outcome": "ok", "model": workload().model, "device": "T4", "execution": e}
            runs.add(Entry(id=new_id(), created_at=now_utc(), step_time_ms=ms, **run))
        yield runs


@pytest.mark.parametrize(("device", "count", "least"), [("T4", 1, 1.3), ("T4", 2, 1.05), ("A100", 1, 1.02)])
def test_forecast_and_match_are_corrected_alike(journal, device, count, least):
    """All of it on the same card, less on two of them, least on another; what was measured narrows the interval."""
    there = on(device, count)
    e = Execution(micro_batch=32, nproc_per_node=count, optimizer=workload().optimizer)
    plain = there.at([e]).brief(0)
    in_match = Knowledge(journal, on("A100")).corrected(there, plain)
    in_forecast = foresight_of(there, e, journal).at(e)
    assert in_match.step.total_ms == pytest.approx(in_forecast.step.total_ms, rel=1e-9)
    assert least < in_match.step.total_ms / plain.step.total_ms < 1.45
    widths = [f.step_time_interval_ms.high / f.step_time_interval_ms.low for f in (in_match, plain)]
    assert widths[0] < widths[1]


def test_a_journal_of_other_workloads_changes_nothing(journal):
    other = Forecaster(replace(workload(), model="another"), Target(Cluster(device=find_device("A100"))))
    plain = other.at([Execution(micro_batch=32)]).brief(0)
    knowledge = Knowledge(journal, other)
    assert knowledge.corrected(other, plain) == plain
    assert knowledge.in_words() == ""


def test_of_many_runs_alike_the_newest_counts(journal, monkeypatch):
    """A thousand runs of three sizes are three measurements, or every server would solve for a thousand."""
    e = Execution(micro_batch=16, optimizer=workload().optimizer)
    run = {"kind": "measure", "outcome": "ok", "model": workload().model, "device": "T4", "execution": e}
    old, ms = "2020-01-01T00:00:00.000000Z", on("T4").forecast(e).step.total_ms
    journal.add_many([Entry(id=new_id(), created_at=old, step_time_ms=ms, **run) for _ in range(1000)])
    known = []
    monkeypatch.setattr(
        "trainpace.journal.knowledge.corrected", lambda f, rows, seen, source: known.append(seen) or rows
    )
    there = on("A100")
    Knowledge(journal, there).corrected(there, there.at([e]).brief(0))
    assert sorted(seen.run.batch for seen in known[0]) == [16, 32, 64]
    assert all(seen.log_ratios[0] == pytest.approx(math.log(SLOWER)) for seen in known[0])


def test_runs_of_another_image_size_say_nothing(tmp_path):
    """A quarter of the pixels takes a quarter of the time; without a key only the stated size tells the runs apart."""
    images = replace(workload(), model="resnet50", sample="3 x 224 x 224 image")
    there = Forecaster(images, Target(Cluster(device=find_device("T4"))))
    e = Execution(micro_batch=32, optimizer=images.optimizer)
    plain = there.at([e]).brief(0)
    run = {"kind": "import", "outcome": "ok", "device": "T4", "execution": e, "step_time_ms": plain.step.total_ms / 3.8}
    run |= {"model": "torchvision:resnet50"}
    with Journal.open(str(tmp_path / "sizes.db")) as runs:
        runs.add(Entry(id=new_id(), created_at=now_utc(), image_size=112, **run))
        assert Knowledge(runs, there).corrected(there, plain) == plain
        assert foresight_of(there, e, runs).at(e).step == plain.step
        runs.add(Entry(id=new_id(), created_at=now_utc(), image_size=224, **run))
        assert Knowledge(runs, there).corrected(there, plain).step.total_ms < 0.5 * plain.step.total_ms
        assert foresight_of(there, e, runs).at(e).step.total_ms < 0.5 * plain.step.total_ms


def test_match_says_that_it_used_the_journal(journal, tmp_path):
    save(workload(), tmp_path / "model.json")
    ask = [
        sys.executable, "-m", "trainpace", "match", str(tmp_path / "model.json"), "--samples", "1M", "--epochs", "1", "--gpu", "T4",
        "--precision", "fp32", "--provider", "gcp",
    ]  # fmt: skip

    def answer(*more):
        done = subprocess.run([*ask, *more], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = ("--journal", str(tmp_path / "runs.db"))
    assert "Corrected by the journal" in answer(*said)
    assert "Corrected by the journal" not in answer("--no-journal")
    corrected, plain = (json.loads(answer(*way, "--json"))["rows"][0] for way in (said, ("--no-journal",)))
    assert (corrected["provenance"], plain["provenance"]) == ("transferred", "fitted")
    assert corrected["usd"] > plain["usd"]
