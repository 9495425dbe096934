"""What a run left beside its files, once it has ended: files of earlier runs go back, checkpoints of trials go away."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from trainpace.watch.inside.trail import OF_TRIAL, aside_of, state_of
from trainpace.watch.notes import Notes
from trainpace.watch.trails import header_of, records_of

NOT_RESTORED = "earlier"
"""The folder of a recording with files of earlier runs that were not put back."""
_PATIENCE_S = 1.0
"""Loader workers that were killed have a log open for a moment longer."""


def notes_in(folder: Path, of: Callable[[dict[str, Any]], bool] | None = None) -> Notes:
    """What the command's processes have noted; with `of`, those whose trail has a header of that kind."""
    paths = [
        path for path in folder.glob("process-*.trail") if of is None or of(header_of(path) or {})
    ]
    return Notes(record for path in paths for record in records_of(path))


def put_back(
    folder: Path, notes: Notes, whole: bool, accounts: Notes | None = None
) -> dict[str, list[str]]:
    """Put back the files of earlier runs over which a script wrote that was ended or failed: names of those `restored`, and of
    those `left` as they are, since another program writes them too; their earlier content is then kept in the recording's folder.
    Where the script came to its own end (`whole`: with exit code 0), what it wrote stays, as it does alone. `accounts`: notes of
    all processes on this host that may have written the same files, where `notes` are of some."""
    whole = whole and not any(notes.values("stopped"))
    saved = {(place, tuple(state)) for states in notes.values("saved") for place, state in states}
    copied = [str(place) for place in notes.values("copied")]
    shared = set() if whole else _written_by_others((accounts or notes).values("written"), copied)
    done: dict[str, list[str]] = {"restored": [], "left": []}
    for place in dict.fromkeys((*map(str, notes.values("earlier")), *copied)):
        aside = aside_of(place, str(folder.resolve()))
        if not os.path.lexists(aside):
            continue
        with contextlib.suppress(OSError):
            if whole:
                _remove(aside)
            elif place in shared or (place not in copied and _is_anothers(place, saved)):
                kept = _unused(folder / NOT_RESTORED / os.path.basename(place))
                kept.parent.mkdir(exist_ok=True)
                shutil.move(aside, kept)
                done["left"].append(place)
            else:
                _remove(place)
                os.rename(aside, place)
                done["restored"].append(place)
    return {name: places for name, places in done.items() if places}


def remove_trial_checkpoints(notes: Notes) -> None:
    """Remove checkpoints that were written under trials, beside the script's own, and the folders made for them that are empty
    then: a script that resumes from its newest folder would find nothing there."""
    written = [
        place for place in map(str, notes.values("trial_checkpoint")) if place.endswith(OF_TRIAL)
    ]
    for place in written:
        Path(place).unlink(missing_ok=True)
    for folder in sorted(map(str, notes.values("made_folder")), key=len, reverse=True):
        if any(place.startswith(folder + os.sep) for place in written):
            with contextlib.suppress(OSError):  # which holds something else, or is gone
                os.rmdir(folder)


def _is_anothers(place: str, saved: Collection[tuple[str, tuple[int, ...]]]) -> bool:
    """Whether a checkpoint is another one than this run left there."""
    states = {state for name, state in saved if name == place}
    return bool(states) and os.path.lexists(place) and state_of(place) not in states


def _written_by_others(written: Collection[Any], places: Collection[str]) -> set[str]:
    """Files that other programs have written meanwhile or have open, and those of which nobody can say it, since a process was
    killed before it could give its account (`written`: those of all processes)."""
    accounts = [account for found in written for account in found]
    shared = set()
    for place in set(places):
        own = [account for account in accounts if account["place"] == place]
        closed = max((account["closed"] for account in own), default=0)
        mine = sum(account["opened"] - account["open"] for account in own)
        is_same = os.path.exists(place) and all(
            account["inode"] == os.stat(place).st_ino for account in own
        )
        if not own or closed > mine or not is_same:
            shared.add(place)
    until = time.monotonic() + _PATIENCE_S
    while (held := _held(set(places) - shared)) and time.monotonic() < until:
        time.sleep(0.1)
    return shared | held


def _held(places: Collection[str]) -> set[str]:
    """Those of the files that some process, of those that we may ask, has open for writing."""
    if not places:
        return set()
    import psutil

    real = {os.path.realpath(place): place for place in places}
    held = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            held |= {
                real[f.path]
                for f in process.open_files()
                if f.path in real and getattr(f, "mode", "w") != "r"
            }
    return held


def _unused(path: Path) -> Path:
    names = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000)))
    return next(name for name in names if not name.exists())


def _remove(place: str) -> None:
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    elif os.path.lexists(place):
        os.unlink(place)
