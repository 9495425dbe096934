"""Bringing the data to the servers: the time that they wait for it, and what leaving another cloud costs."""

from msgspec.structs import replace

from trainpace.job import JobConditions

EGRESS_USD_PER_GB = {"aws": 0.09, "gcp": 0.12, "azure": 0.087, "oci": 0.0085}
"""List prices of the first paid tier to the internet from North America and Europe, on the providers' pricing pages in 2025.
Others charge nothing for it, or do not say."""


def transfer_of(provider: str, data_from: str, conditions: JobConditions) -> JobConditions:
    """The conditions with the speed and the dollars of bringing the data to a provider.

    Data inside the provider's own storage come at its speed and cost nothing to move; others come over the internet.
    """
    if not conditions.data_gb:
        return conditions
    if data_from.casefold() == provider.casefold():
        return replace(conditions, download_gb_per_s=conditions.storage_gb_per_s, egress_usd=0.0)
    return replace(conditions, egress_usd=conditions.data_gb * EGRESS_USD_PER_GB.get(data_from.casefold(), 0.0))
