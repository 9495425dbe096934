"""Traces kept in the user's cache, so that a second question about a model needs no torch.

A trace follows from the model's spec (with the content of the file that it names), from what is asked of it, and from the
versions of this package's tracer and of the libraries that define the model. Functions in users' own files are not kept:
what they import cannot be known. TRAINPACE_TRACES names another folder, or "off".
"""

import contextlib
import functools
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainpace.core import records
from trainpace.core.errors import TrainpaceError
from trainpace.core.host import user_folder
from trainpace.core.records import Record
from trainpace.workload.model_spec import ModelSpec

R = TypeVar("R", bound=Record)

FOLDER, OFF = "TRAINPACE_TRACES", "off"
MOST_KEPT = 200
"""Traces in the folder; the oldest go first. One takes 5 to 100 KB."""
_SOURCES = ("workload/*.py", "core/execution.py")
"""What a trace follows from in this package."""


def file_of(request: Mapping[str, Any]) -> Path | None:
    """Where the trace of a request to the worker is kept; None for what is not kept, and where the cache is off."""
    import hashlib  # late, with the versions: a built-in model is forecast without either
    from importlib.metadata import PackageNotFoundError, version

    spec = ModelSpec.of(request["spec"])
    chosen = os.environ.get(FOLDER, "")
    if chosen == OFF or not (spec.kind == "built_in" or spec.is_library):
        return None
    try:
        content = Path(spec.path).read_bytes().hex() if spec.path else ""
        libraries = ["torch", spec.kind] if spec.is_library else ["torch"]
        made_by = [*map(version, libraries), _tracer()]
    except (OSError, PackageNotFoundError, ValueError):
        return None
    key = json.dumps([request, content, made_by], sort_keys=True, default=str)
    folder = Path(chosen) if chosen else user_folder("cache") / "traces"
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json.gz"


@functools.cache
def _tracer() -> str:
    import hashlib

    package = Path(__file__).parent.parent
    files = sorted(file for pattern in _SOURCES for file in package.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kept(file: Path | None, kind: type[R]) -> R | None:
    """The record in a file of the cache; None where there is none, or none that can be read."""
    if file is None or not file.is_file():
        return None
    try:
        record = records.from_json(gzip.decompress(file.read_bytes()), kind, str(file))
    except (OSError, EOFError, TrainpaceError):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    return record


def keep(file: Path | None, text: str) -> None:
    """Write a trace. A cache that cannot be written is none, which costs time alone."""
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_bytes(gzip.compress(text.encode(), 5))
        aside.replace(file)
        files = sorted(file.parent.glob("*.json.gz"), key=lambda one: one.stat().st_mtime)
        for old in files[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
