"""Records as HTML for a notebook: every kind, hostile text, and never an exception."""

import math
import re
from html.parser import HTMLParser

import msgspec
import pytest

import trainpace
from answers import HOSTILE
from entries import entry
from nouns import every_noun, machine_profile, measurement
from trainpace.core.hardware import catalogue
from trainpace.core.outcome import Interval
from trainpace.core.records import Record
from trainpace.report import html_of
from trainpace.verbs.request import Rows

ALLOWED = {
    "div",
    "p",
    "strong",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "details",
    "summary",
    "pre",
}


class Checked(HTMLParser):
    """Parse HTML and check that tags are allowed, properly nested and have no attribute except `open`. `rows` holds the cells."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.seen, self.text = [], [], set(), ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag in ALLOWED, tag
        assert [name for name, _ in attributes if (tag, name) != ("details", "open")] == []
        self.open.append(tag)
        self.seen.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


class Row(Record):
    gpu: str
    step_time_ms: float
    step_time_ms_low: float
    step_time_ms_high: float
    model: str = "resnet18"


class Answer(Record, Rows[Row]):
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def row(gpu, ms=10.0):
    return Row(gpu=gpu, step_time_ms=ms, step_time_ms_low=ms - 1, step_time_ms_high=ms + 2)


def test_rows_become_table_with_common_values_above():
    shown = Checked(html_of(Answer(rows=(row("T4"), row("A100", 5.0)))))
    assert shown.rows == [["gpu", "step time, ms"], ["T4", "10 (9 to 12)"], ["A100", "5 (4 to 7)"]]
    assert "All: model resnet18" in shown.text


def test_units_follow_names_and_defaults_are_omitted():
    class Facts(Record):
        peak_memory_gib: float
        samples_per_second: float
        hours: Interval
        retries: int = 0
        notes: str = ""

    facts = Facts(
        peak_memory_gib=2.5,
        samples_per_second=100,
        hours=Interval(low=1, high=2, coverage=0.9, basis=""),
    )
    rows = Checked(html_of(facts)).rows
    assert rows == [["peak memory, GiB", "2.5"], ["samples per second", "100"], ["hours", "1 to 2"]]


@pytest.mark.parametrize(
    "noun",
    [*every_noun(), machine_profile(), measurement(), entry(batch=1)],
    ids=lambda n: type(n).__name__,
)
def test_every_record_type_has_html(noun):
    shown = html_of(noun)
    assert "table" in Checked(shown).seen
    assert "<pre>" not in shown
    assert len(shown) < 300_000


def test_api_answers_have_html():
    """The API gives records their HTML display."""
    forecasts = trainpace.forecast("resnet18", gpu=["T4", "V100"], batch=8, evidence="none")
    assert {row[0] for row in Checked(forecasts._repr_html_()).rows[1:3]} == {
        "T4",
        "V100 SXM2 16GB",
    }
    ranking = trainpace.match("resnet18", samples="1.28M", epochs=2, gpu=["T4"])
    shown = Checked(ranking._repr_html_())
    assert ("offer provider" in shown.text, "All: offer device T4" in shown.text) == (True, True)
    plan = trainpace.plan(
        "resnet18", gpu="A100", batch=64, samples="1.28M", epochs=90, evidence="none"
    )
    assert plan.changes[0].title in Checked(plan._repr_html_()).text
    answer = trainpace.schedule(samples=9000, epochs=3, micro_batch=8, step_time="10ms")
    assert ["steps", "3,375"] in Checked(answer._repr_html_()).rows


def test_lists_become_truncated_tables():
    gpus = trainpace.gpus()
    shown = Checked(gpus._repr_html_())
    assert isinstance(gpus, list)
    assert (
        shown.text.startswith("Devices"),
        f"20 of {len(catalogue()):,} are shown." in shown.text,
    ) == (True, True)
    assert html_of([]) == "<div><p><strong>List</strong></p></div>"


def test_foreign_text_is_escaped_everywhere():
    class Foreign(Record):
        name: str
        several: tuple[str, ...]
        named: dict[str, str]
        inner: tuple[Row, ...]

    shown = html_of(
        Foreign(
            name=HOSTILE,
            several=(HOSTILE, "\x1b[2J"),
            named={HOSTILE: HOSTILE},
            inner=(row(HOSTILE), row("b")),
        )
    )
    seen = Checked(shown)
    assert seen.text.count("document.title") >= 6
    assert not re.search("[\x00-\x08\x0b-\x1f]", shown)


def test_html_of_large_answers_stays_small():
    many = Answer(
        rows=tuple(row(f"GPU {i}" * 500, i) for i in range(5000)), notes=("x" * 10**6,) * 50
    )
    shown = html_of(many)
    assert len(shown) < 60_000
    assert "20 of 5,000 are shown." in shown

    class Deep(Record):
        inner: object
        name: str = "deep"

    deep = Deep(inner=None, name="innermost")
    for i in range(200):
        deep = Deep(inner=(deep, deep), name=str(i))
    assert len(html_of(deep)) < 100_000


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308, 5e-324, 10**400])
def test_html_accepts_unusual_numbers(number):
    class Odd(Record):
        value: float | int

    assert Checked(html_of(Odd(value=number))).text


def test_failing_records_fall_back_to_text():
    class Broken(Record):
        name: str = "x"

        def __repr__(self):
            raise RuntimeError

        @property
        def __struct_fields__(self):
            raise RuntimeError

    class BrokenRows(Rows):
        def to_dicts(self):
            raise RuntimeError("no rows")

        def __repr__(self):
            return "<b>mine</b>"

    assert "cannot be shown" in html_of(Broken())
    assert html_of(BrokenRows()) == "<pre>&lt;b&gt;mine&lt;/b&gt;</pre>"


def test_core_records_do_not_define_html():
    import subprocess
    import sys

    code = "from trainpace.core.records import Record; assert not hasattr(Record, '_repr_html_'); import trainpace.api; assert hasattr(Record, '_repr_html_')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert issubclass(Answer, msgspec.Struct)
