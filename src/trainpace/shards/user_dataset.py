"""The user's dataset in a process of its own: loaded from `FILE.py:NAME`, and a fingerprint of what its samples depend on."""

import ast
import contextlib
import hashlib
import importlib.metadata
import inspect
import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainpace.core.errors import TrainpaceError
from trainpace.core.worker import is_users, load_name
from trainpace.shards import opened_files
from trainpace.shards.files import Fingerprint
from trainpace.shards.samples import spread
from trainpace.workload import ModelSpec

WANTED = (
    "NAME is a dataset, a DataLoader or a task (model, loss, optimizer, dataset), its class, or a"
    " function that returns it."
)
_LOOKED_AT = 3
_DEPTH = 4
SETTINGS = "dataset settings"


def made_by(target: str) -> Any:
    """The object NAME, or what it returns where it is a class or a function. Exceptions of the user's code pass through."""
    spec = ModelSpec.of(target)
    if not spec.runs_code:
        raise TrainpaceError(f"{target!r} is not FILE.py:NAME.", WANTED)
    named = load_name(Path(spec.path), spec.name)
    if not isinstance(named, type) and (hasattr(named, "__getitem__") or not callable(named)):
        return named
    needed: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # a callable whose arguments cannot be told
        parameters = inspect.signature(named).parameters.values()
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if needed:
        hint = f"Write a function without arguments that returns {spec.name}(...), and name that."
        raise TrainpaceError(f"{target} needs arguments ({', '.join(needed)}).", hint)
    return named()


def is_task(made: Any) -> bool:
    """True for (model, loss, optimizer, dataset)."""
    return isinstance(made, tuple | list) and len(made) == 4 and hasattr(made[0], "parameters")


def load_dataset(target: str) -> Any:
    """The map-style dataset that NAME is, makes or holds: an object with __len__ above 0 and __getitem__.

    A dataset may split itself: its attribute `offline` is then the deterministic dataset that is taken in its place, and its
    attribute `online` the function of one sample that stays for training.
    """
    made = made_by(target)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(made, torch.utils.data.DataLoader):
        made = made.dataset
    dataset = made[3] if is_task(made) else made
    if hasattr(offline := getattr(dataset, "offline", None), "__getitem__"):
        dataset = offline
    length_of(dataset, target)
    return dataset


def length_of(dataset: Any, name: str) -> int:
    """Samples of a map-style dataset. Raises TrainpaceError for any other object, and for a dataset without samples."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dataset, torch.utils.data.IterableDataset):
        hint = "Name the map-style dataset behind it."
        raise TrainpaceError(f"{name} is an IterableDataset, which cannot be indexed.", hint)
    numbered = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not numbered or isinstance(dataset, str | bytes | dict):
        kind = type(dataset).__name__
        raise TrainpaceError(
            f"{name} is of type {kind}, which is no dataset with __len__ and __getitem__.", WANTED
        )
    if len(dataset) < 1:
        raise TrainpaceError(f"{name} is a dataset of no samples.")
    return len(dataset)


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
    source = {"number of samples": str(total), SETTINGS: settings}
    root = Path(ModelSpec.of(target).path).resolve().parent
    for path in sorted({Path(os.path.abspath(name)) for name in opened}):
        if is_users(str(path)):
            status = path.stat()
            source[os.path.relpath(path, root)] = f"{status.st_size} bytes, {status.st_mtime_ns}"
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        for path in _users_files()
    }
    code = {os.path.relpath(path, root): _hash(ast.dump(tree)) for path, tree in trees.items()}
    return Fingerprint(code=code, packages=_packages(trees), source=source)


def _users_files() -> list[Path]:
    """Source files of the loaded modules that belong to no installed package."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # torch.classes and torch.ops state "_classes.py" and "_ops.py", files that would lie in any working directory
    paths = {
        Path(file).resolve()
        for file in files
        if file and file.endswith(".py") and os.path.isabs(file)
    }
    return sorted(path for path in paths if path.is_file() and is_users(str(path)))


def _packages(trees: dict[Path, ast.Module]) -> dict[str, str]:
    names = set()
    for node in itertools.chain.from_iterable(map(ast.walk, trees.values())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    names -= set(sys.stdlib_module_names) | {path.stem for path in trees}
    versions = {"python": "{}.{}".format(*sys.version_info)}
    return versions | {name: _version(name) for name in sorted(names & sys.modules.keys())}


def _version(module: str) -> str:
    try:  # as text, since torch has a type of its own for it
        return str(
            getattr(sys.modules[module], "__version__", None) or importlib.metadata.version(module)
        )
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
            return [
                str(array.dtype),
                list(array.shape),
                hashlib.blake2b(array.tobytes()).hexdigest(),
            ]
    named = f"{type(value).__module__}.{type(value).__qualname__}"
    state = getattr(value, "__dict__", None)
    opaque = isinstance(value, type) or callable(getattr(value, "__code__", None))
    if opaque or not depth or not isinstance(state, dict):
        return named
    return [
        named,
        [[name, _settings(v, depth - 1)] for name, v in state.items() if not name.startswith("__")],
    ]


def _hash(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=12).hexdigest()
