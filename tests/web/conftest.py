"""Fixtures of the dashboard tests: a data folder, servers and a browser."""

import math

import pytest

from entries import entry, sweep, whole_entry
from nouns import stacked
from served import served
from trainpace.core.execution import Execution
from trainpace.core.outcome import Interval, StepTime
from trainpace.core.records import save
from trainpace.journal import Journal

HOSTILE_NAME = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def measured(batch, ms, **fields):
    """Return a run of a sweep with an earlier forecast."""
    execution = Execution(micro_batch=batch, precision="amp_bf16", optimizer="adamw")
    return whole_entry(
        execution=execution,
        step_time_ms=ms,
        step=StepTime(forward_ms=0.3 * ms, backward_ms=0.6 * ms, optimizer_ms=0.1 * ms),
        interval_ms=Interval(
            low=0.99 * ms, high=1.01 * ms, coverage=0.9, basis="order statistics of 40 steps"
        ),
        step_times_ms=tuple(ms * (1 + 0.01 * math.sin(i)) for i in range(12)),
        forecast_ms=1.1 * ms,
        forecast_low_ms=0.9 * ms,
        forecast_high_ms=1.3 * ms,
        forecast_basis="seen card",
        **fields,
    )


def fill(journal):
    """Add two sweeps with a jump, failed runs and a hostile name."""
    sweeps = [
        sweep(
            model="timm:resnet50",
            device="NVIDIA A100",
            batches=tuple(range(1, 25)),
            finished_at="2026-11-21T08:00:00.000000Z",
        )
        for _ in range(2)
    ]
    for n, one in enumerate(sweeps):
        runs = [
            measured(
                b,
                5 + (1.2 + 0.1 * n) * b + 8 * (b > 16) + 0.02 * (b * 7 % 5),
                model=one.model,
                device=one.device,
                sweep=one.id,
            )
            for b in one.batches
        ]
        journal.add_many([one, *runs])
    journal.add_many(
        [
            entry(
                model=HOSTILE_NAME,
                device=HOSTILE_NAME,
                notes=HOSTILE_NAME,
                command="x --note '</script>'",
            ),
            entry(
                model="vgg16", step_time_ms=None, outcome="out_of_memory", reason="out of memory."
            ),
            sweep(model=HOSTILE_NAME),
        ]
    )
    return sweeps


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Return a data folder with a journal, valid and damaged workloads, and a link out of it."""
    folder = tmp_path_factory.mktemp("data")
    with Journal.open(str(folder / "trainpace" / "journal.db")) as journal:
        fill(journal)
    workloads = folder / "trainpace" / "workloads"
    (workloads / "built-in").mkdir(parents=True)
    save(stacked(), workloads / "little transformer.json")
    (workloads / "damaged.json").write_text('{"record": "Workload"')
    secret = folder / "secret.json"
    save(stacked(), secret)
    (workloads / "link.json").symlink_to(secret)
    return folder


@pytest.fixture(scope="session")
def server(data):
    with served(data) as running:
        yield running


@pytest.fixture(scope="session")
def guarded(data):
    """Serve with a token."""
    with served(data, "--with-token") as running:
        yield running


@pytest.fixture(scope="module")  # only one Playwright instance can be open at a time
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        yield browser
        browser.close()
