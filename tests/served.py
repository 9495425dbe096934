"""The dashboard as users start it: the command in its own process, on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Served(NamedTuple):
    """Address, URL token (empty: none), process and data folder of a dashboard."""

    base: str
    token: str
    process: subprocess.Popen
    folder: Path

    @property
    def port(self) -> int:
        return int(self.base.rsplit(":", 1)[1])


@contextlib.contextmanager
def served(folder: Path, *arguments: str, log: Path | None = None) -> Iterator[Served]:
    """`folder` becomes the user's data folder with the journal; audited.py writes opened files to `log`."""
    environment = {
        **os.environ,
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    environment.pop("TRAINPACE_JOURNAL", None)
    program = (
        ["-m", "trainpace"]
        if log is None
        else [str(Path(__file__).parent / "audited.py"), str(log)]
    )
    command = [sys.executable, *program, "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    try:
        head = ""
        for line in process.stdout:
            head += line
            if found := re.search(r"Open (http://\S+?)/(?:\?token=(\S+))? ", line):
                yield Served(found[1], found[2] or "", process, folder)
                break
        else:
            raise AssertionError(head)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
