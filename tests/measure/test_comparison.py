"""Comparison of two data loaders."""

import re

from msgspec.structs import replace
from test_loader_advice import COST, measurement

from trainpace.core.outcome import Interval
from trainpace.measure import compare_loaders
from trainpace.measure.loader import Stage
from trainpace.report import comparison_verdict, loader_comparison_sections, show

TRAINING = replace(
    measurement(
        stages=(
            Stage(name="decode", kind="transform", wall_ms=2.0),
            Stage(name="augment", kind="transform", wall_ms=2.5),
            Stage(name="augment", kind="transform", wall_ms=0.5),
        )
    ),
    target="mine.py:training",
)
TESTING = replace(
    measurement(
        replace(COST, sample_wall_ms=2.5, sample_cpu_ms=2.5, collate_ms=10.0, batch_size=20),
        stages=(Stage(name="decode", kind="transform", wall_ms=2.0),),
    ),
    target="mine.py:testing",
    length=100,
)


def test_comparison_names_slower_loader_and_its_slowest_part():
    c = compare_loaders(TRAINING, TESTING)
    assert {part.name: part.ms for part in c.parts} == {
        "decode": (2.0, 2.0),
        "augment": (3.0, 0.0),
        "collating": (0.0, 0.5),
    }
    assert c.sample_ms == (5.0, 2.5)
    assert comparison_verdict(c) == (
        "Verdict: mine.py:training is the slower one: a sample takes 5 ms on one thread, 2 times the 2.5 ms of mine.py:testing."
        " Most of the difference is in augment: 3 ms."
    )


def test_comparison_verdict_does_not_depend_on_order():
    c, turned = compare_loaders(TRAINING, TESTING), compare_loaders(TESTING, TRAINING)
    assert (c.slower, turned.slower) == (0, 1)
    assert comparison_verdict(c) == comparison_verdict(turned)


def test_loader_passes_are_compared_at_common_worker_counts():
    def with_interval(m, low, high):
        points = [
            replace(p, interval_ms=Interval(low=low, high=high, coverage=0.9, basis=""))
            for p in m.points
        ]
        return replace(m, points=tuple(points))

    few = replace(TESTING, points=TESTING.points[:2])
    assert list(compare_loaders(TRAINING, few).alone) == [0, 1]
    assert (
        not compare_loaders(with_interval(TRAINING, 49.0, 51.0), with_interval(few, 34.0, 36.0))
        .alone[0]
        .is_noise
    )
    assert (
        compare_loaders(with_interval(TRAINING, 10.0, 90.0), with_interval(few, 34.0, 36.0))
        .alone[0]
        .is_noise
    )


def test_similar_loaders_are_reported_as_equally_fast():
    again = replace(TRAINING, sample=replace(TRAINING.sample, wall_ms=5.1))
    assert comparison_verdict(compare_loaders(TRAINING, again)) == (
        "Verdict: both are as fast: a sample takes 5 and 5 ms on one thread."
    )


def test_comparison_output_shows_both_loaders_and_difference(capsys):
    show(loader_comparison_sections(compare_loaders(TRAINING, TESTING)))
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"augment +3 +0 +-3", said)
    assert (
        "A whole pass with no workers: mine.py:training 1,000 samples in 5 s, mine.py:testing 100"
        in said
    )
    assert "trainpace loader mine.py:training" in said
