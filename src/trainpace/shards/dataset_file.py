"""A dataset from `FILE.py:NAME`, for a separate process, since it runs the user's code."""

import inspect
import sys
from pathlib import Path
from typing import Any

from trainpace.errors import TrainpaceError
from trainpace.user_file import load_name

WANTED = "NAME is a dataset, a DataLoader or a task (model, loss, optimizer, dataset), its class, or a function that returns it."


def made_by(target: str) -> Any:
    """The object NAME, or what it returns where it is a class or a function. Exceptions of the user's code pass through."""
    file, _, name = target.rpartition(":")
    if not file.endswith(".py"):
        raise TrainpaceError(f"{target!r} is not FILE.py:NAME.", WANTED)
    named = load_name(Path(file), name)
    if not isinstance(named, type) and (hasattr(named, "__getitem__") or not callable(named)):
        return named
    needed = _needed(named)
    if needed:
        hint = f"Write a function without arguments that returns {name}(...), and name that."
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
    if torch is not None and isinstance(dataset, torch.utils.data.IterableDataset):
        raise TrainpaceError(
            f"{target} is an IterableDataset, whose samples have no numbers to be cut into shards by.",
            "Name the map-style dataset behind it.",
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TrainpaceError(
            f"{target} is of type {type(dataset).__name__}, which lacks __len__ or __getitem__.", WANTED
        )
    if len(dataset) < 1:
        raise TrainpaceError(f"{target} is a dataset of no samples.")
    return dataset


def _needed(made: Any) -> list[str]:
    """Names of arguments without a default."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
