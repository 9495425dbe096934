"""The experiment database: every measured run, on SQLite or PostgreSQL. Importing this room imports no database."""

from typing import TYPE_CHECKING

from trainpace.core.lazy import exports

if TYPE_CHECKING:
    from trainpace.journal.comparison import (
        LATELY,
        TOLERANCE,
        Comparison,
        Difference,
        Guarded,
        Pace,
        Ratio,
        Scores,
        compare,
        error_pct,
        guard,
        pace_of_entry,
        pace_of_recording,
        scores,
    )
    from trainpace.journal.database import VERSION, JournalUnusable
    from trainpace.journal.entry import (
        Entry,
        Kind,
        Outcome,
        Sweep,
        entry_of,
        new_id,
        now_utc,
        printable,
        probe_of,
    )
    from trainpace.journal.exchange import Given, export
    from trainpace.journal.identity import anonymous, anonymous_entry, signed, this_machines_names
    from trainpace.journal.importing import Imported, format_of, import_file
    from trainpace.journal.knowledge import Knowledge, workload_key
    from trainpace.journal.place import may_know
    from trainpace.journal.public import (
        MINE,
        PUBLIC,
        Accuracy,
        AccuracyLine,
        PublicQuery,
        accuracy,
        accuracy_by,
        compared,
        entry_of_public,
        is_public,
        matching,
        public_query,
        public_run,
    )
    from trainpace.journal.query import MOST_COUNTED, ORDERS, Page, Query, names_of, page
    from trainpace.journal.receiving import ODD, Lesson, Lessons, Odd, Received, receive
    from trainpace.journal.recorder import (
        Circumstances,
        RecordedSweep,
        program_command,
        record_sweep,
    )
    from trainpace.journal.shared import (
        OWN_MODEL,
        SHARED_LIBRARIES,
        SharedRun,
        SharedRuns,
        Sharing,
        public_name,
        schema,
        share,
        text_of,
    )
    from trainpace.journal.store import Journal
    from trainpace.journal.trackers import export_mlflow, export_wandb

__getattr__, __all__ = exports(__name__, __file__)
