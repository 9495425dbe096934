"""One server that can be rented or is there already."""

import datetime
import math

from trainpace.errors import TrainpaceError
from trainpace.records import Record

STALE_AFTER_DAYS = 90
OWN = "own"
"""The provider of a user's own machines."""


class Offer(Record):
    """A server with its price. `device` is a name in the catalogue, `count` its devices.

    Prices are for the whole server and an hour. `network_gb_per_s` is the node's bandwidth in one direction to nodes of its
    kind; None: it stands alone. `source` says where the price comes from, `as_of` (YYYY-MM-DD) when it held; None:
    nobody said. `electricity_usd_per_kwh` is paid on top, for machines of one's own.
    """

    provider: str
    instance_type: str
    device: str
    count: int
    price_usd_per_hour: float
    region: str = ""
    gpu_memory_gib: float | None = None
    vcpus: int | None = None
    ram_gib: float | None = None
    spot_price_usd_per_hour: float | None = None
    network_gb_per_s: float | None = None
    network_source: str = ""
    most_nodes: int | None = None
    electricity_usd_per_kwh: float = 0.0
    source: str = ""
    as_of: str | None = None

    def __post_init__(self) -> None:
        name = f"{self.provider} {self.instance_type}".strip()
        if not 1 <= self.count <= 1024:
            raise TrainpaceError(f"{name}: a server of {self.count} devices cannot be right.")
        for field in ("price_usd_per_hour", "spot_price_usd_per_hour", "electricity_usd_per_kwh"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and 0 <= value <= 1e6):
                raise TrainpaceError(f"{name}: {field} is {value}; it must be from 0 to 1e6 dollars.")
        if self.network_gb_per_s is not None and not 0 < self.network_gb_per_s <= 1e6:
            raise TrainpaceError(f"{name}: network_gb_per_s is {self.network_gb_per_s}; it must be above 0.")
        if self.most_nodes is not None and self.most_nodes < 1:
            raise TrainpaceError(f"{name}: nodes is {self.most_nodes}; it must be a whole number from 1.")
        if self.as_of is not None:
            try:
                datetime.date.fromisoformat(self.as_of)
            except ValueError:
                raise TrainpaceError(f"{name}: as_of is {self.as_of!r}; write it as 2026-11-20.") from None

    @property
    def can_join(self) -> bool:
        """Can several of these make one cluster?"""
        return self.network_gb_per_s is not None


def is_stale(offer: Offer, today: datetime.date) -> bool:
    """Is the price older than STALE_AFTER_DAYS, or undated? What a user says of their own machines holds."""
    if offer.provider == OWN:
        return False
    return offer.as_of is None or (today - datetime.date.fromisoformat(offer.as_of)).days > STALE_AFTER_DAYS
