"""Carry a list of changes out one by one, each forecast, measured, and kept only where it helps."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.ladder.climbing import (
        ClimbActions,
        RungPreview,
        climb,
        file_name,
        make_shards,
        preview,
    )
    from trainpace.ladder.forecasts import (
        NO_FORECAST,
        NO_MODEL,
        NOT_ASKED,
        LadderForecasts,
        MeasuredCompute,
        StepForecast,
        has_data,
    )
    from trainpace.ladder.inputs import read_ladder
    from trainpace.ladder.results import (
        Attempt,
        LadderResult,
        LadderRow,
        entry_of_trial,
        epoch_s,
        job_time,
        noise_scale_of,
        rows_of,
    )
    from trainpace.ladder.rungs import Ladder, LauncherChoice, Rung, Script, Setup, words_of
    from trainpace.ladder.script import fingerprint, keep_files, prepare, started_by

__getattr__, __all__ = exports(__name__, __file__)
