"""Forecasts of several sequence lengths as a sentence and as a chart."""

import pytest
from msgspec.structs import replace

from answers import asked
from nouns import stacked
from trainpace.core.hardware import find_device
from trainpace.report.charts import SERIES_TONES
from trainpace.report.forecast import verdict
from trainpace.report.steps import lengths_chart

LENGTHS = (512, 1024, 2048)


@pytest.fixture(scope="module")
def rows():
    """Forecasts with equal sample counts per length. Time grows faster than the length below 1024 tokens, slower above."""
    (one,) = asked(stacked(), "H100 SXM").rows
    costs = dict(zip(LENGTHS, (10.0, 15.0, 40.0), strict=True))
    return [
        replace(one, sequence_length=length, cost_usd=costs[length], fits=True)
        for length in LENGTHS
    ]


def test_cheapest_sequence_length_is_compared_per_token(rows):
    words, _ = verdict(rows)
    assert words.startswith("The longest sequence that fits has 2,048 tokens: ")
    assert "A token costs least with 1,024 tokens: H100 SXM at batch 8, " in words
    assert "$15 in all" in words.replace("$15.00", "$15")
    assert "costs least" not in verdict([replace(row, cost_usd=None) for row in rows])[0]


def test_lengths_chart_draws_fitting_devices_and_names_others(rows):
    names = [
        find_device(name).name
        for name in ("K80", "P100", "V100", "T4", "A100", "H100", "H200", "L4")
    ]
    assert len(names) == len(SERIES_TONES) + 2
    nothing_fits_on, *others = names
    many = [
        replace(row, device=name, fits=name != nothing_fits_on) for name in names for row in rows
    ]
    made = lengths_chart(many)
    assert [line.name for line in made.series] == others[: len(SERIES_TONES)]
    assert made.note.endswith(f" Not drawn: {others[-1]}.")
    assert lengths_chart(rows).note in made.note
    assert not made.marks


def test_lengths_chart_marks_longest_that_fits(rows):
    (mark,) = lengths_chart([*rows[:2], replace(rows[2], fits=False)]).marks
    assert (mark.at, mark.text) == (1024, "H100 SXM: longest that fits")
