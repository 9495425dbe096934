"""An unchanged script climbs with its own command on modified copies of its settings. Its own files stay unchanged."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from ladder_world import World
from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.records import load
from trainpace.plan import Change, Plan
from trainpace.run import Slurm, script_job
from trainpace.run.climbing import climb as climb_over
from trainpace.run.climbing import ladder_of_plan, read_ladder
from trainpace.run.ladder import Script, changed, words_of
from trainpace.run.results import LadderResult
from trainpace.run.script import changed_files, fingerprint_of_script, keep_files, prepare, present

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "planted"))

import slurm_cluster  # noqa: E402

NEEDS_ENGINES = pytest.mark.skipif(
    not (ROOT / ".engines").is_dir(), reason="make .engines/installed"
)
ARGS = {
    "output_dir": "runs",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "learning_rate": 0.01,
    "num_train_epochs": 50,
    "save_steps": 10,
    "save_total_limit": 1,
    "logging_steps": 5,
    "use_cpu": True,
    "report_to": "none",
}
DS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 0},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}
LADDER = """
command = "python train.py args.json"
config = ["args.json"]
[[rung]]
micro_batch = [8, 16]
[[rung]]
channels_last = true
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "args.json").write_text(json.dumps(ARGS, indent=2))
    (tmp_path / "ds.json").write_text(json.dumps(DS, indent=2))
    (tmp_path / "ladder.toml").write_text(LADDER)
    (tmp_path / "train.py").write_text("pass\n")
    return tmp_path


def test_ladder_starts_from_script_settings(folder):
    found = read_ladder(folder / "ladder.toml")
    assert found.script == Script(
        command="python train.py args.json", configs=("args.json",), folder=str(folder)
    )
    assert (found.start.execution.micro_batch, found.start.execution.accumulation, found.steps) == (
        4,
        4,
        30,
    )
    (folder / "ladder.toml").write_text(
        LADDER.replace("[[rung]]\nmicro", "[start]\nprecision = 'amp_bf16'\n[[rung]]\nmicro")
    )
    assert read_ladder(folder / "ladder.toml").start.execution.precision == "amp_bf16"
    torchrun = Script(
        command="torchrun --nproc-per-node 2 train.py --ds ds.json",
        configs=("ds.json",),
        folder=str(folder),
    )
    assert present(torchrun).execution == Execution(micro_batch=4, accumulation=4, nproc_per_node=2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[[rung]]\nmicro", "[start]\nmicro_batch = 8\n[[rung]]\nmicro"),
        ("train.py args.json", "train.py"),
        ("python train.py", "cd x && python train.py"),
        ("python train.py", "bash train.sh"),
        ('command = "python train.py args.json"', ""),
        ('config = ["args.json"]', "config = 3"),
        ('config = ["args.json"]', ""),
        ("channels_last = true", 'precompute = "a.py:b"'),
    ],
)
def test_invalid_ladders_are_rejected(old, new, folder):
    (folder / "ladder.toml").write_text(LADDER.replace(old, new))
    with pytest.raises(TrainpaceError):
        read_ladder(folder / "ladder.toml")


def test_contradicting_config_files_are_rejected(folder):
    (folder / "args.json").write_text(
        json.dumps({**ARGS, "deepspeed": "ds.json", "gradient_accumulation_steps": 2})
    )
    with pytest.raises(Contradiction, match="accumulation is"):
        present(
            Script(
                command="python train.py args.json",
                configs=("args.json", "ds.json"),
                folder=str(folder),
            )
        )


def test_setup_is_prepared_in_linked_config_copies(folder, tmp_path):
    (folder / "args.json").write_text(json.dumps({**ARGS, "deepspeed": "ds.json"}))
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    (folder / "ladder.toml").write_text(
        'command = "A=1 torchrun --nproc-per-node 1 train.py args.json"\nconfig = ["args.json", "ds.json"]\n'
        "[[rung]]\nnproc_per_node = 2\n"
    )
    ladder = read_ladder(folder / "ladder.toml")
    setup = changed(ladder.start, {"nproc_per_node": 2, "zero_stage": 2, "threads": 3})
    trial, _ = prepare(ladder, setup, tmp_path / "t")
    copies = str(tmp_path / "t" / "configs")
    assert trial.command == ("torchrun", "--nproc-per-node", "2", "train.py", f"{copies}/args.json")
    assert trial.environment == {"A": "1", "OMP_NUM_THREADS": "3"}
    assert (trial.world_size, trial.global_batch) == (2, 16)
    args, ds = (json.loads(Path(copies, name).read_text()) for name in ("args.json", "ds.json"))
    assert (args["deepspeed"], args["output_dir"]) == (
        f"{copies}/ds.json",
        str(tmp_path / "t" / "output"),
    )
    assert args["gradient_accumulation_steps"] == ds["gradient_accumulation_steps"] == 2
    assert ds["zero_optimization"]["stage"] == 2
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before | {
        "ladder.toml": (folder / "ladder.toml").read_bytes()
    }
    kept = keep_files(ladder, setup, tmp_path)
    assert (
        json.loads((kept / "args.json").read_text())["output_dir"] == "runs"
    )  # as the user has it
    assert "--nproc-per-node 2" in (kept / "command.txt").read_text()


def test_changes_without_config_key_are_rejected(folder):
    ladder = read_ladder(folder / "ladder.toml")
    for change in (
        {"channels_last": True},
        {"nproc_per_node": 2},
        {"prefetch_factor": 4},
        {"engine": "ddp"},
    ):
        with pytest.raises(TrainpaceError):
            changed_files(ladder, changed(ladder.start, change))
    assert changed_files(ladder, changed(ladder.start, {"workers": 2}))[0].wrote == (
        "dataloader_workers",
    )


LIGHTNING = """
trainer:
  accelerator: cpu
  devices: 1
  strategy: auto
data:
  batch_size: 8
  shards: null
"""
OVER_NODES = """
command = "python train.py lit.yaml"
config = ["lit.yaml"]
[slurm]
partition = "gpu"
[[rung]]
title = "nodes"
nnodes = 2
[[rung]]
title = "shards"
precompute = "train.py:faces"
settings = {"data.shards" = "{shards}"}
"""


@pytest.fixture
def lightning(folder):
    (folder / "lit.yaml").write_text(LIGHTNING)
    (folder / "ladder.toml").write_text(OVER_NODES)
    return folder


def test_multi_node_rung_runs_script_command_under_slurm(lightning):
    ladder = read_ladder(lightning / "ladder.toml")
    setup = changed(ladder.start, {"nnodes": 2, "threads": 1})
    trial, _ = prepare(ladder, setup, lightning / "t")
    text = Slurm(options=ladder.slurm).text(script_job(trial, lightning / "t", 60.0))
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks=2\n#SBATCH --ntasks-per-node=1\n" in text
    assert f"#SBATCH --chdir={lightning}\n" in text
    assert f"export TRAINPACE_WATCH={lightning}/t/recording\n" in text
    assert f"words=(python train.py {lightning}/t/configs/lit.yaml)" in text
    written = (lightning / "t" / "configs" / "lit.yaml").read_text()
    assert "num_nodes: 2" in written
    assert "batch_size: 4" in written  # the global batch stays


def test_multi_node_rung_starts_torchrun_with_rendezvous(folder):
    (folder / "ladder.toml").write_text(
        'command = "torchrun --standalone --nproc-per-node 2 train.py args.json"\nconfig = ["args.json"]\n'
        "[[rung]]\nnnodes = 2\n"
    )
    ladder = read_ladder(folder / "ladder.toml")
    trial, _ = prepare(ladder, changed(ladder.start, {"nnodes": 2}), folder / "t")
    assert trial.command[:5] == ("torchrun", "--nproc-per-node", "2", "--nnodes", "2")
    assert (trial.starts, trial.nnodes, trial.nproc_per_node, trial.world_size) == ("node", 2, 2, 4)
    script = replace(
        ladder.script, command="accelerate launch --num_processes 1 train.py args.json"
    )
    with pytest.raises(TrainpaceError):
        changed_files(replace(ladder, script=script), changed(ladder.start, {"nnodes": 2}))


def test_rung_sets_custom_config_keys(lightning):
    (lightning / "shards-faces").mkdir()
    ladder = read_ladder(lightning / "ladder.toml")
    rung = ladder.rungs[1]
    setup = replace(changed(ladder.start, {"shards": "shards-faces"}), settings=rung.settings)
    (written,) = changed_files(ladder, setup)
    assert yaml.safe_load(written.text)["data"] == {
        "batch_size": 8,
        "shards": str(lightning / "shards-faces"),
    }
    assert words_of(setup) == "micro-batch 8 x 1, 0 workers, shards"
    with pytest.raises(
        TrainpaceError,
        match=r"none of the script's settings files has the key data.shard, which a rung sets",
    ):
        changed_files(ladder, replace(setup, settings={"data.shard": "{shards}"}))


def test_rung_sets_environment_variables(lightning):
    with (lightning / "ladder.toml").open("a") as file:
        file.write('[[rung]]\nenvironment = { MALLOC_MMAP_MAX_ = 0, NOTE = "two words" }\n')
    ladder = read_ladder(lightning / "ladder.toml")
    rung = ladder.rungs[2]
    assert rung.title == "MALLOC_MMAP_MAX_ 0, NOTE two words"
    world = World(lambda setup: 50.0 if setup.environment else 100.0)
    found = climb_over(replace(ladder, rungs=(rung,)), world.actions())
    setup, _ = found.kept
    assert setup.environment == {"MALLOC_MMAP_MAX_": "0", "NOTE": "two words"}
    trial, _ = prepare(ladder, setup, lightning / "t")
    assert trial.environment == setup.environment
    assert words_of(setup).endswith("MALLOC_MMAP_MAX_ 0, NOTE two words")
    keep_files(ladder, setup, lightning)
    kept = (lightning / "kept" / "environment.sh").read_text()
    assert kept == "export MALLOC_MMAP_MAX_=0\nexport NOTE='two words'\n"
    keep_files(ladder, ladder.start, lightning)  # another climb that keeps no file
    assert not (lightning / "kept" / "environment.sh").exists()


@pytest.mark.parametrize(
    "written",
    [
        '{ "A B" = "1" }',
        '{ OMP_NUM_THREADS = "1" }',
        '{ TRAINPACE_WATCH = "x" }',
        '{ A = ["1"] }',
        "{ A = true }",
        '"A=1"',
    ],
)
def test_invalid_environment_variables_are_rejected(lightning, written):
    with (lightning / "ladder.toml").open("a") as file:
        file.write(f"[[rung]]\nenvironment = {written}\n")
    with pytest.raises(TrainpaceError):
        read_ladder(lightning / "ladder.toml")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('settings = {"data.shards" = "{shards}"}', ""),
        ('precompute = "train.py:faces"', ""),
        ('command = "python train.py lit.yaml"\nconfig = ["lit.yaml"]', 'task = "train.py:task"'),
        ('{"data.shards" = "{shards}"}', '{"data.shards" = ["a", "b"]}'),
    ],
)
def test_invalid_custom_keys_are_rejected(old, new, lightning):
    (lightning / "ladder.toml").write_text(OVER_NODES.replace(old, new))
    with pytest.raises(TrainpaceError):
        read_ladder(lightning / "ladder.toml")


def test_dry_run_marks_impossible_rungs(folder):
    done = climb(folder, "--dry-run", "--no-forecast", "--details")
    assert done.returncode == 0, done.stderr
    assert '+  "per_device_train_batch_size": 16,' in done.stdout
    assert "not possible" in done.stdout
    assert {p.name for p in folder.iterdir()} == {
        "args.json",
        "ds.json",
        "ladder.toml",
        "train.py",
        "out",
    }


def test_script_fingerprint_covers_settings_and_code(folder):
    script = read_ladder(folder / "ladder.toml").script
    before = fingerprint_of_script(script)
    assert fingerprint_of_script(script) == before
    (folder / "train.py").write_text("pass  # changed\n")
    changed_code = fingerprint_of_script(script)
    (folder / "args.json").write_text(json.dumps({**ARGS, "seed": 1}))
    assert len({before, changed_code, fingerprint_of_script(script)}) == 3


@pytest.mark.parametrize(
    ("command", "read"),
    [
        ("python one/train.py two/train.py", ("one/train.py", "two/train.py", "one/net.py")),
        ("python -m one.train", ("one/train.py", "one/net.py")),
        ("torchrun --nproc-per-node 2 -m one", ("one/__main__.py",)),
        ("PYTHONPATH=lib python -m pkg.train", ("lib/pkg/train.py",)),
    ],
)
def test_script_fingerprint_covers_files_named_in_command(command, read, folder):
    files = (
        "one/train.py",
        "two/train.py",
        "one/net.py",
        "one/__main__.py",
        "lib/pkg/train.py",
        "elsewhere/a.py",
    )
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("pass\n")
    script = Script(command=command, folder=str(folder))
    known = fingerprint_of_script(script)
    for file in read:
        (folder / file).write_text("pass  # changed\n")
        assert fingerprint_of_script(script) != known, file
        known = fingerprint_of_script(script)
    (folder / "elsewhere" / "a.py").write_text("pass  # changed\n")
    assert fingerprint_of_script(script) == known


def test_unwritable_trial_folder_is_an_error(folder):
    (folder / "taken").write_text("a file")
    ladder = read_ladder(folder / "ladder.toml")
    with pytest.raises(TrainpaceError):
        prepare(ladder, ladder.start, folder / "taken")


def test_plan_of_script_becomes_script_ladder(folder):
    start, larger = Execution(micro_batch=4, accumulation=4), Execution(micro_batch=16)
    plan = Plan(
        start=start,
        changes=(Change(title="larger", execution=larger, forecast_saved_s=1.0),),
        model="resnet18",
    )
    script = read_ladder(folder / "ladder.toml").script
    found = ladder_of_plan(plan, script=script)
    assert (found.script, found.start.execution, found.rungs[0].changes, found.steps) == (
        script,
        start,
        {"micro_batch": 16},
        30,
    )
    assert ladder_of_plan(replace(plan, model=""), script=script).start.task == ""
    with pytest.raises(Contradiction):
        ladder_of_plan(replace(plan, start=Execution(micro_batch=8, accumulation=4)), script=script)


HF = """
import sys
import torch
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    def forward(self, x, labels=None):
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1024
    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": int(x.sum() > 0)}

args, = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])
set_seed(args.seed)
Trainer(Net(), args, train_dataset=Data()).train()
"""
DEEPSPEED = """
import argparse, json, os
import torch, deepspeed
from torch import nn
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--save")
args = parser.parse_args()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for a minute
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
x = torch.randn(1024, 16)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)
sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
for epoch in range(100):
    for i, (a, b) in enumerate(torch.utils.data.DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=sampler)):
        engine.backward(nn.functional.cross_entropy(engine(a), b))
        engine.step()
        if i == 7:
            engine.save_checkpoint(args.save)
            with open(os.path.join(args.save, "progress.json"), "w") as file:
                json.dump({"step": i}, file)
"""


def climb(folder, *options):
    command = [
        sys.executable,
        "-m",
        "trainpace",
        "run",
        "ladder.toml",
        "--no-journal",
        "--out",
        "out",
        "--steps",
        "12",
    ]
    paths = [str(ROOT / "src"), str(ROOT / ".engines"), os.environ.get("PYTHONPATH", "")]
    around = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    return subprocess.run(
        [*command, *options],
        cwd=folder,
        env=around,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def files_of(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "out/" not in str(p)
    }


@pytest.mark.slow
def test_hugging_face_script_climb_keeps_checkpoints(folder):
    (folder / "train.py").write_text(textwrap.dedent(HF))
    (folder / "runs" / "checkpoint-5").mkdir(parents=True)
    (folder / "runs" / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5}')
    before = files_of(folder)
    done = climb(folder)
    assert done.returncode in (0, 1), done.stderr
    assert {k: v for k, v in files_of(folder).items() if "__pycache__" not in k} == before
    found = load(folder / "out" / "ladder.json", LadderResult)
    assert found.start.losses[-1] < found.start.losses[0]
    first, second = found.rungs
    assert first.losses.verdict == "ok", first.losses
    assert first.best.setup.execution.global_batch == 16
    assert "do not take channels_last" in second.reason
    assert "channels_last" in done.stdout


@pytest.mark.long
@NEEDS_ENGINES
def test_deepspeed_script_climbs_over_processes(folder):
    (folder / "train.py").write_text(textwrap.dedent(DEEPSPEED))
    (folder / "mine").mkdir()
    for name in ("latest", "progress.json"):
        (folder / "mine" / name).write_text("theirs")
    text = """
        command = "torchrun --standalone --nproc-per-node 1 train.py --config ds.json --save {out}"
        config = ["ds.json"]
        [[rung]]
        nproc_per_node = 2
        zero_stage = 1
        """
    (folder / "ladder.toml").write_text(textwrap.dedent(text).replace("{out}", "mine"))
    done = climb(folder)
    assert done.returncode == 2, done.stdout
    assert "may write only into its own folder" in done.stderr
    (folder / "ladder.toml").write_text(textwrap.dedent(text))
    done = climb(folder, "--fresh")
    assert done.returncode in (0, 1), done.stderr
    assert {p.name: p.read_text() for p in (folder / "mine").iterdir()} == {
        "latest": "theirs",
        "progress.json": "theirs",
    }
    found = load(folder / "out" / "ladder.json", LadderResult)
    (rung,) = found.rungs
    assert rung.best.setup.execution == Execution(
        micro_batch=4, accumulation=2, nproc_per_node=2, zero_stage=1
    )
    # Mean over two ranks with the same samples in the same order.
    assert rung.losses.verdict == "ok", rung.losses
    assert len(rung.best.measured.losses) == len(found.start.losses) > 12


@pytest.mark.slow
def test_script_that_ignores_its_settings_is_an_error(folder):
    (folder / "train.py").write_text(
        textwrap.dedent(HF).replace("Trainer(", "args.per_device_train_batch_size = 2\nTrainer(")
    )
    done = climb(folder)
    assert done.returncode == 2
    assert "the settings say 16 samples a step, and the script took 8" in done.stderr


def test_training_arguments_in_code_are_read_and_kept(folder):
    (folder / "train.py").write_text(
        "args = TrainingArguments(per_device_train_batch_size=4, num_train_epochs=N)\n"
    )
    script = Script(
        command="torchrun --nproc-per-node 2 train.py", configs=("train.py",), folder=str(folder)
    )
    now = present(script)
    assert (now.execution.micro_batch, now.execution.nproc_per_node) == (4, 2)
    plan = Plan(
        start=now.execution,
        changes=(Change(title="t", execution=now.execution, forecast_saved_s=1.0),),
    )
    ladder = ladder_of_plan(plan, script=script)
    trial, _ = prepare(ladder, ladder.start, folder / "trial")
    assert trial.command[-1] == "train.py"
    assert os.listdir(folder / "trial" / "configs") == []
    with pytest.raises(TrainpaceError, match="Python code"):
        changed_files(
            ladder, replace(ladder.start, execution=replace(now.execution, micro_batch=8))
        )
    keep_files(ladder, ladder.start, folder)
    assert os.listdir(folder / "kept") == ["command.txt"]


LIT = """
import sys, warnings
import torch, yaml
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(16, 4)
    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

settings = yaml.safe_load(open(sys.argv[1]))
data = torch.utils.data.TensorDataset(torch.randn(2048, 16))
loader = torch.utils.data.DataLoader(data, settings["data"]["batch_size"], drop_last=True)
pl.Trainer(logger=False, enable_checkpointing=False, max_epochs=9, enable_progress_bar=False, **settings["trainer"]).fit(Net(), loader)
"""


@pytest.mark.slow
@NEEDS_ENGINES
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=f"no Slurm: {slurm_cluster.missing()}")
def test_lightning_script_climbs_on_two_slurm_nodes(lightning):
    (lightning / "train.py").write_text(LIT)
    (lightning / "ladder.toml").write_text(
        OVER_NODES.partition("[slurm]")[0] + "[[rung]]\nnnodes = 2\n"
    )
    with slurm_cluster.cluster(2, cpus=2):
        done = climb(lightning, "--launcher", "slurm", "--no-forecast")
    assert done.returncode in (0, 1), done.stderr
    (rung,) = load(lightning / "out" / "ladder.json", LadderResult).rungs
    assert rung.best is not None, rung
    assert rung.best.setup.execution == Execution(micro_batch=4, nnodes=2)
    assert 0 < rung.best.measured.start_up_s < 120
    assert len(rung.best.measured.losses) > 12


PLAIN_DDP = """
import argparse
import torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int)
parser.add_argument("--gradient_accumulation_steps", type=int)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.randn(2048, 16))
sampler = torch.utils.data.DistributedSampler(data)
for _ in range(9):
    for (x,) in torch.utils.data.DataLoader(data, args.per_device_train_batch_size, sampler=sampler):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.long  # Lightning's script climbs over the same cluster
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=f"no Slurm: {slurm_cluster.missing()}")
def test_torchrun_command_climbs_on_two_slurm_nodes(folder):
    (folder / "train.py").write_text(PLAIN_DDP)
    flags = "--per_device_train_batch_size 8 --gradient_accumulation_steps 1"
    (folder / "ladder.toml").write_text(
        f'command = "torchrun --standalone --nproc-per-node 1 train.py {flags}"\n[[rung]]\nnnodes = 2\n'
    )
    with slurm_cluster.cluster(2, cpus=2):
        done = climb(folder, "--no-forecast")  # the baseline here, two nodes on Slurm
    assert done.returncode in (0, 1), done.stderr
    (rung,) = load(folder / "out" / "ladder.json", LadderResult).rungs
    assert rung.best is not None, rung
    assert rung.best.setup.execution == Execution(micro_batch=4, nnodes=2)
