"""The script's own lines that run while no part accounts for the time, sampled periodically."""

import os
import sys
import sysconfig
import threading
from collections import Counter
from types import FrameType

from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.inside.trail import PARTS, Step

INTERVAL_S, INTERVAL_UNDER_TRIALS_S = 0.1, 0.02
_OTHERS_CODE = (*{sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Sampler:
    """Counts (part, line of the script, function called) on the training thread. Begins after the first step."""

    def __init__(self, recorder: Recorder, thread: int) -> None:
        self._recorder, self._thread = recorder, thread
        self._counts: Counter[tuple[int, str, str]] = Counter()
        self._started = False
        self._stop = threading.Event()
        self._looker: threading.Thread | None = None

    def at_step(self, step: Step) -> None:
        """Start at the second step, and write the counts to the trail periodically."""
        if not self._started:
            self._started = True
            self._thread = self._recorder.thread
            self._looker = threading.Thread(target=self._run, name="trainpace-sampler", daemon=True)
            self._looker.start()
        elif step.number in (25, 100) or step.number % 1000 == 0:
            self._recorder.trail.note({"samples": self.counts()})

    def stop(self) -> None:
        """Stop before the interpreter ends: a thread that it cuts off in C++ would abort the process."""
        self._stop.set()
        if self._looker is not None:
            self._looker.join(1.0)

    def counts(self) -> list[tuple[str, str, str, int]]:
        """(part, file:line function, function called, count), the most frequent first."""
        counts = Counter(dict(self._counts))  # copied at one go: the thread goes on counting
        return [(PARTS[part], line, callee, n) for (part, line, callee), n in counts.most_common(60)]

    def _run(self) -> None:
        # each look takes the interpreter's lock from the script for a moment
        interval_s = INTERVAL_S if self._recorder.trials is None else INTERVAL_UNDER_TRIALS_S
        while not self._stop.wait(interval_s):
            part = self._recorder.part
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                self._counts[(part, *_line_of(frame))] += 1
            del frame  # it holds the function's tensors, which must go when the function ends


def _line_of(frame: FrameType) -> tuple[str, str]:
    below = ""
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_filename
        if not name.startswith(_OURS):
            if not name.startswith(_OTHERS_CODE) and "site-packages" not in name:
                return f"{name}:{at.f_lineno} {at.f_code.co_name}", below
            below = f"{at.f_globals.get('__name__', '')}.{at.f_code.co_name}"
        at = at.f_back
    return "", below
