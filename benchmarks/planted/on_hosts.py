"""One process on each host, joined as a torch process group; rank 0 leaves a JSON answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netns import INTERFACE, Host

PORT = 29513
POLL_S = 0.05


def together(
    hosts: Sequence[Host], program: Sequence[str], request: dict[str, Any], timeout_s: float = 180
) -> Any:
    """`python PROGRAM ANSWER.json REQUEST` on every host; what rank 0 wrote. Raises `RuntimeError` with what the ranks said."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        words = [sys.executable, *program, str(answer), json.dumps(request)]
        logs = [(Path(folder) / f"{i}.log").open("w+") for i in range(len(hosts))]
        started = [
            subprocess.Popen(
                [*host.prefix, *words],
                env={**os.environ, **_environment(hosts, i)},
                stdout=logs[i],
                stderr=subprocess.STDOUT,
            )
            for i, host in enumerate(hosts)
        ]
        try:
            end = time.monotonic() + timeout_s
            while (
                not answer.exists()
                and time.monotonic() < end
                and not any(p.poll() for p in started)
            ):
                time.sleep(POLL_S)
            if answer.exists():
                for process in started:
                    process.wait(10)
                return json.loads(answer.read_text())
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            said = "\n".join(
                (Path(folder) / f"{i}.log").read_text()[-1500:] for i in range(len(hosts))
            )
            for log in logs:
                log.close()
        raise RuntimeError(f"no answer from {len(hosts)} hosts within {timeout_s:.0f} s:\n{said}")


def _environment(hosts: Sequence[Host], rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }
