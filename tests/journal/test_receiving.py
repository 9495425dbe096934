"""Shared runs are imported only if valid, physically possible, new, and close to the forecast or explicitly accepted."""

import json

import pytest

from entries import whole_entry
from trainpace.core.errors import UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import Interval, StepTime
from trainpace.forecast import Forecaster, Target
from trainpace.journal import (
    Given,
    Journal,
    Knowledge,
    format_of,
    import_file,
    receive,
    share,
    text_of,
)
from trainpace.journal.importing import MOST_REASONS
from trainpace.workload import Variant, load_workload

FORECAST_MS = 79.65
"""About what this version forecasts for resnet50 in fp32 on a T4 at batch 8; the tests ask for no more than its order."""


def run_of(ms=80.0, batch=8, **fields):
    """A measured run whose parts and interval are consistent with its step time."""
    usual = {
        "model": "resnet50",
        "step": StepTime(forward_ms=ms),
        "peak_memory_gib": 2.0,
        "interval_ms": Interval(low=0.9 * ms, high=1.1 * ms, coverage=0.9, basis="x"),
        "execution": Execution(micro_batch=batch, optimizer="sgd_momentum"),
    }
    return whole_entry(step_time_ms=ms, **{**usual, **fields})


@pytest.fixture
def shared(tmp_path):
    """Return a function that writes a file of shared runs, modified by `change`."""

    def write(*runs, change=lambda data: None):
        data = json.loads(text_of(share(runs).runs))
        change(data)
        path = tmp_path / "shared.json"
        path.write_text(json.dumps(data))
        return path

    return write


@pytest.fixture
def other(tmp_path):
    with Journal.open(str(tmp_path / "other.db")) as journal:
        yield journal


def changed(**fields):
    return lambda data: data["runs"][0].update(fields)


def test_shared_run_keeps_its_fields(shared, other):
    one = run_of(environment={"torch": "2.4.1"}, reserved_memory_gib=2.5)
    done = import_file(other, shared(one))
    assert (done.format, done.new, done.already_there, done.skipped) == ("shared", 1, 0, {})
    (kept,) = other.find()
    for name in (
        "model",
        "execution",
        "step_time_ms",
        "step",
        "peak_memory_gib",
        "reserved_memory_gib",
        "environment",
        "outcome",
    ):
        assert getattr(kept, name) == getattr(one, name)
    assert (kept.kind, kept.device) == ("import", "T4")
    assert (kept.interval_ms.low, kept.interval_ms.high) == (
        one.interval_ms.low,
        one.interval_ms.high,
    )
    assert (kept.created_at[:10], kept.created_at[10:]) == (
        one.created_at[:10],
        "T00:00:00.000000Z",
    )


def test_received_run_is_forecast_again(shared, other):
    done = import_file(other, shared(run_of(forecast_ms=1.0, forecast_shares=(1.0,))))
    (kept,) = other.find()
    assert FORECAST_MS / 1.5 < kept.forecast_ms < 1.5 * FORECAST_MS
    assert sum(kept.forecast_shares) == pytest.approx(1)
    (lesson,) = done.lessons.by
    assert (lesson.model, lesson.device, lesson.new, lesson.batches, lesson.corrects) == (
        "resnet50",
        "T4",
        1,
        (8,),
        True,
    )
    assert lesson.forecast_off_pct == pytest.approx(100 * (kept.forecast_ms / 80.0 - 1))
    assert done.lessons.unchecked == 0


def test_lessons_are_grouped_by_model_and_gpu(shared, other):
    runs = [
        run_of(),
        run_of(160.0, 16),
        run_of(60.0, device="RTX 3090"),
        run_of(50.0, model="mine.py:f"),
    ]
    lessons = import_file(other, shared(*runs)).lessons
    assert [
        (one.device, one.new, one.batches) for one in lessons.by if one.model == "resnet50"
    ] == [("RTX 3090", 1, (8,)), ("T4", 2, (8, 16))]
    assert lessons.unchecked == 1


def test_own_models_of_different_files_stay_distinct(shared, tmp_path, other):
    import_file(other, shared(run_of(50.0, model="a.py:f")))
    import_file(other, shared(run_of(60.0, model="b.py:f")))
    names = {entry.model for entry in other.find()}
    assert len(names) == 2
    assert all(name.startswith("own model 1 of ") for name in names)


@pytest.mark.parametrize(
    "fields",
    [
        {"step_time_ms": -1.0},
        {"step_time_ms": 0},
        {"step_time_ms": 1e308},
        {"step_time_ms": float("nan")},
        {"step_time_ms": float("inf")},
        {"step_time_ms": "80"},
        {"peak_memory_gib": -1.0},
        {"note": "hello"},
        {"model": "x\x1b[2J"},
        {"model": "/home/jdoe/x.py"},
        {"device": "Warp Drive"},
        {"date": "2026-99-99T"},
        {"date": "2026-13-31"},
        {"outcome": "crashed"},
        {"outcome": "out_of_memory"},
        {"software": {"torch": "$(rm)"}},
        {"software": {"kernel": "6.1"}},
        {"execution": {"micro_batch": 0}},
        {"execution": {"micro_batch": 10**12}},
        {"execution": {"optimizer": "<b>"}},
        {"execution": {"nproc_per_node": 10**9}},
        {"low_ms": 90.0, "high_ms": 70.0},
        {"forecast_shares": [0.1] * 1000},
        {"peak_memory_gib": 17.0},
        {"reserved_memory_gib": 300.0},
        {"step_time_ms": 0.01, "low_ms": None, "high_ms": None, "parts": None},
        {"parts": {"forward_ms": 1.0}},
        {"step_time_ms": 1000.0, "parts": None},
    ],
)
def test_invalid_runs_are_skipped_and_the_others_are_imported(shared, other, fields):
    done = import_file(other, shared(run_of(), run_of(81.0), change=changed(**fields)))
    ((said, count),) = done.skipped.items()
    assert said
    assert (count, done.new, other.count()) == (1, 1, 1)


def test_implausible_run_needs_accept_odd(shared, other):
    path = shared(run_of(1000.0), run_of(80.0))
    done = import_file(other, path)
    assert done.new == 1
    (odd,) = done.lessons.odd
    assert odd.measured_ms == 1000.0
    assert odd.times == pytest.approx(1000.0 / odd.forecast_ms)
    again = import_file(other, path, given=Given(accept_odd=True))
    assert (again.new, again.already_there, again.lessons.accepted_odd) == (1, 1, True)
    assert other.count() == 2


def test_run_faster_than_hardware_is_never_accepted(shared, other):
    path = shared(run_of(0.01))
    assert import_file(other, path, given=Given(accept_odd=True)).new == 0


def test_duplicate_runs_are_imported_once(shared, other):
    one = run_of()
    done = import_file(other, shared(one, one))
    assert (done.new, done.skipped) == (1, {"twice in the file": 1})
    again = import_file(other, shared(one))
    assert (again.new, again.already_there, again.lessons.by) == (0, 1, ())


def test_out_of_memory_runs_of_different_models_stay_distinct(shared, other, journal):
    runs = [
        whole_entry(
            model=model,
            step_time_ms=None,
            outcome="out_of_memory",
            step_times_ms=(),
            interval_ms=None,
        )
        for model in ("small.py:f", "big.py:f")
    ]
    done = import_file(other, shared(*runs, runs[0]))
    assert (done.new, done.skipped) == (2, {"twice in the file": 1})
    assert len({run.model for run in other.find()}) == 2
    again = import_file(other, shared(*runs))
    assert (again.new, again.already_there) == (0, 2)
    journal.add_many(runs)
    mine = import_file(journal, shared(*runs))
    assert (mine.new, mine.already_there) == (0, 2)


def test_own_shared_runs_are_already_there(shared, journal):
    runs = [
        run_of(),
        run_of(50.0, model="mine.py:f"),
        whole_entry(step_time_ms=None, outcome="out_of_memory", step_times_ms=()),
    ]
    journal.add_many(runs)
    done = import_file(journal, shared(*runs))
    assert (done.new, done.already_there, journal.count()) == (0, 3, 3)


def test_untraceable_model_is_checked_against_file_forecast(shared, other):
    path = shared(
        run_of(model="mine.py:f", forecast_ms=10.0),
        run_of(81.0, model="mine.py:f", forecast_ms=80.0),
    )
    done = import_file(other, path)
    assert (done.new, len(done.lessons.odd), done.lessons.unchecked) == (1, 1, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(schema_version=99),
        lambda data: data.update(schema_version="1"),
        lambda data: data.pop("runs"),
        lambda data: data.update(runs={}),
        lambda data: data.update(more=1),
        lambda data: data.update(record="Runs"),
        lambda data: data.update(schema_version=True),
        lambda data: data.update(runs=[{}] * 100_001),
    ],
)
def test_shared_file_of_other_schema_is_rejected(shared, other, change):
    path = shared(run_of(), change=change)
    with pytest.raises(UnreadableInput) as error:
        receive(other, path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b'{"record": "SharedRuns"', b"[" * 200_000, b"[]", b"null"]
)
def test_damaged_shared_file_gives_one_line_error(tmp_path, other, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UnreadableInput) as error:
        receive(other, tmp_path / "x.json")
    assert "\n" not in str(error.value)


def test_number_of_skip_reasons_is_limited(shared, other):
    def spoil(data):
        data["runs"] = [{**data["runs"][0], f"field{i}": i} for i in range(100)]

    done = import_file(other, shared(run_of(), change=spoil))
    assert sum(done.skipped.values()) == 100
    assert len(done.skipped) == MOST_REASONS + 1


def test_non_public_model_names_are_not_looked_up(shared, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text("{}")

    def workload_of(*asked):
        raise AssertionError(asked)

    def rename(data):
        for run, name in zip(data["runs"], ("mine.json", "AcmeNet"), strict=True):
            run["model"] = name

    assert (
        receive(
            other, shared(run_of(), run_of(81.0), change=rename), workload_of=workload_of
        ).lessons.unchecked
        == 2
    )


def test_received_workloads_are_traced_once_within_time_limit(shared, other, monkeypatch):
    asked = []

    def workload_of(model, precision, variant):
        from trainpace.journal.sharing import _workload

        asked.append(model)
        return _workload(model, precision, variant)

    path = shared(run_of(), run_of(81.0), run_of(150.0, 16), run_of(50.0, model="vgg11"))
    receive(other, path, workload_of=workload_of)
    assert asked == ["resnet50", "vgg11"]
    monkeypatch.setattr("trainpace.journal.sharing.MOST_TRACING_S", 0.0)
    assert receive(other, path, workload_of=workload_of).lessons.unchecked == 4


def test_received_runs_correct_forecasts(shared, other):
    workload = load_workload("resnet50", ("fp32",), Variant("sgd_momentum"))
    forecaster = Forecaster(workload, Target(Cluster(device=find_device("T4"))))
    asked = Execution(micro_batch=8, optimizer="sgd_momentum")
    before = forecaster.forecast(asked).step.total_ms
    import_file(other, shared(run_of(1.5 * before)))
    after = forecaster.knowing(Knowledge(other, workload)).forecast(asked).step.total_ms
    assert 1.3 * before < after < 1.6 * before


def test_shared_file_is_recognized_with_any_key_order(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"runs": [], "trainpace": "1", "record": "SharedRuns", "schema_version": 1}')
    assert format_of(path) == "shared"
