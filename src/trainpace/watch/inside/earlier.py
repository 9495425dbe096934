"""Checkpoints of earlier runs, while a script is only looked at. It writes its own as it always does; what was there before is
moved aside first, and put back at the end by `watch`, unless the script came to its own end. Other files are copied
(`inside.copies`).
"""

import contextlib
import glob
import os
import sys
from typing import Any

from trainpace.watch.inside.copies import Copies
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import EARLIER, aside_of, state_of

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
            self.recorder.trail.note({"earlier": place})
            self.recorder.trail.flush()  # so that it is put back also if this process is killed
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
        self.recorder.trail.note({"saved": list(self.saved.items())})
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
