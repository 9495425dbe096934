"""A real Slurm on this machine, up in a second: nodes that share its network, or hosts apart with links of a known speed.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge; hosts apart also need `ip` and `tc` (netns.py). Every daemon
runs under process/guard.py, so that a node can be killed with all that runs on it, and nothing outlives the cluster.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import netns
from cpu_share import share

from trainpace.core import guard

PORTS_EACH, CLUSTERS_EACH = 16, 20
_first_ports = itertools.count(1_100 + os.getpid() % 59 * CLUSTERS_EACH * PORTS_EACH, PORTS_EACH)
"""The controller's port, and from the next on, the nodes': others for each cluster, below those of ranks and those that Linux
hands out. Processes that were started one after the other, as those of the tests are, are CLUSTERS_EACH clusters apart."""
READY_S = 30.0
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "munged")

# Slurm holds a requeued job back until the credential of its first run has expired (two minutes by default), and a job that
# is cancelled has KillWait to end by itself: both short, so that tests are. Ranks of two clusters on one machine take their
# ports by the numbers of their jobs.
CONF = """
ClusterName=planted
SlurmctldHost={controller}({address})
SlurmctldPort={port}
FirstJobId={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=3
MessageTimeout=5
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
PARTITIONS = """
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
PartitionName=short Nodes=ALL MaxTime=2 State=UP PriorityTier=1
"""


def missing() -> str:
    """Why there can be no cluster here; "" where there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return (
        f"not installed: {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client munge)"
        if absent
        else ""
    )


class Daemon:
    """A command that runs until it is ended, with all that it started."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        read_end, self._write_end = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", guard.__file__, str(read_end), "", *command],
                pass_fds=(read_end,),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        os.close(read_end)
        self._ended = False

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            os.close(self._write_end)
            self._process.wait()


class Cluster:
    """A running cluster. `names`: of its nodes, node1 first."""

    def __init__(
        self,
        folder: Path,
        joined: Sequence[netns.Host],
        nodes: int,
        shares: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self.folder, self._joined, self._shares = folder, joined, shares
        self.names = tuple(f"node{i + 1}" for i in range(nodes))
        self._nodes: dict[str, Daemon] = {}

    def start_node(self, name: str) -> None:
        """With separate hosts: in its namespace, under its own name. With its share of the cores, where nodes have one."""
        command: tuple[str, ...] = (which("slurmd"), "-D", "-N", name)
        number = self.names.index(name)
        if self._joined:
            inside = f"mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && exec {' '.join(command)}"
            command = (
                *self._joined[number].prefix,
                "unshare",
                "--uts",
                "--mount",
                "bash",
                "-c",
                inside,
            )
        if self._shares:
            command = (*self._shares[number], *command)
        self._nodes[name] = Daemon(command, self.folder / "log" / f"{name}.out")

    def cut_node(self, name: str) -> None:
        """As a power cut would: its daemon and all its processes are gone at once."""
        self._nodes[name].end()

    def host(self, name: str) -> netns.Host:
        """Where this host apart is, past Slurm."""
        return self._joined[self.names.index(name)]

    def limit(self, name: str, mbit_per_s: float) -> None:
        """Change what this host apart may send."""
        netns.shape(self._joined[self.names.index(name)].prefix[-1], mbit_per_s)

    def report_down(self, name: str) -> None:
        """Tell the controller what it would find out by itself after SlurmdTimeout (five minutes)."""
        control("update", f"nodename={name}", "state=down", "reason=killed")

    def await_idle(self) -> None:
        """Until all nodes are there and free. Raises RuntimeError, with the logs, where they are not in time."""
        _await(lambda: _states() == ["idle"] * len(self.names), self.folder)

    def end(self) -> None:
        for node in self._nodes.values():
            node.end()


def control(*words: str) -> str:
    """scontrol's answer."""
    return subprocess.run(("scontrol", *words), check=True, capture_output=True, text=True).stdout


def which(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is not installed"
    return found


@contextlib.contextmanager
def cluster(
    nodes: int,
    *,
    cpus: int = 2,
    gpus: int = 0,
    mbit_per_s: float | None = None,
    cores: float | None = None,
) -> Iterator[Cluster]:
    """A Slurm of so many nodes, to which sbatch and its like talk (SLURM_CONF) as long as the block lasts.

    `gpus` a node, of no use but to be counted. With `mbit_per_s` the nodes are hosts apart that each send at most as much:
    jobs then need GLOO_SOCKET_IFNAME=eth0. `cores`: what a node may use of the machine's, all its processes together.
    Partitions: debug; urgent, whose jobs preempt it; short, of two minutes.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path must be short
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        joined: tuple[netns.Host, ...] = ()
        address = "127.0.0.1"
        if mbit_per_s is not None:
            joined = stack.enter_context(
                netns.hosts(nodes, mbit_per_s, f"10.78.{os.getpid() % 250}")
            )
            address = stack.enter_context(netns.reached(joined))
        _write(folder, address, joined, nodes, cpus, gpus)
        before = os.environ.get("SLURM_CONF")
        stack.callback(_set_conf, before)
        _set_conf(str(folder / "slurm.conf"))
        munge = folder / "munge"
        words = [
            f"--{k}={munge / v}"
            for k, v in (("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"))
        ]
        words += [
            f"--log-file={munge / 'log'}",
            f"--seed-file={munge / 'seed'}",
            "--foreground",
            "--force",
        ]
        stack.callback(Daemon((which("munged"), *words), folder / "log" / "munged.out").end)
        _await(lambda: (munge / "sock").exists(), folder)
        stack.callback(
            Daemon((which("slurmctld"), "-D", "-c"), folder / "log" / "slurmctld.out").end
        )
        groups = range(nodes if cores is not None else 0)
        shares = [stack.enter_context(share(f"{folder.name}-{i}", cores or 0.0)) for i in groups]
        made = Cluster(folder, joined, nodes, shares)
        stack.callback(made.end)
        for name in made.names:
            made.start_node(name)
        made.await_idle()
        yield made


def _write(
    folder: Path, address: str, joined: Sequence[netns.Host], nodes: int, cpus: int, gpus: int
) -> None:
    for name in ("munge", "state", "spool", "log"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    ports = next(
        first for first in _first_ports if all(map(_is_free, range(first, first + PORTS_EACH)))
    )
    controller = socket.gethostname().partition(".")[0]
    lines = [CONF.format(controller=controller, address=address, port=ports, folder=folder)]
    for i in range(nodes):
        host, at = (f"node{i + 1}", joined[i].address) if joined else (controller, address)
        port = ports + 1 + i
        gres = f" Gres=gpu:{gpus}" if gpus else ""
        where = f"NodeName=node{i + 1} NodeHostname={host} NodeAddr={at} Port={port}"
        lines.append(f"{where} CPUs={cpus} RealMemory=4000{gres} State=UNKNOWN")
    (folder / "slurm.conf").write_text("\n".join([*lines, PARTITIONS]))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
    names = [f"{host.address} node{i + 1}" for i, host in enumerate(joined)]
    (folder / "hosts").write_text(
        "\n".join(["127.0.0.1 localhost", f"{address} {controller}", *names, ""])
    )
    if gpus:
        for i in range(gpus):  # Slurm insists on a device: this one is /dev/null's
            os.mknod(folder / f"nvidia{i}", 0o20666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(
            f"NodeName=node[1-{nodes}] Name=gpu Count={gpus} File={folder}/nvidia[0-{gpus - 1}]\n"
        )


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Slurm does
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True


def _set_conf(path: str | None) -> None:
    if path is None:
        os.environ.pop("SLURM_CONF", None)
    else:
        os.environ["SLURM_CONF"] = path


def _states() -> list[str]:
    done = subprocess.run(
        ("sinfo", "-h", "-N", "-p", "debug", "-o", "%T"),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


def _await(ready: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + READY_S
    while not ready():
        if time.monotonic() > end:
            logs = "\n".join(
                f"{p.name}: {p.read_text(errors='replace')[-800:]}"
                for p in (folder / "log").iterdir()
            )
            raise RuntimeError(f"no cluster within {READY_S:.0f} s.\n{logs}")
        time.sleep(0.05)
