"""Which files and folders are traces to be read here. The readers themselves are not imported, since verbs that read none ask."""

from __future__ import annotations

import os
from pathlib import Path

from trainpace.core.errors import TrainpaceError
from trainpace.core.intake import GZIP, SQLITE, first_bytes

ENDINGS = (".json", ".json.gz", ".sqlite")
UNEXPORTED = (".nsys-rep", ".qdrep")
LOOKED_AT_BYTES = 1 << 16
"""Of a file, for the word that tells a trace: properties of its devices may stand before it."""
MOST_FILES = 4096


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder looks like a trace to be read here, by its beginning or its name. No other is opened whole."""
    place = Path(path)
    try:
        if place.is_dir():
            return not (place / "command.json").is_file() and any(
                is_trace(file) for file in trace_files(place)
            )
        if not place.is_file():
            return False
        if place.name.endswith(UNEXPORTED):
            return True
        begins = first_bytes(place, LOOKED_AT_BYTES)
    except (TrainpaceError, OSError, ValueError):
        return False
    if begins.startswith(GZIP):
        return place.name.endswith(".json.gz")
    if begins.startswith(SQLITE):
        return place.suffix == ".sqlite"
    told = b'"traceEvents"' in begins or b'"deviceProperties"' in begins
    return place.suffix == ".json" and (
        told or (begins.lstrip().startswith(b"[") and b'"ph"' in begins)
    )


def trace_files(folder: Path) -> list[Path]:
    found = sorted(
        file for file in folder.iterdir() if file.name.endswith(ENDINGS) and file.is_file()
    )
    return found[:MOST_FILES]
