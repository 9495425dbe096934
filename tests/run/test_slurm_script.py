import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainpace.configs.shell import read_sbatch
from trainpace.core.errors import TrainpaceError
from trainpace.core.units import parse_duration_s
from trainpace.run.job import Job
from trainpace.run.slurm import SlurmOptions, batch_script, time_limit

GOLDEN = Path(__file__).parent / "golden"

ONE = Job(
    name="baseline",
    program=("-m", "some.rank", "trial.json"),
    folder="/shared/runs/a",
    result="/shared/runs/a/result.json",
)
MANY = replace(
    ONE,
    name="rung 3: ddp & bf16",
    program=("train.py", "--name", "it's $HOME"),
    folder="/shared/my runs/100%",
    nnodes=4,
    nproc_per_node=8,
    cpus_per_process=6,
    gpus_per_node=8,
    timeout_s=3 * 86400.0,
    environment={"NCCL_DEBUG": "WARN", "NOTE": "a b"},
)
ASKED = SlurmOptions(
    partition="gpu",
    account="lab-7",
    qos="high",
    extra=("--constraint=a100", "--exclusive"),
    setup=("module load cuda/12.4",),
    python="/opt/env/bin/python",
)
LIGHTNING = replace(
    MANY,
    name="script",
    program=("python", "train.py", "/shared/run/train.yaml"),
    starts="rank",
    cwd="/home/me/my project",
    environment={"TRAINPACE_TRIALS": '{"block_steps": 30}'},
)
SCRIPTS = {
    "script_a_rank.sbatch": batch_script(LIGHTNING, SlurmOptions(), "python"),
    "script_a_node.sbatch": batch_script(
        replace(
            LIGHTNING,
            program=("torchrun", "--nnodes", "4", "--nproc-per-node", "8", "train.py"),
            starts="node",
        ),
        SlurmOptions(),
        "python",
    ),
    "one.sbatch": batch_script(ONE, SlurmOptions(), "python"),
    "many.sbatch": batch_script(MANY, ASKED, "/opt/env/bin/python"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_batch_scripts_match_golden_files(name):
    """After an intended change, run `python tests/run/test_slurm_script.py` to write the files again, and review them."""
    assert SCRIPTS[name] == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_batch_scripts_are_valid_bash(name):
    subprocess.run(("bash", "-n"), input=SCRIPTS[name], text=True, check=True)


def test_batch_script_settings_can_be_read_back():
    found = {s.name: s.value for s in read_sbatch(SCRIPTS["many.sbatch"], "x").settings}
    assert (found["nnodes"], found["nproc_per_node"], found["gpus_per_node"]) == (4, 8, 8)
    assert found["time_limit_s"] > MANY.timeout_s


@given(st.floats(1e-3, 30 * 86400))
def test_slurm_time_limit_slightly_exceeds_timeout(timeout_s):
    days, _, clock = time_limit(timeout_s).partition("-")
    limit_s = int(days) * 86400 + parse_duration_s(clock)
    assert limit_s % 60 == 0
    assert timeout_s + 60 <= limit_s <= 1.1 * timeout_s + 121


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Fake srun and scontrol that run the single task here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    rank = "export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1"
    (folder / "srun").write_text(
        f'#!/bin/bash\n{rank}\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'
    )
    (folder / "scontrol").write_text(
        '#!/bin/bash\nif [ "$2" = hostnames ]; then printf "n7\\nn8\\n"; else echo "   NodeAddr=10.1.2.7 NodeHostName=n7"; fi\n'
    )
    for file in folder.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "123456")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[7-8]")


def run_batch(text):
    return subprocess.run(("bash", "-c", text), capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("starts", "shown"),
    [
        ("rank", "RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR"),
        ("node", "PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT"),
    ],
)
def test_whole_command_gets_variables_and_temporary_folder(starts, shown, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = "import os, sys; print(*(os.environ[n] for n in sys.argv[1].split()), os.path.isdir(os.environ['TMPDIR']))"
    job = replace(
        ONE,
        program=("python3", "-c", code, f"{shown} TMPDIR"),
        starts=starts,
        result=str(tmp_path / "ended-well"),
        nproc_per_node=1,
    )
    done = run_batch(batch_script(job, SlurmOptions(), "not-python"))
    *values, folder, there = done.stdout.split()
    expected = {
        "rank": ["0", "1", "1", "10.1.2.7"],
        "node": ["0", "10.1.2.7", str(20_000 + 123456 % 10_000)],
    }
    assert values == expected[starts], done.stderr
    assert (there, Path(folder).parent, Path(folder).exists()) == ("True", tmp_path, False)
    assert abs(float((tmp_path / "ended-well").read_text()) - time.time()) < 60
    (tmp_path / "ended-well").unlink()
    run_batch(batch_script(replace(job, program=("false",)), SlurmOptions(), "not-python"))
    assert not (tmp_path / "ended-well").exists()


AWKWARD = ("it's", 'a "b"', "$HOME", "`id`", "two  spaces", "a\\nb", "*", "", "%j", "ünï")
PRINTS = "import os, sys; print(sys.argv[1:], *(os.environ[n] for n in ('RANK', 'MASTER_ADDR', 'MASTER_PORT', 'WORD')))"


@pytest.mark.usefixtures("commands")
def test_ranks_get_arguments_and_master_address(tmp_path):
    job = replace(ONE, program=("-c", PRINTS, *AWKWARD), environment={"WORD": "it's $HOME"})
    script = batch_script(job, SlurmOptions(), "python3")
    done = subprocess.run(("bash",), input=script, text=True, capture_output=True, check=True)
    assert done.stdout == f"{list(AWKWARD)} 0 10.1.2.7 23456 it's $HOME\n"


@pytest.mark.usefixtures("commands")
def test_batch_script_returns_exit_code_of_job():
    for nodes in (1, 2):
        script = batch_script(
            replace(ONE, program=("-c", "raise SystemExit(7)"), nnodes=nodes),
            SlurmOptions(),
            "python3",
        )
        assert subprocess.run(("bash",), input=script, text=True, check=False).returncode == 7


def test_omp_threads_equal_cpus_per_process():
    assert "OMP_NUM_THREADS=6 " in SCRIPTS["many.sbatch"]
    assert "OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}" in SCRIPTS["one.sbatch"]


@pytest.mark.parametrize(
    "options",
    [
        {"extra": ("constraint=a100",)},
        {"extra": ("--a\nrm",)},
        {"extra": ("--a\rrm",)},
        {"partition": "gpu\nrm -rf x"},
        {"account": "a\rb"},
        {"qos": "\x1b[2J"},
    ],
)
def test_slurm_options_reject_invalid_values(options):
    with pytest.raises(TrainpaceError):
        SlurmOptions(**options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"program": ()},
        {"nnodes": 0},
        {"timeout_s": 0.0},
        {"timeout_s": float("inf")},
        {"environment": {"a b": ""}},
    ],
)
def test_job_rejects_invalid_values(wrong):
    with pytest.raises(TrainpaceError):
        Job(**{"name": "a", "program": ("s.py",), "folder": ".", "result": "r", **wrong})


if __name__ == "__main__":
    for name, text in SCRIPTS.items():
        (GOLDEN / name).write_text(text)
