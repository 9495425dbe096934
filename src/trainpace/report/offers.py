"""Offers for the terminal."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from trainpace.offers.offer import Offer, is_stale
from trainpace.offers.snapshot import SNAPSHOT_KNOWN_ON
from trainpace.report.terminal import print_lines, print_table
from trainpace.units import format_usd


def print_offers(offers: Sequence[Offer], today: datetime.date) -> None:
    """One line an offer, and how old the prices are."""
    rows = [
        (o.provider, o.instance_type, o.region, f"{o.count} x {o.device}" if o.count > 1 else o.device,
         format_usd(o.price_usd_per_hour), _spot(o), f"{8 * o.network_gb_per_s:g}" if o.network_gb_per_s else "-",
         o.as_of or "undated")
        for o in offers
    ]  # fmt: skip
    print_table(("provider", "server", "region", "GPUs", "$/h", "spot $/h", "Gbit/s", "as of"), rows, left=4)
    stale = sum(is_stale(offer, today) for offer in offers)
    print_lines(f"{len(offers)} offers. Gbit/s: of a node to others of its kind, where they can be joined.")
    if stale:
        print_lines(
            f"{stale} prices are stale: undated ones were known on {SNAPSHOT_KNOWN_ON} and may be older."
            " `trainpace offers --refresh` fetches today's; --json shows every source."
        )


def _spot(offer: Offer) -> str:
    return "-" if offer.spot_price_usd_per_hour is None else format_usd(offer.spot_price_usd_per_hour)
