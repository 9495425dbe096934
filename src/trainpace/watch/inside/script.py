"""The script's own code: lines that were seen running, and the length of the training that its variables state."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from trainpace.core.host import holds_packages, top_of
from trainpace.watch.inside.event_log import BACKWARD, FORWARD, PARTS, Step
from trainpace.watch.inside.recorder import SPANS_AGAIN_EVERY, SPANS_FOR_STEPS, Recorder

_INSTALLED = (*{sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether a file is of the standard library or of an installed package; the script's own folder holds none."""
    if file.startswith(_INSTALLED):
        return True
    folder = top_of(
        os.path.dirname(os.path.abspath(file))
    )  # cProfile and the like compile a script by its name alone
    script = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    return folder != os.path.dirname(os.path.abspath(script)) and holds_packages(folder)


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
            self._recorder.log.note({"samples": self.counts()})

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


EPOCHS = frozenset(
    (
        "epochs",
        "num_epochs",
        "n_epochs",
        "nb_epochs",
        "max_epochs",
        "num_train_epochs",
        "train_epochs",
        "total_epochs",
    )
)
STEPS = frozenset(
    (
        "max_steps",
        "num_steps",
        "n_steps",
        "total_steps",
        "max_train_steps",
        "num_train_steps",
        "train_steps",
        "max_iters",
        "num_iters",
        "n_iters",
        "iterations",
        "train_iters",
        "max_iterations",
        "max_updates",
    )
)
"""Names that scripts give to their numbers of epochs and of optimizer steps: in pytorch/examples, nanoGPT, timm, Lightning,
Hugging Face and Megatron-LM."""
ENDING_STEPS = STEPS - {"num_steps", "n_steps", "num_iters", "n_iters", "iterations"}
"""Those that mean a whole training wherever they stand; the others may be an epoch's steps, or a rollout's."""
_NUMBER = re.compile(r"\d[\d_]*(\.\d+)?([eE]\+?\d{1,3})?")


class StatedLength(NamedTuple):
    """Epochs or steps, and the `words` of the command that say so."""

    epochs: float | None
    steps: int | None
    words: str


def stated_length(command: Sequence[str]) -> StatedLength | None:
    """The last argument that names epochs or steps with a number above 0: `--epochs 30`, `--max-steps=1000`, Hydra's
    `trainer.max_epochs=30`; None where none does. Where both are there, steps, since they are what scripts stop at first.
    """
    found: dict[str, StatedLength] = {}
    for i, word in enumerate(command):
        name, equals, value = word.partition("=")
        if not equals and word.startswith("-") and i + 1 < len(command):
            value = command[i + 1]
        if not _NUMBER.fullmatch(value) or not (number := float(value)) or number > 1e15:
            continue
        key = name.lstrip("-+").rpartition(".")[2].replace("-", "_").lower()
        words = word if equals else f"{word} {value}"
        if key in EPOCHS:
            found["epochs"] = StatedLength(number, None, words)
        elif key in STEPS and number.is_integer():
            found["steps"] = StatedLength(None, int(number), words)
    return found.get("steps") or found.get("epochs")


_OWN = ("torch", "trainpace")
"""Packages whose own variables say nothing of the script."""
MOST_FRAMES = 100
MOST_DEEP = 12


def note(recorder: Recorder) -> None:
    """Note the length that the calling functions' variables state, if any does."""
    found: dict[str, StatedLength] = {}
    for name, value, place in _variables(sys._getframe(1)):
        key = name.lstrip("_").lower()
        kind = "epochs" if key in EPOCHS else "steps" if key in ENDING_STEPS else None
        if kind is None or kind in found or type(value) not in (int, float):
            continue
        if 0 < value < 1e15 and (kind == "epochs" or float(value).is_integer()):
            words = f"{name} = {value:,.15g} in {place}"
            found[kind] = (
                StatedLength(value, None, words)
                if kind == "epochs"
                else StatedLength(None, int(value), words)
            )
    if found:
        recorder.log.note({"stated": found.get("steps") or found["epochs"]})


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any, str]]:
    """(name, value, file) of every variable, and of what objects among them hold, innermost function first."""
    modules = []
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _OWN:
            yield from _of(frame.f_locals, frame)
            if not is_installed(frame.f_code.co_filename) and frame.f_globals is not frame.f_locals:
                modules.append(frame)
        frame = frame.f_back
    for each in modules:
        yield from _of(each.f_globals, each)


def _of(variables: dict[str, Any], frame: FrameType) -> Iterator[tuple[str, Any, str]]:
    """By types alone and past `__getattribute__`, so that no code of the script runs."""
    place, values = os.path.basename(frame.f_code.co_filename), list(variables.items())
    yield from (
        (name, value, place) for name, value in values if issubclass(type(value), int | float)
    )
    for _, value in values:
        kind = type(value)
        if issubclass(kind, ModuleType | type) or str(kind.__module__).partition(".")[0] in _OWN:
            continue
        try:
            inner = value if issubclass(kind, dict) else object.__getattribute__(value, "__dict__")
        except AttributeError:
            continue
        yield from _named(inner, place)


def _named(
    inner: dict[Any, Any], place: str, deep: int = MOST_DEEP
) -> Iterator[tuple[str, Any, str]]:
    """What an object holds by names, and what an OmegaConf tree does, whose values are objects of its own."""
    for name, each in list(inner.items()):
        if not isinstance(name, str) or name == "_parent":
            continue
        held = {"_content": each} if name == "_content" else {}
        if str(type(each).__module__).partition(".")[0] == "omegaconf":
            held = object.__getattribute__(each, "__dict__")
        yield name, held.get("_val", each), place
        if deep and type(held.get("_content")) is dict:
            yield from _named(held["_content"], place, deep - 1)
