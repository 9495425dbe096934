"""What other rooms import from trainpace.report."""

import pytest

from trainpace import report


@pytest.mark.parametrize("name", [name for name in report._homes() if name not in ("TYPE_CHECKING", "Any")])
def test_every_name_can_be_imported(name):
    assert getattr(report, name) is not None


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        report.nonsense  # noqa: B018
