"""Which launcher starts a setup, as the user asked for it, and whether it is there."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from trainpace.errors import Contradiction
from trainpace.execution import Execution
from trainpace.ladder import Ladder
from trainpace.launch import Launcher, Slurm, SlurmOptions, ThisMachine, Torchrun


class LauncherChoice(NamedTuple):
    """`name` is auto, process, torchrun or slurm; the rest is Slurm's."""

    name: str = "auto"
    slurm: SlurmOptions = SlurmOptions()

    def over(self, base: SlurmOptions) -> LauncherChoice:
        """With a ladder's own Slurm options where the user said nothing else."""
        mine = self.slurm
        slurm = replace(base, partition=mine.partition or base.partition, account=mine.account or base.account,
                        extra=(*base.extra, *mine.extra))  # fmt: skip
        return self._replace(slurm=slurm)

    def of(self, execution: Execution) -> Launcher:
        """The launcher of one setup; auto takes the plainest that has so many processes and nodes."""
        return self._of(execution.nnodes, execution.nproc_per_node)

    def _of(self, nnodes: int, nproc_per_node: int) -> Launcher:
        name = self.name
        if name == "auto":
            name = "slurm" if nnodes > 1 else "torchrun" if nproc_per_node > 1 else "process"
        if name == "slurm":
            return Slurm(options=self.slurm)
        return Torchrun() if name == "torchrun" else ThisMachine()

    def check(self, ladder: Ladder) -> None:
        """Raise TrainpaceError before anything starts, where a launcher that a rung may need is missing, or Contradiction
        where options are given for one that none needs."""
        found = [self._of(n, p) for n in _values(ladder, "nnodes") for p in _values(ladder, "nproc_per_node")]
        if self.slurm != SlurmOptions() and not any(isinstance(launcher, Slurm) for launcher in found):
            raise Contradiction(
                "--partition, --account and --sbatch are Slurm's, and no rung is launched with it.",
                "Add --launcher slurm, or leave them out.",
            )
        for launcher in {launcher.name: launcher for launcher in found}.values():
            launcher.check()


def _values(ladder: Ladder, key: str) -> set[int]:
    """All values of a setting that the start or a rung names; one that is no number is the rung's own failure later."""
    named = [getattr(ladder.start.execution, key)]
    named += [values[key] for rung in ladder.rungs for values in rung.alternatives() if key in values]
    return {value for value in named if isinstance(value, int)}
