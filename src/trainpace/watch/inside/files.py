"""Files that a script writes while it is only tried: earlier runs' files survive, and a trial keeps to its folders."""

import contextlib
import ctypes
import glob
import os
import shutil
import stat
import struct
import sys
import tempfile
import time
from typing import Any

from trainpace.watch.inside.event_log import EARLIER, aside_of, state_of
from trainpace.watch.inside.recorder import Recorder

_CHECKPOINTS = ("checkpoint-*", "global_step*", "*.safetensors", "pytorch_model*.bin")
"""What transformers and DeepSpeed write into a folder."""
_EVENTS = ("os.rename", "shutil.copyfile")
"""Audit events by which a file (their first argument) takes another's place (their second)."""


class Earlier:
    """`keep` is called before a checkpoint is written."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.folder = os.environ.get("TRAINPACE_WATCH", "")
        self.written: set[str] = set()
        """Where this run has written: no longer an earlier run's."""
        self.saved: dict[str, tuple[int, ...]] = {}
        """The state of each checkpoint as this run left it: another one is another program's."""
        self.holding: dict[str, bool] = {}
        self.copies = Copies(recorder, self.written)
        sys.addaudithook(self._replaced)
        sys.addaudithook(self.copies.opened)

    def keep(self, path: Any) -> None:
        """Move what lies there aside, if this run has not written it. Where that cannot be, it is as without trainpace."""
        place = os.path.abspath(os.fspath(path))
        if place in self.written:
            return
        self.written.add(place)
        aside = aside_of(place, self.folder)
        is_aside = os.path.lexists(aside)  # by another rank
        if not is_aside and not os.path.lexists(place):
            with contextlib.suppress(
                OSError, ValueError
            ):  # where a look that was killed left something, the newest
                os.rename(
                    max(glob.glob(glob.escape(place) + EARLIER + "*"), key=os.path.getmtime), place
                )
        if is_aside or os.path.lexists(place):
            self.recorder.log.note({"earlier": place})
            self.recorder.log.flush()  # so that it is put back also if this process is killed
            if not is_aside:
                with contextlib.suppress(OSError):
                    os.rename(place, aside)

    def has_saved(self, path: Any, source: Any = None) -> None:
        """Remember a checkpoint as it was just written, or as `source` is, which is about to be renamed to it."""
        place = os.path.abspath(os.fspath(path))
        with contextlib.suppress(OSError):
            self.saved[place] = state_of(place if source is None else source)

    def note(self) -> None:
        """Note the checkpoints that this run has written, and what else."""
        self.recorder.log.note({"saved": list(self.saved.items())})
        self.copies.note()

    def holds_some(self, folder: Any) -> bool:
        """Whether an earlier run has left checkpoints in a folder whose older ones an engine removes."""
        place = os.path.abspath(os.fspath(folder))
        if place not in self.holding:
            self.holding[place] = any(
                glob.glob(os.path.join(glob.escape(place), name)) for name in _CHECKPOINTS
            )
        return self.holding[place]

    def _replaced(self, event: str, args: Any) -> None:
        """A checkpoint that was written under another name takes its place."""
        if event not in _EVENTS or any(folder != -1 for folder in args[2:]):
            return
        with contextlib.suppress(Exception):  # such as a current folder that is gone
            source, place = (os.path.abspath(os.fspath(name)) for name in args[:2])
            if source in self.written and EARLIER not in place:
                self.keep(place)
                self.saved.pop(place, None)
                if event == "os.rename":
                    self.has_saved(place, source)


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
            self.recorder.log.note({"written": self.writers.accounts()})

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
        self.recorder.log.note({"copied": place})
        self.recorder.log.flush()


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


_MODIFIED, _CLOSED_WRITTEN, _OPENED, _OVERFLOW = 0x2, 0x8, 0x20, 0x4000
_EVENT = struct.Struct("iIII")
_BUFFER = 65536


class Writers:
    """Counts how often a file was opened for writing by this process, and how often it was closed after that by any."""

    def __init__(self) -> None:
        self._inotify = -1
        with contextlib.suppress(AttributeError, OSError):
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._inotify = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._accounts: dict[int, dict[str, Any]] = {}
        self._watches: dict[str, int] = {}

    def __contains__(self, place: str) -> bool:
        return place in self._watches

    def watch(self, place: str) -> bool:
        """Begin to count for the file that is there now; false where that cannot be."""
        if self._inotify < 0:
            return False
        mask = (
            _MODIFIED | _CLOSED_WRITTEN | _OPENED
        )  # openings and changes only keep two equal events from being merged
        watch = self._libc.inotify_add_watch(self._inotify, os.fsencode(place), mask)
        if watch < 0:
            return False
        self._watches[place] = watch
        self._accounts[watch] = {
            "place": place,
            "inode": os.stat(place).st_ino,
            "opened": 0,
            "closed": 0,
        }
        return True

    def opened(self, place: str) -> None:
        """Count an opening by this process, which follows."""
        self._read()
        self._accounts[self._watches[place]]["opened"] += 1

    def accounts(self) -> list[dict[str, Any]]:
        """For every file, openings that are not closed by now included as `open`."""
        self._read()
        here = _open_for_writing() if self._accounts else []
        return [
            {**account, "open": here.count(account["inode"])} for account in self._accounts.values()
        ]

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._inotify, _BUFFER):
                at = 0
                while at < len(data):
                    watch, mask, _, length = _EVENT.unpack_from(data, at)
                    at += _EVENT.size + length
                    lost = self._accounts.values() if mask & _OVERFLOW else ()
                    for account in lost:
                        account["closed"] = 2**31  # unknown, and so taken to be another's
                    if mask & _CLOSED_WRITTEN and watch in self._accounts:
                        self._accounts[watch]["closed"] += 1


def _open_for_writing() -> list[int]:
    """The inodes of the regular files that this process has open for writing, one for each opening."""
    import fcntl

    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.fstat(int(name))
            if stat.S_ISREG(about.st_mode) and fcntl.fcntl(int(name), fcntl.F_GETFL) & (
                os.O_WRONLY | os.O_RDWR
            ):
                found.append(about.st_ino)
    return found
