"""A dataset from `FILE.py:NAME`. For a process of its own: it runs the user's code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from trainpace.errors import TrainpaceError, UnknownName, UnreadableInput


def load_dataset(target: str) -> Any:
    """The map-style dataset that NAME is: an object with __len__ and __getitem__, a class or function that makes one, or a
    function that returns a task (model, loss, optimizer, dataset)."""
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise TrainpaceError(
            f"{target!r} is not FILE.py:NAME.", "NAME is a dataset, its class, or a function returning it."
        )
    path = Path(file)
    if not path.is_file():
        raise UnreadableInput(f"cannot read {path}: no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if found is None:
        raise UnknownName(f"name in {path}", name, [n for n in vars(module) if not n.startswith("_")])
    made = found() if isinstance(found, type) or (not hasattr(found, "__getitem__") and callable(found)) else found
    if isinstance(made, tuple | list) and len(made) == 4 and hasattr(made[0], "parameters"):
        made = made[3]  # a task: (model, loss, optimizer, dataset)
    if not hasattr(made, "__getitem__") or not hasattr(made, "__len__"):
        hint = "An iterable dataset has no order to cut into shards." if hasattr(made, "__iter__") else ""
        raise TrainpaceError(f"{target} gives a {type(made).__name__}, which lacks __len__ or __getitem__.", hint)
    if len(made) < 1:
        raise TrainpaceError(f"{target} is a dataset of no samples.")
    return made
