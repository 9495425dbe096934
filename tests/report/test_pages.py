"""Pages as text: names are escaped, the policy allows only the page's own content, and the data can be read back."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from answers import CANVASES, HOSTILE, PAGES, a_match, forecast_page
from nouns import workload
from trainpace.report.pages import SCRIPTS, STYLES, asset

VOID = {"meta", "rect", "line", "circle", "img", "link", "br", "path"}


@pytest.fixture(scope="module", params=PAGES)
def page(request):
    return request.param, PAGES[request.param]()


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.opened, self.tags, self.attributes, self.texts, self.policy = [], [], [], {}, ""

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.attributes += attrs
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policy = attrs["content"]
        if tag not in VOID:
            self.opened.append((tag, attrs))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += dict(attrs)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.opened.pop()[0] == tag

    def handle_data(self, data):
        if self.opened and self.opened[-1][0] in ("script", "style"):
            tag, attrs = self.opened[-1]
            self.texts.setdefault(attrs.get("type", tag), []).append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    assert reader.opened == []
    return reader


def test_content_security_policy_allows_only_page_content(page):
    _, text = page
    found = read(text)
    for kind in ("script", "style"):
        inside = {
            base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()
            for t in found.texts.get(kind, [])
        }
        (rule,) = [r for r in found.policy.split(";") if r.strip().startswith(f"{kind}-src")]
        assert set(re.findall(r"'sha256-(.*?)'", rule)) == inside
        assert "unsafe" not in rule
    assert "default-src 'none'" in found.policy


def test_hostile_names_are_escaped(page):
    name, text = page
    found = read(text)
    assert "img" not in found.tags
    assert not {
        a for a in found.attributes if a.startswith("on") or a in ("style", "src", "href", "srcset")
    }
    assert HOSTILE not in text
    if name != "nothing_fits":
        assert "&lt;img src=x" in text or "&lt;b&gt;" in text


def test_page_data_is_valid_json(page):
    _, text = page
    for data in read(text).texts["application/json"]:
        json.loads(data)


def test_page_has_its_charts_and_scripts(page):
    name, text = page
    assert len(text) < 2**20
    assert text.count('<figure class="chart">') == CANVASES.get(name, 0)
    assert read(text).texts.get("script", []) == (
        [asset(s) for s in SCRIPTS] if name in CANVASES else []
    )


def test_verdict_comes_before_charts(page):
    name, text = page
    if name != "timeline":  # a timeline has no verdict
        assert 0 < text.index('<div class="verdict') < text.index("<figure")


def test_assets_cannot_end_their_own_tag():
    for name in (*SCRIPTS, *STYLES):
        assert not re.search(r"</(script|style)|<!--", asset(name), re.IGNORECASE)


def test_negative_verdict_has_its_own_style():
    assert 'class="verdict no"' in PAGES["nothing_fits"]()
    assert 'class="verdict"' in PAGES["plan"]()


def test_forecast_page_shows_intervals_and_provenance():
    text = PAGES["forecast"]()
    assert re.search(r"A step takes [\d.,]+ ms \(90% interval [\d.,]+ to [\d.,]+\)", text)
    assert "constants fitted on public measurements" in text
    assert "held-out runs" in text
    assert "A forecast, not a measurement" in text


def test_forecast_page_explains_missing_forecast():
    from answers import asked, forecasts

    one = asked(workload(), "T4")
    refused = one._replace(
        rows=[
            type(one.rows[0])(
                **{
                    **{f: getattr(one.rows[0], f) for f in one.rows[0].__struct_fields__},
                    "step": None,
                    "reason": "no such rate.",
                    "step_time_interval_ms": None,
                    "mfu": None,
                }
            )
        ]
    )
    text = forecast_page(forecasts([refused]))
    assert "No forecast is possible. No such rate." in text


def test_match_page_data_has_the_displayed_ranks(monkeypatch):
    monkeypatch.setattr("trainpace.report.match.PAGE_ROWS", 2)
    text = a_match(top=2)
    rows = next(
        data["rows"]
        for data in map(json.loads, read(text).texts["application/json"])
        if "rows" in data
    )
    shown = re.findall(r"<tr[^>]*><td[^>]*>(\d+)\*?</td>", text)
    assert [row["rank"] for row in rows] == list(map(int, shown))
    assert any(row["rank"] > 2 and row["pareto"] for row in rows)


def test_page_is_smaller_than_300_kb(page):
    _, text = page
    assert len(text.encode()) < 300_000
