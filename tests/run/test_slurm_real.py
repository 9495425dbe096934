"""The Slurm launcher with a real Slurm of four nodes on this machine."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from interrupting import interrupt_when, is_written, may_leave_a_file_open

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "planted"))

import netns
import slurm_cluster

from trainpace.core.errors import TrainpaceError
from trainpace.run.job import Job
from trainpace.run.slurm import Slurm, SlurmOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(slurm_cluster.missing()), reason=f"no Slurm: {slurm_cluster.missing()}"
    ),
]

LAUNCHER = Slurm(poll_s=0.2)

REDUCES = """
import os, pathlib, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(mine)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "on", os.environ["SLURMD_NODENAME"], flush=True)
if dist.get_rank() == 0:
    pathlib.Path(sys.argv[1]).write_text(str(mine.tolist()))
dist.destroy_process_group()
"""
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('done')"
HANGS = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1] + '.pid').write_text(str(os.getpid())); time.sleep(600)"
# In the first attempt rank 1 waits to be killed with its node and rank 0 waits for rank 1. The second attempt ends.
NEEDS_TWO = f"""
import pathlib, sys, time, os, socket
first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
if first and os.environ["RANK"] == "1":
    pathlib.Path(sys.argv[1] + ".node").write_text(os.environ["SLURMD_NODENAME"])
    time.sleep(600)
if first:
    while not os.path.exists(sys.argv[1] + ".killed"):
        time.sleep(0.05)
    raise RuntimeError("Connection closed by peer")
if os.environ["RANK"] == "0":
    {WRITES}
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster.cluster(4, gpus=2) as made:
        yield made


def job_of(folder, code, name="trial", **more):
    result = str(folder / f"{name}.json")
    return Job(
        name=name, program=("-c", code, result), folder=str(folder / "logs"), result=result, **more
    )


def appears(path, seconds=60.0):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert path.exists()


def queue():
    return subprocess.run(
        ("squeue", "-h", "-o", "%i %T"), capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.usefixtures("cluster")
def test_two_nodes_all_reduce(tmp_path):
    said = []
    job = job_of(tmp_path, REDUCES, nnodes=2, nproc_per_node=2, cpus_per_process=1)
    ended = LAUNCHER.run(job, said.append)
    assert ended.state == "done", ended.tail
    assert Path(job.result).read_text() == "[10.0, 10.0, 10.0]"
    assert {line for line in said if line.startswith("rank")} == {
        f"rank {i} of 4 on node{i // 2 + 1}" for i in range(4)
    }


@pytest.mark.usefixtures("cluster")
def test_used_port_is_skipped(tmp_path):
    code = f"import os; print(os.environ['MASTER_PORT'], flush=True)\n{WRITES}"

    def port_of(name):
        said = []
        ended = LAUNCHER.run(job_of(tmp_path, code, name=name), said.append)
        assert ended.state == "done", ended.tail
        return next(int(line) for line in said if line.isdecimal())

    after = port_of("first") + 1  # ports follow the numbers of jobs
    with socket.create_server(("", after)):
        assert port_of("second") == after + 1


@pytest.mark.usefixtures("cluster")
def test_every_rank_sees_all_gpus_of_its_node(tmp_path):
    code = f"import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'], flush=True)\n{WRITES}"
    said = []
    ended = LAUNCHER.run(
        job_of(tmp_path, code, nproc_per_node=2, cpus_per_process=1, gpus_per_node=2), said.append
    )
    assert ended.state == "done", ended.tail
    assert sorted(said)[:2] == ["0,1 0", "0,1 1"]


@pytest.mark.usefixtures("cluster")
def test_hanging_job_times_out(tmp_path):
    job = job_of(tmp_path, HANGS, timeout_s=2.0)
    ended = LAUNCHER.run(job)
    assert (ended.state, ended.reason) == ("timed out", "trial did not end within 2 s.")
    assert not Path("/proc", Path(job.result + ".pid").read_text()).exists()


@pytest.mark.usefixtures("cluster")
def test_failed_job_reason_is_its_error(tmp_path):
    ended = LAUNCHER.run(job_of(tmp_path, "raise ValueError('no such batch')", nnodes=2))
    assert (ended.state, ended.reason, ended.attempts) == ("failed", "ValueError: no such batch", 1)


@pytest.mark.usefixtures("cluster")
def test_failing_rank_ends_waiting_rank(tmp_path):
    code = "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(600)\nraise ValueError('no such batch')"
    ends = [LAUNCHER.run(job_of(tmp_path, code, name=f"trial{i}", nnodes=2)) for i in range(3)]
    assert [(ended.state, ended.reason) for ended in ends] == 3 * [
        ("failed", "ValueError: no such batch")
    ]


@may_leave_a_file_open
@pytest.mark.usefixtures("cluster")
def test_ctrl_c_cancels_job(tmp_path):
    job = job_of(tmp_path, HANGS)

    pid = Path(job.result + ".pid")
    interrupt_when(lambda: is_written(pid))
    with pytest.raises(KeyboardInterrupt):
        LAUNCHER.run(job)
    assert queue() == ""
    assert not Path("/proc", pid.read_text()).exists()


@pytest.mark.usefixtures("cluster")
def test_preempted_job_runs_again(tmp_path):
    job = job_of(
        tmp_path,
        f"import os\nif os.environ.get('SLURM_RESTART_COUNT'): {WRITES}\nelse: {HANGS}",
        nnodes=4,
        cpus_per_process=2,
    )
    urgent = []

    def preempt():
        appears(Path(job.result + ".pid"))
        options = SlurmOptions(partition="urgent")
        urgent.append(
            Slurm(options=options, poll_s=0.2).run(
                job_of(tmp_path, WRITES, "urgent", nnodes=4, cpus_per_process=2)
            )
        )

    other = threading.Thread(target=preempt)
    other.start()
    ended = LAUNCHER.run(job)
    other.join()
    assert (ended.state, ended.attempts) == ("done", 2), ended
    assert urgent[0].state == "done"


@pytest.mark.usefixtures("cluster")
def test_job_beyond_partition_limits_fails(tmp_path):
    ended = Slurm(options=SlurmOptions(partition="short"), poll_s=0.2).run(
        job_of(tmp_path, WRITES, timeout_s=3600.0)
    )
    assert ended.state == "failed"
    assert "PartitionTimeLimit" in ended.reason
    with pytest.raises(TrainpaceError, match="nvalid partition"):
        Slurm(options=SlurmOptions(partition="none")).run(job_of(tmp_path, WRITES))
    assert queue() == ""


@pytest.mark.skipif(bool(netns.missing()), reason=f"no hosts apart: {netns.missing()}")
def test_separate_hosts_all_reduce_over_network(tmp_path):
    with slurm_cluster.cluster(2, mbit_per_s=1000):
        said = []
        job = job_of(
            tmp_path,
            REDUCES,
            nnodes=2,
            cpus_per_process=1,
            environment={"GLOO_SOCKET_IFNAME": netns.INTERFACE},
        )
        ended = LAUNCHER.run(job, said.append)
    assert ended.state == "done", ended.tail
    assert {line for line in said if line.startswith("rank")} == {
        f"rank {i} of 2 on node{i + 1}" for i in (0, 1)
    }


@pytest.mark.parametrize("rank", [1, 0])
def test_job_on_killed_node_is_requeued(cluster, tmp_path, rank):
    """Rank 0's node also runs the batch script."""
    said = []
    job = job_of(tmp_path, NEEDS_TWO, nnodes=2, cpus_per_process=2)
    killed = []

    def kill():
        node = Path(job.result + ".node")
        appears(node)
        time.sleep(0.2)
        lost = (
            node.read_text()
            if rank
            else subprocess.run(
                ("squeue", "-h", "-o", "%B"), capture_output=True, text=True, check=True
            ).stdout.strip()
        )
        killed.append(lost)
        cluster.cut_node(lost)
        Path(job.result + ".killed").write_text("")
        time.sleep(1.0 if rank else 0.2)
        cluster.report_down(lost)

    other = threading.Thread(target=kill)
    other.start()
    ended = LAUNCHER.run(job, said.append)
    other.join()
    cluster.start_node(killed[0])
    slurm_cluster.control("update", f"nodename={killed[0]}", "state=resume")
    cluster.await_idle()
    assert (ended.state, ended.attempts) == ("done", 2), (ended, said)
