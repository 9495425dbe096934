"""What Slurm itself makes of a batch script: it is submitted, held, to a controller without machines, and asked back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "sbatch", "scontrol")
CONF = """ClusterName=configs
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
NodeName=node[1-8] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=64 RealMemory=4000 Gres=gpu:a100:16
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def at_hand() -> bool:
    """Whether Slurm is installed, and this process may start it."""
    return os.geteuid() == 0 and all(shutil.which(program) for program in PROGRAMS)


@contextlib.contextmanager
def controller() -> Iterator[dict[str, str]]:
    """The environment in which sbatch finds a controller of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder, host, port = Path(name), socket.gethostname().partition(".")[0], _free_port()
        for part in ("munge", "state"):
            (folder / part).mkdir(mode=0o700)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        text = CONF.format(folder=folder, host=host, port=port, first=port + 1, last=port + 8)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("NodeName=node[1-8] Name=gpu Type=a100 Count=16\n")
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
        env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        files = {
            "key-file": "key",
            "socket": "sock",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        munge = [f"--{option}={folder}/munge/{file}" for option, file in files.items()]
        subprocess.run(["munged", "--force", *munge], check=True, capture_output=True)
        subprocess.run(["slurmctld", "-c"], check=True, env=env, capture_output=True)
        try:
            _wait(env)
            yield env
        finally:
            for pid in (folder / "slurmctld.pid", folder / "munge" / "pid"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(pid.read_text()), signal.SIGTERM)
            time.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1]) % 20_000 + 30_000


def _wait(env: dict[str, str]) -> None:
    for _ in range(100):
        if subprocess.run(
            ["scontrol", "ping"], env=env, capture_output=True, text=True
        ).stdout.count("UP"):
            return
        time.sleep(0.1)
    raise RuntimeError("the Slurm controller did not come up")


def report(path: Path, env: dict[str, str]) -> dict[str, Any]:
    """What Slurm reserves for a script; processes, where Slurm starts them and no launcher does."""
    done = subprocess.run(
        ["sbatch", "--hold", "--parsable", str(path)],
        env=env,
        capture_output=True,
        text=True,
        cwd=path.parent,
    )
    if done.returncode:
        return {"error": done.stderr}
    job = done.stdout.strip()
    said = subprocess.run(
        ["scontrol", "-o", "show", "job", job], env=env, capture_output=True, text=True, check=True
    ).stdout
    subprocess.run(["scancel", job], env=env, check=True)
    fields = dict(re.findall(r"(\S+?)=(\S*)", said))
    nodes = int(fields["NumNodes"].partition("-")[0])
    found: dict[str, Any] = {"nnodes": nodes}
    for key, share in (("TresPerNode", 1), ("TresPerJob", nodes)):
        if key in fields:
            count = re.search(r":(\d+)$", fields[key])
            found["gpus_per_node"] = (int(count.group(1)) if count else 1) // share
    if "torchrun" not in path.read_text():
        found["world_size"] = int(fields["NumTasks"])
        found["nproc_per_node"] = int(fields["NumTasks"]) // nodes
    return found
