"""Which samples a rank takes in which micro-batch, and the loader that brings them.

Step k of every trial with one seed and one global batch takes the same samples, however they are divided: a permutation of the
dataset an epoch; of it a slice a step; of that a contiguous part a rank; of that a part a micro-batch. Left-over samples at an
epoch's end are left out (drop_last); a dataset smaller than the global batch is taken again within a step. Randomness in the
samples themselves (augmentation online) is the loader workers', as in any training, and differs between trials.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from trainpace.core.errors import Contradiction, TrainpaceError
from trainpace.core.execution import Execution
from trainpace.run.trial import LoaderSettings, Trial
from trainpace.shards import ShardDataset
from trainpace.workload import Task, map_tensors

MADE_SAMPLES = 64
"""Samples of a model without a dataset, made once from the seed."""
MADE_STEPS = 4
"""Their batches are made before the clock starts and used in turn: data that nobody has never waits."""

NextBatch = Callable[[], Any]


def positions(samples: int, seed: int, global_batch: int, step: int) -> np.ndarray:
    """The `global_batch` samples of one step, counted from 0 over epochs."""
    epoch, number = divmod(step, steps_per_epoch(samples, global_batch))
    order = np.random.default_rng((seed, epoch)).permutation(samples)
    return np.resize(order, max(samples, global_batch))[
        number * global_batch : (number + 1) * global_batch
    ]


def steps_per_epoch(samples: int, global_batch: int) -> int:
    return max(1, samples // global_batch)


def of_rank(step: np.ndarray, execution: Execution, rank: int) -> np.ndarray:
    """One rank's share of a step's positions, (accumulation, micro-batch)."""
    return step.reshape(
        execution.data_parallel_size, execution.accumulation, execution.micro_batch
    )[rank]


class RankBatches(Sampler[list[int]]):
    """A rank's micro-batches as a batch sampler: each iteration is the next epoch."""

    def __init__(self, samples: int, seed: int, execution: Execution, rank: int) -> None:
        self._samples, self._seed, self._execution, self._rank = samples, seed, execution, rank
        self._epoch = 0

    def __len__(self) -> int:
        return (
            steps_per_epoch(self._samples, self._execution.global_batch)
            * self._execution.accumulation
        )

    def __iter__(self) -> Iterator[list[int]]:
        e, epoch = self._execution, self._epoch
        self._epoch += 1
        count = steps_per_epoch(self._samples, e.global_batch)
        for step in range(epoch * count, (epoch + 1) * count):
            yield from of_rank(
                positions(self._samples, self._seed, e.global_batch, step), e, self._rank
            ).tolist()


def batches_of(
    trial: Trial, task: Task, rank: int, place: Callable[[Any], Any]
) -> tuple[NextBatch, tuple[str, ...]]:
    """(a function that gives the rank's micro-batches in turn, notes). `place` puts made batches on the device beforehand."""
    batches: Iterable[Any]
    notes: tuple[str, ...] = ()
    if task.dataset is None:
        if trial.loader.shards is not None:
            raise TrainpaceError(f"{task.name} has no dataset that shards could take the place of.")
        notes = ("no dataset: samples are made once, so no loader is part of a step.",)
        torch.manual_seed(trial.seed)
        pool, e = task.make_batch(MADE_SAMPLES), trial.execution
        steps = [
            positions(MADE_SAMPLES, trial.seed, e.global_batch, step) for step in range(MADE_STEPS)
        ]
        parts = [torch.as_tensor(part) for step in steps for part in of_rank(step, e, rank)]
        batches = [place(map_tensors(operator.itemgetter(part), pool)) for part in parts]
    elif trial.loader.shards is not None:
        shards, notes = _shards(trial.loader.shards, task)
        batches = _loader(shards, trial, task, rank)
    else:
        batches = _loader(task.dataset, trial, task, rank)
    endless = (batch for _ in itertools.count() for batch in batches)
    return lambda: next(endless), notes


def _loader(dataset: Any, trial: Trial, task: Task, rank: int) -> DataLoader[Any]:
    s: LoaderSettings = trial.loader
    order = RankBatches(len(dataset), trial.seed, trial.execution, rank)
    own_generator = torch.Generator().manual_seed(
        trial.seed + rank
    )  # or it would draw from the model's
    options: dict[str, Any] = {
        "num_workers": s.workers,
        "prefetch_factor": s.prefetch_factor if s.workers else None,
        "persistent_workers": s.persistent_workers and s.workers > 0,
        "pin_memory": s.pin_memory and trial.device != "cpu",
        "generator": own_generator,
    }
    if isinstance(dataset, ShardDataset) and not hasattr(task.dataset, "collate_fn"):
        return DataLoader(
            dataset, sampler=order, batch_size=None, **options
        )  # which copies each sample once
    return DataLoader(dataset, batch_sampler=order, collate_fn=task.collate, **options)


def _shards(folder: str, task: Task) -> tuple[ShardDataset, tuple[str, ...]]:
    """(the shards in place of the task's dataset, notes). The dataset's attribute `online`, a function of one sample, is the part
    that was left out of the shards. Raises Contradiction where the samples differ in form from the dataset's own.
    """
    online = getattr(task.dataset, "online", None)
    online = online if callable(online) else None
    shards = ShardDataset(folder, transform=online)
    assert task.collate is not None, "a task with a dataset knows how to make batches of it"
    form, own = (_form(task.collate([samples[0]])) for samples in (shards, task.dataset))
    if form != own:
        raise Contradiction(
            f"the samples of {folder} are {form}, those of {task.name} {own}.",
            "Give the task's dataset an attribute `online`, the function (sample -> sample) that"
            " was left out of the shards.",
        )
    if online is None:
        return shards, (
            f"shards are read as they are: the dataset of {task.name} has no attribute `online`.",
        )
    return shards, ()


def _form(batch: Any) -> str:
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} of {max(0, batch.dim() - 1)} dims"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key}: {_form(part)}" for key, part in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(map(_form, batch)) + ")"
    return type(batch).__name__
