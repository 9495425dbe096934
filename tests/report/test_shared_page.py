"""Pages to share: secrets are planted in every kind of answer, and none appears on the page."""

import re

import pytest
from msgspec.structs import replace

import answers
from answers import asked, measured
from diagnose import recordings
from diagnose.recordings import fetch, loader, recording
from nouns import every_noun, machine_profile, measurement, stacked
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.records import Record
from trainpace.diagnose import Check, Examination, diagnose
from trainpace.job import Schedule
from trainpace.measure import analyse
from trainpace.offers import Offer, Ranking, picks, snapshot
from trainpace.offers.match import Job, nearest, rank
from trainpace.plan import Problem, plan_changes
from trainpace.report import html_of, shared_page
from trainpace.report.answers import HIDDEN, public
from trainpace.verbs.forecast import Forecasts
from trainpace.verbs.match import Matches
from trainpace.verbs.measure import MeasuredSweep
from trainpace.verbs.plan import Planned

SECRETS = (
    "alice-q7",
    "/home/alice-q7/thesis/train_gan.py",
    "train_gan.py",
    "node17.lab-q7.example",
    "10.1.2.3",
    "hunter2-q7",
    "s3://bucket-q7",
)
SECRET = re.compile("q7|train_gan|node17|hunter2|10\\.1\\.2\\.3|thesis")


def clean(answer):
    """Return the page after searching it for the secrets."""
    page = shared_page(answer, "Forecast, to be shared")
    assert not (found := SECRET.search(page)), page[max(0, found.start() - 200) : found.end() + 50]
    return page


class Anything(Record):
    text: str
    model: str
    name: str
    several: tuple[str, ...]
    named: dict[str, str]
    environment: dict[str, str]
    step_ms: float
    inner: object = None


@pytest.mark.parametrize("secret", SECRETS)
def test_unknown_text_is_hidden_in_shared_page(secret):
    own = Anything(
        text=secret,
        model=secret,
        name=secret,
        several=(secret, "T4"),
        named={secret: "T4", "T4": secret},
        environment={"torch": secret, "cpu": secret, secret: "2.13.0"},
        step_ms=12.25,
    )
    outer = replace(own, inner=(own, {secret: own, "T4": own}))
    assert secret not in clean(outer)
    assert public(outer).step_ms == 12.25
    assert public(own).several == ("T4",)
    assert public(own).model == "own model"
    assert public(own).text == HIDDEN


def test_public_names_stay_in_shared_page():
    known = Anything(
        text="adamw",
        model="resnet50",
        name="RTX 3090",
        several=("amp_bf16", "fitted"),
        named={"T4": "V100 SXM2 16GB"},
        environment={"torch": "2.13.0+cpu", "python": "3.11.7", "host": "3.11"},
        step_ms=12.25,
    )
    environment = {"torch": "2.13.0", "python": "3.11.7"}
    assert public(known) == replace(known, environment=environment)


def test_shared_forecast_hides_own_model():
    model = replace(
        answers.traced(), model="/home/alice-q7/train_gan.py:task", notes=("seen on node17",)
    )
    one = asked(model)
    page = clean(
        Forecasts(rows=tuple(one.rows), jumps={}, notes=("10.1.2.3 says so",), sweeps=(one,))
    )
    assert "own model" in page
    assert f"{one.rows[0].step.total_ms:.3g}" in page


def test_shared_ranking_and_plan_hide_own_model():
    model = replace(answers.traced(), model="train_gan.py:task", notes=("seen on node17",))
    job = Job(schedule=Schedule(samples=1000, epochs=2.0), global_batch=64)
    devices = {name: find_device(name) for name in ("T4",)}
    offers = [offer for offer in snapshot() if offer.device == "T4"][:3]
    ranking = rank(model, offers, devices, job)
    text = clean(
        Matches(
            workload=model, job=job, ranking=ranking, nearest=None, picks=picks(ranking.matches)
        )
    )
    assert "own model" in text
    assert offers[0].provider in text
    problem = Problem(model, Cluster(device=find_device("A100")), job.schedule)
    start = Execution(micro_batch=8, optimizer=model.optimizer)
    plan = plan_changes(problem, start)
    text = clean(Planned(plan=plan, setting=problem, script_changes=()))
    assert "own model" in text


@pytest.mark.parametrize(
    ("hidden", "limits", "binding"),
    [(1024, {"deadline_s": 1.0}, "deadline"), (16 * 1024, {}, "memory")],
)
def test_shared_ranking_without_a_server_names_the_limit(hidden, limits, binding):
    model = replace(stacked(hidden), model="train_gan.py:task")
    job = Job(schedule=Schedule(samples=1000, epochs=2.0), global_batch=64, **limits)
    offers = [offer for offer in snapshot() if offer.device == "T4"][:1]
    ranking = rank(model, offers, {"T4": find_device("T4")}, job)
    closest = nearest(ranking, job)
    assert closest.binding == binding
    page = clean(Matches(workload=model, job=job, ranking=ranking, nearest=closest))
    assert closest.reason in page


def test_shared_tuple_of_several_types_keeps_its_length():
    assert public(("/home/alice-q7", 2.5)) == (HIDDEN, 2.5)


def test_shared_measurement_hides_host_names():
    own = replace(
        measurement(),
        model="train_gan.py:task",
        environment={"cpu": "alice-q7's PC", "hostname": "node17", "torch": "2.13.0"},
    )
    assert "2.13.0" in clean(own)
    outcomes = measured(range(1, 9), jump_at=4)
    sweep = MeasuredSweep(
        measurements=tuple(outcomes),
        failed=(),
        analysis=analyse(outcomes),
        forecasts={},
        causes={},
        sweep=None,
    )
    page = clean(sweep)
    assert "samples/s" in page
    assert answers.HOSTILE not in page
    assert "are shown" not in html_of(sweep), "eight batch sizes, of two measurements each"


def test_shared_diagnosis_hides_script_and_paths():
    data = replace(loader(), dataset="/home/alice-q7/train_gan.py")
    seen = recording(
        replace(
            recordings.rank(data=16, forward=2, backward=3, loader=data, fetch=fetch()),
            host="node17",
        )
    )
    seen = replace(
        seen,
        command=("python", "/home/alice-q7/train_gan.py", "--token", "hunter2-q7"),
        seen="on node17",
    )
    found = diagnose(seen)
    page = clean(replace(found, why=("look at train_gan.py line 8",), warnings=("node17 is busy",)))
    assert "waiting for data" in page
    clean(seen)


def test_shared_page_hides_names_of_own_machines():
    offer = Offer(
        provider="lab-q7",
        instance_type="node17",
        device="RTX 3090",
        count=2,
        price_usd_per_hour=1.5,
        source="alice-q7",
        as_of="2026-11-24",
    )
    page = clean({"T4": offer, "A100": snapshot()[0]})
    assert "RTX 3090" in page
    clean(Ranking(matches=(), missed=(), rejected=()))


def test_shared_examination_hides_findings_text():
    check = Check(
        part="disk", status="problem", finding="/home/alice-q7 is full", advice="ask hunter2-q7"
    )
    assert "problem" in clean(
        Examination(
            kind="cpu", device="node17", checks=(check,), traces={"disk": "File train_gan.py"}
        )
    )


@pytest.mark.parametrize(
    "noun", [*every_noun(), machine_profile()], ids=lambda noun: type(noun).__name__
)
def test_every_record_type_becomes_a_shared_page(noun):
    page = clean(noun)
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    assert len(page) < 300_000


def test_hostile_value_is_removed_from_shared_page():
    assert "<script>document" not in shared_page(
        {"T4": answers.HOSTILE, answers.HOSTILE: "T4"}, "x"
    )
