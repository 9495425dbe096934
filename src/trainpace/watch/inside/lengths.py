"""How long the training is to be, as the variables of the script's own functions say while its first step ends.

They are read once: the functions that are being called, from the training loop outwards, and what the objects among their
variables hold, such as the arguments that argparse made. Steps count under names that engines give to what ends a training
(`max_steps`, not `steps`), and then go before epochs.
"""

import os
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from trainpace.watch.inside.installed import is_installed
from trainpace.watch.inside.recorder import Recorder
from trainpace.watch.stated import ENDING_STEPS, EPOCHS, StatedLength

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
        recorder.trail.note({"stated": found.get("steps") or found["epochs"]})


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
