"""A share of the machine's cores, by a control group's quota, for nodes of equal strength on one machine. Needs root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Short beside a training step, so that a step is slowed down evenly."""


def missing() -> str:
    """Why there are no shares here; "" where there are."""
    if os.geteuid() != 0:
        return "control groups are made as root"
    v1, v2 = ROOT / "cpu" / "cpu.shares", ROOT / "cgroup.subtree_control"
    if v1.exists() or (v2.exists() and "cpu" in v2.read_text().split()):
        return ""
    return "control groups here limit no cores"


@contextlib.contextmanager
def share(name: str, cores: float) -> Iterator[tuple[str, ...]]:
    """What to put before a command, which then uses so many cores at most with all that it starts. The group goes afterwards."""
    v1 = (ROOT / "cpu").is_dir()
    group = (ROOT / "cpu" if v1 else ROOT) / name
    group.mkdir()
    try:
        quota = round(cores * PERIOD_US)
        if v1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "in-share")
    finally:
        with contextlib.suppress(OSError):  # a process that is still ending
            group.rmdir()
