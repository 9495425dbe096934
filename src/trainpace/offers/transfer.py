"""Bringing the data to the servers: the time that they wait for it, and what leaving another cloud costs."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from trainpace.forecast.job import JobConditions

EGRESS_USD_PER_GB = {"aws": 0.09, "gcp": 0.12, "azure": 0.087, "oci": 0.0085}
"""List prices of the first paid tier to the internet from North America and Europe, on the providers' pricing pages in 2025.
Others charge nothing for it, or do not say."""


class Transfer(NamedTuple):
    """The job's conditions with the speed of this way, and the dollars for it."""

    conditions: JobConditions
    egress_usd: float


def transfer_of(provider: str, data_from: str, conditions: JobConditions) -> Transfer:
    """Data inside the provider's own storage come at its speed and cost nothing to move; others come over the internet."""
    if conditions.data_gb and data_from.casefold() == provider.casefold():
        return Transfer(replace(conditions, download_gb_per_s=conditions.storage_gb_per_s), 0.0)
    return Transfer(conditions, conditions.data_gb * EGRESS_USD_PER_GB.get(data_from.casefold(), 0.0))
