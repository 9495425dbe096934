"""Interventions: blocks of steps under which one cause of time is taken away, between blocks of plain steps.

Only under `trainpace diagnose`: the losses of such a run are worth nothing, it writes no checkpoints, and it ends with the
last block. All ranks change at the same step, since they count the same steps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from trainpace.watch.inside.operators import count_one_step, note_optimizers, note_rate
from trainpace.watch.inside.recorder import Recorder, get_ident, now_ns
from trainpace.watch.inside.trail import ASIDE, LOGGING, TRIALS, Step

PLAIN, SETTLING, CACHED_BATCH, BATCH_ON_DEVICE, NO_SYNC, FEW_SAMPLES, MUTED = range(len(TRIALS))
REPLACING = (CACHED_BATCH, BATCH_ON_DEVICE, FEW_SAMPLES)
FEW = 2
SETTLE_STEPS = 2
COUNTED_STEPS = 3
LEAST_LOGGING_NS = 100_000


class Trials:
    """The programme of one process: (trial, steps) blocks, made once the first steps have shown what applies."""

    def __init__(self, recorder: Recorder, settings: dict[str, Any]) -> None:
        self.recorder = recorder
        self.block: int = settings["block_steps"]
        self.rounds: int = settings["rounds"]
        self.warm_up: int = settings["warm_up_steps"]
        self.deadline_ns = now_ns() + int(settings["limit_s"] * 1e9)
        self.without: list[str] = settings.get("without", [])
        self.batch: Any = None
        self.dataset: Any = None
        self.latest: Any = None
        self.device: Any = None
        self.batch_on_device: Any = None
        self.batch_size = 0
        self.stock = 0
        self.programme: list[tuple[int, int]] | None = None
        self.left = 0
        self.asides: set[str] = set()
        self.logging_ns = 0
        self.counting: Callable[[], None] | None = None

    def at_step(self, step: Step) -> None:
        """Count, and change over where a block ends."""
        if self.counting is not None:
            self.counting()
            self.counting = None
        if self.programme is None:
            if self.batch is None:  # the model's call was not seen
                self.trains()
            if self.warm_up - COUNTED_STEPS <= step.number + 1 < self.warm_up:
                with contextlib.suppress(Exception):
                    self.counting = count_one_step(self.recorder)
            self.logging_ns += step.parts_ns[LOGGING] if step.number else 0
            if step.number + 1 >= self.warm_up:
                self.programme = self.planned(step.number)
                self.look_around()
                names = [TRIALS[trial] for trial, _ in self.programme]
                self.recorder.trail.note({"programme": names, "warm_up_steps": self.warm_up})
                self.advance()
            return
        self.left -= 1
        if self.left <= 0:
            self.advance()

    def planned(self, steps: int) -> list[tuple[int, int]]:
        """Blocks, each after settling steps; after a block without data, as many more as the loader had fetched ahead."""
        kinds = []
        world: Any = sys.modules.get("torch.distributed")
        many = world is not None and world.is_available() and world.is_initialized() and world.get_world_size() > 1
        self.device = self.elsewhere()
        if many:
            kinds.append(NO_SYNC)
        if self.batch is not None:
            kinds += [CACHED_BATCH] if self.device is None else [CACHED_BATCH, BATCH_ON_DEVICE]
        if self.any_rank_says(self.logging_ns > LEAST_LOGGING_NS * max(1, steps), world if many else None):
            kinds.append(MUTED)
        kinds = [k for k in kinds if TRIALS[k] not in self.without]
        programme: list[tuple[int, int]] = []
        for _ in range(self.rounds):
            for kind in (PLAIN, *kinds):
                programme += [
                    (SETTLING, SETTLE_STEPS + (self.stock if kind != CACHED_BATCH else 0)),
                    (kind, self.block),
                ]
        if CACHED_BATCH in kinds and self.batch_size >= 4 * FEW and "few_samples" not in self.without:
            for _ in range(2):  # last, since a script may not bear it
                for kind in (FEW_SAMPLES, CACHED_BATCH):
                    programme += [(SETTLING, SETTLE_STEPS), (kind, self.block)]
        return [(self.settling_as(programme, i), n) for i, (_, n) in enumerate(programme)]

    def look_around(self) -> None:
        """Time what the device and the optimizer could do, while there are gradients."""
        thread, self.recorder.thread = self.recorder.thread, -1  # these steps are none of the script's
        try:
            with contextlib.suppress(Exception):
                note_rate(self.recorder)
                note_optimizers(self.recorder)
        finally:
            self.recorder.thread = thread

    def any_rank_says(self, yes: bool, world: Any) -> bool:
        """Ranks run the same programme, so they decide together."""
        if world is None:
            return yes
        import torch

        said = torch.tensor([float(yes)], device=self.device)
        world.all_reduce(said, op=world.ReduceOp.MAX)
        return bool(said.item())

    def elsewhere(self) -> Any:
        """The device that is trained on, where it is not the host."""
        optimizer = self.recorder.optimizer() if self.recorder.optimizer is not None else None
        if optimizer is None or not optimizer.param_groups[0]["params"]:
            return None
        device = optimizer.param_groups[0]["params"][0].device
        return None if device.type == "cpu" else device

    @staticmethod
    def settling_as(programme: list[tuple[int, int]], i: int) -> int:
        """A settling block runs as what follows it; its trial number says that it is not counted."""
        kind = programme[i][0]
        return kind if kind != SETTLING else -programme[i + 1][0] - 1

    def advance(self) -> None:
        """The next block, or the end."""
        if not self.programme or now_ns() > self.deadline_ns:
            end(self.recorder)
            return
        kind, self.left = self.programme.pop(0)
        self.recorder.active_trial = kind if kind >= 0 else -kind - 1
        self.recorder.trial = kind if kind >= 0 else SETTLING

    def keep(self, batch: Any, size: int, iterator: Any) -> None:
        """Remember the latest batch, until it is known whether it is for training."""
        self.latest = (batch, size, iterator._dataset,
                       int(iterator._num_workers * (iterator._prefetch_factor or 0)) if iterator._num_workers else 0)  # fmt: skip

    def trains(self) -> None:
        """The latest batch goes into training: until the first block begins, it is the one to hand out again."""
        if self.programme is None and self.latest is not None:
            self.batch, self.batch_size, self.dataset, self.stock = self.latest

    def replaces(self, iterator: Any) -> bool:
        """Whether this iterator is asked for training's batches, and has not come to its end."""
        if self.recorder.active_trial not in REPLACING or iterator._dataset is not self.dataset:
            return False
        given = iterator.__dict__.get("_trainpace_given", 0)
        with contextlib.suppress(TypeError):  # an iterable dataset has no length
            if given >= len(iterator):
                raise StopIteration
        iterator._trainpace_given = given + 1
        return True


def install(recorder: Recorder) -> None:
    """Take up the programme that the environment asks for."""
    settings = os.environ.get("TRAINPACE_TRIALS")
    if settings:
        recorder.trials = Trials(recorder, json.loads(settings))
        recorder.after_step.append(recorder.trials.at_step)


def end(recorder: Recorder) -> None:
    """Leave, without what the script would do at its end: all ranks have come this far, or soon will."""
    recorder.trail.note({"trials": "complete", "ended": now_ns()})
    recorder.before_end()
    recorder.trail.flush()
    with contextlib.suppress(Exception):
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            distributed.barrier()
            time.sleep(0.2)
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ---- the batch


def batch(recorder: Recorder, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
    """The loader's next batch, or under a trial the remembered one."""
    trials = recorder.trials
    if trials is None:
        return fetch(iterator)
    if trials.replaces(iterator):
        if recorder.active_trial == BATCH_ON_DEVICE and trials.batch_on_device is None:
            trials.batch_on_device = _mapped(trials.batch, lambda tensor: tensor.to(trials.device))
        if recorder.active_trial == FEW_SAMPLES:
            return _few(trials.batch, trials.batch_size)
        return _mapped(
            trials.batch_on_device if recorder.active_trial == BATCH_ON_DEVICE else trials.batch, lambda t: t
        )
    fetched = fetch(iterator)
    iterator._trainpace_given = iterator.__dict__.get("_trainpace_given", 0) + 1
    if trials.programme is None:
        from trainpace.watch.inside.patches import size_of

        trials.keep(_mapped(fetched, lambda tensor: tensor), size_of(fetched), iterator)
    return fetched


def _few(value: Any, size: int) -> Any:
    """The first samples of a batch of `size`."""

    def first(part: Any) -> Any:
        if isinstance(part, list):
            return part[:FEW] if len(part) == size else part
        return part[:FEW] if len(part.shape) and part.shape[0] == size else part

    return _mapped(value, first, first)


def _mapped(value: Any, change: Callable[[Any], Any], change_list: Callable[[Any], Any] = lambda part: part) -> Any:
    """A batch in new containers, which scripts pop things from, with its tensors changed; and lists of other things."""
    if isinstance(value, dict):
        return type(value)({k: _mapped(v, change, change_list) for k, v in value.items()})
    if hasattr(value, "data") and isinstance(value.data, dict):  # a BatchEncoding of transformers
        return type(value)({k: _mapped(v, change, change_list) for k, v in value.data.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(v, change, change_list) for v in value))
    if isinstance(value, list | tuple):
        if isinstance(value, list) and not any(hasattr(v, "shape") for v in value[:1]):
            value = change_list(value)
        return type(value)(_mapped(v, change, change_list) for v in value)
    return change(value) if hasattr(value, "is_floating_point") else value


# ---- gradients, output, checkpoints


class _Done:
    """Stands for a collective that was left out."""

    def wait(self, *args: Any) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


def collective(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """Left out under the trial without synchronisation, for tensors of numbers that only training exchanges."""

    @functools.wraps(function)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial == NO_SYNC and _is_bulk(args, kwargs):
            _fill(function.__name__, args, kwargs)
            return _Done() if kwargs.get("async_op") or args[-1:] == (True,) else None
        return function(*args, **kwargs)

    return maybe


def _fill(name: str, args: Any, kwargs: Any) -> None:
    """Give the result numbers of the right size: what memory holds by chance may be too small for fast arithmetic."""
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
    """Output that is left out under the trial without it."""

    @functools.wraps(function)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if recorder.active_trial == MUTED and get_ident() == recorder.thread:
            return None
        return function(*args, **kwargs)

    return maybe


def checkpoints(recorder: Recorder, save: Callable[..., Any]) -> Callable[..., Any]:
    """Under trials a checkpoint is written beside its place: the user's own must stay as it is. It lies there until the end,
    since one that is overwritten costs more than one that is removed before it reached the disk; `watch` removes it."""

    @functools.wraps(save)
    def maybe(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.trials is None or not isinstance(f, str | os.PathLike):
            return save(obj, f, *args, **kwargs)
        aside = os.path.abspath(os.fspath(f)) + ASIDE
        if aside not in recorder.trials.asides:
            recorder.trials.asides.add(aside)
            recorder.trail.note({"aside": aside})
            recorder.trail.flush()  # so that they are removed also if this process is killed
        return save(obj, aside, *args, **kwargs)

    return maybe
