"""Public names of trainpace.report."""

import pytest

from trainpace import report


@pytest.mark.parametrize("name", report.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(report, name) is not None


def test_unknown_attribute_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        report.nonsense  # noqa: B018
