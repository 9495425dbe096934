"""Under a trial, a script may write only into the trial's folders: opening for writing, removing or renaming anything
else is refused.

Python's audit hooks (PEP 578) see every file that Python itself opens, in every Python process of the command. They do
not see what compiled libraries or other programs write.
"""

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainpace.watch.inside.trail import ASIDE

CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR", "TRITON_HOME",
          "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR", "MPLCONFIGDIR")  # fmt: skip
"""Environment variables that name caches, whose content can be made again."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SAYS = "trainpace: a trial may write only into its own folder, which {out} in the command stands for"


def confine(folders: Sequence[str], environment: Mapping[str, str]) -> None:
    home = os.path.expanduser("~")
    mine = [*folders, "/dev", "/proc", *(os.path.join(home, name) for name in (".cache", ".triton", ".nv"))]
    mine += [environment[name] for name in CACHES if environment.get(name)]
    inside = tuple(os.path.realpath(folder) for folder in mine)

    def check(path: Any, follows: bool) -> None:
        if not isinstance(path, str | bytes | os.PathLike):  # an open file's number, or no file
            return
        name = os.fsdecode(path)
        if name.endswith(ASIDE) or "__pycache__" in name:
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
    "open": ((0, None),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),), "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, None),), "os.link": ((1, 3),), "os.symlink": ((1, 2),), "shutil.rmtree": ((0, None),),
    "os.chmod": ((0, 2),), "os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
}  # fmt: skip
"""Positions of the path arguments of each audit event, with the argument that holds the folder's handle
(sys.addaudithook's table of events)."""
_FOLLOW = ("open", "os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr")
"""Events that change the target of a link; the others change the link itself."""
