"""Steps of a trace and the parts that they consist of."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import made_traces as made
from made_traces import ADD, ALL_REDUCE, GEMM, LOADER, Work
from trainpace.diagnose.profiled_ranks import PARTS, split, windows_of
from trainpace.diagnose.trace_formats import read_kineto

DEVICE_NAMES = st.sampled_from([GEMM, ADD, ALL_REDUCE, "some_kernel"])
LAUNCHED = st.tuples(
    DEVICE_NAMES, st.integers(0, 900), st.integers(0, 500), st.integers(0, 400)
).map(lambda k: (k[0], float(k[1]), float(k[1] + k[2]), float(k[1] + k[2] + k[3])))
ON_HOST = st.tuples(st.integers(0, 900), st.integers(0, 300))
WORKS = st.builds(
    lambda kernels, copies, operators, waits, loads: Work(
        1000.0,
        tuple(kernels),
        tuple(("Memcpy HtoD (Pinned -> Device)", *copy[1:]) for copy in copies),
        tuple(("aten::mm", float(a), float(a + n)) for a, n in operators),
        tuple(("cudaStreamSynchronize", float(a), float(a + n)) for a, n in waits),
        tuple((LOADER, float(a), float(a + n)) for a, n in loads),
    ),
    st.lists(LAUNCHED, min_size=1, max_size=8),
    st.lists(LAUNCHED, max_size=3),
    st.lists(ON_HOST, max_size=5),
    st.lists(ON_HOST, max_size=2),
    st.lists(ON_HOST, max_size=2),
)


def read(tmp_path, work, **more):
    return read_kineto(
        made.write(tmp_path / "trace.json", made.trace_of(made.events_of(work, **more)))
    )


def means(trace):
    parts = split(trace, windows_of(trace))
    return {
        name: round(float(ms.mean()), 2) for name, ms in parts.parts_ms.items() if ms.any()
    }, parts


@settings(max_examples=60, deadline=None)
@given(WORKS, st.integers(1, 4))
def test_parts_of_a_step_sum_to_step_time(tmp_path_factory, work, steps):
    trace = read(tmp_path_factory.mktemp("made"), work, steps=steps)
    windows = windows_of(trace)
    parts = split(trace, windows)
    assert (windows.end_us > windows.start_us).all()
    assert (windows.start_us[1:] >= windows.end_us[:-1]).all()
    for step in range(len(windows.start_us)):
        whole = math.fsum(ms[step] for ms in parts.parts_ms.values())
        assert whole == pytest.approx(parts.step_ms[step])
        assert whole == pytest.approx((windows.end_us[step] - windows.start_us[step]) / 1e3)
        hidden = parts.communication_ms[step] - parts.parts_ms["communication"][step]
        computing = math.fsum(parts.parts_ms[kind][step] for kind in ("matrix", "memory", "other"))
        assert -1e-9 <= hidden <= computing + 1e-9
        on_device = (
            computing
            + parts.parts_ms["communication"][step]
            + parts.parts_ms["host_to_device"][step]
        )
        assert on_device == pytest.approx(parts.busy_ms[step])
    assert set(parts.parts_ms) == set(PARTS)


@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        (made.COMPUTING, {"matrix": 8.0, "memory": 2.0}),
        (
            made.WAITING_FOR_DATA,
            {"matrix": 2.9, "memory": 1.0, "data": 6.0, "launch": 0.06, "own_code": 0.04},
        ),
        (made.LAUNCHING, {"memory": 1.9, "launch": 7.61, "own_code": 0.49}),
        (made.EXCHANGING, {"matrix": 4.0, "memory": 1.0, "communication": 5.0}),
        (made.SYNCHRONISING, {"matrix": 2.8, "memory": 0.99, "logging": 6.21}),
        (made.COPYING, {"matrix": 4.0, "host_to_device": 6.0}),
    ],
)
def test_step_shares_find_each_planted_cause(work, wanted, tmp_path):
    trace = read(tmp_path, work)
    found, parts = means(trace)
    assert found == pytest.approx(wanted, abs=0.011)
    assert len(parts.step_ms) == 7  # from the first work of a step to that of the next
    assert parts.step_ms == pytest.approx([10.0] * 7)


def test_communication_overlapped_by_compute_is_hidden(tmp_path):
    _, parts = means(read(tmp_path, made.EXCHANGING))
    assert parts.communication_ms == pytest.approx([6.0] * 7)


def test_optimizer_updates_mark_steps_without_profiler_marks(tmp_path):
    work = made.COMPUTING._replace(ranges=(("Optimizer.step#AdamW.step", 9000.0, 9500.0),))
    windows = windows_of(read(tmp_path, work, step_name=""))
    assert windows.told_by == "updates by the optimizer"
    assert windows.end_us - windows.start_us == pytest.approx([10_000.0] * len(windows.start_us))


def test_recurring_ranges_mark_steps(tmp_path):
    work = made.COMPUTING._replace(ranges=(("forward", 0.0, 5000.0), ("backward", 5000.0, 9990.0)))
    assert (
        windows_of(read(tmp_path, work, step_name="train iteration {}")).told_by
        == "ranges named train iteration #"
    )


def test_trace_without_marks_is_one_window(tmp_path):
    windows = windows_of(read(tmp_path, made.COMPUTING, step_name=""))
    assert (windows.told_by, len(windows.start_us)) == ("", 1)
    assert windows.end_us[0] - windows.start_us[0] == pytest.approx(80_000.0)


def test_gap_of_skipped_steps_belongs_to_no_step(tmp_path):
    events = made.events_of(made.COMPUTING, 3) + made.events_of(
        made.COMPUTING, 3, made.CLOCK_US + 500_000
    )
    windows = windows_of(read_kineto(made.write(tmp_path / "t.json", made.trace_of(events))))
    assert windows.end_us - windows.start_us == pytest.approx([10_000.0] * 4)


def test_device_only_trace_has_unknown_idle_reasons(tmp_path):
    events = [
        e for e in made.events_of(made.LAUNCHING) if e["cat"] in ("kernel", "user_annotation")
    ]
    found, _ = means(read_kineto(made.write(tmp_path / "t.json", made.trace_of(events))))
    assert found == pytest.approx({"memory": 1.9, "own_code": 8.1}, abs=0.3)
