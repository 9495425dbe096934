"""Start a program on this machine or a cluster, behind one contract, on engines that exist."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.launch.job import Ended, Job, Launcher, Starts, ThisMachine, Torchrun, file_name
    from trainpace.launch.script import ScriptTrial, run_script, script_job
    from trainpace.launch.slurm import Slurm
    from trainpace.launch.slurm_script import SlurmOptions
    from trainpace.launch.trial import (
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
