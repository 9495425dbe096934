"""Runs a planted script: alone, under torchrun, or on two hosts with a link between them; under a tool where wanted."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import netns
from cases import Case

from trainpace.core.records import Record

ROOT = Path(__file__).parents[2]
GRACE_S = 3.0


class Outcome(Record):
    """How a run ended: the largest exit code of its commands, and what all of them printed.

    Success is told by what the script left at LOSSES, never by the code: gloo now and then aborts a rank that has
    finished ("terminate called without an active exception"), here about one run in ten.
    """

    code: int
    output: str


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the scripts need: one thread, so that workers have a core; the engines; and no accelerator."""
    path = [str(ROOT / ".engines"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONWARNINGS": "ignore",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "ACCELERATE_USE_CPU": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return {**os.environ, **own, **(more or {})}


def command(
    case: Case, *, fixed: bool = False, hosts: Sequence[netns.Host] = (), node: int = 0
) -> tuple[str, ...]:
    """The command a user would type, with this python; on hosts, the one for host `node`."""
    script = case.argv(fixed=fixed)
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    if hosts:
        address = f"--nnodes {len(hosts)} --node-rank {node} --master-addr {hosts[0].address} --master-port 29511"
        return (
            *torchrun,
            *address.split(),
            "--nproc-per-node",
            str(case.ranks // len(hosts)),
            *script,
        )
    if case.ranks > 1:
        return (*torchrun, "--standalone", "--nproc-per-node", str(case.ranks), *script)
    return (sys.executable, *script)


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(
    case: Case,
    *,
    fixed: bool = False,
    before: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """One run, to its end. `before` goes in front of the command (of each host's), as in `trainpace watch --`."""
    with contextlib.ExitStack() as stack:
        hosts: tuple[netns.Host, ...] = ()
        whole = (
            environment(env)
            if not case.gpu
            else {**os.environ, "TOKENIZERS_PARALLELISM": "false", **(env or {})}
        )
        if case.link_mbit_per_s:
            hosts = stack.enter_context(netns.hosts(2, case.link_mbit_per_s))
            whole["GLOO_SOCKET_IFNAME"] = netns.INTERFACE
        commands = [
            (
                *(hosts[node].prefix if hosts else ()),
                *before,
                *command(case, fixed=fixed, hosts=hosts, node=node),
            )
            for node in range(len(hosts) or 1)
        ]
        return together(commands, whole, case.timeout_s)


def in_turns(pair: int) -> tuple[str, str]:
    """The order of the two runs of a pair: what slows down the first of two must not always be with the same one."""
    return ("bare", "watched") if pair % 2 else ("watched", "bare")


def together(
    commands: Sequence[Sequence[str]], env: Mapping[str, str], timeout_s: float
) -> Outcome:
    """Runs the commands side by side to their end; those left after `timeout_s` are ended."""
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        started = [
            subprocess.Popen(
                words, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            for words, output in zip(commands, outputs, strict=True)
        ]
        end, late = time.monotonic() + timeout_s, False
        try:
            while any(process.poll() is None for process in started) and not late:
                time.sleep(0.05)
                # A torchrun whose peer has failed waits for it for minutes.
                if any(process.returncode for process in started):
                    end = min(end, time.monotonic() + GRACE_S)
                late = time.monotonic() > end
        finally:
            for process in started:
                _end(process)
        for output in outputs:
            output.seek(0)
        code = max(abs(process.returncode) for process in started)
        return Outcome(code=code, output="".join(output.read() for output in outputs))


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun's workers have sessions of their own and torchrun ends them when asked to; one that hangs is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
