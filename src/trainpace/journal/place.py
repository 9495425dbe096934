"""The place of the user's journal, without opening it."""

from __future__ import annotations

import os
from pathlib import Path


def default_place() -> str:
    """$TRAINPACE_JOURNAL, or journal.db in the user's data folder."""
    named = os.environ.get("TRAINPACE_JOURNAL")
    if named:
        return named
    return str(Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "trainpace" / "journal.db")


def is_there() -> bool:
    """Whether the user's journal exists, as far as can be told without connecting to a server."""
    place = default_place()
    return "://" in place or Path(place).expanduser().exists()
