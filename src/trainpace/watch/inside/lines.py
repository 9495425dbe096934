"""The script's own lines that run while no part accounts for the time: looks at the stack, now and then."""

import os
import sys
import threading
from collections import Counter
from types import CodeType, FrameType

from trainpace.watch.inside.installed import is_installed
from trainpace.watch.inside.recorder import SPANS_AGAIN_EVERY, SPANS_FOR_STEPS, Recorder
from trainpace.watch.inside.trail import BACKWARD, FORWARD, PARTS, Step

INTERVAL_S, INTERVAL_UNDER_TRIALS_S = 0.1, 0.02
LOOKS_FOR_LOOP = 20
"""After which the function that has the loop is known."""
OFTEN_LOOKS, SELDOM = 200, 5
"""After so many looks without trials, they come so many times as seldom: what takes long was seen by then."""
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WRAPPERS = ("torch._compile", "sklearn.utils._param_validation", "contextlib")
"""Modules whose functions call others that were named: nobody calls these."""
_TORCH = f"{os.sep}torch{os.sep}"
"""In the names of files of torch itself, whose functions have no training's loop."""


class Sampler:
    """Counts (part, line of the script, function called) on the training thread, and writes what waits to be written. Begins
    after the first step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._counts: Counter[tuple[int, str, str]] = Counter()
        self._stop = threading.Event()
        self._looker: threading.Thread | None = None
        self._loop = _Loop()
        self._told_by: CodeType | None = None

    def at_step(self, step: Step) -> None:
        """Start at the second step, and write the counts to the trail periodically."""
        if self._looker is None:
            thread = (self._recorder.thread,)
            self._looker = threading.Thread(
                target=self._run, args=thread, name="trainpace-sampler", daemon=True
            )
            self._looker.start()
        elif step.number in (25, SPANS_FOR_STEPS - 1) or step.number % SPANS_AGAIN_EVERY == 0:
            self._recorder.trail.note({"samples": self.counts()})

    def stop(self) -> None:
        """Stop before the interpreter ends: a thread that it cuts off in C++ would abort the process."""
        self._stop.set()
        if self._looker is not None:
            self._looker.join(1.0)

    def counts(self) -> list[tuple[str, str, str, int]]:
        """(part, file:line function, function called, count), the most frequent first."""
        counts = Counter(dict(self._counts))  # copied at one go: the thread goes on counting
        return [
            (PARTS[part], line, callee, n) for (part, line, callee), n in counts.most_common(60)
        ]

    def _run(self, thread: int) -> None:
        # each look takes the interpreter's lock from the script for a moment
        interval_s = INTERVAL_S if self._recorder.trials is None else INTERVAL_UNDER_TRIALS_S
        looks, often = 0, OFTEN_LOOKS if self._recorder.trials is None else sys.maxsize
        while not self._stop.wait(interval_s if looks < often else SELDOM * interval_s):
            looks += 1
            # what waits to be written when no step comes any more, as where the process is killed after its last one
            self._recorder.keeps_up()
            part = self._recorder.part
            frame = sys._current_frames().get(thread)
            if frame is not None:
                loop = self._loop.seen_in(frame, part)
                if loop is not None and loop is not self._told_by:
                    self._told_by = loop
                    self._counts.clear()  # until now all was seen at the line that calls the library
                self._counts[(part, *line_of(frame, loop))] += 1
            del frame  # it holds the function's tensors, which must go when the function ends


class _Loop:
    """The function that has the training's loop, where that is a library's: the innermost one that is seen in every look."""

    def __init__(self) -> None:
        self._common: list[CodeType] | None = None
        self._parts: set[int] = set()
        self._looks = 0

    def seen_in(self, frame: FrameType, part: int) -> CodeType | None:
        """Take one more look into account; the loop's code once it is known, None while it is not or is the script's own."""
        stack: list[CodeType] = []
        at: FrameType | None = frame
        while at is not None:
            stack.append(at.f_code)
            at = at.f_back
        stack.reverse()
        common = stack if self._common is None else self._common
        same = next(
            (i for i, (a, b) in enumerate(zip(common, stack, strict=False)) if a is not b),
            len(stack),
        )
        self._common = common[:same]
        self._parts.add(part)
        self._looks += 1
        trains = self._parts & {FORWARD, BACKWARD}
        if self._looks < LOOKS_FOR_LOOP or not trains or self._parts == trains or not self._common:
            return None
        loop = self._common[-1]
        name = loop.co_filename
        return (
            loop if is_installed(name) and not (name.startswith(_OURS) or _TORCH in name) else None
        )


def line_of(frame: FrameType, loop: CodeType | None = None) -> tuple[str, str]:
    """The innermost line of the script, or of the library's loop if that is further inside, and the function that it calls."""
    below = ""
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_filename
        if not name.startswith(_OURS):
            if at.f_code is loop or not is_installed(name):
                return f"{name}:{at.f_lineno} {at.f_code.co_name}", below
            module = at.f_globals.get("__name__", "")
            below = below if module in _WRAPPERS else f"{module}.{at.f_code.co_name}"
        at = at.f_back
    return "", below
