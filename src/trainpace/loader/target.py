"""The Dataset, DataLoader or task from the user's own file whose loading is measured."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainpace.errors import TrainpaceError, UserCodeError
from trainpace.process import explain
from trainpace.shards import WANTED, is_task, made_by

DEFAULT_BATCH = 32


class LoaderTarget(NamedTuple):
    """A map-style dataset and how it is loaded. `options`: further options of the user's DataLoader."""

    name: str
    dataset: Any
    length: int
    collate: Callable[[list[Any]], Any]
    batch_size: int
    drop_last: bool
    given_workers: int | None = None
    given_persistent: bool = False
    prefetch_factor: int | None = None
    is_task: bool = False
    options: Mapping[str, Any] = {}

    def sample(self, index: int) -> Any:
        """One sample. Raises `UserCodeError` that names it where the dataset's code raises."""
        try:
            return self.dataset[index]
        except Exception as error:
            raise UserCodeError(f"sample {index} cannot be had: {_sentence(explain(error, 'the dataset'))}") from error

    def collated(self, samples: Sequence[Any]) -> Any:
        """A batch. Raises `UserCodeError` where samples do not collate."""
        try:
            return self.collate(list(samples))
        except Exception as error:
            raise UserCodeError(
                f"{len(samples)} samples do not make a batch: {_sentence(explain(error, 'collate_fn'))}",
                "Give the dataset a collate_fn, or return a DataLoader that has one.",
            ) from error


def load_target(spec: str, batch_size: int | None = None) -> LoaderTarget:
    """What FILE.py:NAME is or returns, ready to be loaded. Raises `TrainpaceError` for anything that has no samples."""
    file, _, function = spec.rpartition(":")
    name = f"{Path(file).name}:{function}"
    try:
        made = made_by(spec)
    except TrainpaceError:
        raise
    except Exception as error:
        raise UserCodeError(_sentence(explain(error, name))) from error
    if isinstance(made, DataLoader):
        return _of_loader(name, made, batch_size)
    dataset = made[3] if is_task(made) else made
    length = _length(name, dataset)
    collate = getattr(dataset, "collate_fn", None) or default_collate
    return LoaderTarget(name, dataset, length, collate, batch_size or DEFAULT_BATCH, False, is_task=is_task(made))


def _of_loader(name: str, loader: DataLoader[Any], batch_size: int | None) -> LoaderTarget:
    length = _length(name, loader.dataset)
    batch_size = batch_size or loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if batch_size is None:
        raise TrainpaceError(f"the DataLoader of {name} has no batch size.", "Give one with --batch.")
    options = {"worker_init_fn": loader.worker_init_fn, "multiprocessing_context": loader.multiprocessing_context}
    options = {key: value for key, value in options.items() if value is not None}
    collate: Any = loader.collate_fn if loader.batch_sampler is not None else default_collate
    return LoaderTarget(
        name, loader.dataset, length, collate, batch_size, bool(loader.drop_last), given_workers=loader.num_workers,
        given_persistent=loader.persistent_workers, prefetch_factor=loader.prefetch_factor, options=options,
    )  # fmt: skip


def _length(name: str, dataset: Any) -> int:
    if isinstance(dataset, IterableDataset):
        raise TrainpaceError(
            f"the dataset of {name} is an IterableDataset, which has no sample number i to time.",
            "Return the map-style dataset behind it.",
        )
    sized = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not sized or isinstance(dataset, str | bytes | dict):
        raise TrainpaceError(f"{name} is of type {type(dataset).__name__}, which is no dataset.", WANTED)
    length = len(dataset)
    if length < 1:
        raise TrainpaceError(f"the dataset of {name} is empty.")
    return length


def _sentence(text: str) -> str:
    return text.rstrip(".") + "."
