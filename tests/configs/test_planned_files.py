"""Random plans written into every format are read back as planned, or the writer rejects them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "planted"))
from config_loading import LIBRARIES, differing, loaded  # noqa: E402
from config_plans import FILES, planned  # noqa: E402

from trainpace.configs import lacking, new_files, settings_of  # noqa: E402
from trainpace.core.execution import Execution  # noqa: E402
from trainpace.verbs.settings import limits_of  # noqa: E402

NEEDS_ENGINES = pytest.mark.skipif(
    not (ROOT / ".engines").is_dir(), reason="make .engines/installed"
)
COMPARED = (
    "micro_batch",
    "accumulation",
    "global_batch",
    "precision",
    "zero_stage",
    "offload_optimizer",
    "offload_parameters",
    "nnodes",
    "nproc_per_node",
    "tp",
    "pp",
    "cp",
)


def held(kind, count):
    """Return the plans that the writer accepted. It rejects only rare combinations within the limits."""
    done = list(planned(kind, count))
    rounds = [one for one, refused in done if not refused]
    assert len(rounds) >= 0.97 * count
    moved = sum(
        settings_of(one.before)[name] != settings_of(one.wanted)[name]
        for one in rounds
        for name in COMPARED
    )
    assert moved > count / 4
    return rounds


@pytest.mark.parametrize("kind", FILES)
def test_written_files_state_the_plan(kind):
    for one in held(kind, 90):
        assert one.written.left == {}
        assert one.wrong() == {}, one.written.diff


@NEEDS_ENGINES
@pytest.mark.slow
@pytest.mark.parametrize("plans", [100, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", FILES)
def test_libraries_read_written_files_as_planned(kind, plans, tmp_path):
    rounds = held(kind, plans)
    assert {i: one.wrong() for i, one in enumerate(rounds) if one.wrong()} == {}
    if kind in LIBRARIES:
        reports = loaded(kind, rounds, tmp_path)
        pairs = zip(rounds, reports, strict=True)
        assert {
            i: found for i, (one, report) in enumerate(pairs) if (found := differing(one, report))
        } == {}


@pytest.mark.parametrize(
    ("text", "file", "fields"),
    [
        (FILES["Lightning CLI"]["lightning.yaml"], "l.yaml", {"tp", "pp", "cp"}),
        (
            "trainer: {strategy: {class_path: ModelParallelStrategy, init_args: {tensor_parallel_size: 2}}}",
            "l.yaml",
            {"pp", "cp"},
        ),
        ("trainer = Trainer(devices=2, max_epochs=1)", "train.py", {"tp", "pp", "cp"}),
        (FILES["accelerate"]["accelerate.yaml"], "a.yaml", {"pp"}),
        (FILES["Hugging Face TrainingArguments"]["args.json"], "args.json", {"pp"}),
        ("accelerate launch train.py\n", "run.sh", {"pp"}),
        ("torchrun train.py --per_device_train_batch_size 4\n", "run.sh", {"pp"}),
        ("torchrun train.py\n", "run.sh", set()),
        (FILES["DeepSpeed"]["ds.json"], "ds.json", set()),
    ],
)
def test_lacking_lists_settings_the_engine_cannot_express(text, file, fields):
    assert lacking(text, file).keys() == fields


def test_read_only_limits_are_only_those_of_the_engine():
    texts = {"run.sh": "torchrun --nproc-per-node 8 train.py\n"}
    start = Execution(micro_batch=4, nproc_per_node=8)
    assert limits_of(texts, {}, start, write=False) == ((), "")
    limits, workers = limits_of(texts, {}, start, write=True)
    fixed = {limit.field for limit in limits}
    assert {"micro_batch", "accumulation", "precision", "tp", "pp", "cp"} <= fixed
    assert not fixed & {"nnodes", "nproc_per_node"}
    assert "no flag" in workers


def test_new_files_accept_settings_the_old_files_cannot():
    texts = {"args.yaml": FILES["Hugging Face TrainingArguments"]["args.yaml"]}
    start = Execution(nproc_per_node=8)
    alone, _ = limits_of(texts, {}, start, write=True)
    beside, _ = limits_of(texts, {"job.sbatch": "sbatch"}, start, write=True)
    assert {limit.field for limit in alone} - {limit.field for limit in beside} == {
        "nnodes",
        "nproc_per_node",
    }
    new, _ = limits_of({}, {"accelerate.yaml": "accelerate"}, start, write=True)
    assert ("pp", "pipeline parallelism") in {(limit.field, limit.title) for limit in new}
    assert not any(
        limit.field == "precision" for limit in new
    )  # settings missing from a new file are set in the code


ASKED = """
import json, os, sys
from accelerate.commands import launch
from accelerate.utils import DeepSpeedPlugin
args = launch.launch_command_parser().parse_args(["--config_file", sys.argv[1], "train.py"])
args, stated, says_precision = launch._validate_launch_command(args)
assert args.use_deepspeed
os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join([*stated.deepspeed_config, *["mixed_precision"] * says_precision])
plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed_config_file)
plugin._deepspeed_config_checks()
plugin.set_mixed_precision(args.mixed_precision)
print(json.dumps({key: plugin.deepspeed_config[key] for key in ("bf16", "fp16", "zero_optimization")}))
"""


@NEEDS_ENGINES
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "stage"), [("bf16", 2), ("amp_fp16", 0)])
def test_accelerate_loads_two_new_files_together(precision, stage, tmp_path):
    e = Execution(micro_batch=4, nproc_per_node=4, precision=precision, zero_stage=stage)
    for file in new_files({"ds.json": "DeepSpeed", "accelerate.yaml": "accelerate"}, e, {}):
        (tmp_path / file.file).write_text(file.text)
    done = subprocess.run(
        [sys.executable, "-c", ASKED, "accelerate.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".engines")},
    )
    assert done.returncode == 0, done.stderr[-1500:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (
        precision == "bf16",
        precision == "amp_fp16",
    )
    assert found["zero_optimization"]["stage"] == stage
