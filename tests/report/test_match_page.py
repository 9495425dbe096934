"""The match page shows the request, the price per hour and the date of each price."""

import datetime
import re

import pytest

from nouns import workload
from trainpace.report import match_page_json, match_sections, page
from trainpace.verbs.match import MatchRequest, run
from trainpace.verbs.request import Silent

TODAY = datetime.date(2026, 11, 24)
MINE = """
[[machine]]
name = "lab"
device = "A100 SXM 40GB"
count = 2
price_usd_per_hour = 2.5
"""


def answered(tmp_path, **asked):
    (tmp_path / "mine.toml").write_text(MINE)
    request = MatchRequest(
        model=workload(),
        samples=10_000_000,
        epochs=3,
        machines=str(tmp_path / "mine.toml"),
        gpu=("A100 SXM 40GB",),
        no_journal=True,
        evidence="none",
        **asked,
    )
    answer = run(request, Silent())
    text = page("", match_sections(answer, "cost", 60, TODAY), match_page_json(answer, TODAY))
    text = re.sub(r"(?s)<(script|style).*?</\1>", " ", text)
    return answer, re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def test_match_page_shows_deadline_budget_and_hourly_price(tmp_path):
    answer, text = answered(tmp_path, deadline=86_400.0, budget=50_000.0)
    assert answer.ranking.matches
    assert "deadline 24 h" in text or "deadline 1 day" in text
    assert "budget $50,000" in text
    assert re.search(r"\$[\d.]+ per hour", text)
    assert "3 epochs of 10,000,000 samples" in text
    assert "global batch 256 samples" in text


@pytest.mark.parametrize("asked", [{"deadline": 1.0}, {"budget": 0.01}])
def test_match_page_shows_limits_if_no_offer_matches(tmp_path, asked):
    answer, text = answered(tmp_path, **asked)
    assert not answer.ranking.matches
    assert re.search("deadline 1 s" if "deadline" in asked else r"budget \$0.01", text)
    assert "leaves none of" in text


def test_match_page_dates_every_price(tmp_path):
    answer, text = answered(tmp_path)
    assert any(m.offer.as_of is None for m in answer.ranking.matches)
    assert " ? " not in text
    assert "2026-11-20 or before" in text
    assert "your own" in text
    assert "deadline none" in text
