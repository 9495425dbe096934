"""Copies of what Python opens for writing besides checkpoints, such as a log, made before a script that is only looked at writes
there. The file itself stays the same one to whoever has it open.

Not copied: files larger than `MOST_BYTES`, temporary ones, caches and locks, what compiled libraries write, and those of which
nobody could say whether other programs write them too.
"""

import contextlib
import os
import shutil
import tempfile
import time
from typing import Any

from trainpace.watch.inside.trail import EARLIER, TrailWriter, aside_of
from trainpace.watch.inside.writers import Writers

MOST_BYTES = 256 * 2**20
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC
_NEVER = (".lock", ".pyc")


class Copies:
    """`folder`: the look's recording. `written`: where this run has written, which its owner adds to as well."""

    def __init__(self, trail: TrailWriter, folder: str, written: set[str]) -> None:
        self.trail, self.folder, self.written = trail, folder, written
        self.writers = Writers()
        self.process, self.began_s = os.getpid(), time.time()
        elsewhere = (tempfile.gettempdir(), os.path.expanduser("~/.cache"), folder)
        here = os.getcwd()
        self.outside = tuple(
            f"{f}/" for f in (*elsewhere, "/dev", "/proc", "/sys") if f and not f"{here}/".startswith(f"{f}/")
        )

    def opened(self, event: str, args: Any) -> None:
        """The audit hook: a file that is opened for writing is copied first."""
        if event != "open" or not args[2] & _WRITES or type(args[0]) not in (str, bytes):
            return
        with contextlib.suppress(Exception):
            place = os.path.abspath(os.fsdecode(args[0]))
            if os.getpid() != self.process:
                return
            if place not in self.written:
                self.written.add(place)
                self._copy(place)
            if place in self.writers:
                self.writers.opened(place)

    def _copy(self, place: str) -> None:
        outside = place.endswith(_NEVER) or EARLIER in place or place.startswith(self.outside)
        if outside or not os.path.isfile(place):
            return
        about, aside = os.stat(place), aside_of(place, self.folder)
        is_aside = os.path.lexists(aside)
        if not is_aside and (about.st_mtime >= self.began_s or about.st_size > MOST_BYTES):
            return
        if not self.writers.watch(place):
            return
        if not is_aside:
            unfinished = f"{aside}-{self.process}"
            self.written.add(unfinished)
            shutil.copy2(place, unfinished)
            os.rename(unfinished, aside)
        self.trail.note({"copied": place})
        self.trail.flush()
