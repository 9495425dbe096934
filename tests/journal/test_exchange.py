"""Exports come back bit for bit, and `validate` reads their columns."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import entries as strategies
from entries import entry, sweep, whole_entry
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.forecast import read_runs
from trainpace.journal import Given, Journal, export, import_file
from trainpace.journal.importing import read_own

ENDINGS = ["json", "parquet", "csv"]


@pytest.mark.parametrize("ending", ENDINGS)
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(strategies.entries(), max_size=4))
def test_any_entry_round_trips_through_export(tmp_path, ending, several):
    path = tmp_path / f"journal.{ending}"
    records = [sweep(), *several]
    assert export(path, records) == len(records)
    assert list(read_own(path, Given())) == records


@pytest.mark.parametrize("ending", ENDINGS)
def test_journal_round_trips_through_another_database(journal, tmp_path, ending):
    begun = sweep()
    journal.add_many(
        [
            begun,
            *(whole_entry(sweep=begun.id, notes=f'{i}, "quoted"\n=1+1') for i in range(30)),
            entry(step_time_ms=None),
        ]
    )
    path = tmp_path / f"export.{ending}"
    export(path, [*journal.sweeps(), *journal.every()])
    with Journal.open(str(tmp_path / "other.db")) as other:
        first, again = import_file(other, path), import_file(other, path)
        assert (first.new, first.already_there, again.new, again.already_there) == (32, 0, 0, 32)
        assert list(other.every()) == list(journal.every())
        assert other.sweeps() == journal.sweeps()
        second = tmp_path / f"second.{ending}"
        export(second, [*other.sweeps(), *other.every()])
        assert second.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_validate_reads_an_export(tmp_path, ending):
    one = whole_entry(model="timm:resnet50", image_size=224)
    export(tmp_path / f"x.{ending}", [one])
    (run,) = read_runs(tmp_path / f"x.{ending}")
    assert (run.model_spec, run.gpu, run.batch_per_gpu, run.precision) == (
        "timm:resnet50",
        "Tesla T4",
        8,
        "fp32",
    )
    assert (run.step_time_ms, run.img_size, run.optimizer) == (10.0, 224, "sgd_momentum")


def test_failed_export_keeps_previous_file(tmp_path):
    def broken():
        yield entry()
        raise UnreadableInput("gone.")

    for ending in ENDINGS:
        path = tmp_path / f"x.{ending}"
        path.write_text("before")
        with pytest.raises(UnreadableInput):
            export(path, broken())
        assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == len(ENDINGS)
    for wrong in ("x.pickle", "x"):
        with pytest.raises(TrainpaceError, match="parquet"):
            export(tmp_path / wrong, [])
    with pytest.raises(TrainpaceError, match="cannot write"):
        export(tmp_path / "none" / "x.json", [])


@pytest.mark.parametrize("ending", ENDINGS)
def test_damaged_export_imports_no_run(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    export(path, [whole_entry() for _ in range(50)])
    data = path.read_bytes()
    wrong = [data[: len(data) // 2]]
    if ending == "json":
        wrong += [
            data[:-3],
            data + b"x",
            data.replace(b'"step_time_ms":10.0', b'"step_time_ms":-1.0'),
        ]
    if ending == "csv":
        wrong += [
            data.replace(b'""step_time_ms"":10.0', b'""step_time_ms"":-1.0'),
            data.replace(b'""Entry""', b"Entry"),
        ]
    if ending == "parquet":
        wrong += [data[:-3], data[:40], data[:300] + bytes(200) + data[500:]]
    with Journal.open(str(tmp_path / "j.db")) as journal:
        for damaged in wrong:
            assert damaged != data
            path.write_bytes(damaged)
            with pytest.raises(TrainpaceError) as error:
                import_file(journal, path)
            assert "\n" not in str(error.value)
            assert journal.count() == 0
