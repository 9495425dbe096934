"""Scripts started by real launchers train the same under the recorder."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainpace.watch import read_recording, watch
from watch.beside_bare import HEAD, compared, lacking, use_libraries

FOLDERS = (".zoo", ".engines", ".frameworks")
NET = """
def net(lr):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), lr=lr)
data = torch.utils.data.TensorDataset(torch.rand(128, 8), torch.arange(128) % 3)
"""
HYDRA = (
    HEAD
    + NET
    + """
import hydra
@hydra.main(version_base=None, config_path="settings", config_name="config")
def main(cfg):
    (model, optimizer), losses = net(cfg.lr), []
    for epoch in range(cfg.trainer.max_epochs):
        for x, y in torch.utils.data.DataLoader(data, batch_size=4):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
    assert "multirun" in os.getcwd() or "outputs" in os.getcwd()
    keep(losses, f"-{cfg.lr}")
if __name__ == "__main__":
    main()
"""
)
SETTINGS = "{lr: 0.1, trainer: {max_epochs: 2}, hydra: {job: {chdir: true}}}"
RAY = (
    HEAD
    + NET
    + """
import ray, ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
def train(settings):
    torch.set_num_threads(1)
    model, optimizer = net(settings["lr"])
    model, losses = prepare_model(model), []
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=4))
    for epoch in range(settings["epochs"]):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
    with open(settings["losses"] + f"-{ray.train.get_context().get_world_rank()}", "w") as file:
        json.dump(losses, file)
    ray.train.report({"loss": losses[-1]})
if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    TorchTrainer(train, train_loop_config={"lr": 0.1, "epochs": 2, "losses": os.environ["LOSSES"]},
                 scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                 run_config=RunConfig(storage_path=os.environ["LOSSES"] + "-run", name="run")).fit()
"""
)
# what of torchtune's recipe is the user's: a tokenizer, a dataset, and weights to begin with
TINY = """
import os, torch
from torchtune.models.llama3 import llama3
from torchtune.training import FullModelTorchTuneCheckpointer
class Tokenizer:
    pad_id, vocab_size, max_seq_len = 0, 64, 16
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, i):
        tokens = [1 + (i * k) % 60 for k in range(1, 8 + i % 5)]
        return {"tokens": tokens, "labels": tokens}
def rows(tokenizer, packed):
    return Rows()
def checkpointer(checkpoint_dir, **settings):
    os.makedirs(checkpoint_dir)
    torch.manual_seed(0)
    weights = llama3(vocab_size=64, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=16, intermediate_dim=32, max_seq_len=32)
    torch.save(weights.state_dict(), checkpoint_dir + "/base.pt")
    return FullModelTorchTuneCheckpointer(checkpoint_dir=checkpoint_dir, **settings)
"""
RECIPE = """
output_dir: ${oc.env:LOSSES}-out
model: {_component_: torchtune.models.llama3.lora_llama3, lora_attn_modules: [q_proj, v_proj], lora_rank: 4, lora_alpha: 8,
        apply_lora_to_mlp: false, vocab_size: 64, num_layers: 2, num_heads: 2, num_kv_heads: 2, embed_dim: 16,
        intermediate_dim: 32, max_seq_len: 32}
tokenizer: {_component_: tiny.Tokenizer}
checkpointer: {_component_: tiny.checkpointer, checkpoint_dir: "${oc.env:LOSSES}-base", checkpoint_files: [base.pt],
               recipe_checkpoint: null, output_dir: "${output_dir}", model_type: LLAMA3}
resume_from_checkpoint: false
save_adapter_weights_only: false
dataset: {_component_: tiny.rows, packed: false}
seed: 0
shuffle: true
batch_size: 4
optimizer: {_component_: torch.optim.AdamW, lr: 1e-3}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 2}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
epochs: 2
max_steps_per_epoch: null
gradient_accumulation_steps: 2
clip_grad_norm: null
compile: false
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${output_dir}/logs"}
log_every_n_steps: 1
log_peak_memory_stats: false
device: cpu
dtype: fp32
enable_activation_checkpointing: false
enable_activation_offloading: false
"""

needs_libraries = pytest.mark.skipif(bool(lacking(*FOLDERS)), reason=f"make {lacking(*FOLDERS)}")


@pytest.fixture(autouse=True)
def libraries(monkeypatch, tmp_path):
    use_libraries(monkeypatch, *FOLDERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def hydra_script(tmp_path):
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.yaml").write_text(SETTINGS)
    (tmp_path / "train.py").write_text(HYDRA)


def losses_of(name, *settings):
    return [json.loads(Path(f"{name}-{one}").read_text()) for one in settings]


@needs_libraries
@pytest.mark.slow
def test_recording_stays_in_place_if_hydra_changes_directory(tmp_path, hydra_script, monkeypatch):
    monkeypatch.setenv("LOSSES", str(tmp_path / "watched"))
    command = ["python", "train.py", "lr=0.2"]
    words = [sys.executable, "-m", "trainpace", "watch", "--output", "here", "--", *command]
    bare = subprocess.run(
        [sys.executable, *command[1:]],
        env={**os.environ, "LOSSES": str(tmp_path / "bare")},
        check=False,
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert (bare.returncode, done.returncode) == (0, 0)
    assert losses_of("watched", 0.2) == losses_of("bare", 0.2)
    (rank,) = read_recording(tmp_path / "here").ranks
    assert rank.steps + 3 == 64
    assert (rank.samples_per_step, rank.loader.batches) == (4, 32)
    assert (rank.stated.epochs, rank.stated.words) == (2, "max_epochs = 2 in train.py")
    assert "Next: trainpace diagnose -- python train.py lr=0.2" in done.stdout


@needs_libraries
@pytest.mark.slow
def test_hydra_sweeps_are_recorded_in_one_and_several_processes(tmp_path, hydra_script):
    command = [sys.executable, "train.py", "--multirun", "lr=0.2,0.3"]
    bare, watched, recording = compared(command, tmp_path, lambda path: losses_of(path, 0.2, 0.3))
    assert watched == bare
    assert bare[0] != bare[1]
    (rank,) = recording.ranks
    # the first step of the second training includes the time between both
    assert rank.steps + 3 + 1 == 2 * 64
    assert (rank.samples_per_step, rank.loader.batches, recording.seen) == (4, 32, "")

    os.environ["LOSSES"] = str(tmp_path / "joblib")
    assert (
        watch(
            [*command, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
            tmp_path / "joblib-recording",
        )
        == 0
    )
    assert losses_of("joblib", 0.2, 0.3) == bare
    recording = read_recording(tmp_path / "joblib-recording")
    (rank,) = recording.ranks
    assert rank.steps + 3 == 64
    assert recording.seen.startswith(
        "1 more process trained with the same rank, or with none, for no more steps"
    )


@needs_libraries
@pytest.mark.slow
def test_torchtune_recipe_is_recorded_and_trains_the_same(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "lora.yaml").write_text(RECIPE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = [
        sys.executable,
        "-m",
        "torchtune._cli.tune",
        "run",
        "lora_finetune_single_device",
        "--config",
        "lora.yaml",
    ]

    def logged(path):
        (log,) = Path(f"{path}-out/logs").iterdir()
        return [
            line.split("loss:")[1].split()[0]
            for line in log.read_text().splitlines()
            if "loss:" in line
        ]

    bare, watched, recording = compared(command, tmp_path, logged)
    assert watched == bare
    (rank,) = recording.ranks
    assert rank.steps + 3 == len(bare) == 24
    assert (rank.micro_steps, rank.samples_per_step) == (2, 8)
    assert (rank.loader.workers, rank.loader.batches, rank.loader.samples_in_dataset) == (0, 24, 96)
    assert rank.stated.epochs == 2
    assert rank.parts_ms["data"] > 0


@needs_libraries
@pytest.mark.slow
def test_ray_train_workers_are_recorded_as_ranks_and_end(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    (tmp_path / "train.py").write_text(RAY)
    bare, watched, recording = compared(
        [sys.executable, "train.py"], tmp_path, lambda path: losses_of(path, 0, 1)
    )
    assert watched == bare
    assert [(rank.rank, rank.world_size) for rank in recording.ranks] == [(0, 2), (1, 2)]
    for rank in recording.ranks:
        # two epochs of 16 batches, all written although Ray kills its workers
        assert rank.steps + 3 == 32 == len(bare[0])
        assert rank.complete
        # Ray fetches one batch ahead
        assert rank.samples_per_step == pytest.approx(4, abs=0.2)
        assert rank.loader.batches == 16
        assert rank.parts_ms["communication"] > 0
        assert (rank.stated.epochs, rank.no_workload) == (2, "")
    assert (tmp_path / "recording" / "workload.json").is_file()
    deadline = time.monotonic() + 20
    while (left := started_under(tmp_path / "recording")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def started_under(recording):
    """Return the command lines of the processes that still write to the recording."""
    found, sought = [], f"TRAINPACE_WATCH={recording}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if sought in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
