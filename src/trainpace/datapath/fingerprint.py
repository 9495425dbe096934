"""What precomputed samples depend on, cheaply: the user's source code, versions of packages, and the source data."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainpace.datapath.samples import spread
from trainpace.datapath.shard_plan import Fingerprint

_LOOKED_AT = 3
_DEPTH = 4
_opened: set[str] | None = None
_hooked = False


SETTINGS = "dataset settings"


def settings_of(dataset: Any) -> str:
    """A hash of the plain settings and lists that a dataset holds (file names, say), to be taken before it is used: caches and
    counters would change it."""
    return _hash(_settings(dataset, _DEPTH))


def fingerprint(dataset: Any, target: str, settings: str) -> Fingerprint:
    """`code`: syntax trees, so that comments and line breaks do not count. `source`: how many samples, the dataset's
    `settings`, and size and time of the files that three of its samples open."""
    total = len(dataset)
    with files_opened() as opened:
        for index in spread(_LOOKED_AT, total):
            with contextlib.suppress(Exception):  # a bad sample is told of when it is computed
                dataset[index]
    root = Path(target.rpartition(":")[0]).resolve().parent
    modules = _project_files(root)
    source = {"number of samples": str(total), SETTINGS: settings}
    for name in sorted(opened):
        path = Path(name)
        if path.suffix not in (".py", ".pyc") and not _is_library(path) and path.is_file():
            status = path.stat()
            source[os.path.relpath(path, root)] = f"{status.st_size} bytes, {status.st_mtime_ns}"
    code = {os.path.relpath(path, root): _hash(_tree(path)) for path in modules}
    return Fingerprint(code=code, packages=_packages(modules), source=source)


@contextlib.contextmanager
def files_opened() -> Iterator[set[str]]:
    """Names of files opened for reading meanwhile. Python's audit hooks cannot be taken off, so one serves all calls."""
    global _opened, _hooked
    if not _hooked:
        sys.addaudithook(_notice)
        _hooked = True
    before, _opened = _opened, set()
    try:
        yield _opened
    finally:
        _opened = before


def _notice(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str | os.PathLike):
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        if not flags & (os.O_WRONLY | os.O_RDWR):
            _opened.add(os.path.abspath(os.fspath(arguments[0])))


def _project_files(root: Path) -> list[Path]:
    """Source files of loaded modules that lie in the target's folder or below it, and in no installed package."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # torch.classes and torch.ops state "_classes.py" and "_ops.py", files that would lie in any working directory
    paths = {Path(file).resolve() for file in files if file and file.endswith(".py") and os.path.isabs(file)}
    return sorted(p for p in paths if p.is_relative_to(root) and not _is_library(p))


def _is_library(path: Path) -> bool:
    own = Path(__file__).resolve().parents[1]
    return (
        "site-packages" in path.parts
        or "dist-packages" in path.parts
        or path.is_relative_to(own)
        or any(
            path.is_relative_to(place)
            for place in (Path(os.__file__).parent, Path("/proc"), Path("/sys"), Path("/dev"))
        )
    )


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
    found = {"python": "{}.{}".format(*sys.version_info)}
    return found | {name: _version(name) for name in sorted(names & sys.modules.keys())}


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
