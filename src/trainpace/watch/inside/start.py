"""The recorder's life: it starts once torch has been imported in a process, hooks into every watched package once that has been
imported, and ends with the process."""

import atexit
import contextlib
import importlib.abc
import importlib.machinery
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from trainpace.watch.inside import engines, patches, trials
from trainpace.watch.inside.confine import confine
from trainpace.watch.inside.observers import Losses, Sampler
from trainpace.watch.inside.recorder import Recorder, now_ns, warn
from trainpace.watch.inside.trail import Step, TrailWriter


def _header() -> dict[str, Any]:
    return {
        "role": "process", "pid": os.getpid(), "parent": os.getppid(), "host": socket.gethostname(), "argv": sys.argv,
        "clock_to_wall_ns": time.time_ns() - now_ns(), "rank": _number("RANK", "SLURM_PROCID"),
        "world_size": _number("WORLD_SIZE", "SLURM_NTASKS"),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }  # fmt: skip


def _number(*names: str) -> int | None:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), None)


def begin() -> None:
    """Wait for torch and for every other watched package, since one of those may be what imports torch."""
    if folders := trials.settings_of(os.environ).get("writes_in"):
        confine(folders, os.environ)
    when_imported("torch", on_torch)
    for name in engines.HOOKS:
        when_imported(name, lambda module: None)


def on_torch(torch: ModuleType) -> None:
    folder = os.environ["TRAINPACE_WATCH"]
    name = f"process-{os.getpid()}-{socket.gethostname()}.trail"
    recorder = Recorder(TrailWriter(os.path.join(folder, name), _header()))
    recorder.trail.note({"torch": str(torch.__version__), "threads": torch.get_num_threads()})
    settings = trials.settings_of(os.environ)
    if settings.get("only_steps"):
        recorder.losses = Losses(torch, recorder)
    patches.install(torch, recorder)
    sampler = Sampler(recorder)
    recorder.after_step.append(sampler.at_step)
    recorder.after_step.append(lambda step: _after_step(recorder, step))
    recorder.before_end = lambda: _note_the_end(recorder, sampler)
    if settings:
        recorder.trials = trials.Trials(recorder, settings)
        recorder.after_step.append(recorder.trials.at_step)
    for name, install in engines.HOOKS.items():
        when_imported(name, partial(install, recorder=recorder))
    os.register_at_fork(after_in_child=lambda: _forked(recorder))
    atexit.register(_end, recorder, sampler)


def _after_step(recorder: Recorder, step: Step) -> None:
    if step.number == 0 and "torch.distributed" in sys.modules:
        distributed: Any = sys.modules["torch.distributed"]
        if distributed.is_available() and distributed.is_initialized():
            recorder.trail.note({"rank": distributed.get_rank(), "world_size": distributed.get_world_size(),
                                 "backend": str(distributed.get_backend())})  # fmt: skip
    if step.number in (20, 100, 500):
        engines.note_ddp(recorder)


def _forked(recorder: Recorder) -> None:
    recorder.trail.close()
    recorder.thread = -1


def _end(recorder: Recorder, sampler: Sampler) -> None:
    if recorder.thread == -1:
        return
    try:
        _note_the_end(recorder, sampler)
        recorder.trail.flush()
        recorder.thread = -1  # the trace's calls are none of the script's
        recorder.capture.attempt(recorder.capture.write, os.environ["TRAINPACE_WATCH"])
    except Exception as error:
        warn(f"the end of this process is not recorded ({error}).")
    recorder.trail.flush()


def _note_the_end(recorder: Recorder, sampler: Sampler) -> None:
    sampler.stop()
    engines.note_ddp(recorder)
    if recorder.losses is not None:
        recorder.trail.note({"losses": recorder.losses.per_step()})
    if recorder.peak_allocated_gib is not None:
        recorder.trail.note({"peak_allocated_gib": recorder.peak_allocated_gib()})
    recorder.trail.note({"samples": sampler.counts(), "ended": now_ns()})


# ---- callbacks that run once a module has been imported, now or later

Callback = Callable[[ModuleType], None]

_waiting: dict[str, Callback] = {}


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` after the module's own code has run. An exception in it becomes a warning."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _call(name, callback, module)
        return
    _waiting[name] = callback
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _call(name: str, callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception as error:
        warn(f"{name} is not recorded ({type(error).__name__}: {error}).")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
                with contextlib.suppress(Exception):  # a loader that takes no attribute
                    self._wrap(spec.loader, fullname)
                return spec
        return None

    def _wrap(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            callback = _waiting.pop(name, None)
            if callback is not None:
                _call(name, callback, module)

        loader.exec_module = exec_module
