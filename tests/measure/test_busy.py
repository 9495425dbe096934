import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.measure.kernels import covered, work_of

spans = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 50)).map(lambda s: (s[0], s[0] + s[1]))
)


@given(spans)
def test_busy_time_counts_overlapping_kernels_once(kernels):
    moments = {moment for start, end in kernels for moment in range(start, end)}
    assert covered(kernels) == pytest.approx(len(moments))


def test_host_copies_count_only_outside_compute():
    work = work_of(
        [
            ("Memcpy HtoD (Pageable -> Device)", 0, 3000),
            ("gemm", 2000, 5000),
            ("gemm", 6000, 7000),
            ("Memcpy DtoH (Device -> Pinned)", 7000, 7500),
            ("ncclDevKernel_AllReduce", 9000, 20000),
        ]
    )
    assert work.busy_ms == pytest.approx(6.5)
    assert work.copies_ms == pytest.approx(2.0)
    assert work.kernels_ms == {
        "gemm": pytest.approx(4.0),
        "Memcpy DtoH (Device -> Pinned)": pytest.approx(0.5),
    }


def test_device_with_only_communication_has_no_work():
    assert work_of([("ncclDevKernel_AllReduce", 0, 100)]) is None
