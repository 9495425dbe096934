"""Start a program on this machine or a cluster, behind one contract, on engines that exist."""

from typing import TYPE_CHECKING

from trainpace.lazy import exports

if TYPE_CHECKING:
    from trainpace.launch.engines.rules import engine_for, why_no_noise_scale
    from trainpace.launch.job import Ended, Job, Launcher, OnLine
    from trainpace.launch.processes import ThisMachine, file_name
    from trainpace.launch.script import ScriptTrial, run_script
    from trainpace.launch.slurm import Slurm
    from trainpace.launch.slurm_script import SlurmOptions
    from trainpace.launch.torchrun import Torchrun
    from trainpace.launch.trial import EngineName, FailedTrial, LoaderSettings, Trial, TrialResult
    from trainpace.launch.trial_worker import failure_file
    from trainpace.launch.trials import job_of, run_trial

__getattr__, __all__ = exports(__name__, __file__)
