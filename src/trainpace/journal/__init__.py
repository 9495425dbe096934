"""Journal of measured runs on SQLite or PostgreSQL. Importing it loads no database driver."""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.journal.comparison import (
        LATELY,
        MINE,
        PUBLIC,
        TOLERANCE,
        Comparison,
        Difference,
        Guarded,
        Pace,
        Ratio,
        Scores,
        compare,
        compared,
        entry_of_public,
        entry_of_recording,
        error_pct,
        guard,
        is_public,
        matching,
        pace_of_entry,
        pace_of_recording,
        public_run,
        scores,
    )
    from trainpace.journal.database import VERSION, JournalUnusable
    from trainpace.journal.entry import (
        Entry,
        Kind,
        Outcome,
        Sweep,
        anonymous,
        anonymous_entry,
        entry_of,
        new_id,
        now_utc,
        printable,
        probe_of,
        signed,
        this_machines_names,
    )
    from trainpace.journal.exporting import export, export_mlflow, export_wandb
    from trainpace.journal.importing import Given, Imported, format_of, import_file
    from trainpace.journal.knowledge import Knowledge, may_know, workload_key
    from trainpace.journal.recorder import (
        Circumstances,
        RecordedSweep,
        program_command,
        record_sweep,
    )
    from trainpace.journal.sharing import (
        ODD,
        OWN_MODEL,
        SHARED_LIBRARIES,
        Lesson,
        Lessons,
        Odd,
        Received,
        SharedRun,
        SharedRuns,
        Sharing,
        public_name,
        receive,
        schema,
        share,
        text_of,
    )
    from trainpace.journal.store import MOST_COUNTED, ORDERS, Journal, Page, Query, names_of, page

__getattr__, __all__ = exports(__name__, __file__)
