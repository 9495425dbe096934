"""Errors in pages are reported with a status code and without a traceback."""

import asyncio
import html
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from entries import entry, whole_entry
from nouns import stacked
from trainpace.core.errors import UnknownName
from trainpace.core.records import save
from trainpace.journal import Journal, JournalUnusable
from trainpace.verbs.request import fields_of
from trainpace.web.app import application, render
from trainpace.web.whatif import BUILT_IN, MOST_LISTED, Models, WhatIfRequest


@pytest.fixture
def journal(tmp_path):
    with Journal.open(str(tmp_path / "journal.db")) as opened:
        yield opened


class Answer(NamedTuple):
    status: int
    text: str


class Client:
    """A client that calls the application without a socket, so that parts can be replaced."""

    def __init__(self, app):
        self._app = app

    def get(self, address):
        path, _, query = address.partition("?")
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "query_string": query.encode(),
            "headers": [(b"host", b"localhost")],
        }
        messages = []

        async def receive():
            return {"type": "http.request", "body": b""}

        async def send(message):
            messages.append(message)

        # use another thread, because the browser of other tests runs a loop in this one
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: asyncio.run(self._app(scope, receive, send))).result()
        return Answer(
            messages[0]["status"], b"".join(m.get("body", b"") for m in messages).decode()
        )


@pytest.fixture
def client(journal, tmp_path):
    return Client(application(journal, Models(tmp_path / "workloads"), (), ()))


def test_built_in_models_are_cached_and_never_traced(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "trainpace.workload.workloads.run_isolated", lambda *_: pytest.fail("a model was traced")
    )
    models = Models(tmp_path / "no such folder")
    assert all(models.get(name) is models.get(name) for name in BUILT_IN)
    assert {form for name in BUILT_IN for form in models.get(name).workload.forms} == {
        "fp32",
        "amp",
        "half",
    }


def test_saved_model_beyond_the_list_limit_can_be_selected(client, tmp_path):
    folder = tmp_path / "workloads"
    folder.mkdir()
    save(stacked(), folder / "z.json")
    for i in range(MOST_LISTED):
        (folder / f"m{i:04d}.json").touch()
    page = client.get("/whatif?model=z&precision=bf16")
    assert page.status == 200
    assert page.text.count("<option>m0") == MOST_LISTED
    assert (
        "<option selected>z</option>" in page.text
    )  # otherwise moving a slider would select another model
    with pytest.raises(UnknownName):
        Models(folder).get("y")


def test_rendering_error_returns_an_error_page_with_500(client, monkeypatch, capsys):
    def failing(name, **values):
        return 1 / 0 if name == "runs.html" else render(name, **values)

    monkeypatch.setattr("trainpace.web.app.render", failing)
    answer = client.get("/runs")
    assert answer.status == 500
    assert "This page failed" in answer.text
    assert "<nav" in answer.text
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_broken_journal_returns_503(client, journal):
    journal.read(lambda connection: connection.exec_driver_sql("DROP TABLE runs"))
    with pytest.raises(JournalUnusable):
        journal.count()
    for path in ("/runs", "/runs.json"):
        assert client.get(path).status == 503


def test_run_page_shows_interval_and_forecast(client, journal):
    one = whole_entry(forecast_ms=1.0)
    none = entry(step_time_ms=0.0, forecast_ms=1.0)
    journal.add_many([one, none])
    text = client.get(f"/run?id={one.id}").text
    assert f"{100 * one.interval_ms.coverage:.0f}%" in text
    assert client.get(f"/run?id={none.id}").status == 200


def test_urls_and_inputs_keep_full_precision(client, tmp_path):
    (tmp_path / "workloads").mkdir()
    save(stacked(), tmp_path / "workloads" / "z.json")
    text = client.get(
        "/whatif?model=z&precision=bf16&epochs=90.123456789&network=12.3456789&price=1.23456789"
    ).text
    assert 'data-twin="/whatif.json?' in text
    for number in ("90.123456789", "12.3456789", "1.23456789"):
        assert f'value="{number}"' in text
        assert f"={number}" in text.partition('data-twin="')[2].partition('"')[0]


def test_form_shows_every_request_field_with_label_and_value(client):
    page = client.get("/whatif?zero=2&epochs=2.5").text
    form = html.unescape(page[page.index('<form id="sliders"') : page.index("</form>")])
    for name, field in fields_of(WhatIfRequest).items():
        assert f'name="{name}"' in form
        assert (
            f"<label>{field.about.help}<" in form
            or f'<label class="slider">{field.about.help}<' in form
        )
    assert 'name="zero" type="number" inputmode="decimal" value="2" min="0"' in form
    assert 'value="2.5" min="1" step="any" data-low="1" data-high="300"' in form
