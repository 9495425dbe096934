"""Every colour can be told from its page; contrast as WCAG 2.2 computes it."""

import pytest

from trainpace.report.charts import INK, PAGE, SERIES_TONES, SOFT, TONES, css_variables


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast(scheme):
    page = PAGE[scheme]
    assert contrast(INK[scheme], page) >= 7
    assert contrast(SOFT[scheme], page) >= 4.5
    assert {
        name: contrast(pair[scheme], page) for name, pair in TONES.items() if contrast(pair[scheme], page) < 3
    } == {}


@pytest.mark.parametrize("scheme", [0, 1])
def test_series_differ_from_each_other(scheme):
    assert len({TONES[name][scheme] for name in SERIES_TONES}) == len(SERIES_TONES)


def test_black_on_white_is_21_to_1():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_the_style_sheet_has_every_tone_twice():
    assert all(css_variables().count(f"--tone-{name}:") == 2 for name in TONES)
