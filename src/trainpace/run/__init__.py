"""Trials of a plan's changes: engines, launchers, ladders, and equivalence checks."""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.run.climbing import (
        ClimbActions,
        RungPreview,
        climb,
        make_shards,
        preview,
        read_ladder,
        rung_file_name,
    )
    from trainpace.run.equivalence import Change, Equivalence, Question, WayResult, verify
    from trainpace.run.job import Ended, Job, Launcher, Starts, ThisMachine, Torchrun, file_name
    from trainpace.run.ladder import Ladder, LauncherChoice, Rung, Script, Setup, words_of
    from trainpace.run.results import (
        Attempt,
        LadderResult,
        LadderRow,
        entry_of_trial,
        epoch_s,
        job_time,
        noise_scale_of,
        rows_of,
    )
    from trainpace.run.script import (
        ScriptTrial,
        fingerprint,
        keep_files,
        prepare,
        run_script,
        script_job,
        started_by,
    )
    from trainpace.run.slurm import Slurm, SlurmOptions
    from trainpace.run.step_forecasts import (
        NO_FORECAST,
        NO_MODEL,
        NOT_ASKED,
        LadderForecasts,
        MeasuredCompute,
        StepForecast,
    )
    from trainpace.run.trial import (
        EngineName,
        FailedTrial,
        LoaderSettings,
        Trial,
        TrialResult,
        engine_for,
        failure_file,
        job_of,
        run_trial,
        why_no_noise_scale,
    )

__getattr__, __all__ = exports(__name__, __file__)
