"""Files of earlier runs, while a script is only looked at. It writes its own as it always does; what was there before is moved or
copied aside first, and put back at the end by `watch`, unless the script came to its own end.

Checkpoints are moved. Whatever else Python opens for writing, such as a log, is copied, so that it is the same file to whoever
has it open. Not kept: files larger than `MOST_BYTES`, temporary ones, caches and locks, and what compiled libraries write.
"""

import contextlib
import glob
import os
import shutil
import sys
import tempfile
import time
from typing import Any

from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import EARLIER

_CHECKPOINTS = ("checkpoint-*", "global_step*", "*.safetensors", "pytorch_model*.bin")
"""What transformers and DeepSpeed write into a folder."""
MOST_BYTES = 256 * 2**20
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC
_NEVER = (EARLIER, ".lock", ".pyc")
_EVENTS = ("os.rename", "shutil.copyfile")
"""Audit events by which a file (their first argument) takes another's place (their second)."""


class Earlier:
    """`keep` is called before a checkpoint is written."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.written: set[str] = set()
        """Where this run has written: no longer an earlier run's."""
        self.holding: dict[str, bool] = {}
        self.process, self.began_s = os.getpid(), time.time()
        elsewhere = (tempfile.gettempdir(), os.path.expanduser("~/.cache"), os.environ.get("TRAINPACE_WATCH", ""))
        here = os.getcwd()
        self.outside = tuple(
            f"{f}/" for f in (*elsewhere, "/dev", "/proc", "/sys") if f and not f"{here}/".startswith(f"{f}/")
        )
        sys.addaudithook(self._replaced)
        sys.addaudithook(self._opened)

    def keep(self, path: Any) -> None:
        """Move what lies there aside, if this run has not written it. Where that cannot be, it is as without trainpace."""
        place = os.path.abspath(os.fspath(path))
        if place in self.written:
            return
        self.written.add(place)
        aside = place + EARLIER
        is_aside = os.path.lexists(aside)  # by another rank, or by a look that was killed before it could put it back
        if is_aside or os.path.lexists(place):
            self.recorder.trail.note({"earlier": place})
            self.recorder.trail.flush()  # so that it is put back also if this process is killed
            if not is_aside:
                with contextlib.suppress(OSError):
                    os.rename(place, aside)

    def holds_some(self, folder: Any) -> bool:
        """Whether an earlier run has left checkpoints in a folder whose older ones an engine removes."""
        place = os.path.abspath(os.fspath(folder))
        if place not in self.holding:
            self.holding[place] = any(glob.glob(os.path.join(glob.escape(place), name)) for name in _CHECKPOINTS)
        return self.holding[place]

    def _opened(self, event: str, args: Any) -> None:
        """A file that is opened for writing is copied first."""
        if event != "open" or not args[2] & _WRITES or type(args[0]) not in (str, bytes):
            return
        with contextlib.suppress(Exception):
            place = os.path.abspath(os.fsdecode(args[0]))
            if place in self.written or os.getpid() != self.process:
                return
            self.written.add(place)
            if place.endswith(_NEVER) or place.startswith(self.outside) or not os.path.isfile(place):
                return
            about = os.stat(place)
            if not os.path.lexists(place + EARLIER):
                if about.st_mtime >= self.began_s or about.st_size > MOST_BYTES:
                    return
                unfinished = f"{place}.{self.process}{EARLIER}"
                self.written.add(unfinished)
                shutil.copy2(place, unfinished)
                os.rename(unfinished, place + EARLIER)
            self.recorder.trail.note({"earlier": place})
            self.recorder.trail.flush()

    def _replaced(self, event: str, args: Any) -> None:
        """A checkpoint that was written under another name takes its place."""
        if event not in _EVENTS or any(folder != -1 for folder in args[2:]):
            return
        with contextlib.suppress(Exception):  # such as a current folder that is gone
            source, place = (os.path.abspath(os.fspath(name)) for name in args[:2])
            if source in self.written and place != source + EARLIER:
                self.keep(place)
