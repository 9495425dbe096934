"""The fingerprint of the code that was measured: measurements of other code do not count."""

import hashlib
import json
import os
from pathlib import Path

from trainpace.errors import UnreadableInput


def sources_of(file: Path, base: Path) -> dict[str, str]:
    """A hash of every Python file in a file's folder, under its path from `base`: a project may be moved as a whole."""
    return {
        os.path.relpath(path, base): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(file.absolute().parent.glob("*.py"))
    }


def file_of_module(name: str, folders: tuple[Path, ...]) -> Path | None:
    """The file that ``python -m NAME`` runs, where one of the folders has it."""
    for folder in folders:
        inside = folder.joinpath(*name.split("."))
        for file in (inside.with_name(inside.name + ".py"), inside / "__main__.py"):
            if file.is_file():
                return file
    return None


def fingerprint(spec: str) -> str:
    """A hash of the Python files in the folder of a task's file; "" for other models. Raises UnreadableInput without the file."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py"):
        return ""
    path = Path(file).absolute()
    sources = sources_of(path, path.parent)
    if path.name not in sources:
        raise UnreadableInput(f"cannot read {file}: no such file.")
    return hashlib.sha256(json.dumps([name, sources]).encode()).hexdigest()[:16]
