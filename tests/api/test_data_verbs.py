"""Tests of the functions `trainpace.loader` and `trainpace.precompute`."""

import pytest

import trainpace
from shard_folders import NUMBERS
from trainpace.shards import Estimate, Precomputed, ShardDataset
from trainpace.verbs.data import Verified


@pytest.fixture
def target(tmp_path):
    (tmp_path / "numbers_file.py").write_text(NUMBERS)
    return f"{tmp_path / 'numbers_file.py'}:Numbers"


def test_precompute_verify_and_repair_shards(target, tmp_path, capsys):
    folder = tmp_path / "out"
    done = trainpace.precompute(target, out=folder, workers=1, shard_samples=30)
    assert isinstance(done, Precomputed)
    assert (done.samples, done.shards, done.shards_planned, done.finished) == (90, 3, 3, True)
    assert len(ShardDataset(folder)) == 90
    assert trainpace.precompute(out=folder, verify=True) == Verified(shards=3, damaged=())
    (folder / "shard-000001.parquet").unlink()
    damaged = trainpace.precompute(out=folder, verify=True).damaged
    assert [(shard.number, shard.problem) for shard in damaged] == [(1, "missing")]
    repaired = trainpace.precompute(out=folder, repair=True, workers=1)
    assert (repaired.shards_computed, repaired.finished) == (1, True)
    assert trainpace.precompute(out=folder, verify=True).damaged == ()
    assert capsys.readouterr().out == ""


def test_precompute_estimate_writes_no_shards(target, tmp_path):
    estimate = trainpace.precompute(
        target, out=tmp_path / "out", estimate=True, seconds=1, workers=1
    )
    assert isinstance(estimate, Estimate)
    assert estimate.costs.samples == 90
    assert not (tmp_path / "out").exists()


def test_loader_returns_measurement_and_advice(target, capsys):
    answer = trainpace.loader(target, batch=8, workers=0, compute_ms=5.0, seconds=0.1, repeats=1)
    assert [point.workers for point in answer.measurement.points] == [0]
    assert answer.measurement.batch_size == 8
    assert answer.advice.compute_ms == 5.0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: trainpace.precompute(out="x"), "`target`"),
        (lambda: trainpace.precompute("a.py:D", out="x", max_bad=2), "`max_bad`"),
        (lambda: trainpace.precompute("a.py:D", out="x", estimate=True, batch=8), "`step_ms`"),
        (lambda: trainpace.precompute("a.py:D", out="x", part="1/2", again=True), "`again`"),
        (lambda: trainpace.precompute("a.py:D", out="x", sbatch=3), "unknown option 'sbatch'"),
        (lambda: trainpace.loader("a.py:D", compute_ms=-1), "`compute_ms`"),
        (lambda: trainpace.loader("a.py:D", repeats="many"), "`repeats`"),
    ],
)
def test_invalid_arguments_raise_before_any_work(misuse, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(trainpace.TrainpaceError) as error:
        misuse()
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []
