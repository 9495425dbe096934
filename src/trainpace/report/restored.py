"""What became of the files of earlier runs that a script has overwritten while it was tried."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainpace.report.phrases import listed, plural
from trainpace.watch import NOT_RESTORED, Recording


def restored_notes(recording: Recording, folder: Path) -> Iterator[str]:
    """Which files are as they were, and which are not; nothing where none was overwritten."""
    if recording.restored:
        have = "has" if len(recording.restored) == 1 else "have"
        yield (
            f"{_named(recording.restored)} of an earlier run, which the script overwrote, {have}"
            " been restored."
        )
    if recording.left:
        was, before = ("was", "its") if len(recording.left) == 1 else ("were", "their")
        yield (
            f"{_named(recording.left)} may be written by another program at this moment, and {was}"
            f" not restored; {before} earlier content is in {from_home(folder / NOT_RESTORED)}."
        )


def from_home(folder: Path) -> str:
    """As a shell reads it, short where it can be."""
    home = Path.home()
    if folder.is_relative_to(home) and (
        short := folder.relative_to(home).as_posix()
    ) == shlex.quote(short):
        return f"~/{short}"
    return shlex.quote(str(folder))


def _named(places: Sequence[str]) -> str:
    names = [os.path.relpath(place) for place in places]
    return listed([*names[:2], *([plural(len(names) - 2, "other file")] if len(names) > 2 else [])])
