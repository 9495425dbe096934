"""Every nanosecond of a step is attributed to exactly one part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_logs import read_log
from trainpace.watch.inside import recorder as module
from trainpace.watch.inside.event_log import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    OTHER,
    PARTS,
    EventLogWriter,
    Span,
    Step,
)
from trainpace.watch.inside.recorder import Recorder


class Clock:
    """A clock that advances only when told to."""

    now = 1000

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "now_ns", clock)
    return clock


def recorder(tmp_path):
    return Recorder(EventLogWriter(str(tmp_path / "a.trail"), {}))


def records_of(recorder):
    recorder.log.flush()
    with open(recorder.log.path, "rb") as file:
        return read_log(file.read())[1]


def steps_of(recorder):
    return [r for r in records_of(recorder) if isinstance(r, Step)]


def spend(recorder, clock, part, ns):
    _spend(recorder, clock, recorder.enter(part), ns)


def fetch(recorder, clock, ns):
    _spend(recorder, clock, recorder.enters_batch(DATA), ns)


def train(recorder, clock, ns):
    _spend(recorder, clock, recorder.enters_training(), ns)


def evaluate(recorder, clock, ns):
    recorder.begins_evaluation()
    spend(recorder, clock, FORWARD, ns)


def _spend(recorder, clock, depth, ns):
    clock.now += ns
    recorder.leave(depth, "x")


def test_nested_parts_are_charged_for_their_own_time_only(tmp_path, clock):
    r = recorder(tmp_path)
    depth = r.enter(OPTIMIZER)  # as Lightning does: the closure runs within the optimizer's step
    clock.now += 5
    spend(r, clock, FORWARD, 20)
    spend(r, clock, BACKWARD, 30)
    clock.now += 7
    r.leave(depth, "AdamW")
    clock.now += 3
    r.ends_step()
    (step,) = steps_of(r)
    spent = {PARTS[i]: ns for i, ns in enumerate(step.parts_ns) if ns}
    assert spent == {"optimizer": 12, "forward": 20, "backward": 30, "other": 3}


@given(
    events=st.lists(
        st.tuples(st.integers(0, len(PARTS) - 1), st.integers(0, 50), st.integers(0, 3)),
        max_size=30,
    )
)
def test_parts_add_up_to_the_step_for_any_events(events, tmp_path_factory):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "now_ns", clock)
        r = recorder(tmp_path_factory.mktemp("r"))
        depths = []
        for part, ns, what in events:
            if what == 0 or not depths:
                depths.append(r.enter(part))
            elif what == 1:
                r.leave(depths.pop(), "x")
            elif what == 2:
                depths.append(r.enters_batch(DATA))
            elif part % 3 == 2:
                r.begins_undecided(with_gradients=part % 2 == 0)
                clock.now += ns
                r.ends_forward()
            elif part % 3 == 0:
                r.begins_evaluation()
            else:
                depths.append(r.enters_training())
            clock.now += ns
        r.ends_step()
        clock.now += 11
        r.ends_step()
        steps = steps_of(r)
    assert [sum(s.parts_ns) for s in steps] == [s.end_ns - s.start_ns for s in steps]
    assert all(ns >= 0 for s in steps for ns in s.parts_ns)


def test_leaving_an_outer_part_closes_abandoned_inner_parts(tmp_path, clock):
    r = recorder(tmp_path)
    depth = r.enter(FORWARD)
    r.enter(LOGGING)  # never left
    clock.now += 10
    r.leave(depth, "Net")
    assert r.part == OTHER
    clock.now += 2
    r.ends_step()
    assert steps_of(r)[0].parts_ns[OTHER] == 2


def test_batches_fetched_for_evaluation_count_as_evaluation(tmp_path, clock):
    r = recorder(tmp_path)
    for evaluating, fetching in ((False, 10), (True, 20), (True, 20), (False, 10)):
        fetch(r, clock, fetching)
        clock.now += 1  # own code of the script between batches
        (evaluate if evaluating else train)(r, clock, 100)
    r.ends_step()
    (step,) = steps_of(r)
    assert step.parts_ns[EVALUATION] == 2 * 121
    assert step.parts_ns[DATA] == 20
    assert step.parts_ns[FORWARD] == 200
    evaluations = [s for s in records_of(r) if isinstance(s, Span) and s.part == EVALUATION]
    assert [s.end_ns - s.start_ns for s in evaluations] == [2 * 121]


@pytest.mark.parametrize("follows", ["training", "a batch", "backward"])
def test_call_in_evaluation_mode_is_evaluation_unless_backward_follows(tmp_path, clock, follows):
    """Scripts may forget no_grad(), or train with frozen batch normalization."""
    r = recorder(tmp_path)
    clock.now += 5  # the script's own code
    r.begins_undecided(with_gradients=True)
    spend(r, clock, FORWARD, 100)
    r.ends_forward()
    spend(r, clock, LOGGING, 7)
    if follows == "training":
        train(r, clock, 10)
        r.ends_forward()
    elif follows == "a batch":
        fetch(r, clock, 10)
    else:
        r.decides(False)
        spend(r, clock, BACKWARD, 10)
    r.ends_step()
    (step,) = steps_of(r)
    # all time between evaluation batches is evaluation
    assert step.parts_ns[EVALUATION] == {"training": 100, "a batch": 107, "backward": 0}[follows]
    assert step.parts_ns[FORWARD] == {"training": 10, "a batch": 0, "backward": 100}[follows]
    assert (step.parts_ns[OTHER], step.parts_ns[LOGGING]) == (5, 0 if follows == "a batch" else 7)
    spans = [s for s in records_of(r) if isinstance(s, Span) and s.part == EVALUATION]
    assert sum(s.end_ns - s.start_ns for s in spans) == step.parts_ns[EVALUATION]
    assert ({"evaluates_with_gradients": True} in records_of(r)) is (follows != "backward")


def test_no_grad_call_between_forward_and_backward_is_training(tmp_path, clock):
    """Self-distillation with accumulation does this. The next batch starts no evaluation."""
    r = recorder(tmp_path)
    for _ in range(2):
        fetch(r, clock, 20)
        r.fetched_samples += 8
        train(r, clock, 100)
        r.ends_forward()
        r.begins_undecided(with_gradients=False)
        spend(r, clock, FORWARD, 50)
        r.ends_forward()
        r.decides(False)
        spend(r, clock, BACKWARD, 200)
    r.ends_step()
    (step,) = steps_of(r)
    assert [step.parts_ns[part] for part in (DATA, FORWARD, BACKWARD, EVALUATION)] == [
        40,
        300,
        400,
        0,
    ]
    assert step.samples == 16


@pytest.mark.parametrize("evaluates", [False, True])
def test_time_after_an_evaluation_belongs_to_the_next_call(tmp_path, clock, evaluates):
    """Metrics between evaluation batches are evaluation. Preparing the next epoch is not."""
    r = recorder(tmp_path)
    evaluate(r, clock, 10)
    r.leaves_evaluation()
    clock.now += 5
    for _ in range(2):  # the script skips the first batch
        fetch(r, clock, 20)
    (evaluate if evaluates else train)(r, clock, 100)
    r.ends_forward()
    r.ends_step()
    (step,) = steps_of(r)
    parts = {PARTS[i]: ns for i, ns in enumerate(step.parts_ns) if ns}
    assert parts == (
        {"evaluation": 155}
        if evaluates
        else {"evaluation": 10, "other": 5, "data": 40, "forward": 100}
    )


def test_metrics_between_evaluation_batches_count_as_evaluation(tmp_path, clock):
    r = recorder(tmp_path)
    evaluate(r, clock, 10)
    r.leaves_evaluation()
    clock.now += 5  # metrics
    r.begins_undecided(with_gradients=False)
    spend(r, clock, FORWARD, 7)
    r.ends_forward()
    fetch(r, clock, 20)
    evaluate(r, clock, 10)
    r.ends_forward()
    r.ends_step()
    (step,) = steps_of(r)
    assert {PARTS[i]: ns for i, ns in enumerate(step.parts_ns) if ns} == {"evaluation": 52}


def test_evaluation_without_a_loader_is_recognized(tmp_path, clock):
    """A graph network trains on all its data at once and is evaluated after each step."""
    r = recorder(tmp_path)
    for _ in range(2):
        train(r, clock, 10)
        r.ends_forward()
        spend(r, clock, BACKWARD, 20)
        r.ends_step()
        evaluate(r, clock, 7)
        r.ends_forward()
        clock.now += 3
    first, second = (
        {PARTS[i]: ns for i, ns in enumerate(step.parts_ns) if ns} for step in steps_of(r)
    )
    assert first == {"forward": 10, "backward": 20}
    assert second == {"forward": 10, "backward": 20, "evaluation": 7, "other": 3}


def test_work_within_a_checkpoint_counts_as_checkpoint(tmp_path, clock):
    r = recorder(tmp_path)
    depth = r.enter(CHECKPOINT)
    spend(r, clock, LOGGING, 40)  # fsync
    r.leave(depth, "torch.save")
    r.ends_step()
    (step,) = steps_of(r)
    assert (step.parts_ns[CHECKPOINT], step.parts_ns[LOGGING]) == (40, 0)


def test_wrapped_function_returns_and_raises_as_before(tmp_path, clock):
    r = recorder(tmp_path)

    def divide(a, b):
        return a / b

    wrapped = r.wraps(divide, FORWARD, "divide")
    assert wrapped(6, b=3) == 2
    with pytest.raises(ZeroDivisionError):
        wrapped(1, 0)
    assert r.part == OTHER


def test_other_threads_record_spans_but_no_step_time(tmp_path, clock):
    import threading

    r = recorder(tmp_path)

    def save():
        clock.now += 50

    thread = threading.Thread(target=r.wraps(save, CHECKPOINT, "save"))
    thread.start()
    thread.join()
    r.ends_step()
    r.log.flush()
    read = read_log((tmp_path / "a.trail").read_bytes())[1]
    assert [s.part for s in read if isinstance(s, Span)] == [CHECKPOINT]
    assert next(s for s in read if isinstance(s, Step)).parts_ns[CHECKPOINT] == 0


def test_spans_are_recorded_at_first_and_then_periodically(tmp_path, clock):
    r = recorder(tmp_path)
    on = []
    for _ in range(1015):
        on.append(r.spans_on)
        r.ends_step()
    assert on[99]
    assert not on[100]
    assert on[1000]
    assert not on[1010]


def test_generator_called_without_gradients_is_training(tmp_path, clock):
    r = recorder(tmp_path)
    for _ in range(2):
        fetch(r, clock, 20)
        r.fetched_samples += 8
        r.begins_undecided(with_gradients=False)
        spend(r, clock, FORWARD, 30)
        r.ends_forward()
        train(r, clock, 100)
        r.ends_step()
    for step in steps_of(r):
        assert (step.parts_ns[DATA], step.parts_ns[FORWARD], step.parts_ns[EVALUATION]) == (
            20,
            130,
            0,
        )
        assert step.samples == 8


def test_evaluation_in_training_mode_is_recognized_by_the_next_batch(tmp_path, clock):
    r = recorder(tmp_path)
    for evaluating in (True, True, False):
        fetch(r, clock, 20)
        r.fetched_samples += 8
        if evaluating:
            r.begins_undecided(with_gradients=False)
            spend(r, clock, FORWARD, 100)
        else:
            train(r, clock, 100)
        r.ends_forward()
        clock.now += 5
    r.ends_step()
    (step,) = steps_of(r)
    assert (step.parts_ns[DATA], step.parts_ns[FORWARD], step.parts_ns[EVALUATION]) == (
        20,
        100,
        250,
    )
    assert step.samples == 8


def test_recorder_error_at_a_step_end_warns_once(tmp_path, clock, capsys):
    r = recorder(tmp_path)
    seen = []

    def fails(step):
        raise KeyError("ours")

    r.after_step += [fails, lambda step: seen.append(step.number)]
    r.ends_step()
    r.ends_step()
    assert seen == [0, 1]
    assert capsys.readouterr().err.count("trainpace: warning: ") == 1


def test_allocator_is_queried_at_first_and_then_periodically(tmp_path, clock):
    r, asked = recorder(tmp_path), []
    r.allocator = lambda: (float(len(asked)), asked.append(clock.now) or 0)
    for _ in range(200):
        clock.now += 2_000_000
        r.ends_step()
    assert len(asked) == 3 + 3  # the last three are 100, 200 and 300 ms after the third step
    held = [step.reserved_gib for step in steps_of(r)]
    assert held == sorted(held)
    assert held[:3] == [0.0, 1.0, 2.0]
