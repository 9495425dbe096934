"""Checkpoints of earlier runs, while a script is only looked at. It writes its own as it always does; what was there before is
moved aside first, and put back at the end by `watch`, unless the script came to its own end."""

import contextlib
import os
import sys
from typing import Any

from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import EARLIER

_EVENTS = ("os.rename", "shutil.copyfile")
"""Audit events by which a file (their first argument) takes another's place (their second)."""


class Earlier:
    """`keep` is called before a checkpoint is written."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.written: set[str] = set()
        """Where this run has written: no longer an earlier run's."""
        sys.addaudithook(self._replaced)

    def keep(self, path: Any) -> None:
        """Move what lies there aside, if this run has not written it. Where that cannot be, it is as without trainpace."""
        place = os.path.abspath(os.fspath(path))
        if place in self.written:
            return
        self.written.add(place)
        if os.path.lexists(place) and not os.path.lexists(place + EARLIER):
            self.recorder.trail.note({"earlier": place})
            self.recorder.trail.flush()  # so that it is put back also if this process is killed
            with contextlib.suppress(OSError):
                os.rename(place, place + EARLIER)

    def _replaced(self, event: str, args: Any) -> None:
        """A checkpoint that was written under another name takes its place."""
        if event in _EVENTS and all(isinstance(name, str | os.PathLike) for name in args[:2]):
            source, place = (os.path.abspath(os.fspath(name)) for name in args[:2])
            if source in self.written and place != source + EARLIER:
                self.keep(place)
