import json
import re
from html.parser import HTMLParser

from trainpace.outcome import StepTime
from trainpace.report.html import ReportRow, render

STEP = StepTime(forward_ms=1.0, backward_ms=2.0, optimizer_ms=0.5)


def row(model="<b>cnn</b></script>", measured=4.0):
    return ReportRow(
        model=model, batch=8, device="a & b", forecast_ms=3.5, low_ms=2.0, high_ms=7.0, measured_ms=measured,
        forecast_step=STEP, measured_step=STEP if measured else None,
    )  # fmt: skip


def test_error_is_against_the_measurement():
    assert row().error_percent == -12.5
    assert row(measured=None).error_percent is None


def test_text_is_escaped_and_tags_balance():
    page = render("A < B", ["1 < 2 & 3"], [row(), row(measured=None)])
    assert "<b>cnn" not in page
    assert "A &lt; B" in page
    opened = []

    class Check(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "rect"):
                opened.append(tag)

        def handle_endtag(self, tag):
            if tag != "rect":
                assert opened.pop() == tag

    Check().feed(page)
    assert opened == []


def test_data_can_be_read_back():
    page = render("t", [], [row()])
    data = re.search(r'<script type="application/json" id="rows">(.*?)</script>', page).group(1)
    assert json.loads(data)[0]["model"] == "<b>cnn</b></script>"


def test_bar_widths_are_the_parts_shares():
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', render("t", [], [row(measured=None)]))]
    assert [round(w / sum(widths), 3) for w in widths] == [0.286, 0.571, 0.143]
