"""The dashboard over a million runs, in a real browser; 50 clients at once; hostile requests.

`--journal FILE` takes a journal that `--keep FILE` left, because filling one takes minutes.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import http.client
import json
import multiprocessing
import os
import platform
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
from journal import many  # noqa: E402
from trainpace.journal import Entry, Journal  # noqa: E402

RESULT = Path(__file__).parent / "results" / "dashboard.md"
ROUNDS = 9
ABSENT = ("fp8", "fp16", "tf32", "bf16", "fp32", "amp_fp16", "fp8", "fp16", "tf32")
ORDERS = (
    "fastest",
    "slowest",
    "model",
    "device",
    "oldest",
    "newest",
    "fastest",
    "model",
    "slowest",
)
FIRST_GOAL_MS, FILTER_GOAL_MS, WHATIF_GOAL_MS = 300, 300, 100
SHOWN = """async ([id, value]) => {
  const control = document.getElementById(id), shown = new Promise((done) => new MutationObserver((changes, observer) => {
    if (changes.some((c) => [...c.addedNodes].some((n) => n.id === "answer"))) {
      observer.disconnect();
      requestAnimationFrame(() => setTimeout(() => done(performance.now())));
    }
  }).observe(document.body, { childList: true, subtree: true }));
  const start = performance.now();
  control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
  return (await shown) - start;
}"""
"""Milliseconds from a changed control to the frame after the new answer is in the page, pauses for typing included."""


def filled(count: int) -> Iterator[Entry]:
    """Runs with commands, notes and, for every hundredth, a forecast made before it."""
    rng = random.Random(2)
    for i, entry in enumerate(many(count)):
        command = f"trainpace measure {entry.model} --batch {entry.execution.micro_batch} --precision amp_bf16 --steps 40"
        foretold: dict[str, Any] = {}
        if i % 100 == 0 and entry.step_time_ms is not None:
            ms = entry.step_time_ms * rng.lognormvariate(0, 0.12)
            foretold = {
                "forecast_ms": ms,
                "forecast_low_ms": 0.8 * ms,
                "forecast_high_ms": 1.25 * ms,
            }
        yield replace(entry, command=command, notes=f"night {i // 5000}", **foretold)


def first_pages(browser: Any, base: str) -> list[float]:
    """Milliseconds from the start of navigation to the load event, each in a browser that has seen nothing yet."""
    times = []
    for _ in range(ROUNDS):
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{base}/runs", wait_until="load")
        page.wait_for_timeout(50)
        times.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        context.close()
    return times


def filters(browser: Any, base: str) -> dict[str, list[float]]:
    """By filter: milliseconds from a changed field to the new list."""
    changes = {
        "a part of the model's name": [("f-model", f"model_1{i}") for i in range(ROUNDS)],
        "... and of the device's": [("f-device", f"device {i}") for i in range(ROUNDS)],
        "... and a batch size": [("f-batch", str(3 + i)) for i in range(ROUNDS)],
        "a precision that no run has": [("f-precision", p) for p in ABSENT],
        "a word that few runs have": [("f-text", f"night {100 + i}") for i in range(ROUNDS)],
        "a word that no run has": [("f-text", f"nowhere {i}") for i in range(ROUNDS)],
        "the order, all runs": [("f-order", o) for o in ORDERS],
        "the order, of some models": [("f-order", o) for o in ORDERS],
    }
    start = dict.fromkeys(changes, "/runs") | {
        "... and of the device's": "/runs?model=model_1",
        "... and a batch size": "/runs?model=model_1&device=3",
        "the order, of some models": "/runs?model=model_1",
    }
    return {name: changed(browser, base + start[name], some) for name, some in changes.items()}


def changed(browser: Any, address: str, changes: list[tuple[str, str]]) -> list[float]:
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(200)
    times = []
    for change in changes:
        times.append(page.evaluate(SHOWN, list(change)))
        page.wait_for_timeout(100)
    context.close()
    return times


def whatif(browser: Any, base: str) -> list[float]:
    """Milliseconds from a moved slider to the new figures and pictures."""
    changes = [("f-batch", str(b)) for b in (16, 24, 33, 48, 64, 96, 128, 200)]
    changes += [("f-precision", p) for p in ("fp32", "bf16", "tf32", "amp_bf16")]
    changes += [
        ("f-gpus", "8"),
        ("f-nodes", "2"),
        ("f-nodes", "4"),
        ("f-nodes", "16"),
        ("f-zero", "1"),
        ("f-zero", "2"),
    ]
    changes += [
        ("f-zero", "3"),
        ("f-epochs", "30"),
        ("f-epochs", "31"),
        ("f-gpu", "H100 SXM"),
        ("f-gpu", "T4"),
    ]
    times = []
    for model in ("resnet50", "vgg16", "mobilenet_v2"):
        times += changed(browser, f"{base}/whatif?model={model}", changes)
    return times


def clients(port: int, count: int, seconds: float) -> tuple[collections.Counter[str], list[float]]:
    """How often `count` clients that ask without pause were answered with which status, and how long each took in ms."""
    paths = [
        "/runs",
        "/runs.json?model=model_17",
        "/runs?order=fastest",
        "/runs?device=device+3&batch=7",
        "/score.json?model=model_1",
        "/sweeps",
        "/compare",
        "/runs?text=night+7",
        *(f"/whatif.json?batch={8 * i}&gpus=8&nodes={i}" for i in range(1, 5)),
        *(f"/whatif?batch={8 * i}&zero=1&gpus=4" for i in range(1, 5)),
        "/static/charts.js",
    ]
    statuses: collections.Counter[str] = collections.Counter()
    times: list[float] = []
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        rng = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while time.monotonic() < end:
            start = time.perf_counter()
            try:
                connection.request("GET", rng.choice(paths))
                answer = connection.getresponse()
                answer.read()
                statuses[str(answer.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                statuses[type(error).__name__] += 1
                connection.close()
            times.append(1e3 * (time.perf_counter() - start))
        connection.close()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses, times


def anonymous_mib(pid: int) -> float:
    found = re.search(r"RssAnon:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def row(name: str, times: list[float], goal: int | None) -> str:
    ordered = sorted(times)
    p90 = ordered[int(0.9 * (len(ordered) - 1))]
    return (
        f"| {name} | {statistics.median(times):.0f} | {p90:.0f} | {max(times):.0f} | {goal or ''} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hostile", type=int, default=2000)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from hostile_requests import requests, send  # type: ignore[import-not-found]
    from served import served  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        place = options.journal or Path(folder, "journal.db")
        if options.journal is None:
            with Journal.open(str(place)) as journal:
                assert journal.add_many(filled(options.runs)) == options.runs
            if options.keep is not None:
                shutil.copy(place, options.keep)
        with Journal.open(str(place)) as journal:
            count = journal.count()
        load = os.getloadavg()[0]
        with (
            served(Path(folder), "--journal", str(place)) as server,
            sync_playwright() as playwright,
        ):
            browser = playwright.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
            for model in ("resnet50", "vgg16", "mobilenet_v2"):
                http_get(server.port, f"/whatif.json?model={model}")  # traces it, once
            first = first_pages(browser, server.base)
            chosen = filters(browser, server.base)
            moved = whatif(browser, server.base)
            version = browser.version
            browser.close()
            pid = server.process.pid
            statuses, times = clients(server.port, options.clients, options.seconds)
            before = anonymous_mib(pid)
            hostile = collections.Counter(
                send(server.port, request, kind)
                for kind, request in requests(options.hostile, server.port)
            )
            after = anonymous_mib(pid)
    errors = sum(n for status, n in statuses.items() if status != "200")
    by_status = ", ".join(
        f"{status or 'closed'} {n}" for status, n in sorted(hostile.items(), key=str)
    )
    failed = sum(n for status, n in hostile.items() if status is not None and status >= 500)
    lines = [
        "# The dashboard under load",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {multiprocessing.cpu_count()} cores, Python {platform.python_version()},"
        f" Chromium {version}; load average at the start {load:.1f}. SQLite, {count:,} runs of 200 models. `python -m benchmarks serve`",
        "",
        "Milliseconds in the browser, server and browser on one machine. First page: from the start of navigation to the"
        " load event, nothing cached. Filters and what-if: from the changed control to the frame after the new answer stands"
        " in the page; filters wait 120 ms for a pause in typing, which is counted.",
        "",
        "| what | median | 90th percentile | slowest | to reach (median) |",
        "|---|---|---|---|---|",
        row("first page of all runs", first, FIRST_GOAL_MS),
        *(row(f"filter: {name}", some, FILTER_GOAL_MS) for name, some in chosen.items()),
        row(f"what-if update ({len(moved)} moves)", moved, WHATIF_GOAL_MS),
        "",
        f"{options.clients} clients at once, without pause, for {options.seconds:g} s: {len(times):,} answers,"
        f" {len(times) / options.seconds:.0f} a second, median {statistics.median(times):.0f} ms,"
        f" slowest {max(times):.0f} ms; errors: {errors}.",
        "",
        f"{options.hostile:,} hostile requests (traversal, Host, Origin, bodies, headers, queries, methods, noise, cut short):"
        f" {failed} answers from 500 up. By status:"
        f" {by_status}.",
        f"Anonymous memory of the server: {before:.0f} MiB before them, {after:.0f} after.",
        "What is read and written meanwhile is checked by tests/web/test_hostile.py.",
        "",
    ]
    report = "\n".join(lines) + "\n"
    print(report)
    RESULT.write_text(report)


def http_get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200, body[:300]
    return json.loads(body)


if __name__ == "__main__":
    main()
