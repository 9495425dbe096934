"""The experiment database: every measured run, on SQLite or PostgreSQL. Importing this room imports no database."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.journal.comparison import (
        TOLERANCE,
        Comparison,
        Difference,
        Guarded,
        Pace,
        Ratio,
        compare,
        guard,
        pace_of_entry,
        pace_of_recording,
        ratio_of,
    )
    from trainpace.journal.connect import JournalUnusable
    from trainpace.journal.entry import (
        Entry,
        Kind,
        Outcome,
        Sweep,
        content_id,
        entry_of,
        measurement_of,
        new_id,
        now_utc,
        printable,
        probe_of,
        utc_text,
    )
    from trainpace.journal.exchange import export
    from trainpace.journal.exporting import export_mlflow, export_wandb
    from trainpace.journal.foresight import Foresight, foresight_of, workload_key
    from trainpace.journal.identity import anonymous, anonymous_entry, this_machines_names
    from trainpace.journal.importing import Imported, format_of, import_file
    from trainpace.journal.importing.reading import Given
    from trainpace.journal.place import default_place, is_there, may_know
    from trainpace.journal.query import MOST_COUNTED, ORDERS, Page, Query, names_of, page
    from trainpace.journal.recorder import Circumstances, RecordedSweep, execution_of, program_command, record_sweep
    from trainpace.journal.score import LATELY, Score, Scores, error_pct, scores
    from trainpace.journal.store import Journal
    from trainpace.journal.tables import VERSION

__getattr__, __all__ = exports(__name__, __file__)
