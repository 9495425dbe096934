"""How samples may reach a training: its loader as it is, with more workers, and with what can be prepared offline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from trainpace.core.errors import UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster
from trainpace.core.intake import read_json
from trainpace.plan import NO_WAIT, DataPath
from trainpace.verbs.request import Misuse

if TYPE_CHECKING:
    from trainpace.measure import LoaderCost
    from trainpace.verbs.plan import PlanRequest, Present

MOST_WORKERS = 16
ALL_OFFLINE = "all of a sample's preparation could be done offline (--offline-share, or --loader)"


def data_paths(
    request: PlanRequest, present: Present, start: Execution, cluster: Cluster
) -> tuple[DataPath, ...]:
    """The present data path, then more workers and samples prepared offline, by the pipeline model of `loader`."""
    from trainpace.diagnose import HANDOVER_MS, SEND_MS, loader_cost
    from trainpace.measure import LoaderCost, batch_ms, fewest_workers

    r, rank = request, present.rank
    now = present.pick(
        "dataloader_workers", r.workers, rank.loader.workers if rank and rank.loader else None
    )
    cost = None if rank is None else loader_cost(rank)
    share, cores = r.offline_share, r.cores or (rank.cpus if rank is not None else None)
    if r.loader is not None:
        cost, share, measured_cores = _loader_file(r.loader)
        cores = r.cores or measured_cores
    if r.sample_ms is not None:
        cost = LoaderCost(
            sample_wall_ms=r.sample_ms,
            sample_cpu_ms=r.sample_ms,
            collate_ms=0.0,
            batch_size=start.micro_batch,
        )
    if cost is None or now is None:
        if r.workers is not None or r.cores is not None:
            raise Misuse(
                "`workers` and `cores` need `sample_ms`, `loader`, or a recording that has it."
            )
        if cost is not None:
            raise Misuse("Say with `workers` how many loader workers there are now.")
        if share is not None:
            raise Misuse("`offline_share` needs `sample_ms`, or a recording that has it.")
        return (NO_WAIT,)
    if cores is None:
        raise Misuse("`sample_ms` needs `cores`, the cores of a node that its loaders may use.")
    cores_of_a_rank = max(1.0, cores / cluster.devices_per_node)
    sent = replace(
        cost, send_ms=cost.send_ms or SEND_MS, handover_ms=cost.handover_ms or HANDOVER_MS
    )

    def path(workers: int, left: float = 1.0) -> DataPath:
        """`left`: the share of a sample's preparation that stays in training."""
        c = sent if workers else cost
        c = replace(c, sample_wall_ms=left * c.sample_wall_ms, sample_cpu_ms=left * c.sample_cpu_ms)
        ms = batch_ms(c, workers, cores_of_a_rank)
        return DataPath(
            workers=workers,
            ms_per_sample=ms / cost.batch_size,
            beside=workers > 0,
            precomputed=left < 1,
        )

    paths = {workers: path(workers) for workers in range(1, MOST_WORKERS + 1)}
    enough = fewest_workers({workers: p.ms_per_sample for workers, p in paths.items()})
    counts = dict.fromkeys(w for w in (1, 2, 4, 8, enough) if w <= enough and w != now)
    present_paths = (path(now), *(paths[w] for w in counts if w > now))
    if share == 0:
        return present_paths
    if share is None or share == 1:
        workers = max(1, now)
        whole = DataPath(
            workers=workers,
            ms_per_sample=cost.collate_ms / cost.batch_size / workers,
            precomputed=True,
        )
        return (*present_paths, whole)
    rest = {workers: path(workers, 1 - share) for workers in range(1, MOST_WORKERS + 1)}
    few = fewest_workers({workers: p.ms_per_sample for workers, p in rest.items()})
    return (
        *present_paths,
        *(
            rest[w]
            for w in dict.fromkeys((max(1, min(now, MOST_WORKERS)), max(now, few)))
            if w in rest
        ),
    )


def _loader_file(path: str) -> tuple[LoaderCost, float, int]:
    """(cost, share that can be offline, cores) from the answer of `trainpace loader --json`."""
    from trainpace.measure import LoaderCost

    try:
        answer = read_json(path)
        cost = msgspec.convert(answer["cost"], LoaderCost)
        share, cores = answer["advice"]["offline_share"], answer["cores"]
        if not (0 <= share <= 1 and 1 <= cores <= 1e6):
            raise ValueError
    except (msgspec.ValidationError, KeyError, TypeError, ValueError):
        raise UnreadableInput(f"{path} is no answer of trainpace loader --json.") from None
    return cost, share, cores
