"""`trainpace precompute`."""

from typing import Annotated

import click

from trainpace.cli.command import View, command, echo_json
from trainpace.verbs.precompute import PrecomputeRequest, Verified, array_script, run
from trainpace.verbs.request import Field
from trainpace.verbs.units import COUNT, DURATION


class PrecomputeView(View):
    """A script for Slurm in place of the work."""

    sbatch: Annotated[int | None, Field("Print a Slurm batch script of N array tasks.", COUNT, metavar="N")] = None
    time: Annotated[float, Field("For --sbatch: of each task.", DURATION)] = 86400.0


@command(PrecomputeRequest, PrecomputeView)
def precompute(request: PrecomputeRequest, view: PrecomputeView) -> int:
    """Compute the samples of TARGET once, in parallel processes, into Parquet shards that ShardDataset reads back.

    TARGET is FILE.py:NAME, a dataset with __len__ and __getitem__, its class, or a function that returns it; of a DataLoader or
    a task (model, loss, optimizer, dataset) its dataset is taken. Samples must be the same whenever they are computed: random
    augmentation stays online, as ShardDataset's transform. What is finished survives a kill, and the same command goes on
    from there. Samples that raise are set aside in bad_samples.jsonl.

    \b
    trainpace precompute faces.py:Faces --out shards --estimate
    trainpace precompute faces.py:Faces --out shards
    trainpace precompute --verify --out shards
    """
    from trainpace.records import to_jsonable
    from trainpace.report import TerminalProgress, print_damage, print_estimate, print_precomputed
    from trainpace.shards import Estimate

    if view.sbatch and not (request.verify or request.repair or request.estimate):
        click.echo(array_script(request, view.sbatch, view.time), nl=False)
        return 0
    answer = run(request, TerminalProgress())
    if view.json:
        echo_json(to_jsonable(answer))
    elif isinstance(answer, Verified):
        print_damage(answer.shards, answer.damaged, request.out)
    elif isinstance(answer, Estimate):
        print_estimate(answer)
    else:
        print_precomputed(answer)
    if isinstance(answer, Verified):
        return 1 if answer.damaged else 0
    return 0 if not isinstance(answer, Estimate) or answer.pays else 1
