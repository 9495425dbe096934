"""The experiment database: every measured run, on SQLite or PostgreSQL. Importing this room imports no database."""

from trainpace.journal.entry import Entry, Sweep, content_id, entry_of, measurement_of, new_id, now_utc

__all__ = ["Entry", "Sweep", "content_id", "entry_of", "measurement_of", "new_id", "now_utc"]
