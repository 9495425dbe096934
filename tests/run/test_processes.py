import subprocess
import sys
import time
from pathlib import Path

import pytest

from interrupting import interrupt_when, is_written, may_leave_a_file_open
from trainpace.core.errors import TrainpaceError
from trainpace.run import job as jobs
from trainpace.run.job import GRACE_S, Job, ThisMachine, Torchrun

WRITES = "import os, pathlib; pathlib.Path(os.environ['RESULT']).write_text('done')"


def job_of(folder, code, **more):
    """Return a job that runs `code`, which writes its result to the path in RESULT."""
    environment = {"RESULT": str(folder / "result.json"), **more.pop("environment", {})}
    script = folder / "script.py"
    script.write_text(code)
    return Job(
        name="trial 1",
        program=(str(script),),
        folder=str(folder / "logs"),
        result=str(folder / "result.json"),
        environment=environment,
        timeout_s=more.pop("timeout_s", 60.0),
        **more,
    )


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def appears(path, seconds=30.0):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert path.exists()


# --- text


def test_torchrun_text_is_the_whole_command_line(tmp_path):
    job = Job(
        name="a",
        program=("-m", "some.rank", "x y"),
        folder=str(tmp_path),
        result="r",
        nproc_per_node=2,
    )
    assert Torchrun(python="python", cores=8, threads_given=False).text(job) == (
        "env PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 python -m torch.distributed.run --standalone --local-addr 127.0.0.1 "
        f"--nnodes 1 --nproc-per-node 2 --log-dir {tmp_path}/torchrun -m some.rank 'x y'"
    )


def test_plain_process_runs_as_rank_0_of_1(tmp_path):
    job = Job(name="a", program=("s.py",), folder=str(tmp_path), result="r", environment={"A": "b"})
    assert ThisMachine(python="python", cores=8, threads_given=False).text(job) == (
        "env RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8 "
        "A=b python s.py"
    )


@pytest.mark.parametrize(
    ("job", "given", "threads"),
    [
        ({}, False, "2"),
        ({}, True, None),
        ({"cpus_per_process": 3}, True, "3"),
        ({"cpus_per_process": 3, "environment": {"OMP_NUM_THREADS": "5"}}, True, "5"),
        ({"nproc_per_node": 99}, False, "1"),
    ],
)
def test_threads_default_to_share_of_cores(job, given, threads):
    whole = {
        "name": "a",
        "program": ("s.py",),
        "folder": ".",
        "result": "r",
        "nproc_per_node": 4,
        **job,
    }
    found = Torchrun(cores=8, threads_given=given).environment(Job(**whole))
    assert found.get("OMP_NUM_THREADS") == threads


def test_launchers_reject_jobs_they_cannot_start(tmp_path):
    whole = {"name": "a", "program": ("s.py",), "folder": ".", "result": "r"}
    with pytest.raises(TrainpaceError, match="Slurm"):
        Torchrun().text(Job(**whole, nnodes=2))
    with pytest.raises(TrainpaceError):
        ThisMachine().text(Job(**whole, nproc_per_node=2))


# --- one process


def test_job_with_result_is_done(tmp_path):
    said = []
    ended = ThisMachine().run(
        job_of(tmp_path, f"{WRITES}\nprint('first')\nprint('second', end='')"), said.append
    )
    assert (ended.state, ended.reason, ended.exit_code) == ("done", "", 0)
    assert said == ["first", "second"]
    assert Path(ended.log).read_text() == "first\nsecond"


def test_job_state_follows_result_not_exit_code(tmp_path):
    assert ThisMachine().run(job_of(tmp_path, f"{WRITES}\nimport os; os.abort()")).state == "done"
    ended = ThisMachine().run(
        job_of(tmp_path, "print('all is well')")
    )  # The result of an earlier run does not count.
    assert (ended.state, ended.exit_code) == ("failed", 0)
    assert ended.reason == "trial 1 left no result: it ended with exit code 0."
    assert ended.tail == "all is well"


def test_failed_job_reason_is_its_error(tmp_path):
    ended = ThisMachine().run(
        job_of(tmp_path, "import sys\nprint('hello')\nraise ValueError('no such batch')")
    )
    assert (ended.state, ended.reason, ended.exit_code) == (
        "failed",
        "ValueError: no such batch",
        1,
    )


def test_sigkill_reason_suggests_out_of_memory(tmp_path):
    ended = ThisMachine().run(job_of(tmp_path, "import os; os.kill(os.getpid(), 9)"))
    assert ended.reason == "trial 1 left no result: it died of SIGKILL, most likely out of memory."


HANGS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(os.environ["PIDS"] + ".part").write_text(f"{os.getpid()} {child.pid}")
os.rename(os.environ["PIDS"] + ".part", os.environ["PIDS"])
print("hanging", flush=True)
time.sleep(600)
"""


def test_hanging_job_is_killed_with_its_child_processes(tmp_path):
    pids = tmp_path / "pids"
    ended = ThisMachine().run(
        job_of(tmp_path, HANGS, timeout_s=2.0, environment={"PIDS": str(pids)})
    )
    assert (ended.state, ended.exit_code) == ("timed out", None)
    assert ended.reason == "trial 1 did not end within 2 s."
    assert ended.tail == "hanging"
    assert [is_alive(pid) for pid in pids.read_text().split()] == [False, False]


def test_job_that_hangs_after_result_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr("trainpace.run.job.GRACE_S", 0.3)
    ended = ThisMachine().run(job_of(tmp_path, f"{WRITES}\nimport time; time.sleep(600)"))
    assert ended.state == "done"
    assert ended.seconds < GRACE_S


def test_leftover_processes_of_finished_job_are_killed(tmp_path):
    pids = tmp_path / "pids"
    code = HANGS.replace("time.sleep(600)\n", "\n") + WRITES
    assert (
        ThisMachine().run(job_of(tmp_path, code, environment={"PIDS": str(pids)})).state == "done"
    )
    assert [is_alive(pid) for pid in pids.read_text().split()] == [False, False]


@may_leave_a_file_open
def test_ctrl_c_kills_job_and_child_processes(tmp_path):
    pids = tmp_path / "pids"
    interrupt_when(lambda: is_written(pids))
    with pytest.raises(KeyboardInterrupt):
        ThisMachine().run(job_of(tmp_path, HANGS, environment={"PIDS": str(pids)}))
    assert [is_alive(pid) for pid in pids.read_text().split()] == [False, False]


def test_job_processes_end_if_launcher_is_killed(tmp_path):
    pids, asker = tmp_path / "pids", tmp_path / "asker.py"
    job = job_of(tmp_path, HANGS, environment={"PIDS": str(pids)})
    asker.write_text(
        "from trainpace.run.job import Job\nfrom trainpace.run.job import ThisMachine\n"
        f"ThisMachine().run(Job(name='a', program={job.program!r}, folder={job.folder!r}, result={job.result!r}, "
        f"environment={job.environment!r}))"
    )
    process = subprocess.Popen([sys.executable, str(asker)])
    appears(pids)
    process.kill()
    process.wait()
    left = [int(pid) for pid in pids.read_text().split()]
    end = time.monotonic() + 10
    while any(map(is_alive, left)) and time.monotonic() < end:
        time.sleep(0.02)
    assert [is_alive(pid) for pid in left] == [False, False]


def test_unwritable_job_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    job = Job(
        name="a", program=("s.py",), folder=str(tmp_path / "file"), result=str(tmp_path / "r")
    )
    with pytest.raises(TrainpaceError, match="cannot write"):
        ThisMachine().run(job)


# --- torchrun

REDUCES = """
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(mine)
os.write(1, f"threads {os.environ['OMP_NUM_THREADS']}\\n".encode())  # at once: two ranks share the pipe
if dist.get_rank() == 0:
    pathlib.Path(os.environ["RESULT"]).write_text(str(mine.tolist()))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_plain_process_can_init_process_group(tmp_path):
    job = job_of(tmp_path, REDUCES)
    assert ThisMachine().run(job).state == "done"
    assert Path(job.result).read_text() == "[1.0, 1.0, 1.0]"


@pytest.mark.slow
def test_torchrun_ranks_all_reduce(tmp_path):
    said = []
    job = job_of(tmp_path, REDUCES, nproc_per_node=2, cpus_per_process=1)
    ended = Torchrun().run(job, said.append)
    assert ended.state == "done", ended.tail
    assert Path(job.result).read_text() == "[3.0, 3.0, 3.0]"
    assert said.count("threads 1") == 2


@pytest.mark.slow
def test_reason_is_error_of_raising_rank(tmp_path):
    code = REDUCES.replace(
        "mine =", "if dist.get_rank() == 1: raise ValueError('bad sample')\nmine ="
    )
    ended = Torchrun().run(job_of(tmp_path, code, nproc_per_node=2))
    assert (ended.state, ended.reason) == ("failed", "ValueError: bad sample")


@pytest.mark.slow
def test_killed_rank_is_the_reason(tmp_path):
    code = REDUCES.replace("mine =", "if dist.get_rank() == 1: os.kill(os.getpid(), 9)\nmine =")
    ended = Torchrun().run(job_of(tmp_path, code, nproc_per_node=2))
    assert ended.reason == "a rank died of SIGKILL, most likely out of memory"


@pytest.mark.slow
@may_leave_a_file_open
def test_ctrl_c_kills_ranks_in_own_sessions(tmp_path):
    code = """
import os, pathlib, time
pathlib.Path(os.environ["PIDS"] + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""
    job = job_of(tmp_path, code, nproc_per_node=2, environment={"PIDS": str(tmp_path / "pid")})

    interrupt_when(lambda: all(is_written(tmp_path / f"pid{rank}") for rank in (0, 1)))
    with pytest.raises(KeyboardInterrupt):
        Torchrun().run(job)
    assert [is_alive((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)] == [False, False]


def test_job_fails_if_log_exceeds_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_LOG_BYTES", 1 << 20)
    ended = ThisMachine().run(job_of(tmp_path, "while True: print('x' * 999)"))
    assert ended.state == "failed"
    assert "1 MiB" in ended.reason
    assert ended.tail.startswith("xxx")


def test_long_log_is_read_at_beginning_and_end(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "READ_BYTES", 4096)
    (tmp_path / "log").write_text("ValueError: why\n" + "noise\n" * 10_000 + "the end\n")
    assert jobs.first_error(tmp_path / "log") == "ValueError: why"
    assert jobs.tail_of(tmp_path / "log").splitlines()[-1] == "the end"
    (tmp_path / "log").write_text("\n".join(map(str, range(1500))))
    assert [int(n) for n in jobs.tail_of(tmp_path / "log").split()] == list(
        range(1500 - jobs.TAIL_LINES, 1500)
    )
