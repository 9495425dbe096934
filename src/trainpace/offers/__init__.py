"""Servers and their prices: a dated snapshot, a user's own machines, a refresh; and the ranking of them for one job."""

from trainpace.offers.match import (
    Binding,
    Job,
    Match,
    Ranking,
    Rejected,
    cheapest_in_time,
    fastest_within_budget,
    nearest,
    rank,
)
from trainpace.offers.offer import (
    EGRESS_USD_PER_GB,
    SNAPSHOT_KNOWN_ON,
    Offer,
    is_stale,
    notes_on,
    parse_machines,
    read_offers,
    refreshed,
    snapshot,
    write_offers,
)

__all__ = [
    "EGRESS_USD_PER_GB", "SNAPSHOT_KNOWN_ON", "Binding", "Job", "Match", "Offer", "Ranking", "Rejected",
    "cheapest_in_time", "fastest_within_budget", "is_stale", "nearest", "notes_on", "parse_machines", "rank",
    "read_offers", "refreshed", "snapshot", "write_offers",
]  # fmt: skip
