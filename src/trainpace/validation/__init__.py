"""Forecasts against measured runs: read the runs, forecast each under its own conditions, and sum up the errors."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.validation.conditions import (
        Case,
        as_precision,
        case_of,
        execution_of,
        measured_ms,
        mode_of,
        read_parallelism,
    )
    from trainpace.validation.rows import (
        PAGEABLE_COPY_GB_PER_S,
        Row,
        Summary,
        by,
        case_table,
        evaluate,
        family_of,
        forecast_case,
        stated_peak_gib,
        summarise,
        trace_file,
    )
    from trainpace.validation.runs import Run, number, read_runs, read_table, run_of

__getattr__, __all__ = exports(__name__, __file__)
