"""The resolutions of `trainpace.plan` agree with packaged measurements."""

import pytest
from fitting.differences import resolutions, several

from trainpace.plan.changes import NOISE
from trainpace.plan.settings import RESOLUTION, resolution


@pytest.mark.slow
def test_resolutions_match_packaged_measurements():
    measured = resolutions()
    for name in (
        "precision",
        "micro-batch",
        "compile",
        "memory format",
        "checkpointing",
        "model parallelism",
    ):
        found, pairs = measured[name]
        assert pairs >= 10, name
        assert RESOLUTION[name] == pytest.approx(found, abs=0.01), name
    assert measured["GPUs"][0] <= RESOLUTION["GPUs"] == NOISE
    assert measured["sharding"][0] < RESOLUTION["sharding"]  # the pairs use other numbers of GPUs


@pytest.mark.slow
def test_error_of_multi_setting_pairs_equals_largest_single_error():
    ratios = sorted(error / largest for _, error, largest, _ in several())
    assert len(ratios) >= 5
    assert 0.5 < ratios[len(ratios) // 2] < 1.2


def test_resolution_of_several_settings_is_the_largest():
    assert resolution(()) == 0
    assert resolution(("micro-batch", "compile")) == RESOLUTION["compile"]
