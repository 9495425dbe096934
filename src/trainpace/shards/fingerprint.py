"""A cheap fingerprint of what precomputed samples depend on: the user's code, package versions, and the source data."""

import ast
import contextlib
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainpace.shards import opened_files
from trainpace.shards.plan import Fingerprint
from trainpace.shards.samples import spread
from trainpace.user_file import is_users

_LOOKED_AT = 3
_DEPTH = 4
SETTINGS = "dataset settings"


def settings_of(dataset: Any) -> str:
    """A hash of the plain settings and lists that a dataset holds (file names, say), to be taken before it is used: caches and
    counters would change it."""
    return _hash(_settings(dataset, _DEPTH))


def fingerprint(dataset: Any, target: str, settings: str) -> Fingerprint:
    """`code`: syntax trees, so that comments and line breaks do not count. `source`: how many samples, the dataset's
    `settings`, and size and time of the files that three of its samples open."""
    total = len(dataset)
    with opened_files.recorded() as opened:
        for index in spread(_LOOKED_AT, total):
            with contextlib.suppress(Exception):  # a bad sample is told of when it is computed
                dataset[index]
    root = Path(target.rpartition(":")[0]).resolve().parent
    modules = _users_files()
    source = {"number of samples": str(total), SETTINGS: settings}
    for path in sorted({Path(os.path.abspath(name)) for name in opened}):
        if is_users(str(path)):
            status = path.stat()
            source[os.path.relpath(path, root)] = f"{status.st_size} bytes, {status.st_mtime_ns}"
    code = {os.path.relpath(path, root): _hash(_tree(path)) for path in modules}
    return Fingerprint(code=code, packages=_packages(modules), source=source)


def _users_files() -> list[Path]:
    """Source files of the loaded modules that belong to no installed package."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # torch.classes and torch.ops state "_classes.py" and "_ops.py", files that would lie in any working directory
    paths = {Path(file).resolve() for file in files if file and file.endswith(".py") and os.path.isabs(file)}
    return sorted(path for path in paths if path.is_file() and is_users(str(path)))


def _tree(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return ast.dump(ast.parse(text))
    except SyntaxError:
        return text


def _packages(files: list[Path]) -> dict[str, str]:
    """Versions of the installed packages that these files import."""
    names = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    names -= set(sys.stdlib_module_names) | {path.stem for path in files}
    versions = {"python": "{}.{}".format(*sys.version_info)}
    return versions | {name: _version(name) for name in sorted(names & sys.modules.keys())}


def _version(module: str) -> str:
    stated = getattr(sys.modules[module], "__version__", None)
    if isinstance(stated, str):
        return str(stated)  # torch has a type of its own for it
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _settings(value: Any, depth: int) -> Any:
    """Plain values within an object, in a form that is the same in every process. Arrays count by shape and a checksum."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return [[repr(k), _settings(v, depth - 1)] for k, v in value.items()] if depth else "dict"
    if isinstance(value, list | tuple):
        return [_settings(v, depth - 1) for v in value] if depth else "list"
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        import numpy as np

        with contextlib.suppress(Exception):
            array = np.ascontiguousarray(value)
            return [str(array.dtype), list(array.shape), hashlib.blake2b(array.tobytes()).hexdigest()]
    state = getattr(value, "__dict__", None)
    named = f"{type(value).__module__}.{type(value).__qualname__}"
    if (
        not isinstance(state, dict)
        or not depth
        or isinstance(value, type)
        or callable(getattr(value, "__code__", None))
    ):
        return named
    return [named, [[name, _settings(v, depth - 1)] for name, v in state.items() if not name.startswith("__")]]


def _hash(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=12).hexdigest()
