"""Tests of the timeline of a recording."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_logs import read_log, simple_run, write_process, write_worker
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.watch import Bar, charged, coarsened, environment, timeline_of
from trainpace.watch.inside import recorder as recorder_module
from trainpace.watch.inside.event_log import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    EVALUATION,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    OTHER,
    PARTS,
    TRAINPACE,
    EventLogWriter,
    Span,
    Step,
)
from trainpace.watch.inside.recorder import Recorder


def bars(lane):
    return [(b.part, b.start_ms, b.end_ms) for b in lane.bars]


# ---- exact expectations


def test_timeline_shows_training_and_worker_lanes(tmp_path):
    simple_run(tmp_path)
    write_worker(tmp_path, 0, [(95, 105), (105, 112), (118, 121)], pid=201)
    write_worker(tmp_path, 1, [(90, 99)], pid=202)
    timeline = timeline_of(tmp_path, range(10, 12))
    training, worker = timeline.lanes
    assert (timeline.first_step, timeline.last_step, timeline.duration_ms, timeline.after_s) == (
        10,
        11,
        20.0,
        0.1,
    )
    assert [(s.number, s.start_ms, s.end_ms, s.trial) for s in training.steps] == [
        (10, 0, 10, "plain"),
        (11, 10, 20, "plain"),
    ]
    assert bars(training) == [
        ("data", 0, 4),
        ("other", 4, 5),
        ("forward", 5, 8),
        ("backward", 8, 10),
        ("data", 10, 14),
        ("other", 14, 15),
        ("forward", 15, 18),
        ("backward", 18, 20),
    ]
    assert [b.name for b in training.bars[:4]] == ["next batch", "", "Net<&>", "backward"]
    assert training.ms_of("data") == 8.0
    assert (worker.kind, worker.label) == ("worker", "worker 0")  # worker 1 had already ended
    assert bars(worker) == [("fetch", 0, 5), ("fetch", 5, 12), ("fetch", 18, 20)]


def test_inner_spans_are_subtracted_from_outer_spans(tmp_path):
    spans = [
        ("logging", "print", 3, 4, 1),
        ("forward", "a", 5, 6, 2),
        ("forward", "b", 4, 7, 1),
        ("other", "engine", 1, 8, 0),
    ]
    write_process(tmp_path, [spans], [0, 10])
    (lane,) = timeline_of(tmp_path).lanes
    assert [(b.part, b.name, b.start_ms, b.end_ms) for b in lane.bars] == [
        ("other", "engine", 0, 3),
        ("logging", "print", 3, 4),
        ("forward", "b", 4, 7),
        ("other", "engine", 7, 10),
    ]


def test_evaluation_bar_covers_everything_except_checkpoints(tmp_path):
    spans = [
        ("backward", "backward", 1, 3, 0),
        ("data", "next batch", 4, 9, 0),
        ("forward", "Net", 9, 14, 0),
        ("checkpoint", "save", 15, 16, 0),
        ("evaluation", "evaluation", 3, 16, 0),
        ("data", "next batch", 17, 20, 0),
        ("forward", "Net", 20, 30, 0),
    ]
    write_process(tmp_path, [spans], [0, 40])
    (lane,) = timeline_of(tmp_path).lanes
    assert bars(lane) == [
        ("other", 0, 1),
        ("backward", 1, 3),
        ("evaluation", 3, 15),
        ("checkpoint", 15, 16),
        ("other", 16, 17),
        ("data", 17, 20),
        ("forward", 20, 30),
        ("other", 30, 40),
    ]
    assert lane.bars[2].name == "evaluation"


def test_consecutive_workers_share_a_lane(tmp_path):
    simple_run(tmp_path)
    write_worker(tmp_path, 0, [(0, 50)], pid=201)
    write_worker(tmp_path, 0, [(60, 190)], pid=202)
    write_worker(tmp_path, 0, [(10, 150)], pid=203)  # a second loader at the same time
    lanes = timeline_of(tmp_path, range(20)).lanes[1:]
    assert [lane.label for lane in lanes] == ["worker 0", "worker 0 of loader 2"]
    assert [bars(lane) for lane in lanes] == [
        [("fetch", 0, 50), ("fetch", 60, 190)],
        [("fetch", 10, 150)],
    ]


def test_ranks_of_two_hosts_are_aligned_by_the_wall_clock(tmp_path):
    simple_run(tmp_path, rank=0, pid=100, host="a", clock_ms=500)
    simple_run(tmp_path, rank=1, pid=101, host="b", clock_ms=503)
    simple_run(tmp_path, rank=2, pid=102, host="a", clock_ms=777)  # one host has one clock
    zero, one, two = timeline_of(tmp_path, range(5, 6)).lanes
    assert [lane.rank for lane in (zero, one, two)] == [0, 1, 2]
    assert (
        bars(zero)
        == bars(two)
        == [("data", 0, 4), ("other", 4, 5), ("forward", 5, 8), ("backward", 8, 10)]
    )
    assert bars(one) == [
        ("forward", 0, 1),
        ("backward", 1, 3),
        ("data", 3, 7),
        ("other", 7, 8),
        ("forward", 8, 10),
    ]


def test_launcher_process_has_no_lane(tmp_path):
    write_process(tmp_path, [], [0], pid=99)
    simple_run(tmp_path, rank=0)
    assert len(timeline_of(tmp_path).lanes) == 1


# ---- choice of steps


def test_middle_steps_are_shown_by_default(tmp_path):
    simple_run(tmp_path, steps=41)
    timeline = timeline_of(tmp_path)
    assert (timeline.first_step, timeline.last_step) == (17, 26)


def test_intervention_steps_are_not_shown_by_default(tmp_path):
    simple_run(tmp_path, steps=40, trials=[0] * 12 + [2] * 28)
    timeline = timeline_of(tmp_path)
    assert (timeline.first_step, timeline.last_step) == (3, 11)


def test_unusually_long_step_is_avoided_by_default(tmp_path):
    bounds = [10 * i + (500 if i > 20 else 0) for i in range(41)]
    spans = [[("forward", "Net", b, b + 1, 0)] for b in bounds]
    write_process(tmp_path, spans, bounds)
    timeline = timeline_of(tmp_path)
    assert timeline.duration_ms == 100.0
    assert not timeline.first_step <= 20 <= timeline.last_step


def test_only_consecutive_steps_are_shown(tmp_path):
    spans = [
        [("forward", "Net", 10 * i, 10 * i + 1, 0)] if i < 10 or i > 25 else [] for i in range(40)
    ]
    write_process(tmp_path, spans, range(0, 401, 10))
    assert timeline_of(tmp_path, range(5, 40)).first_step == 26
    with pytest.raises(TrainpaceError, match=r"0 to 9, 26 to 39"):
        timeline_of(tmp_path, range(12, 20))
    with pytest.raises(TrainpaceError, match=r"step 12"):
        timeline_of(tmp_path, range(12, 13))


# ---- errors


def test_folder_without_event_logs_is_rejected(tmp_path):
    with pytest.raises(UnreadableInput, match="holds no recording"):
        timeline_of(tmp_path)


def test_run_without_steps_is_rejected(tmp_path):
    write_process(tmp_path, [], [0])
    with pytest.raises(TrainpaceError, match="no training step"):
        timeline_of(tmp_path)


def test_file_with_a_foreign_format_is_rejected(tmp_path):
    path = simple_run(tmp_path)
    path.write_bytes(b'{"trail": 99}\n')
    with pytest.raises(UnreadableInput, match="version"):
        timeline_of(tmp_path)
    path.write_bytes(b"GIF89a\n")
    with pytest.raises(UnreadableInput, match="not JSON"):
        timeline_of(tmp_path)


def test_damaged_event_log_is_named(tmp_path):
    path = simple_run(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(b"\n") + 1] = ord("?")
    path.write_bytes(content)
    with pytest.raises(UnreadableInput, match=f"{path.name} cannot be read .an unknown record"):
        timeline_of(tmp_path)


def test_event_log_without_a_header_is_ignored(tmp_path):
    simple_run(tmp_path)
    (tmp_path / "worker-100-0-300.trail").write_bytes(b"")
    (tmp_path / "process-400-here.trail").write_bytes(b'{"trail": 1, "ro')
    assert len(timeline_of(tmp_path).lanes) == 1


@given(share=st.floats(0, 1))
def test_truncated_event_log_is_read_up_to_the_cut(tmp_path_factory, share):
    folder = tmp_path_factory.mktemp("cut")
    path = simple_run(folder, steps=8)
    content = path.read_bytes()
    begin = content.index(b"\n") + 1
    path.write_bytes(content[: begin + round(share * (len(content) - begin))])
    whole = sum(isinstance(r, Step) for r in read_log(path.read_bytes())[1])
    if whole == 0:
        with pytest.raises(TrainpaceError):
            timeline_of(folder)
    else:
        (lane,) = timeline_of(folder, range(8)).lanes
        assert [s.number for s in lane.steps] == list(range(whole))
        assert len(lane.bars) == 4 * whole


# ---- properties

SPANS = st.lists(
    st.tuples(
        st.sampled_from([OTHER, DATA, FORWARD, CHECKPOINT, EVALUATION]),
        st.integers(-20, 120),
        st.integers(0, 60),
    ),
    max_size=12,
)


@given(spans=SPANS)
def test_charged_intervals_fill_a_step_without_overlap(spans):
    step = Step(0, 1, 0, 0, 100, 8, 0.0, 0.0, (0,) * len(PARTS))
    stretches = charged(
        step, [Span(part, 0, 1, 0, start, start + length) for part, start, length in spans]
    )
    assert stretches[0][2] == 0
    assert stretches[-1][3] == 100
    assert all(start < end for _, _, start, end in stretches)
    assert all(a[3] == b[2] and a[0] != b[0] for a, b in itertools.pairwise(stretches))


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 6))
def test_charged_intervals_match_the_recorder_totals(tmp_path_factory, seed, steps):
    """A recorder with a fake clock records random steps. The timeline must match its totals."""
    rng, now = random.Random(seed), [0]
    path = tmp_path_factory.mktemp("trail") / "process-1.trail"

    def clock():
        now[0] += rng.randrange(1, 400_000)
        return now[0]

    def something(recorder, deep):
        depth = recorder.enter(
            rng.choice(
                [
                    FORWARD,
                    BACKWARD,
                    OPTIMIZER,
                    COMMUNICATION,
                    LOGGING,
                    CHECKPOINT,
                    OTHER,
                    EVALUATION,
                ]
            )
        )
        for _ in range(rng.randrange(3) if deep < 3 else 0):
            something(recorder, deep + 1)
        recorder.leave(depth, "something")

    def batch(recorder, evaluating):
        recorder.leave(recorder.enters_batch(DATA), "next batch")
        if evaluating:
            recorder.begins_evaluation()
            recorder.leave(recorder.enter(FORWARD), "Net")
        else:
            recorder.leave(recorder.enters_training(), "Net")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "now_ns", clock)
        recorder = Recorder(EventLogWriter(str(path), {}))
        for _ in range(steps):
            depth = recorder.enter(EVALUATION) if rng.random() < 0.3 else None
            for _ in range(rng.choice([0, 0, 1, 5])):
                batch(recorder, True)
            if depth is not None:
                recorder.leave(depth, "evaluate")
            if rng.random() < 0.3:
                something(recorder, 0)
            batch(recorder, False)
            for _ in range(rng.randrange(4)):
                something(recorder, 0)
            recorder.ends_step()
        recorder.log.flush()
    spans, seen = [], 0
    for record in read_log(path.read_bytes())[1]:
        if isinstance(record, Span):
            spans.append(record)
        elif isinstance(record, Step):
            spent = [0] * len(PARTS)
            for part, _, start, end in charged(record, spans):
                spent[part] += end - start
            expected = list(record.parts_ns)
            expected[OTHER] += expected[TRAINPACE]  # between steps, without a span
            expected[TRAINPACE] = 0
            assert spent == expected
            spans, seen = [], seen + 1
    assert seen == steps


@given(lengths=st.lists(st.floats(0.001, 3.0), max_size=30), dot=st.floats(0.01, 5.0))
def test_coarser_bars_cover_the_same_time(lengths, dot):
    edges = [0.0]
    for length in lengths:
        edges.append(edges[-1] + length)
    fine = [
        Bar(part=PARTS[i % 3], name="", start_ms=a, end_ms=b)
        for i, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    coarse = coarsened(fine, dot)
    assert [b.start_ms for b in coarse] == [0.0, *(b.end_ms for b in coarse)][: len(coarse)]
    assert not fine or coarse[-1].end_ms == fine[-1].end_ms
    assert all(b.end_ms - b.start_ms >= dot * 0.999 for b in coarse[:-1])


def test_separate_bars_are_not_joined():
    apart = [Bar(part="fetch", name="", start_ms=i, end_ms=i + 0.1) for i in range(3)]
    assert coarsened(apart, 10.0) == apart


# ---- a real script

SCRIPT = """
import sys, time, torch
fetch_ms, compute_ms = float(sys.argv[1]), float(sys.argv[2])
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8 * 24
    def __getitem__(self, i):
        time.sleep(fetch_ms / 8e3)
        return torch.randn(4), i % 2
class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(compute_ms / 1e3)
        return super().forward(x)
net = Net(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2):
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("fetch_ms", "compute_ms", "waits"), [(80, 4, True), (8, 40, False)])
def test_timeline_shows_whether_training_waits_for_workers(tmp_path, fetch_ms, compute_ms, waits):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    before = {**os.environ, "PYTHONPATH": str(Path(recorder_module.__file__).parents[3])}
    command = [sys.executable, str(script), str(fetch_ms), str(compute_ms)]
    subprocess.run(command, env=environment(tmp_path, before), check=True, timeout=120)
    timeline = timeline_of(tmp_path)
    training, *workers = timeline.lanes
    assert [w.label for w in workers] == ["worker 0", "worker 1"]
    waited = training.ms_of("data") / timeline.duration_ms
    busy = [w.ms_of("fetch") / timeline.duration_ms for w in workers]
    if waits:
        assert waited > 0.6
        assert min(busy) > 0.8
    else:
        assert waited < 0.3
        assert max(busy) < 0.4
    assert sum(b.end_ms - b.start_ms for b in training.bars) == pytest.approx(timeline.duration_ms)
    for lane in timeline.lanes:
        assert all(a.end_ms <= b.start_ms for a, b in zip(lane.bars, lane.bars[1:], strict=False))
