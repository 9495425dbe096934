"""What a ranking of servers was asked for, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainpace.core.outcome import Forecast
from trainpace.offers import OWN, SNAPSHOT_KNOWN_ON, Offer
from trainpace.report.phrases import duration, rate_in_words, usd
from trainpace.verbs.training import USUAL_BATCH

if TYPE_CHECKING:
    from trainpace.verbs.match import Matches


def demands(answer: Matches, by: str, cheapest_hour_usd: float | None) -> list[tuple[str, str]]:
    """The rows of a table for who reads the answer without the question. cheapest_hour_usd: of the cheapest option."""
    job, schedule = answer.job, answer.job.schedule
    steps = "" if schedule.max_steps is None else f"{schedule.max_steps:,} steps"
    epochs = (
        ""
        if schedule.epochs is None
        else f"{schedule.epochs:g} epochs of {schedule.samples_per_epoch:,} samples"
    )
    hour = (
        []
        if cheapest_hour_usd is None
        else [("an hour of the cheapest option", usd(cheapest_hour_usd))]
    )
    return [
        ("the job", epochs or steps),
        ("global batch", f"{job.global_batch:,} samples"),
        ("deadline", "none" if job.deadline_s is None else duration(job.deadline_s)),
        ("budget", "none" if job.budget_usd is None else usd(job.budget_usd)),
        ("ranked by", by),
        *hour,
    ]


def steps_in_words(answer: Matches) -> str:
    """The steps, the global batch, and whether anybody asked for it."""
    job, matches = answer.job, answer.ranking.matches
    usual = (
        f" (assumed: {USUAL_BATCH} for each GPU of eight; --global-batch)"
        if answer.usual_batch
        else ""
    )
    samples = f"{job.global_batch:,} samples"
    return (
        f"{matches[0].time.steps:,} steps of {samples}{usual}"
        if matches
        else f"{samples} a step{usual}"
    )


def tokens_in_words(f: Forecast) -> str:
    """What stands after other facts of a server that trains on sequences of tokens; nothing for others."""
    return (
        f", {rate_in_words(f.samples_per_second, f.sequence_length)}" if f.sequence_length else ""
    )


def price_date(offer: Offer) -> str:
    """When the price held; of an undated one when the snapshot was put together."""
    return "your own" if offer.provider == OWN else offer.as_of or f"{SNAPSHOT_KNOWN_ON} or before"
