"""Data paths of a training: its current loader, more workers, and offline preprocessing."""

from collections.abc import Callable, Mapping

from trainpace.plan.changes import DataPath

MOST_WORKERS = 16


def data_paths(
    now: int,
    ms_per_sample: Callable[[int, float], float],
    fewest_workers: Callable[[Mapping[int, float]], int],
    collate_ms: float,
    offline_share: float | None,
) -> tuple[DataPath, ...]:
    """Return the current data path, then paths with more workers and with offline preprocessing.

    Args:
        now: Current number of loader workers.
        ms_per_sample: Function of the number of workers and the share of preprocessing that stays
            online. Returns the time per sample in ms.
        fewest_workers: Function of the times by number of workers. Returns the number beyond which
            they hardly improve.
        collate_ms: Time per sample in ms to collate prepared samples into a batch.
        offline_share: Share of the preprocessing that can be done offline. None means unknown and
            counts as all of it.
    """

    def path(workers: int, online: float = 1.0) -> DataPath:
        return DataPath(
            workers=workers,
            ms_per_sample=ms_per_sample(workers, online),
            beside=workers > 0,
            precomputed=online < 1,
        )

    def by_workers(online: float) -> tuple[dict[int, DataPath], int]:
        paths = {workers: path(workers, online) for workers in range(1, MOST_WORKERS + 1)}
        return paths, fewest_workers({w: p.ms_per_sample for w, p in paths.items()})

    paths, enough = by_workers(1.0)
    more = [w for w in dict.fromkeys((1, 2, 4, 8, enough)) if now < w <= enough]
    online = (path(now), *(paths[w] for w in more))
    if offline_share == 0:
        return online
    if offline_share in (None, 1):
        workers = max(1, now)
        whole = DataPath(workers=workers, ms_per_sample=collate_ms / workers, precomputed=True)
        return (*online, whole)
    rest, few = by_workers(1 - offline_share)
    counts = dict.fromkeys((max(1, min(now, MOST_WORKERS)), max(now, few)))
    return (*online, *(rest[w] for w in counts if w in rest))
