"""Start and end of the recorder in one process.

The recorder starts when torch is imported. It hooks into every watched package when that package is
imported. It ends with the process, or after the time limit of `trainpace look`.
"""

import atexit
import contextlib
import importlib.abc
import importlib.machinery
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any

from trainpace.core.host import cpu_model, usable_cores
from trainpace.watch.inside import engines, files, observers, patches, ranks, script, trials
from trainpace.watch.inside.event_log import STOP_AFTER, TASK, TRIALS, EventLogWriter, Step, unused
from trainpace.watch.inside.recorder import Recorder, now_ns, warn

THREADS = "OMP_NUM_THREADS"
THREADS_BEFORE = os.environ.get(THREADS)
"""Number of threads in the environment before the script starts."""
RAY_WORKER = "default_worker.py"
"""Script of Ray's workers. They train in a thread, and Ray kills them after the training."""
DDP_NOTED_AFTER = (20, 100, 500)
"""Steps after which DDP's counters are logged."""


def begin() -> None:
    """Wait for the import of torch and of the other watched packages.

    Each package is registered here, since any of them may import torch.
    """
    if folders := trials.settings_of(os.environ).get("writes_in"):
        files.confine(folders, os.environ)
    when_imported("torch", on_torch)
    for name in engines.HOOKS:
        when_imported(name, lambda module: None)


def on_torch(torch: ModuleType) -> None:
    """Start the recorder in this process and install all hooks.

    Called after the import of torch.
    """
    recorder = Recorder(_new_log(torch))
    settings = trials.settings_of(os.environ)
    if settings.get("only_steps"):
        recorder.losses = observers.Losses(torch, recorder)
    patches.install(torch, recorder)
    recorder.sampler = script.Sampler(recorder)
    recorder.after_detailed_step.append(recorder.sampler.at_step)
    recorder.once(0, lambda: script.note_length(recorder))
    recorder.once(0, lambda: ranks.note_rank(recorder))
    recorder.after_detailed_step.append(partial(ranks.note_links, recorder))
    recorder.once(observers.SETTLED_STEP, lambda: observers.begin_counting_delays(recorder))
    for number in DDP_NOTED_AFTER:
        recorder.once(number, lambda: engines.note_ddp(recorder))
    recorder.before_end = lambda: _note_the_end(recorder)
    if settings:
        _prepare_trials(torch, recorder, settings)
    if (seconds := seconds_of(os.environ)) is not None:
        recorder.earlier = files.Earlier(recorder)
        recorder.note_written = recorder.earlier.note
        recorder.after_step.append(Stopping(recorder, seconds).at_step)
    for name, install in engines.HOOKS.items():
        when_imported(name, partial(install, recorder=recorder))
    os.register_at_fork(after_in_child=lambda: _forked(torch, recorder))
    recorder.trains_in_thread = lambda: _at_threads_end(partial(_end_of_thread, recorder))
    atexit.register(_end, recorder)


def _new_log(torch: Any) -> EventLogWriter:
    path = unused(os.environ["TRAINPACE_WATCH"], f"process-{os.getpid()}-{socket.gethostname()}")
    header = {
        "role": "process",
        "pid": os.getpid(),
        "parent": os.getppid(),
        "host": socket.gethostname(),
        "argv": sys.argv,
        "clock_to_wall_ns": time.time_ns() - now_ns(),
        "rank": _number("RANK", "SLURM_PROCID"),
        "world_size": _number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"),
        "task": _number(TASK),
        "cpus": usable_cores(),
        "cpu": cpu_model(),
    }
    log = EventLogWriter(path, header)
    by = f"os.environ[{THREADS!r}]" if os.environ.get(THREADS) != THREADS_BEFORE else ""
    log.note(torch=str(torch.__version__), threads=torch.get_num_threads(), threads_by=by)
    return log


def _number(*names: str) -> int | None:
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), None)


def _prepare_trials(torch: Any, recorder: Recorder, settings: dict[str, Any]) -> None:
    recorder.trials = trials.Trials(recorder, settings)
    recorder.after_step.append(recorder.trials.at_step)
    if "writes_in" not in settings:
        copies = files.Copies(recorder, set())
        recorder.note_written = copies.note
        sys.addaudithook(copies.opened)
    sys.addaudithook(files.made_folders(recorder))
    files.loads(torch)


# ---- threads and forks


def _at_threads_end(action: Callable[[], None]) -> None:
    """Call `action` in this thread when its work is done. A joining thread still waits then."""
    thread = threading.current_thread()
    # `_delete` is the last method that a thread runs, on every Python version.
    forget = getattr(thread, "_delete", None)
    is_main = thread is threading.main_thread()
    if is_main or isinstance(thread, threading._DummyThread) or forget is None:
        return

    def end() -> None:
        try:
            action()
        finally:
            forget()

    thread._delete = end  # type: ignore[attr-defined]


def _end_of_thread(recorder: Recorder) -> None:
    """Log what is known at the end of the training thread.

    Ray kills the process next. In other processes, another thread may go on training.
    """
    if os.path.basename(sys.argv[0]) == RAY_WORKER:
        _end(recorder)
        return
    try:
        _note_what_is_known(recorder)
    except Exception as error:
        warn(f"the end of this thread is not recorded ({error}).")
    recorder.log.flush()
    recorder.thread_is_over = True


def _forked(torch: ModuleType, recorder: Recorder) -> None:
    """Stop recording in a forked process, such as a loader's worker.

    If its parent had made no step yet, recording starts again when the process trains.
    """
    recorder.log.close()
    recorder.thread = -1
    recorder.begins_again = None if recorder.steps else partial(_begin_again, torch, recorder)


def _begin_again(torch: ModuleType, recorder: Recorder) -> None:
    recorder.begins_again = None
    recorder.log = _new_log(torch)
    recorder.begin()
    # atexit does not run in a process that multiprocessing forked.
    Finalize(None, _end, args=(recorder,), exitpriority=0)


# ---- the end


def _end(recorder: Recorder) -> None:
    if recorder.thread == -1:
        return
    try:
        _note_the_end(recorder)
        recorder.log.flush()
        recorder.write_workload()
    except Exception as error:
        warn(f"the end of this process is not recorded ({error}).")
    recorder.log.flush()


def _note_the_end(recorder: Recorder) -> None:
    recorder.sampler.stop()
    _note_what_is_known(recorder)


def _note_what_is_known(recorder: Recorder) -> None:
    note = recorder.log.note
    engines.note_ddp(recorder)
    if recorder.losses is not None:
        note(losses=recorder.losses.per_step())
    peak = None if recorder.peak_allocated_gib is None else recorder.peak_allocated_gib()
    if peak is not None:
        note(peak_allocated_gib=peak)
    recorder.note_written()
    if (share := observers.delayed_share(recorder.scheduled)) is not None:
        note(delayed_share=share)
    if recorder.trials is not None:
        note(ended_in=TRIALS[recorder.active_trial])
    note(after_last_ns=recorder.since_last_step_ns())
    note(samples=recorder.sampler.counts(), ended=now_ns())


# ---- `trainpace look` ends the script after some seconds of steps

SETTLED_STEPS = 3
"""Steps after which the pace is known. The first steps compile, allocate and open files."""
LEAST_STEPS = 8
"""Least number of steps of any script, even if steps are long, for a mean with an interval."""


def seconds_of(environment: Mapping[str, str]) -> float | None:
    """Return the time limit of `trainpace look` in seconds, or None without a limit."""
    given = environment.get(STOP_AFTER, "")
    return float(given) if given else None


class Stopping:
    """Ends the process after `seconds` of steps.

    All ranks agree on the last step and end after it. If one rank stopped alone, the others would
    wait for it until a timeout.
    """

    def __init__(self, recorder: Recorder, seconds: float) -> None:
        self.recorder, self.limit_ns = recorder, int(seconds * 1e9)
        self.began_ns: int | None = None
        self.last_step: int | None = None

    def at_step(self, step: Step) -> None:
        if self.began_ns is None:
            self.began_ns = step.end_ns
        if ranks.is_distributed():
            if self.last_step is None and step.number >= SETTLED_STEPS:
                last = self._planned(step, self.began_ns)
                self.last_step = int(ranks.agreed("last-step", last, self.limit_ns / 1e9 + 600))
            over = self.last_step is not None and step.number >= self.last_step
        else:
            over = step.number + 1 >= LEAST_STEPS and now_ns() - self.began_ns >= self.limit_ns
        if over:
            self.recorder.log.note(stopped=True)
            trials.end(self.recorder, with_workload=True)

    def _planned(self, step: Step, began_ns: int) -> int:
        """Return the number of the step that ends at the time limit, at the pace so far."""
        spent_ns = step.end_ns - began_ns
        each_ns = max(1, spent_ns // step.number)
        return max(LEAST_STEPS, step.number + (self.limit_ns - spent_ns) // each_ns)


# ---- callbacks after the import of a module

Callback = Callable[[ModuleType], None]

_waiting: dict[str, Callback] = {}


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` after the module's own code has run, now or later.

    If the callback raises an exception, a warning is printed.
    """
    module = sys.modules.get(name)
    initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if module is not None and not initializing:
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
    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
                # Some loaders do not allow the attribute to be set.
                with contextlib.suppress(Exception):
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
