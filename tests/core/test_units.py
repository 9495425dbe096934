import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core import units
from trainpace.core.errors import TrainpaceError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("210ms", 0.21),
        ("90s", 90),
        ("1.5h", 5400),
        ("2h30m", 9000),
        ("1 day 4 h", 100800),
        ("3d", 259200),
        ("1:30:00", 5400),
        ("2-12:00:00", 216000),
        ("500us", 5e-4),
        ("10.7h", 38520),
        ("1e3s", 1000),
    ],
)
def test_parse_duration_reads_common_notations(text, seconds):
    assert units.parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "90", "fast", "-5s", "1h-3m", "5 parsecs", "1e999s", "h", "1.2.3s", "nan s", "5s!"]
)
def test_parse_duration_rejects_invalid_text(text):
    with pytest.raises(TrainpaceError):
        units.parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1281167", 1281167),
        ("1_281_167", 1281167),
        ("1,281,167", 1281167),
        ("1.28M", 1280000),
        ("7B", 7 * 10**9),
        ("300b", 3 * 10**11),
        ("50k", 50000),
        ("2T", 2 * 10**12),
        ("1e3", 1000),
    ],
)
def test_parse_count_reads_common_notations(text, count):
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "1.5", "seven", "-3", "7 billion", "1e999", "nan", "7BB"])
def test_parse_count_rejects_invalid_text(text):
    with pytest.raises(TrainpaceError):
        units.parse_count(text)


@pytest.mark.parametrize(
    ("text", "usd"), [("500", 500), ("$500", 500), ("500usd", 500), ("1.2k", 1200), ("$ 3.50", 3.5)]
)
def test_parse_usd_reads_common_notations(text, usd):
    assert units.parse_usd(text) == pytest.approx(usd)


@pytest.mark.parametrize("text", ["€5", "-3", "", "five", "$"])
def test_parse_usd_rejects_invalid_text(text):
    with pytest.raises(TrainpaceError):
        units.parse_usd(text)


def test_parse_ratio_reads_percent_as_share_of_old_speed():
    assert units.parse_ratio("363%") == pytest.approx(3.63)
    assert units.parse_ratio("3.63x") == pytest.approx(3.63)
    for text in ("363", "0x", "-5%", "fast"):
        with pytest.raises(TrainpaceError):
            units.parse_ratio(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-6, "2 µs"),
        (0.21, "210 ms"),
        (5, "5 s"),
        (59.99, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (3599.9, "1 h"),
        (94594.5, "26 h 17 min"),
        (5 * 86400 + 3600, "5 days 1 h"),
        (2 * 86400, "2 days"),
        (33 * 86400, "33 days"),
        (32 * 50 * 10.7 * 3600, "713 days (1.95 years)"),
        (117_187_500 * 86400, "320,842 years"),
        (math.inf, "forever"),
    ],
)
def test_format_duration_uses_readable_units(seconds, text):
    assert units.format_duration(seconds) == text


@given(st.floats(1e-3, 1e8))
def test_formatted_duration_is_within_2_percent(seconds):
    shown = units.format_duration(seconds).partition(" (")[0]
    assert units.parse_duration_s(shown.replace(",", "")) == pytest.approx(seconds, rel=0.02)


@given(st.integers(0, 10**15))
def test_counts_round_trip(count):
    assert units.parse_count(f"{count:,}") == units.parse_count(str(count)) == count


def test_units_are_converted_and_formatted():
    assert units.hours_from_s(5400) == 1.5
    assert units.gib_from_bytes(2**31) == 2
    assert units.format_count(6.74e9) == "6.74 B"
    assert units.format_count(1281167) == "1,281,167"
    assert units.format_usd(3.5) == "$3.50"
    assert units.format_usd(420.42) == "$420"
    assert units.format_usd(0.00123) == "$0.00123"
    assert units.format_usd(0.0) == "$0.00"
