"""Charts of the documentation support light and dark themes and are small."""

import re
import xml.etree.ElementTree as ET

import pytest
from chart_gallery import ANSWERS, CHARTS, MOST_BYTES, ROOT, themed

from trainpace.report.charts import INK, TONES


def test_themed_chart_has_dark_mode_colors():
    light, dark = TONES["measured"]
    made = themed(
        f'<svg width="9"><path d="M 1.2345 2&#10; L 30.98765 4" style="fill: {light}; stroke: {INK[0]}"/></svg>'
    )
    rule = re.search(r"<style>(.*)</style>", made)[1]
    by_day, by_night = rule.split("@media (prefers-color-scheme:dark)")
    (name,) = re.findall(rf"--(c\d+):{light}", by_day)
    assert f"--{name}:{dark}" in by_night
    drawn = ET.fromstring(made).find("path")
    assert f"fill: var(--{name})" in drawn.get("style")
    assert light not in drawn.get("style")
    assert "30.9 4" in drawn.get("d")


@pytest.mark.parametrize(
    "name", [short for _, charts in ANSWERS.values() for short in charts.values()]
)
def test_committed_charts_are_small_themed_and_documented(name):
    text = (CHARTS / f"{name}.svg").read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_BYTES
    assert "prefers-color-scheme:dark" in text
    ET.fromstring(text)
    assert f"pictures/charts/{name}.svg" in (ROOT / "docs/charts.md").read_text()
