"""Servers and their prices: a dated snapshot, a user's own machines, a refresh; and the ranking of them for one job."""

from trainpace.offers.offer import Offer, is_stale
from trainpace.offers.snapshot import read_offers, snapshot

__all__ = ["Offer", "is_stale", "read_offers", "snapshot"]
