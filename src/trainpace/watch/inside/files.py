"""Protection of the user's files while a script runs under `trainpace look` or under trials.

`trainpace look` lets a script write as usual. Before that, checkpoints of earlier runs are moved
aside, and other files are copied. `watch` restores both at the end, unless the script ended by
itself.

Under trials, checkpoints get a suffix, so that the user's own checkpoints stay. If a trial has
folders of its own, it may write only there.
"""

import contextlib
import ctypes
import errno
import functools
import glob
import os
import shutil
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainpace.watch.inside.event_log import CHECKPOINT, EARLIER, OF_TRIAL, aside_of, state_of
from trainpace.watch.inside.recorder import Recorder, around

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHECKPOINTS = ("checkpoint-*", "global_step*", "*.safetensors", "pytorch_model*.bin")
"""Names of checkpoints that transformers and DeepSpeed write into a folder."""
_REPLACING_EVENTS = ("os.rename", "shutil.copyfile")
"""Audit events in which a file (the first argument) replaces another file (the second)."""


def _place_of(path: Any) -> str:
    return os.path.abspath(os.fspath(path))


# ---- checkpoints


def checkpoints(recorder: Recorder, owner: Any, name: str, file: str, shown: str = "") -> None:
    """Charge and protect a function that saves a checkpoint. Its argument `file` holds the path.

    Under trials, the checkpoint gets a suffix, so that the user's own checkpoint stays. `watch`
    removes it at the end. It stays until then because saving must cost as much as usual. Removing
    a file before it reaches the disk is cheaper than overwriting it. Under `trainpace look`,
    an earlier file at the path is moved aside.
    """
    import inspect  # torch has imported it by now, and other processes do not need it.

    def act(save: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        trials, earlier = recorder.trials, recorder.earlier
        charged = functools.partial(recorder.charged, CHECKPOINT, shown or name, save)
        if trials is None and earlier is None:
            return charged(*args, **kwargs)
        call = inspect.signature(save).bind(*args, **kwargs)
        path = call.arguments[file]
        if not isinstance(path, str | os.PathLike):
            return charged(*args, **kwargs)
        if trials is not None:
            beside = call.arguments[file] = _place_of(path) + OF_TRIAL
            if beside not in trials.checkpoints:
                trials.checkpoints.add(beside)
                recorder.log.note(trial_checkpoint=beside)
                # Flush, so that checkpoints are removed even if this process is killed.
                recorder.log.flush()
            return charged(*call.args, **call.kwargs)
        with contextlib.suppress(Exception):  # For example, the current folder was removed.
            earlier.set_aside(path)
        try:
            return charged(*args, **kwargs)
        finally:
            with contextlib.suppress(Exception):
                earlier.has_saved(path)

    around(owner, name, act)


def loads(torch: Any) -> None:
    """Let torch.load read the checkpoint that this run saved with the suffix, under trials.

    The script, or another rank, may load its best checkpoint. Files from before this run are
    ignored, because a killed run left them.
    """
    began = time.time() - 0.1  # Modification times come from a coarser clock.

    def act(load: Callable[..., Any], /, f: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # For example, `f` is an open file.
            beside = _place_of(f) + OF_TRIAL
            if os.stat(beside).st_mtime >= began:
                f = beside
        return load(f, *args, **kwargs)

    around(torch, "load", act)
    torch.serialization.load = torch.load


def made_folders(recorder: Recorder) -> Callable[[str, Any], None]:
    """Return an audit hook that logs new folders.

    Folders for checkpoints are empty after the trial's checkpoints are removed.
    """
    process = os.getpid()

    def hook(event: str, args: Any) -> None:
        if event == "os.mkdir" and args[2] == -1 and os.getpid() == process:
            with contextlib.suppress(Exception):
                place = os.path.abspath(os.fsdecode(args[0]))
                if not os.path.lexists(place):
                    recorder.log.note(made_folder=place)

    return hook


class Earlier:
    """Checkpoints of earlier runs, which are moved aside before this run overwrites them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.folder = os.environ.get("TRAINPACE_WATCH", "")
        self.written: set[str] = set()
        """Paths that this run has written."""
        self.saved: dict[str, tuple[int, ...]] = {}
        """State of each checkpoint as this run saved it.

        If it differs, another program wrote the file.
        """
        self.holding: dict[str, bool] = {}
        self.copies = Copies(recorder, self.written)
        sys.addaudithook(self._replaced)
        sys.addaudithook(self.copies.opened)

    def set_aside(self, path: Any) -> None:
        """Move a file of an earlier run aside.

        If that fails, the script overwrites the file as usual.
        """
        place = _place_of(path)
        if place in self.written:
            return
        self.written.add(place)
        aside = aside_of(place, self.folder)
        is_aside = os.path.lexists(aside)  # Another rank was first.
        if not is_aside and not os.path.lexists(place):
            # A killed `look` may have left files aside. Take the newest one back.
            with contextlib.suppress(OSError, ValueError):
                left = glob.glob(glob.escape(place) + EARLIER + "*")
                os.rename(max(left, key=os.path.getmtime), place)
        if is_aside or os.path.lexists(place):
            self.recorder.log.note(earlier=place)
            # Flush, so that the file is restored even if this process is killed.
            self.recorder.log.flush()
            if not is_aside:
                with contextlib.suppress(OSError):
                    os.rename(place, aside)

    def has_saved(self, path: Any, source: Any = None) -> None:
        """Remember the state of a saved checkpoint, or of `source`, which will be renamed to it."""
        place = _place_of(path)
        with contextlib.suppress(OSError):
            self.saved[place] = state_of(place if source is None else source)

    def note(self) -> None:
        """Log the files that this run has written."""
        self.recorder.log.note(saved=list(self.saved.items()))
        self.copies.note()

    def has_some_in(self, folder: Any) -> bool:
        """Return True if an earlier run left checkpoints in a folder that an engine cleans up."""
        place = _place_of(folder)
        if place not in self.holding:
            patterns = (os.path.join(glob.escape(place), name) for name in _CHECKPOINTS)
            self.holding[place] = any(map(glob.glob, patterns))
        return self.holding[place]

    def _replaced(self, event: str, args: Any) -> None:
        """Handle the audit event that a checkpoint, written under another name, replaces a file."""
        if event not in _REPLACING_EVENTS or any(folder != -1 for folder in args[2:]):
            return
        with contextlib.suppress(Exception):  # For example, the current folder was removed.
            source, place = map(_place_of, args[:2])
            # Python itself renames compiled modules into place.
            if source in self.written and EARLIER not in place and not place.endswith(_NEVER):
                self.set_aside(place)
                self.saved.pop(place, None)
                if event == "os.rename":
                    self.has_saved(place, source)


# ---- other files that Python opens for writing, such as a log

MOST_BYTES = 256 * 2**20
"""Size of the largest file that is copied, in bytes."""
_NEVER = (".lock", ".pyc")


class Copies:
    """Copies of files that the script is about to write. The script still writes the original file.

    These files are not copied: large files, temporary files, caches, locks, and files that compiled
    libraries write. Files are also not copied if the system cannot report whether other programs
    write them.
    """

    def __init__(self, recorder: Recorder, written: set[str]) -> None:
        """Set up for one recorder.

        Args:
            recorder: The recorder of this process.
            written: Paths that this run has written. The caller adds paths too.
        """
        self.recorder, self.written = recorder, written
        self.folder = os.environ.get("TRAINPACE_WATCH", "")
        self.writers = Writers()
        self.process, self.began_s = os.getpid(), time.time()
        self.temporary = tempfile.gettempdir()
        not_copied = (self.temporary, os.path.expanduser("~/.cache"), self.folder)
        here = f"{os.getcwd()}/"
        self.outside = tuple(
            f"{folder}/"
            for folder in (*not_copied, "/dev", "/proc", "/sys")
            if folder and not here.startswith(f"{folder}/")
        )

    def note(self) -> None:
        """Log the write counts of this process, to tell them from writes of other programs."""
        # A forked process shares the inotify queue and must not read it.
        if os.getpid() != self.process:
            return
        with contextlib.suppress(Exception):
            self.recorder.log.note(written=self.writers.accounts())

    def opened(self, event: str, args: Any) -> None:
        """Audit hook: copy a file before it is opened for writing, and log temporary files."""
        if event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
            self._is_temporary(args[0])
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

    def _is_temporary(self, path: Any) -> None:
        with contextlib.suppress(Exception):
            place = os.path.abspath(os.fsdecode(path))
            is_new = place.startswith(f"{self.temporary}/") and not os.path.lexists(place)
            if is_new and os.getpid() == self.process:
                self.recorder.log.note(temporary=place)
                self.recorder.log.flush()

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
        self.recorder.log.note(copied=place)
        self.recorder.log.flush()


def keep_first(unfinished: str, aside: str) -> None:
    """Give a copy its final name, or remove it if that name exists already.

    The first copy is kept, because a later copy may contain the beginning of another rank's output.
    """
    try:
        os.link(unfinished, aside)
    except FileExistsError:
        pass
    except OSError:  # The file system has no hard links.
        os.rename(unfinished, aside)
        return
    os.unlink(unfinished)


_MODIFIED, _CLOSED_WRITTEN, _OPENED, _OVERFLOW = 0x2, 0x8, 0x20, 0x4000
_EVENT = struct.Struct("iIII")
_BUFFER = 65536


class Writers:
    """Counts how often this process opens files for writing, and how often any process closes them.

    If there are more closings than openings, another program writes the file too. Restoring the
    file would destroy that program's output.

    The counts come from inotify(7), which only Linux has. It does not see programs on other hosts,
    or programs that had the file open all the time. `watch.command` looks for the latter.
    """

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
        """Begin to count for the file at this path. Return False if that is not possible."""
        if self._inotify < 0:
            return False
        # Openings and changes are included only to keep the kernel from merging equal closings.
        mask = _MODIFIED | _CLOSED_WRITTEN | _OPENED
        watch = self._libc.inotify_add_watch(self._inotify, os.fsencode(place), mask)
        if watch < 0:
            return False
        inode = os.stat(place).st_ino
        self._watches[place] = watch
        self._accounts[watch] = {"place": place, "inode": inode, "opened": 0, "closed": 0}
        return True

    def opened(self, place: str) -> None:
        """Count an opening that this process is about to do."""
        self._read()
        self._accounts[self._watches[place]]["opened"] += 1

    def accounts(self) -> list[dict[str, Any]]:
        """Return the counts of each file. `open` counts openings that are not closed yet."""
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
                    if mask & _OVERFLOW:
                        for account in self._accounts.values():
                            # The count is unknown, so another program is assumed.
                            account["closed"] = 2**31
                    if mask & _CLOSED_WRITTEN and watch in self._accounts:
                        self._accounts[watch]["closed"] += 1


def _open_for_writing() -> list[int]:
    """Return the inode of each regular file that this process has open for writing."""
    import fcntl

    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.fstat(int(name))
            writes = fcntl.fcntl(int(name), fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
            if stat.S_ISREG(about.st_mode) and writes:
                found.append(about.st_ino)
    return found


# ---- a trial that may write only into its own folders

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
"""Environment variables with the paths of caches, which can be filled again."""
_REFUSAL = (
    "trainpace: a trial may write only into its own folder, which {out} in the command stands for"
)
_PATHS: dict[str, tuple[tuple[int, int | None], ...]] = {
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
"""Positions of (path argument, folder descriptor) of each audit event.

Source: the table of events at sys.addaudithook.
"""
_CHANGE_THE_LINK = ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.link", "os.symlink")
"""Events that change a link itself. Others change its target. `shutil.rmtree` rejects links."""


def confine(folders: Sequence[str], environment: Mapping[str, str]) -> None:
    """Block writing, removing and renaming files outside of these folders until the process ends.

    The trial's temporary folder and caches are allowed. Python's audit hooks (PEP 578) see the
    files that Python itself opens. They do not see writes of compiled libraries or other programs.

    Args:
        folders: Folders in which the process may write.
        environment: Environment variables with the temporary folder and caches.
    """
    home = os.path.expanduser("~")
    allowed = [*folders, environment.get("TMPDIR", "/dev"), "/dev", "/proc"]
    allowed += [os.path.join(home, name) for name in (".cache", ".triton", ".nv")]
    allowed += [environment[name] for name in CACHES if environment.get(name)]
    inside = tuple(map(os.path.realpath, allowed))

    def check(path: Any, follows: bool) -> None:
        # The descriptor of an open file, or None.
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.fsdecode(path)
        if name.endswith(OF_TRIAL) or "__pycache__" in name:
            return
        folder, last = os.path.split(os.path.abspath(name))
        real = os.path.realpath(name) if follows else os.path.join(os.path.realpath(folder), last)
        if not any(real == folder or real.startswith(folder + os.sep) for folder in inside):
            raise PermissionError(errno.EACCES, _REFUSAL, name)

    def hook(event: str, args: Any) -> None:
        if event == "sqlite3.connect":
            check(_written_database(args[0]), True)
        elif event != "open" or args[2] & _WRITES:
            for i, handle in _PATHS.get(event, ()):
                # A path with a folder descriptor is inside a tree that was checked as a whole.
                if handle is None or args[handle] == -1:
                    check(args[i], event not in _CHANGE_THE_LINK)

    sys.addaudithook(hook)


def _written_database(database: Any) -> str | None:
    """Return the file that SQLite may write, or None if the database is in memory or read-only.

    Source: https://sqlite.org/uri.html
    """
    name = os.fsdecode(database)
    if name.startswith("file:"):
        name, _, query = name.removeprefix("file:").partition("?")
        if not {"mode=ro", "immutable=1", "mode=memory"}.isdisjoint(query.split("&")):
            return None
    return None if name in ("", ":memory:") else name
