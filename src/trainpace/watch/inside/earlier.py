"""Checkpoints of earlier runs, while a script is only looked at. It writes its own as it always does; what was there before is
moved aside first, and put back at the end by `watch`, unless the script came to its own end."""

import contextlib
import glob
import os
import sys
from typing import Any

from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import EARLIER

_CHECKPOINTS = ("checkpoint-*", "global_step*", "*.safetensors", "pytorch_model*.bin")
"""What transformers and DeepSpeed write into a folder."""
_EVENTS = ("os.rename", "shutil.copyfile")
"""Audit events by which a file (their first argument) takes another's place (their second)."""


class Earlier:
    """`keep` is called before a checkpoint is written."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.written: set[str] = set()
        """Where this run has written: no longer an earlier run's."""
        self.holding: dict[str, bool] = {}
        sys.addaudithook(self._replaced)

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

    def _replaced(self, event: str, args: Any) -> None:
        """A checkpoint that was written under another name takes its place."""
        if event not in _EVENTS or any(folder != -1 for folder in args[2:]):
            return
        with contextlib.suppress(Exception):  # such as a current folder that is gone
            source, place = (os.path.abspath(os.fspath(name)) for name in args[:2])
            if source in self.written and place != source + EARLIER:
                self.keep(place)
