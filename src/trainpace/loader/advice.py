"""What to set, and what it saves: a loader's measured batches laid beside the time that a step computes."""

from msgspec.structs import replace

from trainpace.loader.model import LoaderCost, batch_ms, fewest_workers, limit_of, step_ms
from trainpace.loader.records import LoaderMeasurement
from trainpace.records import Record

WORTH_SHARE = 0.05
"""Share of a step. A change that saves less is not worth making."""
STARTUP_SHARE = 0.05
"""Share of an epoch that starting the workers may take before they should stay alive from epoch to epoch."""


class LoaderAdvice(Record):
    """The fewest workers within 5 % of the best step, against the present number (0 where the user named none).

    `compute_ms` None: only the loader was measured, the times are those of batches, and at least one worker is advised.
    `saved_s_per_epoch` has the workers' start-up taken off. `limit`: what sets the pace then
    (`trainpace.loader.model.limit_of`).
    """

    compute_ms: float | None
    compute_cores: float
    workers_now: int
    workers: int
    now_ms: float
    step_ms: float
    step_ms_by_workers: dict[int, float]
    saved_s_per_epoch: float
    epoch_now_s: float
    startup_s: float
    limit: str
    worth_it: bool
    keep_workers: bool
    offline_ms: float
    offline_share: float


def advise(m: LoaderMeasurement, compute_ms: float | None = None, compute_cores: float = 1.0) -> LoaderAdvice:
    """Weigh the measured numbers of workers for a step that computes for `compute_ms` on `compute_cores` cores."""
    cores_taken = min(compute_cores, m.cores) if compute_ms else 0.0
    compute = compute_ms or 0.0
    steps = {p.workers: step_ms(_as_measured(m, p.workers), compute, p.workers, m.cores, cores_taken) for p in m.points}
    # without workers nothing is loaded while a step computes, which a loader alone does not show
    beside = {w: ms for w, ms in steps.items() if w} if compute_ms is None and m.given_workers else steps
    workers = fewest_workers(beside)
    now = m.given_workers if m.given_workers in steps else 0 if 0 in steps else min(steps)
    assert now is not None
    startup_s = m.point(workers).startup_s
    saved_s = m.steps_per_epoch * (steps[now] - steps[workers]) / 1e3 - (startup_s - m.point(now).startup_s)
    epoch_s = m.steps_per_epoch * steps[now] / 1e3
    worth_it = workers != now and saved_s > WORTH_SHARE * epoch_s
    chosen = workers if worth_it or workers < now else now
    return LoaderAdvice(
        compute_ms=compute_ms, compute_cores=cores_taken, workers_now=now, workers=chosen, now_ms=steps[now],
        step_ms=steps[chosen], step_ms_by_workers=steps, saved_s_per_epoch=saved_s, epoch_now_s=epoch_s,
        startup_s=m.point(chosen).startup_s, worth_it=worth_it,
        keep_workers=chosen > 0 and not m.given_persistent
        and m.point(chosen).startup_s > STARTUP_SHARE * m.steps_per_epoch * steps[chosen] / 1e3,
        limit=limit_of(_as_measured(m, chosen), compute, chosen, m.cores, cores_taken), offline_ms=m.offline_ms,
        offline_share=m.offline_ms / total if (total := sum(s.wall_ms for s in m.stages)) > 0 else 0.0,
    )  # fmt: skip


def _as_measured(m: LoaderMeasurement, workers: int) -> LoaderCost:
    """The cost of a sample under which the model gives the batch time that was measured with so many workers."""
    c = m.cost
    factor = m.point(workers).batch_ms / max(batch_ms(c, workers, m.cores), 1e-9)
    return replace(
        c, sample_wall_ms=c.sample_wall_ms * factor, sample_cpu_ms=c.sample_cpu_ms * factor,
        collate_ms=c.collate_ms * factor, send_ms=c.send_ms * factor, handover_ms=c.handover_ms * factor,
    )  # fmt: skip
