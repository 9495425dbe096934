"""Interventions: blocks of steps with one cause of time removed, between blocks of plain steps.

Only `trainpace diagnose` uses them: the losses of such a run are meaningless, it writes no checkpoints, and it ends
with the last block. All ranks change at the same step, because they count the same steps.
"""

import contextlib
import copy
import datetime
import functools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainpace.watch.inside.observers import count_one_step, note_optimizers, note_rate, profile_one_step
from trainpace.watch.inside.recorder import Recorder, get_ident, now_ns
from trainpace.watch.inside.trail import ASIDE, LOGGING, TRIALS, Step

PLAIN, SETTLING, CACHED_BATCH, BATCH_ON_DEVICE, NO_SYNC, FEW_SAMPLES, MUTED = range(len(TRIALS))
REPLACING = (CACHED_BATCH, BATCH_ON_DEVICE, FEW_SAMPLES)
FEW = 2
SETTLE_STEPS = 2
COUNTED_STEPS = 3
LEAST_LOGGING_NS = 100_000


class _RememberedBatch(NamedTuple):
    """A dataset's largest batch of the warm-up, since the last one of an epoch may be smaller."""

    dataset: Any
    batch: Any
    size: int


class Trials:
    """The programme of one process: (trial, steps) blocks, made once the first steps have shown which trials apply."""

    def __init__(self, recorder: Recorder, settings: dict[str, Any]) -> None:
        self.recorder = recorder
        self.block: int = settings["block_steps"]
        self.rounds: int = settings["rounds"]
        self.warm_up: int = settings["warm_up_steps"]
        self.limit_s: float = settings["limit_s"]
        self.deadline_ns = now_ns() + int(self.limit_s * 1e9)
        self.without: list[str] = settings.get("without", [])
        self.only_steps: bool = settings.get("only_steps", False)
        self.remembered: dict[int, _RememberedBatch] = {}
        self._fetched_from: set[int] = set()
        self._steps_fed: Counter[int] = Counter()
        self.device: Any = None
        self.on_device: dict[int, Any] = {}
        self.asides: set[str] = set()
        self.stock = 0
        self.programme: list[tuple[int, int, int]] | None = None
        self.left = 0
        self.logging_ns = 0
        self.counting: Callable[[], None] | None = None

    def at_step(self, step: Step) -> None:
        if self.counting is not None:
            with contextlib.suppress(Exception):
                self.counting()
            self.counting = None
        if not is_distributed() and now_ns() > self.deadline_ns:
            end(self.recorder)
        if self.programme is None:
            self._steps_fed.update(self._fetched_from)
            self._fetched_from.clear()
            steps_left = self.warm_up - step.number - 1
            if 0 < steps_left <= COUNTED_STEPS and not self.only_steps:
                with contextlib.suppress(Exception):
                    self.counting = count_one_step(self.recorder)
            elif steps_left == COUNTED_STEPS + 1 and not self.only_steps and self.elsewhere() is not None:
                with contextlib.suppress(Exception):
                    self.counting = profile_one_step(self.recorder)
            self.logging_ns += step.parts_ns[LOGGING] if step.number else 0
            if step.number + 1 >= self.warm_up:
                self.programme = [tuple(block) for block in agreed("plan", self.planned(step.number), self.limit_s)]
                if not self.only_steps:
                    self.look_around()
                names = [TRIALS[counted_as] for _, counted_as, _ in self.programme]
                self.recorder.trail.note({"programme": names, "warm_up_steps": self.warm_up})
                self.advance()
            return
        self.left -= 1
        if self.left <= 0:
            self.advance()

    def planned(self, steps: int) -> list[tuple[int, int, int]]:
        """The blocks: (trial, the trial as which steps are counted, steps). Settling steps come before each, and before one with
        data as many more as the loader had prefetched."""
        most = max(self._steps_fed.values(), default=0)  # an evaluation's dataset is not read for every step
        self.remembered = {key: batch for key, batch in self.remembered.items() if 2 * self._steps_fed[key] >= most}
        self.device = self.elsewhere()
        kinds = [NO_SYNC] if is_distributed() else []
        if self.remembered:
            kinds += [CACHED_BATCH] if self.device is None else [CACHED_BATCH, BATCH_ON_DEVICE]
        kinds += [MUTED] if self.logging_ns > LEAST_LOGGING_NS * max(1, steps) else []
        kinds = [k for k in kinds if TRIALS[k] not in self.without]
        order = [PLAIN, *kinds] * self.rounds
        few = CACHED_BATCH in kinds and "few_samples" not in self.without
        if few and all(map(_may_be_few, self.remembered.values())):
            order += [FEW_SAMPLES, CACHED_BATCH] * 2  # last, since a script may not bear it
        programme: list[tuple[int, int, int]] = []
        for kind in order:
            settling = SETTLE_STEPS + (self.stock if kind not in REPLACING else 0)
            programme += [(kind, SETTLING, settling), (kind, kind, self.block)]
        return programme

    def look_around(self) -> None:
        """Time the best rates of the device and the optimizer, while there are gradients."""
        thread, self.recorder.thread = self.recorder.thread, -1  # these steps are none of the script's
        for look in (note_rate, note_optimizers):
            with contextlib.suppress(Exception):
                look(self.recorder)
        self.recorder.thread = thread

    def elsewhere(self) -> Any:
        """The training device, None where it is the host."""
        with contextlib.suppress(Exception):
            device = self.recorder.optimizer().param_groups[0]["params"][0].device
            return None if device.type == "cpu" else device
        return None

    def advance(self) -> None:
        if not self.programme or agreed(f"end-{len(self.programme)}", now_ns() > self.deadline_ns, self.limit_s):
            end(self.recorder)
            return
        self.recorder.active_trial, self.recorder.trial, self.left = self.programme.pop(0)

    def keep(self, batch: Any, iterator: Any) -> None:
        key, size = id(iterator._dataset), size_of(batch)
        self._fetched_from.add(key)
        if key not in self.remembered or size >= self.remembered[key].size:
            self.remembered[key] = _RememberedBatch(iterator._dataset, _copy(batch, -1, -1), size)
        if iterator._num_workers:
            self.stock = max(self.stock, int(iterator._num_workers * (iterator._prefetch_factor or 0)))

    def gives(self, iterator: Any) -> bool:
        """Whether this iterator is to give a remembered batch. Raises StopIteration after as many as it has of its own,
        so that an evaluation in such a block ends."""
        if self.recorder.active_trial not in REPLACING or id(iterator._dataset) not in self.remembered:
            return False
        left = iterator.__dict__.get("_trainpace_left")
        if left is None:
            try:
                left = len(iterator)
            except Exception:  # of unknown length
                left = sys.maxsize
        iterator._trainpace_left = left - 1 if left else None
        if not left:
            raise StopIteration
        return True


def is_distributed() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return int(distributed.get_world_size()) > 1


def agreed(about: str, answer: Any, patience_s: float) -> Any:
    """The first rank's answer for all: ranks that took different branches would wait for each other until a timeout."""
    if not is_distributed():
        return answer
    with contextlib.suppress(Exception):
        distributed: Any = sys.modules["torch.distributed"]
        store, key = distributed.distributed_c10d._get_default_store(), f"trainpace-trials-{about}"
        if distributed.get_rank() == 0:
            store.set(key, json.dumps(answer))
        else:
            store.wait([key], datetime.timedelta(seconds=patience_s))
            return json.loads(store.get(key))
    return answer


def _may_be_few(remembered: _RememberedBatch) -> bool:
    with contextlib.suppress(Exception):
        return remembered.size >= 4 * FEW and size_of(_copy(remembered.batch, remembered.size, FEW)) == FEW
    return False


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """The requested trials from the command's environment; empty where there are none."""
    settings: dict[str, Any] = json.loads(environment.get("TRAINPACE_TRIALS") or "{}")
    return settings


def end(recorder: Recorder, with_workload: bool = False) -> None:
    """Exit without the script's own ending: all ranks have come this far, or soon will. `with_workload`: trace its model."""
    try:
        recorder.trail.note({"trials": "complete", "ended": now_ns()})
        recorder.before_end()
        recorder.trail.flush()
        if with_workload:
            recorder.thread = -1  # the trace's calls are none of the script's
            recorder.capture.attempt(recorder.capture.write, os.environ["TRAINPACE_WATCH"])
            recorder.trail.flush()
        with contextlib.suppress(Exception):
            if is_distributed():
                sys.modules["torch.distributed"].barrier()
                time.sleep(0.2)
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


# ---- the batch


def batch(recorder: Recorder, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
    """The loader's next batch, or under a trial the remembered one."""
    trials = recorder.trials
    if trials is None:
        return fetch(iterator)
    if trials.gives(iterator):
        key = id(iterator._dataset)
        _, remembered, size = trials.remembered[key]
        if recorder.active_trial == BATCH_ON_DEVICE:
            if key not in trials.on_device:
                trials.on_device[key] = _copy(remembered, size, size, trials.device)
            remembered = trials.on_device[key]
        return _copy(remembered, size, FEW if recorder.active_trial == FEW_SAMPLES else size)
    fetched = fetch(iterator)
    if trials.programme is None:
        with contextlib.suppress(Exception):  # a batch of the user's own kind may not bear being copied
            trials.keep(fetched, iterator)
    return fetched


def size_of(batch: Any, deep: int = 3) -> int:
    """Samples in a batch: the first dimension of the first tensor in it; 0 without a tensor."""
    try:
        return _size_of(batch, deep)
    except Exception:  # a batch of the user's own kind, whose attributes may be anything
        return 0


def _size_of(batch: Any, deep: int) -> int:
    shape = getattr(batch, "shape", None) if not isinstance(batch, dict) else None
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    if deep and isinstance(batch, dict):
        batch = list(batch.values())
    elif deep and hasattr(batch, "data") and isinstance(batch.data, dict):
        batch = list(batch.data.values())
    if deep and isinstance(batch, list | tuple):
        return next((n for part in batch if (n := _size_of(part, deep - 1))), 0)
    return 0


def _copy(value: Any, size: int, keep: int, device: Any = None) -> Any:
    """Copies of the tensors in new containers, which scripts may empty; `keep` of `size` samples; on a device."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        for k, v in value.items():
            copied[k] = _copy(v, size, keep, device)
        return copied
    if hasattr(value, "data") and isinstance(value.data, dict):  # a BatchEncoding of transformers
        return type(value)({k: _copy(v, size, keep, device) for k, v in value.data.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copy(v, size, keep, device) for v in value))
    if isinstance(value, list | tuple):
        if keep != size and len(value) == size and not hasattr(value[0], "shape"):
            value = value[:keep]
        return type(value)(_copy(v, size, keep, device) for v in value)
    if device is not None and hasattr(value, "is_floating_point"):
        value = value.to(device)
    shape = getattr(value, "shape", None)
    if keep != size and shape is not None and len(shape) and shape[0] == size:
        return value[:keep]
    return value


# ---- gradients, output, checkpoints


class _SkippedCollective:
    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def collective(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that is skipped under the trial without synchronisation, for tensors that only training exchanges."""

    @functools.wraps(function)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial == NO_SYNC and _is_bulk(args, kwargs):
            with contextlib.suppress(Exception):
                _fill(function.__name__, args, kwargs)
            return _SkippedCollective() if kwargs.get("async_op") or (args and args[-1] is True) else None
        return function(*args, **kwargs)

    return maybe


def _fill(name: str, args: Any, kwargs: Any) -> None:
    """Fill the result with numbers of ordinary size: uninitialised memory may hold denormals, which are slow."""
    both: Any = (*args, *kwargs.values(), None)
    output, given = both[0], both[1]
    if "gather" in name and hasattr(output, "view"):
        output.view(-1, given.numel()).copy_(given.reshape(1, -1).expand(output.numel() // given.numel(), -1))
    elif "gather" in name:
        for part in output:
            part.copy_(given)
    elif "scatter" in name and hasattr(given, "view"):
        output.view(-1).copy_(given.reshape(-1, output.numel())[0])
    elif "scatter" in name:
        output.copy_(given[0])


def _is_bulk(args: Any, kwargs: Any) -> bool:
    for value in (*args, *kwargs.values()):
        first = value[0] if isinstance(value, list) and value else value
        if hasattr(first, "is_floating_point"):
            return bool(first.is_floating_point() and first.numel() > 1024)
    return False


def unsynchronised(recorder: Recorder, forward: Callable[..., Any]) -> Callable[..., Any]:
    """DistributedDataParallel.forward, which decides whether the backward after it exchanges gradients."""

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial != NO_SYNC:
            if not self.require_backward_grad_sync and not recorder.skips_sync:
                recorder.skips_sync = True
                recorder.trail.note({"skips_sync": True})
            return forward(self, *args, **kwargs)
        before = self.require_backward_grad_sync, self.require_forward_param_sync
        self.require_backward_grad_sync = self.require_forward_param_sync = False
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.require_backward_grad_sync, self.require_forward_param_sync = before

    return call


def muted(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial == MUTED and get_ident() == recorder.thread:
            return None
        return function(*args, **kwargs)

    return maybe


def checkpoints(recorder: Recorder, save: Callable[..., Any], file: str) -> Callable[..., Any]:
    """Under trials, write a checkpoint beside its place, the argument `file`, so that the user's own stays. It is kept until the
    end, since overwriting costs more than removing a file before it reached the disk; `watch` removes it."""
    import inspect  # which torch has imported by now, and other processes need not

    signature = inspect.signature(save)

    @functools.wraps(save)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if recorder.trials is None:
            return save(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        if isinstance(call.arguments[file], str | os.PathLike):
            aside = call.arguments[file] = os.path.abspath(os.fspath(call.arguments[file])) + ASIDE
            if aside not in recorder.trials.asides:
                recorder.trials.asides.add(aside)
                recorder.trail.note({"aside": aside})
                recorder.trail.flush()  # so that they are removed also if this process is killed
        return save(*call.args, **call.kwargs)

    return maybe
