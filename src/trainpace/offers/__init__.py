"""Servers, their prices, and their ranking for one job.

Prices come from a dated snapshot, from a list of the user's own machines, or from a refresh.
"""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.offers.match import (
        Binding,
        Closest,
        Job,
        Match,
        Pick,
        Ranking,
        Rejected,
        cheapest_offer,
        near_misses,
        nearest,
        picks,
        rank,
        with_front,
    )
    from trainpace.offers.offer import (
        EGRESS_USD_PER_GB,
        OWN,
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

__getattr__, __all__ = exports(__name__, __file__)
