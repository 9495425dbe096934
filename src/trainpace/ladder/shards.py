"""The shards of a rung: made once into the climb's folder, and taken up again where they are there already."""

import re
from collections.abc import Callable
from pathlib import Path

from trainpace.errors import TrainpaceError
from trainpace.shards import Settings, precompute


def make_shards(target: str, folder: Path, workers: int, tell: Callable[[str], None]) -> str:
    """The folder with the shards of FILE.py:NAME. Raises as `shards.precompute` does, and where another part must go on."""
    name = re.sub(r"[^\w.-]+", "-", target.rpartition(":")[2])
    shards = folder / f"shards-{name}"
    tell(f"precomputing {target} into {shards}")
    done = precompute(Settings(target=target, folder=str(shards), workers=workers), note=tell)
    if not done.finished:
        raise TrainpaceError(f"the shards in {shards} are not all there.", "Another part has still to compute its own.")
    return str(shards)
