"""torchrun on this machine: `nproc_per_node` ranks. Source of the options: torch.distributed.run's documentation."""

import importlib.util
from pathlib import Path

from trainpace.errors import TrainpaceError
from trainpace.launch.job import Job
from trainpace.launch.processes import OnThisMachine


class Torchrun(OnThisMachine):
    """The launcher of several ranks on this machine."""

    @property
    def name(self) -> str:
        return "torchrun"

    def check(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise TrainpaceError("torchrun is not here: torch is not installed.", "Install it: pip install torch")

    def command(self, job: Job) -> tuple[str, ...]:
        """--standalone takes a port that is free, so that two jobs do not meet; --local-addr spares it to look up a host
        name that may have no address; --log-dir has its error files in the job's folder, for it does not remove them."""
        if job.nnodes > 1:
            raise TrainpaceError(f"torchrun on this machine cannot start {job.nnodes} nodes.", "Launch it with Slurm.")
        own = f"--standalone --local-addr 127.0.0.1 --nnodes 1 --nproc-per-node {job.nproc_per_node}"
        logs = str(Path(job.folder, "torchrun"))
        return (self.python, "-m", "torch.distributed.run", *own.split(), "--log-dir", logs, *job.program)
