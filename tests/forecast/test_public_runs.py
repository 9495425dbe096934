"""Packaged measurements are fast to read, physically possible, licensed, and forecast with the installed constants."""

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


def test_packaged_forecasts_match_installed_constants():
    assert public_journal().fingerprint == fingerprint_of_constants(), (
        "constants, intervals or kernel models changed since the public measurements were packaged: run python -m fitting public-journal"
    )


def test_every_run_has_shareable_source_license():
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
def test_unlicensed_collections_are_excluded(word):
    assert not [run for run in public_runs() if word in run.collection or word in run.url]


def test_every_run_is_physically_possible():
    for run in public_runs():
        assert run.step_time_ms > 0
        assert run.gpus >= run.nodes >= 1
        assert run.gpus % run.nodes == 0
        assert run.micro_batch >= 0
        assert run.accumulation >= 1
        memory = find_device(run.device).memory_gib
        if run.peak_memory_gib is not None:
            assert memory is None or 0 < run.peak_memory_gib <= memory.value


def test_every_run_has_forecast_or_reason():
    for run in public_runs():
        if run.forecast_ms is None:
            assert run.why_no_forecast
            assert not run.in_fit
            assert run.low_ms is run.high_ms is None
        else:
            assert not run.why_no_forecast
            assert 0 < run.low_ms <= run.forecast_ms <= run.high_ms


def test_runs_are_numerous_and_have_unique_ids():
    runs = public_runs()
    assert len(runs) > 3000
    assert len({run.device for run in runs}) >= 20
    assert max(Counter(run.id for run in runs).values()) == 1
    assert all(len(run.id) == 10 and int(run.id, 16) >= 0 for run in runs)
    kinds = Counter(run.model_kind for run in runs if run.forecast_ms)
    assert {"convolutions", "transformers", "experts"} <= set(kinds)


def test_packaged_runs_contain_no_local_paths():
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


def test_reading_public_runs_takes_less_than_50_ms():
    public_runs()
    took = []
    for _ in range(5):
        public_journal.cache_clear()
        start = time.perf_counter()
        public_runs()
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05, took  # the minimum is least affected by other processes


def test_packaged_files_stay_small():
    assert RUNS_FILE.stat().st_size < 500_000
    assert TRACES_FILE.stat().st_size < 4_000_000


def test_every_run_with_forecast_has_signature():
    journal = public_journal()
    assert len(journal.signature_of_run) == len(journal.runs)
    for run, place in zip(journal.runs, journal.signature_of_run, strict=True):
        assert place < len(journal.signatures)
        assert (place >= 0) or run.forecast_ms is None
    assert {run.device for run in journal.runs} == set(journal.cards)
    assert len(PHASES) == 3  # a signature sums over all phases


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


def test_public_runs_need_neither_network_nor_torch():
    subprocess.run([sys.executable, "-c", NO_NETWORK], check=True, timeout=60)
