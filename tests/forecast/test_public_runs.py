"""The packaged measurements: read quickly, physically possible, each with its source and licence, and of the installed constants."""

import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from trainpace.core.hardware import find_device
from trainpace.forecast import (
    FOLDER,
    RUNS_FILE,
    TRACES_FILE,
    fingerprint_of_constants,
    public_journal,
    public_runs,
)
from trainpace.workload import PHASES

SOURCES = Path(__file__).parents[2] / "fitting/data/public_sources.toml"
SHAREABLE = {"MIT", "Apache-2.0", "BSD-3-Clause", "CC-BY-4.0"}


def test_the_forecasts_are_of_the_installed_constants():
    assert public_journal().fingerprint == fingerprint_of_constants(), (
        "constants, intervals or kernel models changed since the public measurements were packaged: run python -m fitting public-journal"
    )


def test_every_run_names_a_source_whose_licence_lets_it_be_shared():
    entries = tomllib.loads(SOURCES.read_text())["source"]
    licences = {entry["name"]: entry["licence"] for entry in entries}
    for run in public_runs():
        assert run.licence in SHAREABLE
        assert run.licence == licences[run.source]
        assert run.url.startswith("https://github.com/")
        assert run.trust in "ABC"
    text = (FOLDER / "SOURCES.md").read_text()
    for entry in entries:
        if entry["name"] in {run.source for run in public_runs()}:
            assert (
                f"| [{entry['name']}]({entry['url']}) | {entry['licence']} | {entry['copyright']} |"
                in text
            )


@pytest.mark.parametrize(
    "word", ["lambda", "ryujaehun", "bryzgalov", "simpletuner", "cvmodels", "github_threads/"]
)
def test_collections_without_a_licence_are_left_out(word):
    assert not [run for run in public_runs() if word in run.collection or word in run.url]


def test_every_run_is_possible():
    for run in public_runs():
        assert run.step_time_ms > 0
        assert run.gpus >= run.nodes >= 1
        assert run.gpus % run.nodes == 0
        assert run.micro_batch >= 0
        assert run.accumulation >= 1
        memory = find_device(run.device).memory_gib
        if run.peak_memory_gib is not None:
            assert memory is None or 0 < run.peak_memory_gib <= memory.value


def test_a_run_has_a_forecast_in_its_interval_or_a_reason_for_none():
    for run in public_runs():
        if run.forecast_ms is None:
            assert run.why_no_forecast
            assert not run.in_fit
            assert run.low_ms is run.high_ms is None
        else:
            assert not run.why_no_forecast
            assert 0 < run.low_ms <= run.forecast_ms <= run.high_ms


def test_there_are_thousands_of_runs_on_many_cards_with_ids_of_their_own():
    runs = public_runs()
    assert len(runs) > 3000
    assert len({run.device for run in runs}) >= 20
    assert max(Counter(run.id for run in runs).values()) == 1
    assert all(len(run.id) == 10 and int(run.id, 16) >= 0 for run in runs)
    kinds = Counter(run.model_kind for run in runs if run.forecast_ms)
    assert {"convolutions", "transformers", "experts"} <= set(kinds)


def test_no_path_of_a_machine_is_packaged():
    for run in public_runs():
        for text in (
            run.model,
            run.notes,
            run.why_no_forecast,
            run.assumed,
            run.parallelism or "",
            run.software,
        ):
            assert "/work" not in text
            assert "/home" not in text


def test_reading_takes_less_than_50_ms():
    public_runs()
    took = []
    for _ in range(5):
        public_journal.cache_clear()
        start = time.perf_counter()
        public_runs()
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05, took  # the fastest: the others share the processor


def test_what_is_packaged_stays_small():
    assert RUNS_FILE.stat().st_size < 500_000
    assert TRACES_FILE.stat().st_size < 4_000_000


def test_every_run_with_a_workload_has_a_signature_of_it():
    journal = public_journal()
    assert len(journal.signature_of_run) == len(journal.runs)
    for run, place in zip(journal.runs, journal.signature_of_run, strict=True):
        assert place < len(journal.signatures)
        assert (place >= 0) or run.forecast_ms is None
    assert {run.device for run in journal.runs} == set(journal.cards)
    assert len(PHASES) == 3  # a signature sums over them all


NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError("the network was asked")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from trainpace.forecast import nearest, public_runs
from trainpace.core.execution import Execution
from trainpace.core.hardware import find_device
from trainpace.workload import load_workload
import sys
workload = load_workload("resnet18", ("fp32",))
found = nearest(workload, Execution(micro_batch=32), find_device("T4"))
assert len(public_runs()) > 3000 and found.closest is not None
assert "torch" not in sys.modules
"""


def test_neither_the_network_nor_torch_is_needed():
    subprocess.run([sys.executable, "-c", NO_NETWORK], check=True, timeout=60)
