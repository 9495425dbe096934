import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.accelerator.kernels import covered

spans = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50)).map(lambda s: (s[0], s[0] + s[1])))


@given(spans)
def test_a_device_is_busy_wherever_one_of_its_kernels_runs(kernels):
    moments = {moment for start, end in kernels for moment in range(start, end)}
    assert covered(kernels) == pytest.approx(len(moments))
