"""A ranking of servers as `match --json`."""

import datetime
import math
from typing import Any

from trainpace.offers import Binding, Job, Match, Offer, Ranking, Rejected, is_stale
from trainpace.workload import Workload

SCHEMA_VERSION = 1


def ranking_json(
    workload: Workload,
    ranking: Ranking,
    job: Job,
    close: tuple[Binding, str, Match | Rejected] | None,
    today: datetime.date,
) -> dict[str, Any]:
    """The documented contract of `match --json`: rows in rank order, those that miss, those that cannot, what binds."""
    return {
        "record": "Matches",
        "schema_version": SCHEMA_VERSION,
        "model": workload.model,
        "global_batch": job.global_batch,
        "rows": [_row(match, today, rank) for rank, match in enumerate(ranking.matches, start=1)],
        "missed": [_row(match, today, None) for match in ranking.missed],
        "rejected": [
            {**_offer(r.offer, r.nodes, today), "binding": r.binding, "reason": r.reason, "short_gib": r.short_gib}
            for r in ranking.rejected
        ],
        "binds": None if close is None else _binds(close, today),
    }


def _binds(close: tuple[Binding, str, Match | Rejected], today: datetime.date) -> dict[str, Any]:
    binding, reason, choice = close
    found = _row(choice, today, None) if isinstance(choice, Match) else _offer(choice.offer, choice.nodes, today)
    return {"binding": binding, "reason": reason, "nearest": found}


def _offer(offer: Offer, nodes: int, today: datetime.date) -> dict[str, Any]:
    return {
        "provider": offer.provider, "instance_type": offer.instance_type, "region": offer.region, "gpu": offer.device,
        "gpus_per_node": offer.count, "nodes": nodes, "num_gpus": offer.count * nodes, "price_source": offer.source,
        "price_as_of": offer.as_of, "price_stale": is_stale(offer, today),
    }  # fmt: skip


def _row(m: Match, today: datetime.date, rank: int | None) -> dict[str, Any]:
    f, time = m.forecast, m.time
    assert f.step is not None
    assert f.step_time_interval_ms is not None
    assert f.memory is not None
    price = m.offer.spot_price_usd_per_hour if m.spot else m.offer.price_usd_per_hour
    return {
        "rank": rank, **_offer(m.offer, m.nodes, today), "spot": m.spot, "pareto": m.on_front,
        "price_usd_per_hour": None if price is None else price * m.nodes, "precision": f.execution.precision,
        "batch": f.execution.micro_batch, "accumulation": f.execution.accumulation, "zero_stage": f.execution.zero_stage,
        "shard_size": f.execution.shard_size, "steps": m.steps,
        "step_time_ms": f.step.total_ms, "step_time_ms_low": f.step_time_interval_ms.low,
        "step_time_ms_high": f.step_time_interval_ms.high, "usd_per_step": _finite(m.usd_per_step),
        "hours": _finite(m.mean_hours), "hours_low": _finite(m.hours.low), "hours_high": _finite(m.hours.high),
        "usd": _finite(m.mean_usd), "usd_low": _finite(m.usd.low), "usd_high": _finite(m.usd.high),
        "egress_usd": m.egress_usd, "energy_kwh": None if m.kwh is None else _finite(m.kwh),
        "goodput": time.goodput, "checkpoints": time.checkpoints, "checkpoint_interval_s": time.checkpoint_interval_s,
        "time_s": {name: _finite(getattr(time, name)) for name in time.__struct_fields__ if name.endswith("_s")},
        "peak_memory_gib": f.memory.allocated_gib, "capacity_gib": f.capacity_gib, "provenance": f.provenance,
        "warnings": list(f.warnings),
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
