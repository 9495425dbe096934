"""Ladders read from files."""

import pytest

from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.records import save
from trainpace.job import DataPath
from trainpace.plan import Change, Choice, Plan, Projection
from trainpace.run.climbing import ladder_of_plan, read_ladder
from trainpace.run.script import fingerprint

TEXT = """
task = "train.py:task"
seconds = 2
[start]
micro_batch = 4
accumulation = 4
workers = 2
[job]
samples = 1000
epochs = 3
[[rung]]
micro_batch = [8, 16]
[[rung]]
title = "shards"
precompute = "train.py:photos"
workers = 0
"""


@pytest.fixture
def write(tmp_path):
    def inner(text, name="ladder.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return inner


def test_ladder_is_read_from_toml(write, tmp_path):
    found = read_ladder(write(TEXT))
    assert found.start.task == f"{tmp_path / 'train.py'}:task"
    assert (found.start.execution.global_batch, found.start.loader.workers, found.seconds) == (
        16,
        2,
        2,
    )
    assert found.rungs[0].changes == {"micro_batch": (8, 16)}
    assert found.rungs[0].title == "micro_batch (8, 16)"
    assert found.rungs[1].precompute == f"{tmp_path / 'train.py'}:photos"
    assert found.job.samples == 1000
    assert read_ladder(write(TEXT), task="resnet18").start.task == "resnet18"


def test_start_global_batch_sets_accumulation(write):
    text = TEXT.replace("accumulation = 4", "global_batch = 32")
    assert read_ladder(write(text)).start.execution.accumulation == 8


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seconds", "second", "seconds"),
        ("workers = 2", "worker = 2", "workers"),
        ("micro_batch = [8", "microbatch = [8", "micro_batch"),
        ("samples", "sample", "samples"),
        ("micro_batch = 4", 'micro_batch = "four"', "micro_batch cannot be 'four'"),
        ("seconds = 2", "seconds = -2", "above 0"),
        ("seconds = 2", 'seconds = "2"', "seconds"),
        ("[start]", "[start", "TOML"),
        ('task = "train.py:task"', "", "--task"),
        ("[[rung]]\nmicro_batch = [8, 16]", "[[rung]]", "changes nothing"),
        ("[job]", "[[job]]", "tables"),
        ("epochs = 3", "epochs = 0", "epochs"),
    ],
)
def test_invalid_ladder_error_suggests_nearest_name(write, old, new, said):
    assert old in TEXT
    with pytest.raises(TrainpaceError, match=said):
        read_ladder(write(TEXT.replace(old, new)))


def test_ladder_reads_slurm_options(write):
    found = read_ladder(write(TEXT + '[slurm]\npartition = "gpu"\nextra = ["--exclusive"]\n'))
    assert (found.slurm.partition, found.slurm.extra) == ("gpu", ("--exclusive",))
    with pytest.raises(TrainpaceError, match="partition"):
        read_ladder(write(TEXT + '[slurm]\npartitions = "gpu"\n'))


def test_unsupported_ladder_files_are_rejected(write, tmp_path):
    with pytest.raises(UnreadableInput):
        read_ladder(write("x", "plan.yaml"))
    with pytest.raises(UnreadableInput):
        read_ladder(tmp_path / "none.toml")
    with pytest.raises(UnreadableInput, match="Plan"):
        read_ladder(write("{}", "plan.json"))


def plan(**rest) -> Plan:
    start, two = Execution(micro_batch=8, accumulation=4), DataPath(workers=2, ms_per_sample=1.0)
    bigger = Execution(micro_batch=32)
    ready = DataPath(workers=2, precomputed=True)
    outlook = Projection(
        choice=Choice(execution=start, data=two),
        changes=0,
        step_ms=1,
        job_s=1,
        needed_gib=1,
        num_devices=1,
    )
    changes = (
        Change(title="larger", execution=bigger, forecast_saved_s=1, data=two),
        Change(title="offline", execution=bigger, forecast_saved_s=1, data=ready),
    )
    return Plan(start=start, changes=changes, now=outlook, **rest)


def test_plan_changes_become_rungs(tmp_path):
    save(plan(model="train.py:task"), tmp_path / "plan.json")
    found = read_ladder(tmp_path / "plan.json", precompute="train.py:photos")
    assert (found.start.task, found.start.loader.workers, found.device) == (
        "train.py:task",
        2,
        "cuda",
    )
    assert [(r.title, r.changes, r.precompute) for r in found.rungs] == [
        ("larger", {"micro_batch": 32}, ""),
        ("offline", {}, "train.py:photos"),
    ]
    assert not found.allow_global_batch


def test_incomplete_plans_are_rejected():
    with pytest.raises(TrainpaceError, match="--task"):
        ladder_of_plan(plan())
    with pytest.raises(TrainpaceError, match="--precompute"):
        ladder_of_plan(plan(), "resnet18")
    with pytest.raises(TrainpaceError, match="no changes"):
        ladder_of_plan(Plan(start=Execution(), changes=(), model="resnet18", reason="memory binds"))


def test_fingerprint_covers_code_beside_task(tmp_path):
    (tmp_path / "train.py").write_text("x = 1\n")
    spec = f"{tmp_path / 'train.py'}:task"
    first = fingerprint(spec)
    assert first == fingerprint(spec) != fingerprint(spec.replace("task", "other"))
    (tmp_path / "model.py").write_text("y = 1\n")
    assert fingerprint(spec) != first
    assert fingerprint("resnet50") == ""
    with pytest.raises(UnreadableInput):
        fingerprint(f"{tmp_path / 'none.py'}:task")
