"""What interventions leave out of a step: exchanges of gradients, output; and checkpoints, written beside their place."""

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any

from trainpace.watch.inside.recorder import Recorder, get_ident
from trainpace.watch.inside.trail import OF_TRIAL
from trainpace.watch.inside.trials import MUTED, NO_SYNC


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
            return (
                _SkippedCollective()
                if kwargs.get("async_op") or (args and args[-1] is True)
                else None
            )
        return function(*args, **kwargs)

    return maybe


def _fill(name: str, args: Any, kwargs: Any) -> None:
    """Fill the result with numbers of ordinary size: uninitialised memory may hold denormals, which are slow."""
    both: Any = (*args, *kwargs.values(), None)
    output, given = both[0], both[1]
    if "gather" in name and hasattr(output, "view"):
        output.view(-1, given.numel()).copy_(
            given.reshape(1, -1).expand(output.numel() // given.numel(), -1)
        )
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


def made_folders(recorder: Recorder) -> Callable[[str, Any], None]:
    """An audit hook that notes which folders are made under trials: those for checkpoints are empty once these are removed."""
    process = os.getpid()

    def hook(event: str, args: Any) -> None:
        if event == "os.mkdir" and args[2] == -1 and os.getpid() == process:
            with contextlib.suppress(Exception):
                place = os.path.abspath(os.fsdecode(args[0]))
                if not os.path.lexists(place):
                    recorder.trail.note({"made_folder": place})

    return hook


def loads(load: Callable[..., Any]) -> Callable[..., Any]:
    """torch.load under trials, which reads what the script, or another of its ranks, has written beside that place, such as its
    best checkpoint. What a killed run has left there is older than this one."""
    began = time.time()

    @functools.wraps(load)
    def maybe(f: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # such as a file that is open already
            beside = os.path.abspath(os.fspath(f)) + OF_TRIAL
            if os.stat(beside).st_mtime >= began:
                f = beside
        return load(f, *args, **kwargs)

    return maybe


def steps_beyond(scheduler: Any, recorder: Recorder) -> None:
    """Under trials, let OneCycleLR stay where it ends: repeated batches make more steps than the script has planned, and it
    refuses any beyond these."""
    plain = scheduler.step
    if recorder.trials is None:
        return

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self.last_epoch >= self.total_steps else plain(self, *args, **kwargs)

    scheduler.step = step


def checkpoints(recorder: Recorder, save: Callable[..., Any], file: str) -> Callable[..., Any]:
    """Under trials, write a checkpoint beside its place, the argument `file`, so that the user's own stays. It is kept until the
    end, since overwriting costs more than removing a file before it reached the disk; `watch` removes it. Of a script that is
    only looked at, what lies in that place is moved aside."""
    import inspect  # which torch has imported by now, and other processes need not

    signature = inspect.signature(save)

    @functools.wraps(save)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if recorder.trials is None and recorder.earlier is None:
            return save(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        if not isinstance(call.arguments[file], str | os.PathLike):
            pass
        elif recorder.trials is None:
            with contextlib.suppress(Exception):  # such as a current folder that is gone
                recorder.earlier.keep(call.arguments[file])
            try:
                return save(*call.args, **call.kwargs)
            finally:
                with contextlib.suppress(Exception):
                    recorder.earlier.has_saved(call.arguments[file])
        else:
            beside = call.arguments[file] = (
                os.path.abspath(os.fspath(call.arguments[file])) + OF_TRIAL
            )
            if beside not in recorder.trials.checkpoints:
                recorder.trials.checkpoints.add(beside)
                recorder.trail.note({"trial_checkpoint": beside})
                recorder.trail.flush()  # so that they are removed also if this process is killed
        return save(*call.args, **call.kwargs)

    return maybe
