"""Sentences about jumps and trends, and which batch size they recommend."""

from msgspec.structs import replace

from trainpace.core.outcome import Jump
from trainpace.core.stats import trend_of
from trainpace.report.steps import (
    MOST_JUMPS,
    jumps_in_words,
    no_jumps,
    shape_in_words,
    trend_in_words,
)

JUMP = Jump(
    before=16,
    batch=17,
    before_ms=37.0,
    after_ms=69.0,
    excess_ms=30.0,
    causes=("a padded batch",),
    next_good=32,
)


def test_size_before_jump_is_better_only_if_faster():
    (words,) = jumps_in_words([JUMP], {16: 432.0, 17: 246.0})
    assert (
        "Better than 17 (246): batch 16 (432 samples/s); the next good batch size is 32." in words
    )
    assert "Cause: a padded batch." in words
    (words,) = jumps_in_words([replace(JUMP, after_ms=38.0, next_good=None)], {})
    assert "Better than" not in words
    assert "no larger size of the sweep that fits does as well" in words


def test_many_jumps_are_summarized():
    jumps = [replace(JUMP, before=16 * i, batch=16 * i + 1) for i in range(1, 10)]
    words = jumps_in_words(jumps, {})
    assert len(words) == MOST_JUMPS + 1
    assert "3 more jumps, after batch 112, 128, 144" in words[-1]


def test_no_jumps_sentence_names_checked_sizes():
    sizes = list(range(1, 33))
    step_ms = [10.0 + b + 0.2 * (b > 16) for b in sizes]
    trend = trend_of(sizes, step_ms, [b / ms for b, ms in zip(sizes, step_ms, strict=True)])
    assert "0.8% after batch 16" in no_jumps(sizes, trend)
    assert "--batch 8:64 checks every size" in no_jumps([8, 16, 64], None)


def test_trend_sentences_name_slope_and_knee():
    sizes = list(range(1, 65))
    step_ms = [10.0 + 2.0 * b for b in sizes]
    trend = trend_of(sizes, step_ms, [1e3 * b / ms for b, ms in zip(sizes, step_ms, strict=True)])
    words = trend_in_words(trend)
    assert words[0] == shape_in_words(trend)
    assert "is linear. Fitted line: 10 ms + 2 ms per sample (R² over 0.9999)" in words[0]
    assert f"hardly grows from batch {trend.knee_batch} on" in words[1]
    steep = trend_of(sizes, [1.0] * 64, [float(b) for b in sizes])
    assert steep.knee_batch == 61
    assert (
        "every smaller batch has over 5% less" in trend_in_words(replace(steep, knee_batch=64))[1]
    )


def test_jump_across_a_gap_names_both_sizes():
    (words,) = jumps_in_words([replace(JUMP, before=9, batch=16)], {})
    assert words.startswith("Jump between batch 9 and 16: ")
    assert "more than 7 more samples usually cost." in words
    assert "one more sample" not in words
