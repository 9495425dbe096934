"""What other rooms import from trainpace.report."""

import pytest

from trainpace import report


@pytest.mark.parametrize("name", report.__all__)
def test_every_name_can_be_imported(name):
    assert getattr(report, name) is not None


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        report.nonsense  # noqa: B018
