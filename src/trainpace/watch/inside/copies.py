"""Copies of what Python opens for writing besides checkpoints, such as a log, made before a script that is only tried writes
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

from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import EARLIER, aside_of
from trainpace.watch.inside.writers import Writers

MOST_BYTES = 256 * 2**20
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC
_NEVER = (".lock", ".pyc")


class Copies:
    """`written`: where this run has written, which its owner adds to as well."""

    def __init__(self, recorder: Recorder, written: set[str]) -> None:
        self.recorder, self.written = recorder, written
        self.folder = os.environ.get("TRAINPACE_WATCH", "")
        self.writers = Writers()
        self.process, self.began_s = os.getpid(), time.time()
        elsewhere = (tempfile.gettempdir(), os.path.expanduser("~/.cache"), self.folder)
        here = os.getcwd()
        self.outside = tuple(
            f"{f}/"
            for f in (*elsewhere, "/dev", "/proc", "/sys")
            if f and not f"{here}/".startswith(f"{f}/")
        )

    def note(self) -> None:
        """Note what this process has written, so that what another program wrote meanwhile is told from it."""
        if (
            os.getpid() != self.process
        ):  # a fork shares the account, and would take what is to be read
            return
        with contextlib.suppress(Exception):
            self.recorder.trail.note({"written": self.writers.accounts()})

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
            keep_first(unfinished, aside)
        self.recorder.trail.note({"copied": place})
        self.recorder.trail.flush()


def keep_first(unfinished: str, aside: str) -> None:
    """Give a copy its name, or drop it where there is one: who copied later may have copied what another rank had begun to write
    over."""
    try:
        os.link(unfinished, aside)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        os.rename(unfinished, aside)
        return
    os.unlink(unfinished)
