"""Real trials in child processes: every engine trains the same, and failures have one-line reasons."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from shard_folders import write_folder
from trainpace.core.errors import Contradiction
from trainpace.core.execution import Execution
from trainpace.run.job import ThisMachine, Torchrun
from trainpace.run.trial import FailedTrial, LoaderSettings, Trial, TrialResult, job_of, run_trial

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).with_name("trial_tasks.py")
ENGINES = ROOT / ".engines"
NEEDS_ENGINES = pytest.mark.skipif(not ENGINES.is_dir(), reason="make .engines/installed")
EQUAL = 1e-5
"""Relative: sums over a batch in another order, in fp32."""
FP16_ROUNDING = 5e-4

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _engines_on_the_path(monkeypatch):
    paths = [str(ROOT / "src"), str(ENGINES), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def trial_of(engine="plain", task="mlp", loader=None, steps=6, **execution):
    return Trial(
        task=f"{TASKS}:{task}",
        engine=engine,
        execution=Execution(**execution),
        warmup_steps=2,
        steps=steps,
        loader=loader or LoaderSettings(),
    )


def run(trial, folder, timeout_s=150.0):
    launcher = ThisMachine() if trial.execution.world_size == 1 else Torchrun()
    return run_trial(trial, launcher, folder, timeout_s)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    found = {}

    def losses(task):
        if task not in found:
            result = run(trial_of(task=task, micro_batch=8), tmp_path_factory.mktemp("plain"))
            assert isinstance(result, TrialResult), result.reason
            found[task] = result.losses
        return found[task]

    return losses


TWO = {"nproc_per_node": 2}
WAYS = {
    "accumulate 2": ("plain", {"micro_batch": 4, "accumulation": 2}),
    "compiled": ("plain", {"micro_batch": 8, "compile": True}),
    "recomputed": ("plain", {"micro_batch": 8, "activation_checkpointing": "full"}),
    "DDP": ("ddp", {"micro_batch": 4, **TWO}),
    "DDP, accumulate 2": ("ddp", {"micro_batch": 2, "accumulation": 2, **TWO}),
    "FSDP2, accumulate 2": ("fsdp2", {"micro_batch": 2, "accumulation": 2, "zero_stage": 3, **TWO}),
    "FSDP2, kept, recomputed": (
        "fsdp2",
        {
            "micro_batch": 4,
            "zero_stage": 3,
            "reshard_after_forward": False,
            "activation_checkpointing": "full",
            **TWO,
        },
    ),
    "FSDP2, offloaded": (
        "fsdp2",
        {
            "micro_batch": 4,
            "zero_stage": 3,
            "offload_optimizer": True,
            "offload_parameters": True,
            **TWO,
        },
    ),
    "ZeRO 1, accumulate 2": (
        "deepspeed",
        {"micro_batch": 2, "accumulation": 2, "zero_stage": 1, **TWO},
    ),
    "ZeRO 2, offloaded": (
        "deepspeed",
        {"micro_batch": 4, "zero_stage": 2, "offload_optimizer": True, **TWO},
    ),
    "ZeRO 3, accumulate 2": (
        "deepspeed",
        {"micro_batch": 2, "accumulation": 2, "zero_stage": 3, **TWO},
    ),
}


RARELY = ("compiled", "FSDP2, offloaded", "ZeRO 1, accumulate 2", "ZeRO 2, offloaded")
"""Ways that differ little from others, and take long."""


@NEEDS_ENGINES
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.long] * (way in RARELY)) for way in WAYS]
)
def test_every_engine_trains_with_same_losses(way, plain, tmp_path):
    engine, execution = WAYS[way]
    task = "sgd" if "accumulate" in way else "mlp"
    result = run(trial_of(engine, task, **execution), tmp_path)
    assert isinstance(result, TrialResult), result.reason
    assert result.losses == pytest.approx(plain(task), rel=EQUAL)
    assert len(result.step_ms) == len(result.data_wait_ms) == 6
    assert all(wait < step for wait, step in zip(result.data_wait_ms, result.step_ms, strict=True))
    assert result.world_size == execution.get("nproc_per_node", 1)
    assert result.peak_memory_gib > 0
    recomputed = any("recomputes 4 blocks" in note for note in result.notes)
    assert recomputed == ("activation_checkpointing" in execution)


@NEEDS_ENGINES
@pytest.mark.parametrize(
    ("engine", "precision", "execution"),
    [
        ("plain", "amp_bf16", {"micro_batch": 8}),
        ("plain", "bf16", {"micro_batch": 8}),
        ("plain", "amp_fp16", {"micro_batch": 8}),
        ("plain", "fp16", {"micro_batch": 8}),
        ("fsdp2", "amp_bf16", {"micro_batch": 4, "zero_stage": 3, **TWO}),
        ("deepspeed", "bf16", {"micro_batch": 4, "zero_stage": 2, **TWO}),
    ],
)
def test_half_precision_losses_stay_within_5_percent(engine, precision, execution, plain, tmp_path):
    result = run(trial_of(engine, "sgd", precision=precision, **execution), tmp_path)
    assert isinstance(result, TrialResult), result.reason
    assert result.losses == pytest.approx(plain("sgd"), rel=0.05)
    assert result.losses != pytest.approx(plain("sgd"), rel=EQUAL)


@NEEDS_ENGINES
def test_ddp_on_cpu_uses_fp16_not_bf16(plain, tmp_path):
    """Fabric would use bf16 here, whose losses are off by eight times as much.

    The initial scale of 2**16 is too large for the gradients of step 7, which the scaler skips.
    """
    result = run(trial_of("ddp", "sgd", precision="amp_fp16", micro_batch=4, **TWO), tmp_path)
    assert isinstance(result, TrialResult), result.reason
    assert result.losses[:6] == pytest.approx(plain("sgd")[:6], rel=FP16_ROUNDING)
    assert result.losses[:6] != pytest.approx(plain("sgd")[:6], rel=EQUAL)


def test_shards_hold_same_samples_as_task(tmp_path):
    from trial_tasks import Plain

    shards = write_folder(tmp_path / "shards", Plain(), 20, 5)
    own = run(trial_of(task="expensive", micro_batch=8), tmp_path / "own")
    for workers in (0, 2):
        loader = LoaderSettings(shards=str(shards), workers=workers)
        result = run(
            trial_of(task="expensive", micro_batch=8, loader=loader), tmp_path / f"read {workers}"
        )
        assert result.losses == pytest.approx(own.losses, rel=EQUAL)
    loader = LoaderSettings(shards=str(shards))
    refused = run(
        trial_of(task="expensive_without_a_split", micro_batch=8, loader=loader),
        tmp_path / "refused",
    )
    assert refused.kind == "misuse"
    assert "`online`" in refused.reason


def test_trial_ends_after_given_seconds(tmp_path):
    trial = Trial(
        task="torchvision:resnet18", execution=Execution(micro_batch=1), seconds=0.5, warmup_steps=1
    )
    result = run(trial, tmp_path)
    if isinstance(result, FailedTrial):
        assert "torchvision" in result.reason  # not installed here
        return
    assert len(result.step_ms) >= 5
    assert sum(result.step_ms) < 1e3 * 60
    assert any("once" in note for note in result.notes)


FAILURES = {
    "diverging": ("failed", "became nan at step"),
    "out_of_memory": ("out of memory", "smaller batch"),
    "torn": ("failed", "sample 31 is torn"),
    "gone": ("misuse", "unknown function"),
}


@pytest.mark.parametrize(("task", "workers"), [*((task, 0) for task in FAILURES), ("torn", 1)])
def test_failed_trial_has_one_line_reason(task, workers, tmp_path):
    kind, says = FAILURES[task]
    result = run(
        trial_of(task=task, steps=12, micro_batch=8, loader=LoaderSettings(workers=workers)),
        tmp_path,
    )
    assert isinstance(result, FailedTrial)
    assert result.kind == kind
    assert says in result.reason
    assert "\n" not in result.reason
    assert Path(result.log).is_file()


@NEEDS_ENGINES
def test_killed_rank_is_reason_of_failed_trial(tmp_path):
    result = run(trial_of("ddp", "fatal", steps=20, micro_batch=4, **TWO), tmp_path)
    assert result.kind == "failed"
    assert "SIGKILL" in result.reason


def test_hanging_trial_times_out(tmp_path):
    result = run(trial_of(task="hanging"), tmp_path, timeout_s=8.0)
    assert result.kind == "timed out"


@pytest.mark.parametrize(
    ("engine", "execution", "install"),
    [
        ("ddp", TWO, "'trainpace[lightning]'"),
        ("deepspeed", {"zero_stage": 2}, "'trainpace[lightning]'"),
    ],
)
def test_missing_engine_names_pip_install(engine, execution, install, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    result = run(trial_of(engine, micro_batch=2, **execution), tmp_path)
    assert result.kind == "misuse"
    assert f"pip install {install}" in result.reason


def test_wrong_number_of_ranks_fails_trial(tmp_path):
    job = job_of(trial_of("ddp", micro_batch=4, **TWO), tmp_path, 60.0)
    ended = ThisMachine().run(replace(job, nproc_per_node=1))
    assert ended.state == "failed"
    assert "1 process was started for an execution of 2" in Path(f"{job.result}.failed").read_text()


def test_unsupported_execution_starts_no_trial(tmp_path):
    with pytest.raises(Contradiction):
        run(trial_of("ddp", zero_stage=2, **TWO), tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_task_reads_relative_files_from_working_directory(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "beside.txt").write_text("here")
    monkeypatch.chdir(tmp_path / "home")
    result = run(trial_of(task="relative", micro_batch=8), tmp_path / "trial")
    assert isinstance(result, TrialResult), result.reason
    assert [p.name for p in Path().iterdir()] == ["beside.txt"]


@NEEDS_ENGINES
@pytest.mark.parametrize(
    ("engine", "execution"),
    [
        ("plain", {"micro_batch": 4, "accumulation": 4}),
        pytest.param("ddp", {"micro_batch": 8, **TWO}, marks=pytest.mark.long),
        ("ddp", {"micro_batch": 4, "accumulation": 2, **TWO}),
        pytest.param(
            "fsdp2",
            {"micro_batch": 4, "accumulation": 2, "zero_stage": 3, **TWO},
            marks=pytest.mark.long,
        ),
    ],
)
def test_trial_noise_scale_matches_known_gradients(engine, execution, tmp_path):
    from trial_tasks import regression_data

    x, y = regression_data()
    gradients = -2 * y * x
    known = float(gradients.var(0).sum() / gradients.mean(0).square().sum())
    result = run(
        replace(trial_of(engine, "regression", steps=400, **execution), noise_scale=True), tmp_path
    )
    assert isinstance(result, TrialResult), result.reason
    assert (
        0 < result.noise_scale["low"] < result.noise_scale["samples"] < result.noise_scale["high"]
    )
    assert result.noise_scale["samples"] == pytest.approx(known, rel=0.2)


@NEEDS_ENGINES
@pytest.mark.parametrize(
    ("engine", "execution"),
    [("plain", {"micro_batch": 8}), ("deepspeed", {"micro_batch": 4, "accumulation": 2})],
)
def test_noise_scale_needs_partial_batch_gradients(engine, execution, tmp_path):
    result = run(replace(trial_of(engine, **execution), noise_scale=True), tmp_path)
    assert isinstance(result, FailedTrial)
    assert result.kind == "misuse"
