"""`precompute`: an expensive preprocessing done once, into shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trainpace.core.host import usable_cores
from trainpace.core.records import Record
from trainpace.verbs.request import (
    COUNT,
    DURATION,
    MILLISECONDS,
    Argument,
    Field,
    Misuse,
    Progress,
    Request,
    within,
)
from trainpace.workload import ModelSpec

if TYPE_CHECKING:
    from trainpace.shards import Damage, Estimate, Precomputed


class PrecomputeRequest(Request):
    target: Annotated[str | None, Argument("The dataset: FILE.py:NAME.")] = None
    out: Annotated[str, Field("Where the shards are, or are to be.", metavar="FOLDER")] = "shards"
    workers: Annotated[int | None, Field("Processes.  [default: as many as cores]", COUNT)] = None
    shard_samples: Annotated[
        int | None, Field("Samples in a shard.  [default: about 64 MiB of them]", COUNT)
    ] = None
    max_bad: Annotated[float, Field("Share that may be set aside.", within("share", 0, 1))] = 0.05
    part: Annotated[
        str | None,
        Field("Compute part I of N.  [default: this task's, in a Slurm array]", metavar="I/N"),
    ] = None
    again: Annotated[bool, Field("Throw away what the folder holds, and begin anew.")] = False
    verify: Annotated[bool, Field("Read every byte of every shard, and name the damaged ones.")] = (
        False
    )
    repair: Annotated[
        bool, Field("Verify, then compute the damaged shards again, and only those.")
    ] = False
    estimate: Annotated[
        bool, Field("Say what it costs and saves, from some samples; compute nothing else.")
    ] = False
    seconds: Annotated[float, Field("Time for `estimate` to compute samples.", DURATION)] = 20.0
    step_ms: Annotated[
        float | None,
        Field(
            "Step time of the training without its data.", MILLISECONDS, needs=("estimate", "batch")
        ),
    ] = None
    batch: Annotated[
        int | None, Field("Samples in that step.", COUNT, needs=("estimate", "step_ms"))
    ] = None
    epochs: Annotated[float | None, Field("Epochs that will be trained.", needs=("estimate",))] = (
        None
    )


class Verified(Record):
    """How many shards a folder should have, and which of them are damaged."""

    shards: int
    damaged: tuple[Damage, ...]


def run(request: PrecomputeRequest, progress: Progress) -> Precomputed | Estimate | Verified:
    """`Verified` with `verify` (or `repair` where nothing is damaged), `Estimate` with `estimate`, else `Precomputed`."""
    from trainpace import shards

    r, folder = request, Path(request.out)
    target, part = r.target, r.part
    damaged: list[Damage] = []
    if r.verify or r.repair:
        plan, damaged = shards.verify(folder)
        if r.verify or not damaged:
            return Verified(shards=plan.shards, damaged=tuple(damaged))
        for shard in damaged:
            progress.note(f"{shard.file}: {shard.problem}; computed again")
        target, part = target or plan.target, "1/1"
        if not Path(ModelSpec.of(target).path).is_file():
            raise Misuse(
                f"The shards were computed by {target}, which no longer exists.",
                "Give its new `target`.",
            )
    target, workers = _target(target), r.workers or usable_cores()
    if r.estimate:
        step_s = None if r.step_ms is None else r.step_ms / 1e3
        return shards.estimate(
            target, r.out, workers, r.seconds, step_s=step_s, batch=r.batch or 1, epochs=r.epochs
        )
    number, parts = shards.part_of(part, os.environ)
    if r.again and parts > 1:
        raise Misuse("`again` cannot be combined with one part.", "Empty the folder first.")
    settings = shards.Settings(
        target=target,
        folder=r.out,
        workers=workers,
        shard_samples=r.shard_samples,
        max_bad=r.max_bad,
        part=number,
        parts=parts,
        again=r.again,
        repair=tuple(shard.number for shard in damaged),
    )
    with progress.work("precomputing", unit="samples") as work:
        try:
            return shards.precompute(
                settings,
                lambda p: work.to(p.done, p.wanted, f"{p.bad:,} bad" if p.bad else "", p.new),
                lambda text: work.say(f"note: {text}"),
            )
        except KeyboardInterrupt:
            work.say("note: finished shards are kept; the same command goes on from there")
            raise


def array_script(request: PrecomputeRequest, parts: int, limit_s: float) -> str:
    """A Slurm batch script of `parts` array tasks, each of which may take `limit_s`."""
    from trainpace.shards import array_script

    return array_script(
        _target(request.target),
        request.out,
        parts,
        request.workers or usable_cores(),
        limit_s / 3600,
    )


def _target(target: str | None) -> str:
    if target is None:
        raise Misuse("Give a `target`: FILE.py:NAME.")
    return target
