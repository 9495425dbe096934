"""Every color has enough contrast with its page, computed as in WCAG 2.2."""

import itertools
import math

import pytest

from trainpace.report.charts import INK, PAGE, SERIES_TONES, SOFT, TEXTURES, TONES, css_variables


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_palette_meets_contrast_limits(scheme):
    page = PAGE[scheme]
    assert contrast(INK[scheme], page) >= 7
    assert contrast(SOFT[scheme], page) >= 4.5
    assert {
        name: contrast(pair[scheme], page)
        for name, pair in TONES.items()
        if contrast(pair[scheme], page) < 3
    } == {}


@pytest.mark.parametrize("scheme", [0, 1])
def test_series_colors_are_distinct(scheme):
    assert len({TONES[name][scheme] for name in SERIES_TONES}) == len(SERIES_TONES)


def test_black_on_white_contrast_is_21_to_1():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_style_sheet_defines_every_tone_for_both_schemes():
    assert all(css_variables().count(f"--tone-{name}:") == 2 for name in TONES)


DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
"""On linear RGB (Machado, Oliveira and Fernandes 2009, severity 1)."""
STACKS = {
    "memory": ("parameters", "gradients", "states", "activations", "reserve"),
    "step": (
        "data",
        "host_to_device",
        "host_overhead",
        "forward",
        "backward",
        "optimizer",
        "communication",
        "idle",
    ),
}
APART = 12.0
"""Difference in CIE Lab that is seen at a glance between two areas that touch."""


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def without_green(colour):
    rgb = linear(colour)
    return [
        min(1.0, max(0.0, sum(m * c for m, c in zip(row, rgb, strict=True))))
        for row in DEUTERANOPIA
    ]


def lab(rgb):
    r, g, b = rgb
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize("stack", STACKS)
def test_stacked_parts_differ_for_green_blind_readers(stack, scheme):
    alike = [
        (a, b)
        for a, b in itertools.combinations(STACKS[stack], 2)
        if math.dist(lab(without_green(TONES[a][scheme])), lab(without_green(TONES[b][scheme])))
        < APART
        and TEXTURES.get(a) == TEXTURES.get(b)
    ]
    assert alike == []
