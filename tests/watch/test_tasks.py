"""Several `trainpace watch` tasks of one srun make one recording and one report."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trainpace.watch import read_recording
from trainpace.watch.tasks import Task, is_one_of_unnumbered_nodes, node_of, take, task_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "planted"))

import slurm_cluster

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}

DDP = """
    import gc

    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.randn(80, 16))
    for (x,) in torch.utils.data.DataLoader(data, batch_size=4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    del model, optimizer  # else gloo's threads outlive the group, and may abort a process that ends (pytorch/pytorch#190489)
    gc.collect()
    dist.destroy_process_group()
"""


def test_task_is_read_from_slurm_step_variables():
    assert task_of(STEP) == Task("7.0", 1, 2)
    assert task_of(STEP | {"SLURM_RESTART_COUNT": "2"}).step == "7.0-2"
    for lacking in STEP:  # a batch script does not run in a step
        assert task_of({k: v for k, v in STEP.items() if k != lacking}) is None
    assert task_of(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None


def test_folder_belongs_to_the_tasks_of_one_step(tmp_path):
    assert take(tmp_path / "new", Task("7.0", 1, 2))
    assert take(tmp_path / "new", Task("7.0", 0, 2))
    assert not take(tmp_path / "new", Task("7.1", 0, 2))
    (tmp_path / "file").write_text("")
    assert not take(tmp_path / "file", Task("7.0", 0, 2))


def test_node_is_read_from_torchrun_options():
    node = Task("torchrun-2-nodes", 1, 2, is_node=True)
    for words in (
        "torchrun --nnodes 2 --node-rank 1",
        "/bin/torchrun --node_rank=1 --nnodes=2 --rdzv-backend static",
        "python -m torch.distributed.run --nnodes=2 --node-rank=1",
    ):
        assert node_of((*words.split(), "train.py", "--node-rank", "0")) == node
    for words in (
        "torchrun --nnodes 1 --node-rank 0",
        "torchrun --nnodes 2",
        "torchrun --nnodes 1:4 --node-rank 0",
        "torchrun --nnodes 2 --node-rank 2",
        "torchrun",
        "python",
        "torchrun train.py --nnodes 2 --node-rank 1",
    ):
        assert node_of((*words.split(), "train.py")) is None


def test_node_without_a_rank_option_is_recognized():
    for words in ("torchrun --nnodes 2 --rdzv-backend c10d", "torchrun --nnodes=2:4"):
        assert is_one_of_unnumbered_nodes((*words.split(), "train.py"))
    for words in (
        "torchrun --nnodes 2 --node-rank 1",
        "torchrun --nnodes 1:4",
        "torchrun",
        "python",
    ):
        assert not is_one_of_unnumbered_nodes((*words.split(), "train.py"))


def test_node_can_use_a_folder_only_once(tmp_path):
    nodes = [Task("torchrun-2-nodes", number, 2, is_node=True) for number in (0, 1)]
    assert all(take(tmp_path / "shared", node) for node in nodes)
    assert not any(take(tmp_path / "shared", node) for node in nodes)


@pytest.mark.slow
def test_torchrun_on_two_nodes_makes_one_recording(tmp_path):
    """Both nodes are this machine, without Slurm."""
    command = words_of(tmp_path, "--json")
    at = command.index("--") + 1
    torchrun = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port 29633 --node-rank"
    started = [
        subprocess.Popen(
            [*command[: at + 1], *torchrun.split(), number, command[-1]],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert said[1] == ""
    answer = json.loads(said[0])
    assert [(r["rank"], r["world_size"]) for r in answer["ranks"]] == [(0, 2), (1, 2)]
    assert [r["rank"] for r in answer["together"]["ranks"]] == [0, 1]


def words_of(folder, *more):
    (folder / "train.py").write_text(textwrap.dedent(DDP))
    command = [sys.executable, "-m", "trainpace", "watch", *more]
    return [
        *command,
        "--output",
        str(folder / "recording"),
        "--",
        sys.executable,
        str(folder / "train.py"),
    ]


@pytest.mark.slow
def test_tasks_record_together_and_the_first_reports(tmp_path, monkeypatch):
    """Slurm's and torch's environment variables are set without Slurm."""
    for key, value in {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29631",
        **STEP,
    }.items():
        monkeypatch.setenv(key, value)
    command = words_of(tmp_path)
    started = []
    for number in ("0", "1"):
        monkeypatch.setenv("SLURM_PROCID", number)
        monkeypatch.setenv("RANK", number)
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    (said, errors), (other_said, _) = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert "rank" in said
    assert other_said == ""
    recording = read_recording(tmp_path / "recording")
    assert ([r.rank for r in recording.ranks], recording.seen, recording.exit_code) == (
        [0, 1],
        "",
        0,
    )
    refused = subprocess.run(
        command, env={**STEP, "SLURM_STEP_ID": "1"}, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "already exists" in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=f"no Slurm: {slurm_cluster.missing()}")
def test_srun_watch_records_every_rank_on_slurm(tmp_path):
    command = words_of(tmp_path, "--json")
    ranks = 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=127.0.0.1 MASTER_PORT=29632; exec "$@"'
    with slurm_cluster.cluster(2, cpus=2):
        done = subprocess.run(
            ["srun", "--nodes=2", "--ntasks=2", "bash", "-c", ranks, "rank", *command],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # only the first task prints
    assert [(r["rank"], r["world_size"]) for r in answer["ranks"]] == [(0, 2), (1, 2)]
    assert answer["seen"] == ""
    assert all(r["steps"] > 10 and r["parts_ms"]["communication"] >= 0 for r in answer["ranks"])
