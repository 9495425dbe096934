"""Forecasts against measured runs: read the runs, forecast each under its own conditions, and sum up the errors."""

from trainpace.validation.conditions import Case, case_of, execution_of, measured_ms, mode_of
from trainpace.validation.evaluate import PAGEABLE_COPY_GB_PER_S, Row, evaluate, forecast_case, trace_file
from trainpace.validation.peaks import stated_peak_gib
from trainpace.validation.runs import CONDITIONS, Run, read_runs, run_of
from trainpace.validation.summary import Summary, by, family_of, summarise

__all__ = [
    "CONDITIONS", "PAGEABLE_COPY_GB_PER_S", "Case", "Row", "Run", "Summary", "by", "case_of", "evaluate",
    "execution_of", "family_of", "forecast_case", "measured_ms", "mode_of", "read_runs", "run_of", "stated_peak_gib",
    "summarise", "trace_file",
]  # fmt: skip
