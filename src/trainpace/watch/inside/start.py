"""The recorder's life in one process.

It starts when torch is imported, hooks into every watched package once that is imported, and ends with the process, or after
the seconds that `trainpace look` gives it.
"""

import atexit
import contextlib
import errno
import importlib.abc
import importlib.machinery
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any

from trainpace.core.host import usable_cores
from trainpace.watch.inside import engines, observers, patches, ranks, script, trials
from trainpace.watch.inside.event_log import (
    OF_TRIAL,
    STOP_AFTER,
    TASK,
    TRIALS,
    EventLogWriter,
    Step,
    unused,
)
from trainpace.watch.inside.observers import Losses
from trainpace.watch.inside.ranks import agreed, is_distributed
from trainpace.watch.inside.recorder import Recorder, now_ns, warn
from trainpace.watch.inside.script import Sampler
from trainpace.watch.inside.trials import end

RAY_WORKER = "default_worker.py"
"""The script of Ray's workers, which are killed when their training has ended; it runs in a thread of theirs."""


def _header() -> dict[str, Any]:
    return {
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
    }


def _number(*names: str) -> int | None:
    return next(
        (int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), None
    )


def begin() -> None:
    """Wait for torch and for every other watched package, since one of those may be what imports torch."""
    if folders := trials.settings_of(os.environ).get("writes_in"):
        confine(folders, os.environ)
    when_imported("torch", on_torch)
    for name in engines.HOOKS:
        when_imported(name, lambda module: None)


def _new_log(torch: Any) -> EventLogWriter:
    """A new trail of this process."""
    path = unused(os.environ["TRAINPACE_WATCH"], f"process-{os.getpid()}-{socket.gethostname()}")
    log = EventLogWriter(path, _header())
    log.note({"torch": str(torch.__version__), "threads": torch.get_num_threads()})
    return log


def on_torch(torch: ModuleType) -> None:
    recorder = Recorder(_new_log(torch))
    settings = trials.settings_of(os.environ)
    if settings.get("only_steps"):
        recorder.losses = Losses(torch, recorder)
    patches.install(torch, recorder)
    sampler = Sampler(recorder)
    recorder.after_detailed_step.append(sampler.at_step)
    recorder.once(0, lambda: script.note(recorder))
    recorder.once(0, lambda: _note_rank(recorder))
    recorder.after_detailed_step.append(partial(ranks.note, recorder))
    recorder.once(observers.SETTLED_STEP, lambda: _begin_counting_cores(recorder))
    for number in (20, 100, 500):
        recorder.once(number, lambda: engines.note_ddp(recorder))
    recorder.before_end = lambda: _note_the_end(recorder, sampler)
    if settings:
        recorder.trials = trials.Trials(recorder, settings)
        recorder.after_step.append(recorder.trials.at_step)
        if "writes_in" not in settings:
            from trainpace.watch.inside.files import Copies

            copies = Copies(recorder, set())
            recorder.note_written = copies.note
            sys.addaudithook(copies.opened)
        sys.addaudithook(trials.made_folders(recorder))
        torch.load = torch.serialization.load = trials.loads(torch.load)  # type: ignore[attr-defined]
    if (seconds := seconds_of(os.environ)) is not None:
        from trainpace.watch.inside.files import Earlier

        recorder.earlier = Earlier(recorder)
        recorder.note_written = recorder.earlier.note
        recorder.after_step.append(Stopping(recorder, seconds).at_step)
    for name, install in engines.HOOKS.items():
        when_imported(name, partial(install, recorder=recorder))
    os.register_at_fork(after_in_child=lambda: _forked(torch, recorder, sampler))
    recorder.trains_in_thread = lambda: _at_threads_end(partial(_end_of_thread, recorder, sampler))
    atexit.register(_end, recorder, sampler)


def _at_threads_end(action: Callable[[], None]) -> None:
    """Call `action` in this thread when its work is done, while whoever joins it still waits."""
    thread = threading.current_thread()
    forget = getattr(
        thread, "_delete", None
    )  # the last that a thread does, on every Python that there is
    if (
        thread is threading.main_thread()
        or isinstance(thread, threading._DummyThread)
        or forget is None
    ):
        return

    def end() -> None:
        try:
            action()
        finally:
            forget()

    thread._delete = end  # type: ignore[attr-defined]


def _end_of_thread(recorder: Recorder, sampler: Sampler) -> None:
    """Write what is known: the process may be killed next, as Ray's workers are, or another thread may go on training."""
    if os.path.basename(sys.argv[0]) == RAY_WORKER:
        _end(recorder, sampler)
        return
    try:
        _note_what_is_known(recorder, sampler)
    except Exception as error:
        warn(f"the end of this thread is not recorded ({error}).")
    recorder.log.flush()
    recorder.thread_is_over = True


def _note_rank(recorder: Recorder) -> None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        recorder.log.note(
            {
                "rank": distributed.get_rank(),
                "world_size": distributed.get_world_size(),
                "backend": str(distributed.get_backend()),
            }
        )


def _begin_counting_cores(recorder: Recorder) -> None:
    recorder.scheduled = observers.scheduled()


def _forked(torch: ModuleType, recorder: Recorder, sampler: Sampler) -> None:
    """Record nothing in a forked process, such as a loader's worker, unless it makes the training's first step."""
    recorder.log.close()
    recorder.thread = -1
    recorder.begins_again = (
        None if recorder.steps else partial(_begin_again, torch, recorder, sampler)
    )


def _begin_again(torch: ModuleType, recorder: Recorder, sampler: Sampler) -> None:
    recorder.begins_again = None
    recorder.log = _new_log(torch)
    recorder.begin()
    # a process of multiprocessing that was forked ends without atexit
    Finalize(None, _end, args=(recorder, sampler), exitpriority=0)


def _end(recorder: Recorder, sampler: Sampler) -> None:
    if recorder.thread == -1:
        return
    try:
        _note_the_end(recorder, sampler)
        recorder.log.flush()
        recorder.thread = -1  # the trace's calls are none of the script's
        recorder.capture.attempt(recorder.capture.write, os.environ["TRAINPACE_WATCH"])
    except Exception as error:
        warn(f"the end of this process is not recorded ({error}).")
    recorder.log.flush()


def _note_the_end(recorder: Recorder, sampler: Sampler) -> None:
    sampler.stop()
    _note_what_is_known(recorder, sampler)


def _note_what_is_known(recorder: Recorder, sampler: Sampler) -> None:
    engines.note_ddp(recorder)
    if recorder.losses is not None:
        recorder.log.note({"losses": recorder.losses.per_step()})
    if (
        recorder.peak_allocated_gib is not None
        and (peak := recorder.peak_allocated_gib()) is not None
    ):
        recorder.log.note({"peak_allocated_gib": peak})
    recorder.note_written()
    if (
        recorder.scheduled is not None
        and (share := observers.delayed_share(recorder.scheduled)) is not None
    ):
        recorder.log.note({"delayed_share": share})
    if recorder.trials is not None:
        recorder.log.note({"ended_in": TRIALS[recorder.active_trial]})
    recorder.log.note({"after_last_ns": recorder.since_last_step_ns()})
    recorder.log.note({"samples": sampler.counts(), "ended": now_ns()})


# ---- callbacks that run once a module has been imported, now or later

Callback = Callable[[ModuleType], None]

_waiting: dict[str, Callback] = {}


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` after the module's own code has run. An exception in it becomes a warning."""
    module = sys.modules.get(name)
    if module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    ):
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


# ---- under a trial, a script may write only into the trial's folders
#
# Python's audit hooks (PEP 578) see every file that Python itself opens, in every Python process of the command. They do
# not see what compiled libraries or other programs write.

CACHES = (
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_DATASETS_CACHE",
    "HF_HUB_CACHE",
    "TORCH_HOME",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "CUDA_CACHE_PATH",
    "NUMBA_CACHE_DIR",
    "MPLCONFIGDIR",
)
"""Environment variables that name caches, whose content can be made again."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SAYS = (
    "trainpace: a trial may write only into its own folder, which {out} in the command stands for"
)


def confine(folders: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse to open for writing, remove or rename anything outside of these folders, until the process ends. A trial's temporary
    folder is its own."""
    home = os.path.expanduser("~")
    own = environment.get("TMPDIR", "/dev")
    mine = [
        *folders,
        own,
        "/dev",
        "/proc",
        *(os.path.join(home, name) for name in (".cache", ".triton", ".nv")),
    ]
    mine += [environment[name] for name in CACHES if environment.get(name)]
    inside = tuple(os.path.realpath(folder) for folder in mine)

    def check(path: Any, follows: bool) -> None:
        if not isinstance(path, str | bytes | os.PathLike):  # an open file's number, or no file
            return
        name = os.fsdecode(path)
        if name.endswith(OF_TRIAL) or "__pycache__" in name:
            return
        folder, last = os.path.split(os.path.abspath(name))
        real = os.path.realpath(name) if follows else os.path.join(os.path.realpath(folder), last)
        if not any(real == folder or real.startswith(folder + os.sep) for folder in inside):
            raise PermissionError(errno.EACCES, _SAYS, name)

    def hook(event: str, args: Any) -> None:
        if event == "sqlite3.connect":
            check(_written_database(args[0]), True)
        elif event != "open" or args[2] & _WRITES:
            for i, folder_handle in _EVENTS.get(event, ()):
                # names beside a folder's handle are within a tree that was checked as a whole
                if folder_handle is None or args[folder_handle] == -1:
                    check(args[i], event in _FOLLOW)

    sys.addaudithook(hook)


def _written_database(database: Any) -> str | None:
    """The file that SQLite may write; None for a database in memory or opened read-only
    (https://sqlite.org/uri.html)."""
    name = os.fsdecode(database)
    if name.startswith("file:"):
        name, _, query = name.removeprefix("file:").partition("?")
        if not {"mode=ro", "immutable=1", "mode=memory"}.isdisjoint(query.split("&")):
            return None
    return None if name in ("", ":memory:") else name


_EVENTS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "open": ((0, None),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, None),),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "shutil.rmtree": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
}
"""Positions of the path arguments of each audit event, with the argument that holds the folder's handle
(sys.addaudithook's table of events)."""
_FOLLOW = (
    "open",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.utime",
    "os.setxattr",
    "os.removexattr",
)
"""Events that change the target of a link; the others change the link itself."""


SETTLED_STEPS = 3
"""Steps after which the pace is known; the first ones compile, allocate and open files."""
LEAST_STEPS = 8
"""A script whose steps are long is still given so many, for a mean with an interval."""


def seconds_of(environment: Mapping[str, str]) -> float | None:
    given = environment.get(STOP_AFTER, "")
    return float(given) if given else None


class Stopping:
    """Ends the process after the step that was agreed upon, or, alone, after the first that ends too late."""

    def __init__(self, recorder: Recorder, seconds: float) -> None:
        self.recorder, self.limit_ns = recorder, int(seconds * 1e9)
        self.began_ns: int | None = None
        self.last_step: int | None = None

    def at_step(self, step: Step) -> None:
        if self.began_ns is None:
            self.began_ns = step.end_ns
        if is_distributed():
            if self.last_step is None and step.number >= SETTLED_STEPS:
                self.last_step = int(
                    agreed("last-step", self._planned(step), self.limit_ns / 1e9 + 600)
                )
            over = self.last_step is not None and step.number >= self.last_step
        else:
            over = step.number + 1 >= LEAST_STEPS and now_ns() - self.began_ns >= self.limit_ns
        if over:
            self._end()

    def _planned(self, step: Step) -> int:
        """The number of the step with which the time is over, at the pace of those after the first."""
        assert self.began_ns is not None
        each_ns = max(1, (step.end_ns - self.began_ns) // step.number)
        return max(
            LEAST_STEPS, step.number + (self.limit_ns - (step.end_ns - self.began_ns)) // each_ns
        )

    def _end(self) -> None:
        recorder: Any = self.recorder
        recorder.log.note({"stopped": True})
        end(recorder, with_workload=True)
