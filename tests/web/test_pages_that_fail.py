"""What stops a page: said with its status, in place, and without a traceback for the reader."""

import asyncio
import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from entries import entry, whole_entry
from nouns import stacked
from trainpace.errors import TrainpaceError, UnknownName
from trainpace.journal import Journal, JournalUnusable
from trainpace.records import load, save
from trainpace.web import models as models_module
from trainpace.web.app import application
from trainpace.web.models import MOST_LISTED, MOST_TRACING, Busy, Models
from trainpace.web.render import Templates
from trainpace.workload import Workload


@pytest.fixture
def journal(tmp_path):
    with Journal.open(str(tmp_path / "journal.db")) as opened:
        yield opened


class Answer(NamedTuple):
    status: int
    text: str


class Client:
    """Asks the application without a socket, so that its parts can be replaced."""

    def __init__(self, app):
        self._app = app

    def get(self, address):
        path, _, query = address.partition("?")
        scope = {
            "type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": [(b"host", b"localhost")],
        }  # fmt: skip
        messages = []

        async def receive():
            return {"type": "http.request", "body": b""}

        async def send(message):
            messages.append(message)

        # in a thread of its own: the browser of other tests has a loop in this one
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: asyncio.run(self._app(scope, receive, send))).result()
        return Answer(messages[0]["status"], b"".join(m.get("body", b"") for m in messages).decode())


@pytest.fixture
def client(journal, tmp_path):
    return Client(application(journal, Models(tmp_path / "workloads"), (), ()))


@pytest.fixture
def traced(monkeypatch):
    """Traces are made up; the names that were asked for."""
    asked = []
    monkeypatch.setattr(models_module, "load_workload", lambda name, *_: asked.append(name) or stacked())
    return asked


def test_a_trace_that_cannot_be_saved_is_kept_in_memory(tmp_path, traced):
    (tmp_path / "data").write_text("a file where the folder should be")
    models = Models(tmp_path / "data" / "workloads")
    assert models.get("resnet18") is models.get("resnet18")
    assert traced == ["resnet18"]


def test_a_trace_that_can_be_is_a_file(tmp_path, traced):
    for _ in range(2):
        models = Models(tmp_path)
        models.get("resnet18")
    assert load(tmp_path / "built-in" / "resnet18.json", Workload) is not None
    assert traced == ["resnet18"]


def test_a_few_wait_for_a_trace_and_more_are_sent_away(client, monkeypatch):
    go_on, traced, answers = threading.Event(), [], queue.SimpleQueue()

    def load_workload(name, *_):
        traced.append(name)
        assert go_on.wait(60)
        return stacked()

    monkeypatch.setattr(models_module, "load_workload", load_workload)
    with ThreadPoolExecutor(MOST_TRACING + 1) as pool:
        for _ in range(MOST_TRACING + 1):
            pool.submit(lambda: answers.put(client.get("/whatif.json?model=resnet18")))
        try:
            away = answers.get(timeout=60)
            page = client.get("/whatif?model=resnet34&batch=3")
            other = client.get("/runs")
        finally:
            go_on.set()
    assert (away.status, json.loads(away.text)["status"]) == (503, 503)
    assert "ask again" in json.loads(away.text)["message"]
    assert page.status == 503
    assert '<a href="/whatif?model=resnet34&amp;batch=3">Ask again</a>' in page.text
    assert other.status == 200
    assert [answers.get(timeout=60).status for _ in range(MOST_TRACING)] == [200] * MOST_TRACING
    assert traced == ["resnet18"]
    assert client.get("/whatif?model=resnet34&batch=3").status == 200


def test_tracing_that_failed_lets_the_next_one_try(tmp_path, monkeypatch):
    def load_workload(*_):
        raise TrainpaceError("no.")

    monkeypatch.setattr(models_module, "load_workload", load_workload)
    models = Models(tmp_path)
    for _ in range(2):
        with pytest.raises(TrainpaceError, match="no") as refused:
            models.get("resnet18")
        assert not isinstance(refused.value, Busy)


def test_more_saved_models_than_are_listed_can_be_asked_for(client, tmp_path):
    folder = tmp_path / "workloads"
    folder.mkdir()
    save(stacked(), folder / "z.json")
    for i in range(MOST_LISTED):
        (folder / f"m{i:04d}.json").touch()
    page = client.get("/whatif?model=z&precision=bf16")
    assert page.status == 200
    assert page.text.count("<option>m0") == MOST_LISTED
    assert "<option selected>z</option>" in page.text  # or moving a slider would ask for another model
    with pytest.raises(UnknownName):
        Models(folder).get("y")


def test_a_page_that_cannot_be_drawn_is_said_as_every_error(client, monkeypatch, capsys):
    render = Templates.render

    def failing(self, name, **values):
        return 1 / 0 if name == "runs.html" else render(self, name, **values)

    monkeypatch.setattr(Templates, "render", failing)
    answer = client.get("/runs")
    assert answer.status == 500
    assert "This page could not be made" in answer.text
    assert "<nav" in answer.text
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_journal_that_the_database_refuses_is_503(client, journal):
    journal.read(lambda connection: connection.exec_driver_sql("DROP TABLE runs"))
    with pytest.raises(JournalUnusable):
        journal.count()
    for path in ("/runs", "/runs.json"):
        assert client.get(path).status == 503


def test_a_run_says_its_interval_and_forecast(client, journal):
    one = whole_entry(forecast_ms=1.0)
    none = entry(step_time_ms=0.0, forecast_ms=1.0)
    journal.add_many([one, none])
    text = client.get(f"/run?id={one.id}").text
    assert f"at {100 * one.interval_ms.coverage:.0f} % (" in text
    assert client.get(f"/run?id={none.id}").status == 200


def test_addresses_and_inputs_hold_every_digit(client, tmp_path):
    (tmp_path / "workloads").mkdir()
    save(stacked(), tmp_path / "workloads" / "z.json")
    text = client.get("/whatif?model=z&precision=bf16&epochs=90.123456789&network=12.3456789&price=1.23456789").text
    assert 'data-twin="/whatif.json?' in text
    for number in ("90.123456789", "12.3456789", "1.23456789"):
        assert f'value="{number}"' in text
        assert f"={number}" in text.partition('data-twin="')[2].partition('"')[0]


def test_the_description_knows_every_status_that_pages_answer_with(client):
    paths = json.loads(client.get("/openapi.json").text)["paths"]
    for described in paths.values():
        assert {"200", "400", "404", "422", "500", "503"} <= set(described["get"]["responses"])
