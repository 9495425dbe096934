"""Hooks for data loaders: the wait for each batch, the dataset's work for it, and its contents."""

import contextlib
import copy
import functools
import multiprocessing
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import trainpace.measure as accelerator
from trainpace.core.host import drawn_from, random_states
from trainpace.watch.inside.event_log import DATA, LOADER_START, EventLogWriter, Fetch, Step, unused
from trainpace.watch.inside.recorder import Recorder, around, get_ident, now_ns


def loader(module: Any, recorder: Recorder) -> None:
    """Hook into torch's DataLoader: charge the wait for batches, and log its settings."""
    seen: weakref.WeakSet[Any] = weakref.WeakSet()
    epochs = recorder.epochs = Epochs(recorder)

    def next_batch(plain: Callable[[Any], Any], self: Any) -> Any:
        if get_ident() != recorder.thread:
            return plain(self)
        first, self._trainpace_begun = not self._trainpace_begun, True
        part = LOADER_START if first and self._num_workers else DATA
        # After an evaluation, the start belongs to the purpose of its first batch.
        follows_start = first and self._trainpace_settled_ns == recorder.settled_ns
        depth = recorder.enter(part) if follows_start else recorder.enters_batch(part)
        began_ns = now_ns() if first else 0
        try:
            trials = recorder.trials
            batch = plain(self) if trials is None else trials.fetched(self, plain)
            recorder.fetched_samples += self._trainpace_size(batch)
            recorder.fetched_from = self._trainpace_loader
            return batch
        except StopIteration:
            epochs.ends(self._dataset)
            if recorder.part == DATA and getattr(self, "_shutdown", False):
                # The workers end here, and start again for the next epoch.
                recorder.part = LOADER_START
            raise
        finally:
            recorder.leave(depth, "first batch" if first else "next batch")
            if first and self._num_workers:
                recorder.log.note(first_wait_ns=now_ns() - began_ns)

    def init(
        plain: Callable[..., None], self: Any, /, loader: Any, *args: Any, **kwargs: Any
    ) -> None:
        plain(self, loader, *args, **kwargs)
        if not self._auto_collation:
            self._trainpace_size = size_of_uncollated
        if get_ident() == recorder.thread:
            with contextlib.suppress(Exception):
                self._trainpace_loader = id(loader)
                if loader not in seen:
                    seen.add(loader)
                    _note_loader(recorder, loader)

    iterator = module._BaseDataLoaderIter
    iterator._trainpace_begun, iterator._trainpace_settled_ns = False, -1
    iterator._trainpace_loader = iterator._trainpace_given = 0
    iterator._trainpace_length = None
    iterator._trainpace_size = staticmethod(size_of)
    around(iterator, "__init__", init)
    around(iterator, "__next__", next_batch)
    around(module.DataLoader, "__iter__", _starting(recorder))


def _starting(recorder: Recorder) -> Callable[..., Any]:
    def start(plain: Callable[[Any], Any], self: Any) -> Any:
        if get_ident() != recorder.thread:
            return plain(self)
        depth = recorder.enters_batch(LOADER_START if self.num_workers else DATA)
        try:
            recorder.epochs.begins(self)
            iterator = plain(self)
            with contextlib.suppress(AttributeError):  # The iterator may be a generator.
                # An iterator with persistent workers is used again.
                iterator._trainpace_given, iterator._trainpace_length = 0, None
                iterator._trainpace_settled_ns = recorder.settled_ns
            return iterator
        finally:
            recorder.leave(depth, "start of the loader")

    return start


class Epochs:
    """Logs the steps of epochs that end before their loader does, as with `break`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begun: dict[int, tuple[int, int]] = {}
        """Loader that began to read a dataset and steps before that, by the dataset's id."""

    def begins(self, loader: Any) -> None:
        """Begin an epoch of this loader's dataset. Log the last epoch if it was left early."""
        recorder, dataset = self._recorder, id(loader.dataset)
        before, steps = self._begun.get(dataset, (0, 0))
        self._begun[dataset] = id(loader), recorder.steps
        # A script that takes a single batch of each iterator has no epochs.
        if before in recorder.training_loaders and recorder.steps > steps + 1:
            recorder.log.note(epoch_steps=recorder.steps - steps)

    def ends(self, dataset: Any) -> None:
        self._begun.pop(id(dataset), None)


def stateful_loader(module: Any, recorder: Recorder) -> None:
    """Hook into the StatefulDataLoader of torchdata."""
    around(module.StatefulDataLoader, "__iter__", _starting(recorder))


def _note_loader(recorder: Recorder, loader: Any) -> None:
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    asked_before = loader._IterableDataset_len_called
    per_epoch = length_of(loader)
    # Otherwise the loader would warn about a length that the script never asked for.
    loader._IterableDataset_len_called = asked_before
    dataset = _inside_subsets(loader)
    recorder.log.note(
        loader=id(loader),
        dataset=f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        samples_in_dataset=length_of(loader.dataset),
        batches=per_epoch,
        batch_size=loader.batch_size or getattr(sampler, "batch_size", None),
        workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        pin_memory=bool(loader.pin_memory),
        persistent_workers=bool(loader.persistent_workers),
        one_by_one=_asks_one_by_one(loader),
    )


def _asks_one_by_one(loader: Any) -> bool:
    """Return True if samples are fetched one by one and collated by torch's default function."""
    data: Any = sys.modules["torch.utils.data"]
    is_map = not isinstance(loader.dataset, data.IterableDataset)
    return (
        is_map
        and loader.collate_fn is data.default_collate
        and not hasattr(_inside_subsets(loader), "__getitems__")
    )


def _inside_subsets(loader: Any) -> Any:
    """Return the dataset inside any Subset."""
    dataset = loader.dataset
    while type(dataset) is sys.modules["torch.utils.data"].Subset:
        dataset = dataset.dataset
    return dataset


def fetchers(module: Any, recorder: Recorder) -> None:
    """Time the fetch of each batch, in workers and in the training process."""
    for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        kind.fetch = timed_fetch(kind.fetch, recorder, os.environ["TRAINPACE_WATCH"])


def timed_fetch(fetch: Callable[..., Any], recorder: Recorder, folder: str) -> Callable[..., Any]:
    """Wrap a fetch function to log its times, also in the loader's workers."""
    logs: dict[int, EventLogWriter] = {}

    @functools.wraps(fetch)
    def timed(self: Any, indices: Any) -> Any:
        # Workers always log their fetches.
        if not recorder.spans_on and get_ident() == recorder.thread:
            return fetch(self, indices)
        data = sys.modules.get("torch.utils.data")
        worker = data.get_worker_info() if data is not None else None
        if worker is None and get_ident() != recorder.thread:
            return fetch(self, indices)
        if type(self.collate_fn) is not _Collate:
            self.collate_fn = _Collate(self.collate_fn, examines=not recorder.steps)
        collate, collate.ns = self.collate_fn, 0
        start, cpu = now_ns(), time.thread_time_ns()
        batch = fetch(self, indices)  # Raises StopIteration at the end of a stream.
        end, cpu = now_ns(), time.thread_time_ns() - cpu
        samples, number = _fetched(self, indices, batch), -1 if worker is None else worker.id
        record = Fetch(number, samples, start, end, cpu, collate.ns)
        if worker is not None:
            with contextlib.suppress(Exception):  # For example, no file descriptor is left.
                log = logs.get(os.getpid()) or _worker_log(logs, folder, worker.id)
                collate.log_fetch(log, record)
                log.flush()
        else:
            collate.log_fetch(recorder.log, record)
        return batch

    return timed


LONG_LIST = 1000
"""Numbers in a Python list of a sample from which its conversion to a tensor takes long."""


class _Collate:
    """Collate function that is timed.

    If `examines` is True, the samples that are fetched next are examined.
    """

    def __init__(self, collate: Callable[[Any], Any], examines: bool) -> None:
        self._collate = collate
        self._before = random_states() if examines else None
        self._facts: dict[str, Any] = {}
        self.ns = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collate, name)

    def __call__(self, samples: Any) -> Any:
        if self._before is not None:
            drawn = drawn_from(self._before, random_states())
            self._facts = {"random_samples": bool(drawn), "listed_numbers": _listed(samples)}
            self._before = None
        begin = now_ns()
        try:
            return self._collate(samples)
        finally:
            self.ns += now_ns() - begin

    def log_fetch(self, log: EventLogWriter, record: Fetch) -> None:
        """Log a fetch, and once the facts about the first samples."""
        if self._facts:
            log.note(**self._facts)
            self._facts = {}
        log.fetch(record)


def _listed(samples: Any) -> int:
    """Return how many numbers the first sample holds in Python lists, or 0 for few."""
    sample = samples[0] if isinstance(samples, list) and samples else None
    lists = [part for part in _parts_of(sample) or () if type(part) is list]
    numbers = sum(len(one) for one in lists if one and type(one[0]) in (int, float))
    return numbers if numbers >= LONG_LIST else 0


def _fetched(fetcher: Any, indices: Any, batch: Any) -> int:
    """Return the number of fetched samples.

    If the dataset makes batches itself, the number differs from the number of requested indices.
    """
    if isinstance(indices, list | tuple) and getattr(fetcher, "auto_collation", True):
        return len(indices)
    return size_of_uncollated(batch) or 1


def _worker_log(logs: dict[int, EventLogWriter], folder: str, worker: int) -> EventLogWriter:
    # The operating system's parent process may be a fork server.
    trainer = multiprocessing.parent_process()
    parent = trainer.pid if trainer is not None else os.getppid()
    pid, host = os.getpid(), socket.gethostname()
    header = {"role": "worker", "worker": worker, "pid": pid, "parent": parent, "host": host}
    logs[pid] = EventLogWriter(unused(folder, f"worker-{parent}-{worker}-{pid}-{host}"), header)
    return logs[pid]


def ray_data(module: Any, recorder: Recorder) -> None:
    """Hook into iterables of Ray Data, as from `iter_batches` and `iter_torch_batches`."""
    around(
        module._IterableFromIterator,
        "__iter__",
        lambda plain, self: _Charged(plain(self), recorder),
    )


class _Charged:
    """Iterator that charges the wait for each batch on the training thread.

    The thread is checked at each batch, because a thread may become the training thread after the
    first one.
    """

    def __init__(self, batches: Iterator[Any], recorder: Recorder) -> None:
        self._batches, self._recorder = batches, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        recorder = self._recorder
        # In DATA, this is the inner of two nested iterators.
        if get_ident() != recorder.thread or recorder.part == DATA:
            return next(self._batches)
        depth = recorder.enters_batch(DATA)
        try:
            batch = next(self._batches)
            recorder.fetched_samples += size_of(batch)
            recorder.fetched_from = 0
            return batch
        finally:
            recorder.leave(depth, "next batch")


def length_of(what: Any) -> int | None:
    """Return the length of a loader, dataset or iterator, or None if it has no length."""
    try:
        return len(what)
    except Exception:
        return None


def size_of(batch: Any, deep: int = 3) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor.

    It is 0 for a batch without a tensor.
    """
    try:
        # The most frequent case comes first, because this runs in every step.
        first: Any = batch[0] if type(batch) is list else None
        if type(first) is sys.modules["torch"].Tensor and first.ndim:
            return int(first.shape[0])
        return _size_of(batch, deep)
    except Exception:  # A batch of the user's own class may have any attributes.
        return 0


def _size_of(batch: Any, deep: int) -> int:
    parts = _parts_of(batch)
    if parts is None or not deep:
        return next(iter(getattr(batch, "shape", ())), 0)
    return next((size for part in parts if (size := _size_of(part, deep - 1))), 0)


def _parts_of(value: Any) -> list[Any] | None:
    """Return the items of a container, or None for any other object."""
    if isinstance(value, list | tuple) and not hasattr(value, "shape"):
        return list(value)
    if not isinstance(value, dict):
        # For example, a BatchEncoding of transformers.
        value = None if hasattr(value, "shape") else getattr(value, "data", None)
    return list(value.values()) if isinstance(value, dict) else None


def size_of_uncollated(item: Any) -> int:
    """Return the number of samples in an item of a loader with `batch_size=None`.

    The dataset may make batches itself. An item counts as a batch if all of its parts are equally
    long, one part has more than one dimension, and no part is a single number. Any other item is
    one sample.
    """
    try:
        sizes, dimensions = _sizes_of(item, 3)
    except Exception:
        return 0
    return sizes.pop() if len(sizes) == 1 and dimensions > 1 else int(bool(sizes))


def _sizes_of(item: Any, deep: int) -> tuple[set[int], int]:
    """Return the set of the parts' lengths, and the largest number of dimensions of a part.

    The length of a single number is 0.
    """
    shape = () if isinstance(item, int | float) else getattr(item, "shape", None)
    if shape is not None:
        return {next(iter(shape), 0)}, len(shape)
    parts = _parts_of(item)
    if parts is None or not deep:
        return set(), 0
    if isinstance(item, list | tuple) and all(isinstance(one, int | float) for one in item):
        return {len(item)}, 1  # For example, labels.
    found = [_sizes_of(part, deep - 1) for part in parts]
    return set().union(*(sizes for sizes, _ in found)), max((most for _, most in found), default=0)


def copy_of(value: Any, size: int, keep: int, device: Any = None) -> Any:
    """Copy the containers of a batch, and keep `keep` of its `size` samples.

    Containers are copied because scripts may empty them. Tensors are shared, or moved to `device`
    if it is given.
    """

    def copied(part: Any) -> Any:
        return copy_of(part, size, keep, device)

    value = value if keep == size else _shortened(value, size, keep)
    if isinstance(value, dict):
        same = copy.copy(value)
        same.update({key: copied(part) for key, part in value.items()})
        return same
    # For example, a BatchEncoding of transformers.
    if isinstance(getattr(value, "data", None), dict):
        return type(value)(copied(value.data))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    if device is not None and hasattr(value, "is_floating_point"):
        return value.to(device)
    return value


def _shortened(value: Any, size: int, keep: int) -> Any:
    """Return the first `keep` items if the value has one for each of `size` samples."""
    if isinstance(value, list | tuple):
        is_named = hasattr(value, "_fields")
        is_batch = len(value) == size and not is_named and not hasattr(value[0], "shape")
    else:
        is_batch = next(iter(getattr(value, "shape", None) or ()), None) == size
    return value[:keep] if is_batch else value


# ---- padding

NOTED_AFTER = (4, 19)
"""Steps after which the sums are read. Reading makes the host wait for a device."""


class Padding:
    """Adds up the attention masks of the first steps.

    Masks have the shape (samples, positions), and tokens have values other than 0.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.sums: list[Any] = []
        """Counts per input: (tokens, tokens if padded to the longest sample, positions)."""
        recorder.after_detailed_step.append(self.at_step)

    def sees(self, inputs: dict[str, Any]) -> None:
        """Add the mask in the keyword arguments of a model's call."""
        mask, recorder = inputs.get("attention_mask"), self.recorder
        if mask is None or recorder.steps > NOTED_AFTER[-1] or recorder.active_trial:
            return
        given = inputs.get("input_ids")
        given = inputs.get("inputs_embeds") if given is None else given
        # Other masks say which positions attend to each other, or are added to scores.
        is_of_tokens = (
            given is not None
            and mask.ndim == 2
            and mask.shape == given.shape[:2]
            and not mask.is_floating_point()
        )
        if not is_of_tokens or accelerator.is_capturing(mask.device.type):
            return
        lengths = (mask.detach() != 0).sum(1)
        self.sums.append((lengths.sum(), lengths.max() * mask.shape[0], mask.numel()))

    def at_step(self, step: Step) -> None:
        if (
            step.number in NOTED_AFTER
            and self.sums
            and not accelerator.is_capturing(self.sums[0][0].device.type)
        ):
            tokens, to_longest, positions = (
                sum(int(sums[i]) for sums in self.sums) for i in range(3)
            )
            self.recorder.log.note(tokens=[tokens, to_longest, positions])
        if step.number >= NOTED_AFTER[-1]:
            self.recorder.after_detailed_step.remove(self.at_step)
