"""The samples of a user's task: whatever he trains on, as something with a length, and batches of it."""

import itertools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from trainpace.core.errors import TrainpaceError
from trainpace.workload.task import Task
from trainpace.workload.tensors import tensors_in

TAKEN_OF_A_STREAM = 256
LOOKED_AT, LOOKED_AT_WHERE_THEY_VARY = 32, 512
BATCHES_TRIED, USUAL_BATCH = 16, 8


class Samples(NamedTuple):
    """A data set with a length, what makes a batch of a list of its samples, and the batch size of its loader, if it had one."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    batch_size: int | None = None
    notes: tuple[str, ...] = ()

    def batch(self, n: int) -> Any:
        """The first n samples, from the beginning again where there are fewer."""
        return self.collate([self.dataset[i % len(self.dataset)] for i in range(n)])


def samples_of(data: Any, collate: Callable[[list[Any]], Any] | None, where: str) -> Samples:
    """From a data set, a stream of samples or a DataLoader. `collate` comes before the loader's, and that before the data set's
    own `collate_fn`. `where` names it in errors."""
    batch_size: int | None = None
    notes: tuple[str, ...] = ()
    if isinstance(data, DataLoader):
        batch_size = data.batch_size
        collate = collate or data.collate_fn
        data = data.dataset
    if isinstance(data, IterableDataset) or (
        not hasattr(data, "__getitem__") and hasattr(data, "__iter__")
    ):
        data = list(itertools.islice(iter(data), TAKEN_OF_A_STREAM))
        notes = (f"Of the stream of samples the first {len(data)} were taken.",)
    if (
        not hasattr(data, "__getitem__")
        or not hasattr(data, "__len__")
        or isinstance(data, Mapping)
        or not len(data)
    ):
        raise TrainpaceError(f"the dataset of {where} needs __len__ above 0 and __getitem__.")
    collate = collate or getattr(data, "collate_fn", None) or _collate_of(data[0])
    return Samples(data, _plain(collate), batch_size, notes)


def with_samples(task: Task, samples: Samples, where: str) -> Task:
    """The task on these samples, which it describes, with the batch size of their loader among its settings."""
    batch_to_trace, notes = _typical(samples, where)
    sample, length = _described(batch_to_trace(1), samples.dataset[0])
    settings: dict[str, Any] = (
        {} if samples.batch_size is None else {"micro_batch": samples.batch_size}
    )
    return task._replace(
        make_batch=samples.batch,
        sample=sample,
        sequence_length=length,
        dataset=samples.dataset,
        collate=samples.collate,
        batch_to_trace=batch_to_trace,
        pads=_holds_padding(samples.batch(USUAL_BATCH)),
        settings={**settings, **task.settings},
        notes=(*task.notes, *notes),
    )


def _typical(samples: Samples, where: str) -> tuple[Callable[[int], Any], tuple[str, ...]]:
    """(what makes a batch to trace, notes). Where samples vary in size, the batch repeats the one that is nearest to what a
    sample takes in batches of the loader's size, padding included: a trace has to grow by as much with every sample.
    """
    dataset, sizes = samples.dataset, []
    for looked_at in (LOOKED_AT, LOOKED_AT_WHERE_THEY_VARY):
        sizes = [_elements(dataset[i]) for i in range(min(len(dataset), looked_at))]
        if len(set(sizes)) == 1:
            return samples.batch, samples.notes
    n = min(samples.batch_size or USUAL_BATCH, len(sizes))
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = [order[i % len(order) :][:n] for i in range(0, BATCHES_TRIED * n, n)]
    in_batches = [
        _elements(samples.collate([dataset[i] for i in batch])) / len(batch)
        for batch in drawn
        if batch
    ]
    alone = [_elements(samples.collate([dataset[i]])) for i in range(len(sizes))]
    mean = sum(in_batches) / len(in_batches)
    chosen = min(range(len(alone)), key=lambda i: abs(alone[i] - mean))
    note = (
        f"Samples of {where} vary in size by a factor of {max(sizes) / max(1, min(sizes)):.1f};"
        f" traced with one of the mean size that they have in batches of {n}."
    )
    return lambda size: samples.collate([dataset[chosen]] * size), (*samples.notes, note)


def _described(batch: Any, sample: Any) -> tuple[str, int | None]:
    """(a sample in words, its number of tokens where it has any), from a batch of one and the sample itself."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            return f"{ids.shape[1]} tokens", int(ids.shape[1])
        named = next(
            (f"{name} {_shape(t)}" for name, t in batch.items() if isinstance(t, torch.Tensor)),
            "dict",
        )
        return named.strip(), None
    first = sample[0] if isinstance(sample, tuple | list) and sample else sample
    return _shape(first) or type(first).__name__, None


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", ())
    return " x ".join(map(str, shape)) if isinstance(shape, tuple) else ""


def _collate_of(sample: Any) -> Callable[[list[Any]], Any]:
    if type(sample).__module__.partition(".")[0] == "torch_geometric":
        collate: Callable[[list[Any]], Any] = import_module(
            "torch_geometric.data"
        ).Batch.from_data_list
        return collate
    return default_collate


def _plain(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """With a plain dict for every mapping that is none, as Hugging Face's BatchEncoding is not."""

    def plain(samples: list[Any]) -> Any:
        batch = collate(samples)
        return dict(batch) if isinstance(batch, Mapping) else batch

    return plain


def _elements(tree: Any) -> int:
    """Numbers in the tensors of a sample or batch, and in its plain lists, as of token ids."""
    if isinstance(tree, Mapping):
        return sum(map(_elements, tree.values()))
    if isinstance(tree, list | tuple):
        return sum(map(_elements, tree))
    if isinstance(tree, str | bytes):
        return len(tree)
    if hasattr(tree, "shape"):
        return (
            sum(t.numel() for t in tensors_in(tree))
            if isinstance(tree, torch.Tensor)
            else int(tree.size)
        )
    return sum(t.numel() for t in tensors_in(tree)) or 1


def _holds_padding(batch: Any) -> bool:
    """Whether a real batch's attention mask leaves something out."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return (
        isinstance(mask, torch.Tensor)
        and mask.device.type != "meta"
        and not bool(mask.bool().all())
    )
