"""The place of the user's journal, and what it may hold, without opening it."""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from trainpace.core.host import user_folder
from trainpace.workload import ModelSpec


def default_place() -> str:
    """$TRAINPACE_JOURNAL, or journal.db in the user's data folder."""
    return os.environ.get("TRAINPACE_JOURNAL") or str(user_folder("data") / "journal.db")


def may_know(place: str | None, devices: Collection[str], models: Collection[str] = ()) -> bool:
    """Whether the journal at a place, by default the user's own, may hold runs on one of the devices or of one of the models.

    An SQLite file is asked without SQLAlchemy, whose import takes longer than a forecast; what cannot be read like this (a
    server, a damaged file) is left to `Journal`.
    """
    where = place or default_place()
    if "://" in where:
        return True
    file = Path(where).expanduser()
    if place is None and not file.exists():
        return False
    import sqlite3

    address = file.absolute().as_uri() + "?mode=ro"
    models = {name for model in models for name in ModelSpec.of(model).aliases}
    of_devices, of_models = (",".join("?" * len(names)) for names in (devices, models))
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            query = (
                "SELECT 1 FROM runs WHERE outcome = 'ok'"
                f" AND (device IN ({of_devices}) OR model IN ({of_models})) LIMIT 1"
            )
            return connection.execute(query, (*devices, *models)).fetchone() is not None
    except (sqlite3.Error, ValueError):
        return True
