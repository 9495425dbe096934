"""The recorder's life: it starts once torch has been imported in a process, and ends with the process."""

import atexit
import os
import socket
import sys
import threading
import time
from functools import partial
from types import ModuleType
from typing import Any

from trainpace.watch.inside import engines, patches, trials
from trainpace.watch.inside.confine import confine
from trainpace.watch.inside.late import warn, when_imported
from trainpace.watch.inside.losses import Losses
from trainpace.watch.inside.recorder import Recorder, now_ns
from trainpace.watch.inside.sampler import Sampler
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
    for name in engines.ENGINES:
        when_imported(name, lambda module: None)


def on_torch(torch: ModuleType) -> None:
    folder = os.environ["TRAINPACE_WATCH"]
    recorder = Recorder(
        TrailWriter(os.path.join(folder, f"process-{os.getpid()}-{socket.gethostname()}.trail"), _header())
    )
    recorder.trail.note({"torch": str(torch.__version__), "threads": torch.get_num_threads()})
    if trials.settings_of(os.environ).get("only_steps"):
        recorder.losses = Losses(torch, recorder)
    patches.install(torch, recorder, folder)
    sampler = Sampler(recorder, threading.main_thread().ident or 0)
    recorder.after_step.append(sampler.at_step)
    recorder.after_step.append(lambda step: _after_step(recorder, step))
    recorder.before_end = lambda: _note_the_end(recorder, sampler)
    trials.install(recorder)
    for name, install in engines.ENGINES.items():
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
    recorder.trail.forget()
    recorder.thread = -1


def _end(recorder: Recorder, sampler: Sampler) -> None:
    if recorder.thread == -1:
        return
    try:
        _note_the_end(recorder, sampler)
        recorder.trail.flush()
        _capture(recorder)
    except Exception as error:
        warn(f"the end of this process is not recorded ({error}).")
    recorder.trail.flush()


def _capture(recorder: Recorder) -> None:
    try:
        recorder.thread = -1  # the trace's calls are none of the script's
        recorder.capture.write(os.environ["TRAINPACE_WATCH"])
    except Exception as error:
        recorder.trail.note({"no_workload": f"{type(error).__name__}: {error}"})


def _note_the_end(recorder: Recorder, sampler: Sampler) -> None:
    sampler.stop()
    engines.note_ddp(recorder)
    if recorder.losses is not None:
        recorder.trail.note({"losses": recorder.losses.per_step()})
    if recorder.peak_allocated_gib is not None:
        recorder.trail.note({"peak_allocated_gib": recorder.peak_allocated_gib()})
    recorder.trail.note({"samples": sampler.counts(), "ended": now_ns()})
