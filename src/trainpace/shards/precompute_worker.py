"""``python -m trainpace.shards.precompute_worker TARGET``: computes whole shards in a process of its own.

Reads one JSON request a line and answers in JSON lines. What the user's code prints goes to stderr.
"""

import errno
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.process import failure_of, serve_lines
from trainpace.records import Record
from trainpace.shards.determinism import computed_twice
from trainpace.shards.folder import import_pyarrow, write_shard
from trainpace.shards.plan import BadSample, Fingerprint, ShardPlan
from trainpace.shards.samples import Encoded, Layout, encode, reason_of, spread, timed_samples
from trainpace.shards.user_dataset import SETTINGS, fingerprint, load_dataset, settings_of

_PROGRESS_S = 0.5
_LOOKED_AT = 8
_LOOKING_S = 30.0


class Inspection(Record):
    """The findings of a look at a few samples. `sample_s`: time to compute one; `sample_bytes`: its size in a shard."""

    samples: int
    layout: Layout
    fingerprint: Fingerprint
    sample_s: float
    sample_bytes: float


def inspect(dataset: Any, target: str, settings: str) -> Inspection:
    """Compute some samples spread over the dataset twice. Raises `NotDeterministic`, or where not one can be computed."""
    times, samples = [], []
    for index, _, seconds in timed_samples(dataset, spread(_LOOKED_AT, len(dataset)), _LOOKING_S):
        times.append(seconds)
        samples.append(computed_twice(dataset, index))
    return Inspection(
        samples=len(dataset), layout=samples[-1].layout, fingerprint=fingerprint(dataset, target, settings),
        sample_s=sorted(times)[len(times) // 2], sample_bytes=statistics.fmean(s.size_bytes for s in samples),
    )  # fmt: skip


def compute(
    dataset: Any, plan: ShardPlan, number: int, progress: Any
) -> tuple[list[tuple[int, Encoded]], list[BadSample]]:
    """The samples of one shard, and the bad ones: those that raise or are unlike the others."""
    computed: list[tuple[int, Encoded]] = []
    bad: list[BadSample] = []
    reported_at = time.monotonic()
    for index in plan.range_of(number):
        try:
            computed.append((index, encode(dataset[index], plan.layout)))
        except MemoryError:
            raise
        except Exception as error:
            bad.append(BadSample(index=index, reason=reason_of(error)))
        if time.monotonic() - reported_at > _PROGRESS_S:
            reported_at = time.monotonic()
            progress(len(computed) + len(bad), len(bad), bad[-1].reason if bad else "")
    return computed, bad


class _Worker:
    """Answers requests. A shard is written while the next one is computed, since a disk's fsync would idle the core."""

    def __init__(self, target: str, answers: IO[str]) -> None:
        self._target, self._answers, self._sending = target, answers, threading.Lock()
        self._writer, self._written = ThreadPoolExecutor(1), Future[None]()
        self._written.set_result(None)

    def serve(self, requests: Iterable[dict[str, Any]]) -> None:
        """Answer until there are no more requests, then end the process."""
        try:
            import_pyarrow()
            self._dataset = load_dataset(self._target)
            self._settings = settings_of(self._dataset)
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(1)
            for request in requests:
                self._answer(**request)
            self._written.result()
        except (Exception, SystemExit) as error:
            self._fail(error)
        os._exit(0)  # threads of the user's code must not keep the process

    def _answer(self, do: str, **request: Any) -> None:
        if do == "inspect":
            self._send(inspection=inspect(self._dataset, self._target, self._settings))
        elif do == "fingerprint":
            self._send(fingerprint=fingerprint(self._dataset, self._target, self._settings))
        elif do == "estimate":
            from trainpace.shards.precompute_estimate import estimate_here

            self._send(estimate=estimate_here(self._dataset, self._target, **request["options"]))
        else:
            self._compute(msgspec.convert(request["plan"], ShardPlan), request["number"], Path(request["folder"]))

    def _compute(self, plan: ShardPlan, number: int, folder: Path) -> None:
        if plan.fingerprint.source[SETTINGS] != self._settings:
            raise TrainpaceError(
                f"{self._target} is put together differently in every process: an index does not always mean the same sample.",
                "Sort what it lists, and seed what it shuffles.",
            )

        def progress(samples: int, bad: int, reason: str) -> None:
            self._send(number=number, progress=samples, bad=bad, reason=reason)

        computed, bad = compute(self._dataset, plan, number, progress)
        self._written.result()  # one at a time, so that no more than two shards are in memory
        self._written = self._writer.submit(self._write, folder, plan, number, computed, bad)

    def _write(self, *shard: Any) -> None:
        try:
            self._send(shard=write_shard(*shard))
        except Exception as error:
            self._fail(error)  # at once: the main thread may be waiting for a request that will not come

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._send(error="the disk is full.", hint="", disk_full=True)
        else:
            hint = "Try fewer --workers or a smaller --shard-samples."
            self._send(**failure_of(error, "the dataset's code", memory_hint=hint))
        os._exit(0)

    def _send(self, **answer: Any) -> None:
        with self._sending:
            self._answers.write(msgspec.json.encode(answer).decode() + "\n")
            self._answers.flush()


if __name__ == "__main__":
    requests, answers = serve_lines()
    _Worker(sys.argv[1], answers).serve(requests)
